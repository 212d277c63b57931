"""Pretraining heads: hidden states -> logits, and the cross-entropy over the vocabulary.

The vocabulary projection dominates memory: N target positions times V tokens in float32 exceed the activations of the
whole model. Three measures keep it small. It runs only at target positions. The logits are never held at once: a CPU
computes loss and gradients chunk by chunk (`ChunkedCrossEntropy`), a GPU by a fused kernel (`kernels/cross_entropy`).
And training can score a sample of the vocabulary instead of all of it (`sampled_cross_entropy`).

B rows, T positions, K target positions, N all target positions, D model width, E width of the token embeddings,
V vocabulary, S sampled tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.block import make_norm
from firth.models.config import LMHead, ModelConfig, NoNormConfig, SpanBoundaryHead, lm_head_width
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.cross_entropy import LABEL_IGNORE_INDEX as LABEL_IGNORE_INDEX
from firth.models.kernels.cross_entropy import MAX_CHUNK_LOGITS, fused_cross_entropy, should_fuse_loss, vocab_padding
from firth.models.regional_compile import compilable_region


def gather_positions(x_BTX: Tensor, positions_BK: Tensor) -> Tensor:
    """Return x (B, T, ...) at K positions of each row: (B, K, ...)."""
    row_B1 = torch.arange(x_BTX.shape[0], device=x_BTX.device)[:, None]  # len() would fix B in an exported graph
    return x_BTX.flatten(0, 1)[positions_BK + row_B1 * x_BTX.shape[1]]


class LMHeadModule(nn.Module):
    """Logits over the vocabulary: an optional transform (BERT), then the projection, tied to the embedding or not.

    Where token embeddings are narrower than the model, `extra_weight` can extend them by untied features (MobileBERT).
    """

    use_fused_loss: bool | None = None  # never hold all logits at once; None: where that is faster
    pad_vocab: bool | None = None  # pad the vocabulary to a multiple of 128; None: on a GPU

    def __init__(self, config: ModelConfig, spec: LMHead) -> None:
        super().__init__()
        width = lm_head_width(config, spec)
        self.dense = nn.Linear(config.dim, width, bias=config.bias) if spec.transform else None
        self.norm = make_head_norm(config, width) if spec.transform else None
        self.activation = ACTIVATIONS[config.mlp.activation]
        self.weight = None if spec.tied else nn.Parameter(torch.empty(config.vocab_size, width))
        extra = width - config.embed_width if spec.extends_embeddings else 0
        self.extra_weight = nn.Parameter(torch.empty(config.vocab_size, extra)) if extra else None
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if spec.bias else None
        self.scale = config.dim**-0.5 if spec.scale_hidden_states else 1.0
        self.num_sampled = spec.num_sampled

    def transform_hidden_states(self, x: Tensor) -> Tensor:
        if self.dense is not None and self.norm is not None:
            x = self.norm(self.activation(self.dense(x)))
        return x * self.scale if self.scale != 1.0 else x

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.transform_hidden_states(x), self.projection_weight(embedding), self.bias)

    def projection_weight(self, embedding: Tensor) -> Tensor:
        """Return the matrix from states to logits, (V, E): the embeddings, extended or replaced by its own weights."""
        if self.extra_weight is not None:
            return torch.cat([embedding, self.extra_weight], 1)
        return embedding if self.weight is None else self.weight

    @compilable_region
    def loss(self, x: Tensor, labels: Tensor, embedding: Tensor) -> Tensor:
        """Return the cross-entropy of `x` (N, D) with `labels` (N,), summed over labels other than -100."""
        return self.projection_loss(self.transform_hidden_states(x), labels, embedding)

    def loss_and_num_correct(self, x: Tensor, labels: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """As `loss`, without a gradient; and the number of labels that have the highest logit."""
        weight = self.projection_weight(embedding)
        return lm_head_scores(self.transform_hidden_states(x), weight, self.bias, labels, self.pad_vocab)

    def projection_loss(self, x_NE: Tensor, labels: Tensor, embedding: Tensor) -> Tensor:
        weight = self.projection_weight(embedding)
        if self.training and 0 < self.num_sampled < len(weight):
            return sampled_cross_entropy(x_NE, weight, self.bias, labels, self.num_sampled)
        return lm_head_cross_entropy(x_NE, weight, self.bias, labels, self.use_fused_loss, self.pad_vocab)


def make_head_norm(config: ModelConfig, dim: int) -> nn.Module:
    """Return the norm of the transform: the model's, and LayerNorm in a model without norms (MobileBERT)."""
    return nn.LayerNorm(dim, eps=config.norm.eps) if isinstance(config.norm, NoNormConfig) else make_norm(config, dim)


class DiscriminatorHeadModule(nn.Module):
    """One logit per token: the higher, the likelier the token was replaced (ELECTRA, section 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.activation = ACTIVATIONS[config.mlp.activation]
        self.out = nn.Linear(config.dim, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return logits (B, T)."""
        return self.out(self.activation(self.dense(x_BTD)))[..., 0]


class SentencePairHeadModule(nn.Module):
    """Next-sentence or sentence-order prediction: BERT's pooler over [CLS], then two logits (0: in order, 1: not)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, 2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(torch.tanh(self.pooler(x_BTD[:, 0])))


class SpanBoundaryHeadModule(nn.Module):
    """Predict each token of a masked span from the states on both sides of the span (SpanBERT, section 3.2).

    The input is [state before; state after; embedding of the position in the span]; two layers with GELU and norm.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, dim = config.get_extra("boundary"), config.dim
        assert isinstance(spec, SpanBoundaryHead)
        self.positions = nn.Embedding(spec.max_span_length, dim)
        self.dense1, self.norm1 = nn.Linear(3 * dim, dim), make_norm(config)
        assert isinstance(config.head, LMHead)
        width = lm_head_width(config, config.head)
        self.dense2, self.norm2 = nn.Linear(dim, width), make_head_norm(config, width)

    def forward(self, x_BTD: Tensor, boundary_BK3: Tensor) -> Tensor:
        """Return (B, K, E), which the token embeddings project to logits. `boundary_BK3`: before, after, position."""
        before_BK, after_BK, which_BK = boundary_BK3.unbind(-1)
        position_BKD = self.positions(which_BK.clamp(0, self.positions.num_embeddings - 1))
        h = torch.cat([gather_positions(x_BTD, before_BK), gather_positions(x_BTD, after_BK), position_BKD], -1)
        return self.norm2(F.gelu(self.dense2(self.norm1(F.gelu(self.dense1(h))))))


def lm_head_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    use_fused_loss: bool | None = None,
    pad_vocab: bool | None = None,
) -> Tensor:
    """Return the cross-entropy of the projection, summed over labels other than -100.

    In float32 training on a CPU: chunks that stay in its cache. In training on a GPU: a fused kernel, where
    `use_fused_loss` is True or None and it is faster. Without gradients: chunks everywhere. `pad_vocab` pads the
    vocabulary to a multiple of 128, the tile size of fast matmuls.
    """
    device, rows = x.device.type, logits_chunk_rows(x, weight)
    if not torch.is_grad_enabled() and len(x) > rows:
        pieces = zip(x.split(rows), labels.split(rows), strict=True)
        return torch.stack(
            [lm_head_cross_entropy(a, weight, bias, b, use_fused_loss, pad_vocab) for a, b in pieces]
        ).sum()
    trains = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    exact = x.dtype == torch.float32 and not torch.is_autocast_enabled(device)
    pad_vocab = device == "cuda" if pad_vocab is None else pad_vocab
    if device == "cpu" and trains and exact and use_fused_loss is not False:
        return ChunkedCrossEntropy.apply(x, weight, bias, labels)
    if trains and (should_fuse_loss(x, weight) if use_fused_loss is None else use_fused_loss):
        return fused_cross_entropy(x, weight, bias, labels, pad_vocab)
    logits = lm_head_logits(x, weight, bias, pad_vocab)
    return F.cross_entropy(logits, labels, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")


@torch.no_grad()
def lm_head_scores(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, pad_vocab: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and the number of labels that have the highest logit, chunk by chunk."""
    rows, scores = logits_chunk_rows(x, weight), []
    pad_vocab = x.is_cuda if pad_vocab is None else pad_vocab
    for some, wanted in zip(x.split(rows), labels.split(rows), strict=True):
        logits = lm_head_logits(some, weight, bias, pad_vocab)
        loss = F.cross_entropy(logits, wanted, ignore_index=LABEL_IGNORE_INDEX, reduction="sum")
        scores.append(torch.stack([loss, (logits.argmax(1) == wanted).sum()]))
    loss, num_correct = torch.stack(scores).sum(0)
    return loss, num_correct


def logits_chunk_rows(x: Tensor, weight: Tensor) -> int:
    """Return how many rows of logits are held at once."""
    return max(1, (MAX_CHUNK_LOGITS if x.device.type != "cpu" else ChunkedCrossEntropy.CHUNK_LOGITS) // len(weight))


def lm_head_logits(x: Tensor, weight: Tensor, bias: Tensor | None, pad_vocab: bool) -> Tensor:
    V = len(weight)
    more = vocab_padding(V) if pad_vocab else 0
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
    return F.linear(x, weight, bias)[:, :V].float()


def sampled_cross_entropy(
    x_NE: Tensor, weight: Tensor, bias: Tensor | None, labels_N: Tensor, num_sampled: int
) -> Tensor:
    """Return the sampled softmax loss: `num_sampled` negatives replace the vocabulary (Jean et al. 2015, section 3).

    Negatives are sampled log-uniformly by rank r: p(r) ~ log((r + 2) / (r + 1)); ids must be sorted by frequency. Each
    logit is lowered by the log of its expected count, which corrects for frequent tokens being sampled often. A sample
    that equals the label is masked.
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

    The forward pass computes the gradients too, chunk by chunk, while the logits of the chunk are in cache:
    d loss / d logits = softmax - one_hot(label).
    """

    CHUNK_LOGITS = 2**22  # logits per chunk: 16 MB of float32

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(bias)
        total = x.new_zeros(())
        rows = max(1, ChunkedCrossEntropy.CHUNK_LOGITS // weight.shape[0])
        for index in (labels != LABEL_IGNORE_INDEX).nonzero()[:, 0].split(rows):
            chunk, targets = x[index], labels[index]
            logits = F.linear(chunk, weight, bias)
            torch.log_softmax(logits, 1, out=logits)
            total += F.nll_loss(logits, targets, reduction="sum")
            dlogits = logits.exp_()
            dlogits[torch.arange(len(targets)), targets] -= 1
            dx[index] = dlogits @ weight
            dweight.addmm_(dlogits.t(), chunk)
            if dbias is not None:
                dbias += dlogits.sum(0)
        ctx.save_for_backward(dx, dweight, dbias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = ctx.saved_tensors
        return grads[0] * dx, grads[0] * dweight, None if dbias is None else grads[0] * dbias, None
