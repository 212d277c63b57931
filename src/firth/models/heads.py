"""From hidden states to answers, and the loss of the vocabulary projection.

B rows, T places, K asked places, D model width, E width of the token vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.activation import ACTIVATIONS
from firth.models.block import make_norm
from firth.models.config import Boundary, LMHead, ModelConfig
from firth.models.fused_loss import IGNORED as IGNORED
from firth.models.fused_loss import PIECE, fused_cross_entropy, more_tokens, pays
from firth.models.programs import part


def pick(x_BTX: Tensor, place_BK: Tensor) -> Tensor:
    """What stands at some places of each row: (B, K), and whatever comes after T."""
    row_B1 = torch.arange(len(x_BTX), device=x_BTX.device)[:, None]
    return x_BTX.flatten(0, 1)[place_BK + row_B1 * x_BTX.shape[1]]


class Vocabulary(nn.Module):
    """Scores over the vocabulary: transform (BERT), then the projection, tied to the embedding or its own."""

    fused: bool | None = None  # whether the loss never holds all scores at once; None: where that pays
    padded: bool | None = None  # whether it computes them for a round number of tokens; None: on a GPU

    def __init__(self, config: ModelConfig, spec: LMHead) -> None:
        super().__init__()
        width = spec.dim or (config.embed_width if spec.transform else config.dim)
        self.dense = nn.Linear(config.dim, width, bias=config.bias) if spec.transform else None
        self.norm = make_norm(config, width) if spec.transform else None
        self.activation = ACTIVATIONS[config.mlp.activation]
        self.weight = None if spec.tied else nn.Parameter(torch.empty(config.vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if spec.bias else None
        self.scale = config.dim**-0.5 if spec.scaled else 1.0
        self.sampled = spec.sampled

    def prepare(self, x: Tensor) -> Tensor:
        if self.dense is not None and self.norm is not None:
            x = self.norm(self.activation(self.dense(x)))
        return x * self.scale if self.scale != 1.0 else x

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.prepare(x), embedding if self.weight is None else self.weight, self.bias)

    @part
    def loss(self, x: Tensor, labels: Tensor, embedding: Tensor) -> Tensor:
        """The summed cross-entropy of `x` (N, D) against `labels` (N,), those at -100 left out."""
        return self.loss_of_prepared(self.prepare(x), labels, embedding)

    def loss_of_prepared(self, x_NE: Tensor, labels: Tensor, embedding: Tensor) -> Tensor:
        weight = embedding if self.weight is None else self.weight
        if self.training and 0 < self.sampled < len(weight):
            return sampled_cross_entropy(x_NE, weight, self.bias, labels, self.sampled)
        return linear_cross_entropy(x_NE, weight, self.bias, labels, self.fused, self.padded)


class Verdicts(nn.Module):
    """The higher, the likelier a token was put in by a generator (ELECTRA)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.activation = ACTIVATIONS[config.mlp.activation]
        self.out = nn.Linear(config.dim, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T)"""
        return self.out(self.activation(self.dense(x_BTD)))[..., 0]


class PairHead(nn.Module):
    """Whether the second text follows the first (0) or not (1): BERT's pooler on the first state, then two scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, 2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(torch.tanh(self.pooler(x_BTD[:, 0])))


class BoundaryHead(nn.Module):
    """A token of a span from the states on both sides of the span, and which token of it is meant."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, dim = config.extra("boundary"), config.dim
        assert isinstance(spec, Boundary)
        self.places = nn.Embedding(spec.longest, dim)
        self.dense1, self.norm1 = nn.Linear(3 * dim, dim), make_norm(config)
        self.dense2, self.norm2 = nn.Linear(dim, config.embed_width), make_norm(config, config.embed_width)

    def forward(self, x_BTD: Tensor, boundary_BK3: Tensor) -> Tensor:
        """(B, K, E), as wide as the token vectors that they are compared with."""
        before_BK, after_BK, which_BK = boundary_BK3.unbind(-1)
        place_BKD = self.places(which_BK.clamp(0, self.places.num_embeddings - 1))
        h = torch.cat([pick(x_BTD, before_BK), pick(x_BTD, after_BK), place_BKD], -1)
        return self.norm2(F.gelu(self.dense2(self.norm1(F.gelu(self.dense1(h))))))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    fused: bool | None = None,
    padded: bool | None = None,
) -> Tensor:
    """Projection and cross-entropy, summed over what is asked.

    On a CPU in pieces that stay in its cache. On a GPU (`fused`) by a kernel of our own where there are many scores, in
    pieces where there would be too many; `padded` computes them for a multiple of 128 tokens, which suits its products.
    Where nothing learns from it, in pieces everywhere.
    """
    device, V = x.device.type, len(weight)
    rows = max(1, (PiecewiseCrossEntropy.PIECE if device == "cpu" else PIECE) // V)
    if not torch.is_grad_enabled() and len(x) > rows:
        pieces = zip(x.split(rows), labels.split(rows), strict=True)
        return torch.stack([linear_cross_entropy(a, weight, bias, b, fused, padded) for a, b in pieces]).sum()
    learns = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    exact = x.dtype == torch.float32 and not torch.is_autocast_enabled(device)
    padded = device == "cuda" if padded is None else padded
    if device == "cpu" and learns and exact and fused is not False:
        return PiecewiseCrossEntropy.apply(x, weight, bias, labels)
    if learns and (pays(x, weight) if fused is None else fused):
        return fused_cross_entropy(x, weight, bias, labels, padded)
    more = more_tokens(V) if padded else 0
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
    logits = F.linear(x, weight, bias)[:, :V]
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def sampled_cross_entropy(x_NE: Tensor, weight: Tensor, bias: Tensor | None, labels_N: Tensor, num: int) -> Tensor:
    """Cross-entropy against `num` tokens in place of all, drawn by rank r in proportion to log((r + 2) / (r + 1)).

    The scores of each are lowered by the log of how often it is expected, so that the frequent ones are not punished
    for being drawn often (Jean et al. 2015, section 3). A token that is the answer counts once.
    """
    V, used_N = len(weight), labels_N != IGNORED
    x_NE, label_N = x_NE[used_N], labels_N[used_N]
    drawn_S = (torch.rand(num, device=x_NE.device) * math.log(V + 1)).exp().long().sub(1).clamp(0, V - 1)

    def expected(token: Tensor) -> Tensor:
        return (num * torch.log1p(1 / (token + 1.0)) / math.log(V + 1)).log()

    bias = weight.new_zeros(V) if bias is None else bias
    true_N1 = ((x_NE * weight[label_N]).sum(-1).float() + bias[label_N] - expected(label_N))[:, None]
    other_NS = F.linear(x_NE, weight[drawn_S], bias[drawn_S]).float() - expected(drawn_S)
    other_NS = other_NS.masked_fill(drawn_S == label_N[:, None], -torch.inf)
    return (torch.cat([true_N1, other_NS], 1).logsumexp(1) - true_N1[:, 0]).sum()


class PiecewiseCrossEntropy(torch.autograd.Function):
    """`F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")`, never holding all logits at once.

    The gradients are made together with the loss, piece by piece, while the logits are at hand.
    """

    PIECE = 2**22  # logits per piece: 16 MB of float32

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(bias)
        total = x.new_zeros(())
        rows = max(1, PiecewiseCrossEntropy.PIECE // weight.shape[0])
        for start in range(0, len(x), rows):
            piece, asked = x[start : start + rows], labels[start : start + rows]
            logits = F.linear(piece, weight, bias)
            torch.log_softmax(logits, 1, out=logits)
            total += F.nll_loss(logits, asked, ignore_index=IGNORED, reduction="sum")
            error = logits.exp_()
            error[torch.arange(len(asked)), asked.clamp(min=0)] -= 1
            error[asked == IGNORED] = 0
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
