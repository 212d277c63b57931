"""What a person has: documents and labelled examples."""

from firth.text.clean import HELD_OUT, Cleaning, Unique, fingerprint, held_out
from firth.text.corpus import READING, Corpus
from firth.text.glue import GlueTask, glue_suite, glue_task
from firth.text.kinds import Answer, Document, Example
from firth.text.labelled import read_labelled
from firth.text.leaks import Leak, leaks
from firth.text.near import NearDuplicates
from firth.text.row import Notes
from firth.text.salient import Salient, load_salient, salient_name
from firth.text.suite import SuiteTask, read_suite
from firth.text.superglue import SuperGlueTask, superglue_suite, superglue_task

__all__ = [
    "HELD_OUT",
    "READING",
    "Answer",
    "Cleaning",
    "Corpus",
    "Document",
    "Example",
    "GlueTask",
    "Leak",
    "NearDuplicates",
    "Notes",
    "Salient",
    "SuiteTask",
    "SuperGlueTask",
    "Unique",
    "fingerprint",
    "glue_suite",
    "glue_task",
    "held_out",
    "leaks",
    "load_salient",
    "read_labelled",
    "read_suite",
    "salient_name",
    "superglue_suite",
    "superglue_task",
]
