"""ELECTRA: sampled replacements, the discriminator's labels, and which parameters each loss trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from firth.core.errors import UserError
from firth.models import Encoder, LMHead, make_model
from firth.models.config import GeneratorConfig, MLPConfig
from firth.models.electra import (
    discriminator_loss,
    make_generator_model_config,
    replace_tokens,
    sample_generator_tokens,
    scatter_tokens,
)
from firth.models.presets import PRESETS, bert, electra
from firth.objectives.batch import Batch

V, MASK, PAD = 30, 4, 0
CONFIG = electra(
    2,
    16,
    2,
    8,
    V,
    extras=(GeneratorConfig(width_ratio=0.5, discriminator_weight=3.0),),
    dropout=0.0,
    attention_dropout=0.0,
)
BATCH = Batch(  # two rows; position 1 of the second keeps its token, and its last slot is unused
    torch.tensor([[2, MASK, 11, MASK, 3], [2, 14, MASK, 3, PAD]]),
    document_ids=torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, -1]]),
    target_positions=torch.tensor([[1, 3, 0], [1, 2, 0]]),
    labels=torch.tensor([[10, 12, -100], [14, 15, -100]]),
)
TRUTH = [[2, 10, 11, 12, 3], [2, 14, 15, 3, PAD]]


def lively(seed: int = 1) -> Encoder:
    torch.manual_seed(seed)
    model = make_model(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    assert isinstance(model, Encoder)
    return model


def favour(*tokens: list[int]) -> Tensor:
    """Logits that make one token certain."""
    return 1000.0 * F.one_hot(torch.tensor(tokens), V).float()


def test_replacements_and_labels() -> None:
    """The first row samples 10 correctly and 20 for 12; the second misses both. An unused slot samples 9."""
    given = BATCH.input_ids, BATCH.target_positions, BATCH.labels
    read, wrong = replace_tokens(favour([10, 20, 9], [21, 22, 9]), *given)
    assert read.tolist() == [[2, 10, 11, 20, 3], [2, 21, 22, 3, PAD]]
    assert wrong.int().tolist() == [[0, 0, 0, 1, 0], [0, 1, 1, 0, 0]]
    read, wrong = replace_tokens(favour([10, 12, 9], [14, 15, 9]), *given)
    assert read.tolist() == TRUTH, "no mask is left, and the true tokens are back"
    assert not wrong.any()


def test_no_3d_cross_entropy() -> None:
    """It has no deterministic CUDA kernel, so deterministic mode would raise."""
    taken: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            taken.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        sum(lively().losses(BATCH).values()).backward()
    assert "aten.nll_loss_forward.default" in taken
    assert not [name for name in taken if "nll_loss2d" in name]


def test_unused_slots_do_not_overwrite_used_ones() -> None:
    """Position 0 is the target of the second slot; the unused slots point to it, too."""
    used = torch.tensor([[False, True, False]])
    assert scatter_tokens(
        torch.tensor([[5, 6]]), torch.zeros(1, 3, dtype=torch.long), torch.tensor([[7, 8, 9]]), used
    ).tolist() == [[8, 6]]


def test_samples_follow_the_softmax() -> None:
    """Probabilities 0.5, 0.3, 0.2 over 20,000 samples, within five standard deviations."""
    torch.manual_seed(0)
    drawn = sample_generator_tokens(torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 20_000, 3))
    share = torch.bincount(drawn.flatten(), minlength=3) / 20_000
    assert (share - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    torch.manual_seed(0)
    assert torch.equal(drawn, sample_generator_tokens(torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 20_000, 3)))


def test_the_two_losses_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively().eval()
    sampled = torch.tensor([[10, 20, 9], [21, 15, 9]])
    monkeypatch.setattr("firth.models.electra.sample_generator_tokens", lambda logits: sampled)
    parts = model.losses(BATCH)
    assert list(parts) == ["targets", "tokens"]
    assert parts.keys() <= BATCH.loss_counts.keys()
    logits = model.logits(BATCH)
    by_hand = [-logits[b, k].log_softmax(-1)[BATCH.labels[b, k]] for b, k in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert_close(parts["targets"], torch.stack(by_hand).sum())
    assert_close(parts["targets"], model.loss(BATCH))

    read = torch.tensor([[2, 10, 11, 20, 3], [2, 21, 15, 3, PAD]])
    assert model.generator is not None
    p = model.generator.discriminator_head(model.backbone(BATCH._replace(input_ids=read))).sigmoid()
    truth = torch.tensor([[0, 0, 0, 1, 0], [0, 1, 0, 0, 0]])
    chance = torch.where(truth == 1, p, 1 - p)
    assert_close(parts["tokens"], -3.0 * (chance[0].log().sum() + chance[1, :4].log().sum()))


def test_padding_has_no_discriminator_loss() -> None:
    score, wrong = torch.randn(1, 3), torch.tensor([[True, False, False]])
    whole, padded = discriminator_loss(score, wrong, None), discriminator_loss(score, wrong, torch.tensor([[1, 1, 0]]))
    assert_close(whole - padded, F.softplus(score[0, 2]))


def gradients(model: Encoder, part: str) -> set[str]:
    """The names of the parameters that a loss has gradients for."""
    model.zero_grad()
    model.losses(BATCH)[part].backward()
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


def test_losses_share_only_the_token_embeddings() -> None:
    model = lively()
    every = {n for n, _ in model.named_parameters()}
    vectors = {n for n in every if n.startswith("embed.") and not n.startswith("embed.widen")}
    generator = {n for n in every if n.startswith(("extras.generator.stack", "extras.generator.narrow", "head."))}
    assert gradients(model, "targets") == generator | vectors
    assert gradients(model, "tokens") == every - generator
    assert {"embed.tokens.weight", "embed.position_embeddings.weight", "embed.segments.weight"} <= vectors


def test_the_generator_is_narrower_and_as_deep() -> None:
    base = bert(12, 768, 12, extras=(GeneratorConfig(),))
    small = make_generator_model_config(base)
    assert (small.num_layers, small.dim, small.num_heads, small.mlp.dim, small.embed_dim) == (12, 192, 3, 768, 768)
    tiny = make_generator_model_config(bert(2, 128, 2, extras=(GeneratorConfig(),)))
    assert (tiny.dim, tiny.num_heads, tiny.mlp.dim, tiny.head_size) == (32, 1, 128, 32)
    odd = make_generator_model_config(bert(1, 30, 3, mlp=MLPConfig(10), extras=(GeneratorConfig(0.9),)))
    assert (odd.dim, odd.num_heads) == (28, 2)
    assert replace(odd, head=LMHead(transform=True)).problems() == []


def test_a_generator_has_no_head_that_extends_embeddings() -> None:
    config = replace(PRESETS["electra-tiny"], extras=(GeneratorConfig(),))
    assert isinstance(config.head, LMHead)
    (wrong,) = replace(config, head=replace(config.head, extends_embeddings=True)).problems()
    assert "extends_embeddings cannot go with a generator" in wrong
    assert "num_bigram_buckets is -1" in replace(config, num_bigram_buckets=-1).problems()[0]


def test_logits_come_from_the_generator_and_states_from_the_backbone() -> None:
    model = lively().eval()
    assert model.generator is not None
    out = model(BATCH.input_ids, output_hidden_states=True)
    wanted = model.generator(model.embed.embed_unprojected(BATCH.input_ids), None)
    assert_close(out.logits, model.head(wanted, model.embed.tokens.weight))
    assert_close(out.hidden_states[-1], model.backbone(Batch(BATCH.input_ids)))
    assert out.logits.shape == (2, 5, V)
    assert out.hidden_states[-1].shape == (2, 5, 16)


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        (GeneratorConfig(width_ratio=0.0), {}, r"GeneratorConfig.width_ratio must be in \(0, 1\]"),
        (GeneratorConfig(discriminator_weight=0.0), {}, "discriminator_weight more than 0"),
        (
            GeneratorConfig(),
            {"head": LMHead(), "embed_dim": None},
            "GeneratorConfig in model.extras needs model.head.transform",
        ),
    ],
)
def test_invalid_generators_raise(extra: GeneratorConfig, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_model(replace(CONFIG, extras=(extra,), **changes))  # type: ignore[arg-type]
