"""Writing on: the same tokens as `transformers`, no row that knows of another, and the law of the draws."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from firth.errors import UserError
from firth.generate import Sampling, generate, generate_ids
from firth.generate.sample import choose, pad_right
from firth.models import make_model, with_classes, write_model
from firth.tokens import Vocabulary

PROMPTS = [[4, 40, 41, 42], [4], [4, 50, 51, 52, 53, 54, 55, 60], [4, 100]]
DRAWN = Sampling(temperature=1.0, seed=3)


def greedy_by_transformers(model: Any, folder: Path, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    transformers = pytest.importorskip("transformers")
    write_model(model, folder)
    decoder = model.config.shape == "decoder"
    theirs = (transformers.AutoModelForCausalLM if decoder else transformers.AutoModelForSeq2SeqLM).from_pretrained(
        folder
    )
    found = []
    for ids in prompts:
        given = torch.tensor([ids])
        out = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=max_new_tokens, do_sample=False
        )
        new = out[0, len(ids) if decoder else 1 :].tolist()
        end = model.tokenizer.vocab.eos
        found.append(new[: new.index(end)] if end in new else new)
    return found


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_is_theirs(family: str, seed: int, untrained: Any, tmp_path: Path) -> None:
    model = untrained(family, seed)
    found = generate_ids(model, PROMPTS, 14)
    assert len({tuple(ids) for ids in found}) > 1
    assert found == greedy_by_transformers(model, tmp_path, PROMPTS, 14)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_the_end_token_ends_a_row_alone(family: str, untrained: Any) -> None:
    """The token that the first row writes third becomes the end token; other rows go on."""

    @dataclass
    class Ends:
        vocab: Vocabulary

    model = untrained(family, 1)
    vocab = model.tokenizer.vocab
    model.tokenizer = Ends(replace(vocab, eos=vocab.size))  # which no row can write
    whole = generate_ids(model, PROMPTS, 10)
    assert len(set(whole[0])) > 2, "a model that repeats itself shows nothing here"
    end = whole[0][2]
    model.tokenizer = Ends(replace(vocab, eos=end))
    for ids, found in zip(whole, generate_ids(model, PROMPTS, 10), strict=True):
        assert found == (ids[: ids.index(end)] if end in ids else ids)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_a_row_does_not_know_the_others(family: str, sampling: Sampling, untrained: Any) -> None:
    model = untrained(family)
    together = generate_ids(model, PROMPTS, 8, sampling)
    assert together[:1] == generate_ids(model, PROMPTS[:1], 8, sampling)
    longer = [PROMPTS[0], PROMPTS[2] * 2, *PROMPTS[2:]]
    assert [together[0], *together[2:]] == [
        ids for i, ids in enumerate(generate_ids(model, longer, 8, sampling)) if i != 1
    ]


def test_draws_depend_on_seed_row_and_place(untrained: Any) -> None:
    model = untrained("gpt2")
    same = [PROMPTS[0]] * 2
    first = generate_ids(model, same, 8, DRAWN)
    assert first == generate_ids(model, same, 8, DRAWN)
    assert first[0] != first[1]
    assert first != generate_ids(model, same, 8, Sampling(1.0, seed=4))


# --- the choice ---------------------------------------------------------------------------------------------------


def counts(logits: list[float], sampling: Sampling, n: int = 20_000) -> dict[int, float]:
    drawn = choose(torch.tensor([logits]).expand(n, -1), sampling, range(n), 0)
    return {token: count / n for token, count in collections.Counter(drawn).items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_law_of_temperature(temperature: float) -> None:
    """Two tokens with odds of 3 to 1: at temperature t the odds are 3 ** (1 / t) to 1."""
    odds = 3 ** (1 / temperature)
    found = counts([0.0, math.log(3)], Sampling(temperature))
    assert found[1] == pytest.approx(odds / (1 + odds), abs=0.01)


def test_every_place_is_a_draw_of_its_own() -> None:
    logits = torch.tensor([[0.0, math.log(3)]])
    drawn = [choose(logits, Sampling(1.0), [0], place)[0] for place in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)


def test_without_temperature_the_likeliest() -> None:
    assert counts([0.0, 2.0, 1.0], Sampling(), n=3) == {1: 1.0}


SHARES = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


def test_top_k_draws_among_the_likeliest() -> None:
    found = counts(SHARES, Sampling(1.0, top_k=2))
    assert found == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.01)
    assert counts(SHARES, Sampling(1.0, top_k=9)) == counts(SHARES, Sampling(1.0))


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, {1}), (0.5, {1, 3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_draws_among_those_that_reach_the_share(top_p: float, kept: set[int]) -> None:
    found = counts(SHARES, Sampling(1.0, top_p=top_p))
    total = sum(math.exp(SHARES[i]) for i in kept)
    assert found == pytest.approx({i: math.exp(SHARES[i]) / total for i in kept}, abs=0.01)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_impossible_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_padding_is_on_the_right() -> None:
    tokens, doc = pad_right([[5, 6, 7], [8]], pad=0)
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert doc.tolist() == [[0, 0, 0], [0, -1, -1]]


# --- texts --------------------------------------------------------------------------------------------------------


def test_a_decoder_continues(untrained: Any) -> None:
    model = untrained("gpt2")
    tokenizer, end = model.tokenizer, model.tokenizer.vocab.eos
    texts = ["The heron slept", ""]
    found = generate(model, texts, max_new_tokens=6)
    assert found[0].startswith("The heron slept")
    assert len(found[0]) > len(texts[0])
    wanted = generate_ids(model, [[end, *tokenizer.encode(text)] for text in texts], 6)
    assert found == [tokenizer.decode([*tokenizer.encode(t), *ids]) for t, ids in zip(texts, wanted, strict=True)]


def test_an_encoder_decoder_answers(untrained: Any) -> None:
    model = untrained("t5")
    tokenizer, end = model.tokenizer, model.tokenizer.vocab.eos
    text = "the heron slept"
    wanted = generate_ids(model, [[*tokenizer.encode(text), end]], 6)
    assert generate(model, [text], max_new_tokens=6) == [tokenizer.decode(wanted[0])]


def test_no_prompts_no_texts(untrained: Any) -> None:
    assert generate(untrained("gpt2"), []) == []
    assert generate(untrained("t5"), []) == []


def test_past_the_last_place_the_latest_tokens_are_read(untrained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """24 places: a prompt of 30, then 10 more; each token is the greedy one after the latest 24."""
    model = untrained("gpt2")
    prompt = [4, *range(100, 129)]
    found = generate_ids(model, [prompt], 10)[0]
    assert capsys.readouterr().err.count("runs past the 24 tokens") == 1
    row = list(prompt)
    for token in found:
        assert int(model(torch.tensor([row[-24:]])).logits[0, -1].argmax()) == token
        row.append(token)


def test_dropout_is_off_and_training_goes_on(untrained: Any) -> None:
    model = untrained("gpt2")
    wanted = generate_ids(model, PROMPTS, 6)
    model.train()
    assert generate_ids(model, PROMPTS, 6) == wanted
    assert model.training


def test_who_cannot_write(untrained: Any) -> None:
    with pytest.raises(UserError, match="firth fill"):
        generate(untrained("bert"), ["The"])
    model = untrained("gpt2")
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        generate(model, ["The"], max_new_tokens=0)
    classes = make_model(with_classes(model.config, ("a", "b")))
    classes.tokenizer = model.tokenizer
    with pytest.raises(UserError, match="choose classes"):
        generate(classes, ["The"])
    model.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        generate(model, ["The"])
