"""Documents to rows of token ids."""

from firth.tokens.characters import Characters, characters
from firth.tokens.kinds import KINDS
from firth.tokens.mixing import Mix, MixedShards, MixedSource
from firth.tokens.pairs import PairSource
from firth.tokens.prepare import prepare
from firth.tokens.rows import Frame, Rows, RowSource, Source
from firth.tokens.shards import Prepared, Shards, is_shards, open_shards
from firth.tokens.stream import StreamSource
from firth.tokens.tokenizer import Tokenizer, Vocabulary, load_tokenizer
from firth.tokens.train import retrain_tokenizer, train_tokenizer, word_tokenizer

__all__ = [
    "KINDS",
    "Characters",
    "Frame",
    "Mix",
    "MixedShards",
    "MixedSource",
    "PairSource",
    "Prepared",
    "RowSource",
    "Rows",
    "Shards",
    "Source",
    "StreamSource",
    "Tokenizer",
    "Vocabulary",
    "characters",
    "is_shards",
    "load_tokenizer",
    "open_shards",
    "prepare",
    "retrain_tokenizer",
    "train_tokenizer",
    "word_tokenizer",
]
