"""Presets of the LSTM families: ULMFiT, ELMo, biLSTM and seq2seq with and without attention."""

from __future__ import annotations

from typing import Any

from firth.models.config import (
    AWDLSTMConfig,
    BiLSTMConfig,
    ELMoConfig,
    LayerNormConfig,
    LMHead,
    MLPConfig,
    ModelConfig,
    NoPosition,
    Seq2SeqConfig,
    UniformInit,
)


def make_recurrent_config(family: str, **fields: Any) -> ModelConfig:
    """Return the config of an LSTM model; the fields of Transformer blocks have placeholder values."""
    plain: dict[str, Any] = dict(
        family=family,
        num_heads=1,
        mlp=MLPConfig(1),
        position=NoPosition(),
        norm=LayerNormConfig(1e-5),
        init=UniformInit(),
    )
    return ModelConfig(**plain | dict(attention_dropout=0.0) | fields)


def ulmfit(
    num_layers: int, dim: int, hidden_size: int, vocab_size: int = 30002, dropout_scale: float = 1.0
) -> ModelConfig:
    """Howard & Ruder 2018: AWD-LSTM over words. `dropout_scale` multiplies all published dropout probabilities."""
    full = AWDLSTMConfig()
    rates = {name: dropout_scale * getattr(full, name) for name in vars(full) if name.endswith("_drop")}
    return make_recurrent_config(
        "ulmfit",
        architecture="decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        head=LMHead(bias=True),
        dropout=0.0,
        recurrent=AWDLSTMConfig(hidden_size, **rates),
    )


def elmo(
    num_layers: int, hidden_size: int, proj_size: int, vocab_size: int = 793471, num_sampled: int = 8192, **changes: Any
) -> ModelConfig:
    """Peters et al. 2018: character CNN, a forward and a backward LSTM LM, sampled softmax."""
    return make_recurrent_config(
        "elmo",
        architecture="encoder",
        vocab_size=vocab_size,
        dim=2 * proj_size,
        num_layers=num_layers,
        head=LMHead(tied=False, bias=True, dim=proj_size, num_sampled=num_sampled),
        init=UniformInit(1.0),
        recurrent=ELMoConfig(hidden_size, proj_size, **changes),
    )


def bilstm(num_layers: int, dim: int, vocab_size: int = 30002) -> ModelConfig:
    """The usual baseline until 2018: word embeddings and a bidirectional LSTM."""
    return make_recurrent_config(
        "bilstm",
        architecture="encoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        head=LMHead(bias=True),
        dropout=0.3,
        recurrent=BiLSTMConfig(dim // 2),
    )


def rnn(num_layers: int, dim: int, attention: bool, vocab_size: int = 30002) -> ModelConfig:
    """Seq2seq LSTM: Sutskever et al. 2014; with attention Bahdanau et al. 2015."""
    return make_recurrent_config(
        "rnn-attention" if attention else "rnn",
        architecture="encoder-decoder",
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        head=LMHead(bias=True),
        dropout=0.2,
        recurrent=Seq2SeqConfig(dim // 2, attention),
    )


ELMO_TINY_FILTERS = ((1, 8), (2, 8), (3, 16), (4, 32), (5, 64))  # (width, channels)
RECURRENT_PRESETS: dict[str, ModelConfig] = {
    "ulmfit-tiny": ulmfit(3, 128, 256, dropout_scale=0.2),
    "ulmfit-base": ulmfit(3, 400, 1150),
    "elmo-tiny": elmo(2, 128, 64, 30002, num_sampled=512, filters=ELMO_TINY_FILTERS, num_highways=1),
    "elmo-small": elmo(2, 1024, 128, num_highways=1),
    "elmo-medium": elmo(2, 2048, 256, num_highways=1),
    "elmo-base": elmo(2, 4096, 512),
    "bilstm-tiny": bilstm(1, 128),
    "bilstm-base": bilstm(2, 600),
    "rnn-tiny": rnn(1, 128, attention=False),
    "rnn-attention-tiny": rnn(1, 128, attention=True),
    "rnn-attention-base": rnn(1, 1000, attention=True),
}
RECURRENT_FAMILY_DESCRIPTIONS: dict[str, str] = {
    "ulmfit": "classification from few examples; text generation",
    "elmo": "contextual word features from characters",
    "bilstm": "the baseline before pretraining: classification, tagging",
    "rnn": "text to text, without attention (2014)",
    "rnn-attention": "text to text, with attention (2015)",
}
