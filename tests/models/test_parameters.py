"""The formulas for the number of parameters against models that are built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from firth.models import PRESETS, ModelConfig, count_parameters, make_model
from firth.models.config import ALiBi, GeneratorConfig, Shaw

FAMILIES = {config.family: name for name, config in reversed(PRESETS.items())}  # the first preset of each family


def built(config: ModelConfig) -> int:
    with torch.device("meta"):
        return make_model(config).num_parameters


def shrink(config: ModelConfig) -> ModelConfig:
    """Few layers: building a model takes time for each."""
    decoder = None if config.num_decoder_layers is None else 2
    return replace(config, vocab_size=50, num_layers=min(config.num_layers, 3), num_decoder_layers=decoder)


@pytest.mark.parametrize("name", sorted({*FAMILIES.values(), "t5.1.1-base", "albert-xlarge", "electra-large"}))
def test_presets_have_as_many_parameters_as_their_models(name: str) -> None:
    config = shrink(PRESETS[name])
    assert count_parameters(config) == built(config)


BERT, T5 = shrink(PRESETS["bert-tiny"]), shrink(PRESETS["t5-tiny"])


@pytest.mark.parametrize(
    "config",
    [
        replace(BERT, position=Shaw(8)),
        replace(BERT, position=ALiBi()),
        replace(BERT, attention_bias="no-key", num_kv_heads=1),
        replace(BERT, bias=False, norm_first=True, skip_first_norm=True, embed_norm=True),
        replace(BERT, num_bigram_buckets=10, embed_dim=32, num_shared=2),
        replace(T5, num_layers=2, num_decoder_layers=2, share_stacks=True),
        replace(BERT, extras=(GeneratorConfig(disentangle_embeddings=True),)),
    ],
    ids=lambda config: config.family,
)
def test_settings_that_change_the_number_are_counted(config: ModelConfig) -> None:
    assert count_parameters(config) == built(config)


def test_a_task_head_is_counted_on_the_model() -> None:
    from firth.models.task_heads import with_classification_head

    config = with_classification_head(BERT, ("a", "b"))
    assert count_parameters(config) == built(config) == count_parameters(replace(config, vocab_size=51)) - config.dim
