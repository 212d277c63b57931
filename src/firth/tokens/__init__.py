"""Documents to rows of token ids."""

from firth.tokens.builders import TOKENIZER_KINDS
from firth.tokens.dataset import PackedDataset, RowDataset, Rows
from firth.tokens.mixing import MixConfig, MixedDataset, MixedShards
from firth.tokens.prepare import prepare
from firth.tokens.segment_pairs import SegmentPairDataset, SegmentStreamDataset, reused_length
from firth.tokens.sentence_pairs import SentencePairDataset
from firth.tokens.shards import Shards, ShardSet, is_shards_folder, open_shards
from firth.tokens.stream import StreamDataset
from firth.tokens.template import SequenceTemplate
from firth.tokens.tokenizer import TokenIds, Tokenizer, Vocabulary, load_tokenizer
from firth.tokens.train import extend_word_tokenizer, retrain_tokenizer, tokenizer_from_words, train_tokenizer

__all__ = [
    "TOKENIZER_KINDS",
    "MixConfig",
    "MixedDataset",
    "MixedShards",
    "PackedDataset",
    "RowDataset",
    "Rows",
    "SegmentPairDataset",
    "SegmentStreamDataset",
    "SentencePairDataset",
    "SequenceTemplate",
    "ShardSet",
    "Shards",
    "StreamDataset",
    "TokenIds",
    "Tokenizer",
    "Vocabulary",
    "extend_word_tokenizer",
    "is_shards_folder",
    "load_tokenizer",
    "open_shards",
    "prepare",
    "retrain_tokenizer",
    "reused_length",
    "tokenizer_from_words",
    "train_tokenizer",
]
