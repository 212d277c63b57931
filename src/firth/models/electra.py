"""ELECTRA: replaced token detection (Clark et al. 2020, "Pre-training Text Encoders as Discriminators").

One step, in order (section 2):

1. A small generator, a masked language model, predicts the masked tokens. Its loss is the usual MLM cross-entropy.
2. One token is sampled from each of its predictions and put into the text (`replace_tokens`). No gradient flows back
   through sampling, so this is not a GAN: the generator is trained by maximum likelihood only.
3. The discriminator, which is the model that we want, classifies every token: original or replaced. A sampled token
   that happens to equal the original counts as original. Its loss is binary cross-entropy over all tokens.
4. The loss is MLM + `discriminator_weight` * detection (50 in the paper: binary losses are small).

The loss covers all tokens instead of 15%, so a step teaches more. The generator is as deep as the discriminator and
1/4 to 1/2 as wide (section 3.2); both share the token embeddings. DeBERTa version 3 has a generator of the same width
and half the depth. There the discriminator adds its own difference to the shared embeddings, and its gradient does not
reach the generator's (He et al. 2021, section 3.3). After pretraining the generator is thrown away.

B rows, T positions, K target positions, D model width, E width of the token embeddings, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.backbone import Stack
from firth.models.config import GeneratorConfig, ModelConfig, make_generator_model_config
from firth.models.heads import LABEL_IGNORE_INDEX, DiscriminatorHeadModule


class ElectraGenerator(nn.Module):
    """The generator's stack over the model's token embeddings, and the discriminator's head.

    The model's LM head has the generator's width: the discriminator predicts no tokens. `delta` (V, E) is the
    discriminator's own difference to the shared token embeddings, with `disentangle_embeddings`.
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
        """Return the generator's last hidden states, (B, T, width of the generator)."""
        return self.stack(self.narrow(embeddings_BTE), document_ids, attention_rank, token_type_ids=token_type_ids)


def replace_tokens(logits_BKV: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the text with sampled tokens at the target positions, and where they differ from the original (B, T)."""
    truth_BT = scatter_tokens(batch.input_ids, batch.target_positions, batch.labels, batch.labels != LABEL_IGNORE_INDEX)
    read_BT = scatter_tokens(
        batch.input_ids, batch.target_positions, sample_generator_tokens(logits_BKV), batch.labels != LABEL_IGNORE_INDEX
    )
    return read_BT, read_BT != truth_BT


@torch.no_grad()
def sample_generator_tokens(logits_BKV: Tensor) -> Tensor:
    """Return a token per target position (B, K), sampled from the softmax by the exponential form of Gumbel-max."""
    noise = torch.empty_like(logits_BKV).exponential_()
    return (logits_BKV.softmax(-1) / noise).argmax(-1)


def scatter_tokens(input_ids_BT: Tensor, positions_BK: Tensor, new_ids_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """Return the tokens (B, T) with new ids at the positions of the slots in `mask_BK`."""
    T = input_ids_BT.shape[1]
    spare = F.pad(input_ids_BT, (0, 1))  # one more column takes the writes of unused slots
    return spare.scatter(1, positions_BK.masked_fill(~mask_BK, T), new_ids_BK)[:, :T]


def discriminator_loss(logits_BT: Tensor, replaced_BT: Tensor, document_ids_BT: Tensor | None) -> Tensor:
    """Return the binary cross-entropy, summed over all tokens but padding."""
    loss_BT = F.binary_cross_entropy_with_logits(logits_BT.float(), replaced_BT.float(), reduction="none")
    return (loss_BT if document_ids_BT is None else loss_BT * (document_ids_BT >= 0)).sum()
