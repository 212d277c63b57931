"""A model and data to metrics."""

from firth.evaluate.card import write_card
from firth.evaluate.cloze import choice, cloze
from firth.evaluate.context import compare_contexts
from firth.evaluate.embed import embed_texts, word_in_context, words_in_texts
from firth.evaluate.evaluate import EVALUATIONS, evaluate
from firth.evaluate.export import largest_difference
from firth.evaluate.likelihood import Likelihood, likelihoods, perplexity
from firth.evaluate.minimal_pairs import minimal_pairs
from firth.evaluate.outcome import Outcome
from firth.evaluate.report import describe_run, seed_table, write_run_report
from firth.evaluate.suite import evaluate_suite, table
from firth.evaluate.vectors import WordVectors, analogy, read_vectors, word_similarity, word_vectors

__all__ = [
    "EVALUATIONS",
    "Likelihood",
    "Outcome",
    "WordVectors",
    "analogy",
    "choice",
    "cloze",
    "compare_contexts",
    "describe_run",
    "embed_texts",
    "evaluate",
    "evaluate_suite",
    "largest_difference",
    "likelihoods",
    "minimal_pairs",
    "perplexity",
    "read_vectors",
    "seed_table",
    "table",
    "word_in_context",
    "word_similarity",
    "word_vectors",
    "words_in_texts",
    "write_card",
    "write_run_report",
]
