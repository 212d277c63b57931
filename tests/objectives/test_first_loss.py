"""The first loss of every preset: an untrained model should find all tokens about equally likely.

Uniform predictions cost ln V. A head or an embedding of a wrong scale shows here, and not in a comparison with a
library that starts the same way.

T5 1.0 and XLM tie the head to embeddings as long as their hidden states. As published, they start by repeating the
token that they read (first loss 12.3 at this width); all other tokens must be about equally likely. So does firth-t5
(first loss 10.2), whose norm after the embeddings makes the states of the decoder's tokens as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from firth.models import PRESETS, ModelConfig, make_model
from firth.models.config import ELMoConfig, LMHead, NormalInit
from firth.objectives import Batch
from firth.recipes import pretraining_recipe
from firth.tokens import Rows

WIDTH, NUM_LAYERS, VOCAB_SIZE, LENGTH = 512, 2, 1000, 64
REPEATS_ITS_INPUT = ("t5", "xlm", "firth-t5")


def shrunken(config: ModelConfig) -> ModelConfig:
    """The preset with two layers, 512 wide, and a vocabulary of 1,000; its kinds of layers and weights stay."""
    assert isinstance(config.head, LMHead)
    head = replace(config.head, dim=config.head.dim and WIDTH, num_sampled=0)
    changes: dict[str, Any] = dict(
        head=head, vocab_size=VOCAB_SIZE, num_layers=min(config.num_layers, NUM_LAYERS), num_languages=0, extras=()
    )
    if isinstance(config.recurrent, ELMoConfig):
        elmo = ELMoConfig(2 * WIDTH, WIDTH, filters=((1, 32), (3, 64)), num_highways=1)
        return replace(config, **changes, dim=2 * WIDTH, recurrent=elmo)
    if config.recurrent is not None:
        return replace(config, **changes, dim=WIDTH, recurrent=replace(config.recurrent, hidden_size=WIDTH // 2))
    if isinstance(config.init, NormalInit) and config.init.embed_std:
        assert config.init.embed_std == config.dim**-0.5
        changes["init"] = replace(config.init, embed_std=WIDTH**-0.5)
    return replace(
        config,
        **changes,
        dim=WIDTH,
        num_heads=8,
        num_kv_heads=config.num_kv_heads and 2,
        head_dim=None,
        embed_dim=config.embed_dim and 128,
        num_shared=min(config.num_shared, NUM_LAYERS),
        mlp=replace(config.mlp, dim=WIDTH),
    )


def input_tokens(batch: Batch) -> torch.Tensor:
    """The token that the model reads at each target."""
    if batch.decoder_input_ids is not None:
        return batch.decoder_input_ids
    return batch.input_ids.gather(1, batch.target_positions)


SHRUNKEN = {shrunken(config): name for name, config in reversed(PRESETS.items())}  # sizes of a family become equal


@pytest.mark.parametrize("config", SHRUNKEN, ids=SHRUNKEN.values())
def test_the_first_loss_is_that_of_uniform_predictions(
    config: ModelConfig, rows_for: Callable[..., Rows], apply: Callable[..., Batch]
) -> None:
    recipe = pretraining_recipe(config)
    torch.manual_seed(0)
    model = make_model(recipe.model).eval()
    batch = apply(recipe.objective, rows_for(recipe.objective, 2, LENGTH)).to(torch.device("cpu"))
    if isinstance(config.recurrent, ELMoConfig):
        batch = batch._replace(char_ids=torch.randint(0, 256, (*batch.input_ids.shape, 50)))
    with torch.no_grad():
        logits = model.logits(batch)
    assert isinstance(config.head, LMHead)
    if config.head.tied and config.family in REPEATS_ITS_INPUT:
        logits = logits.scatter(-1, input_tokens(batch)[..., None], 0.0)
    loss = F.cross_entropy(logits.flatten(0, -2), batch.labels.flatten())
    assert loss.item() == pytest.approx(math.log(VOCAB_SIZE), rel=0.15)
