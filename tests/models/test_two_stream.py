"""The query stream sees positions but not its own token, and no token later in the factorization order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import Encoder, Model, ModelConfig, make_model
from firth.models.config import (
    ConvolutionConfig,
    Disentangled,
    LearnedPosition,
    Position,
    QueryStream,
    Rotary,
    SentencePairHead,
    SlidingWindow,
    TransformerXL,
)
from firth.models.presets import t5, xlnet
from firth.models.two_stream import make_query_stream_spec, rank_targets_last
from firth.objectives.batch import Batch

V, T = 30, 6
NORMS = {"post-norm": False, "pre-norm": True}
TOKENS = torch.tensor([[7, 8, 9, 10, 11, 12]])
RANK = torch.tensor([[0, 2, 0, 1, 0, 3]])  # 0, 2 and 4 come free; then 3, then 1, then 5
TARGETS = torch.tensor([[1, 3, 5]])
BATCH = Batch(TOKENS, attention_rank=RANK, target_positions=TARGETS, labels=torch.tensor([[8, 10, 12]]))
POSITIONS: dict[str, Position] = {
    "transformer-xl": TransformerXL(relative_segments=True),
    "learned": LearnedPosition(16),
    "disentangled": Disentangled(max_distance=3, num_buckets=2, share_projections=True),
}
SEES = {1: [0, 2, 3, 4], 3: [0, 2, 4], 5: [0, 1, 2, 3, 4]}  # target position -> tokens that it depends on


def lively(**changes: Any) -> Encoder:
    torch.manual_seed(1)
    model = make_model(xlnet(3, 16, 2, V, extras=(QueryStream(),), **changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    assert isinstance(model, Encoder)
    return model


def reached(model: Model, batch: Batch) -> dict[int, list[int]]:
    """For each target position: the tokens whose replacement changes its logits."""
    before = model.logits(batch)[0]
    moved: dict[int, list[int]] = {int(position): [] for position in batch.target_positions[0]}
    for j in range(batch.input_ids.shape[1]):
        tokens = batch.input_ids.clone()
        tokens[0, j] += 10
        after = model.logits(batch._replace(input_ids=tokens))[0]
        for slot, position in enumerate(batch.target_positions[0].tolist()):
            if not torch.equal(after[slot], before[slot]):
                moved[position].append(j)
    return moved


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("norm_first", NORMS.values(), ids=NORMS)
def test_a_query_sees_earlier_ranks_and_not_itself(norm_first: bool, position: Position) -> None:
    assert reached(lively(norm_first=norm_first, position=position), BATCH) == SEES


@pytest.mark.parametrize("norm_first", NORMS.values(), ids=NORMS)
def test_no_gradient_reaches_a_token_from_its_own_logits(norm_first: bool) -> None:
    """By gradients at the input embeddings of the content stream."""
    model = lively(norm_first=norm_first)
    found: list[Tensor] = []

    def watch(module: object, given: object, vectors: Tensor) -> Tensor:
        found.append(vectors.detach().requires_grad_())
        return found[-1]

    handle = model.embed.tokens.register_forward_hook(watch)
    logits = model.logits(BATCH)[0]
    handle.remove()
    for slot, position in enumerate(TARGETS[0].tolist()):
        (gradient,) = torch.autograd.grad(logits[slot].sum(), found[0], retain_graph=True)
        assert gradient[0].abs().sum(-1).nonzero().flatten().tolist() == SEES[position]


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_packed_documents_are_independent(position: Position) -> None:
    doc = torch.tensor([[0, 0, 0, 1, 1, 1]])
    batch = BATCH._replace(document_ids=doc, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert reached(lively(position=position), batch) == {1: [0, 2], 3: [4], 5: [3, 4]}


@pytest.mark.parametrize("norm_first", NORMS.values(), ids=NORMS)
def test_both_streams_share_the_blocks(norm_first: bool) -> None:
    """One block by hand: queries from the query stream, keys and values from the content stream."""
    model = lively(norm_first=norm_first)
    vector = model.extras["query"].vector
    content, query = model.embed(TOKENS), model.embed.add_positions(vector.expand(1, 3, -1), TARGETS)
    upto, _ = model.stack.attention_specs(content, None, RANK)
    earlier = make_query_stream_spec(None, RANK, TARGETS)._replace(
        relative_positions=upto.relative_positions.at_positions(TARGETS)
    )
    for block in model.stack.blocks:
        norm = block.attention_norm
        if norm_first:
            g = query + block.attention(norm(query), earlier, norm(content))
            g = g + block.mlp(block.mlp_norm(g))
        else:
            g = norm(query + block.attention(query, earlier, content))
            g = block.mlp_norm(g + block.mlp(g))
        query, content = g, block(content, upto)
    assert_close(model.target_hidden_states(BATCH), model.stack.apply_final_norm(query))


def test_a_query_stream_with_full_visibility_is_the_content_stream() -> None:
    """It starts from the content embeddings and attends to everything."""
    model = lively()
    block, x = model.stack.blocks[0], torch.randn(1, T, 16)
    all_see_all, _ = model.stack.attention_specs(x, None, None)
    assert_close(block(x, all_see_all, kv_states=x), block(x, all_see_all))


def test_a_query_without_keys_is_finite() -> None:
    """All tokens are targets, so the first in the order attends to nothing; unused slots point to position 0."""
    model = lively().train()
    batch = Batch(
        TOKENS,
        attention_rank=torch.tensor([[1, 2, 3, 4, 5, 6]]),
        token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        target_positions=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 0]]),
        labels=torch.tensor([[7, 8, 9, 10, 11, 12, -100, -100]]),
    )
    loss = model.loss(batch)
    loss.backward()
    assert loss.isfinite()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


def test_without_ranks_targets_come_last_in_the_order() -> None:
    assert rank_targets_last(TOKENS, torch.tensor([[4, 1]]), None).tolist() == [[0, 1, 0, 0, 1, 0]]
    assert reached(lively(), BATCH._replace(attention_rank=None)) == {1: [0, 2, 4], 3: [0, 2, 4], 5: [0, 2, 4]}


def test_unused_slots_hide_no_token() -> None:
    """A batch fills the slots of its shorter rows with position 0: their targets see what they see alone."""
    model, alone = lively(), Batch(TOKENS, target_positions=torch.tensor([[3]]), labels=torch.tensor([[10]]))
    filled = Batch(TOKENS, target_positions=torch.tensor([[3, 0]]), labels=torch.tensor([[10, -100]]))
    assert_close(model.logits(filled)[:, :1], model.logits(alone))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("position_ids", {"position": LearnedPosition(16)}),
        ("token_type_ids", {"position": LearnedPosition(16), "num_segments": 2}),
        ("token_type_ids", {}),  # by being in the same one or not
    ],
)
def test_target_position_and_segment_change_the_logits(field: str, changes: dict[str, Any]) -> None:
    """The token at the target does not."""
    model = lively(**changes)
    batch = BATCH._replace(position_ids=torch.arange(T)[None], token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    before = model.logits(batch)[0, 2]
    assert_close(before, model.logits(batch._replace(position_ids=None))[0, 2])
    changed = getattr(batch, field).clone()
    changed[0, 5] = 0
    assert not torch.equal(model.logits(batch._replace(**{field: changed}))[0, 2], before)


def test_with_shared_blocks_and_factorized_embeddings() -> None:
    from firth.models import LMHead

    assert reached(lively(num_shared=3, embed_dim=8, head=LMHead(transform=True)), BATCH) == SEES


def refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_model(config)


def test_unsupported_combinations_raise() -> None:
    refused(xlnet(1, 16, 2, V, extras=(QueryStream(), SentencePairHead())), "QueryStream only alone")
    refused(xlnet(1, 16, 2, V, position=t5(1, 16, 2, 32).position, extras=(QueryStream(),)), "T5Bias yet")
    refused(xlnet(1, 16, 2, V, position=Rotary()), "Rotary yet")
    refused(xlnet(1, 16, 2, V, window=SlidingWindow(4, 2)), "SlidingWindow yet")
    refused(xlnet(1, 16, 2, V, convolution=ConvolutionConfig()), "ConvolutionConfig yet")
