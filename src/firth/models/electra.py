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
from firth.models.config import (
    GENERATOR_HEAD,
    DetectorConfig,
    GeneratorConfig,
    ModelConfig,
    make_generator_model_config,
)
from firth.models.embeddings import InputEmbedding
from firth.models.heads import LABEL_IGNORE_INDEX, DiscriminatorHeadModule, LMHeadModule, gather_positions
from firth.models.regional_compile import is_compiled


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


class ReplacedTokenDetector(nn.Module):
    """A generator with its own LM head, and the discriminator's head: detection beside language modelling.

    The model keeps its LM head. Rows with `generator_labels` are filled by the generator and train the discriminator's
    head; the others train the LM head. Generator and model share the token embeddings.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, small = config.get_extra("detector"), make_generator_model_config(config)
        assert isinstance(spec, DetectorConfig)
        self.weight = spec.weight
        self.narrow = nn.Linear(config.embed_width, small.dim)
        self.stack = Stack(small, small.num_layers, is_causal=False)
        self.generator_head = LMHeadModule(small, GENERATOR_HEAD)
        self.discriminator_head = DiscriminatorHeadModule(config)

    def replace_tokens(self, embed: InputEmbedding, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the text that the model reads, where its tokens are new (B, T), and the generator's loss, summed.

        A CPU computes the rows with labels alone. A compiled step, and so a GPU, needs the same shapes each time, and a
        memory continues every row: they compute all.
        """
        if batch.input_ids.is_cuda or is_compiled() or self.stack.memory is not None:
            return self.fill_masks(embed, batch)
        row_R = (batch.generator_labels != LABEL_IGNORE_INDEX).any(1).nonzero()[:, 0]
        read_RT, replaced_RT, loss = self.fill_masks(embed, select_rows(batch, row_R))
        read_BT = batch.input_ids.index_copy(0, row_R, read_RT)
        return read_BT, torch.zeros_like(read_BT, dtype=torch.bool).index_copy(0, row_R, replaced_RT), loss

    def fill_masks(self, embed: InputEmbedding, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As `replace_tokens`, in all rows."""
        vectors_BTE = embed.embed_unprojected(batch.input_ids, batch.position_ids, batch.token_type_ids)
        x_BTG = self.stack(
            self.narrow(vectors_BTE), batch.document_ids, batch.attention_rank, token_type_ids=batch.token_type_ids
        )
        x_BKG = gather_positions(x_BTG, batch.generator_positions)
        logits_BKV = self.generator_head(x_BKG, embed.tokens.weight).float()
        labels_N = batch.generator_labels.flatten()  # a 3-D cross-entropy is not deterministic on a GPU
        loss = F.cross_entropy(logits_BKV.flatten(0, 1), labels_N, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")
        return *replace_tokens(logits_BKV, batch.input_ids, batch.generator_positions, batch.generator_labels), loss

    def losses(
        self, x_BTD: Tensor, replaced_BT: Tensor, generator_loss: Tensor, batch: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the losses of generator and discriminator, and figures to log, from the model's last states."""
        score_BT, is_detected_BT = self.discriminator_head(x_BTD), batch.is_detected
        rtd_loss = discriminator_loss(score_BT, replaced_BT, is_detected_BT)
        metrics = {
            "generator_loss/generator_targets": generator_loss,
            "rtd_loss/detected_tokens": rtd_loss,
            "rtd_accuracy/detected_tokens": (((score_BT > 0) == replaced_BT) & is_detected_BT).sum(),
            "rtd_replaced/detected_tokens": (replaced_BT & is_detected_BT).sum(),
        }
        return {"generator_targets": generator_loss, "detected_tokens": self.weight * rtd_loss}, metrics


def select_rows(batch: Any, row_R: Tensor) -> Any:
    """Return these rows of a batch."""
    return batch.map_arrays(lambda a: a[row_R])


def replace_tokens(
    logits_BKV: Tensor, input_ids_BT: Tensor, positions_BK: Tensor, labels_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the text with sampled tokens at the target positions, and where they differ from the original (B, T)."""
    is_used_BK = labels_BK != LABEL_IGNORE_INDEX
    truth_BT = scatter_tokens(input_ids_BT, positions_BK, labels_BK, is_used_BK)
    read_BT = scatter_tokens(input_ids_BT, positions_BK, sample_generator_tokens(logits_BKV), is_used_BK)
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


def discriminator_loss(logits_BT: Tensor, replaced_BT: Tensor, is_counted_BT: Tensor | None) -> Tensor:
    """Return the binary cross-entropy, summed over the tokens in `is_counted_BT`; None: all."""
    loss_BT = F.binary_cross_entropy_with_logits(logits_BT.float(), replaced_BT.float(), reduction="none")
    return (loss_BT if is_counted_BT is None else loss_BT * is_counted_BT).sum()
