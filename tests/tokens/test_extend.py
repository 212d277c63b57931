"""New tokens: words without one keep their ids, and each new token is the one that saves most."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from firth.core.errors import UserError
from firth.text import Document
from firth.tokens import load_tokenizer, train_tokenizer
from firth.tokens.encode import DocumentEncoder, TokenizedDocuments
from firth.tokens.extend import (
    NewToken,
    can_look_up_words,
    count_domain_words,
    extend_tokenizer,
    old_piece_ids,
    propose_tokens,
)
from firth.tokens.token_bytes import token_bytes
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.word_cache import find_split_rules

GENERAL = [
    "The cat sat on the mat, and the water was cold. It was a well-known (old) cat, wasn't it? 1894–1988.\nNew line.",
    "Kind people walk to the market, where nobody watches them. Über Ærø, naïve café — 'quoted'. a\u0301e\u0301",
]
# Swahili, Greek, Russian, Hindi, Amharic, Arabic, Chinese, Yoruba; words with shared beginnings, capitals, punctuation.
DOMAIN = [
    "Kitabu kitabu vitabu kitabuni kitanda. Watoto wanasoma vitabu katika maktaba; watoto wanacheza uwanjani.",
    "Η γλώσσα και οι γλώσσες: η γλώσσα μου. Язык и языки: русский язык. हिन्दी भाषा और हिन्दी शब्द।",
    "ቋንቋ እና ቋንቋዎች። اللغة العربية واللغة. 语言和文字。 Ọmọ náà ń ka ìwé, ọmọ mi. covid-19 covid-19's e-mail@covid",
]
VARIANTS: dict[str, dict[str, Any]] = {
    "wordpiece": {"kind": "wordpiece"},
    "uncased": {"kind": "wordpiece", "lowercase": True},
    "bpe": {"kind": "bpe", "lowercase": True},
    "gpt2": {"kind": "byte-bpe"},
    "llama3": {"kind": "byte-bpe", "pattern": "llama3"},
    "unigram": {"kind": "unigram"},
    "fallback": {"kind": "unigram", "byte_fallback": True, "lowercase": True},
}


@cache
def old_tokenizer(name: str) -> Tokenizer:
    if name == "llama2":
        return metaspace_bpe()
    if name == "merges only":
        return unreachable_token_tokenizer()
    return train_tokenizer(GENERAL * 3, vocab_size=480, **VARIANTS[name])


def metaspace_bpe() -> Tokenizer:
    """A tokenizer like Llama 2's: no pre-tokenizer, merges over the whole text, bytes for unknown characters."""
    state = json.loads(old_tokenizer("bpe").backend.to_str())["model"]
    spelled = [(a.replace("</w>", ""), b.replace("</w>", "")) for a, b in state["merges"]]
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    kept = [(a, b) for a, b in dict.fromkeys(spelled) if all(c in alphabet for c in a + b)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *(a + b for a, b in kept)]))}
    kept = [(a, b) for a, b in kept if a in vocab and b in vocab]
    backend = Backend(models.BPE(vocab, kept, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"unk": "<unk>", "bos": "<s>", "eos": "</s>"})


def unreachable_token_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with a token that no merge makes: a lookup of whole words would change its word."""
    state = json.loads(old_tokenizer("gpt2").backend.to_str())
    state["model"]["vocab"]["Ġnobodys"] = old_tokenizer("gpt2").vocab.size
    return Tokenizer(Backend.from_str(json.dumps(state)), old_tokenizer("gpt2").special_tokens)


MERGED = ["bpe", "gpt2", "llama3", "llama2", "merges only"]
ALL = [*VARIANTS, "llama2", "merges only"]


@cache
def new_tokens(name: str) -> tuple[NewToken, ...]:
    return tuple(propose_tokens(old_tokenizer(name), DOMAIN * 4, max_new=100, min_count=4))


@cache
def new_tokenizer(name: str) -> Tokenizer:
    return extend_tokenizer(old_tokenizer(name), new_tokens(name))


@cache
def pieces_of(name: str) -> dict[int, tuple[int, ...]]:
    return old_piece_ids(old_tokenizer(name), new_tokenizer(name))


def split_words(tokenizer: Tokenizer, text: str) -> list[str]:
    if tokenizer.backend.pre_tokenizer is not None:
        return tokenizer.pre_tokenize(text)
    return [tokenizer.backend.normalizer.normalize_str(text)]


def contains(tokenizer: Tokenizer, word: str, token: str) -> bool:
    """Whether a word contains a new token: at its beginning, for a WordPiece token without ##."""
    if tokenizer.kind == "wordpiece":
        return token.removeprefix("##") in word[1:] if token.startswith("##") else word.startswith(token)
    return token in word + "</w>" * (old_tokenizer("bpe").kind == tokenizer.kind == "bpe" and "▁" not in word)


def ids_of(tokenizer: Tokenizer, word: str) -> list[int]:
    return [piece.id for piece in tokenizer.backend.model.tokenize(word)]


FRAGMENTS = [new for text in DOMAIN + GENERAL for word in text.split() for new in {word, word[:2], word[2:], word[:4]}]
FRAGMENTS += [
    " ",
    " ",
    "  ",
    "\n",
    "▁",
    "Ġ",
    "##",
    "</w>",
    "<mask>",
    "[MASK]",
    "<extra_id_0>",
    "nobodys",
    "\u0301",
    "k",
]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=12).map("".join)


def check_promise(name: str, text: str) -> None:
    """Words without a new token keep their ids, BPE tokens stand for their old pieces, and decoding is the same."""
    old, new = old_tokenizer(name), new_tokenizer(name)
    words = split_words(old, text)
    has_new = [any(contains(old, word, token.token) for token in new_tokens(name)) for word in words]
    for word, changed in zip(words, has_new, strict=True):
        before, after = ids_of(old, word), ids_of(new, word)
        if not changed:
            assert after == before, word
        if name in MERGED and len(after) > 1 and old.vocab.unk not in before:
            assert [part for i in after for part in pieces_of(name).get(i, (i,))] == before, word
    ids = old.encode(text)
    if not any(has_new):
        assert new.encode(text) == ids
        assert new.encode(text, parse_special=True) == old.encode(text, parse_special=True)
    if old.vocab.unk not in ids:
        assert new.decode(new.encode(text)) == old.decode(ids)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20, deadline=None)
@example("Soma kitabu cha watoto. nobodys <extra_id_0> ŋ")
@given(text=TEXTS)
def test_words_without_a_new_token_keep_their_ids(name: str, text: str) -> None:
    check_promise(name, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=2000, deadline=None)
@given(text=TEXTS)
def test_many_words_without_a_new_token_keep_their_ids(name: str, text: str) -> None:
    check_promise(name, text)


@pytest.mark.parametrize("name", ALL)
def test_new_words_are_tokens_and_no_id_has_moved(name: str) -> None:
    old, new, found = old_tokenizer(name), new_tokenizer(name), new_tokens(name)
    assert len(found) > 10
    before, after = (t.backend.get_vocab(with_added_tokens=True) for t in (old, new))
    assert {token: after[token] for token in before} == before
    assert [after[token.token] for token in found] == list(range(old.vocab.size, new.vocab.size))
    assert new.backend.get_vocab_size() == new.vocab.size or name == "llama2"
    assert new.vocab.special_ids == old.vocab.special_ids
    assert new.vocab.sentinel_ids == old.vocab.sentinel_ids
    if name not in ("unigram", "fallback"):
        assert "watoto" in [token.text.casefold() for token in found]
    for token in found:
        if token.form == "word":
            word = token.token.removesuffix("</w>")
            assert ids_of(new, word) == [after[token.token]], token


@pytest.mark.parametrize("name", ALL)
def test_savings_are_those_of_the_text(name: str) -> None:
    old, new = old_tokenizer(name), new_tokenizer(name)
    known = [text for text in DOMAIN * 4 if old.vocab.unk not in old.encode(text)]
    if len(known) == len(DOMAIN * 4):
        saved = sum(len(old.encode(text)) - len(new.encode(text)) for text in known)
        assert sum(token.saved_tokens for token in new_tokens(name)) == pytest.approx(saved, abs=len(new_tokens(name)))
    assert all(
        token.saved_tokens > 0 or token.unknown or token.merge or token.form == "character"
        for token in new_tokens(name)
    )


def brute_force_savings(old: Tokenizer, words: dict[str, int], tokens: Sequence[str]) -> int:
    made = extend_tokenizer(old, [NewToken(t, t, "word", 0, 0, ()) for t in tokens])
    return sum(n * (len(ids_of(old, word)) - len(ids_of(made, word))) for word, n in words.items())


@pytest.mark.parametrize("name", ["wordpiece", "unigram"])
def test_each_token_saves_most_after_those_before_it(name: str) -> None:
    """The counts of the search against a tokenizer that is built for each candidate."""
    old = old_tokenizer(name)
    text = "walkitabu walkitabuni walkitanda walkitabu watota watotaka watotakao walk " * 3
    words = count_domain_words(old, [text])
    found = [token.token for token in propose_tokens(old, [text], max_new=3, min_count=1)]
    vocab = old.backend.get_vocab()
    prefixes = {word[:i] for word in words for i in range(2, len(word) + 1)} - set(vocab)
    candidates = sorted(p for p in prefixes if name == "wordpiece" or p.startswith("▁"))
    for i, token in enumerate(found):
        best = max(brute_force_savings(old, words, [*found[:i], c]) for c in candidates if c not in found[:i])
        assert brute_force_savings(old, words, [*found[:i], token]) == best > 0


def test_overlapping_words_are_counted_again() -> None:
    """Alone, both "kitabu" and "kitab" would save much; after "kitabu", "kitab" saves nothing."""
    old = old_tokenizer("wordpiece")
    found = propose_tokens(old, ["kitabu kitabu kitabu kitabu"], max_new=10, min_count=2)
    assert [(token.token, token.form, token.count) for token in found] == [("kitabu", "word", 4)]


def test_a_word_start_pays_where_words_share_it() -> None:
    text = " ".join(f"kitab{end}" for end in ["o", "a", "e", "i", "u", "y"]) + " "
    found = propose_tokens(old_tokenizer("wordpiece"), [text * 2], max_new=1, min_count=4)
    assert [(token.token, token.form, token.count) for token in found] == [("kitab", "word start", 12)]


def test_characters_that_were_unknown() -> None:
    old = old_tokenizer("wordpiece")
    assert old.vocab.unk in old.encode("ọmọ")
    found = propose_tokens(old, ["ọmọ ọba kọ ọmọ"] * 5, max_new=4, min_count=5)
    assert [token.token for token in found if token.form == "character"] == ["##ọ", "ọ"]
    new = extend_tokenizer(old, found)
    assert new.vocab.unk not in new.encode("ọmọ ọba kọ")
    assert new.encode("the cat") == old.encode("the cat")


@pytest.mark.parametrize("name", ALL)
def test_transformers_reads_the_same_ids(name: str, tmp_path: Path) -> None:
    new = new_tokenizer(name)
    new.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert again.fingerprint == new.fingerprint
    for text in [*DOMAIN, *GENERAL, "Soma kitabu hiki, watoto! kitabuni WATOTO"]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == new.encode(text, parse_special=True) == again.encode(text, parse_special=True)
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == new.decode(ids, skip_special_tokens=False)


def test_a_class_that_is_named_after_a_model(tmp_path: Path) -> None:
    """Such a class builds the tokenizer anew from vocabulary and merges, and would not look up whole words."""
    old = old_tokenizer("gpt2")
    old = Tokenizer(old.backend, old.special_tokens, old.config | {"tokenizer_class": "GPT2Tokenizer"})
    new = extend_tokenizer(old, new_tokens("gpt2"))
    new.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(DOMAIN[0], add_special_tokens=False) == new.encode(DOMAIN[0])


def test_whole_words_are_looked_up_only_where_no_old_word_changes() -> None:
    assert can_look_up_words(old_tokenizer("gpt2"))
    assert can_look_up_words(new_tokenizer("gpt2"))
    assert not any(can_look_up_words(old_tokenizer(name)) for name in ("merges only", "bpe", "llama2", "unigram"))
    assert all(token.merge for token in new_tokens("merges only"))
    assert any(token.merge is None for token in new_tokens("gpt2"))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_word_cache_and_word_starts(name: str) -> None:
    """The same tokens with and without the cache, and as many words as before."""
    old, new = old_tokenizer(name), new_tokenizer(name)
    assert find_split_rules(new) == find_split_rules(old) is not None
    documents = [Document(text, "here") for text in [*DOMAIN, *GENERAL, "kitabu", " watoto kitabuni  watoto\nkitabu "]]
    encoders = [DocumentEncoder(tokenizer, 0.0, "en") for tokenizer in (new, new, old)]
    vars(encoders[1])["_word_cache"] = None
    cached, plain, before = (encoder(documents)[0] for encoder in encoders)
    for field, mine, theirs in zip(TokenizedDocuments._fields, cached, plain, strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=field)
    assert cached.words.sum() == before.words.sum()
    assert (cached.sentences.sum(), cached.text_bytes.sum()) == (before.sentences.sum(), before.text_bytes.sum())


@pytest.mark.parametrize("name", ALL)
def test_bytes_of_new_tokens_are_those_of_their_pieces(name: str) -> None:
    old, new = old_tokenizer(name), new_tokenizer(name)
    before, after = token_bytes(old), token_bytes(new)
    assert after.pieces[: old.vocab.size] == before.pieces
    for i, pieces in old_piece_ids(old, new).items():
        if old.vocab.unk not in old.encode(new_tokens(name)[i - old.vocab.size].text):
            assert after.pieces[i] == b"".join(before.pieces[part] for part in pieces)
            if before.starts_word is not None and after.starts_word is not None:
                assert after.starts_word[i] == before.starts_word[pieces[0]]
            if before.ends_word is not None and after.ends_word is not None:
                assert after.ends_word[i] == before.ends_word[pieces[-1]]


def test_special_tokens_after_the_vocabulary_keep_their_ids() -> None:
    old = old_tokenizer("wordpiece").with_special_tokens(["<|user|>", "<|end|>"])
    new = extend_tokenizer(old, propose_tokens(old, DOMAIN * 4, 20, 4))
    text = "<|user|>the cat<|end|>"
    assert new.encode(text, parse_special=True) == old.encode(text, parse_special=True)
    assert new.encode(text) == old.encode(text)
    assert old.vocab.size + 15 < new.vocab.size <= old.vocab.size + 20


def test_a_tokenizer_can_be_extended_twice() -> None:
    once = new_tokenizer("gpt2")
    twice = extend_tokenizer(once, propose_tokens(once, ["zamani sana zamani"] * 4, 5, 4))
    assert len(twice.encode(" zamani")) == 1
    assert twice.encode(DOMAIN[0]) == once.encode(DOMAIN[0])


@pytest.mark.parametrize(
    ("kind", "remedy"), [("word", "--add-words"), ("char", "single characters"), ("elmo-characters", "by its char")]
)
def test_kinds_that_cannot_be_extended(kind: str, remedy: str) -> None:
    tokenizer = train_tokenizer(GENERAL, kind, 60)
    with pytest.raises(UserError, match=f"kind {kind} cannot be extended.*{remedy}"):
        propose_tokens(tokenizer, DOMAIN)


@pytest.mark.parametrize("texts", [[], [" \n "]])
def test_no_text(texts: Iterable[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        propose_tokens(old_tokenizer("wordpiece"), texts)


def test_nothing_is_worth_a_token() -> None:
    assert propose_tokens(old_tokenizer("wordpiece"), GENERAL, min_count=1000) == []


def test_a_token_that_exists() -> None:
    with pytest.raises(UserError, match="in the vocabulary already"):
        extend_tokenizer(old_tokenizer("wordpiece"), [NewToken("the", "the", "word", 1, 1, ())])


def test_an_added_word_that_the_model_would_find() -> None:
    """A special token that looks like a word would become one: text that spells it would be read as the token."""
    backend = Backend.from_str(old_tokenizer("wordpiece").backend.to_str())
    backend.add_special_tokens([AddedToken("SPEAKER", special=True)])
    old = Tokenizer(backend, old_tokenizer("wordpiece").special_tokens)
    with pytest.raises(UserError, match=r"SPEAKER.*another way"):
        extend_tokenizer(old, new_tokens("wordpiece"))
