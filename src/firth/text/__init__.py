"""What a person has: documents and labelled examples."""

from firth.text.clean import HELD_OUT, Unique, fingerprint, held_out
from firth.text.corpus import Corpus
from firth.text.kinds import Document, Example
from firth.text.labelled import read_labelled
from firth.text.salient import Salient, load_salient, salient_name

__all__ = [
    "HELD_OUT",
    "Corpus",
    "Document",
    "Example",
    "Salient",
    "Unique",
    "fingerprint",
    "held_out",
    "load_salient",
    "read_labelled",
    "salient_name",
]
