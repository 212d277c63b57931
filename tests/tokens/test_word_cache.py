"""Cached words give the tokens and boundaries of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from firth.text import Document
from firth.tokens import train_tokenizer
from firth.tokens.encode import DocumentEncoder, TokenizedDocuments
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.word_cache import (
    BERT_SPLIT_RULES,
    CHAR_SPLIT_RULES,
    GPT2_SPLIT_RULES,
    LLAMA3_SPLIT_RULES,
    SEGMENT_SEPARATOR,
    UNIGRAM_SPLIT_RULES,
    WORD_LEVEL_SPLIT_RULES,
    SplitRules,
    WordCache,
    find_split_rules,
)

TEXTS = [
    "The cat sat on the mat. It was a well-known (old) cat, wasn't it? 1894–1988.\nNew line here.",
    "def f(x):\n    return x  # twice\n\n\tand a tab\t. Über Ærø, naïve café — 'quoted' \"so\"",
    "<mask> [MASK] </s> are written here. 你好。世界! Άλφα βήτα ΣΑΣ. a\u0301e\u0301",
]
MADE: dict[str, dict[str, Any]] = {
    "wordpiece": {"kind": "wordpiece"},
    "uncased": {"kind": "wordpiece", "lowercase": True},
    "bpe": {"kind": "bpe", "lowercase": True},
    "gpt2": {"kind": "byte-bpe"},
    "gpt2 uncased": {"kind": "byte-bpe", "lowercase": True},
    "llama3": {"kind": "byte-bpe", "pattern": "llama3"},
    "unigram": {"kind": "unigram"},
    "fallback": {"kind": "unigram", "byte_fallback": True, "lowercase": True},
    "word": {"kind": "word"},
    "char": {"kind": "char"},
    "char uncased": {"kind": "char", "lowercase": True},
    "elmo": {"kind": "elmo-characters", "lowercase": True},
}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return train_tokenizer(TEXTS * 3, vocab_size=480, **MADE[name])


def both_ways(name: str, texts: Sequence[str]) -> tuple[Any, Any]:
    """What the words that are known give, and what each text gives as a whole."""
    quick, whole = (DocumentEncoder(tokenizer_of(name), 0.0, "en") for _ in range(2))
    vars(whole)["_word_cache"] = None
    documents = [Document(text, "here") for text in texts]
    return quick(documents)[0], whole(documents)[0]


def assert_same(name: str, texts: Sequence[str]) -> None:
    for field, mine, plain in zip(TokenizedDocuments._fields, *both_ways(name, texts), strict=True):
        assert mine.dtype == plain.dtype, field
        np.testing.assert_array_equal(mine, plain, err_msg=f"{field} of {texts!r}")


@pytest.mark.parametrize("name", MADE)
def test_the_same_tokens_words_and_sentences(name: str) -> None:
    assert_same(name, [*TEXTS, "", " ", " a", "a ", "a  b", "a   b", "a\n \nb", "a \n b", "\na b", "  a. b", *TEXTS])


PIECES = [" ", "  ", "\n", "\t", "\xa0", "\u2003", "\u2028", "\x1c", "\u200b", "\u0301", "\r\n", "\x00"]
PIECES += [". ", "! ", ".\n", "a", "cat", "The", "'s", "'", "’t", ",", "-", "(", '"', "…", "1", "1894", "é", "İ", "Σ"]
PIECES += [
    "你",
    "。",
    "ﷺ",
    "¨",
    "ﬁ",
    "😀",
    "▁",
    "##",
    "<mask>",
    "[MASK]",
    "</w>",
    "\ufdd0",
    "\ufdd2",
    SEGMENT_SEPARATOR,
    "\u0600",
]


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("a. \nb")
@example("The cat. <mask> cat.\nThe (cat).The")
def test_on_any_text(name: str, text: str) -> None:
    assert_same(name, [text])


def test_habits() -> None:
    wanted = [
        BERT_SPLIT_RULES,
        BERT_SPLIT_RULES,
        BERT_SPLIT_RULES,
        GPT2_SPLIT_RULES,
        GPT2_SPLIT_RULES,
        LLAMA3_SPLIT_RULES,
        UNIGRAM_SPLIT_RULES,
        UNIGRAM_SPLIT_RULES,
        WORD_LEVEL_SPLIT_RULES,
        CHAR_SPLIT_RULES,
        CHAR_SPLIT_RULES,
        WORD_LEVEL_SPLIT_RULES,
    ]
    assert [find_split_rules(tokenizer_of(name)) for name in MADE] == wanted


def changed(name: str, **parts: Any) -> SplitRules | None:
    """The split rules of a tokenizer after some of its components were replaced."""
    made = tokenizer_of(name)
    backend = Backend.from_str(made.backend.to_str())
    for part, value in parts.items():
        setattr(backend, part, value)
    return find_split_rules(Tokenizer(backend, made.special_tokens, made.config))


def test_others_have_none() -> None:
    """A tokenizer of another build may treat spaces in any manner."""
    assert changed("gpt2", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)) is None
    assert changed("gpt2", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)) is None
    assert changed("gpt2", normalizer=normalizers.NFKC()) is None
    assert changed("unigram", normalizer=normalizers.Replace(" ", "▁")) is None
    assert changed("unigram", pre_tokenizer=pre_tokenizers.Metaspace(split=False)) is None
    assert changed("wordpiece", pre_tokenizer=pre_tokenizers.CharDelimiterSplit("|")) is None
    vocab = tokenizer_of("bpe").backend.get_vocab()
    assert changed("bpe", model=models.BPE(vocab, [], dropout=0.1, unk_token="<unk>")) is None
    assert changed("bpe", model=models.BPE(vocab | {"far": 9999}, [], unk_token="<unk>")) is None
    assert changed("bpe", model=models.BPE(vocab, [], unk_token="<unk>")) == BERT_SPLIT_RULES, "or this shows nothing"
    assert changed("gpt2", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)) == GPT2_SPLIT_RULES, (
        "or it shows nothing"
    )


def test_words_of_the_user_and_texts_read_backward_have_none() -> None:
    made = tokenizer_of("wordpiece")
    backend = Backend.from_str(made.backend.to_str())
    backend.add_tokens([AddedToken("New York", normalized=True)])
    assert find_split_rules(Tokenizer(backend, made.special_tokens, made.config)) is None
    assert find_split_rules(made.to_reversed()) is None


def test_a_word_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = WordCache(tokenizer_of("gpt2"), GPT2_SPLIT_RULES)
    tokenized: list[str] = []
    plain = known.separator_tokenizer.encode_with_offsets

    def encodings(texts: Sequence[str]) -> Any:
        tokenized.extend(segment for text in texts for segment in text.split(SEGMENT_SEPARATOR) if segment)
        return plain(texts)

    monkeypatch.setattr(known.separator_tokenizer, "encode_with_offsets", encodings)
    for text in ("A cat saw a cat", "The cat saw " + 50 * "x"):
        pieces = known.segment_text(text, [])
        assert pieces is not None
        known([pieces])
    assert sorted(tokenized) == sorted([" cat", " saw", " a", " " + 50 * "x"])
    assert set(known.entries) == {"cat", "saw", "a"}, "what is long is not kept"


def test_evicted_words_are_encoded_again() -> None:
    encoder = DocumentEncoder(tokenizer_of("wordpiece"), 0.0, "en", cache_bytes=1000)
    plain = both_ways("wordpiece", TEXTS)[1]
    for _ in range(4):
        found = encoder([Document(text, "here") for text in TEXTS])[0]
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        assert encoder._word_cache is not None
        assert encoder._word_cache.used_bytes < 40_000
