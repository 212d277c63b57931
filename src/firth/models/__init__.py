"""Batch to hidden states, logits, loss."""

from firth.models.config import (
    Auxiliary,
    Choices,
    Classes,
    Embedding,
    Extra,
    Head,
    LMHead,
    ModelConfig,
    Score,
    Span,
    Tags,
    TaskHead,
    Verdict,
    with_extras,
)
from firth.models.distill import Distillation, check_pair, distilled, inherit
from firth.models.grow import grow_vocabulary
from firth.models.mix import ScalarMix
from firth.models.model import (
    Decoder,
    Encoder,
    EncoderDecoder,
    Model,
    Output,
    count_parameters,
    framing,
    make_model,
)
from firth.models.presets import GOOD_FOR, PRESETS, preset
from firth.models.sizes import flops_per_token
from firth.models.stack import Stack
from firth.models.static import warm_start
from firth.models.task_heads import head_for, with_classes
from firth.models.weights import (
    OWN,
    family_of,
    from_hf_config,
    load_model,
    load_weights,
    read_config,
    read_tensors,
    to_hf_config,
    with_vocabulary,
    write_model,
)

__all__ = [
    "GOOD_FOR",
    "OWN",
    "PRESETS",
    "Auxiliary",
    "Choices",
    "Classes",
    "Decoder",
    "Distillation",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "Extra",
    "Head",
    "LMHead",
    "Model",
    "ModelConfig",
    "Output",
    "ScalarMix",
    "Score",
    "Span",
    "Stack",
    "Tags",
    "TaskHead",
    "Verdict",
    "check_pair",
    "count_parameters",
    "distilled",
    "family_of",
    "flops_per_token",
    "framing",
    "from_hf_config",
    "grow_vocabulary",
    "head_for",
    "inherit",
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
    "with_vocabulary",
    "write_model",
]
