"""How each family of `transformers` names its tensors and settings."""

from firth.models.hf.layout import EXTRAS_KEY, HEAD_KEY, HFLayout, TaskArchitecture, TensorRule
from firth.models.hf.registry import FAMILY_LAYOUTS, MODEL_TYPE_LAYOUTS

__all__ = [
    "EXTRAS_KEY",
    "FAMILY_LAYOUTS",
    "HEAD_KEY",
    "MODEL_TYPE_LAYOUTS",
    "HFLayout",
    "TaskArchitecture",
    "TensorRule",
]
