"""Default optimizer and learning rate of fine-tuning by family."""

from __future__ import annotations

from firth.models import get_preset
from firth.recipes import finetuning_defaults


def test_t5_is_finetuned_with_adafactor() -> None:
    """The rate follows the optimizer that is named: Adafactor's is relative to the weights, AdamW's is not."""
    for name, rate in (("t5-tiny", 1e-2), ("t5.1.1-small", 2.5e-3), ("t5-base", 1.7e-3)):
        assert finetuning_defaults(get_preset(name)) == {"optim": "adafactor", "learning_rate": rate}
    assert finetuning_defaults(get_preset("t5-base"), "adamw") == {"learning_rate": 1.5e-4}
    assert finetuning_defaults(get_preset("t5-base"), lora=True) == {"learning_rate": 1.5e-4}


def test_other_families_are_finetuned_with_adamw() -> None:
    assert finetuning_defaults(get_preset("bert-base")) == {"learning_rate": 5e-5}
    assert finetuning_defaults(get_preset("bart-base")) == {"learning_rate": 1.5e-4}
    assert finetuning_defaults(get_preset("bert-base"), "adafactor")["learning_rate"] == 1.7e-3
