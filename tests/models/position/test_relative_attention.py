"""Relative position scores: by hand, by every kernel, and with packed documents."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import make_model
from firth.models.attention import Attention, AttentionSpec, make_attention_spec
from firth.models.backbone import Stack
from firth.models.config import Disentangled, ModelConfig, Position, Shaw, TransformerXL
from firth.models.position.relative_attention import (
    DisentangledScore,
    RelativePositionEmbedding,
    RelativePositions,
    RelativeSinusoids,
    ShawScore,
    TransformerXLScore,
    key_relative_scores,
    log_bucket,
    query_relative_scores,
    rel_shift,
)
from firth.models.position.xl_memory import XLMemory
from firth.models.presets import PRESETS, bert, deberta_v2
from firth.objectives.batch import Batch
from firth.recipes import pretraining_recipe

M = TypeVar("M", bound=torch.nn.Module)
B, T, H, D, d = 2, 7, 2, 8, 4
SEGMENT = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]])
POSITIONS: dict[str, Position] = {
    "transformer-xl": TransformerXL(),
    "transformer-xl with segments": TransformerXL(relative_segments=True),
    "disentangled": Disentangled(max_distance=4),
    "disentangled, shared": Disentangled(max_distance=16, num_buckets=4, share_projections=True, norm_embeddings=True),
}


def config(position: Position, **changes: object) -> ModelConfig:
    return bert(2, D, H, 20, **{"position": position, "dropout": 0.0, "attention_dropout": 0.0, **changes})


def stir(model: M) -> M:
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5)
    return model


def far_back(distance: int) -> Tensor:
    """Transformer-XL's encoding of a distance: sines, then cosines, of D / 2 falling frequencies."""
    angles = [distance / 10000 ** (2 * i / D) for i in range(D // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def test_transformer_xl_by_hand() -> None:
    """The four terms of the paper and the two of XLNet, position by position, after softmax."""
    spec = TransformerXL(relative_segments=True)
    score = stir(TransformerXLScore(config(spec), spec))
    q, k = torch.randn(2, B, H, T, d).unbind()
    relative = RelativeSinusoids(config(spec), spec)(torch.randn(B, T, D), T, SEGMENT)
    scores = score(q, k, AttentionSpec(relative_positions=relative), None)
    found = scores.query @ k.mT + scores.to_dense(T)
    wanted = torch.empty(B, H, T, T)
    assert score.segments is not None
    assert score.segment_bias is not None
    for b in range(B):
        for h in range(H):
            weight = score.distance.weight[h * d : (h + 1) * d]
            for i in range(T):
                for j in range(T):
                    r = weight @ far_back(i - j)
                    s = score.segments[int(SEGMENT[b, i] != SEGMENT[b, j]), h]
                    wanted[b, h, i, j] = (
                        (q[b, h, i] + score.key_bias[h]) @ k[b, h, j]
                        + (q[b, h, i] + score.distance_bias[h]) @ r
                        + (q[b, h, i] + score.segment_bias[h]) @ s
                    )
    assert_close(found.softmax(-1), wanted.softmax(-1))


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_disentangled_by_hand(bucketed: bool, shared: bool) -> None:
    """Content-to-position and position-to-content scores."""
    spec = (
        Disentangled(max_distance=16, num_buckets=4, share_projections=shared)
        if bucketed
        else Disentangled(max_distance=4, share_projections=shared)
    )
    attention, vectors = stir(Attention(config(spec))), stir(RelativePositionEmbedding(config(spec), spec))
    assert isinstance(attention.score, DisentangledScore)
    q, k = torch.randn(2, B, H, T, d).unbind()
    spec_of_attention = AttentionSpec(relative_positions=vectors(torch.randn(B, T, D), T))
    found = attention.score(q, k, spec_of_attention, attention.project_qk).to_dense(T)
    assert attention.scale == (3 * d) ** -0.5

    if shared:
        ask, read, _ = attention.qkv(vectors.table.weight).split(D, -1)
    else:
        ask, read = attention.score.pos_query(vectors.table.weight), attention.score.pos_key(vectors.table.weight)
    buckets = {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 3}  # of the distances here, for 4 buckets up to 16
    for i in range(T):
        for j in range(T):
            distance = i - j
            if bucketed:
                distance = (1 if i > j else -1) * buckets[abs(distance)]
            row = max(0, min(7, distance + 4))
            for h in range(H):
                part = slice(h * d, (h + 1) * d)
                wanted = q[:, h, i] @ read[row, part] + k[:, h, j] @ ask[row, part]
                assert_close(found[:, h, i, j], wanted)


def test_buckets_by_hand() -> None:
    """8 buckets up to 32: 0 to 4 have one each; then up to 7.98, 15.9 and 31 share."""
    distance = torch.tensor([0, 1, 4, 5, 7, 8, 15, 16, 31, -4, -5, -16])
    assert log_bucket(distance, 8, 32).tolist() == [0, 1, 4, 5, 5, 6, 6, 7, 7, -4, -5, -7]


@pytest.mark.parametrize(("num", "far"), [(256, 512), (32, 128), (4, 16)])
def test_buckets_equal_transformers(num: int, far: int) -> None:
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distance = torch.arange(-far, far + 1)
    wanted = theirs.make_log_bucket_position(distance, num, far).long()
    assert torch.equal(log_bucket(distance, num, far), wanted)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 4), (4, 4), (3, 7), (5, 2)])
def test_rel_shift(T: int, S: int) -> None:
    """The score of each distance is the distance itself."""
    x = torch.arange(1 - T, S).expand(2, 3, T, T + S - 1)
    assert (rel_shift(x, S) == torch.arange(S)[None, :] - torch.arange(T)[:, None]).all()


def test_shaw_by_hand() -> None:
    score = ShawScore(bert(1, 8, 2, 20, position=Shaw(2)), Shaw(2))
    q, k = torch.randn(2, 2, 2, 5, 4).unbind()
    scores = score(q, k, AttentionSpec(), None).to_dense(5)
    for i in range(5):
        for j in range(5):
            vector = score.vectors.weight[max(-2, min(2, j - i)) + 2]
            assert_close(scores[:, :, i, j], q[:, :, i] @ vector)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (4, 4), (3, 7), (5, 2)])
def test_rel_shift_of_some_queries(T: int, S: int) -> None:
    """The score of a distance is the distance itself, for queries and for keys; queries may be a subset."""
    wanted = (torch.arange(S)[None, :] - torch.arange(T)[:, None]).expand(2, 3, T, S)
    query_scores = torch.arange(1 - T, S).expand(2, 3, T, -1)
    reads = torch.arange(1 - T, S).flip(0).expand(2, 3, S, -1)
    assert torch.equal(query_relative_scores(query_scores, S, None, T - 1), wanted)
    assert torch.equal(key_relative_scores(reads, T, None), wanted)
    some = torch.tensor([[T - 1, 0], [0, 0]])
    by_row = torch.stack([wanted[0, :, [T - 1, 0]], wanted[1, :, [0, 0]]])
    assert torch.equal(query_relative_scores(query_scores[:, :, :1].expand(2, 3, 2, -1), S, some, T - 1), by_row)
    assert torch.equal(key_relative_scores(reads, 2, some), by_row)


def specs_by_name() -> dict[str, AttentionSpec]:
    doc = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])
    rank = torch.tensor([[0, 2, 0, 1, 0, 3, 0], [0, 0, 0, 2, 1, 0, 0]])
    nobody = make_attention_spec(False, None, rank).mask
    assert nobody is not None
    blind = nobody.clone()
    blind[0, 0, 3] = False
    return {
        "all": make_attention_spec(False, None),
        "causal": make_attention_spec(True, None),
        "documents": make_attention_spec(False, doc),
        "ranks": make_attention_spec(False, None, rank),
        "documents and ranks": make_attention_spec(False, doc, rank),
        "one sees nobody": AttentionSpec(mask=blind, has_empty_rows=True),
    }


@pytest.mark.parametrize("visibility", specs_by_name())
@pytest.mark.parametrize("name", POSITIONS)
def test_kernels_agree(name: str, visibility: str) -> None:
    """SDPA and eager operations: equal outputs and gradients."""
    spec, x = POSITIONS[name], torch.randn(B, T, D)
    stack = stir(Stack(config(spec), 2, is_causal=False))
    assert stack.shared is not None
    found: list[list[Tensor]] = []
    for seen in (None, []):
        stack.zero_grad()
        relative = stack.shared(x, T, SEGMENT)
        whole = specs_by_name()[visibility]._replace(relative_positions=relative, attentions=seen)
        y = stack.blocks[0](x, whole)
        (y * torch.linspace(-1, 1, D)).square().mean().backward()
        gradients = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
        assert len(gradients) > 10
        found.append([y, *gradients])
        assert not seen or seen[0].shape == (B, H, T, T)
    for sdpa, plain in zip(*found, strict=True):
        assert sdpa.isfinite().all()
        assert_close(sdpa, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", POSITIONS)
def test_queries_at_some_positions_equal_those_at_all(name: str) -> None:
    stack, x = stir(Stack(config(POSITIONS[name]), 1, is_causal=False)), torch.randn(B, T, D)
    assert stack.shared is not None
    relative: RelativePositions = stack.shared(x, T, SEGMENT)
    positions = torch.tensor([[5, 0, 0], [6, 2, 3]])
    row = torch.arange(B)[:, None]
    other = None if relative.is_other_segment is None else relative.is_other_segment[row, positions]
    some = AttentionSpec(relative_positions=relative._replace(query_positions=positions, is_other_segment=other))
    attention = stack.blocks[0].attention
    whole = attention(x, AttentionSpec(relative_positions=relative))
    assert_close(attention(x[row, positions], some, x), whole[row, positions])


@pytest.mark.parametrize("name", POSITIONS)
def test_packed_documents_are_independent(name: str) -> None:
    stack, x = stir(Stack(config(POSITIONS[name]), 2, is_causal=False)), torch.randn(1, T, D)
    packed = stack(x, torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), token_type_ids=SEGMENT[:1])
    assert_close(packed[:, :3], stack(x[:, :3], None, token_type_ids=SEGMENT[:1, :3]))
    assert_close(packed[:, 3:], stack(x[:, 3:], None, token_type_ids=SEGMENT[:1, 3:]))


@pytest.mark.parametrize("name", [name for name in POSITIONS if "segments" not in name])
def test_a_causal_model_with_memory_reads_text_in_segments(name: str) -> None:
    """A causal stack with enough memory gives the same states for any segmentation."""
    stack, x = stir(Stack(config(POSITIONS[name]), 2, is_causal=True)), torch.randn(B, T, D)
    whole = stack(x, None)
    for pieces in ([3, 4], [1, 5, 1]):
        stack.memory = XLMemory(100)
        assert_close(torch.cat([stack(piece, None) for piece in x.split(pieces, 1)], 1), whole)
        assert stack.memory.num_cached == T
    stack.memory = XLMemory(2)
    assert not torch.allclose(torch.cat([stack(piece, None) for piece in x.split([4, 3], 1)], 1), whole)
    assert stack.memory.num_cached == 2


def test_no_gradient_reaches_the_memory() -> None:
    stack, x = stir(Stack(config(TransformerXL()), 2, is_causal=False)), torch.randn(B, T, D, requires_grad=True)
    stack.memory = XLMemory(4)
    stack(x[:, :4], None)
    stack(x[:, 4:], None).square().sum().backward()
    assert x.grad is not None
    assert not x.grad[:, :4].any()
    assert x.grad[:, 4:].any()


def test_one_segment_id_equals_none() -> None:
    stack, x = stir(Stack(config(TransformerXL(relative_segments=True)), 2, is_causal=False)), torch.randn(B, T, D)
    assert_close(stack(x, None, token_type_ids=torch.ones(B, T)), stack(x, None))
    assert not torch.allclose(stack(x, None, token_type_ids=SEGMENT), stack(x, None))


def test_grouped_queries_and_keys_without_bias() -> None:
    shared = Disentangled(max_distance=4, share_projections=True)
    attention = stir(Attention(config(shared, num_kv_heads=1, attention_bias="no-key")))
    ask, read = attention.project_qk(torch.zeros(3, D))
    assert attention.qv_bias is not None
    assert attention.qv_bias.shape == (D + d,)
    assert_close(ask, attention.qv_bias[:D].view(H, 1, d).expand(H, 3, d))
    assert_close(read, torch.zeros(H, 3, d))
    assert attention(
        torch.randn(B, T, D),
        AttentionSpec(relative_positions=RelativePositionEmbedding(config(shared), shared)(torch.ones(B, T, D), T)),
    ).shape


BATCHES = {
    "deberta-tiny": Batch(
        torch.tensor([[2, 4, 9, 4, 11, 3], [2, 8, 4, 9, 3, 0]]),
        document_ids=torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]]),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]]),
        target_positions=torch.tensor([[1, 3], [2, 0]]),
        labels=torch.tensor([[8, 10], [12, -100]]),
    ),
    "xlnet-tiny": Batch(
        torch.tensor([[2, 8, 9, 10, 11, 3], [2, 8, 12, 9, 3, 0]]),
        document_ids=torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]]),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]]),
        attention_rank=torch.tensor([[0, 1, 2, 0, 1, 0], [0, 2, 1, 0, 0, 0]]),
        target_positions=torch.tensor([[1, 2, 4], [1, 2, 0]]),
        labels=torch.tensor([[8, 9, 11], [8, 12, -100]]),
    ),
}
BATCHES["deberta-v3-tiny"] = BATCHES["deberta-v2"] = BATCHES["deberta-tiny"]
FAMILIES = {name: PRESETS[name] for name in BATCHES if name in PRESETS}
FAMILIES["deberta-v2"] = deberta_v2(2, 128, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_trains_with_its_objective(name: str) -> None:
    """Three steps on one batch: each loss falls, and the extras of the objective are trained."""
    torch.manual_seed(0)
    model = make_model(
        replace(pretraining_recipe(FAMILIES[name]).model, vocab_size=20, dropout=0.0, attention_dropout=0.0)
    )
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[dict[str, float]] = []
    for _ in range(4):
        torch.manual_seed(1)  # so that a generator draws alike
        parts = model.losses(BATCHES[name])
        sum(part / BATCHES[name].loss_counts[count] for count, part in parts.items()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append({count: part.item() for count, part in parts.items()})
    assert all(losses[-1][count] < losses[0][count] for count in losses[0])
    assert set(losses[0]) == ({"targets", "tokens"} if name == "deberta-v3-tiny" else {"targets"})
    still = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert all("segment" in n for n in still), "there are no segments here; all else has moved"
