"""Batch to hidden states, logits, loss."""

from firth.models.config import Classes, Extra, Head, LMHead, ModelConfig, with_extras
from firth.models.model import (
    Decoder,
    Encoder,
    EncoderDecoder,
    Model,
    Output,
    count_parameters,
    framing,
    make_model,
    with_classes,
)
from firth.models.presets import PRESETS, preset
from firth.models.static import warm_start
from firth.models.weights import (
    OWN,
    family_of,
    from_hf_config,
    load_model,
    load_weights,
    read_config,
    read_tensors,
    to_hf_config,
    write_model,
)

__all__ = [
    "OWN",
    "PRESETS",
    "Classes",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Extra",
    "Head",
    "LMHead",
    "Model",
    "ModelConfig",
    "Output",
    "count_parameters",
    "family_of",
    "framing",
    "from_hf_config",
    "load_model",
    "load_weights",
    "make_model",
    "preset",
    "read_config",
    "read_tensors",
    "to_hf_config",
    "warm_start",
    "with_classes",
    "with_extras",
    "write_model",
]
