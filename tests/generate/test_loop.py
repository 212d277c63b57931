"""Writing on: the same tokens as `transformers`, with a memory and without, and no row that knows of another."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from generate.ends import ending_with, without_end

from firth.core.errors import UserError
from firth.generate import GeneratedSequence, GenerationConfig, generate_ids, generate_sequences, stream_text
from firth.generate.decode_state import CachedDecode, UncachedDecode, make_decode_state, pad_right
from firth.generate.length_budget import make_length_budget
from firth.generate.loop import iterate_decode_steps
from firth.models import ForcedTokens, ModelConfig, load_model, make_model, make_sequence_template
from firth.models.config import (
    ALiBi,
    Disentangled,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    NoPosition,
    Rotary,
    Shaw,
    SinusoidalPosition,
    SlidingWindow,
    T5Bias,
    TransformerXL,
)
from firth.models.kv_cache import KVCache
from firth.models.presets import bart, firth_t5, gpt, gpt2, gpt3, llama, t5, t5_v1_1, t5gemma
from firth.models.task_heads import with_classification_head

PROMPTS = [[4, 40, 41, 42], [4], [4, 50, 51, 52, 53, 54, 55, 60], [4, 100]]
DRAWN = GenerationConfig(temperature=1.0, seed=3)
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
        assert generate_ids(model, [ids], 14, GenerationConfig(**settings)) == [theirs]


# --- remembered or not --------------------------------------------------------------------------------------------


def any_decoder(position: Any, **changes: Any) -> ModelConfig:
    """A decoder of no published family."""
    fields: dict[str, Any] = dict(
        family="firth",
        architecture="decoder",
        vocab_size=400,
        dim=32,
        num_layers=3,
        num_heads=4,
        mlp=MLPConfig(48),
        position=position,
        norm=LayerNormConfig(1e-5),
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
    "buckets": any_decoder(T5Bias(8, 10)),
    "shaw": any_decoder(Shaw(3)),
    "shaw with one head of keys": any_decoder(Shaw(3), num_kv_heads=1),
    "sinusoid": any_decoder(SinusoidalPosition(64)),
    "no positions": any_decoder(NoPosition()),
    "windows": any_decoder(Rotary(local_theta=100.0), window=SlidingWindow(4, 2)),
    "windows and buckets": any_decoder(T5Bias(8, 10), window=SlidingWindow(4, 2)),
    "windows and shaw": any_decoder(Shaw(3), window=SlidingWindow(4, 2)),
    "bigrams": any_decoder(Rotary(), num_bigram_buckets=50),
    "shared layers": any_decoder(Rotary(), num_shared=2),
    "transformer-xl": any_decoder(TransformerXL()),
    "disentangled": any_decoder(Disentangled()),
    "t5": t5(2, 32, 2, 48, 400),
    "t5.1.1": t5_v1_1(2, 32, 2, 48, 400),
    "t5gemma": t5gemma(2, 32, 2, 48, 400),
    "firth-t5": firth_t5(2, 32, 2, 48, 400),
    "t5 with one stack": t5(2, 32, 2, 48, 400, share_stacks=True),
    "bart": bart(2, 32, 2, 400, num_decoder_layers=3),
    "an encoder-decoder with rotary positions": bart(2, 32, 2, 400, position=Rotary()),
}


@pytest.mark.parametrize("even", [False, True], ids=["uneven", "even"])
@pytest.mark.parametrize("name", SMALL)
def test_remembered_is_read_again(name: str, even: bool, untrained: Any) -> None:
    """The same logits at every step, whatever the lengths of the prompts; and the same tokens."""
    model = untrained(SMALL[name]).double()  # rounding of float32 depends on the CPU
    prompts = [ids * 8 for ids in PROMPTS[1:2]] * 2 + [PROMPTS[2]] if even else PROMPTS
    readings = [make_decode_state(model, prompts, 12, cache) for cache in (True, False)]
    with torch.no_grad():
        remembered, again = (reading.prefill() for reading in readings)
        for step in range(6):
            torch.testing.assert_close(remembered, again, atol=1e-6, rtol=1e-6)
            if step == 2:
                rows = torch.tensor([1, 1, 0])
                for reading in readings:
                    reading.select_rows(rows)
                again = again[rows]
            token = again.argsort(-1)[:, -1 - step]
            remembered, again = (reading.decode_step(token) for reading in readings)
    assert generate_ids(model, prompts, 12) == generate_ids(model, prompts, 12, use_cache=False)


def test_who_remembers(untrained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_decode_state(untrained("gpt2"), SOME, 5), CachedDecode)
    assert capsys.readouterr().err == ""
    assert isinstance(make_decode_state(untrained(SMALL["transformer-xl"]), SOME, 5), UncachedDecode)
    assert capsys.readouterr().err.count("TransformerXL positions have no KV cache") == 1
    assert isinstance(make_decode_state(untrained(SMALL["bigrams"]), SOME, 5), UncachedDecode)
    assert capsys.readouterr().err.count("embeddings of bigrams have no KV cache") == 1


def test_a_remembered_row_is_read_once(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = without_end(untrained("t5")), []
    embed, encode, encoded = model.embed.forward, model.encode, []
    monkeypatch.setattr(model.embed, "forward", lambda t, *a, **k: widths.append(t.shape[1]) or embed(t, *a, **k))
    monkeypatch.setattr(model, "encode", lambda batch: encoded.append(batch.input_ids.shape) or encode(batch))
    generate_ids(model, SOME, 4)
    assert widths == [1, 5, 1, 1, 1]  # the start, the prompts, three more tokens
    assert encoded == [(2, 5)]


@pytest.mark.parametrize("decoding", [GenerationConfig(), GenerationConfig(num_beams=3)], ids=["greedy", "beams"])
@pytest.mark.parametrize("cache", [True, False])
def test_a_text_ends_at_the_last_place(
    decoding: GenerationConfig, cache: bool, untrained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 positions: the last token is predicted at the 24th and is not read itself."""
    model = without_end(untrained("gpt2"))
    prompt = [4, *range(100, 105)]
    (found,) = generate_ids(model, [prompt], 100_000, decoding, cache)
    assert len(found) == 24 - 6 + 1
    assert capsys.readouterr().err.count("24 positions: at most 19 new tokens, not 100,000") == 1
    if decoding.num_beams == 1:
        row = [*prompt, *found]
        for i in range(len(found)):
            assert int(model(torch.tensor([row[: 6 + i]])).logits[0, -1].argmax()) == found[i]
    assert generate_ids(model, [prompt], 19, decoding, cache) == [found]
    generate_ids(model, [prompt], 100_000, decoding, cache)
    assert capsys.readouterr().err == ""  # it is said once


@pytest.mark.parametrize(("length", "wanted", "read", "new"), [(20, 10, 15, 10), (30, 50, 13, 12), (40, 3, 22, 3)])
def test_a_long_prompt_loses_its_beginning(
    length: int, wanted: int, read: int, new: int, untrained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is the requested length, or half of the 24 positions."""
    model = without_end(untrained("gpt2"))
    prompt = [4, *range(100, 99 + length)]
    (found,) = generate_ids(model, [prompt], wanted)
    assert capsys.readouterr().err.count("only its last tokens are used") == 1
    assert len(found) == new
    assert generate_ids(model, [prompt[-read:]], new) == [found]


def test_a_long_prompt_keeps_the_token_before_every_text(untrained: Any) -> None:
    """BART reads <s> before each text; a decoder reads its begin token only where a text begins."""
    model = untrained(replace(bart(1, 32, 2, 400), position=LearnedPosition(26, 2)))
    first, last = model.tokenizer.vocab.cls, model.tokenizer.vocab.sep
    prompt = [first, *range(100, 160), last]
    kept = make_length_budget(model, [prompt, prompt[1:]], 5).prompts
    assert kept == [[first, *prompt[-23:]], prompt[-24:]]
    gpt2 = untrained("gpt2")
    begin = make_sequence_template(gpt2.config, gpt2.tokenizer.vocab).prefix_ids[0]
    assert make_length_budget(gpt2, [[begin, *prompt]], 5).prompts == [prompt[-20:]]


@pytest.mark.parametrize(
    "decoding", [GenerationConfig(), DRAWN, GenerationConfig(num_beams=2)], ids=["greedy", "drawn", "beams"]
)
@pytest.mark.parametrize("cache", [True, False])
def test_a_long_row_does_not_disturb_a_short_one(decoding: GenerationConfig, cache: bool, untrained: Any) -> None:
    """Each has its own length budget: 12 tokens, 23, 5."""
    model = without_end(untrained("gpt2"))
    prompts = [[4, *range(100, 117)], [4, 50], [4, *range(60, 79)]]
    found = generate_ids(model, prompts, 23, decoding, cache)
    assert list(map(len, found)) == [12, 23, 12]
    if decoding != DRAWN:  # whose draws depend on the row
        assert found == [generate_ids(model, [ids], 23, decoding, cache)[0] for ids in prompts]


def test_room_grows(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("length_budget", "decode_state", "loop", "beams"):
        monkeypatch.setattr(sys.modules[f"firth.generate.{module}"], "INITIAL_NEW_TOKENS", 2)
    for name in ("llama with two heads of keys", "alibi", "buckets", "shaw", "windows and buckets", "t5"):
        model = without_end(untrained(SMALL[name]))
        sizes, grow = [], KVCache.grow
        monkeypatch.setattr(
            KVCache, "grow", lambda self, size, grow=grow, sizes=sizes: sizes.append(size) or grow(self, size)
        )
        for decoding in (GenerationConfig(), GenerationConfig(num_beams=2)):
            assert generate_ids(model, PROMPTS, 11, decoding) == generate_ids(
                model, PROMPTS, 11, decoding, use_cache=False
            )
        assert sizes[-1] > 2 + len(PROMPTS[2])
        monkeypatch.setattr(KVCache, "grow", grow)


def test_nothing_is_made_for_tokens_that_may_never_come(untrained: Any) -> None:
    """A billion tokens are allowed, and the text ends after some."""
    model = untrained("llama", 1)
    end = generate_ids(without_end(model), [PROMPTS[0]], 6)[0][-1]
    for decoding in (
        GenerationConfig(max_new_tokens=10**9),
        GenerationConfig(max_new_tokens=10**9, num_beams=2, early_stopping=True),
    ):
        (found,) = generate_ids(ending_with(model, end), [PROMPTS[0]], None, decoding)
        assert len(found) < 100


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_beyond_the_length_it_was_made_for_they_write_the_same(
    family: str, untrained: Any, by_transformers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 RoPE positions, 10 positions with own T5 buckets: longer texts equal `transformers`, with a notice."""
    config = {
        "llama": llama(2, 32, 4, 48, 400, num_kv_heads=2, position=Rotary(length=24)),
        "t5": t5_v1_1(2, 32, 2, 48, 400, position=T5Bias(8, 10)),
    }[family]
    model = without_end(untrained(config))
    (found,) = generate_ids(model, [PROMPTS[0]], 40)
    num_warnings = capsys.readouterr().err.count("longer than the 24 tokens of this model's training context")
    assert num_warnings == (family == "llama")
    assert [found] == by_transformers(model, [PROMPTS[0]], max_new_tokens=40, eos_token_id=None)[0]


# --- what is forced -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forced",
    [ForcedTokens(), ForcedTokens(bos=7), ForcedTokens(9, 11)]
    + [pytest.param(forced, marks=pytest.mark.slow) for forced in (ForcedTokens(eos=2), ForcedTokens(9, 2))],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_beams", "file"),
    [pytest.param(1, "generation_config.json", marks=pytest.mark.slow), (3, "config.json")],
)
def test_what_is_forced_is_theirs(
    forced: ForcedTokens, num_beams: int, file: str, tokenizers: Any, tmp_path: Path
) -> None:
    """A BART of `transformers`, opened from its own folder; its `generate` with its own settings."""
    transformers = pytest.importorskip("transformers")
    vocab = tokenizers["byte-bpe"].vocab
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
    tokens = dict(pad_token_id=vocab.pad, bos_token_id=vocab.cls, eos_token_id=vocab.sep)
    config = transformers.BartConfig(
        vocab_size=vocab.size, encoder_attention_heads=2, decoder_attention_heads=2, decoder_start_token_id=vocab.sep,
        **sizes, **tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.BartForConditionalGeneration(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizers["byte-bpe"].save(tmp_path / "theirs")
    names = dict(forced_bos_token_id=forced.bos, forced_eos_token_id=forced.eos)
    facts = json.loads((tmp_path / "theirs" / file).read_text())
    (tmp_path / "theirs" / file).write_text(json.dumps(facts | names))
    if file == "config.json":
        (tmp_path / "theirs" / "generation_config.json").unlink()
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs").eval()
    first = load_model(tmp_path / "theirs")
    first.save(tmp_path / "ours")
    theirs_again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    for model in (first, load_model(tmp_path / "ours")):
        assert model.forced_tokens == forced
        for most in (1, 2, 5, 14):
            found = generate_ids(model, PROMPTS, most, GenerationConfig(num_beams=num_beams))
            for ids, ours in zip(PROMPTS, found, strict=True):
                for other in (theirs, theirs_again):
                    out = other.generate(torch.tensor([ids]), max_new_tokens=most, num_beams=num_beams, do_sample=False)
                    wanted = out[0, 1:].tolist()
                    assert ours == (wanted[: wanted.index(vocab.sep)] if vocab.sep in wanted else wanted)


def test_bart_ends_its_texts_by_itself(untrained: Any) -> None:
    """As its family has it, also where no checkpoint says so; a text that is cut has its end."""
    model = untrained("bart")
    (text,) = generate_sequences(model, [PROMPTS[0]], GenerationConfig(max_new_tokens=5, min_new_tokens=4))
    assert text.finished
    assert len(text.tokens) == 4
    model.forced_tokens = ForcedTokens()
    (text,) = generate_sequences(model, [PROMPTS[0]], GenerationConfig(max_new_tokens=5, min_new_tokens=5))
    assert not text.finished
    assert len(text.tokens) == 5


# --- several ends -------------------------------------------------------------------------------------------------


def cut(ids: list[int], ends: Sequence[int]) -> list[int]:
    return list(takewhile(lambda token: token not in ends, ids))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_list_of_ends_is_theirs(file: str, tokenizers: Any, tmp_path: Path) -> None:
    """A Llama of `transformers`, whose texts end early with one token or another of the list in its own folder."""
    transformers = pytest.importorskip("transformers")
    vocab = tokenizers["byte-bpe"].vocab
    config = transformers.LlamaConfig(
        vocab_size=vocab.size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=vocab.pad, bos_token_id=vocab.bos, eos_token_id=vocab.eos,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizers["byte-bpe"].save(tmp_path / "theirs")
    whole = generate_ids(without_end(load_model(tmp_path / "theirs")), PROMPTS, 10)
    ends = [whole[0][2], whole[1][4], whole[2][1]]
    assert len({*ends, vocab.eos}) == 4
    facts = json.loads((tmp_path / "theirs" / file).read_text())
    (tmp_path / "theirs" / file).write_text(json.dumps(facts | {"eos_token_id": ends}))
    if file == "config.json":
        (tmp_path / "theirs" / "generation_config.json").unlink()

    first = load_model(tmp_path / "theirs")
    first.save(tmp_path / "ours")
    others = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("theirs", "ours")]
    assert [other.generation_config.eos_token_id for other in others] == [ends] * 2
    assert others[1].config.eos_token_id == ends
    unlisted = ending_with(load_model(tmp_path / "ours"), whole[3][0])  # the tokenizer's own end counts no more
    for num_beams, least in itertools.product((1, 2, 4), (0, 6)):
        wanted = []
        for ids, other in itertools.product(PROMPTS, others):
            settings = dict(max_new_tokens=10, min_new_tokens=least, num_beams=num_beams, do_sample=False)
            wanted.append(cut(other.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist(), ends))
        assert wanted[::2] == wanted[1::2]
        assert least or len([ids for ids in wanted if len(ids) < 9]) >= 4, "texts should end early"
        for model, cache in itertools.product((first, load_model(tmp_path / "ours"), unlisted), (True, False)):
            decoding = GenerationConfig(num_beams=num_beams, min_new_tokens=least)
            assert generate_ids(model, PROMPTS, 10, decoding, cache) == wanted[::2]


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_all_families_have_several_ends(family: str, num_beams: int, untrained: Any, by_transformers: Any) -> None:
    model, decoding = untrained(family, 1), GenerationConfig(num_beams=num_beams, num_return_sequences=num_beams)
    long = GenerationConfig(max_new_tokens=10, min_new_tokens=10)
    model.eos_token_ids = tuple(
        ids[index] for ids, index in zip(generate_ids(model, PROMPTS, 10, long), (2, 1, 5), strict=False)
    )
    found = generate_sequences(model, PROMPTS, replace(decoding, max_new_tokens=10))
    assert sum(text.finished and len(text.tokens) < 9 for text in found) > 1
    settings = dict(num_beams=num_beams, num_return_sequences=num_beams)
    if num_beams == 1:
        wanted = [by_transformers(model, [ids], max_new_tokens=10, **settings)[0][0] for ids in PROMPTS]
    else:
        wanted, _ = by_transformers(model, PROMPTS, max_new_tokens=10, **settings)
    assert [text.tokens for text in found] == wanted


@pytest.mark.parametrize("cache", [True, False])
def test_a_draw_ends_at_the_first_of_several_ends(cache: bool, untrained: Any) -> None:
    """What is drawn does not depend on what ends it; a text that is streamed ends there too."""
    model, drawn = untrained("llama", 1), replace(DRAWN, max_new_tokens=12, min_new_tokens=0, num_return_sequences=2)
    tokenizer = model.tokenizer
    whole = generate_ids(without_end(model), PROMPTS, generation_config=drawn)
    model.tokenizer, model.eos_token_ids = tokenizer, (whole[0][3], whole[1][6], whole[4][0])
    found = generate_sequences(model, PROMPTS, drawn, cache)
    assert [text.tokens for text in found] == [cut(ids, model.eos_token_ids) for ids in whole]
    assert [text.finished for text in found] == [cut(ids, model.eos_token_ids) != ids for ids in whole]
    assert [len(text.logprobs) for text in found] == [len(text.tokens) + text.finished for text in found]
    (alone,) = generate_ids(
        model, PROMPTS[:1], generation_config=replace(drawn, num_return_sequences=1), use_cache=cache
    )
    pieces = stream_text(model, PROMPTS[0], replace(drawn, num_return_sequences=1), cache)
    assert "".join(pieces) == tokenizer.decode(alone)


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
        for ids, found in zip(whole, generate_ids(model, PROMPTS, 10, use_cache=cache), strict=True):
            assert found == (ids[: ids.index(end)] if end in ids else ids)


def test_finished_rows_are_dropped(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own end; when at most half are left, only those are read on."""
    model, sizes, next_of = untrained("gpt2"), [], CachedDecode.decode_step
    whole = generate_ids(without_end(model), PROMPTS, 10)
    lasts = [ids.index(whole[0][0]) if whole[0][0] in ids else 10 for ids in whole]
    assert lasts[0] == 0
    ending_with(model, whole[0][0])
    monkeypatch.setattr(CachedDecode, "decode_step", lambda self, t: sizes.append(len(t)) or next_of(self, t))
    found = generate_ids(model, [PROMPTS[0], PROMPTS[0], *PROMPTS[1:]], 10)
    assert found == [ids[:n] for ids, n in zip([whole[0], *whole], [0, *lasts], strict=True)]
    assert sizes[0] <= 5
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize(
    "decoding", [GenerationConfig(), DRAWN, GenerationConfig(num_beams=2)], ids=["greedy", "drawn", "beams"]
)
def test_a_row_does_not_know_the_others(family: str, decoding: GenerationConfig, untrained: Any) -> None:
    model = untrained(family)
    together = generate_ids(model, PROMPTS, 8, decoding)
    assert together[:1] == generate_ids(model, PROMPTS[:1], 8, decoding)
    longer = [PROMPTS[0], PROMPTS[2] * 2, *PROMPTS[2:]]
    assert [together[0], *together[2:]] == [
        ids for i, ids in enumerate(generate_ids(model, longer, 8, decoding)) if i != 1
    ]


def test_a_prompt_with_its_own_seed_gives_the_samples_that_it_gives_alone(untrained: Any) -> None:
    model = untrained("gpt2")
    prompts, seeds = [[5, 6], [7, 8, 9], [5, 6]], [3, -4, 5]
    for each in (1, 2):
        config = GenerationConfig(temperature=1.0, max_new_tokens=6, num_return_sequences=each)
        alone = [
            sequence.tokens
            for prompt, seed in zip(prompts, seeds, strict=True)
            for sequence in generate_sequences(model, [prompt], replace(config, seed=seed))
        ]
        *_, decoded = iterate_decode_steps(model, prompts, config, seeds=seeds)
        assert [sequence.tokens for sequence in decoded.to_sequences()] == alone
        assert alone[0] != alone[-1], "one prompt, two seeds"


def test_draws_depend_on_seed_row_and_place(untrained: Any) -> None:
    model = untrained("gpt2")
    same = [PROMPTS[0]] * 2
    first = generate_ids(model, same, 8, DRAWN)
    assert first == generate_ids(model, same, 8, DRAWN)
    assert first == generate_ids(model, same, 8, DRAWN, use_cache=False)
    assert first[0] != first[1]
    assert first != generate_ids(model, same, 8, GenerationConfig(temperature=1.0, seed=4))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_several_texts_of_one_prompt_are_rows_like_others(family: str, untrained: Any) -> None:
    model = untrained(family)
    twice = [ids for ids in PROMPTS for _ in range(2)]
    assert generate_ids(model, PROMPTS, 6, replace(DRAWN, num_return_sequences=2)) == generate_ids(
        model, twice, 6, DRAWN
    )


@pytest.mark.parametrize("decoding", [GenerationConfig(repetition_penalty=2.0), DRAWN, GenerationConfig(num_beams=3)])
def test_log_probabilities_are_the_models_own(decoding: GenerationConfig, untrained: Any) -> None:
    model = untrained("gpt2", 1)
    vocab = model.tokenizer.vocab
    for prompt, found in zip(
        PROMPTS, generate_sequences(model, PROMPTS, replace(decoding, max_new_tokens=8)), strict=True
    ):
        row = [*prompt, *found.tokens, *([vocab.eos] if found.finished else [])]
        logprob = model(torch.tensor([row])).logits[0].log_softmax(-1).detach()
        wanted = [float(logprob[i - 1, row[i]]) for i in range(len(prompt), len(row))]
        assert found.logprobs == pytest.approx(wanted, abs=1e-4)
        if decoding.num_beams == 1:
            assert found.score == pytest.approx(sum(wanted), abs=1e-4)


def test_an_end_and_none(untrained: Any) -> None:
    model = untrained("gpt2")
    (whole,) = generate_sequences(without_end(model), [PROMPTS[0]], GenerationConfig(max_new_tokens=5))
    assert not whole.finished
    assert len(whole.tokens) == len(whole.logprobs) == 5
    (ended,) = generate_sequences(ending_with(model, whole.tokens[2]), [PROMPTS[0]], GenerationConfig(max_new_tokens=5))
    assert ended == GeneratedSequence(
        whole.tokens[:2], True, pytest.approx(whole.logprobs[:3]), pytest.approx(ended.score)
    )


def test_padding_is_on_the_right() -> None:
    tokens, doc = pad_right([[5, 6, 7], [8]], pad_id=0)
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
    with pytest.raises(UserError, match="Prompt 2 has no tokens"):
        generate_ids(model, [PROMPTS[0], []])
    with pytest.raises(UserError, match="num_beams is 10,000; it must be at most"):
        generate_ids(model, PROMPTS, generation_config=GenerationConfig(num_beams=10_000))
    classes = make_model(with_classification_head(model.config, ("a", "b")))
    classes.tokenizer = model.tokenizer
    with pytest.raises(UserError, match="has a task head"):
        generate_ids(classes, PROMPTS)
    model.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        generate_ids(model, PROMPTS)
