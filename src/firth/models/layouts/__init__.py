"""How each family of `transformers` names its tensors and settings."""

from firth.models.layouts.families import FAMILIES, LAYOUTS
from firth.models.layouts.layout import OWN_EXTRAS, OWN_HEAD, Answers, Layout, Rule

__all__ = ["FAMILIES", "LAYOUTS", "OWN_EXTRAS", "OWN_HEAD", "Answers", "Layout", "Rule"]
