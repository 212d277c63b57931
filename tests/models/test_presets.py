"""Presets by name."""

from __future__ import annotations

import pytest

from firth.errors import UserError
from firth.models import PRESETS, count_parameters, make_model, preset
from firth.models.presets import bert, gpt2, t5, t5_v1_1


def test_by_name() -> None:
    assert preset("bert-tiny") == bert(2, 128, 2)
    with pytest.raises(UserError, match=r"Unknown model 'bert-tinny'. Did you mean 'bert-tiny'"):
        preset("bert-tinny")


def test_published_sizes() -> None:
    """BERT base without its pooler and pair head, GPT-2's 124M, T5 base's 223M; 1.1 has a second vocabulary matrix."""
    sizes = {name: count_parameters(PRESETS[name]) for name in ("bert-base", "gpt2", "t5-base", "t5.1.1-base")}
    assert sizes == {"bert-base": 109_514_298, "gpt2": 124_439_808, "t5-base": 222_903_552, "t5.1.1-base": 247_577_856}


def test_counting_makes_nothing_else_than_making() -> None:
    for config in (bert(1, 16, 2, 30), gpt2(1, 16, 2, 30), t5(1, 16, 2, 32, 30), t5_v1_1(1, 16, 2, 32, 30)):
        assert count_parameters(config) == make_model(config).num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_has_impossible_numbers(name: str) -> None:
    assert PRESETS[name].problems() == []
