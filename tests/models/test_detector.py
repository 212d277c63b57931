"""Replaced token detection beside language modelling: the losses by hand, and what each of them trains."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.testing import assert_close

from firth.models import Encoder, EncoderDecoder, make_model
from firth.models.config import DetectorConfig, ModelConfig, without_detector
from firth.models.electra import ReplacedTokenDetector, select_rows
from firth.models.presets import bert, modernbert, t5gemma, xlnet
from firth.models.regional_compile import compile_regions
from firth.objectives.batch import Batch

V, MASK, PAD, x = 30, 4, 0, -100
PLAIN = modernbert(2, 16, 2, 32, vocab_size=V, dropout=0.0)
CONFIG = modernbert(2, 16, 2, 32, vocab_size=V, dropout=0.0, extras=(DetectorConfig(weight=3.0),))
BATCH = Batch(  # a detected row, a masked one and a causal one
    torch.tensor([[2, MASK, 11, MASK, 3], [2, 14, MASK, 3, PAD], [2, 14, 15, 16, 3]]),
    document_ids=torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, -1], [0, 0, 0, 0, 0]]),
    attention_rank=torch.tensor([[0] * 5, [0] * 5, [0, 1, 2, 3, 4]]),
    labels=torch.tensor([[x] * 5, [x, x, 15, x, x], [14, 15, 16, 3, x]]),
    generator_positions=torch.tensor([[1, 3, 0], [2, 0, 0], [1, 0, 0]]),
    generator_labels=torch.tensor([[10, 12, x], [x, x, x], [x, x, x]]),
)


def lively(config: ModelConfig = CONFIG) -> Encoder:
    torch.manual_seed(1)
    model = make_model(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    assert isinstance(model, Encoder)
    return model.eval()


def detector_of(model: Encoder) -> ReplacedTokenDetector:
    return cast(ReplacedTokenDetector, model.extras["detector"])


def sample(monkeypatch: pytest.MonkeyPatch, *tokens: list[int]) -> None:
    monkeypatch.setattr("firth.models.electra.sample_generator_tokens", lambda _: torch.tensor(tokens))


def test_the_three_losses_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator writes the right token 10, and 20 for 12."""
    model = lively()
    detector = detector_of(model)
    sample(monkeypatch, [10, 20, 9])
    parts = model.losses(BATCH)
    assert parts.keys() == {"targets", "generator_targets", "detected_tokens"} <= BATCH.loss_counts.keys()

    plain = lively(PLAIN)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "extras" not in name})
    lm_rows = select_rows(BATCH, torch.tensor([1, 2]))._replace(generator_positions=None, generator_labels=None)
    assert_close(parts["targets"], plain.losses(lm_rows)["targets"])

    row = select_rows(BATCH, torch.tensor([0]))
    embedded = model.embed.embed_unprojected(row.input_ids, None, None)
    states = detector.stack(detector.narrow(embedded), row.document_ids, row.attention_rank)
    logp = detector.generator_head(states[0, [1, 3]], model.embed.tokens.weight).log_softmax(-1)
    assert_close(parts["generator_targets"], -(logp[0, 10] + logp[1, 12]))

    read = torch.tensor([[2, 10, 11, 20, 3]])
    p = detector.discriminator_head(model.backbone(row._replace(input_ids=read))).sigmoid()[0]
    chance = torch.where(torch.tensor([0, 0, 0, 1, 0]) == 1, p, 1 - p)
    assert_close(parts["detected_tokens"], -3.0 * chance.log().sum())


def test_the_rows_that_a_cpu_leaves_out_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively()
    sample(monkeypatch, [10, 20, 9])
    some = detector_of(model).replace_tokens(model.embed, BATCH)
    sample(monkeypatch, [10, 20, 9], [21, 22, 23], [24, 25, 26])
    for own, other in zip(some, detector_of(model).fill_masks(model.embed, BATCH), strict=True):
        assert_close(own, other)
    assert some[0].tolist() == [[2, 10, 11, 20, 3], *BATCH.input_ids[1:].tolist()]
    assert some[1].nonzero().tolist() == [[0, 3]]


def test_a_compiled_step_and_a_memory_compute_all_rows() -> None:
    """Compiled code is compiled again for other shapes, and a memory continues the rows of the last step."""
    model, num_rows = lively(), list[int]()
    detector_of(model).narrow.register_forward_hook(lambda _, args, out: num_rows.append(len(args[0])))
    model.losses(BATCH)
    with compile_regions():
        detector_of(model).replace_tokens(model.embed, BATCH)
    assert num_rows == [1, 3]

    recurrent = make_model(xlnet(1, 16, 2, V, extras=(DetectorConfig(),)))
    recurrent.enable_memory(4)
    for detected_rows in ([0], [0, 1, 2]):
        labels = torch.full_like(BATCH.generator_labels, x)
        labels[detected_rows, 0] = 10
        recurrent.losses(BATCH._replace(position_ids=None, generator_labels=labels))


def test_a_step_without_detected_rows_has_the_losses_of_the_others() -> None:
    batch = select_rows(BATCH, torch.tensor([1, 2]))
    parts = lively().losses(batch)
    assert parts["generator_targets"] == parts["detected_tokens"] == 0
    assert parts["targets"] > 0
    sum(parts.values()).backward()


@pytest.mark.parametrize(
    ("part", "trains", "leaves"),
    [
        ("targets", {"head.bias", "stack."}, {"extras."}),
        ("generator_targets", {"extras.detector.stack.", "extras.detector.generator_head."}, {"stack.", "head."}),
        (
            "detected_tokens",
            {"stack.", "extras.detector.discriminator_head."},
            {"head.", "extras.detector.stack.", "extras.detector.generator_head.", "extras.detector.narrow."},
        ),
    ],
)
def test_each_loss_trains_its_own_part(part: str, trains: set[str], leaves: set[str]) -> None:
    """Sampling passes no gradient; token embeddings learn from all three."""
    torch.manual_seed(0)
    model = lively()
    model.losses(BATCH)[part].backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert "embed.tokens.weight" in moved
    for prefix in trains:
        assert any(name.startswith(prefix) for name in moved), prefix
    for prefix in leaves:
        assert not any(name.startswith(prefix) for name in moved), prefix


def test_figures_to_log(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively()
    sample(monkeypatch, [10, 20, 9])
    parts = model.losses(BATCH, with_metrics=True)
    assert parts["rtd_replaced/detected_tokens"] == 1
    assert 0 <= parts["rtd_accuracy/detected_tokens"] <= 5
    assert_close(3.0 * parts["rtd_loss/detected_tokens"], parts["detected_tokens"])


def test_the_encoder_of_an_encoder_decoder_detects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row is detected; the encoder predicts the mask of the second. The decoder reads both."""
    config = t5gemma(2, 16, 2, 32, vocab_size=V, extras=(DetectorConfig(weight=3.0),))
    torch.manual_seed(1)
    model = make_model(config).eval()
    assert isinstance(model, EncoderDecoder)
    own = {
        "decoder_input_ids": torch.tensor([[2, 20, 21], [2, 22, 23]]),
        "labels": torch.tensor([[20, 21, 3], [22, 23, 3]]),
        "encoder_target_positions": torch.tensor([[0], [2]]),
        "encoder_labels": torch.tensor([[x], [15]]),
    }
    batch = select_rows(BATCH, torch.tensor([0, 1]))._replace(attention_rank=None, **own)
    sample(monkeypatch, [10, 20, 9])
    parts = model.losses(batch, with_metrics=True)
    read = torch.tensor([[2, 10, 11, 20, 3], batch.input_ids[1].tolist()])
    plain = batch._replace(input_ids=read, generator_labels=None)
    assert_close(parts["targets"], model.losses(plain)["targets"])
    detector = cast(ReplacedTokenDetector, model.extras["detector"])
    p = detector.discriminator_head(model.encode(plain)).sigmoid()[0]
    chance = torch.where(torch.tensor([0, 0, 0, 1, 0]) == 1, p, 1 - p)
    assert_close(parts["detected_tokens"], -3.0 * chance.log().sum())
    assert {name for name in parts if "/" not in name} <= batch.loss_counts.keys()
    assert parts["rtd_replaced/detected_tokens"] == 1


def test_fine_tuning_leaves_the_detector_out() -> None:
    assert without_detector(CONFIG) == PLAIN
    assert without_detector(PLAIN) == PLAIN


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"width_ratio": 1.5}, "width_ratio"), ({"depth_ratio": 0.0}, "depth_ratio"), ({"weight": 0.0}, "weight more")],
)
def test_wrong_settings_are_named(changes: dict[str, float], message: str) -> None:
    (wrong,) = bert(1, 16, 2, V, extras=(DetectorConfig(**changes),)).problems()
    assert message in wrong


def test_a_model_without_room_for_a_detector_names_the_objective_that_needs_none() -> None:
    """On a GPU an encoder has a detector by default."""
    (wrong,) = modernbert(1, 16, 2, 32, V, embed_trigrams=True, extras=(DetectorConfig(),)).problems()
    assert wrong.endswith("model.embed_trigrams: --objective mlm-and-clm needs none")
