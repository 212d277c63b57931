"""How a tokenizer splits a text, on splits that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from firth.text import Document
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.builders import build_wordpiece
from firth.tokens.checkup import SampledDocument
from firth.tokens.fertility import (
    SampleSplit,
    TokenizerFit,
    measure_fit,
    min_frequent_count,
    piece_strings,
    split_sample,
    train_candidate_tokenizers,
    word_token_ranges,
)


def by_hand(*pieces: str, lowercase: bool = False) -> Tokenizer:
    """A WordPiece tokenizer of these pieces."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    backend = build_wordpiece({token: i for i, token in enumerate(tokens)}, lowercase, strip_accents=False)
    backend.add_special_tokens(tokens[:5])
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return Tokenizer(backend, roles)


def parts(*texts: str) -> SampleSplit:
    documents = [Document(text, str(i)) for i, text in enumerate(texts)]
    return SampleSplit(documents, documents, [SampledDocument(d, len(d.text)) for d in documents], is_disjoint=False)


def fit(tokenizer: Tokenizer, *texts: str, scale: float = 1.0) -> TokenizerFit:
    return measure_fit(tokenizer, parts(*texts), scale, "it")


def test_pieces_per_word() -> None:
    found = fit(by_hand("cat", "##s", "."), "cat cats.", "cat")
    assert (found.words, found.tokens) == (3, 5)  # cat, cat ##s, the full stop, cat
    assert found.pieces_per_word == 4 / 3
    assert found.words_split == 1 / 3
    assert found.characters_per_token == 12 / 5
    assert found.bytes_per_token == 12 / 5
    assert found.unknown == 0


def test_worst_words_have_the_most_tokens() -> None:
    text = "abc abc abc ab ab ab ab abcd once"
    found = fit(by_hand("a", "##b", "##c", "##d", "once"), text)
    assert [(w["word"], w["count"], w["pieces"], w["split"]) for w in found.worst] == [("abc", 3, 3.0, "a·b·c")]
    assert found.saved == (3 * 2 + 4 * 1 + 3) / found.tokens


def test_unknown_and_lost() -> None:
    found = fit(by_hand("a", "b"), "a b é a é")
    assert found.unknown == 2 / 5
    assert found.unknown_texts == [("é", 2)]
    assert found.lost == 2 / 5
    assert found.lost_characters == [("é", 2)]
    assert found.exact == 0


def test_lower_case_is_a_loss() -> None:
    found = fit(by_hand("a", "b", lowercase=True), "A b", "a b")
    assert found.lost_characters == [("A", 1)]
    assert (found.lost, found.exact) == (1 / 4, 0.5)


def test_bytes_lose_nothing() -> None:
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 20, "byte-bpe", 280)
    found = fit(tokenizer, "the 猫 — \t sat\n\non é")
    assert (found.lost, found.unknown, found.exact) == (0, 0, 1)
    assert not any(w["word"] == "猫" for w in found.worst)  # it occurs once
    twice = fit(tokenizer, "猫 猫")
    assert [(w["word"], w["pieces"], w["split"]) for w in twice.worst] == [("猫", 3.0, "猫·.·.")]


def test_unused_vocabulary() -> None:
    assert fit(by_hand("a", "b", "c", "d"), "a b a").unused == 0.5


def test_times_seen_excludes_characters_and_unused_tokens() -> None:
    tokenizer = by_hand("a", "ab", "##bc", "abc", "unused")
    used = np.zeros(tokenizer.vocab.size, dtype=np.int64)
    used[5:] = [1, 40, 30, 20, 0]
    assert min_frequent_count(tokenizer, used) == 20
    assert min_frequent_count(tokenizer, 0 * used) == 0
    assert fit(tokenizer, "abc abc ab ab ab", scale=10).times_seen == 20


def test_documents_that_fit_in_a_row() -> None:
    tokenizer = by_hand("a")
    found = fit(tokenizer, "a " * 62, "a " * 63, "a " * 1000)
    assert found.rows[64] == pytest.approx(1 / 3)  # two tokens are special
    assert found.rows[128] == pytest.approx(2 / 3)
    assert found.rows[1024] == 1
    assert found.document_tokens["largest"] == 1000


def test_a_document_that_was_cut_counts_whole() -> None:
    document = Document("a " * 10, "x")
    only = SampleSplit([document], [document], [SampledDocument(document, 2000)], is_disjoint=False)
    assert measure_fit(by_hand("a"), only, 1.0, "it").document_tokens["largest"] == 1000


def test_words_of_the_user_are_the_words() -> None:
    document = Document("我喜欢你", "x", word_starts=(0, 1, 3))
    only = SampleSplit([document], [document], [SampledDocument(document, 4)], is_disjoint=False)
    found = measure_fit(by_hand("我", "喜", "欢", "你"), only, 1.0, "it")
    assert (found.words, found.pieces_per_word) == (3, 4 / 3)


def test_nothing_to_measure_on() -> None:
    found = fit(by_hand("a"), "?!")
    assert (found.words, found.pieces_per_word, found.worst) == (0, 0, [])


def test_tokens_that_reach_over_words() -> None:
    words, tokens = np.array([[0, 2], [3, 5]]), np.array([[0, 5]])
    assert [array.tolist() for array in word_token_ranges(words, tokens)] == [[0, 0], [1, 1]]


def test_clusters() -> None:
    assert piece_strings("ab", np.array([[0, 1], [1, 2]])) == ["a", "b"]


def test_measured_text_was_not_trained_on() -> None:
    sample = [SampledDocument(Document(f"text {i}", str(i)), 10) for i in range(200)]
    both = split_sample(sample)
    assert both.is_disjoint
    assert 15 <= len(both.measured) <= 70
    assert not {d.source for d in both.measured} & {d.source for d in both.train}
    one = split_sample(sample[:1])
    assert not one.is_disjoint
    assert one.measured == one.train


def test_tokenizers_that_cannot_be_trained_are_reported(corpus_texts: list[str]) -> None:
    made = list(train_candidate_tokenizers(parts(*corpus_texts), ["byte-bpe"], [100, 270, 280]))
    assert "byte-bpe with 100" in str(made[0])
    assert [t.vocab.size for t in made[1:] if isinstance(t, Tokenizer)] == [270, 280]


def test_sizes_that_the_text_cannot_teach_are_left_out(corpus_texts: list[str]) -> None:
    made = list(train_candidate_tokenizers(parts(*corpus_texts[:5]), ["byte-bpe"], [5000, 9000]))
    assert len(made) == 1


@pytest.fixture
def corpus_texts() -> list[str]:
    return [f"the cat number {i} sat on the mat by the river and slept" for i in range(30)]


def test_a_tokenizer_without_unknown_token() -> None:
    backend = Backend(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="a"))
    found = fit(Tokenizer(backend, {"pad": "<pad>"}), "a")
    assert found.unknown == 0
