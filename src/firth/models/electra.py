"""Replaced-token detection: a small generator beside the model (Clark et al. 2020).

B rows, T places, K asked places, D model width, E width of the token vectors, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.backbone import Stack
from firth.models.config import GeneratorConfig, ModelConfig
from firth.models.heads import LABEL_IGNORE_INDEX, DiscriminatorHeadModule


def make_generator_model_config(config: ModelConfig) -> ModelConfig:
    """The generator: as deep as the body, narrower, over token vectors of the same width."""
    spec = config.get_extra("generator")
    assert isinstance(spec, GeneratorConfig)
    num_heads = max(1, int(config.num_heads * spec.width_ratio))
    return replace(
        config,
        dim=num_heads * max(1, round(config.dim * spec.width_ratio / num_heads)),
        num_heads=num_heads,
        head_dim=None,
        mlp=replace(config.mlp, dim=max(1, round(config.mlp.dim * spec.width_ratio))),
        embed_dim=config.embed_width,
        extras=(),
    )


class ElectraGenerator(nn.Module):
    """The generator's stack over the model's own token vectors, and the body's verdict on every token.

    The generator answers in words through the model's head, which is made for its width: the body has no words.
    `delta` is by how much the body's token vectors differ from the generator's, where they may.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, small = config.get_extra("generator"), make_generator_model_config(config)
        assert isinstance(spec, GeneratorConfig)
        self.discriminator_weight = spec.discriminator_weight
        self.delta = nn.Embedding(config.vocab_size, config.embed_width) if spec.disentangle_embeddings else None
        self.narrow = nn.Linear(config.embed_width, small.dim)
        self.stack = Stack(small, small.num_layers, is_causal=False)
        self.discriminator_head = DiscriminatorHeadModule(config)

    def forward(
        self,
        embeddings_BTE: Tensor,
        document_ids: Tensor | None,
        attention_rank: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The generator's last states."""
        return self.stack(self.narrow(embeddings_BTE), document_ids, attention_rank, token_type_ids=token_type_ids)


def replace_tokens(logits_BKV: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The text with the generator's tokens at the asked places, and where these are not the true ones (B, T)."""
    truth_BT = scatter_tokens(batch.input_ids, batch.target_positions, batch.labels, batch.labels != LABEL_IGNORE_INDEX)
    read_BT = scatter_tokens(
        batch.input_ids, batch.target_positions, sample_generator_tokens(logits_BKV), batch.labels != LABEL_IGNORE_INDEX
    )
    return read_BT, read_BT != truth_BT


@torch.no_grad()
def sample_generator_tokens(logits_BKV: Tensor) -> Tensor:
    """A token for each place, drawn from the softmax by Gumbel's trick; nothing is learned through it."""
    noise = torch.empty_like(logits_BKV).exponential_()
    return (logits_BKV.softmax(-1) / noise).argmax(-1)


def scatter_tokens(input_ids_BT: Tensor, positions_BK: Tensor, new_ids_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """The tokens with other values at the places of the used slots."""
    T = input_ids_BT.shape[1]
    spare = F.pad(input_ids_BT, (0, 1))  # one more column, for what the unused slots say
    return spare.scatter(1, positions_BK.masked_fill(~mask_BK, T), new_ids_BK)[:, :T]


def discriminator_loss(logits_BT: Tensor, replaced_BT: Tensor, document_ids_BT: Tensor | None) -> Tensor:
    """The summed binary cross-entropy over all tokens, padding left out."""
    loss_BT = F.binary_cross_entropy_with_logits(logits_BT.float(), replaced_BT.float(), reduction="none")
    return (loss_BT if document_ids_BT is None else loss_BT * (document_ids_BT >= 0)).sum()
