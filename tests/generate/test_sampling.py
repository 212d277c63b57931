"""The choice of a token: the filters of `transformers`, and the law of the draws."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch

from firth.core.errors import UserError
from firth.generate import GenerationConfig
from firth.generate.config import MIN_SAMPLING_TEMPERATURE, make_generation_config
from firth.generate.sampling import (
    LogitsProcessor,
    TokenSampler,
    ngram_continuations,
    sample_from_uniform,
    sample_tokens,
    warp_logits,
)

CPU = torch.device("cpu")


def chooser(decoding: GenerationConfig, given: list[list[int]], vocab_size: int, end: int = 0) -> TokenSampler:
    return TokenSampler(LogitsProcessor(given, decoding, [end], vocab_size, CPU), range(len(given)))


def shares(logits: list[float], decoding: GenerationConfig, n: int = 20_000) -> dict[int, float]:
    """How often each token is drawn in n rows."""
    drawn = chooser(decoding, [[]] * n, len(logits))(torch.tensor([logits]).expand(n, -1), 0).tolist()
    return {token: count / n for token, count in collections.Counter(drawn).items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_law_of_temperature(temperature: float) -> None:
    """Two tokens with odds of 3 to 1: at temperature t the odds are 3 ** (1 / t) to 1."""
    odds = 3 ** (1 / temperature)
    found = shares([0.0, math.log(3)], GenerationConfig(temperature=temperature))
    assert found[1] == pytest.approx(odds / (1 + odds), abs=0.01)


def test_every_place_is_a_draw_of_its_own() -> None:
    logits, choose = torch.tensor([[0.0, math.log(3)]]), chooser(GenerationConfig(temperature=1.0), [[]], 2)
    drawn = [int(choose(logits, step)) for step in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)


def test_a_row_keeps_its_draws_when_others_are_dropped() -> None:
    logits, choose = torch.randn(5, 50), chooser(GenerationConfig(temperature=1.0), [[]] * 5, 50)
    whole, some = choose(logits, 3), torch.tensor([1, 4])
    choose.select_rows(some)
    assert choose(logits[some], 3).tolist() == whole[some].tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-46, 1e-38, 1e-30, 1e-10])
@pytest.mark.parametrize("settings", [{}, dict(top_p=0.5), dict(top_k=2), dict(min_p=0.1)], ids=str)
def test_a_tiny_temperature_is_greedy(temperature: float, settings: dict[str, Any]) -> None:
    """Logits / 1e-38 are Inf in float32, and Inf - Inf is NaN; forbidden tokens have -Inf."""
    logits = torch.tensor([[3.0, -math.inf, 5.0, 4.0], [-2.0, -1.0, -math.inf, -900.0]])
    choose = chooser(GenerationConfig(temperature=temperature, **settings), [[], []], 4)
    assert choose(logits, 0).tolist() == [2, 1]


def test_at_the_smallest_temperature_of_sampling_the_law_holds() -> None:
    least = MIN_SAMPLING_TEMPERATURE
    found = shares([0.0, least * math.log(3)], GenerationConfig(temperature=least))
    assert found[1] == pytest.approx(0.75, abs=0.02)
    assert shares([0.0, 1.0], GenerationConfig(temperature=least)) == {1: 1.0}
    assert shares([-100.0, 100.0], GenerationConfig(temperature=100.0, min_p=0.5)) == {1: 1.0}


def test_without_temperature_the_likeliest() -> None:
    assert shares([0.0, 2.0, 1.0], GenerationConfig(), n=3) == {1: 1.0}


SHARES = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


def test_top_k_draws_among_the_likeliest() -> None:
    found = shares(SHARES, GenerationConfig(temperature=1.0, top_k=2))
    assert found == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.01)
    assert shares(SHARES, GenerationConfig(temperature=1.0, top_k=9)) == shares(
        SHARES, GenerationConfig(temperature=1.0)
    )


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, {1}), (0.5, {1, 3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_draws_among_those_that_reach_the_share(top_p: float, kept: set[int]) -> None:
    found = shares(SHARES, GenerationConfig(temperature=1.0, top_p=top_p))
    total = sum(math.exp(SHARES[i]) for i in kept)
    assert found == pytest.approx({i: math.exp(SHARES[i]) / total for i in kept}, abs=0.01)


def test_min_p_draws_among_those_near_the_likeliest() -> None:
    """Half of 0.4 is 0.2: only 0.1 is less."""
    assert set(shares(SHARES, GenerationConfig(temperature=1.0, min_p=0.49))) == {1, 2, 3}


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.7),
        dict(temperature=1.3, top_k=7),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=1.0, min_p=0.1),
        dict(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [40, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_drawn_from_is_theirs(settings: dict[str, Any], vocab_size: int, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    makers = [
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ]
    logits = (torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    theirs = logits.float()
    for name, make in makers:
        theirs = make(settings[name])(None, theirs) if name in settings else theirs
    ours = warp_logits(logits, GenerationConfig(**settings))
    if dtype == torch.bfloat16:  # has ties, and their sort by top-p keeps any of them
        ours, theirs = ours.sort().values, theirs.sort().values
    torch.testing.assert_close(ours, theirs)


def draw_by_definition(logits: torch.Tensor, u: torch.Tensor, decoding: GenerationConfig) -> list[int]:
    """Every rule over the whole vocabulary, one row after another; all ties with the k-th token are kept."""
    drawn = []
    for row, at in zip(logits.float() / decoding.temperature, u.double(), strict=True):
        if decoding.top_k:
            row = row.masked_fill(row < row.sort(descending=True).values[: decoding.top_k][-1], -math.inf)
        if decoding.top_p < 1:
            order = row.argsort(stable=True)
            is_tail = row[order].softmax(0).cumsum(0) <= 1 - decoding.top_p
            row[order[:-1][is_tail[:-1]]] = -math.inf
        if decoding.min_p:
            row = row.masked_fill(row < row.max() + math.log(decoding.min_p), -math.inf)
        cdf = row.double().softmax(0).cumsum(0)
        drawn.append(int((cdf > at * cdf[-1]).nonzero()[0]))
    return drawn


@pytest.mark.parametrize("rounding", ["float32", "bfloat16", "halves"])
@pytest.mark.parametrize("vocab_size", [7, 700, 1500])
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(min_p=0.1),
        dict(top_p=0.6),
        dict(top_k=1),
        dict(top_k=50),
        dict(top_k=50, top_p=0.9),
        dict(top_k=20, top_p=0.8, min_p=0.05),
        dict(top_k=300, top_p=0.95),
        dict(top_k=1500, min_p=0.01),
    ],
    ids=str,
)
def test_the_draw_is_that_of_the_whole_vocabulary(settings: dict[str, Any], vocab_size: int, rounding: str) -> None:
    """Also among ties, among forbidden tokens, with fewer tokens than top-k, and at both ends of the random numbers."""
    rng = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(12, vocab_size, generator=rng) * 3 - 40
    logits = (logits * 2).round() / 2 if rounding == "halves" else logits
    logits = logits.bfloat16() if rounding == "bfloat16" else logits
    logits[4:8, vocab_size // 2 :] = -math.inf
    logits[8:, 3:-2] = -math.inf
    u = torch.rand(12, 1, generator=rng)
    u[::4], u[1::4] = 0, 1 - 2**-24
    for temperature in (0.8, 1.3):
        decoding = GenerationConfig(temperature=temperature, **settings)
        found = sample_tokens(logits, decoding, u)
        assert found.tolist() == draw_by_definition(logits, u, decoding)
        alone = [sample_tokens(logits[i : i + 1], decoding, u[i : i + 1]) for i in range(12)]
        assert torch.cat(alone).tolist() == found.tolist()


def test_ties_with_the_kth_are_kept_up_to_a_number() -> None:
    logits = torch.zeros(1, 1000)
    logits[:, 1::2] = -1.0
    logits[:, 200:] = -2.0
    for top_k, kept in ((60, 100), (100, 100), (110, 200), (40, 100), (10, 74), (250, 500)):
        found = warp_logits(logits, GenerationConfig(temperature=1.0, top_k=top_k))[0].isfinite()
        assert int(found.sum()) == kept
        assert not found[logits[0] < logits[0][found].min()].any()


@pytest.mark.parametrize("vocab_size", [512, 513, 1024, 1500])
def test_a_certain_token_is_drawn_in_every_block(vocab_size: int) -> None:
    certain = torch.tensor([0, 1, 511, vocab_size - 1])
    scores = torch.full((4, vocab_size), -math.inf).scatter(1, certain[:, None], 0.0)
    for u in (0.0, 0.3, 1 - 2**-24):
        assert sample_from_uniform(scores, torch.full((4, 1), u)).tolist() == certain.tolist()


def test_where_all_is_forbidden_a_token_of_the_vocabulary_is_drawn() -> None:
    """The slots of a batch that wait for a prompt compute something, too."""
    for settings in (dict(), dict(top_k=5, top_p=0.5)):
        decoding = GenerationConfig(temperature=1.0, **settings)
        (drawn,) = sample_tokens(torch.full((1, 1000), -math.inf), decoding, torch.full((1, 1), 0.5)).tolist()
        assert 0 <= drawn < 1000


@pytest.mark.parametrize("settings", [dict(repetition_penalty=1.7), dict(no_repeat_ngram_size=3)], ids=str)
def test_what_is_forbidden_is_theirs(settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    ids = [[1, 2, 3, 4, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5, 6, 7, 5, 6]]
    if "repetition_penalty" in settings:
        theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    else:
        theirs = transformers.NoRepeatNGramLogitsProcessor(3)
    logits = torch.randn(2, 9)
    past = LogitsProcessor([row[:-1] for row in ids], GenerationConfig(**settings), [0], 9, CPU)
    past.append(torch.tensor([row[-1] for row in ids]))
    wanted = theirs(torch.tensor(ids), logits.clone())
    assert (wanted != logits).any()
    torch.testing.assert_close(past.process(logits, 0), wanted)
    past.select_rows(torch.tensor([1, 1]))
    swapped = theirs(torch.tensor([ids[1]] * 2), logits.clone())
    torch.testing.assert_close(past.process(logits, 0), swapped)


def test_followers_of_what_was_said() -> None:
    assert ngram_continuations([1, 2, 3, 1, 2, 4, 1, 2], 3) == [3, 4]
    assert ngram_continuations([1, 2], 3) == []
    assert ngram_continuations([7, 8], 1) == [7, 8]
    assert ngram_continuations([7], 5) == []


def test_no_end_before_its_time() -> None:
    past = LogitsProcessor([[]], GenerationConfig(min_new_tokens=2), [1, 3, 9], 4, CPU)
    logits = torch.zeros(1, 4)
    found = [past.process(logits, step)[0].tolist() for step in range(3)]
    never = [0.0, -math.inf, 0.0, -math.inf]
    assert found == [never, never, [0.0] * 4]


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(temperature=-1), "temperature is -1"),
    (dict(temperature=float("nan")), "temperature is nan"),
    (dict(temperature="hot"), "temperature is 'hot'"),
    (dict(top_k=-1), "top_k is -1.*0 means all"),
    (dict(top_k=2.5), "top_k is 2.5.*whole"),
    (dict(top_p=0), "top_p is 0"),
    (dict(top_p=1.5), "top_p is 1.5"),
    (dict(min_p=2), "min_p is 2"),
    (dict(repetition_penalty=0), "repetition_penalty is 0"),
    (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size is -1"),
    (dict(num_beams=0), "num_beams is 0"),
    (dict(length_penalty=None), "length_penalty is None"),
    (dict(temperature=1e308), "temperature is 1e.308, and must be between 0 and 100"),
    (dict(repetition_penalty=1e-320), "repetition_penalty is 1e-320, and must be between 0.01 and 100; 1 changes"),
    (dict(length_penalty=1000, num_beams=2), "length_penalty is 1000, and must be between -10 and 10"),
    (dict(early_stopping="never"), "early_stopping is 'never'"),
    (dict(max_new_tokens=0), "max_new_tokens is 0"),
    (dict(min_new_tokens=60), "min_new_tokens is 60, more than max_new_tokens"),
    (dict(num_return_sequences=0), "num_return_sequences is 0"),
    (dict(num_return_sequences=3), "several texts per prompt"),
    (dict(num_return_sequences=3, num_beams=2), "num_beams of at least 3"),
    (dict(num_beams=2, temperature=1.0), "num_beams=1 or temperature=0"),
    (dict(top_p=0.9, top_k=5), "top_k and top_p.*temperature"),
    (dict(stop=["a", ""]), "stop must be"),
    (dict(seed="x"), "seed is 'x'"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[str(wrong) for wrong, _ in WRONG])
def test_impossible_settings_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        GenerationConfig(**wrong)


def test_one_string_to_stop_at_is_a_list_of_one() -> None:
    assert GenerationConfig(stop="end").stop == ("end",)


def test_options_by_their_names() -> None:
    assert make_generation_config(None, dict(top_k=3, temperature=1.0)) == GenerationConfig(top_k=3, temperature=1.0)
    with pytest.raises(UserError, match=r"'temprature'.*Did you mean 'temperature'"):
        make_generation_config(None, dict(temprature=1.0))
    with pytest.raises(UserError, match=r"not both"):
        make_generation_config(GenerationConfig(), dict(top_k=3))
