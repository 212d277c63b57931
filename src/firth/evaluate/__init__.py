"""Score models: likelihoods, tasks without fine-tuning, suites, vectors, reports."""

from firth.evaluate.card import write_model_card
from firth.evaluate.cloze import evaluate_choice, evaluate_cloze
from firth.evaluate.context import compare_contexts
from firth.evaluate.embed import embed_texts, embed_words_in_texts, evaluate_word_in_context
from firth.evaluate.evaluate import EVALUATION_TASKS, evaluate
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.export import max_logit_difference
from firth.evaluate.likelihood import Likelihood, evaluate_perplexity, text_likelihoods
from firth.evaluate.minimal_pairs import evaluate_minimal_pairs
from firth.evaluate.report import seed_table, write_run_report, write_run_report_and_card
from firth.evaluate.suite import evaluate_suite, suite_table
from firth.evaluate.vectors import (
    WordVectors,
    evaluate_analogies,
    evaluate_word_similarity,
    load_word_vectors,
    read_vectors,
)

__all__ = [
    "EVALUATION_TASKS",
    "Evaluation",
    "Likelihood",
    "WordVectors",
    "compare_contexts",
    "embed_texts",
    "embed_words_in_texts",
    "evaluate",
    "evaluate_analogies",
    "evaluate_choice",
    "evaluate_cloze",
    "evaluate_minimal_pairs",
    "evaluate_perplexity",
    "evaluate_suite",
    "evaluate_word_in_context",
    "evaluate_word_similarity",
    "load_word_vectors",
    "max_logit_difference",
    "read_vectors",
    "seed_table",
    "suite_table",
    "text_likelihoods",
    "write_model_card",
    "write_run_report",
    "write_run_report_and_card",
]
