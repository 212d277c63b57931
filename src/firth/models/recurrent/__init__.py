"""LSTMs in place of blocks: AWD-LSTM, ELMo, the biLSTM, and an encoder-decoder of before the Transformer."""

from firth.models.recurrent.awd import AWDStack
from firth.models.recurrent.crf import CRF
from firth.models.recurrent.elmo import BothWays, Spelling
from firth.models.recurrent.features import FeatureReader
from firth.models.recurrent.lstm import Recurrence, TwoWays
from firth.models.recurrent.seq2seq import Reader, Writer

__all__ = ["CRF", "AWDStack", "BothWays", "FeatureReader", "Reader", "Recurrence", "Spelling", "TwoWays", "Writer"]
