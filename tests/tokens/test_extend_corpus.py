"""An extension is measured on documents that were not counted."""

from __future__ import annotations

import pytest

from firth.core.errors import UserError
from firth.text import Document, is_held_out
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.extend_corpus import MEASURED_SHARE, extend_by_corpus, measure_fragmentation

SENTENCE = "soma kitabu kitabuni"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat sat on the mat, a book of ink and milk by us."] * 3, "wordpiece", 100)


def documents(num: int, text: str = SENTENCE) -> list[Document]:
    return [Document(f"{text} {i}", "here") for i in range(num)]


def test_a_tenth_is_measured_and_not_counted(tokenizer: Tokenizer) -> None:
    made = extend_by_corpus(tokenizer, documents(200), max_new=2)
    measured = [d for i, d in enumerate(documents(200)) if i and is_held_out(d.text, MEASURED_SHARE)]
    assert 5 < len(measured) < 50
    assert made.measured_apart
    assert made.measured_documents == len(measured)
    assert made.before.bytes == sum(len(d.text) for d in measured)
    assert made.counted_bytes == sum(len(d.text) for d in documents(200)) - made.before.bytes
    counts = {new.token: new.count for new in made.new_tokens}
    assert counts["kitabu"] + counts.get("kitabuni", 0) >= 200 - len(measured)
    assert made.after.tokens < made.before.tokens
    assert made.after.tokens == sum(len(made.tokenizer.encode(d.text)) for d in measured)
    assert made.before.words == made.after.words == 4 * len(measured)


def test_few_documents_are_measured_as_a_whole(tokenizer: Tokenizer) -> None:
    """The first document is always counted, whatever its hash."""
    (text,) = [d for d in documents(40, f"{SENTENCE} " * 20) if is_held_out(d.text, MEASURED_SHARE)][:1]
    made = extend_by_corpus(tokenizer, [text], min_count=5)
    assert not made.measured_apart
    assert (made.measured_documents, made.counted_bytes) == (1, len(text.text))


def test_fragmentation_by_hand(tokenizer: Tokenizer) -> None:
    found = measure_fragmentation(tokenizer, [Document("the cat, the 喵 sat", "here")])
    assert (found.words, found.tokens, found.bytes) == (5, 6, 20)
    assert (found.tokens_per_word, found.split_words_share) == (1.0, 0.0)
    assert found.tokens_per_mb == pytest.approx(6 / 20 * 1e6)
    assert found.unknown_per_mb == pytest.approx(1 / 20 * 1e6)


def test_the_result_lists_those_that_save_most_first(tokenizer: Tokenizer) -> None:
    made = extend_by_corpus(tokenizer, documents(60), max_new=3)
    listed = made.to_dict()["new_tokens"]
    saved = [new["saved_tokens"] for new in listed]
    assert saved == sorted(saved, reverse=True)
    assert listed[0]["saved_tokens_per_mb"] == pytest.approx(saved[0] / made.counted_bytes * 1e6)


def test_no_token_is_worth_adding(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"No token is worth adding: .* 10 times .*--min-count"):
        extend_by_corpus(tokenizer, [Document("the cat sat on the mat", "here")] * 20)
