"""Packed documents are independent, visibility is causal where it must be, and models are initialized as published."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import PRESETS, ClassificationHead, Model, ModelConfig, count_parameters, load_model, make_model
from firth.models.config import LearnedPosition, LMHead, MLPConfig, T5Bias
from firth.models.presets import albert, bart, bert, gpt2, mobilebert, t5, xlnet
from firth.models.task_heads import with_classification_head
from firth.objectives.batch import Batch

V = 30
SHAPES = {"encoder": bert(2, 16, 2, V), "decoder": gpt2(2, 16, 2, V), "encoder-decoder": t5(2, 16, 2, 32, V)}
EACH = pytest.mark.parametrize(
    "config", [*SHAPES.values(), bart(2, 16, 2, V), albert(2, 16, 2, 8, V)], ids=lambda config: config.family
)
FIRST, SECOND = slice(0, 4), slice(4, 9)  # two documents in a row of 10, then padding
D_FIRST, D_SECOND = slice(0, 3), slice(3, 7)  # their sides of the decoder, in a row of 8


def counted(*lengths: int, width: int) -> tuple[Tensor, Tensor]:
    """`document_ids` and `position_ids` of consecutive documents: (0 0 1 1 1 -1), (0 1 0 1 2 0)."""
    doc = [i for i, n in enumerate(lengths) for _ in range(n)]
    position = [j for n in lengths for j in range(n)]
    rest = width - len(doc)
    return torch.tensor([doc + [-1] * rest]), torch.tensor([position + [0] * rest])


def packed(shape: str) -> Batch:
    g = torch.Generator().manual_seed(0)
    doc, position = counted(4, 5, width=10)
    batch = Batch(torch.randint(0, V, (1, 10), generator=g), document_ids=doc, position_ids=position)
    if shape != "encoder-decoder":
        return batch
    doc, position = counted(3, 4, width=8)
    answer = torch.randint(0, V, (1, 8), generator=g)
    return batch._replace(decoder_input_ids=answer, decoder_document_ids=doc, decoder_position_ids=position)


def alone(batch: Batch, part: slice, decoder_part: slice) -> Batch:
    """One document of a packed row as a row of its own, without document ids."""
    if batch.decoder_input_ids is None:
        return Batch(batch.input_ids[:, part])
    return Batch(batch.input_ids[:, part], decoder_input_ids=batch.decoder_input_ids[:, decoder_part])


def lively(config: ModelConfig) -> Model:
    """A model whose weights are perturbed, so that every path contributes."""
    torch.manual_seed(1)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def changed(batch: Batch, field: str, position: int) -> Batch:
    tokens = getattr(batch, field).clone()
    tokens[0, position] = (tokens[0, position] + 1) % V
    return batch._replace(**{field: tokens})


@EACH
def test_packed_documents_are_independent(config: ModelConfig) -> None:
    model, batch = lively(config), packed(config.architecture)
    before = model.logits(batch)
    two_sided = config.architecture == "encoder-decoder"
    first, second = (D_FIRST, D_SECOND) if two_sided else (FIRST, SECOND)
    touched = [
        ("input_ids", 1, second, first),
        ("input_ids", 5, first, second),
        ("input_ids", 9, slice(0, second.stop), None),
    ]
    if two_sided:
        touched += [("decoder_input_ids", 0, second, first), ("decoder_input_ids", 3, first, second)]
    for field, position, other, own in touched:
        after = model.logits(changed(batch, field, position))
        assert torch.equal(after[0, other], before[0, other]), f"{field} {position} leaks"
        if own is not None:
            assert not torch.equal(after[0, own], before[0, own]), f"{field} {position} moves nothing at all"


@EACH
def test_a_packed_row_equals_its_documents(config: ModelConfig) -> None:
    model, batch = lively(config), packed(config.architecture)
    whole = model.logits(batch)
    for part, decoder_part in ((FIRST, D_FIRST), (SECOND, D_SECOND)):
        there = decoder_part if config.architecture == "encoder-decoder" else part
        assert_close(whole[:, there], model.logits(alone(batch, part, decoder_part)))


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_decoders_are_causal(shape: str) -> None:
    model = lively(SHAPES[shape])
    batch = alone(packed(shape), SECOND, D_SECOND)
    before = model.logits(batch)
    after = model.logits(changed(batch, "decoder_input_ids" if shape == "encoder-decoder" else "input_ids", 2))
    assert_close(after[0, :2], before[0, :2])
    assert not torch.equal(after[0, 2], before[0, 2])


def test_attention_rank_makes_a_bidirectional_prefix() -> None:
    model, batch = lively(SHAPES["decoder"]), alone(packed("decoder"), SECOND, D_SECOND)
    prefix = batch._replace(attention_rank=torch.tensor([[0, 0, 0, 1, 2]]))
    before, after = model.logits(prefix), model.logits(changed(prefix, "input_ids", 2))
    assert not torch.equal(after[0, 0], before[0, 0])
    before, after = model.logits(prefix), model.logits(changed(prefix, "input_ids", 3))
    assert torch.equal(after[0, :3], before[0, :3])


def test_a_call_and_a_batch_agree() -> None:
    for shape, config in SHAPES.items():
        model, batch = lively(config), alone(packed(shape), FIRST, D_FIRST)
        extra = {} if batch.decoder_input_ids is None else {"decoder_input_ids": batch.decoder_input_ids}
        assert_close(model(batch.input_ids, **extra).logits, model.logits(batch))


def test_classification_reads_the_first_or_last_position() -> None:
    names = ("yes", "no")
    tokens, mask = torch.randint(0, V, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    for config, ends in ((SHAPES["encoder"], [[0], [0]]), (SHAPES["decoder"], [[2], [4]])):
        model = lively(with_classification_head(config, names))
        batch = Batch(
            tokens, document_ids=mask - 1, target_positions=torch.tensor(ends), task_labels=torch.tensor([[0], [1]])
        )
        called = model(tokens, attention_mask=mask, labels=batch.task_labels[:, 0])
        assert called.logits.shape == (2, 2)
        assert_close(called.logits, model.logits(batch)[:, 0])
        assert_close(called.loss * 2, model.loss(batch))


def test_a_text_that_is_too_long_raises() -> None:
    model = make_model(bert(1, 16, 2, V, position=LearnedPosition(8)))
    with pytest.raises(UserError, match="9 tokens is longer than the 8 positions"):
        model(torch.zeros(1, 9, dtype=torch.long))
    model = make_model(bart(1, 16, 2, V, position=LearnedPosition(8)))
    for read, written in ((9, 2), (2, 9)):
        with pytest.raises(UserError, match="9 tokens is longer than the 8 positions"):
            model(torch.zeros(1, read, dtype=torch.long), labels=torch.zeros(1, written, dtype=torch.long))


def test_left_and_right_padding_change_nothing_with_learned_positions() -> None:
    model, g = lively(bart(2, 16, 2, V)), torch.Generator().manual_seed(0)
    read, written = torch.randint(5, V, (2, 6), generator=g), torch.randint(5, V, (2, 5), generator=g)
    seen, said = torch.ones_like(read), torch.ones_like(written)
    seen[1, 4:], said[1, 3:] = 0, 0
    both = model(read, seen, written, said).logits
    assert both.isfinite().all()
    assert_close(both[1, :3], model(read[1:, :4], decoder_input_ids=written[1:, :3]).logits[0])
    assert_close(both[0], model(read[:1], decoder_input_ids=written[:1]).logits[0])


def test_labels_or_decoder_input_are_needed() -> None:
    with pytest.raises(UserError, match="decoder_input_ids or labels"):
        make_model(SHAPES["encoder-decoder"])(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 30, "num_heads": 4}, "model.dim=30 is not a multiple of model.num_heads=4"),
        ({"num_layers": 0}, "model.num_layers is 0"),
        ({"dropout": 1.0}, r"model.dropout is 1.0, and must be in \[0, 1\)"),
        ({"mlp": MLPConfig(0)}, "model.mlp.dim is 0"),
        ({"position": LearnedPosition(0)}, "model.position.length is 0"),
        ({"position": T5Bias(32, 16)}, "model.position.num_buckets"),
        ({"head": ClassificationHead(())}, "model.head has no classes"),
    ],
)
def test_invalid_configs_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_model(bert(**{"num_layers": 1, "dim": 16, "num_heads": 2, "vocab_size": V} | changes))


@pytest.mark.parametrize("config", [t5(1, 16, 2, 24, V), mobilebert(1, 16, 2, 8, 12, V), xlnet(1, 16, 2, V)])
def test_bigrams_that_some_stream_would_not_read_are_refused(config: ModelConfig) -> None:
    assert not config.problems()
    assert "num_bigram_buckets" in replace(config, num_bigram_buckets=10).problems()[0]


# --- starting weights ---------------------------------------------------------------------------------------------


def spreads(config: ModelConfig) -> dict[str, float]:
    torch.manual_seed(0)
    return {n: float(p.detach().double().std()) for n, p in make_model(config).named_parameters() if p.ndim > 1}


def test_bert_initialization() -> None:
    for name, spread in spreads(bert(2, 128, 2, 500, position=LearnedPosition(100))).items():
        assert spread == pytest.approx(0.02, rel=0.1), name


def test_gpt2_initialization() -> None:
    """Layers that write to the residual stream are scaled by 1 / sqrt(2 layers)."""
    small = 0
    for name, spread in spreads(gpt2(8, 64, 2, 500)).items():
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        small += residual
        assert spread == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
    assert small == 16


def test_t5_initialization() -> None:
    """1/sqrt(fan-in) for matrices and the untied head, 1 for embeddings, small queries with unscaled scores."""
    config = t5(1, 64, 2, 256, 500, head_dim=48, head=LMHead(tied=False))
    torch.manual_seed(0)
    model = make_model(config)
    state = model.state_dict()
    wanted = {"embed.tokens.weight": 1.0, "head.weight": 1 / math.sqrt(64)}
    for side in ("encoder", "decoder"):
        wanted[f"{side}.blocks.0.attention.out.weight"] = 1 / math.sqrt(2 * 48)
        wanted[f"{side}.blocks.0.mlp.up.weight"] = 1 / math.sqrt(64)
        wanted[f"{side}.blocks.0.mlp.down.weight"] = 1 / math.sqrt(256)
    for name, spread in wanted.items():
        assert float(state[name].std()) == pytest.approx(spread, rel=0.05), name
    assert float(state["encoder.score.table.weight"].std()) == pytest.approx(1 / math.sqrt(64), rel=0.3)
    for part in ("encoder.blocks.0.attention", "decoder.blocks.0.attention", "decoder.blocks.0.cross"):
        q, k, v = state[f"{part}.qkv.weight"].chunk(3)
        assert float(q.std()) == pytest.approx(1 / math.sqrt(64 * 48), rel=0.05)
        assert float(k.std()) == pytest.approx(1 / math.sqrt(64), rel=0.05)
        assert float(v.std()) == pytest.approx(1 / math.sqrt(64), rel=0.05)


def test_biases_start_at_0_and_norms_at_1() -> None:
    for config in SHAPES.values():
        for name, p in make_model(config).named_parameters():
            if p.ndim == 1:
                assert p.unique().tolist() == ([0.0] if name.endswith("bias") else [1.0]), name


def test_encoder_and_decoder_with_shared_blocks(tmp_path: Path) -> None:
    """The decoder owns only its cross-attention and final norm; saving and loading keep the sharing."""
    torch.manual_seed(0)
    apart, shared = t5(2, 32, 2, 48, 40), t5(2, 32, 2, 48, 40, share_stacks=True)
    model = make_model(shared).eval()
    block = sum(p.numel() for n, p in model.encoder.blocks.named_parameters())  # type: ignore[union-attr]
    assert count_parameters(apart) - count_parameters(shared) == block
    model.save(tmp_path / "shared")
    again = load_model(tmp_path / "shared")
    ids = torch.randint(0, 40, (2, 6))
    assert torch.equal(model(ids, decoder_input_ids=ids).logits, again(ids, decoder_input_ids=ids).logits)
    assert again.decoder.blocks[1].mlp is again.encoder.blocks[1].mlp  # type: ignore[union-attr]
    with pytest.raises(UserError, match="equally many layers"):
        make_model(t5(2, 32, 2, 48, 40, share_stacks=True, num_decoder_layers=3))
    with pytest.raises(UserError, match="equally many layers"):
        make_model(replace(PRESETS["bert-tiny"], share_stacks=True))
