"""What is shown is what training reads: marks, answers, sight and counts, on small rows and for every objective."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import firth
from firth.errors import UserError
from firth.files import write_text
from firth.lab import show_text
from firth.lab.show import Shown, counts, look, said
from firth.lab.show_page import MARK, direction, free_page, make_page, outline
from firth.lab.show_row import (
    Picture,
    Piece,
    Strip,
    View,
    align,
    behind_masks,
    late,
    one_row,
    pictures,
    restores,
    shrink,
    sight,
    surface,
    view,
    visible,
)
from firth.lab.show_text import blocks, print_shown
from firth.models import PRESETS
from firth.models.attention import Sight, see
from firth.models.two_stream import see_earlier
from firth.objectives import CLM, IGNORED, MLM, NAMED, Batch, PermutationLM
from firth.recipes import pretraining
from firth.text import Corpus, load_salient
from firth.tokens import Rows, Vocabulary, open_shards, prepare, train_tokenizer
from firth.train import override
from firth.train.feed import batch_function, row_source

# ids 0 to 9 are special, 10 and up are text
PAD, UNK, END, CLS, SEP, MASK, S0, S1, S2 = range(9)
VOCAB = Vocabulary(
    size=40,
    pad=PAD,
    unk=UNK,
    bos=None,
    eos=END,
    cls=CLS,
    sep=SEP,
    mask=MASK,
    sentinels=(S0, S1, S2),
    special=tuple(range(10)),
)


class Letters:
    """A tokenizer whose text tokens are letters, each a word."""

    vocab = VOCAB
    kind = "unigram"

    class backend:  # noqa: N801, stands for the library's tokenizer
        @staticmethod
        def id_to_token(i: int) -> str:
            names = ["<pad>", "<unk>", "</s>", "<cls>", "<sep>", "<mask>", "<0>", "<1>", "<2>", "<9>"]
            return names[i] if i < 10 else "▁" + chr(ord("a") + i - 10)


LETTERS: Any = Letters()


def ids(words: str) -> list[int]:
    """'a b' -> [10, 11]; names of special tokens as they are."""
    names = {LETTERS.backend.id_to_token(i).strip("▁"): i for i in range(36)}
    return [names[word] for word in words.split()]


def rows_of(*texts: str, doc: list[list[int]] | None = None, **bits: Any) -> Rows:
    tokens = np.array([ids(text) for text in texts])
    docs = np.array(doc) if doc is not None else np.where(tokens == PAD, -1, 0)
    real = (tokens >= 10) | (tokens == UNK)
    return Rows(tokens, docs, np.zeros_like(tokens), real, np.arange(len(tokens)), **bits)


def seen_by_model(found: Sight, shape: tuple[int, int]) -> np.ndarray:
    """The mask that attention works with, written out."""
    if found.mask is not None:
        return found.mask[:, 0].expand(-1, *shape).numpy()
    return np.broadcast_to(np.tril(np.ones(shape, bool)) if found.causal else np.ones(shape, bool), (1, *shape))


def shown_pieces(strip: Strip) -> list[tuple[str, str, str]]:
    return [(piece.text.strip(), piece.kind, piece.under) for piece in strip.pieces if piece.kind != "text"]


# --- masks --------------------------------------------------------------------------------------------------------

SOURCE = rows_of("<cls> a b c d e <sep> <pad>", "<cls> f g h <unk> j k <sep>")
MASKED = Batch(
    tokens=np.array([ids("<cls> <mask> b z d e <sep> <pad>"), ids("<cls> f g h <mask> <mask> k <sep>")]),
    doc=SOURCE.doc,
    asked=np.array([[1, 3, 4], [4, 5, 0]]),
    labels=np.array([ids("a c d"), [*ids("<unk> j"), IGNORED]]),
)


def test_counts_of_masks() -> None:
    found = counts(SOURCE, MASKED, VOCAB)
    assert found == {
        "rows": 2,
        "asked": 5 / 11,  # a word that the tokenizer does not know is text
        "masked": 3 / 5,
        "random": 1 / 5,
        "kept": 1 / 5,
        "spans": 3 / 2,
        "mean_span": 5 / 3,
        "tokens_used": 15 / 16,
    }


def test_spans_are_counted_in_words_where_words_are_known() -> None:
    starts = np.array([[0, 1, 1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0, 1, 0]], bool)  # c d and <unk> j are words
    assert counts(SOURCE._replace(word_start=starts), MASKED, VOCAB)["mean_span"] == 3 / 3


def test_marks_of_masks() -> None:
    seen = view(SOURCE, MASKED, 0, LETTERS, MLM(), causal=False)
    assert shown_pieces(seen.strips[0]) == [
        ("<cls>", "special", ""),
        ("<mask>", "masked", "a"),
        ("z", "random", "c"),
        ("d", "kept", ""),
        ("<sep>", "special", ""),
    ]
    assert seen.strips[0].padding == 1
    assert [piece.place for piece in seen.strips[0].pieces] == list(range(7))
    assert seen.strips[0].pieces[1].title == "id 5, place 1, document 0"


def test_what_is_asked_of_a_query_is_not_hidden() -> None:
    batch = MASKED._replace(tokens=SOURCE.tokens, rank=np.array([[0, 3, 0, 1, 2, 0, 0, 0]] * 2))
    seen = view(SOURCE, batch, 0, LETTERS, PermutationLM(), causal=False)
    assert [p[1:] for p in shown_pieces(seen.strips[0])[1:4]] == [("asked", "3"), ("asked", "1"), ("asked", "2")]
    assert {"masked", "random", "kept"}.isdisjoint(counts(SOURCE, batch, VOCAB))


# --- what is written in order -------------------------------------------------------------------------------------


def test_a_language_model_is_asked_everything_and_a_prefix_nothing() -> None:
    rows = rows_of("a b c d")
    labels = np.array([[11, 12, 13, IGNORED]])
    every = Batch(rows.tokens, doc=rows.doc, labels=labels)
    assert shown_pieces(view(rows, every, 0, LETTERS, CLM(), True).strips[0]) == []
    assert counts(rows, every, VOCAB) == {"rows": 1, "asked": 3 / 4, "tokens_used": 1}
    labels = np.array([[IGNORED, 12, 13, IGNORED]])
    rest = view(rows, Batch(rows.tokens, doc=rows.doc, labels=labels), 0, LETTERS, CLM(), True).strips[0]
    assert shown_pieces(rest) == [("c", "answer", ""), ("d", "answer", "")]
    assert [piece.written for piece in rest.pieces] == [False, False, True, True]


SPANS = rows_of("a b c d e </s> f g h </s>", doc=[[0] * 6 + [1] * 4])
TEXT_TO_TEXT = Batch(
    tokens=np.array([ids("<0> c <1> </s> f <0> </s> <pad>")]),
    doc=np.array([[0, 0, 0, 0, 1, 1, 1, -1]]),
    labels=np.array([[*ids("<0> a b <1> d e </s> <0> g h </s>"), IGNORED]]),
    decoder_tokens=np.array([ids("<pad> <0> a b <1> d e <pad> <0> g h <pad>")]),
    decoder_doc=np.array([[0] * 7 + [1] * 5]),
)


def test_sentinels_stand_for_the_spans_of_their_own_document() -> None:
    seen = view(SPANS, TEXT_TO_TEXT, 0, LETTERS, NAMED["span-corruption"], causal=False)
    reads, writes = seen.strips
    assert [p for p in shown_pieces(reads) if p[1] == "sentinel"] == [
        ("<0>", "sentinel", "a b"),
        ("<1>", "sentinel", "d e"),
        ("<0>", "sentinel", "g h"),
    ]
    assert (reads.padding, writes.padding) == (1, 1)
    assert [p[:2] for p in shown_pieces(writes)][:4] == [
        ("<0>", "sentinel"),
        ("a", "answer"),
        ("b", "answer"),
        ("<1>", "sentinel"),
    ]
    assert "after <pad>" in seen.facts[0]
    found = counts(SPANS, TEXT_TO_TEXT, VOCAB)
    assert (found["asked"], found["spans"], found["mean_span"]) == (6 / 8, 3, 2)
    assert (found["tokens_used"], found["decoder_used"]) == (7 / 8, 11 / 12)


def test_a_decoder_that_reads_something_else_is_shown_apart() -> None:
    other = TEXT_TO_TEXT._replace(decoder_tokens=TEXT_TO_TEXT.decoder_tokens[:, ::-1])
    seen = view(SPANS, other, 0, LETTERS, NAMED["span-corruption"], causal=False)
    assert [strip.name for strip in seen.strips] == ["encoder reads", "decoder reads", "decoder writes"]
    assert late(Batch(*(None if x is None else x[0] for x in other)), np.array([0] * 7 + [1] * 4 + [-1])) is None


def test_answers_after_the_text_in_one_stack() -> None:
    rows = rows_of("a b c d </s>")
    batch = Batch(
        tokens=np.array([ids("<0> c d </s> <0> a b </s>")]),
        doc=np.zeros((1, 8), int),
        asked=np.array([[3, 4, 5, 6, 0]]),
        labels=np.array([[*ids("<0> a b </s>"), IGNORED]]),
    )
    pieces = view(rows, batch, 0, LETTERS, CLM(), True).strips[0].pieces
    assert [piece.written for piece in pieces] == [False] * 4 + [True] * 4
    assert (pieces[0].kind, pieces[0].under) == ("sentinel", "a b")
    assert (pieces[4].kind, pieces[4].under) == ("sentinel", "")
    assert counts(rows, batch, VOCAB)["mean_span"] == 2


# --- a text to restore --------------------------------------------------------------------------------------------

# a b c. d e f g. -> [MASK] f g  a [MASK] c, with a mask put in where nothing was
WHOLE = rows_of("<cls> a b c d e f g <sep>", sentence_end=np.array([[0, 0, 0, 1, 0, 0, 0, 1, 0]], bool))
CORRUPTED = Batch(
    tokens=np.array([ids("<cls> <mask> f g a <mask> c <mask> <sep>")]),
    doc=np.zeros((1, 9), int),
    labels=WHOLE.tokens,
    decoder_tokens=np.array([ids("<sep> <cls> a b c d e f g")]),
    decoder_doc=np.zeros((1, 9), int),
)


def row(batch: Batch) -> Batch:
    return Batch(*(None if x is None else x[0] for x in batch))


def test_a_corrupted_text_is_laid_beside_the_whole_one() -> None:
    one = row(CORRUPTED)
    match = align(one_row(WHOLE, 0), one, VOCAB)
    assert match.tolist() == [-1, -1, 6, 7, 1, -1, 3, -1, -1]
    assert behind_masks(one, match, VOCAB) == {1: [4, 5], 5: [2], 7: []}
    reads, writes = view(WHOLE, CORRUPTED, 0, LETTERS, NAMED["bart"], False).strips
    assert [p for p in shown_pieces(reads) if p[1] in ("masked", "number")] == [
        ("<mask>", "masked", "d e"),
        ("2", "number", ""),
        ("1", "number", ""),
        ("<mask>", "masked", "b"),
        ("<mask>", "masked", ""),
    ]
    assert [p[:2] for p in shown_pieces(writes) if p[1] != "special"] == [
        ("1", "number"),
        ("a", "answer"),
        ("b", "hidden"),
        ("c", "answer"),
        ("2", "number"),
        ("d", "hidden"),
        ("e", "hidden"),
        ("f", "answer"),
        ("g", "answer"),
    ]
    found = counts(WHOLE, CORRUPTED, VOCAB)
    assert (found["infilled"], found["mean_span"], found["permuted"]) == (3 / 7, 1, 1)
    assert "deleted" not in found


def test_tokens_that_are_deleted() -> None:
    batch = CORRUPTED._replace(tokens=np.array([ids("<cls> a c d g <sep> <pad> <pad> <pad>")]))
    found = counts(WHOLE, batch, VOCAB)
    assert (found["deleted"], found["permuted"]) == (3 / 7, 0)
    assert {"infilled", "masked"}.isdisjoint(found)
    writes = view(WHOLE, batch, 0, LETTERS, NAMED["bart"], False).strips[1]
    assert [p[0] for p in shown_pieces(writes) if p[1] == "deleted"] == ["b", "e", "f"]


def test_a_rest_is_no_restored_text() -> None:
    one = row(CORRUPTED)._replace(labels=np.array([*ids("c d e f g <sep>"), *[IGNORED] * 3]))
    assert not restores(one_row(WHOLE, 0), one, VOCAB)
    assert restores(one_row(WHOLE, 0), row(CORRUPTED), VOCAB)


def restoring(whole: str, read: str, **bits: Any) -> tuple[Rows, Batch]:
    rows, tokens = rows_of(whole, **bits), np.array([ids(read)])
    doc = np.where(tokens == PAD, -1, 0)
    return rows, Batch(tokens, doc=doc, labels=rows.tokens, decoder_tokens=rows.tokens, decoder_doc=0 * rows.tokens)


def test_what_ends_a_sentence_stays_with_it() -> None:
    """a b x. c d x. e f g h. -> a b x. e f g h. c d x.: the first x is not that which stood before e f g h."""
    ends = np.array([[0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]], bool)
    rows, batch = restoring("<cls> a b x c d x e f g h <sep>", "<cls> a b x e f g h c d x <sep>", sentence_end=ends)
    match = align(one_row(rows, 0), one_row(batch, 0), VOCAB)
    assert match.tolist() == [-1, 1, 2, 3, 7, 8, 9, 10, 4, 5, 6, -1]


def test_masks_side_by_side_hide_one_token_each() -> None:
    rows, batch = restoring("<cls> a b c d e f <sep>", "<cls> a <mask> <mask> d <mask> f <sep>")
    match = align(one_row(rows, 0), one_row(batch, 0), VOCAB)
    assert behind_masks(one_row(batch, 0), match, VOCAB) == {2: [2], 3: [3], 5: [5]}
    found = counts(rows, batch, VOCAB)
    assert found["masked"] == 1 / 2
    assert {"infilled", "mean_span", "rotated"}.isdisjoint(found)


def test_a_text_that_begins_in_its_middle() -> None:
    rows, batch = restoring("<cls> a b c d e f <sep>", "<cls> e f a b c d <sep>")
    assert counts(rows, batch, VOCAB)["rotated"] == 1
    rows, batch = restoring("<cls> a b c d e f <sep>", "<cls> a b e f c d <sep>")
    assert "rotated" not in counts(rows, batch, VOCAB)


# --- sight --------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
DOC = np.array([[0, 0, 0, 1, 1, 2, -1, -1], [0] * 8])
RANK = RNG.integers(0, 4, (2, 8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("doc", [None, DOC])
@pytest.mark.parametrize("rank", [None, RANK])
def test_pictures_show_what_attention_sees(causal: bool, doc: np.ndarray | None, rank: np.ndarray | None) -> None:
    tensors = [None if x is None else torch.from_numpy(x) for x in (doc, rank)]
    wanted = seen_by_model(see(causal, *tensors), (8, 8))
    for b in range(2):
        one = row(Batch(np.zeros((1, 8), int), *(None if x is None else x[b : b + 1] for x in (doc,))))
        one = one._replace(rank=None if rank is None else rank[b])
        assert (sight(one, causal) == wanted[min(b, len(wanted) - 1)]).all()
        text = np.arange(8) if doc is None else np.flatnonzero(doc[b] >= 0)
        (picture,) = pictures(one, causal, query=False)
        assert (picture.seen == wanted[min(b, len(wanted) - 1)][text[:, None], text]).all()


def test_a_query_sees_what_comes_before_it_in_the_order() -> None:
    asked = np.array([[1, 4, 2], [7, 3, 0]])
    labels = np.array([[10, 10, IGNORED], [10, 10, 10]])
    wanted = see_earlier(*map(torch.from_numpy, (DOC, RANK, asked))).mask
    assert wanted is not None
    for b in range(2):
        one = Batch(np.zeros(8, int), doc=DOC[b], rank=RANK[b], asked=asked[b], labels=labels[b])
        content, query = pictures(one, causal=False, query=True)
        text = np.flatnonzero(DOC[b] >= 0)
        used = np.flatnonzero(labels[b] != IGNORED)
        assert (query.seen == wanted[b, 0].numpy()[used[:, None], text]).all()
        assert (content.seen == sight(one, False)[text[:, None], text]).all()


def test_an_encoder_decoder_has_three_sights() -> None:
    encoder, decoder, across = pictures(row(TEXT_TO_TEXT), causal=False, query=False)
    doc, decoder_doc = (torch.from_numpy(x) for x in (TEXT_TO_TEXT.doc, TEXT_TO_TEXT.decoder_doc))
    assert (encoder.seen == seen_by_model(see(False, doc), (8, 8))[0][:7, :7]).all()
    assert (decoder.seen == seen_by_model(see(True, decoder_doc), (12, 12))[0][:11, :11]).all()
    assert (across.seen == seen_by_model(see(False, decoder_doc, read_doc=doc), (12, 8))[0][:11, :7]).all()


def test_a_row_that_is_read_both_ways_has_two() -> None:
    place = np.arange(4)
    one = Batch(np.zeros(4, int), rank=np.stack([place, place[::-1]]), labels=np.zeros((2, 4), int))
    forward, backward = pictures(one, causal=False, query=False)
    assert (forward.seen == np.tril(np.ones((4, 4), bool))).all()
    assert (backward.seen == np.triu(np.ones((4, 4), bool))).all()


def test_small_pictures() -> None:
    assert (shrink(np.eye(4, dtype=bool), 4) == np.eye(4)).all()
    assert (shrink(np.eye(4, dtype=bool), 2) == np.eye(2)).all(), "half of a cell is enough"
    assert shrink(np.ones((5, 3), bool), 2).tolist() == [[True], [True]]
    assert Picture("x", np.ones((2, 2), bool)).title == "x: all see all"
    assert blocks(np.tril(np.ones((3, 3), bool))) == ["▕█▄ ▏", "▕▀▀▀▏"]


def test_a_drawn_picture_covers_the_cells_that_are_seen() -> None:
    seen = RNG.random((9, 7)) < 0.5
    seen[3] = seen[2]
    drawn = np.zeros_like(seen, int)
    for x, y, w, h in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", outline(seen)):
        drawn[int(y) : int(y) + int(h), int(x) : int(x) + int(w)] += 1
    assert (drawn == seen).all()


# --- words, page, terminal ----------------------------------------------------------------------------------------


def test_nothing_that_a_terminal_would_obey_is_printed() -> None:
    assert [visible(c) for c in " \n\t\x1bü"] == ["␣", "⏎", "⇥", "\\x1b", "ü"]
    tokenizer = train_tokenizer(["Grüße, die Brücke! \x1b[31m"] * 3, "byte-bpe", 300)
    text = surface(tokenizer)
    assert all(text(i).isprintable() for i in range(tokenizer.vocab.size))
    assert text(*tokenizer.encode(" die Brücke!\n")) == " die Brücke!⏎"


def test_an_objective_in_words() -> None:
    assert said({"kind": "MLM", "rate": 0.15, "choose": {"kind": "Tokens"}}) == "MLM(rate 0.15, choose Tokens)"
    assert said({"kind": "M", "parts": [{"objective": {"kind": "A"}, "weight": 1.0}]}) == "M(parts [A, weight 1])"


EVIL = "<script>alert(\"x\")</script> & 'y'"


def evil_shown() -> Shown:
    pieces = [Piece(f" {EVIL}", kind, EVIL, 1, 2, 0, 0) for kind in ("text", "masked", "number")]
    seen = View(0, [EVIL], [Strip(EVIL, pieces, 3)], [Picture(EVIL, np.eye(2, dtype=bool))])
    numbers = {"rows": 1.0, EVIL: 0.5}
    return Shown({EVIL: EVIL}, [seen], [], {}, {"shown": numbers, "sample": numbers}, {EVIL: 0.5}, {})


def test_the_page_is_escaped_and_asks_for_nothing() -> None:
    html = make_page(evil_shown()).html()
    assert "<script" not in html
    assert "alert(&quot;x&quot;)" in html
    assert "http" not in html.replace("http-equiv", "")
    assert MARK in html.split("<body>")[0]
    assert "3 places of padding" in html


def test_text_goes_the_way_it_is_written() -> None:
    for word, way in (("word", "ltr"), ("كلمة", "rtl"), ("12", "ltr")):
        pieces = [Piece(" [MASK]", "masked", word, 1, 0, 0, 0), Piece(f" {word}", "text", "", 12, 1, 0, 0)]
        assert direction(Strip("reads", pieces, 0)) == way


@pytest.mark.parametrize("colour", [False, True])
def test_the_terminal_has_colours_only_where_it_can(colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, width=70, color_system="standard" if colour else None)
    for module in (show_text, firth.console):
        monkeypatch.setattr(module, "out", console)
    strip = Strip("reads", [Piece(" a", "text", "", 10, 0, 0, 0), Piece("b", "masked", "cd", 5, 1, 1, 0)], 2)
    pictures = [Picture("left", np.eye(40, dtype=bool)), Picture("right", np.ones((2, 2), bool))]
    print_shown(Shown({"model": "m"}, [View(7, ["so."], [strip], pictures)], [], {}, **numbers()))
    text = out.getvalue()
    assert ("\x1b[" in text) is colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "a ┃·b‹cd›  + 2 places of padding" in plain
    assert "right: all see all" in plain
    assert "row 7" in plain
    assert all(len(line) <= 70 for line in plain.splitlines())


def numbers() -> dict[str, Any]:
    some = {"rows": 1.0, "asked": 0.25}
    return {"counts": {"shown": some, "sample": some}, "promises": {"asked": 0.2}, "shapes": {}}


def test_a_page_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    page = free_page(tmp_path / "new", overwrite=False)
    assert page == tmp_path / "new" / "show.html"
    assert not page.parent.exists(), "nothing is made before there is something to write"
    mine = tmp_path / "show.html"
    mine.write_text("<p>my own</p>")
    with pytest.raises(UserError, match=r"was not written by `firth show`.*--overwrite"):
        free_page(tmp_path, overwrite=False)
    assert free_page(tmp_path, overwrite=True) == mine
    make_page(evil_shown()).save(mine)
    assert free_page(tmp_path, overwrite=False) == mine
    (tmp_path / "f").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        free_page(tmp_path / "f", overwrite=False)


# --- every objective ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards by the kind of their tokenizer, with salient spans, and one of pairs of sides."""
    folder = tmp_path_factory.mktemp("shards")
    corpus, places = Corpus([corpus_file]), {}
    for kind in ("wordpiece", "byte-bpe", "unigram"):
        tokenizer = train_tokenizer((d.text for d in corpus), kind, 400)
        places[kind] = folder / kind
        prepare(corpus, tokenizer, folder / kind, salient=load_salient("default"))
        if kind == "wordpiece":
            texts = [d.text for d in corpus]
            lines = [json.dumps({"text_a": a, "text_b": b}) for a, b in pairwise(texts)]
            write_text(folder / "sides.jsonl", "\n".join(lines))
            places["sides"] = folder / "sides"
            prepare(Corpus([folder / "sides.jsonl"]), tokenizer, folder / "sides", salient=load_salient("default"))
    return places


FITS = {
    "encoder": ("bert-tiny", "wordpiece"),
    "decoder": ("gpt2-tiny", "byte-bpe"),
    "encoder-decoder": ("t5-tiny", "unigram"),
}
FITS_BETTER = {
    "tlm": ("bert-tiny", "sides"),
    "rtd": ("electra-tiny", "wordpiece"),
    "permutation-lm": ("xlnet-tiny", "wordpiece"),
    "unilm": ("unilm-tiny", "wordpiece"),
    "bart": ("bart-tiny", "byte-bpe"),
    "lm-denoising": ("gpt2-tiny", "unigram"),
    "prefix-lm-denoising": ("gpt2-tiny", "unigram"),
}


@pytest.mark.parametrize("name", NAMED)
def test_every_objective_is_shown_as_training_makes_it(name: str, shards: dict[str, Path], tmp_path: Path) -> None:
    model, kind = FITS_BETTER.get(name) or FITS[NAMED[name].shapes[0]]
    result = firth.show(
        model,
        shards[kind],
        rows=6,
        objective=name,
        output_dir=tmp_path,
        max_seq_length=64,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        seed=5,
    )
    changes = {"max_seq_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 5}
    recipe = override(pretraining(PRESETS[model], objective=NAMED[name]), changes)
    prepared = open_shards(shards[kind])
    source = row_source(recipe, prepared, held_out=False)
    step = batch_function(recipe, source, prepared.tokenizer)
    micro = [batch for number in range(2) for batch in step(number)]
    assert len(result["rows"]) == 6
    for b, found in enumerate(result["rows"]):
        batch = micro[b // 2]
        for field in Batch._fields:
            x = getattr(batch, field)
            assert found[field] == (None if x is None else x[b % 2].tolist()), field
        assert found["source"] == source.rows(np.array([b])).tokens[0].tolist()
        assert found["index"] == b
    assert result["shapes"]["tokens"] == [len(result["rows"][0]["tokens"])]
    assert json.loads(json.dumps(result)) == result
    page = Path(result["page"]).read_text(encoding="utf-8")
    assert page.count("<svg") >= 6
    assert page.count('<div class="strip">') >= 6


CLOSE = {"asked": 0.02, "masked": 0.06, "random": 0.04, "kept": 0.04, "mean_span": 0.5, "pairs": 0.12, "infilled": 0.04}


@pytest.mark.parametrize("name", ["mlm", "whole-word", "span", "rtd", "nsp", "sop", "permutation-lm", "bart"])
def test_promises_are_kept(name: str, shards: dict[str, Path]) -> None:
    model, kind = FITS_BETTER.get(name) or FITS[NAMED[name].shapes[0]]
    recipe = pretraining(PRESETS[model], objective=NAMED[name], data=str(shards[kind]), max_seq_length=96)
    vocab_size = open_shards(shards[kind]).tokenizer.vocab.size
    shown = look(override(recipe, {"model.vocab_size": vocab_size}), 2, model, "here")
    found = shown.counts["sample"]
    assert found["rows"] == 256
    for key in shown.promises.keys() & CLOSE.keys():
        assert abs(found[key] - shown.promises[key]) < CLOSE[key], (key, found[key], shown.promises[key])
    assert [row[0] for row in shown.table()][: len(shown.promises)] == [k.replace("_", " ") for k in shown.promises]


def test_an_objective_that_does_not_fit_the_rows_is_refused(shards: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective\.mean_span"):
        firth.show("t5-tiny", shards["unigram"], overrides={"objective.mean_span": 40.0}, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_parts_of_a_mixture_are_counted_and_named(shards: dict[str, Path]) -> None:
    recipe = pretraining(PRESETS["unilm-tiny"], data=str(shards["wordpiece"]), max_seq_length=32)
    recipe = override(recipe, {"model.vocab_size": open_shards(shards["wordpiece"]).tokenizer.vocab.size})
    shown = look(recipe, 8, "unilm-tiny", "here")
    for name, share in shown.promises.items():
        assert abs(shown.counts["sample"][name] - share) < 0.12
    assert sum(shown.counts["shown"][name] for name in shown.promises) == pytest.approx(1)
    assert all(seen.facts[0].startswith("part ") for seen in shown.views)
