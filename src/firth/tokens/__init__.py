"""Documents to rows of token ids."""

from firth.tokens.pairs import PairSource
from firth.tokens.rows import Frame, Rows, RowSource, Source
from firth.tokens.shards import Prepared, Shards, is_shards, open_shards, prepare
from firth.tokens.tokenizer import KINDS, Tokenizer, Vocabulary, load_tokenizer, train_tokenizer

__all__ = [
    "KINDS",
    "Frame",
    "PairSource",
    "Prepared",
    "RowSource",
    "Rows",
    "Shards",
    "Source",
    "Tokenizer",
    "Vocabulary",
    "is_shards",
    "load_tokenizer",
    "open_shards",
    "prepare",
    "train_tokenizer",
]
