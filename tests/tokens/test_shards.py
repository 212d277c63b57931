"""Shards hold exactly the tokens of the documents, with their edges, or nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from firth.errors import UserError
from firth.text import Document, held_out
from firth.tokens import shards
from firth.tokens.shards import Shards, is_shards, open_shards, prepare, sentence_edges
from firth.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

TEXTS = [f"The heron number {i} waits. Mr. Grey saw it {i % 7} times!\nIt's the river's heron." for i in range(60)]


def documents(texts: list[str]) -> list[Document]:
    return [Document(text, f"a.txt:{i}") for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, "byte-bpe", 300)


def split(part: Shards) -> list[list[int]]:
    edges = part.offsets
    return [part.tokens[a:b].tolist() for a, b in pairwise(edges)]


def test_shards_hold_what_the_tokenizer_gives(tokenizer: Tokenizer, tmp_path: Path) -> None:
    facts = prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0.3)
    opened = open_shards(tmp_path / "s")
    assert opened.held_out is not None
    train = [t for t in TEXTS if not held_out(t, 0.3)]
    aside = [t for t in TEXTS if held_out(t, 0.3)]
    assert split(opened.train) == [tokenizer.encode(t) for t in train]
    assert split(opened.held_out) == [tokenizer.encode(t) for t in aside]
    assert opened.train.tokens.dtype == np.uint16
    assert opened.tokenizer.fingerprint == tokenizer.fingerprint
    opened.verify()

    assert opened.manifest == facts
    assert (facts["documents"], facts["duplicates"]) == (60, 0)
    assert facts["train"]["documents"] == opened.train.num_documents == len(train)
    assert facts["tokens"] == opened.train.num_tokens + opened.held_out.num_tokens
    assert facts["held_out"]["text_bytes"] == sum(len(t.encode()) for t in aside)
    assert facts["tokenizer"] == tokenizer.fingerprint
    counts = np.bincount(opened.train.tokens)
    p = counts[counts > 0] / counts.sum()
    assert facts["unigram_entropy"] == pytest.approx(-(p * np.log(p)).sum())


def test_words_and_sentences(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    encodings = tokenizer.encodings(TEXTS)
    assert train.word_starts(0, train.num_tokens).tolist() == tokenizer.word_starts(*encodings).tolist()
    ends = train.sentence_ends(0, train.num_tokens)
    for text, start, stop in zip(TEXTS, train.offsets[:-1], train.offsets[1:], strict=True):
        cuts = start + 1 + np.flatnonzero(ends[start:stop])
        pieces = [tokenizer.decode(p) for p in np.split(train.tokens[start:stop], cuts - start)]
        head, saw, rest = text.partition(" Mr. Grey")
        second, mark, third = rest.partition("!")
        assert pieces == [head, saw + second + mark, third, ""]


def test_bits_of_a_range(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    everything = train.word_starts(0, train.num_tokens)
    for start, stop in [(0, 1), (3, 8), (7, 9), (8, 16), (13, 100), (train.num_tokens - 3, train.num_tokens), (5, 5)]:
        assert train.word_starts(start, stop).tolist() == everything[start:stop].tolist()


def test_batches_leave_no_trace(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "one", held_out_share=0.3)
    monkeypatch.setattr(shards, "BATCH_DOCUMENTS", 7)
    prepare(documents(TEXTS), tokenizer, tmp_path / "many", held_out_share=0.3)
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 100)
    prepare(documents(TEXTS), tokenizer, tmp_path / "more", held_out_share=0.3)
    manifest = (tmp_path / "one" / "manifest.json").read_text()
    assert (tmp_path / "many" / "manifest.json").read_text() == manifest
    assert (tmp_path / "more" / "manifest.json").read_text() == manifest


def test_duplicates_are_dropped_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    twice = TEXTS + TEXTS[:20]
    assert prepare(documents(twice), tokenizer, tmp_path / "a")["duplicates"] == 20
    once = prepare(documents(TEXTS), tokenizer, tmp_path / "b")
    assert open_shards(tmp_path / "a").train.fingerprint == open_shards(tmp_path / "b").train.fingerprint
    kept = prepare(documents(twice), tokenizer, tmp_path / "c", duplicates="keep")
    assert (kept["duplicates"], kept["documents"]) == (0, once["documents"] + 20)


def test_empty_documents_are_skipped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    facts = prepare(documents(["", *TEXTS, ""]), tokenizer, tmp_path / "s")
    assert facts["documents"] == 60


def test_nothing_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0)
    assert open_shards(tmp_path / "s").held_out is None


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"word{i}" for i in range(70_000)]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    prepare(documents(["word69999 word1"]), load_tokenizer(tmp_path), tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    assert train.tokens.dtype == np.uint32
    assert train.tokens.tolist() == [70_004, 6]


# --- sentences ----------------------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    edges = [0, *sentence_edges(text, "en")]
    return [text[a:b].strip() for a, b in pairwise(edges)]


def test_sentence_edges() -> None:
    assert sentences("Mr. Grey came.  He left!\n\nA title\n\nWhy? ") == [
        "Mr. Grey came.",
        "He left!",
        "A title",
        "Why?",
    ]
    assert sentence_edges("", "en") == sentence_edges(" \n", "en") == []


def test_wide_spaces_are_spaces() -> None:
    assert sentences("Plan A\u00a0. It\u2009works.") == ["Plan A\u00a0.", "It\u2009works."]


def test_long_paragraphs_are_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"This is sentence {i}." for i in range(200))
    whole = sentence_edges(text, "en")
    assert len(whole) == 200
    monkeypatch.setattr(shards, "SENTENCE_WINDOW", 100)
    assert sentence_edges(text, "en") == whole


# --- mistakes and accidents ---------------------------------------------------------------------------------------


def test_a_stream_that_fails_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BATCH_DOCUMENTS", 5)

    def failing() -> Iterator[Document]:
        yield from documents(TEXTS[:12])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(failing(), tokenizer, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="no shards folder"):
        open_shards(tmp_path / "s")


def test_what_a_killed_writer_leaves_does_not_open(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    (tmp_path / "s" / "manifest.json").unlink()  # written last
    with pytest.raises(UserError, match="no shards folder"):
        open_shards(tmp_path / "s")


def test_damage_is_found(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    file = tmp_path / "s" / "train" / "tokens.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"tokens\.bin has .* bytes, not"):
        open_shards(tmp_path / "s")
    file.write_bytes(data[:-2] + b"\0\1")
    opened = open_shards(tmp_path / "s")
    with pytest.raises(UserError, match="does not match its checksum"):
        opened.verify()
    file.unlink()
    with pytest.raises(UserError, match=r"tokens\.bin is missing"):
        open_shards(tmp_path / "s")


def test_other_folders_are_no_shards(tmp_path: Path) -> None:
    for content in ("[]", '{"kind": "rows"}'):
        (tmp_path / "manifest.json").write_text(content)
        assert not is_shards(tmp_path)
        with pytest.raises(UserError, match="no shards folder"):
            open_shards(tmp_path)


def test_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text"):
        prepare(documents(["", ""]), tokenizer, tmp_path / "s")
    with pytest.raises(UserError, match=r"All documents \(1\) fell into the held-out part"):
        prepare(documents(["alone"]), tokenizer, tmp_path / "s", held_out_share=1)
    with pytest.raises(UserError, match="'exact' or 'keep'"):
        prepare(documents(TEXTS), tokenizer, tmp_path / "s", duplicates="near")
    assert not (tmp_path / "s").exists()
