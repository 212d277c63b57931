"""Text input: documents for pretraining and labelled examples for tasks."""

from firth.text.corpus import CORPUS_OPTIONS, Corpus
from firth.text.documents import AnswerSpan, Document, Example
from firth.text.filters import HELD_OUT_FRACTION, ExactDedup, TextCleaner, is_held_out, text_fingerprint
from firth.text.formats.glue import GlueTask, detect_glue_task, find_glue_suite
from firth.text.formats.superglue import SuperGlueTask, detect_superglue_task, find_superglue_suite
from firth.text.labelled import read_labelled
from firth.text.labelled_row import RowNotes
from firth.text.leak_detection import Leak, find_leaks
from firth.text.minhash import MinHashIndex
from firth.text.salient_spans import SalientSpanFinder, load_salient_finder, salient_finder_name
from firth.text.suite import SuiteTask, read_suite

__all__ = [
    "CORPUS_OPTIONS",
    "HELD_OUT_FRACTION",
    "AnswerSpan",
    "Corpus",
    "Document",
    "ExactDedup",
    "Example",
    "GlueTask",
    "Leak",
    "MinHashIndex",
    "RowNotes",
    "SalientSpanFinder",
    "SuiteTask",
    "SuperGlueTask",
    "TextCleaner",
    "detect_glue_task",
    "detect_superglue_task",
    "find_glue_suite",
    "find_leaks",
    "find_superglue_suite",
    "is_held_out",
    "load_salient_finder",
    "read_labelled",
    "read_suite",
    "salient_finder_name",
    "text_fingerprint",
]
