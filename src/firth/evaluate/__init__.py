"""Score models: likelihoods, tasks without fine-tuning, suites, vectors, reports."""

from firth.evaluate.context import compare_contexts
from firth.evaluate.embed import embed_texts
from firth.evaluate.evaluate import evaluate
from firth.evaluate.report import seed_table, write_run_report_and_card
from firth.evaluate.suite import evaluate_suite, suite_table
from firth.evaluate.vectors import WordVectors, evaluate_word_similarity, load_word_vectors, read_vectors

__all__ = [
    "WordVectors",
    "compare_contexts",
    "embed_texts",
    "evaluate",
    "evaluate_suite",
    "evaluate_word_similarity",
    "load_word_vectors",
    "read_vectors",
    "seed_table",
    "suite_table",
    "write_run_report_and_card",
]
