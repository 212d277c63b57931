"""How each family of `transformers` names its tensors and settings."""

from firth.models.layouts.families import FAMILIES, LAYOUTS
from firth.models.layouts.layout import OWN_EXTRAS, Layout, Rule

__all__ = ["FAMILIES", "LAYOUTS", "OWN_EXTRAS", "Layout", "Rule"]
