"""Masked next-token prediction: rows by hand, what each position may see, and scores against `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.models import make_model
from firth.models.presets import llama, modernbert
from firth.objectives import (
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    Batch,
    CounterRNG,
    MaskedNextToken,
    MLMAndCLM,
    RTDMLMAndCLM,
    held_out_objective,
)
from firth.objectives.noise_mask import SpanMasking
from firth.recipes import pretraining_recipe
from firth.tokens import Rows, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
x = IGNORE_INDEX
CPU = torch.device("cpu")
Picture = Callable[..., Rows]
Writer = Callable[..., CounterRNG]
Maker = Callable[..., Rows]


def test_rows_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 S | C 20 21 S", "C 10 11 12 S | C 20 21 S")
    keys = [[0, 0.9, 0.1, 0.8, 0, 0, 0.2, 0.7, 0]] * 2
    draws = written(rows, tokens=keys, fate=[[0.5, 0.85, 0.95]] * 2, other=[[0, 43, 0]] * 2, masked_rows=[[0.4], [0.6]])
    batch = MaskedNextToken(mlm=MLM(rate=0.4))(rows, draws, vocab)
    assert batch.input_ids.tolist() == [
        [CLS, 10, MASK, 12, SEP, CLS, 50, 21, SEP],
        [CLS, 10, 11, 12, SEP, CLS, 20, 21, SEP],
    ]
    assert batch.labels.tolist() == [[x, 11, x, x, x, 20, x, x, x], [10, 11, 12, SEP, x, 20, 21, SEP, x]]
    assert batch.attention_rank.tolist() == [[0] * 9, list(range(9))]
    assert batch.target_positions is None

    in_place = MLMAndCLM(mlm=MLM(rate=0.4))(rows, draws, vocab)
    assert in_place.input_ids.tolist() == batch.input_ids.tolist()
    assert in_place.labels.tolist() == [[x, x, 11, x, x, x, 20, x, x], [10, 11, 12, SEP, x, 20, 21, SEP, x]]
    assert in_place.attention_rank.tolist() == batch.attention_rank.tolist()


def test_rows_whose_masks_a_generator_fills(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    """The first row is detected, the second masked, the third causal."""
    rows = picture(*["C 10 11 12 S | C 20 21 S"] * 3)
    keys, kinds = [[0, 0.9, 0.1, 0.8, 0, 0, 0.2, 0.7, 0]] * 3, {"masked_rows": [[0.4], [0.4], [0.6]]}
    draws = written(
        rows, tokens=keys, fate=[[0.5] * 3] * 3, other=[[0] * 3] * 3, **kinds, detected_rows=[[0], [1], [0]]
    )
    objective = RTDMLMAndCLM(0.5, MLM(rate=0.4), detected_share=0.7)
    batch = objective(rows, draws, vocab)
    hidden = [CLS, 10, MASK, 12, SEP, CLS, MASK, 21, SEP]
    assert batch.input_ids.tolist() == [hidden, hidden, rows.input_ids[2].tolist()]
    assert batch.labels[0].tolist() == [x] * 9
    assert batch.attention_rank.tolist() == [[0] * 9, [0] * 9, list(range(9))]
    slots = zip(batch.generator_positions[0], batch.generator_labels[0], strict=True)
    assert {int(i): int(label) for i, label in slots if label != x} == {2: 11, 6: 20}
    assert (batch.generator_labels[1:] == x).all()
    assert batch.is_detected.tolist() == [[True] * 9, [False] * 9, [False] * 9]
    plain = objective.without_detection(rows, draws, vocab)
    assert batch.labels[1:].tolist() == plain.labels[1:].tolist()
    assert batch.loss_counts == {"targets": 2 + 7, "tokens": 27, "generator_targets": 2, "detected_tokens": 9}


def test_the_shares_of_the_three_kinds_of_rows(rows_for: Maker, vocab: Vocabulary) -> None:
    objective = RTDMLMAndCLM(0.6, MLM(rate=0.3), detected_share=0.75)
    rows = rows_for(objective, 2000, 64, documents=2)
    batch = objective(rows, CounterRNG(0, rows.stream_index), vocab)
    is_causal, is_detected = batch.attention_rank.any(1), batch.is_detected.any(1)
    assert not (is_causal & is_detected).any()
    assert is_causal.mean() == pytest.approx(0.4, abs=5 * (0.24 / 2000) ** 0.5)
    assert is_detected.mean() == pytest.approx(0.45, abs=5 * (0.25 / 2000) ** 0.5)
    assert ((batch.labels != x).any(1) ^ is_detected).all(), "each row trains one of the heads"


def test_what_held_out_losses_measure() -> None:
    """The loss of the same model's masked and causal rows, whatever was detected beside them."""
    objective = OBJECTIVES["rtd-mlm-and-clm"]
    assert held_out_objective(objective) == OBJECTIVES["mlm-and-clm"]
    assert held_out_objective(replace(objective, masked_share=1.0)).masked_share == 1.0  # type: ignore[union-attr]
    assert held_out_objective(OBJECTIVES["mlm"]) == OBJECTIVES["mlm"]
    assert held_out_objective(OBJECTIVES["span-corruption-and-mlm"]) == OBJECTIVES["span-corruption"]
    with pytest.raises(UserError, match=r"detected_share is 1.5, and must lie between 0 and 1"):
        RTDMLMAndCLM(detected_share=1.5)


def test_a_document_that_starts_with_text_has_no_position_before_it(
    picture: Picture, written: Writer, vocab: Vocabulary
) -> None:
    rows = picture("10 11 | 20 21", width=4)  # pieces from the middle of a document, as a decoder reads them
    draws = written(rows, tokens=[[0.1, 0.2, 0.1, 0.3]], fate=[[0.5] * 4], other=[[0] * 4], masked_rows=[[0.0]])
    batch = MaskedNextToken(mlm=MLM(rate=0.9), architecture="decoder")(rows, draws, vocab)
    assert batch.input_ids.tolist() == [[10, MASK, 20, MASK]]
    assert batch.labels.tolist() == [[11, x, 21, x]]


def test_the_share_of_masked_rows_and_the_mask_rate(rows_for: Maker, vocab: Vocabulary) -> None:
    objective = MaskedNextToken(masked_share=0.25, mlm=MLM(rate=0.3, rate_end=0.15))
    rows = rows_for(objective, 2000, 64, documents=2)
    batch = objective(rows, CounterRNG(0, rows.stream_index, progress=1.0), vocab)
    is_masked = (batch.attention_rank == 0).all(1)
    assert is_masked.mean() == pytest.approx(0.25, abs=0.03)
    labels = (batch.labels != x).sum(1)
    assert labels[is_masked].sum() / rows.maskable[is_masked].sum() == pytest.approx(0.15, abs=0.01)
    assert (labels == rows.maskable.sum(1) + 1 + rows.document_ids.max(1))[~is_masked].all()  # with each [SEP]
    assert objective.mask_rate_at(0.5) == pytest.approx(0.225)


def test_what_is_refused() -> None:
    for mlm in (MLM(pair="next"), MLM(targets="replaced"), MLM(visibility="prefix")):
        with pytest.raises(UserError, match=r"objective\.mlm"):
            MaskedNextToken(mlm=mlm)
    with pytest.raises(UserError, match="masked_share"):
        MaskedNextToken(masked_share=1.1)
    assert MaskedNextToken(mlm=MLM(masking=SpanMasking())).token_flags == ("word_start",)


def test_the_recipe_sets_the_special_tokens_of_the_architecture(vocab: Vocabulary) -> None:
    objective = OBJECTIVES["masked-next-token"]
    encoder = pretraining_recipe(modernbert(1, 32, 2, 64, 1000), objective=objective)
    decoder = pretraining_recipe(llama(1, 32, 2, 64, 1000), objective=objective)
    assert encoder.objective.build_template(vocab).prefix_ids == (CLS,)
    assert decoder.objective.build_template(vocab).prefix_ids == (END,)
    assert encoder.model.is_causal_encoder
    assert encoder.model.prompt_form == decoder.model.prompt_form == "next-token"


@pytest.mark.parametrize(
    ("make", "kind"), [(modernbert, MaskedNextToken), (llama, MaskedNextToken), (modernbert, MLMAndCLM)]
)
def test_a_token_changes_only_the_positions_that_may_see_it(
    make: Callable[..., object], kind: type[MaskedNextToken], rows_for: Maker, vocab: Vocabulary
) -> None:
    """In a masked row a label's own token is hidden from all positions, in a causal row from the earlier ones."""
    torch.manual_seed(0)
    config = replace(make(2, 32, 2, 64, 1000), dropout=0.0)  # type: ignore[type-var]
    objective = replace(kind(mlm=MLM(rate=0.2, mask_prob=1.0, random_prob=0.0)), architecture=config.architecture)  # type: ignore[attr-defined]
    model = make_model(config).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    rows = rows_for(objective, 8, 24, documents=2)
    rng = CounterRNG(0, rows.stream_index)

    def states(tokens: np.ndarray) -> tuple[torch.Tensor, Batch]:
        batch = objective(rows._replace(input_ids=tokens), rng, vocab)
        with torch.no_grad():
            return model.hidden_states(batch.to(CPU)), batch

    before, batch = states(rows.input_ids)
    assert 0 < (batch.attention_rank == 0).all(1).sum() < 8
    for changed in range(2, 24, 5):
        tokens = rows.input_ids.copy()
        tokens[:, changed] = np.where(tokens[:, changed] == 500, 501, 500)
        after, other = states(tokens)
        for b in range(8):
            seen = (after[b] - before[b]).abs().amax(1).numpy() > 1e-6
            same_document = rows.document_ids[b] == rows.document_ids[b, changed]
            if not (batch.attention_rank[b] == 0).all():
                assert (seen == (same_document & (np.arange(24) >= changed))).all()
                assert batch.labels[b, changed - 1] != other.labels[b, changed - 1] or not same_document[changed - 1]
            elif batch.input_ids[b, changed] == MASK:
                assert not seen.any()
                assert other.labels[b, changed - kind.label_shift] == tokens[b, changed]
            else:
                assert (seen == same_document).all()
