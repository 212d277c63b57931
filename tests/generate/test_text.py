"""Texts in, texts out: frames, strings to stop at, pieces of a stream, results for JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firth import api
from firth.cli.main import app
from firth.core.errors import UserError
from firth.generate import GenerationConfig, generate, generate_ids, generate_results, stream_text
from firth.generate.loop import DecodedBatch
from firth.generate.text import PromptText

DRAWN = GenerationConfig(temperature=1.0, seed=1, max_new_tokens=24)
TEXT = "The heron slept"


def test_a_decoder_continues(untrained: Any) -> None:
    model = untrained("gpt2")
    tokenizer, end = model.tokenizer, model.tokenizer.vocab.eos
    texts = [TEXT, ""]
    found = generate(model, texts, max_new_tokens=6)
    assert found[0].startswith(TEXT)
    assert len(found[0]) > len(TEXT)
    wanted = generate_ids(model, [[end, *tokenizer.encode(text)] for text in texts], 6)
    assert found == [tokenizer.decode([*tokenizer.encode(t), *ids]) for t, ids in zip(texts, wanted, strict=True)]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_answers(family: str, untrained: Any) -> None:
    model = untrained(family)
    tokenizer, vocab = model.tokenizer, model.tokenizer.vocab
    ids = tokenizer.encode("the heron slept")
    framed = [*ids, vocab.eos] if family == "t5" else [vocab.cls, *ids, vocab.sep]
    wanted = generate_ids(model, [framed], 6)
    assert generate(model, ["the heron slept"], max_new_tokens=6) == [tokenizer.decode(wanted[0])]


def test_no_prompts_no_texts(untrained: Any) -> None:
    assert generate(untrained("gpt2"), []) == []
    assert generate(untrained("t5"), [], num_beams=2) == []


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_results_for_json(family: str, untrained: Any) -> None:
    model = untrained(family)
    for options in (dict(num_beams=3, num_return_sequences=2), dict(temperature=1.0, num_return_sequences=2)):
        found = generate_results(model, [TEXT, "A"], max_new_tokens=5, **options)
        assert json.loads(json.dumps(found)) == found
        assert [result["prompt"] for result in found] == [0, 0, 1, 1]
        assert [result["text"] for result in found] == generate(model, [TEXT, "A"], max_new_tokens=5, **options)
        for result in found:
            assert result["text"].endswith(result["new"])
            assert len(result["logprobs"]) == len(result["tokens"]) + result["finished"]


def test_log_probabilities_are_computed_only_where_they_are_shown(
    untrained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model = untrained("gpt2")
    model.save(tmp_path / "final")
    wanted = generate_results(model, [TEXT], max_new_tokens=5)
    append, given = DecodedBatch.append, list[bool]()

    def append_and_note(self: DecodedBatch, live_B: Any, token_B: Any, logits_BV: Any) -> None:
        given.append(logits_BV is not None)
        append(self, live_B, token_B, logits_BV)

    monkeypatch.setattr(DecodedBatch, "append", append_and_note)
    assert api.generate(tmp_path / "final", TEXT, max_new_tokens=5) == wanted[0]["text"]
    arguments = ["generate", str(tmp_path / "final"), TEXT, "--max-new-tokens", "5"]
    app([*arguments, "--no-stream"], standalone_mode=False)
    assert given == [False] * 10
    capsys.readouterr()
    app([*arguments, "--json"], standalone_mode=False)
    assert given[10:] == [True] * 5
    assert json.loads(capsys.readouterr().out)["results"] == wanted


# --- where to stop ------------------------------------------------------------------------------------------------


def cuts(text: str, start: int) -> list[str]:
    """Substrings of three characters of the generated text, at different offsets."""
    return [text[i : i + 3] for i in range(start, len(text) - 3, 5)]


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("decoding", [DRAWN, GenerationConfig(num_beams=2, max_new_tokens=12)], ids=["drawn", "beams"])
def test_a_text_ends_before_a_string(family: str, decoding: GenerationConfig, untrained: Any) -> None:
    """Even where it begins and ends inside tokens; the prompt may have it."""
    model = untrained(family)
    whole = generate_results(model, [TEXT], decoding)[0]
    for string in cuts(whole["new"], 0):
        options = dict(temperature=decoding.temperature, num_beams=decoding.num_beams, seed=decoding.seed)
        (found,) = generate_results(model, [TEXT], max_new_tokens=decoding.max_new_tokens, stop=[string], **options)
        assert string not in found["new"]
        if decoding.num_beams == 1:  # among beams another text may win
            assert found["finished"]
            assert found["new"] == whole["new"][: whole["new"].index(string)]
            assert len(found["tokens"]) <= len(whole["tokens"])
            assert whole["tokens"][: len(found["tokens"])] == found["tokens"]
            assert len(found["logprobs"]) == len(found["tokens"])
    assert generate(model, ["slept", TEXT], max_new_tokens=3, stop=["slept by the heron"]) == generate(
        model, ["slept", TEXT], max_new_tokens=3
    )


def test_each_row_stops_by_itself(untrained: Any) -> None:
    model, prompts = untrained("gpt2"), [TEXT, "A child", "Ravi"]
    whole = [result["new"] for result in generate_results(model, prompts, DRAWN)]
    string = whole[1][6:9]
    found = generate_results(model, prompts, stop=[string], temperature=1.0, seed=1, max_new_tokens=24)
    assert [result["new"] for result in found] == [new[: new.find(string)] if string in new else new for new in whole]


# --- as it comes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_the_pieces_of_a_stream_are_the_text(family: str, untrained: Any) -> None:
    model = untrained(family)
    for seed in range(4):
        options = dict(temperature=1.0, seed=seed, max_new_tokens=20)
        whole = generate_results(model, [TEXT], **options)[0]["new"]
        pieces = list(stream_text(model, TEXT, **options))
        assert "".join(pieces) == whole
        assert all(pieces)
        assert len(pieces) > 3


def page(untrained: Any, stop: tuple[str, ...] = ()) -> PromptText:
    model = untrained("gpt2")
    return PromptText(model, model.tokenizer.encode("It is"), stop)


def test_half_a_character_waits(untrained: Any) -> None:
    """Bytes of characters that the tokenizer does not know are tokens of their own."""
    here = page(untrained)
    ids = here.tokenizer.encode("It is 12 €!")[len(here.prompt_ids) :]
    shown = [here.stable_text(ids[:n]) for n in range(len(ids) + 1)]
    assert shown == sorted(shown, key=len)
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == " 12 €!"
    assert len(set(shown)) < len(shown), "the euro has several tokens"


def test_the_beginning_of_a_stop_waits(untrained: Any) -> None:
    here = page(untrained, ("\n\n", "END"))

    def shown(text: str) -> str:
        return here.stable_text(here.tokenizer.encode("It is" + text)[len(here.prompt_ids) :])

    assert shown(" so\n") == " so"
    assert shown(" so\nand") == " so\nand"
    assert shown(" so\n\nand") == " so"
    assert shown(" so EN") == " so "
    assert shown(" so EX") == " so EX"


def test_a_stream_stops_before_a_string(untrained: Any) -> None:
    model = untrained("gpt2")
    options = dict(temperature=1.0, seed=1, max_new_tokens=24)
    whole = generate_results(model, [TEXT], **options)[0]["new"]
    for string in cuts(whole, 3):
        assert "".join(stream_text(model, TEXT, stop=[string], **options)) == whole[: whole.index(string)]


def test_a_stream_is_one_text(untrained: Any) -> None:
    with pytest.raises(UserError, match="one text"):
        next(stream_text(untrained("gpt2"), TEXT, num_beams=2))
    with pytest.raises(UserError, match="firth fill"):
        next(stream_text(untrained("bert"), TEXT))
