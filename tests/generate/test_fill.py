"""Blanks in all spellings, filled by encoders and encoder-decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from firth import api
from firth.core.errors import UserError
from firth.generate import Blank, Guess, fill
from firth.models import Model, make_model
from firth.models.task_heads import with_classification_head


def test_an_encoders_guesses_are_its_probabilities(untrained: Any) -> None:
    model = untrained("bert")
    tokenizer, vocab = model.tokenizer, model.tokenizer.vocab
    the, slept = tokenizer.encode("The"), tokenizer.encode("slept by the")
    ids = [vocab.cls, *the, vocab.mask, *slept, vocab.mask, *tokenizer.encode("."), vocab.sep]
    mask_positions = [i for i, token in enumerate(ids) if token == vocab.mask]
    found = fill(model, "The [MASK] slept by the [MASK].", top=3)
    assert len(found) == 2
    p = model(torch.tensor([ids])).logits[0].softmax(-1).detach()
    for position, blank in zip(mask_positions, found, strict=True):
        words = [i for i in p[position].argsort(descending=True).tolist() if i not in vocab.special_ids]
        assert [g.text for g in blank.guesses] == [tokenizer.decode([i]) for i in words[:3]]
        assert [g.probability for g in blank.guesses] == pytest.approx(p[position, words[:3]].tolist(), rel=1e-4)


@pytest.mark.parametrize("family", ["bert", "t5", "bart"])
def test_a_checkpoint_is_computed_on_the_gpu(
    family: str, untrained: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = untrained(family)
    model.save(tmp_path / "final")
    expected = fill(model, "The ___ slept.")
    moves: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Model, "to", lambda self, *arguments: moves.append(arguments) or self)
    assert api.fill(tmp_path / "final", "The ___ slept.") == expected
    api.fill(tmp_path / "final", "The ___ slept.", bf16=True)
    assert api.fill(model, "The ___ slept.") == expected
    assert moves == [("cuda", None), ("cuda", torch.bfloat16)], "a loaded model stays where it is"


def test_probabilities_in_bfloat16_are_not_rounded(untrained: Any, tmp_path: Any) -> None:
    untrained("bert").save(tmp_path / "final")
    (blank,) = api.fill(tmp_path / "final", "The ___ slept.", top=9, bf16=True)
    p = torch.tensor([guess.probability for guess in blank.guesses])
    assert (p != p.bfloat16()).any()


@pytest.mark.parametrize("blank", ["[MASK]", "<mask>", "___", "________"])
@pytest.mark.parametrize("family", ["bert", "t5", "bart"])
def test_all_spellings_are_one(family: str, blank: str, untrained: Any) -> None:
    model = untrained(family)
    assert fill(model, f"The {blank} slept.") == fill(model, "The ____ slept.")


def test_blanks_do_not_fix_each_other(untrained: Any) -> None:
    """Each further blank is one more guess; at most every word is guessed."""
    model = untrained("bert")
    found = fill(model, "___ ___ ___", top=10_000)
    vocab = model.tokenizer.vocab
    assert [len(blank.guesses) for blank in found] == [vocab.size - len(vocab.special_ids)] * 3
    for blank in found:
        assert 0.9 < sum(g.probability for g in blank.guesses) <= 1.001
        assert [g.probability for g in blank.guesses] == sorted((g.probability for g in blank.guesses), reverse=True)


def scripted(model: Any, script: dict[tuple[int, ...], dict[int, float]]) -> None:
    """Make a model answer by a script: what it has written -> the probabilities of the next token."""
    size = model.tokenizer.vocab.size

    def read(batch: Any, encoded: Any = None) -> torch.Tensor:
        assert len(batch.decoder_input_ids) == 1
        logits = torch.full((size,), -100.0)
        for token, p in script[tuple(batch.decoder_input_ids[0, 1:].tolist())].items():
            logits[token] = torch.tensor(p).log()
        return logits[None, None]

    model.hidden_states = read
    model.head.forward = lambda x, embedding: x


def test_an_encoder_decoder_writes_a_span_for_each_blank(untrained: Any) -> None:
    model = untrained("t5")
    tokenizer, vocab = model.tokenizer, model.tokenizer.vocab
    first, second, third = vocab.sentinel_ids[:3]
    fox, the = tokenizer.encode("fox")[0], tokenizer.encode("the")[0]
    script = {
        (first,): {fox: 0.5, the: 0.3, second: 0.2},
        (first, fox): {second: 0.4, vocab.eos: 0.2, fox: 0.35, the: 0.05},
        (first, fox, second): {the: 0.9, vocab.eos: 0.1},
        (first, fox, second, the): {fox: 0.8, third: 0.2},
        (first, fox, second, the, fox): {third: 1.0},
    }
    scripted(model, script)
    found = fill(model, "The ___ slept by the ___.")
    texts = [[g.text for g in blank.guesses] for blank in found]
    assert texts == [[tokenizer.decode([fox])], [tokenizer.decode([the, fox])]]
    assert found[0].guesses[0].probability == pytest.approx(0.5 * (0.4 + 0.2))
    assert found[1].guesses[0].probability == pytest.approx(0.9 * 0.8 * 1.0)


def test_an_empty_span_and_one_that_does_not_end(untrained: Any) -> None:
    model = untrained("t5")
    first, second = model.tokenizer.vocab.sentinel_ids[:2]
    fox = model.tokenizer.encode("fox")[0]
    scripted(model, {(first,): {second: 0.6, fox: 0.4}})
    assert fill(model, "The ___ slept.") == [Blank((Guess("", pytest.approx(0.6)),))]
    scripted(model, {(first, *[fox] * n): {fox: 0.9, second: 0.1} for n in range(20)})
    (blank,) = fill(model, "The ___ slept.")
    assert blank.guesses[0].text == model.tokenizer.decode([fox] * 20)
    assert blank.guesses[0].probability == pytest.approx(0.9**20)


def test_the_encoder_reads_sentinels(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained("t5")
    vocab, encode = model.tokenizer.vocab, model.encode
    seen = []
    monkeypatch.setattr(model, "encode", lambda batch: seen.append(batch.input_ids[0].tolist()) or encode(batch))
    fill(model, "The ___ slept by the ___.")
    parts = [model.tokenizer.encode(text) for text in ("The", "slept by the")]
    assert seen == [
        [
            *parts[0],
            vocab.sentinel_ids[0],
            *parts[1],
            vocab.sentinel_ids[1],
            *model.tokenizer.encode("x.")[-1:],
            vocab.eos,
        ]
    ]


def test_a_text_that_is_written_out_whole_has_its_blanks_filled(
    untrained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BART reads masks; it is given what is there, and writes on from each blank until it comes to what follows."""
    model = untrained("bart")
    tokenizer, vocab, encode = model.tokenizer, model.tokenizer.vocab, model.encode
    the, slept, end = tokenizer.encode("The"), tokenizer.encode(" slept"), tokenizer.encode(".")
    fox, owl = tokenizer.encode(" fox")[0], tokenizer.encode(" owl")[0]
    before = (vocab.cls, *the)
    after = (*before, fox, owl, *slept)
    seen = []
    monkeypatch.setattr(model, "encode", lambda batch: seen.append(batch.input_ids[0].tolist()) or encode(batch))
    script = {
        before: {fox: 0.6, slept[0]: 0.4},
        (*before, fox): {owl: 0.7, slept[0]: 0.3},
        (*before, fox, owl): {slept[0]: 0.8, vocab.sep: 0.1, fox: 0.1},
        after: {end[0]: 0.5, fox: 0.3, vocab.sep: 0.2},
    }
    scripted(model, script)
    first, second = fill(model, "The ___ slept ___.")
    assert seen == [[vocab.cls, *the, vocab.mask, *slept, vocab.mask, *end, vocab.sep]]
    assert first.guesses == (Guess(tokenizer.decode([fox, owl]).strip(), pytest.approx(0.6 * 0.7 * 0.9)),)
    assert second.guesses == (Guess("", pytest.approx(0.7)),)


def test_what_cannot_be_filled(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bert, t5, gpt2 = untrained("bert"), untrained("t5"), untrained("gpt2")
    with pytest.raises(UserError, match="no blank"):
        fill(bert, "The fox slept.")
    with pytest.raises(UserError, match="firth generate"):
        fill(gpt2, "The ___ slept.")
    with pytest.raises(UserError, match="top is 0"):
        fill(bert, "The ___ slept.", top=0)
    with pytest.raises(UserError, match=r"101 blanks.*100 sentinels"):
        fill(t5, "___ " * 101)
    t5.tokenizer = gpt2.tokenizer
    with pytest.raises(UserError, match="no sentinels"):
        fill(t5, "The ___ slept.")
    with pytest.raises(UserError, match="longer than the 24 positions"):
        fill(bert, "___ fox " * 20)
    classes = make_model(with_classification_head(bert.config, ("a", "b")))
    classes.tokenizer = bert.tokenizer
    with pytest.raises(UserError, match="has a task head"):
        fill(classes, "The ___ slept.")
    monkeypatch.setattr(type(bert.tokenizer), "encode", lambda self, text, parse_special: [5])
    with pytest.raises(UserError, match="as its mask token"):
        fill(bert, "The ___ slept.")
    bert.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        fill(bert, "The ___ slept.")
