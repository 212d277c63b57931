"""LSTM stacks: AWD-LSTM (ULMFiT), ELMo, biLSTM, and the seq2seq encoder-decoder with attention."""

from firth.models.recurrent.awd import AWDLSTMStack
from firth.models.recurrent.crf import CRF
from firth.models.recurrent.elmo import CharCNNEmbedding, ELMoStack
from firth.models.recurrent.features import FeatureEncoder
from firth.models.recurrent.lstm import BiLSTMStack, RecurrentStack
from firth.models.recurrent.seq2seq import Seq2SeqDecoder, Seq2SeqEncoder

__all__ = [
    "CRF",
    "AWDLSTMStack",
    "BiLSTMStack",
    "CharCNNEmbedding",
    "ELMoStack",
    "FeatureEncoder",
    "RecurrentStack",
    "Seq2SeqDecoder",
    "Seq2SeqEncoder",
]
