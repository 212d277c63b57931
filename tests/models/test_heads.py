"""The LM head's loss, computed in chunks and at target positions only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from firth.models import LMHead, make_model
from firth.models.heads import ChunkedCrossEntropy, LMHeadModule, lm_head_cross_entropy
from firth.models.kernels import cross_entropy
from firth.models.presets import bert, gpt2, t5
from firth.objectives.batch import Batch


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("piece", [1, 26, 40, 10_000], ids=lambda n: f"{n}-logits")
def test_chunked_loss_equals_the_full_one(piece: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 rows of 13 logits, in chunks of 1, 2, 3 and 7 rows; two labels are ignored."""
    monkeypatch.setattr(ChunkedCrossEntropy, "CHUNK_LOGITS", piece)
    labels = torch.tensor([3, -100, 0, 12, 12, -100, 5])
    x, weight, bias = torch.randn(7, 4), torch.randn(13, 4), torch.randn(13) if with_bias else None

    def loss_and_gradients(loss):  # type: ignore[no-untyped-def]
        given = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
        value = loss(*given)
        (value * 0.7).backward()
        return value.detach(), [t.grad for t in given if t is not None]

    def plain(x, weight, bias):  # type: ignore[no-untyped-def]
        return F.cross_entropy(F.linear(x, weight, bias), labels, ignore_index=-100, reduction="sum")

    value, gradients = loss_and_gradients(lambda *given: ChunkedCrossEntropy.apply(*given, labels))
    wanted, wanted_gradients = loss_and_gradients(plain)
    assert_close(value, wanted)
    assert len(gradients) == (3 if with_bias else 2)
    for g, w in zip(gradients, wanted_gradients, strict=True):
        assert_close(g, w)
    assert gradients[0][[1, 5]].abs().max() == 0


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    assert ChunkedCrossEntropy.apply(x, weight, None, torch.tensor([1])).item() == 1000


def test_value_without_gradients_and_in_bfloat16() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.tensor([1, 2, 3, -100, 5, 19])
    wanted = lm_head_cross_entropy(x, weight, None, labels)
    with torch.no_grad():
        assert_close(lm_head_cross_entropy(x, weight, None, labels), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = lm_head_cross_entropy(x, weight, None, labels)
    assert_close(mixed, wanted, rtol=0.02, atol=0)
    mixed.backward()
    assert x.grad is not None


@pytest.mark.parametrize("fused", [None, False, True])
def test_frozen_heads_never_materialize_all_logits(fused: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = torch.randn(50, 8), torch.randn(20, 8), torch.randint(20, (50,))
    labels[3] = -100
    wanted = lm_head_cross_entropy(x, weight, None, labels)
    monkeypatch.setattr(ChunkedCrossEntropy, "CHUNK_LOGITS", 7 * 20)
    linear, seen = F.linear, list[int]()
    monkeypatch.setattr(F, "linear", lambda a, *more: seen.append(len(a)) or linear(a, *more))
    with torch.no_grad():
        assert_close(lm_head_cross_entropy(x, weight, None, labels, fused), wanted)
    assert (max(seen), sum(seen)) == (7, 50)


@pytest.mark.parametrize("config", [bert(1, 16, 2, 30), gpt2(1, 16, 2, 30)], ids=["bert", "gpt2"])
def test_logits_at_target_positions_only(config) -> None:  # type: ignore[no-untyped-def]
    model = make_model(config).eval()
    tokens = torch.randint(0, 30, (2, 6))
    positions = torch.tensor([[4, 0, 0], [1, 2, 5]])
    everywhere = model.logits(Batch(tokens))
    there = model.logits(Batch(tokens, target_positions=positions))
    assert_close(there, torch.stack([everywhere[0, positions[0]], everywhere[1, positions[1]]]))
    labels = torch.tensor([[7, 8, -100], [9, 10, 11]])
    wanted = F.cross_entropy(there.flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(model.loss(Batch(tokens, target_positions=positions, labels=labels)), wanted)


def test_untied_and_scaled_heads_by_hand() -> None:
    states, embedding = torch.randn(2, 3, 16), torch.randn(30, 16)
    untied = LMHeadModule(t5(1, 16, 2, 32, 30), LMHead(tied=False))
    own = torch.nn.init.normal_(untied.weight)
    assert_close(untied(states, embedding), states @ own.T)
    scaled = LMHeadModule(t5(1, 16, 2, 32, 30), LMHead(scale_hidden_states=True))
    assert scaled.weight is None
    assert_close(scaled(states, embedding), states @ embedding.T / 4)


def test_berts_transform_by_hand() -> None:
    config = bert(1, 16, 2, 30)
    head = make_model(config).head
    assert isinstance(head, LMHeadModule)
    assert head.dense is not None
    states, embedding = torch.randn(5, 16), torch.randn(30, 16)
    torch.nn.init.normal_(head.bias)
    h = F.layer_norm(F.gelu(states @ head.dense.weight.T + head.dense.bias), (16,), eps=1e-12)
    assert_close(head(states, embedding), h @ embedding.T + head.bias)


# --- never all scores at once, on any device


def loss_and_gradients(loss, *given):  # type: ignore[no-untyped-def]
    given = [None if t is None else t.clone().requires_grad_() for t in given]
    value = loss(*given)
    (value * 0.7).backward()
    return value.detach(), [t.grad for t in given if t is not None]


LABELS = torch.tensor([3, -100, 0, 12, 12, -100, 5])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 7], ids=lambda n: f"{n}-rows")
def test_chunks_of_any_size_equal_cross_entropy(
    rows: int, with_bias: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 rows of 13 tokens; padding to 128 tokens changes nothing."""
    monkeypatch.setattr(cross_entropy, "loss_chunk_rows", lambda N, P: rows)
    x, weight, bias = torch.randn(7, 4), torch.randn(13, 4), torch.randn(13) if with_bias else None

    def plain(x, weight, bias=None):  # type: ignore[no-untyped-def]
        return F.cross_entropy(F.linear(x, weight, bias), LABELS, ignore_index=-100, reduction="sum")

    def pieces(x, weight, bias=None):  # type: ignore[no-untyped-def]
        return cross_entropy.fused_cross_entropy(x, weight, bias, LABELS, padded)

    value, gradients = loss_and_gradients(pieces, x, weight, bias)
    wanted, wanted_gradients = loss_and_gradients(plain, x, weight, bias)
    assert_close(value, wanted)
    assert len(gradients) == (3 if with_bias else 2)
    for g, w in zip(gradients, wanted_gradients, strict=True):
        assert_close(g, w)
    assert gradients[0][[1, 5]].abs().max() == 0


def test_chunks_in_bfloat16_accumulate_in_float32() -> None:
    """The weight gradient is float32, and closer to the exact one than a matmul that rounds at the end."""
    torch.manual_seed(0)
    x, weight, labels = torch.randn(512, 16), torch.randn(40, 16), torch.randint(0, 40, (512,))
    truth, (dx, dw) = loss_and_gradients(
        lambda x, weight: F.cross_entropy(x @ weight.T, labels, reduction="sum"), x, weight
    )

    def pieces(x, weight):  # type: ignore[no-untyped-def]
        with torch.autocast("cpu", torch.bfloat16):
            return lm_head_cross_entropy(x, weight, None, labels, use_fused_loss=True)

    value, (found_dx, found_dw) = loss_and_gradients(pieces, x, weight)
    assert found_dw.dtype == found_dx.dtype == torch.float32
    assert_close(value, truth, rtol=0.005, atol=0)
    assert torch.cosine_similarity(found_dw.flatten(), dw.flatten(), 0) > 0.9995
    assert torch.cosine_similarity(found_dx.flatten(), dx.flatten(), 0) > 0.999


def test_chunked_loss_is_traced_as_one_operator() -> None:
    """The compiled step contains one operator, which computes its own gradients."""
    x, weight, bias = torch.randn(7, 4), torch.randn(13, 4), torch.randn(13)
    torch.library.opcheck(
        cross_entropy.linear_cross_entropy_op,
        (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), LABELS, 115),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"),
    )


def test_chunk_sizes() -> None:
    assert cross_entropy.loss_chunk_rows(5120, 30592) == 5120, "one piece"
    assert cross_entropy.loss_chunk_rows(0, 30592) == 1, "no targets"
    assert cross_entropy.loss_chunk_rows(32768, 50304) == 8192
    rows = cross_entropy.loss_chunk_rows(16384, 128256)
    assert rows % 128 == 0
    assert rows * 128256 <= cross_entropy.MAX_CHUNK_LOGITS
    assert cross_entropy.vocab_padding(30522) == 70
    assert cross_entropy.vocab_padding(16384) == 0


@pytest.mark.parametrize("with_bias", [False, True])
def test_padding_of_the_vocabulary_changes_nothing(with_bias: bool) -> None:
    x, weight, bias = torch.randn(7, 4), torch.randn(13, 4), torch.randn(13) if with_bias else None

    def at_once(padded):  # type: ignore[no-untyped-def]
        return lambda *given: lm_head_cross_entropy(
            *given[:2], given[2] if with_bias else None, LABELS, use_fused_loss=False, pad_vocab=padded
        )

    value, gradients = loss_and_gradients(at_once(True), x, weight, bias)
    wanted, wanted_gradients = loss_and_gradients(at_once(False), x, weight, bias)
    assert_close(value, wanted)
    for g, w in zip(gradients, wanted_gradients, strict=True):
        assert g.shape == w.shape
        assert_close(g, w)


@pytest.mark.parametrize(
    "config", [bert(1, 16, 2, 30), gpt2(1, 16, 2, 30), t5(1, 16, 2, 32, 30)], ids=lambda c: c.family
)
def test_gradients_are_equal_with_every_engine_flag(config) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = make_model(config).eval()
    tokens = torch.randint(0, 30, (2, 6))
    labels = torch.tensor([[7, 8, -100, 1, 2, 3], [9, 10, 11, -100, -100, 0]])
    sides = {"decoder_input_ids": tokens} if config.architecture == "encoder-decoder" else {}
    found = []
    for fused, padded in ((None, None), (False, False), (False, True), (True, True)):
        model.head.use_fused_loss, model.head.pad_vocab = fused, padded
        model.zero_grad()
        loss = model.loss(Batch(tokens, labels=labels, **sides))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert sum(p.numel() for p in model.parameters()) == model.num_parameters, "padding is in no parameter"
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-5)
