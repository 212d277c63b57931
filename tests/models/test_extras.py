"""Heads that objectives add: sentence pairs, span boundaries, two directions; narrow and shared parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import ClassificationHead, Encoder, LMHead, ModelConfig, count_parameters, make_model, with_extras
from firth.models.config import GeneratorConfig, QueryStream, SentencePairHead, SpanBoundaryHead
from firth.models.presets import albert, bart, bert, gpt2, roberta
from firth.models.task_heads import with_classification_head
from firth.objectives.batch import Batch

V, T = 30, 6
TOKENS = torch.tensor([[2, 7, 4, 4, 10, 3], [2, 4, 8, 9, 4, 3]])
BATCH = Batch(TOKENS, target_positions=torch.tensor([[2, 3], [1, 4]]), labels=torch.tensor([[11, 12], [13, -100]]))
BOUNDARY = torch.tensor([[[1, 4, 0], [1, 4, 1]], [[0, 2, 0], [0, 0, 0]]])


def lively(config: ModelConfig) -> Encoder:
    torch.manual_seed(1)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    assert isinstance(model, Encoder)
    return model


# --- pairs --------------------------------------------------------------------------------------------------------


def test_pair_head_reads_the_first_position() -> None:
    model = lively(bert(2, 16, 2, V, extras=(SentencePairHead(),)))
    batch = BATCH._replace(pair_labels=torch.tensor([0, 1]))
    parts = model.losses(batch)
    head = model.extras["pair"]
    first = model.backbone(batch)[:, 0]
    logits = torch.tanh(first @ head.pooler.weight.T + head.pooler.bias) @ head.out.weight.T + head.out.bias
    assert logits.shape == (2, 2)
    by_hand = -logits[0].log_softmax(-1)[0] - logits[1].log_softmax(-1)[1]
    assert_close(parts["pairs"], by_hand)
    assert_close(parts["targets"], model.loss(batch))
    assert batch.loss_counts == {"targets": 3, "tokens": 12, "pairs": 2}


def test_no_pair_loss_without_pairs() -> None:
    assert list(lively(bert(1, 16, 2, V, extras=(SentencePairHead(),))).losses(BATCH)) == ["targets"]


def test_a_batch_for_a_missing_head_fails_an_assertion() -> None:
    model = lively(bert(1, 16, 2, V))
    with pytest.raises(AssertionError):
        model.losses(BATCH._replace(pair_labels=torch.tensor([0, 1])))
    with pytest.raises(AssertionError):
        model.losses(BATCH._replace(span_boundaries=BOUNDARY))


# --- boundaries ---------------------------------------------------------------------------------------------------


def test_boundary_by_hand() -> None:
    """The three inputs concatenated, two layers of dense, GELU and norm, then the MLM projection with its bias."""
    model = lively(bert(2, 16, 2, V, extras=(SpanBoundaryHead(max_span_length=2),)))
    head, batch = model.extras["boundary"], BATCH._replace(span_boundaries=BOUNDARY)
    x = model.backbone(batch)
    h = torch.stack(
        [
            torch.cat([x[0, 1], x[0, 4], head.positions.weight[0]]),
            torch.cat([x[0, 1], x[0, 4], head.positions.weight[1]]),
            torch.cat([x[1, 0], x[1, 2], head.positions.weight[0]]),
        ]
    )
    for dense, norm in ((head.dense1, head.norm1), (head.dense2, head.norm2)):
        h = F.layer_norm(F.gelu(h @ dense.weight.T + dense.bias), (16,), norm.weight, norm.bias, 1e-12)
    logits = h @ model.embed.tokens.weight.T + model.head.bias
    spans = F.cross_entropy(logits, torch.tensor([11, 12, 13]), reduction="sum")
    assert_close(model.losses(batch)["targets"], model.loss(batch) + spans)


def test_boundary_head_reads_only_the_two_boundary_states() -> None:
    model = lively(bert(2, 16, 2, V, extras=(SpanBoundaryHead(),)))
    x = torch.randn(2, T, 16, requires_grad=True)
    y = model.extras["boundary"](x, BOUNDARY)
    for row, slot, around in ((0, 0, [1, 4]), (0, 1, [1, 4]), (1, 0, [0, 2])):
        (gradient,) = torch.autograd.grad(y[row, slot].square().sum(), x, retain_graph=True)
        assert gradient[row].abs().sum(-1).nonzero().flatten().tolist() == around
        assert gradient[1 - row].abs().max() == 0


def test_offsets_beyond_the_longest_share_the_last_embedding() -> None:
    model = lively(bert(1, 16, 2, V, extras=(SpanBoundaryHead(max_span_length=3),)))
    x = torch.randn(1, T, 16)
    y = model.extras["boundary"](x, torch.tensor([[[0, 5, which] for which in (1, 2, 3, 100)]]))[0]
    assert torch.equal(y[1], y[2])
    assert torch.equal(y[1], y[3])
    assert not torch.equal(y[0], y[1])


# --- two directions -----------------------------------------------------------------------------------------------


def both_ways(tokens: Tensor) -> Batch:
    """A batch whose targets are the next and the previous token."""
    rows, length = tokens.shape
    positions = torch.arange(length)
    none = torch.full((rows, 1), -100)
    labels = torch.stack([torch.cat([tokens[:, 1:], none], 1), torch.cat([none, tokens[:, :-1]], 1)], 1)
    return Batch(
        tokens, attention_rank=torch.stack([positions, positions.flip(0)]).expand(rows, 2, length), labels=labels
    )


@pytest.mark.parametrize("make", [bert, gpt2], ids=["encoder", "decoder"])
def test_no_direction_sees_its_target(make: Any) -> None:
    model = lively(make(3, 16, 2, V))
    batch = both_ways(TOKENS[:1])
    before = model.logits(batch)
    assert before.shape == (1, 2, T, V)
    for j in range(T):
        tokens = batch.input_ids.clone()
        tokens[0, j] += 10
        moved = (model.logits(batch._replace(input_ids=tokens)) != before).any(-1)[0]
        positions = torch.arange(T)
        assert torch.equal(moved[0], positions >= j), "forward, who comes after"
        assert torch.equal(moved[1], positions <= j), "backward, who comes before"


def test_forward_is_causal_and_backward_its_mirror() -> None:
    """The first direction is a causal model; the second equals it on a reversed row with the original positions."""
    model = lively(bert(2, 16, 2, V))
    both = model.logits(both_ways(TOKENS))
    positions = torch.arange(T).expand(2, T)
    assert_close(both[:, 0], model.logits(Batch(TOKENS, attention_rank=positions)))
    mirrored = model.logits(Batch(TOKENS.flip(1), position_ids=positions.flip(1), attention_rank=positions)).flip(1)
    assert_close(both[:, 1], mirrored)


def test_bidirectional_loss_of_packed_documents() -> None:
    model = lively(bert(2, 16, 2, V))
    doc = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1]])
    batch = both_ways(TOKENS)._replace(document_ids=doc)
    logits = model.logits(batch)
    by_hand = F.cross_entropy(logits.flatten(0, 2), batch.labels.flatten(), reduction="sum", ignore_index=-100)
    assert batch.num_targets == 20
    assert_close(model.losses(batch)["targets"], by_hand)
    tokens = TOKENS.clone()
    tokens[0, 4] = 20
    after = model.logits(batch._replace(input_ids=tokens))
    assert torch.equal(after[0, :, :3], logits[0, :, :3])


# --- narrow vectors, shared blocks, one segment -------------------------------------------------------------------


def test_shared_blocks_are_one_set_of_parameters() -> None:
    once, thrice = albert(1, 16, 2, 8, V), albert(3, 16, 2, 8, V)
    assert count_parameters(once) == count_parameters(thrice)
    model = lively(thrice)
    assert len(model.stack.blocks) == 1
    states = model(TOKENS, output_hidden_states=True).hidden_states
    assert len(states) == 4
    x = states[0]
    for wanted in states[1:]:
        x = model.stack.blocks[0](x, model_sight())
        assert_close(x, wanted)


def model_sight() -> Any:
    from firth.models.attention import AttentionSpec

    return AttentionSpec()


def test_layers_share_in_groups() -> None:
    stack = lively(bert(5, 16, 2, V, num_shared=2)).stack
    a, b, c = stack.blocks
    assert all(x is y for x, y in zip(stack.layers, [a, a, b, b, c], strict=True))


def test_factorized_embeddings_by_hand() -> None:
    model = lively(albert(2, 16, 2, 8, V))
    assert model.embed.tokens.weight.shape == (V, 8)
    e = model.embed
    x = e.tokens.weight[TOKENS] + e.position_embeddings.weight[:T] + e.segments.weight[0]
    x = F.layer_norm(x, (8,), e.norm.weight, e.norm.bias, 1e-12) @ e.widen.weight.T + e.widen.bias
    assert_close(model.embed(TOKENS), x)
    states, head = model.backbone(Batch(TOKENS)), model.head
    h = F.gelu(states @ head.dense.weight.T + head.dense.bias, approximate="tanh")
    h = F.layer_norm(h, (8,), head.norm.weight, head.norm.bias, 1e-12)
    assert_close(model.logits(Batch(TOKENS)), h @ e.tokens.weight.T + head.bias)


def test_a_single_segment_embedding_ignores_token_types() -> None:
    """RoBERTa trains one, whatever a pair of texts says."""
    model = lively(roberta(1, 16, 2, V))
    second = torch.ones_like(TOKENS)
    assert torch.equal(model.logits(Batch(TOKENS, token_type_ids=second)), model.logits(Batch(TOKENS)))


# --- which go together --------------------------------------------------------------------------------------------


def test_with_extras_adds_what_is_missing() -> None:
    config = bert(1, 16, 2, V, extras=(SpanBoundaryHead(max_span_length=7),))
    assert with_extras(config, ("boundary",)) == config
    assert with_extras(config, ("boundary", "pair")).extras == (SentencePairHead(), SpanBoundaryHead(max_span_length=7))
    assert with_extras(config, ()).extras == config.extras
    assert with_extras(bert(1, 16, 2, V), ("generator",)).extras == (GeneratorConfig(0.25, 50.0),)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gpt2(1, 16, 2, V, extras=(SentencePairHead(),)), "extras are for the architecture encoder"),
        (bart(1, 16, 2, V, extras=(SentencePairHead(),)), "extras are for the architecture encoder"),
        (
            bert(1, 16, 2, V, head=ClassificationHead(("a", "b")), extras=(SentencePairHead(),)),
            "a language model's head",
        ),
        (
            bert(1, 16, 2, V, extras=(SentencePairHead(), SentencePairHead())),
            "SentencePairHead, SentencePairHead: one of each",
        ),
        (bert(1, 16, 2, V, extras=(SentencePairHead(), GeneratorConfig())), "GeneratorConfig only alone"),
        (bert(1, 16, 2, V, extras=(SpanBoundaryHead(0),)), "SpanBoundaryHead.max_span_length is 0"),
        (bert(1, 16, 2, V, embed_dim=8, head=LMHead()), "model.embed_dim needs model.head.transform"),
        (bert(1, 16, 2, V, embed_dim=0), "model.embed_dim is 0"),
        (bert(1, 16, 2, V, num_shared=0), "model.num_shared is 0"),
    ],
)
def test_invalid_combinations_raise(config: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_model(config)


def test_a_classification_head_drops_the_extras() -> None:
    for extra in (SentencePairHead(), QueryStream(), GeneratorConfig()):
        config = with_classification_head(bert(1, 16, 2, V, extras=(extra,)), ("a", "b"))
        assert config.extras == ()
        assert make_model(config)(TOKENS).logits.shape == (2, 2)


def test_extras_are_initialized_like_the_backbone() -> None:
    torch.manual_seed(0)
    for extras in ((SentencePairHead(), SpanBoundaryHead()), (GeneratorConfig(),), (QueryStream(),)):
        model = make_model(bert(2, 128, 2, 100, extras=extras))
        for name, p in model.named_parameters():
            if name.startswith("extras.") and p.ndim > 1 and p.numel() > 1000:
                assert float(p.detach().std()) == pytest.approx(0.02, rel=0.1), name
            elif name.startswith("extras.") and p.ndim == 1:
                assert p.unique().tolist() == ([0.0] if name.endswith("bias") else [1.0]), name
