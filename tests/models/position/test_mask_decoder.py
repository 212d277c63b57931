"""DeBERTa's enhanced mask decoder against the equations of the paper; which parameters each loss trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import ClassificationHead, Encoder, load_model, make_model
from firth.models.config import GeneratorConfig, LearnedPosition, MaskDecoder, Position, T5Bias, TransformerXL
from firth.models.hf.checkpoint import write_model
from firth.models.presets import bert, deberta, deberta_v3
from firth.objectives.batch import Batch

V, T, D, H = 30, 7, 16, 2
BATCH = Batch(
    torch.tensor([[2, 7, 4, 4, 10, 4, 3], [2, 4, 8, 9, 4, 3, 0]]),
    document_ids=torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, -1]]),
    position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0]]),
    target_positions=torch.tensor([[2, 3, 5], [1, 4, 0]]),
    labels=torch.tensor([[11, 12, 13], [14, 15, -100]]),
)


def lively(config: Any) -> Encoder:
    torch.manual_seed(1)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    assert isinstance(model, Encoder)
    return model


def disentangled_attention(model: Encoder, layer: int, queries: Tensor, content: Tensor, doc: Tensor) -> Tensor:
    """Equations (2) to (4) of He et al. 2021 for one row and one head, pair by pair of positions."""
    attention = model.stack.blocks[layer].attention
    weight, bias, d = attention.qkv.weight, attention.qkv_bias, D // H
    wq, wk, wv = weight.split(D)
    bq, bk, bv = bias.split(D)
    q, k, v = queries @ wq.T + bq, content @ wk.T + bk, content @ wv.T + bv
    p = model.stack.shared.table.weight
    qr, kr = attention.score.pos_query(p), attention.score.pos_key(p)
    far = len(p) // 2
    out = torch.zeros(T, D)
    for h in range(H):
        part = slice(h * d, (h + 1) * d)
        for i in range(T):
            seen = [j for j in range(T) if doc[j] == doc[i]]
            scores = []
            for j in seen:
                index = max(0, min(2 * far - 1, i - j + far))
                a = q[i, part] @ k[j, part] + q[i, part] @ kr[index, part] + k[j, part] @ qr[index, part]
                scores.append(a / (3 * d) ** 0.5)
            shares = torch.stack(scores).softmax(0)
            out[i, part] = sum(share * v[j, part] for share, j in zip(shares, seen, strict=True))
    return out @ attention.out.weight.T + attention.out.bias


def block(model: Encoder, layer: int, queries: Tensor, content: Tensor, doc: Tensor) -> Tensor:
    b = model.stack.blocks[layer]
    x = b.attention_norm(queries + disentangled_attention(model, layer, queries, content, doc))
    return b.mlp_norm(x + F.gelu(x @ b.mlp.up.weight.T + b.mlp.up.bias) @ b.mlp.down.weight.T + b.mlp.down.bias)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_by_the_equations(layers: int) -> None:
    """The backbone without its last layer gives H; I is H plus position; the last layer computes the next I from H."""
    config = deberta(3, D, H, V, extras=(MaskDecoder(layers, 8),))
    model = lively(config)
    found = model.logits(BATCH)
    for row in range(2):
        doc, position = BATCH.document_ids[row], BATCH.position_ids[row]
        hidden = model.embed(BATCH.input_ids[row : row + 1])[0]
        for layer in (0, 1):
            hidden = block(model, layer, hidden, hidden, doc)
        i = hidden + model.extras["decoder"].position_embeddings.weight[position]
        for _ in range(layers):
            i = block(model, 2, i, hidden, doc)
        wanted = model.head(i, model.embed.tokens.weight)
        used = BATCH.labels[row] != -100
        assert_close(found[row][used], wanted[BATCH.target_positions[row][used]], atol=1e-5, rtol=1e-4)


POSITIONS: dict[str, Position] = {"learned": LearnedPosition(8), "transformer-xl": TransformerXL()}


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_one_pass_without_positions_is_the_last_layer(norm_first: bool, position: Position) -> None:
    """If I is H and there is one layer, it equals the model without a decoder, as the paper says."""
    model = lively(bert(2, D, H, V, position=position, norm_first=norm_first, extras=(MaskDecoder(1, 8),)))
    with torch.no_grad():
        model.extras["decoder"].position_embeddings.weight.zero_()
    wanted = model.head(model.backbone(BATCH), model.embed.tokens.weight)[[[0], [1]], BATCH.target_positions]
    assert_close(model.logits(BATCH), wanted)


def test_attention_ranks_narrow_visibility() -> None:
    model = lively(deberta(2, D, H, V, extras=(MaskDecoder(2, 8),)))
    batch = Batch(BATCH.input_ids, attention_rank=torch.arange(T).expand(2, T), target_positions=BATCH.target_positions)
    before = model.logits(batch)
    tokens = BATCH.input_ids.clone()
    tokens[0, 4] = 20
    moved = (model.logits(batch._replace(input_ids=tokens)) != before).any(-1)
    assert moved.tolist() == [[False, False, True], [False, False, False]], "place 5 comes after it, 2 and 3 do not"


def test_a_call_without_targets_is_the_backbone() -> None:
    config = deberta(2, D, H, V, extras=(MaskDecoder(2, 8),))
    model = lively(config)
    assert_close(
        model(BATCH.input_ids).logits, model.head(model.backbone(Batch(BATCH.input_ids)), model.embed.tokens.weight)
    )


def test_it_is_saved_in_the_checkpoint(tmp_path: Any) -> None:
    model = lively(deberta(2, D, H, V, extras=(MaskDecoder(2, 8),)))
    write_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again.logits(BATCH), model.logits(BATCH))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            bert(1, D, H, V, position=T5Bias(), extras=(MaskDecoder(),)),
            "a MaskDecoder in model.extras cannot go with",
        ),
        (
            deberta(1, D, H, V, extras=(MaskDecoder(num_layers=0),)),
            "MaskDecoder.num_layers and MaskDecoder.length must be at",
        ),
        (deberta(1, D, H, V, extras=(MaskDecoder(), GeneratorConfig())), "only alone"),
    ],
)
def test_invalid_decoders_raise(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_model(config)


def test_texts_longer_than_its_positions_raise() -> None:
    model = lively(deberta(1, D, H, V, extras=(MaskDecoder(2, 5),)))
    with pytest.raises(UserError, match="longer than the 5 positions"):
        model(BATCH.input_ids)


# --- token vectors of the generator, and a difference ---------------------------------------------------------------

GENERATOR = deberta_v3(
    2, D, H, V, extras=(GeneratorConfig(0.5, 3.0, disentangle_embeddings=True),), dropout=0.0, attention_dropout=0.0
)


def moved(model: Encoder, part: str) -> set[str]:
    model.zero_grad()
    model.losses(BATCH)[part].backward()
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def test_discriminator_loss_trains_the_embedding_delta_only() -> None:
    model = lively(GENERATOR)
    tokens, delta = "embed.tokens.weight", "extras.generator.delta.weight"
    answers, verdict = moved(model, "targets"), moved(model, "tokens")
    assert tokens in answers
    assert delta not in answers
    assert delta in verdict
    assert tokens not in verdict
    shared = lively(deberta_v3(2, D, H, V, extras=(GeneratorConfig(0.5, 3.0),)))
    assert tokens in moved(shared, "targets") & moved(shared, "tokens"), "where they are not disentangled, both move it"


def test_backbone_embeddings_are_the_generators_plus_the_delta() -> None:
    model = lively(GENERATOR)
    assert model.generator is not None
    assert model.generator.delta is not None
    hidden, words = model.backbone(Batch(BATCH.input_ids)), model(BATCH.input_ids).logits
    with torch.no_grad():
        model.embed.tokens.weight += model.generator.delta.weight
        model.generator.delta.weight.zero_()
    assert_close(model.backbone(Batch(BATCH.input_ids)), hidden)
    assert not torch.allclose(model(BATCH.input_ids).logits, words)


def test_the_embedding_delta_starts_at_0() -> None:
    model = make_model(GENERATOR)
    assert isinstance(model, Encoder)
    assert model.generator is not None
    assert model.generator.delta is not None
    assert not model.generator.delta.weight.any()


def test_a_new_head_keeps_the_backbones_embeddings(tmp_path: Any) -> None:
    model = lively(GENERATOR)
    write_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(
        again(BATCH.input_ids, output_hidden_states=True).hidden_states[-1], model.backbone(Batch(BATCH.input_ids))
    )
    tuned = load_model(tmp_path, ClassificationHead(("no", "yes"), has_pooler=True))
    assert isinstance(tuned, Encoder)
    assert_close(tuned.backbone(Batch(BATCH.input_ids)), model.backbone(Batch(BATCH.input_ids)))
