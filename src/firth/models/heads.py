"""From hidden states to answers, and the loss of the vocabulary projection.

B rows, T places, K asked places, D model width, E width of the token vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.block import make_norm
from firth.models.config import LMHead, ModelConfig, SpanBoundaryHead
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.cross_entropy import LABEL_IGNORE_INDEX as LABEL_IGNORE_INDEX
from firth.models.kernels.cross_entropy import MAX_CHUNK_LOGITS, fused_cross_entropy, should_fuse_loss, vocab_padding
from firth.models.regional_compile import compilable_region


def gather_positions(x_BTX: Tensor, positions_BK: Tensor) -> Tensor:
    """What stands at some places of each row: (B, K), and whatever comes after T."""
    row_B1 = torch.arange(len(x_BTX), device=x_BTX.device)[:, None]
    return x_BTX.flatten(0, 1)[positions_BK + row_B1 * x_BTX.shape[1]]


class LMHeadModule(nn.Module):
    """Scores over the vocabulary: transform (BERT), then the projection, tied to the embedding or its own."""

    use_fused_loss: bool | None = None  # whether the loss never holds all scores at once; None: where that pays
    pad_vocab: bool | None = None  # whether it computes them for a round number of tokens; None: on a GPU

    def __init__(self, config: ModelConfig, spec: LMHead) -> None:
        super().__init__()
        width = spec.dim or (config.embed_width if spec.transform else config.dim)
        self.dense = nn.Linear(config.dim, width, bias=config.bias) if spec.transform else None
        self.norm = make_norm(config, width) if spec.transform else None
        self.activation = ACTIVATIONS[config.mlp.activation]
        self.weight = None if spec.tied else nn.Parameter(torch.empty(config.vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if spec.bias else None
        self.scale = config.dim**-0.5 if spec.scale_hidden_states else 1.0
        self.num_sampled = spec.num_sampled

    def transform_hidden_states(self, x: Tensor) -> Tensor:
        if self.dense is not None and self.norm is not None:
            x = self.norm(self.activation(self.dense(x)))
        return x * self.scale if self.scale != 1.0 else x

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.transform_hidden_states(x), embedding if self.weight is None else self.weight, self.bias)

    @compilable_region
    def loss(self, x: Tensor, labels: Tensor, embedding: Tensor) -> Tensor:
        """The summed cross-entropy of `x` (N, D) against `labels` (N,), those at -100 left out."""
        return self.projection_loss(self.transform_hidden_states(x), labels, embedding)

    def projection_loss(self, x_NE: Tensor, labels: Tensor, embedding: Tensor) -> Tensor:
        weight = embedding if self.weight is None else self.weight
        if self.training and 0 < self.num_sampled < len(weight):
            return sampled_cross_entropy(x_NE, weight, self.bias, labels, self.num_sampled)
        return lm_head_cross_entropy(x_NE, weight, self.bias, labels, self.use_fused_loss, self.pad_vocab)


class DiscriminatorHeadModule(nn.Module):
    """The higher, the likelier a token was put in by a generator (ELECTRA)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.activation = ACTIVATIONS[config.mlp.activation]
        self.out = nn.Linear(config.dim, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T)"""
        return self.out(self.activation(self.dense(x_BTD)))[..., 0]


class SentencePairHeadModule(nn.Module):
    """Whether the second text follows the first (0) or not (1): BERT's pooler on the first state, then two scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, 2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(torch.tanh(self.pooler(x_BTD[:, 0])))


class SpanBoundaryHeadModule(nn.Module):
    """A token of a span from the states on both sides of the span, and which token of it is meant."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, dim = config.get_extra("boundary"), config.dim
        assert isinstance(spec, SpanBoundaryHead)
        self.positions = nn.Embedding(spec.max_span_length, dim)
        self.dense1, self.norm1 = nn.Linear(3 * dim, dim), make_norm(config)
        self.dense2, self.norm2 = nn.Linear(dim, config.embed_width), make_norm(config, config.embed_width)

    def forward(self, x_BTD: Tensor, boundary_BK3: Tensor) -> Tensor:
        """(B, K, E), as wide as the token vectors that they are compared with."""
        before_BK, after_BK, which_BK = boundary_BK3.unbind(-1)
        place_BKD = self.positions(which_BK.clamp(0, self.positions.num_embeddings - 1))
        h = torch.cat([gather_positions(x_BTD, before_BK), gather_positions(x_BTD, after_BK), place_BKD], -1)
        return self.norm2(F.gelu(self.dense2(self.norm1(F.gelu(self.dense1(h))))))


def lm_head_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    use_fused_loss: bool | None = None,
    pad_vocab: bool | None = None,
) -> Tensor:
    """Projection and cross-entropy, summed over what is asked.

    On a CPU in pieces that stay in its cache. On a GPU (`use_fused_loss`) by a kernel of our own where there are many scores, in
    pieces where there would be too many; `pad_vocab` computes them for a multiple of 128 tokens, which suits its products.
    Where nothing learns from it, in pieces everywhere.
    """
    device, V = x.device.type, len(weight)
    rows = max(1, (ChunkedCrossEntropy.CHUNK_LOGITS if device == "cpu" else MAX_CHUNK_LOGITS) // V)
    if not torch.is_grad_enabled() and len(x) > rows:
        pieces = zip(x.split(rows), labels.split(rows), strict=True)
        return torch.stack(
            [lm_head_cross_entropy(a, weight, bias, b, use_fused_loss, pad_vocab) for a, b in pieces]
        ).sum()
    learns = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    exact = x.dtype == torch.float32 and not torch.is_autocast_enabled(device)
    pad_vocab = device == "cuda" if pad_vocab is None else pad_vocab
    if device == "cpu" and learns and exact and use_fused_loss is not False:
        return ChunkedCrossEntropy.apply(x, weight, bias, labels)
    if learns and (should_fuse_loss(x, weight) if use_fused_loss is None else use_fused_loss):
        return fused_cross_entropy(x, weight, bias, labels, pad_vocab)
    more = vocab_padding(V) if pad_vocab else 0
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
    logits = F.linear(x, weight, bias)[:, :V]
    return F.cross_entropy(logits.float(), labels, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")


def sampled_cross_entropy(
    x_NE: Tensor, weight: Tensor, bias: Tensor | None, labels_N: Tensor, num_sampled: int
) -> Tensor:
    """Cross-entropy against `num_sampled` tokens in place of all, drawn by rank r in proportion to log((r + 2) / (r + 1)).

    The scores of each are lowered by the log of how often it is expected, so that the frequent ones are not punished
    for being drawn often (Jean et al. 2015, section 3). A token that is the answer counts once.
    """
    V, used_N = len(weight), labels_N != LABEL_IGNORE_INDEX
    x_NE, label_N = x_NE[used_N], labels_N[used_N]
    drawn_S = (torch.rand(num_sampled, device=x_NE.device) * math.log(V + 1)).exp().long().sub(1).clamp(0, V - 1)

    def expected(token: Tensor) -> Tensor:
        return (num_sampled * torch.log1p(1 / (token + 1.0)) / math.log(V + 1)).log()

    bias = weight.new_zeros(V) if bias is None else bias
    true_N1 = ((x_NE * weight[label_N]).sum(-1).float() + bias[label_N] - expected(label_N))[:, None]
    other_NS = F.linear(x_NE, weight[drawn_S], bias[drawn_S]).float() - expected(drawn_S)
    other_NS = other_NS.masked_fill(drawn_S == label_N[:, None], -torch.inf)
    return (torch.cat([true_N1, other_NS], 1).logsumexp(1) - true_N1[:, 0]).sum()


class ChunkedCrossEntropy(torch.autograd.Function):
    """`F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")`, never holding all logits at once.

    The gradients are made together with the loss, piece by piece, while the logits are at hand.
    """

    CHUNK_LOGITS = 2**22  # logits per piece: 16 MB of float32

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(bias)
        total = x.new_zeros(())
        rows = max(1, ChunkedCrossEntropy.CHUNK_LOGITS // weight.shape[0])
        for start in range(0, len(x), rows):
            piece, asked = x[start : start + rows], labels[start : start + rows]
            logits = F.linear(piece, weight, bias)
            torch.log_softmax(logits, 1, out=logits)
            total += F.nll_loss(logits, asked, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")
            error = logits.exp_()
            error[torch.arange(len(asked)), asked.clamp(min=0)] -= 1
            error[asked == LABEL_IGNORE_INDEX] = 0
            torch.mm(error, weight, out=dx[start : start + rows])
            dweight.addmm_(error.t(), piece)
            if dbias is not None:
                dbias += error.sum(0)
        ctx.save_for_backward(dx, dweight, dbias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = ctx.saved_tensors
        return grads[0] * dx, grads[0] * dweight, None if dbias is None else grads[0] * dbias, None
