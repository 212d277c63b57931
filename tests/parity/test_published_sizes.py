"""Presets have as many parameters as the same model in `transformers`, and as their papers say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from firth.models import (
    FIRTH_MODEL_TYPE,
    PRESETS,
    DiscriminatorHead,
    LMHead,
    ModelConfig,
    count_parameters,
    to_hf_config,
    with_extras,
)

transformers = pytest.importorskip("transformers")

M, B = 1_000_000, 1_000_000_000
# As the papers round them; those of GPT-2 as its authors corrected them, those of BART and LaBSE beside the weights.
# That of the smallest AfriBERTa by the size of its weights (332.7 MB, 4 layers); the 97 M beside them are six layers.
FIGURES: dict[str, float] = {
    "bert-base": 110 * M,
    "bert-large": 340 * M,
    "roberta-base": 125 * M,
    "roberta-large": 355 * M,
    "xlm-roberta-large": 550 * M,
    "afriberta-small": 83 * M,
    "afriberta-base": 111 * M,
    "afriberta-large": 126 * M,
    "albert-base": 12 * M,
    "albert-large": 18 * M,
    "albert-xlarge": 60 * M,
    "distilbert-base": 66 * M,
    "mobilebert": 25.3 * M,
    "ib-bert-large": 293 * M,
    "electra-base": 110 * M,
    "electra-large": 335 * M,
    "unilm-large": 340 * M,
    "labse": 471 * M,
    "rembert": 995 * M,
    "xlm-15": 250 * M,
    "xlm-17": 570 * M,
    "xlm-100": 570 * M,
    "gpt": 117 * M,
    "gpt2": 124 * M,
    "gpt2-medium": 355 * M,
    "gpt2-large": 774 * M,
    "gpt2-xl": 1542 * M,
    "gpt3-small": 125 * M,
    "gpt3-medium": 350 * M,
    "gpt3-large": 760 * M,
    "gpt3-xl": 1.3 * B,
    "gpt3-2.7b": 2.7 * B,
    "gpt3-6.7b": 6.7 * B,
    "gpt3-13b": 13 * B,
    "gpt3-175b": 175 * B,
    "t5-small": 60 * M,
    "t5-base": 220 * M,
    "bart-base": 140 * M,
    "bart-large": 400 * M,
}
# The paper's figure, and what its own settings come to (in `transformers` too).
OTHERWISE: dict[str, tuple[float, int]] = {
    "xlm-roberta-base": (270 * M, 278_295_186),
    "albert-xxlarge": (235 * M, 223_158_450),
    "electra-small": (14 * M, 13_549_057),
    "mobilebert-15m": (15.1 * M, 16_043_580),
    "t5-large": (770 * M, 737_668_096),
    "t5-3b": (3 * B, 2_851_598_336),
    "t5-11b": (11 * B, 11_307_321_344),
}


def pretrained(config: ModelConfig) -> ModelConfig:
    """With the heads that the published figure counts: those for pairs, ELECTRA's verdict and no generator."""
    if config.family in ("albert", "mobilebert", "ib-bert"):
        return with_extras(config, ("pair",))
    return replace(config, head=DiscriminatorHead(), extras=()) if config.family == "electra" else config


def counted(name: str) -> int:
    """As papers count: MobileBERT's does not name the output features that extend its embeddings."""
    config = pretrained(PRESETS[name])
    extends = isinstance(config.head, LMHead) and config.head.extends_embeddings
    return count_parameters(config) - (config.vocab_size * (config.dim - config.embed_width) if extends else 0)


def theirs(config: ModelConfig) -> int:
    hf = to_hf_config(config, None)
    with torch.device("meta"):
        model: Any = getattr(transformers, hf["architectures"][0])(transformers.AutoConfig.for_model(**hf))
    return sum(p.numel() for p in model.parameters())


THERE = [n for n in PRESETS if not n.endswith(("-tiny", "-mini")) and PRESETS[n].recurrent is None]
THERE.remove("ib-bert-large")  # `transformers` has no such teacher
THERE = [n for n in THERE if not n.startswith("firth-")]  # our own, which no class of `transformers` describes


@pytest.mark.parametrize("name", THERE)
def test_as_many_as_in_transformers(name: str) -> None:
    config = pretrained(PRESETS[name])
    assert to_hf_config(config, None)["model_type"] != FIRTH_MODEL_TYPE
    head = config.head
    tied_there = config.family == "t5" and isinstance(head, LMHead) and not head.tied  # always, in `transformers` 5
    more = int(tied_there) - int(config.family == "t5gemma")  # both of its stacks have embeddings there
    assert count_parameters(config) == theirs(config) + more * config.vocab_size * config.dim


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("firth-")])
def test_our_own_presets_have_our_own_model_type(name: str) -> None:
    assert to_hf_config(PRESETS[name], None)["model_type"] == FIRTH_MODEL_TYPE


@pytest.mark.parametrize("name", FIGURES)
def test_as_many_as_published(name: str) -> None:
    assert counted(name) == pytest.approx(FIGURES[name], rel=0.02)


@pytest.mark.parametrize("name", OTHERWISE)
def test_where_a_paper_counts_otherwise(name: str) -> None:
    figure, count = OTHERWISE[name]
    assert counted(name) == count
    assert abs(count / figure - 1) > 0.02
