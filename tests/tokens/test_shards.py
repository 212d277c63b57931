"""Shards hold exactly the tokens of the documents with their boundaries, or do not open."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.core.files import file_sha256, read_json, write_json
from firth.text import Document, SalientSpanFinder, is_held_out
from firth.text.salient_spans import find_salient_spans
from firth.tokens import boundaries
from firth.tokens.boundaries import sentence_end_offsets
from firth.tokens.builders import TOKENIZER_KINDS
from firth.tokens.dataset import PackedDataset
from firth.tokens.encode import split_held_out
from firth.tokens.prepare import prepare
from firth.tokens.shards import Shards, is_shards_folder, open_shards
from firth.tokens.template import SequenceTemplate
from firth.tokens.tokenizer import Tokenizer, load_tokenizer
from firth.tokens.train import train_tokenizer

preparing = import_module("firth.tokens.prepare")  # the name in the package is the function
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
    train = [t for t in TEXTS if not is_held_out(t, 0.3)]
    aside = [t for t in TEXTS if is_held_out(t, 0.3)]
    assert split(opened.train) == [tokenizer.encode(t) for t in train]
    assert split(opened.held_out) == [tokenizer.encode(t) for t in aside]
    assert opened.train.tokens.dtype == np.uint16
    assert opened.tokenizer.fingerprint == tokenizer.fingerprint

    assert opened.manifest == facts
    assert (facts["documents"], facts["duplicates"]) == (60, 0)
    assert facts["train"]["documents"] == opened.train.num_documents == len(train)
    assert facts["tokens"] == opened.train.num_tokens + opened.held_out.num_tokens
    assert facts["held_out"]["text_bytes"] == sum(len(t.encode()) for t in aside)
    assert facts["tokenizer"] == tokenizer.fingerprint
    assert facts["salient"] is None
    assert opened.train.first_side_lengths is None
    assert not opened.train.has_bit("salient")
    counts = np.bincount(opened.train.tokens)
    p = counts[counts > 0] / counts.sum()
    assert facts["unigram_entropy"] == pytest.approx(-(p * np.log(p)).sum())


def test_a_sample_has_documents_from_all_over_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0.0)
    train = open_shards(tmp_path / "s").train
    np.testing.assert_array_equal(train.sample_documents(train.num_tokens), np.arange(60))
    sample = train.sample_documents(train.num_tokens // 3)
    assert 10 < len(sample) < 30
    assert (np.diff(sample) > 0).all()
    assert sum(len(train.document_tokens(d)) for d in sample) <= train.num_tokens // 3
    assert (sample < 20).any() and (sample >= 40).any()  # noqa: PT018, the first and the last third
    assert train.document_tokens(7).tolist() == tokenizer.encode(TEXTS[7])
    assert len(train.sample_documents(1)) == 1


def test_words_and_sentences(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    encodings = tokenizer.encode_with_offsets(TEXTS)
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


def test_token_bits_at_any_positions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    token_indices = np.random.default_rng(0).integers(train.num_tokens, size=(5, 200))
    for bit, read in (("word_start", train.word_starts), ("sentence_end", train.sentence_ends)):
        assert train.has_bit(bit)
        assert np.array_equal(train.gather_bits(bit, token_indices), read(0, train.num_tokens)[token_indices])


def test_words_and_sentences_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    facts = prepare(documents(TEXTS), tokenizer, tmp_path / "s", held_out_share=0.3)
    train = open_shards(tmp_path / "s").train
    words, sentences = train.word_starts(0, train.num_tokens).sum(), train.sentence_ends(0, train.num_tokens).sum()
    assert (facts["train"]["words"], facts["train"]["sentences"]) == (words, sentences)
    assert train.num_words == words
    assert sentences == 3 * train.num_documents
    manifest = read_json(tmp_path / "s" / "manifest.json")
    for name in ("words", "sentences"):
        del manifest["metadata"]["train"][name]
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(manifest))
    without_counts = open_shards(tmp_path / "s").train
    assert without_counts.num_words == words, "counted where the manifest does not say"


def test_the_last_sentence_ends_with_its_document(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(["A heron waits. It waits.\n \n", "\n\n"]), tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    ends = 1 + np.flatnonzero(train.sentence_ends(0, train.num_tokens))
    pieces = [tokenizer.decode(piece) for piece in np.split(train.tokens, ends)]
    assert pieces == ["A heron waits.", " It waits.\n \n", "\n\n", ""]


def test_batches_leave_no_trace(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = documents(TEXTS[:40]) + [Document(t, "b", text_pair=t[::-1]) for t in TEXTS[40:]]
    mixed += [Document("的河" * i, "c", word_starts=(0, 1)) for i in range(1, 9)]

    def write(name: str) -> None:
        prepare(mixed, tokenizer, tmp_path / name, held_out_share=0.3, salient=find_salient_spans)

    write("one")
    monkeypatch.setattr(preparing, "CHUNK_DOCUMENTS", 7)
    write("many")
    monkeypatch.setattr(preparing, "CHUNK_CHARACTERS", 100)
    write("more")
    manifest = (tmp_path / "one" / "manifest.json").read_text()
    assert (tmp_path / "many" / "manifest.json").read_text() == manifest
    assert (tmp_path / "more" / "manifest.json").read_text() == manifest


def test_duplicates_are_dropped_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    twice = TEXTS + TEXTS[:20]
    assert prepare(documents(twice), tokenizer, tmp_path / "a")["duplicates"] == 20
    once = prepare(documents(TEXTS), tokenizer, tmp_path / "b")
    assert open_shards(tmp_path / "a").train.fingerprint == open_shards(tmp_path / "b").train.fingerprint
    kept = prepare(documents(twice), tokenizer, tmp_path / "c", dedup="none")
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
    offsets = [0, *sentence_end_offsets(text, "en")]
    return [text[a:b].strip() for a, b in pairwise(offsets)]


def test_sentence_edges() -> None:
    assert sentences("Mr. Grey came.  He left!\n\nA title\n\nWhy? ") == [
        "Mr. Grey came.",
        "He left!",
        "A title",
        "Why?",
    ]
    assert sentence_end_offsets("", "en") == sentence_end_offsets(" \n", "en") == []


def test_wide_spaces_are_spaces() -> None:
    assert sentences("Plan A\u00a0. It\u2009works.") == ["Plan A\u00a0.", "It\u2009works."]


def test_long_paragraphs_are_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"This is sentence {i}." for i in range(200))
    whole = sentence_end_offsets(text, "en")
    assert len(whole) == 200
    monkeypatch.setattr(boundaries, "SENTENCE_WINDOW_CHARS", 100)
    assert sentence_end_offsets(text, "en") == whole


# --- words that the user names ------------------------------------------------------------------------------------

CHINESE = "我喜欢自然语言处理。"
CHINESE_WORDS = ("我", "喜欢", "自然语言", "处理", "。")
CHINESE_STARTS = (0, 1, 3, 7, 9)
ENGLISH = "New York isn't far"
NAMES = "Nobody saw Anna Grey at 7 times, 12 herons waited."


@cache
def learn(kind: str) -> Tokenizer:
    return train_tokenizer([" ".join(CHINESE), ENGLISH, NAMES, *TEXTS] * 2, kind, 400)


def words_of(document: Document, kind: str, folder: Path) -> list[str]:
    """The text of a document, cut where shards say that words start; what a token holds of a word is decoded."""
    tokenizer = learn(kind)
    prepare([document], tokenizer, folder, held_out_share=0, dedup="none")
    train = open_shards(folder).train
    starts = np.flatnonzero(train.word_starts(0, train.num_tokens))
    assert starts[0] == 0
    pieces = np.split(train.tokens, starts[1:])
    if kind == "wordpiece":
        return ["".join(tokenizer.backend.id_to_token(i).removeprefix("##") for i in piece) for piece in pieces]
    return [tokenizer.decode(piece).strip() for piece in pieces]


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_listed_words_set_word_starts(kind: str, tmp_path: Path) -> None:
    assert words_of(Document(CHINESE, "a", CHINESE_STARTS), kind, tmp_path / "a") == list(CHINESE_WORDS)
    assert words_of(Document(CHINESE, "a"), kind, tmp_path / "b") != list(CHINESE_WORDS)
    spaced = " ".join(CHINESE_WORDS)
    starts = tuple(np.cumsum([0] + [len(word) + 1 for word in CHINESE_WORDS[:-1]]).tolist())
    assert words_of(Document(spaced, "a", starts), kind, tmp_path / "c") == list(CHINESE_WORDS)


@pytest.mark.parametrize("kind", sorted(TOKENIZER_KINDS))
def test_words_of_every_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    prepare([Document("The heron waits. It saw it", "a")], learn(kind), tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    starts, ends = train.word_starts(0, train.num_tokens), train.sentence_ends(0, train.num_tokens)
    assert starts[0]
    assert train.num_words in (6, 7), "the full stop is a word of its own, or not"
    assert ends.sum() == 2
    assert ends[-1]


def test_named_words_may_hold_spaces_and_marks(tmp_path: Path) -> None:
    named = Document(ENGLISH, "a", (0, 9, 15))
    assert words_of(named, "byte-bpe", tmp_path / "a") == ["New York", "isn't", "far"]
    assert words_of(named, "unigram", tmp_path / "b") == ["New York", "isn't", "far"]
    assert words_of(named, "wordpiece", tmp_path / "c") == ["NewYork", "isn't", "far"]


def test_a_word_starts_at_the_first_token_of_its_first_character(tmp_path: Path) -> None:
    bytes_only = train_tokenizer(["the river"] * 3, "byte-bpe", 262)  # three tokens to a Chinese character
    prepare([Document(CHINESE, "a", CHINESE_STARTS)], bytes_only, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    assert train.num_tokens == 3 * len(CHINESE)
    assert np.flatnonzero(train.word_starts(0, 30)).tolist() == [3 * start for start in CHINESE_STARTS]


def test_the_first_token_starts_a_word_whatever_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare([Document("the heron waits", "a", (4,)), *documents(TEXTS)], tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    stop = int(train.offsets[1])
    starts = train.word_starts(0, stop)
    assert starts.sum() == 2
    assert starts[0]
    rest = train.word_starts(stop, train.num_tokens)
    assert rest.tolist() == tokenizer.word_starts(*tokenizer.encode_with_offsets(TEXTS)).tolist()


def test_lines_without_spaces_are_no_words(tmp_path: Path) -> None:
    bytes_only = train_tokenizer(["the river"] * 3, "byte-bpe", 262)
    letters = 2 * CHINESE.replace("。", "")
    prepare([Document(f"{letters}\n{letters}", "a")], bytes_only, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    assert 1 < train.num_words < train.num_tokens / 20
    with pytest.raises(UserError, match=r"a word has \d\d tokens on average.*`words` column"):
        train.require_bits(("word_start",))


def test_without_spaces_unigram_shows_no_words(tmp_path: Path) -> None:
    prepare([Document(CHINESE, "a"), Document(CHINESE[:5], "b")], learn("unigram"), tmp_path / "s", held_out_share=0)
    with pytest.raises(UserError, match="every document is one word"):
        open_shards(tmp_path / "s").train.require_bits(["word_start"])


# --- two sides ----------------------------------------------------------------------------------------------------


def test_two_sides_lie_one_after_the_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    mixed = [
        Document("the heron", "a", text_pair="der Reiher."),
        Document("a river", "b"),
        Document("x", "c", text_pair="y z"),
    ]
    facts = prepare(mixed, tokenizer, tmp_path / "s", held_out_share=0)
    train = open_shards(tmp_path / "s").train
    sides = [[tokenizer.encode(side) for side in d.texts] for d in mixed]
    assert split(train) == [list(chain.from_iterable(both)) for both in sides]
    assert train.first_side_lengths is not None
    assert train.first_side_lengths.tolist() == [len(sides[0][0]), -1, len(sides[2][0])]
    assert train.first_side_lengths.dtype == np.int64
    assert (facts["documents"], facts["text_bytes"]) == (3, len("the heron" + "der Reiher." + "a river" + "xy z"))
    ends = train.sentence_ends(0, train.num_tokens)
    assert ends[train.first_side_lengths[0] - 1], "a side ends a sentence"
    assert train.word_starts(0, train.num_tokens)[train.first_side_lengths[0]], "and begins a word"


def test_two_sides_are_compared_and_held_out_together(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs = [Document(text, "a", text_pair=f"{i % 2}") for text in TEXTS for i in range(4)]
    facts = prepare(pairs, tokenizer, tmp_path / "s", held_out_share=0.3)
    assert (facts["documents"], facts["duplicates"]) == (120, 120)
    opened = open_shards(tmp_path / "s")
    assert opened.held_out is not None
    assert opened.held_out.num_documents == sum(is_held_out(f"{text}\0{i}", 0.3) for text in TEXTS for i in range(2))


def test_a_document_with_an_empty_side_is_skipped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    facts = prepare(
        [Document("the heron", "a", text_pair=""), Document("a river", "b")],
        tokenizer,
        tmp_path / "s",
        held_out_share=0,
    )
    assert facts["documents"] == 1
    assert open_shards(tmp_path / "s").train.first_side_lengths is None


# --- salient spans ------------------------------------------------------------------------------------------------


def marked(text: str, kind: str, folder: Path, find: SalientSpanFinder = find_salient_spans) -> list[str]:
    """The tokens of a text that are marked as salient, consecutive ones joined."""
    tokenizer = learn(kind)
    prepare(
        [Document("a river", "a.txt:1"), Document(text, "a.txt:2")], tokenizer, folder, held_out_share=0, salient=find
    )
    train = open_shards(folder).train
    start, stop = train.offsets[1:].tolist()
    bits = train.gather_bits("salient", np.arange(start, stop))
    runs = np.split(np.arange(start, stop), 1 + np.flatnonzero(np.diff(bits)))
    return [tokenizer.decode(train.tokens[run]).strip() for run in runs if bits[run[0] - start]]


@pytest.mark.parametrize("kind", sorted(TOKENIZER_KINDS))
def test_tokens_in_salient_spans_are_marked(kind: str, tmp_path: Path) -> None:
    found = marked(NAMES, kind, tmp_path / "s")
    assert [word.replace(" ", "") for word in found] == ["AnnaGrey", "7", "12"]
    facts = open_shards(tmp_path / "s").manifest
    assert facts["salient"] == "default"
    assert facts["train"]["salient"] >= 4


def test_any_function_may_find_salient_spans(tmp_path: Path) -> None:
    def river(text: str) -> list[tuple[int, int]]:
        return [(match.start(), match.end()) for match in re.finditer("iver|rive", text)]

    assert marked("the river, the heron", "byte-bpe", tmp_path / "s", river) == ["river"]
    assert open_shards(tmp_path / "s").manifest["salient"].endswith("river")
    assert marked("the river", "byte-bpe", tmp_path / "none", lambda text: []) == []


@pytest.mark.parametrize("span", [(-1, 2), (3, 3), (4, 2), (0, 8)])
def test_spans_outside_of_the_text(tmp_path: Path, span: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=rf"a.txt:1: the salient span \({span[0]}, {span[1]}\) is .* 7 characters"):
        marked("x", "byte-bpe", tmp_path / "s", lambda text: [span])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("spans", [None, [1, 2], [(1.0, 2.0)], ["ab", "cd"], [(1, 2, 3)]])
def test_invalid_spans_raise(tmp_path: Path, spans: Any) -> None:
    with pytest.raises(UserError, match=r"a.txt:1: salient spans must be a list of \(start, end\)"):
        marked("x", "byte-bpe", tmp_path / "s", lambda text: spans)


# --- mistakes and accidents ---------------------------------------------------------------------------------------


def test_a_stream_that_fails_leaves_no_shards(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "CHUNK_DOCUMENTS", 5)

    def failing() -> Iterator[Document]:
        yield from documents(TEXTS[:12])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(failing(), tokenizer, tmp_path / "s")
    assert {p.name for p in tmp_path.iterdir()} == {".s.part", ".s.journal"}, "for --resume"
    for folder, message in ((tmp_path / "s", "no such folder"), (tmp_path / ".s.part", "not a shards folder")):
        with pytest.raises(UserError, match=message):
            open_shards(folder)


def test_incomplete_shards_do_not_open(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    (tmp_path / "s" / "manifest.json").unlink()  # written last
    with pytest.raises(UserError, match="not a shards folder"):
        open_shards(tmp_path / "s")


def test_damage_is_found(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    file = tmp_path / "s" / "train" / "tokens.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"tokens\.bin has .* bytes, not"):
        open_shards(tmp_path / "s")
    file.write_bytes(data[:-2] + b"\0\1")
    with pytest.raises(
        UserError, match=r"damaged: train/tokens\.bin does not match its checksum\. Restore .* --resume"
    ):
        open_shards(tmp_path / "s")
    file.unlink()
    with pytest.raises(UserError, match=r"tokens\.bin is missing"):
        open_shards(tmp_path / "s")


def seal(folder: Path) -> None:
    """Write the manifest of shards again, as if they had been made as they are now."""
    manifest = read_json(folder / "manifest.json")
    for name in manifest["files"]:
        manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
    write_json(folder / "manifest.json", manifest)


def test_wrong_ids_and_offsets_are_found(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Shards whose checksums are right, but not their content."""
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    part, files = tmp_path / "s" / "train", read_json(tmp_path / "s" / "manifest.json")["files"]
    tokens, offsets = np.fromfile(part / "tokens.bin", np.uint16), np.load(part / "offsets.npy")
    wrong: list[tuple[np.ndarray, np.ndarray, str]] = [
        (np.where(np.arange(len(tokens)) == 7, 300, tokens), offsets, "has the id 300, not one of 300"),
        (tokens, offsets[[0, 2, 1, *range(3, len(offsets))]], "offsets that decrease"),
        (tokens, offsets[:-1], "counts .* tokens"),
        (tokens, offsets + 1, "begins with 0"),
        (tokens, offsets.astype(np.int32), "array of int64"),
    ]
    for ids, ends, message in wrong:
        (part / "tokens.bin").write_bytes(ids.astype(np.uint16).tobytes())
        np.save(part / "offsets.npy", ends)
        seal(tmp_path / "s")
        with pytest.raises(UserError, match=rf"damaged: train/.*{message}"):
            open_shards(tmp_path / "s")
    for name in ("train/tokens.bin", "held_out/offsets.npy"):
        write_json(tmp_path / "s" / "manifest.json", {"kind": "shards", "files": files, "metadata": {}})
        with pytest.raises(UserError, match="no counts of documents"):
            open_shards(tmp_path / "s")
        facts = {part: {"documents": 1} for part in ("train", "held_out")}
        listed = {other: fact for other, fact in files.items() if other != name}
        write_json(tmp_path / "s" / "manifest.json", {"kind": "shards", "files": listed, "metadata": facts})
        with pytest.raises(UserError, match=f"does not list {name}"):
            open_shards(tmp_path / "s")


@pytest.mark.parametrize("writable", [True, False])
def test_shards_are_verified_once(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    module, read = import_module("firth.tokens.shards"), []
    monkeypatch.setattr(module, "MIN_VERIFIED_AGE_NS", 0)
    defect = module.find_file_defect
    monkeypatch.setattr(module, "find_file_defect", lambda *given: read.append(given[1]) or defect(*given))
    if not writable:
        monkeypatch.setattr(module, "write_json", lambda *given: (_ for _ in ()).throw(PermissionError()))
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    for _ in range(2):
        open_shards(tmp_path / "s")
    num = len(read_json(tmp_path / "s" / "manifest.json")["files"])
    assert len(read) == num
    assert (tmp_path / "s" / ".verified.json").exists() == writable
    module.verified_in_process.clear()  # as in another process
    open_shards(tmp_path / "s")
    assert len(read) == (num if writable else 2 * num)
    file = tmp_path / "s" / "train" / "tokens.bin"
    before, data = file.stat(), file.read_bytes()
    file.write_bytes(bytes(len(data)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a broken disk would: size and time are the same
    with pytest.raises(UserError, match=r"tokens\.bin does not match"):
        open_shards(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    with pytest.raises(UserError, match=r"tokens\.bin does not match"):
        open_shards(tmp_path / "copy")
    (tmp_path / "s" / ".verified.json").write_bytes(b"\xff")
    file.write_bytes(data)
    open_shards(tmp_path / "s")


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "sentences.bin", "rows"])
def test_a_file_that_is_cut_is_an_error(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    """Reading a mapped file behind its end would end the process."""
    prepare(documents(TEXTS), tokenizer, tmp_path / "s")
    train = open_shards(tmp_path / "s").train
    for _ in range(2):  # computed, then mapped
        dataset = PackedDataset(train, 32, SequenceTemplate((1,), (2,)), 0, 0, token_bits=("sentence_end",))
    before = dataset.get_rows(np.arange(4)).input_ids
    file = next(train.folder.glob("rows-*/piece_start.npy")) if name == "rows" else train.folder / name
    content = file.read_bytes()
    os.truncate(file, 10)
    with pytest.raises(UserError, match=rf"{file.name} was cut from {len(content):,} to 10 bytes"):
        dataset.get_rows(np.arange(4))
    with pytest.raises(UserError, match="was cut"):
        train.tokens[:5].tolist()
    file.write_bytes(content)
    assert dataset.get_rows(np.arange(4)).input_ids.tolist() == before.tolist()
    shutil.rmtree(tmp_path / "s")  # mapped files outlive their names
    assert dataset.get_rows(np.arange(4)).input_ids.tolist() == before.tolist()


def test_other_folders_are_no_shards(tmp_path: Path) -> None:
    for content in ("[]", '{"kind": "rows"}'):
        (tmp_path / "manifest.json").write_text(content)
        assert not is_shards_folder(tmp_path)
        with pytest.raises(UserError, match="not a shards folder"):
            open_shards(tmp_path)


def test_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text"):
        prepare(documents(["", ""]), tokenizer, tmp_path / "s")
    with pytest.raises(UserError, match=r"All documents \(1\) fell into the held-out part"):
        prepare(documents(["alone"]), tokenizer, tmp_path / "s", held_out_share=1)
    with pytest.raises(UserError, match="Did you mean 'near'"):
        prepare(documents(TEXTS), tokenizer, tmp_path / "s", dedup="nearly")
    pieces = train_tokenizer(TEXTS, "wordpiece", 300)
    with pytest.raises(UserError, match=r"3,000 bytes of text gave only 1 token: .* a wordpiece tokenizer .* byte-bpe"):
        prepare(documents(["abc" * 1000]), pieces, tmp_path / "s", held_out_share=0)
    assert not (tmp_path / "s").exists()


def test_one_document_says_that_nothing_is_held_out(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(documents(["alone"]), tokenizer, tmp_path / "a", held_out_share=1e-9)
    assert "Nothing is held out: the text has 1 document" in " ".join(capsys.readouterr().err.split())
    prepare(documents(["alone"]), tokenizer, tmp_path / "b", held_out_share=0)
    assert not capsys.readouterr().err


def test_long_documents_hold_out_a_block_each(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Four long documents would hold out nothing, or a quarter of the text."""
    lines = [f"line {i} of a long text\n" for i in range(4000)]
    texts = ["".join([f"text {n}\n", *lines]) for n in range(4)]
    shards = tmp_path / "s"
    prepare(documents(texts), tokenizer, shards, held_out_share=0.1)
    opened = open_shards(shards)
    assert opened.held_out is not None
    assert opened.held_out.num_documents == 4
    assert len(opened.held_out.tokens) / (len(opened.held_out.tokens) + len(opened.train.tokens)) == pytest.approx(
        0.1, abs=0.01
    )
    for text in texts:
        parts = list(split_held_out(Document(text, "a.txt"), 0.1))
        assert "".join(d.text for d, _ in parts) == text
        assert [is_out for _, is_out in parts].count(True) == 1
        assert all(d.text.startswith(("text", "line")) and d.text.endswith("\n") for d, _ in parts)
    split = [split_held_out(Document(text, ""), 0.1) for text in texts]
    blocks = {text.index(d.text) for text, parts in zip(texts, split, strict=True) for d, is_out in parts if is_out}
    assert len(blocks) == 4, "each at a place that follows from its text"


@pytest.mark.parametrize("text", ["x" * 60_000, "日本語" * 20_000])
def test_a_long_document_without_spaces_is_cut_all_the_same(text: str) -> None:
    parts = list(split_held_out(Document(text, ""), 0.05))
    assert "".join(d.text for d, _ in parts) == text
    assert [len(d.text) for d, is_out in parts if is_out] == [len(text) // 20]


def test_documents_that_are_held_out_or_not_as_a_whole() -> None:
    long = "one two " * 10_000
    for document in (Document(long, "", text_pair="un"), Document(long, "", word_starts=(0, 4)), Document("short", "")):
        assert [d for d, _ in split_held_out(document, 0.05)] == [document]
    assert list(split_held_out(Document(long, ""), 0.0)) == [(Document(long, ""), False)]


def test_few_documents_that_hold_out_too_much_are_said(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = next(text for n in range(99) if is_held_out(text := f"{n} is long " * 500, 0.05))
    short = [text for n in range(40) if not is_held_out(text := f"document {n} is short", 0.05)]
    prepare(documents([*short, long]), tokenizer, tmp_path / "a", held_out_share=0.05)
    assert re.search(r"\d\d% of the tokens are held out, and 5% of the doc", " ".join(capsys.readouterr().err.split()))
    prepare(documents(TEXTS), tokenizer, tmp_path / "b", held_out_share=0.05)
    assert not capsys.readouterr().err


def test_a_manifest_with_wrong_facts_is_refused_in_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(documents(["a b c.", "d e f."]), tokenizer, tmp_path / "s")
    file = tmp_path / "s" / "manifest.json"
    whole = json.loads(file.read_text())
    for facts in (None, [], {}, {**whole["metadata"], "held_out": 3}, {**whole["metadata"], "unigram_entropy": "x"}):
        file.write_text(json.dumps({**whole, "metadata": facts}))
        with pytest.raises(UserError, match=r"manifest\.json"):
            open_shards(tmp_path / "s")
