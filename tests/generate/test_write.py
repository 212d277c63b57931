"""Writing on: the same tokens as `transformers`, with a memory and without, and no row that knows of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from generate.ends import ending_with, without_end

from firth.errors import UserError
from firth.generate import Decoding, Written, generate_ids, write
from firth.generate.reading import Remembering, Rereading, pad_right, read_prompts
from firth.models import ModelConfig, make_model, with_classes
from firth.models.config import (
    MLP,
    ALiBi,
    Buckets,
    Disentangled,
    LayerNorm,
    LMHead,
    NoPlaces,
    Rotary,
    Shaw,
    Sinusoid,
    TransformerXL,
    Window,
)
from firth.models.presets import bart, gpt, gpt2, gpt3, llama, t5, t5_v1_1

PROMPTS = [[4, 40, 41, 42], [4], [4, 50, 51, 52, 53, 54, 55, 60], [4, 100]]
DRAWN = Decoding(temperature=1.0, seed=3)
SOME = [[4, 40, 41], [4, 60, 61, 62, 63]]


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_is_theirs(family: str, seed: int, untrained: Any, by_transformers: Any) -> None:
    model = untrained(family, seed)
    found = generate_ids(model, PROMPTS, 14)
    assert len({tuple(ids) for ids in found}) > 1
    assert found == [by_transformers(model, [ids], max_new_tokens=14, num_beams=1)[0][0] for ids in PROMPTS]


@pytest.mark.parametrize(
    "settings", [dict(repetition_penalty=1.3), dict(no_repeat_ngram_size=2), dict(min_new_tokens=9)], ids=str
)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_what_is_forbidden_is_theirs(
    family: str, settings: dict[str, Any], untrained: Any, by_transformers: Any
) -> None:
    model = untrained(family, 1)
    for ids in (PROMPTS[0], [4, 40, 41, 40, 41, 40]):
        (theirs,) = by_transformers(model, [ids], max_new_tokens=14, **settings)[0]
        assert generate_ids(model, [ids], 14, Decoding(**settings)) == [theirs]


# --- remembered or not --------------------------------------------------------------------------------------------


def any_decoder(position: Any, **changes: Any) -> ModelConfig:
    """A decoder of no published family."""
    fields: dict[str, Any] = dict(
        family="firth",
        shape="decoder",
        vocab_size=400,
        dim=32,
        num_layers=3,
        num_heads=4,
        mlp=MLP(48),
        position=position,
        norm=LayerNorm(1e-5),
        head=LMHead(),
        norm_first=True,
    )
    return ModelConfig(**fields | changes)


SMALL: dict[str, ModelConfig] = {
    "gpt": gpt(2, 32, 2, 400),
    "gpt2": gpt2(2, 32, 2, 400),
    "gpt3": gpt3(2, 32, 2, 400),
    "llama": llama(2, 32, 4, 48, 400),
    "llama with two heads of keys": llama(2, 32, 4, 48, 400, num_kv_heads=2),
    "alibi": any_decoder(ALiBi()),
    "buckets": any_decoder(Buckets(8, 10)),
    "shaw": any_decoder(Shaw(3)),
    "shaw with one head of keys": any_decoder(Shaw(3), num_kv_heads=1),
    "sinusoid": any_decoder(Sinusoid(64)),
    "no places": any_decoder(NoPlaces()),
    "windows": any_decoder(Rotary(local=100.0), window=Window(4, 2)),
    "windows and buckets": any_decoder(Buckets(8, 10), window=Window(4, 2)),
    "windows and shaw": any_decoder(Shaw(3), window=Window(4, 2)),
    "shared layers": any_decoder(Rotary(), num_shared=2),
    "transformer-xl": any_decoder(TransformerXL()),
    "disentangled": any_decoder(Disentangled()),
    "t5": t5(2, 32, 2, 48, 400),
    "t5.1.1": t5_v1_1(2, 32, 2, 48, 400),
    "t5 with one stack": t5(2, 32, 2, 48, 400, share_stacks=True),
    "bart": bart(2, 32, 2, 400, num_decoder_layers=3),
    "an encoder-decoder with rotary places": bart(2, 32, 2, 400, position=Rotary()),
}


@pytest.mark.parametrize("even", [False, True], ids=["uneven", "even"])
@pytest.mark.parametrize("name", SMALL)
def test_remembered_is_read_again(name: str, even: bool, untrained: Any) -> None:
    """The same logits at every step, whatever the lengths of the prompts; and the same tokens."""
    model = untrained(SMALL[name])
    prompts = [ids * 8 for ids in PROMPTS[1:2]] * 2 + [PROMPTS[2]] if even else PROMPTS
    readings = [read_prompts(model, prompts, 12, cache) for cache in (True, False)]
    with torch.no_grad():
        remembered, again = (reading.first() for reading in readings)
        for step in range(6):
            spread = max(1.0, float(again.std()))  # rounding grows with the logits
            torch.testing.assert_close(remembered / spread, again / spread, atol=1e-5, rtol=0)
            if step == 2:
                rows = torch.tensor([1, 1, 0])
                for reading in readings:
                    reading.take(rows)
                again = again[rows]
            token = again.argsort(-1)[:, -1 - step]
            remembered, again = (reading.next(token) for reading in readings)
    assert generate_ids(model, prompts, 12) == generate_ids(model, prompts, 12, cache=False)


def test_who_remembers(untrained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(read_prompts(untrained("gpt2"), SOME, 5), Remembering)
    assert capsys.readouterr().err == ""
    assert isinstance(read_prompts(untrained(SMALL["transformer-xl"]), SOME, 5), Rereading)
    assert capsys.readouterr().err.count("TransformerXL positions remember nothing") == 1


def test_a_remembered_row_is_read_once(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, places = without_end(untrained("t5")), []
    embed, encode, encoded = model.embed.forward, model.encode, []
    monkeypatch.setattr(model.embed, "forward", lambda t, *a, **k: places.append(t.shape[1]) or embed(t, *a, **k))
    monkeypatch.setattr(model, "encode", lambda batch: encoded.append(batch.tokens.shape) or encode(batch))
    generate_ids(model, SOME, 4)
    assert places == [1, 5, 1, 1, 1]  # the start, the prompts, three more tokens
    assert encoded == [(2, 5)]


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(num_beams=3)], ids=["greedy", "beams"])
@pytest.mark.parametrize("cache", [True, False])
def test_past_the_last_place_the_latest_tokens_are_read(
    decoding: Decoding, cache: bool, untrained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 places: prompts of 30 and of 18, then 10 more; each greedy token is the likeliest after the latest 24."""
    model = without_end(untrained("gpt2"))
    for prompt in ([4, *range(100, 129)], [4, *range(100, 117)]):
        (found,) = generate_ids(model, [prompt], 10, decoding, cache)
        assert capsys.readouterr().err.count("runs past the 24 tokens") == 1
        assert (found,) == tuple(generate_ids(model, [prompt], 10, decoding, not cache))
        capsys.readouterr()
        row = list(prompt)
        for token in found if decoding.num_beams == 1 else []:
            assert int(model(torch.tensor([row[-24:]])).logits[0, -1].argmax()) == token
            row.append(token)


def test_a_long_row_does_not_disturb_a_short_one(untrained: Any) -> None:
    model = without_end(untrained("gpt2"))
    prompts = [[4, *range(100, 117)], [4, 50]]
    assert generate_ids(model, prompts, 10) == [generate_ids(model, [ids], 10)[0] for ids in prompts]


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_end_token_ends_a_row_alone(family: str, untrained: Any) -> None:
    """The token that the first row writes third becomes the end token; other rows go on."""
    model = untrained(family, 1)
    whole = generate_ids(without_end(model), PROMPTS, 10)
    assert len(set(whole[0])) > 2, "a model that repeats itself shows nothing here"
    end = whole[0][2]
    ending_with(model, end)
    for cache in (True, False):
        for ids, found in zip(whole, generate_ids(model, PROMPTS, 10, cache=cache), strict=True):
            assert found == (ids[: ids.index(end)] if end in ids else ids)


def test_finished_rows_are_dropped(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own end; when at most half are left, only those are read on."""
    model, sizes, next_of = untrained("gpt2"), [], Remembering.next
    whole = generate_ids(without_end(model), PROMPTS, 10)
    lasts = [ids.index(whole[0][0]) if whole[0][0] in ids else 10 for ids in whole]
    assert lasts[0] == 0
    ending_with(model, whole[0][0])
    monkeypatch.setattr(Remembering, "next", lambda self, t: sizes.append(len(t)) or next_of(self, t))
    found = generate_ids(model, [PROMPTS[0], PROMPTS[0], *PROMPTS[1:]], 10)
    assert found == [ids[:n] for ids, n in zip([whole[0], *whole], [0, *lasts], strict=True)]
    assert sizes[0] <= 5
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("decoding", [Decoding(), DRAWN, Decoding(num_beams=2)], ids=["greedy", "drawn", "beams"])
def test_a_row_does_not_know_the_others(family: str, decoding: Decoding, untrained: Any) -> None:
    model = untrained(family)
    together = generate_ids(model, PROMPTS, 8, decoding)
    assert together[:1] == generate_ids(model, PROMPTS[:1], 8, decoding)
    longer = [PROMPTS[0], PROMPTS[2] * 2, *PROMPTS[2:]]
    assert [together[0], *together[2:]] == [
        ids for i, ids in enumerate(generate_ids(model, longer, 8, decoding)) if i != 1
    ]


def test_draws_depend_on_seed_row_and_place(untrained: Any) -> None:
    model = untrained("gpt2")
    same = [PROMPTS[0]] * 2
    first = generate_ids(model, same, 8, DRAWN)
    assert first == generate_ids(model, same, 8, DRAWN)
    assert first == generate_ids(model, same, 8, DRAWN, cache=False)
    assert first[0] != first[1]
    assert first != generate_ids(model, same, 8, Decoding(temperature=1.0, seed=4))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_several_texts_of_one_prompt_are_rows_like_others(family: str, untrained: Any) -> None:
    model = untrained(family)
    twice = [ids for ids in PROMPTS for _ in range(2)]
    assert generate_ids(model, PROMPTS, 6, replace(DRAWN, num_return_sequences=2)) == generate_ids(
        model, twice, 6, DRAWN
    )


@pytest.mark.parametrize("decoding", [Decoding(repetition_penalty=2.0), DRAWN, Decoding(num_beams=3)])
def test_log_probabilities_are_the_models_own(decoding: Decoding, untrained: Any) -> None:
    model = untrained("gpt2", 1)
    vocab = model.tokenizer.vocab
    for prompt, found in zip(PROMPTS, write(model, PROMPTS, replace(decoding, max_new_tokens=8)), strict=True):
        row = [*prompt, *found.tokens, *([vocab.eos] if found.finished else [])]
        logprob = model(torch.tensor([row])).logits[0].log_softmax(-1).detach()
        wanted = [float(logprob[i - 1, row[i]]) for i in range(len(prompt), len(row))]
        assert found.logprobs == pytest.approx(wanted, abs=1e-4)
        if decoding.num_beams == 1:
            assert found.score == pytest.approx(sum(wanted), abs=1e-4)


def test_an_end_and_none(untrained: Any) -> None:
    model = untrained("gpt2")
    (whole,) = write(without_end(model), [PROMPTS[0]], Decoding(max_new_tokens=5))
    assert not whole.finished
    assert len(whole.tokens) == len(whole.logprobs) == 5
    (ended,) = write(ending_with(model, whole.tokens[2]), [PROMPTS[0]], Decoding(max_new_tokens=5))
    assert ended == Written(whole.tokens[:2], True, pytest.approx(whole.logprobs[:3]), pytest.approx(ended.score))


def test_padding_is_on_the_right() -> None:
    tokens, doc = pad_right([[5, 6, 7], [8]], pad=0)
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert doc.tolist() == [[0, 0, 0], [0, -1, -1]]


def test_dropout_is_off_and_training_goes_on(untrained: Any) -> None:
    model = untrained("gpt2")
    wanted = generate_ids(model, PROMPTS, 6)
    model.train()
    assert generate_ids(model, PROMPTS, 6) == wanted
    assert model.training


def test_who_cannot_write(untrained: Any) -> None:
    with pytest.raises(UserError, match="firth fill"):
        generate_ids(untrained("bert"), PROMPTS)
    model = untrained("gpt2")
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        generate_ids(model, PROMPTS, 0)
    classes = make_model(with_classes(model.config, ("a", "b")))
    classes.tokenizer = model.tokenizer
    with pytest.raises(UserError, match="choose classes"):
        generate_ids(classes, PROMPTS)
    model.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        generate_ids(model, PROMPTS)
