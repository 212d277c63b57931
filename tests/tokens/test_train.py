"""Tokenizers that are trained: all kinds, the same in every run and in transformers, samples, and re-training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from firth.core.errors import UserError
from firth.tokens import train
from firth.tokens.builders import TOKENIZER_KINDS
from firth.tokens.tokenizer import Tokenizer, load_tokenizer
from firth.tokens.train import retrain_tokenizer, sample_passages, split_passages, train_tokenizer

TEXTS = [
    "The heron stands in the river, and the heron waits.\nNobody asks why it's waiting; the river doesn't care.",
    "Ọjọ́ dára. Ẹ kú àárọ̀! Báwo ni? Ọjọ́ dára, ẹ kú iṣẹ́.",
    "Река течёт, а цапля ждёт. Цапля не спешит: река течёт.",
    "鹭在河里等。河水不在乎。鹭在等。",
    "مالك الحزين ينتظر في النهر، والنهر لا يهتم.",
    "नदी बहती है और बगुला प्रतीक्षा करता है।",
    "def river(heron):\n\treturn heron + 1  # two  spaces 12345",
] * 3
OTHER = [
    "A wolf walks through the wood, and the wood is dark. The wolf walks on.",
    "Wood and wolves, wolves and wood.",
] * 4
MODEL_TYPES = {
    "wordpiece": ["bert", "electra", "distilbert"],
    "bpe": ["openai-gpt", "xlm"],
    "byte-bpe": ["gpt2", "roberta", "bart", "llama"],
    "byte-bpe-llama3": ["llama"],
    "unigram": ["t5", "albert", "xlnet", "xlm-roberta"],
    "unigram-bytes": ["t5"],
    "word": ["xlm"],
    "char": ["xlm"],
    "elmo-characters": ["xlm"],
}
SCRIPTS = "aeE' \n\t.,1290éẹ́ọцжδ中文鹭كة한국नदी🦩👩\u200d🔬▁\ufdd0\ufdd1\ufdd2\x00Ġ</w>##<s>[MASK]<0x41>"
ANY_TEXT = st.text(st.one_of(st.sampled_from(SCRIPTS), st.characters(exclude_categories=["Cs"])), max_size=40)


@cache
def learn(name: str) -> Tokenizer:
    kind = name.removesuffix("-llama3").removesuffix("-bytes")
    pattern = "llama3" if name.endswith("-llama3") else "gpt2"
    return train_tokenizer(TEXTS, kind, 700, pattern=pattern, byte_fallback=name.endswith("-bytes"))


@cache
def in_transformers(name: str, model_type: str) -> transformers.PreTrainedTokenizerBase:
    with TemporaryDirectory() as folder:
        learn(name).save(Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": model_type}))
        return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", sorted(MODEL_TYPES))
@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT, other=ANY_TEXT.filter(bool))  # transformers takes an empty second text for none
def test_any_text_has_the_same_ids_in_transformers(name: str, text: str, other: str) -> None:
    ours = learn(name)
    for model_type in MODEL_TYPES[name]:
        theirs = in_transformers(name, model_type)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text, parse_special=True)
        assert theirs(text)["input_ids"] == ours.backend.encode(text).ids
        assert theirs(text, other)["input_ids"] == ours.backend.encode(text, other).ids
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize("name", ["byte-bpe", "byte-bpe-llama3", "unigram-bytes"])
@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_no_character_is_lost(name: str, text: str) -> None:
    tokenizer = learn(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_the_plain_kinds() -> None:
    for kind in ("bpe", "word", "char", "elmo-characters"):
        vocab = learn(kind).vocab
        assert (vocab.pad, vocab.unk, vocab.bos, vocab.eos, vocab.cls, vocab.sep, vocab.mask) == (0, 1, 2, 3, 2, 3, 4)


def test_bpe_marks_the_end_of_words() -> None:
    tokenizer = train_tokenizer(["low lower lowest newest newest"] * 9, "bpe", 60)
    tokens = tokenizer.encode_with_offsets(["lowest low"])[0].tokens
    assert tokens[-1] == "low</w>"
    assert "".join(tokens) == "lowest</w>low</w>"
    assert tokenizer.decode(tokenizer.encode("newest low")) == "newest low"


def test_llama_cuts_numbers_in_threes() -> None:
    assert learn("byte-bpe-llama3").pre_tokenize("in 12345") == ["in", "Ġ", "123", "45"]
    assert learn("byte-bpe").pre_tokenize("in 12345") == ["in", "Ġ12345"]


def test_words_of_the_word_kinds() -> None:
    tokenizer = learn("word")
    words = tokenizer.pre_tokenize("The heron's wait: 3.5, ẹ̀ kú!")
    assert words == ["The", "heron's", "wait", ":", "3", ".", "5", ",", "ẹ̀", "kú", "!"]
    assert tokenizer.decode(tokenizer.encode("The heron waits.")) == "The heron waits."
    assert tokenizer.encode("heron zebra")[1] == tokenizer.vocab.unk


def test_the_most_frequent_words_stay(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(["b b b a a c c d"], "word", 8)
    assert [tokenizer.backend.id_to_token(i) for i in range(5, 8)] == ["b", "a", "c"]
    assert (
        "12.5% of the words of the text are not in the vocabulary; it has 4 different words" in capsys.readouterr().err
    )


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), ANY_TEXT))
def test_a_char_tokenizer_has_one_token_per_character(text: str) -> None:
    tokenizer = learn("char")
    ids, known = tokenizer.encode(text), set("".join(TEXTS))
    tokens = [tokenizer.backend.id_to_token(i) for i in ids]
    assert tokens == [c if c in known else "<unk>" for c in text]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(tokens)


def test_characters_know_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(["to be, or  not\n"] * 3, "char", 100)
    starts = tokenizer.word_starts(*tokenizer.encode_with_offsets(["to be, or  not\n"]))
    assert "".join("|" * start + c for start, c in zip(starts.tolist(), "to be, or  not\n", strict=True)) == (
        "|to| be|,| or| | not|\n"
    )
    assert retrain_tokenizer(tokenizer, ["xyz x"], 100).vocab.size == 5 + 4
    small = train_tokenizer(["aaab"], "char", 6)
    assert small.encode("ab") == [5, small.vocab.unk]
    assert "25.0% of the characters of the text are not in the vocabulary; it has 2 of them" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["char", "elmo-characters", "word"])
def test_a_kind_is_known_again(kind: str, tmp_path: Path) -> None:
    learn(kind).save(tmp_path)
    assert load_tokenizer(tmp_path).kind == kind


@pytest.mark.parametrize("kind", sorted(TOKENIZER_KINDS))
def test_another_process_learns_the_same(kind: str) -> None:
    code = f"from tests.tokens.test_train import learn; print(learn({kind!r}).fingerprint)"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == learn(kind).fingerprint, done.stderr


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_long_texts_are_learned_like_short_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "SHORT_TEXT_CHARS", 100)
    assert train_tokenizer(TEXTS, kind, 700).fingerprint == learn(kind).fingerprint


# --- samples --------------------------------------------------------------------------------------------------------


def test_a_sample_is_random_bounded_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{i:04}" for i in range(1000)]
    one, same, other = (list(sample_passages(texts, 400, seed)) for seed in (1, 1, 2))
    assert one == same == sorted(one)
    assert len(one) == 100
    assert one != other
    assert "0.0 of 0.0 MB of text (10.0%)" in capsys.readouterr().err
    assert list(sample_passages(texts, 4000, 1)) == texts
    assert capsys.readouterr().err == ""


def test_long_texts_are_sampled_in_parts() -> None:
    text = "a line of text\n" * 20_000
    parts = list(split_passages([text]))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= train.PASSAGE_CHARS
    assert all(part.endswith("\n") for part in parts)


def test_training_within_little_memory_takes_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"the heron number {i} waits" for i in range(2000)]
    small = train_tokenizer(texts, "byte-bpe", 300, max_memory=200_000)
    assert "Training on a sample" in capsys.readouterr().err
    assert train_tokenizer(texts, "byte-bpe", 300, max_memory=200_000).fingerprint == small.fingerprint
    with pytest.raises(UserError, match="too small for any text"):
        train_tokenizer(texts, "byte-bpe", 300, max_memory=10)


# --- one like another -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODEL_TYPES))
def test_retraining_is_training_on_the_new_text(name: str) -> None:
    kind = name.removesuffix("-llama3").removesuffix("-bytes")
    pattern = "llama3" if name.endswith("-llama3") else "gpt2"
    new = retrain_tokenizer(learn(name), OTHER, 500)
    fresh = train_tokenizer(OTHER, kind, 500, pattern=pattern, byte_fallback=name.endswith("-bytes"))
    assert new.fingerprint == fresh.fingerprint
    assert (new.kind, new.vocab) == (fresh.kind, fresh.vocab)


def bert(lower: bool) -> transformers.PreTrainedTokenizerBase:
    names = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "river", "##s", "the"]
    return transformers.BertTokenizer(vocab={name: i for i, name in enumerate(names)}, do_lower_case=lower)


def roberta() -> transformers.PreTrainedTokenizerBase:
    names = ["<s>", "<pad>", "</s>", "<unk>", *"abc", "<mask>"]
    return transformers.RobertaTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])


def t5() -> transformers.PreTrainedTokenizerBase:
    return transformers.T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("a", -4.0)])


def xlm_roberta() -> transformers.PreTrainedTokenizerBase:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("a", -4.0), ("<mask>", 0.0)]
    return transformers.XLMRobertaTokenizer(vocab=pieces)


@pytest.mark.parametrize("make", [lambda: bert(True), lambda: bert(False), roberta, t5, xlm_roberta])
def test_retraining_a_published_tokenizer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    theirs = make()
    theirs.save_pretrained(tmp_path / "old")
    old = load_tokenizer(tmp_path / "old")
    new = retrain_tokenizer(old, OTHER, 450)
    assert (new.kind, new.special_tokens) == (old.kind, old.special_tokens)
    assert len(new.vocab.sentinel_ids) == len(old.vocab.sentinel_ids)
    state, before = json.loads(new.backend.to_str()), json.loads(old.backend.to_str())
    assert (state["normalizer"], state["pre_tokenizer"]) == (before["normalizer"], before["pre_tokenizer"])
    assert "wolf" in {new.decode([i]).strip() for i in range(new.vocab.size)}
    before_pair, after_pair = old.backend.encode("", "").tokens, new.backend.encode("", "").tokens
    assert before_pair == after_pair, "special tokens are put around a pair as before"
    assert set(new.backend.encode("", "").ids) <= set(new.vocab.special_ids)
    new.save(tmp_path / "new")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    for text in ("The WOLF walks.", "wood <mask> [MASK] wölf"):
        assert again(text)["input_ids"] == new.backend.encode(text).ids
    assert load_tokenizer(tmp_path / "new").vocab == new.vocab


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_choices_that_a_kind_does_not_have() -> None:
    with pytest.raises(UserError, match="Did you mean 'llama3'"):
        train_tokenizer(TEXTS, "byte-bpe", 420, pattern="llama-3")
    with pytest.raises(UserError, match="--pattern is for --kind byte-bpe"):
        train_tokenizer(TEXTS, "unigram", 420, pattern="llama3")
    with pytest.raises(UserError, match="--byte-fallback is for --kind unigram"):
        train_tokenizer(TEXTS, "bpe", 420, byte_fallback=True)


@pytest.mark.parametrize("kind", sorted(TOKENIZER_KINDS))
def test_a_vocabulary_that_is_too_small(kind: str) -> None:
    with pytest.raises(UserError, match="A vocabulary of 5 tokens is too small"):
        train_tokenizer(TEXTS, kind, 5)


@pytest.mark.parametrize("kind", ["bpe", "byte-bpe", "wordpiece", "unigram"])
def test_a_word_without_end_is_learned_from_in_pieces(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a damaged file: a merge goes through all of a word, and 300,000 letters would take hours."""
    tokenizer = train_tokenizer(["the cat sat on the mat " * 50, "abcdefghij" * 30_000], kind, 300)
    assert "1 word of more than 1,000 characters" in capsys.readouterr().err
    assert tokenizer.decode(tokenizer.encode("the cat")).strip() == "the cat"
