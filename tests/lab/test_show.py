"""The preview equals the batches of training: marks, labels, attention masks and rates, for every objective."""

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
from firth.core.errors import UserError
from firth.core.files import write_text
from firth.core.html import generator_meta_tag, resolve_page_path
from firth.lab import show_text
from firth.lab.show import BatchPreview, build_batch_preview, first_rows_and_batch, format_objective, measure_rates
from firth.lab.show_page import make_show_page, mask_svg_path, text_direction
from firth.lab.show_row import (
    AttentionMaskView,
    BatchTrace,
    RowView,
    SequenceView,
    TokenView,
    build_attention_mask,
    build_attention_masks,
    build_row_view,
    downsample_mask,
    escape_character,
    infilled_spans,
    make_token_formatter,
    masked_tokens,
    trace_batch,
)
from firth.lab.show_text import half_block_lines, print_preview
from firth.models import PRESETS
from firth.models.attention import AttentionSpec, make_attention_spec
from firth.models.two_stream import make_query_stream_spec
from firth.objectives import (
    CLM,
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    BARTDenoising,
    Batch,
    CounterRNG,
    Objective,
    PermutationLM,
    RTDMLMAndCLM,
    SpanCorruptionAndMLM,
)
from firth.objectives.corruption import NoisyText
from firth.objectives.seq2seq import BARTStages
from firth.recipes import pretraining_recipe
from firth.text import Corpus, load_salient_finder
from firth.tokens import Rows, Vocabulary, open_shards, prepare, train_tokenizer
from firth.train import apply_overrides
from firth.train.dataloader import make_pretrain_batch_fn, make_row_dataset

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
    sentinel_ids=(S0, S1, S2),
    special_ids=tuple(range(10)),
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
    maskable = (tokens >= 10) | (tokens == UNK)
    return Rows(tokens, docs, np.zeros_like(tokens), maskable, np.arange(len(tokens)), **bits)


def seen_by_model(found: AttentionSpec, shape: tuple[int, int]) -> np.ndarray:
    """The mask that attention works with, written out."""
    if found.mask is not None:
        return found.mask[:, 0].expand(-1, *shape).numpy()
    return np.broadcast_to(np.tril(np.ones(shape, bool)) if found.is_causal else np.ones(shape, bool), (1, *shape))


def row(batch: Batch) -> Batch:
    return Batch(*(None if x is None else x[0] for x in batch))


def trace_of(rows: Rows, batch: Batch) -> BatchTrace:
    """Source indices of a batch whose tokens of text occur once in their row; -1 for all others."""

    def lookup(x: np.ndarray | None) -> np.ndarray | None:
        if x is None:
            return None
        found = np.where(x == IGNORE_INDEX, IGNORE_INDEX, -1)
        for b, token in np.argwhere(rows.maskable).tolist():
            found[b][x[b] == rows.input_ids[b, token]] = token
        return found

    changed = {name: lookup(getattr(batch, name)) for name in ("input_ids", "labels", "decoder_input_ids")}
    return BatchTrace(batch._replace(**changed), [None] * len(rows.input_ids))


def rates_of(rows: Rows, batch: Batch) -> dict[str, float]:
    return measure_rates(rows, batch, trace_of(rows, batch), VOCAB)


def view_of(rows: Rows, batch: Batch, objective: Any, is_causal: bool) -> RowView:
    return build_row_view(rows, batch, trace_of(rows, batch), 0, LETTERS, objective, is_causal)


def shown_pieces(strip: SequenceView) -> list[tuple[str, str, str]]:
    return [(piece.text.strip(), piece.kind, piece.original_text) for piece in strip.tokens if piece.kind != "text"]


# --- masks --------------------------------------------------------------------------------------------------------

SOURCE = rows_of("<cls> a b c d e <sep> <pad>", "<cls> f g h <unk> j k <sep>")
MASKED = Batch(
    input_ids=np.array([ids("<cls> <mask> b z d e <sep> <pad>"), ids("<cls> f g h <mask> <mask> k <sep>")]),
    document_ids=SOURCE.document_ids,
    target_positions=np.array([[1, 3, 4], [4, 5, 0]]),
    labels=np.array([ids("a c d"), [*ids("<unk> j"), IGNORE_INDEX]]),
)


def test_counts_of_masks() -> None:
    found = rates_of(SOURCE, MASKED)
    assert found == {
        "rows": 2,
        "targets": 5 / 11,  # a word that the tokenizer does not know is text
        "masked": 3 / 5,
        "random": 1 / 5,
        "kept": 1 / 5,
        "spans": 3 / 2,
        "mean_span": 5 / 3,
        "tokens_used": 15 / 16,
    }


def test_spans_are_counted_in_words_where_words_are_known() -> None:
    starts = np.array([[0, 1, 1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0, 1, 0]], bool)  # c d and <unk> j are words
    assert rates_of(SOURCE._replace(word_start=starts), MASKED)["mean_span"] == 3 / 3


def test_marks_of_masks() -> None:
    seen = view_of(SOURCE, MASKED, MLM(), False)
    assert shown_pieces(seen.sequences[0]) == [
        ("<cls>", "special", ""),
        ("<mask>", "masked", "a"),
        ("z", "random", "c"),
        ("d", "kept", ""),
        ("<sep>", "special", ""),
    ]
    assert seen.sequences[0].num_padding == 1
    assert [piece.position for piece in seen.sequences[0].tokens] == list(range(7))
    assert seen.sequences[0].tokens[1].title == "id 5, position 1, document 0"


def test_targets_of_a_query_stream_are_not_masked() -> None:
    batch = MASKED._replace(input_ids=SOURCE.input_ids, attention_rank=np.array([[0, 3, 0, 1, 2, 0, 0, 0]] * 2))
    seen = view_of(SOURCE, batch, PermutationLM(), False)
    assert [p[1:] for p in shown_pieces(seen.sequences[0])[1:4]] == [("target", "3"), ("target", "1"), ("target", "2")]
    assert {"masked", "random", "kept"}.isdisjoint(rates_of(SOURCE, batch))


# --- language models and sentinels --------------------------------------------------------------------------------


def test_clm_predicts_everything_and_a_prefix_nothing() -> None:
    rows = rows_of("a b c d")
    labels = np.array([[11, 12, 13, IGNORE_INDEX]])
    every = Batch(rows.input_ids, document_ids=rows.document_ids, labels=labels)
    assert shown_pieces(view_of(rows, every, CLM(), True).sequences[0]) == []
    assert rates_of(rows, every) == {"rows": 1, "targets": 3 / 4, "tokens_used": 1}
    labels = np.array([[IGNORE_INDEX, 12, 13, IGNORE_INDEX]])
    rest = view_of(rows, Batch(rows.input_ids, document_ids=rows.document_ids, labels=labels), CLM(), True).sequences[0]
    assert shown_pieces(rest) == [("c", "label", ""), ("d", "label", "")]
    assert [piece.is_target for piece in rest.tokens] == [False, False, True, True]


SPANS = rows_of("a b c d e </s> f g h </s>", doc=[[0] * 6 + [1] * 4])
TEXT_TO_TEXT = Batch(
    input_ids=np.array([ids("<0> c <1> </s> f <0> </s> <pad>")]),
    document_ids=np.array([[0, 0, 0, 0, 1, 1, 1, -1]]),
    labels=np.array([[*ids("<0> a b <1> d e </s> <0> g h </s>"), IGNORE_INDEX]]),
    decoder_input_ids=np.array([ids("<pad> <0> a b <1> d e <pad> <0> g h <pad>")]),
    decoder_document_ids=np.array([[0] * 7 + [1] * 5]),
)


def test_sentinels_stand_for_the_spans_of_their_own_document() -> None:
    seen = view_of(SPANS, TEXT_TO_TEXT, OBJECTIVES["span-corruption"], False)
    reads, writes = seen.sequences
    assert [p for p in shown_pieces(reads) if p[1] == "sentinel"] == [
        ("<0>", "sentinel", "a b"),
        ("<1>", "sentinel", "d e"),
        ("<0>", "sentinel", "g h"),
    ]
    assert (reads.num_padding, writes.num_padding) == (1, 1)
    assert [p[:2] for p in shown_pieces(writes)][:4] == [
        ("<0>", "sentinel"),
        ("a", "label"),
        ("b", "label"),
        ("<1>", "sentinel"),
    ]
    assert "after <pad>" in seen.notes[0]
    found = rates_of(SPANS, TEXT_TO_TEXT)
    assert (found["targets"], found["spans"], found["mean_span"]) == (6 / 8, 3, 2)
    assert (found["tokens_used"], found["decoder_used"]) == (7 / 8, 11 / 12)


def test_labels_after_the_text_in_one_row() -> None:
    rows = rows_of("a b c d </s>")
    batch = Batch(
        input_ids=np.array([ids("<0> c d </s> <0> a b </s>")]),
        document_ids=np.zeros((1, 8), int),
        target_positions=np.array([[3, 4, 5, 6, 0]]),
        labels=np.array([[*ids("<0> a b </s>"), IGNORE_INDEX]]),
    )
    pieces = view_of(rows, batch, CLM(), True).sequences[0].tokens
    assert [piece.is_target for piece in pieces] == [False] * 4 + [True] * 4
    assert (pieces[0].kind, pieces[0].original_text) == ("sentinel", "a b")
    assert (pieces[4].kind, pieces[4].original_text) == ("sentinel", "")
    assert rates_of(rows, batch)["mean_span"] == 2


# --- BART ---------------------------------------------------------------------------------------------------------

# a b c. d e f g. -> d e f g. a b c. -> [MASK] f g  a [MASK] c [MASK]; the last mask replaces nothing
TEXT = rows_of("<cls> a b c d e f g <sep>", sentence_end=np.array([[0, 0, 0, 1, 0, 0, 0, 1, 0]], bool))


def denoising(rows: Rows, tokens: str, **stages: list[int]) -> tuple[Batch, BatchTrace]:
    """A batch of one row that reads `tokens`, and its trace; stages that are not given are the ones before."""
    input_ids = np.array([ids(tokens)])
    doc = np.where(input_ids == PAD, -1, 0)
    batch = Batch(
        input_ids,
        document_ids=doc,
        labels=rows.input_ids,
        decoder_input_ids=np.roll(rows.input_ids, 1, 1),
        decoder_document_ids=0 * rows.input_ids,
    )
    texts = [np.arange(rows.input_ids.shape[1])]
    for name in BARTStages._fields[1:]:
        texts.append(np.array(stages[name]) if name in stages else texts[-1])
    masked = tokens.split()
    doc_of = {name: np.where(np.array(masked) == "<pad>", -1, 0) for name in ("deleted", "infilled", "masked")}
    whole = np.zeros(len(texts[0]), int)
    noisy = [
        NoisyText(text, doc_of.get(name, whole) if "deleted" in stages or name != "deleted" else whole, text >= 0)
        for name, text in zip(BARTStages._fields, texts, strict=True)
    ]
    traced = batch._replace(input_ids=texts[-1][None], labels=texts[0][None], decoder_input_ids=texts[0][None])
    return batch, BatchTrace(traced, [BARTStages(*noisy)])


def test_bart_by_hand() -> None:
    moved = [0, 4, 5, 6, 7, 1, 2, 3, 8]
    batch, trace = denoising(
        TEXT, "<cls> <mask> f g a <mask> c <mask> <sep>", permuted=moved, infilled=[0, -1, 6, 7, 1, -1, 3, -1, 8]
    )
    stages = trace.bart[0]
    assert stages is not None
    assert infilled_spans(stages) == {1: [4, 5], 5: [2], 7: []}
    assert masked_tokens(stages) == {}
    inputs, labels = build_row_view(TEXT, batch, trace, 0, LETTERS, OBJECTIVES["bart"], False).sequences
    assert [p for p in shown_pieces(inputs) if p[1] in ("masked", "number")] == [
        ("<mask>", "masked", "d e"),
        ("2", "number", ""),
        ("1", "number", ""),
        ("<mask>", "masked", "b"),
        ("<mask>", "masked", ""),
    ]
    assert [p[:2] for p in shown_pieces(labels) if p[1] != "special"] == [
        ("1", "number"),
        ("a", "label"),
        ("b", "hidden"),
        ("c", "label"),
        ("2", "number"),
        ("d", "hidden"),
        ("e", "hidden"),
        ("f", "label"),
        ("g", "label"),
    ]
    rates = measure_rates(TEXT, batch, trace, VOCAB)
    assert (rates["infilled"], rates["mean_span"], rates["permuted"]) == (3 / 7, 1, 1)
    assert {"deleted", "masked", "rotated"}.isdisjoint(rates)


def test_deleted_tokens() -> None:
    kept = [0, 1, 3, 4, 7, 8, -1, -1, -1]
    batch, trace = denoising(TEXT, "<cls> a c d g <sep> <pad> <pad> <pad>", deleted=kept)
    rates = measure_rates(TEXT, batch, trace, VOCAB)
    assert (rates["deleted"], rates["permuted"]) == (3 / 7, 0)
    assert {"infilled", "masked"}.isdisjoint(rates)
    labels = build_row_view(TEXT, batch, trace, 0, LETTERS, OBJECTIVES["bart"], False).sequences[1]
    assert [p[0] for p in shown_pieces(labels) if p[1] == "deleted"] == ["b", "e", "f"]


def test_masks_of_single_tokens_and_of_spans_are_told_apart() -> None:
    rows = rows_of("<cls> a b c d e f <sep>")
    tokens = "<cls> a <mask> <mask> f <sep> <pad> <pad>"
    batch, trace = denoising(rows, tokens, infilled=[0, 1, -1, 5, 6, 7, -1, -1], masked=[0, 1, -1, -1, 6, 7, -1, -1])
    stages = trace.bart[0]
    assert stages is not None
    assert infilled_spans(stages) == {2: [2, 3, 4]}
    assert masked_tokens(stages) == {3: [5]}
    rates = measure_rates(rows, batch, trace, VOCAB)
    assert (rates["infilled"], rates["mean_span"], rates["masked"]) == (1 / 2, 3, 1 / 6)


def test_rotated_documents() -> None:
    rows = rows_of("<cls> a b c d e f <sep>")
    rates = measure_rates(rows, *denoising(rows, "<cls> e f a b c d <sep>", rotated=[0, 5, 6, 1, 2, 3, 4, 7]), VOCAB)
    assert rates["rotated"] == 1
    rates = measure_rates(rows, *denoising(rows, "<cls> a b c d e f <sep>"), VOCAB)
    assert "rotated" not in rates


def test_stages_of_the_objective_have_the_noise_that_the_batch_has() -> None:
    """Every mask and every missing token of the batch is explained by the trace, with all five noises on."""
    rng = np.random.default_rng(0)
    tokens = np.concatenate([np.full((64, 1), CLS), rng.integers(10, 40, (64, 60)), np.full((64, 1), SEP)], 1)
    text = np.isin(np.arange(62), [0, 61], invert=True)[None].repeat(64, 0)
    rows = Rows(tokens, 0 * tokens, 0 * tokens, text, np.arange(64), sentence_end=rng.random(text.shape) < 0.2)
    objective = BARTDenoising(permute=0.5, rotate=0.5, delete=0.1, mask=0.1, infill=0.3)
    draws = CounterRNG(1, rows.stream_index)
    batch, trace = objective(rows, draws, VOCAB), trace_batch(objective, rows, draws, VOCAB)
    for b, stages in enumerate(trace.bart):
        assert stages is not None
        spans = infilled_spans(stages) | masked_tokens(stages)
        assert sorted(spans) == np.flatnonzero(batch.input_ids[b] == MASK).tolist()
        kept = [i for i in trace.batch.input_ids[b].tolist() if i >= 0]
        missing = np.setdiff1d(stages.rotated.input_ids, stages.deleted.input_ids).tolist()
        assert sorted(kept + missing + [i for span in spans.values() for i in span]) == list(range(62))
    rates = measure_rates(rows, batch, trace, VOCAB)
    assert abs(rates["infilled"] - 0.27) < 0.05  # 30% of the 90% that are not deleted
    assert abs(rates["deleted"] - 0.1) < 0.01


# --- attention masks ----------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
DOC = np.array([[0, 0, 0, 1, 1, 2, -1, -1], [0] * 8])
RANK = RNG.integers(0, 4, (2, 8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("doc", [None, DOC])
@pytest.mark.parametrize("rank", [None, RANK])
def test_masks_are_those_of_attention(causal: bool, doc: np.ndarray | None, rank: np.ndarray | None) -> None:
    tensors = [None if x is None else torch.from_numpy(x) for x in (doc, rank)]
    wanted = seen_by_model(make_attention_spec(causal, *tensors), (8, 8))
    for b in range(2):
        one = row(Batch(np.zeros((1, 8), int), *(None if x is None else x[b : b + 1] for x in (doc,))))
        one = one._replace(attention_rank=None if rank is None else rank[b])
        assert (build_attention_mask(one, causal) == wanted[min(b, len(wanted) - 1)]).all()
        text = np.arange(8) if doc is None else np.flatnonzero(doc[b] >= 0)
        (picture,) = build_attention_masks(one, causal, has_query_stream=False)
        assert (picture.mask == wanted[min(b, len(wanted) - 1)][text[:, None], text]).all()


def test_a_query_attends_to_earlier_targets() -> None:
    targets = np.array([[1, 4, 2], [7, 3, 0]])
    labels = np.array([[10, 10, IGNORE_INDEX], [10, 10, 10]])
    wanted = make_query_stream_spec(*map(torch.from_numpy, (DOC, RANK, targets))).mask
    assert wanted is not None
    for b in range(2):
        one = Batch(
            np.zeros(8, int), document_ids=DOC[b], attention_rank=RANK[b], target_positions=targets[b], labels=labels[b]
        )
        content, query = build_attention_masks(one, is_causal=False, has_query_stream=True)
        text = np.flatnonzero(DOC[b] >= 0)
        used = np.flatnonzero(labels[b] != IGNORE_INDEX)
        assert (query.mask == wanted[b, 0].numpy()[used[:, None], text]).all()
        assert (content.mask == build_attention_mask(one, False)[text[:, None], text]).all()


def test_an_encoder_decoder_has_three_masks() -> None:
    encoder, decoder, across = build_attention_masks(row(TEXT_TO_TEXT), is_causal=False, has_query_stream=False)
    doc, decoder_doc = (torch.from_numpy(x) for x in (TEXT_TO_TEXT.document_ids, TEXT_TO_TEXT.decoder_document_ids))
    assert (encoder.mask == seen_by_model(make_attention_spec(False, doc), (8, 8))[0][:7, :7]).all()
    assert (decoder.mask == seen_by_model(make_attention_spec(True, decoder_doc), (12, 12))[0][:11, :11]).all()
    assert (
        across.mask == seen_by_model(make_attention_spec(False, decoder_doc, key_document_ids=doc), (12, 8))[0][:11, :7]
    ).all()


def test_a_bidirectional_lm_has_two_masks() -> None:
    position = np.arange(4)
    one = Batch(np.zeros(4, int), attention_rank=np.stack([position, position[::-1]]), labels=np.zeros((2, 4), int))
    forward, backward = build_attention_masks(one, is_causal=False, has_query_stream=False)
    assert (forward.mask == np.tril(np.ones((4, 4), bool))).all()
    assert (backward.mask == np.triu(np.ones((4, 4), bool))).all()


def test_downsampled_masks() -> None:
    assert (downsample_mask(np.eye(4, dtype=bool), 4) == np.eye(4)).all()
    assert (downsample_mask(np.eye(4, dtype=bool), 2) == np.eye(2)).all(), "half of a cell is enough"
    assert downsample_mask(np.ones((5, 3), bool), 2).tolist() == [[True], [True]]
    assert AttentionMaskView("x", np.ones((2, 2), bool)).title == "x: full"
    assert half_block_lines(np.tril(np.ones((3, 3), bool))) == ["▕█▄ ▏", "▕▀▀▀▏"]


def test_the_svg_path_covers_the_true_cells() -> None:
    seen = RNG.random((9, 7)) < 0.5
    seen[3] = seen[2]
    drawn = np.zeros_like(seen, int)
    for x, y, w, h in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", mask_svg_path(seen)):
        drawn[int(y) : int(y) + int(h), int(x) : int(x) + int(w)] += 1
    assert (drawn == seen).all()


# --- words, page, terminal ----------------------------------------------------------------------------------------


def test_nothing_that_a_terminal_would_obey_is_printed() -> None:
    assert [escape_character(c) for c in " \n\t\x1bü"] == ["␣", "⏎", "⇥", "\\x1b", "ü"]
    tokenizer = train_tokenizer(["Grüße, die Brücke! \x1b[31m"] * 3, "byte-bpe", 300)
    text = make_token_formatter(tokenizer)
    assert all(text(i).isprintable() for i in range(tokenizer.vocab.size))
    assert text(*tokenizer.encode(" die Brücke!\n")) == " die Brücke!⏎"
    ids = tokenizer.encode("猫")
    assert [text(i) for i in ids] == ["\\xe7", "\\x8c", "\\xab"]  # the bytes of a part of a character
    assert text(*ids) == "猫"


def test_an_objective_in_words() -> None:
    assert (
        format_objective({"kind": "MLM", "rate": 0.15, "choose": {"kind": "Tokens"}}) == "MLM(rate 0.15, choose Tokens)"
    )
    assert (
        format_objective({"kind": "M", "parts": [{"objective": {"kind": "A"}, "weight": 1.0}]})
        == "M(parts [A, weight 1])"
    )


EVIL = "<script>alert(\"x\")</script> & 'y'"


def evil_shown() -> BatchPreview:
    pieces = [TokenView(f" {EVIL}", kind, EVIL, 1, 2, 0, 0) for kind in ("text", "masked", "number")]
    seen = RowView(0, [EVIL], [SequenceView(EVIL, pieces, 3)], [AttentionMaskView(EVIL, np.eye(2, dtype=bool))])
    numbers = {"rows": 1.0, EVIL: 0.5}
    return BatchPreview({EVIL: EVIL}, [seen], [], {}, {"shown": numbers, "sample": numbers}, {EVIL: 0.5}, {})


def test_the_page_is_escaped_and_loads_nothing() -> None:
    html = make_show_page(evil_shown()).to_html()
    assert "<script>" not in html, "the page has one module of its own, and its hash is in the policy"
    assert "alert(&#34;x&#34;)" in html
    assert "http" not in html.replace("http-equiv", "")
    assert generator_meta_tag("show") in html.split("<body>")[0]
    assert "3 padding tokens" in html


def test_text_direction() -> None:
    for word, way in (("word", "ltr"), ("كلمة", "rtl"), ("12", "ltr")):
        pieces = [TokenView(" [MASK]", "masked", word, 1, 0, 0, 0), TokenView(f" {word}", "text", "", 12, 1, 0, 0)]
        assert text_direction(SequenceView("reads", pieces, 0)) == way


@pytest.mark.parametrize("colour", [False, True])
def test_the_terminal_has_colours_only_where_it_can(colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, width=70, color_system="standard" if colour else None)
    for module in (show_text, firth.core.console):
        monkeypatch.setattr(module, "stdout_console", console)
    strip = SequenceView(
        "reads", [TokenView(" a", "text", "", 10, 0, 0, 0), TokenView("b", "masked", "cd", 5, 1, 1, 0)], 2
    )
    pictures = [AttentionMaskView("left", np.eye(40, dtype=bool)), AttentionMaskView("right", np.ones((2, 2), bool))]
    print_preview(BatchPreview({"model": "m"}, [RowView(7, ["so."], [strip], pictures)], [], {}, **numbers()))
    text = out.getvalue()
    assert ("\x1b[" in text) is colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "a ┃·b‹cd›  + 2 padding tokens" in plain
    assert "right: full" in plain
    assert "row 7" in plain
    assert all(len(line) <= 70 for line in plain.splitlines())


def numbers() -> dict[str, Any]:
    some = {"rows": 1.0, "targets": 0.25}
    return {"counts": {"shown": some, "sample": some}, "expected_rates": {"targets": 0.2}, "shapes": {}}


def test_a_foreign_page_is_not_overwritten(tmp_path: Path) -> None:
    page = resolve_page_path(tmp_path / "new", "show", overwrite=False)
    assert page == tmp_path / "new" / "show.html"
    assert not page.parent.exists(), "nothing is made before there is something to write"
    mine = tmp_path / "show.html"
    mine.write_text("<p>my own</p>")
    with pytest.raises(UserError, match=r"was not written by `firth show`.*--overwrite"):
        resolve_page_path(tmp_path, "show", overwrite=False)
    assert resolve_page_path(tmp_path, "show", overwrite=True) == mine
    make_show_page(evil_shown()).save(mine)
    assert resolve_page_path(tmp_path, "show", overwrite=False) == mine
    (tmp_path / "f").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        resolve_page_path(tmp_path / "f", "show", overwrite=False)


# --- every objective ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards by the kind of their tokenizer, with salient spans, and one of pairs of sides."""
    folder = tmp_path_factory.mktemp("shards")
    corpus, folders = Corpus([corpus_file]), {}
    for kind in ("wordpiece", "byte-bpe", "unigram"):
        tokenizer = train_tokenizer((d.text for d in corpus), kind, 400)
        folders[kind] = folder / kind
        prepare(corpus, tokenizer, folder / kind, salient=load_salient_finder("default"))
        if kind == "wordpiece":
            texts = [d.text for d in corpus]
            lines = [json.dumps({"text_a": a, "text_b": b}) for a, b in pairwise(texts)]
            write_text(folder / "sides.jsonl", "\n".join(lines))
            folders["sides"] = folder / "sides"
            prepare(
                Corpus([folder / "sides.jsonl"]), tokenizer, folder / "sides", salient=load_salient_finder("default")
            )
    return folders


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
    "autoencoder": ("ulmfit-tiny", "byte-bpe"),
    "lm-denoising": ("gpt2-tiny", "unigram"),
    "prefix-lm-denoising": ("gpt2-tiny", "unigram"),
}


@pytest.mark.parametrize(
    ("model", "changed", "kind"),
    [
        ("bert-tiny", RTDMLMAndCLM(masked_share=1.0, detected_share=1.0), "wordpiece"),
        ("t5-tiny", SpanCorruptionAndMLM(detected_share=1.0), "unigram"),
    ],
)
def test_masks_that_a_generator_fills_are_shown(
    model: str, changed: Objective, kind: str, shards: dict[str, Path]
) -> None:
    recipe = pretraining_recipe(PRESETS[model], objective=changed, max_seq_length=64, data=str(shards[kind]))
    vocab_size = open_shards(shards[kind]).tokenizer.vocab.size
    (view,) = build_batch_preview(apply_overrides(recipe, {"model.vocab_size": vocab_size}), 1, model, "here").views
    assert any(note.startswith("A small generator fills the masks") for note in view.notes)
    masks = [token for token in view.sequences[0].tokens if token.kind == "masked"]
    assert len(masks) > 3
    assert all(token.original_text for token in masks)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_shown_as_training_makes_it(name: str, shards: dict[str, Path], tmp_path: Path) -> None:
    model, kind = FITS_BETTER.get(name) or FITS[OBJECTIVES[name].architectures[0]]
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
    recipe = apply_overrides(pretraining_recipe(PRESETS[model], objective=OBJECTIVES[name]), changes)
    prepared = open_shards(shards[kind])
    source = make_row_dataset(recipe, prepared, held_out=False)
    step = make_pretrain_batch_fn(recipe, source, prepared.tokenizer)
    micro = [batch for number in range(2) for batch in step(number)]
    assert len(result["rows"]) == 6
    for b, found in enumerate(result["rows"]):
        batch = micro[b // 2]
        for field in Batch._fields:
            x = getattr(batch, field)
            assert found[field] == (None if x is None else x[b % 2].tolist()), field
        assert found["source"] == source.get_rows(np.array([b])).input_ids[0].tolist()
        assert found["index"] == b
    assert result["shapes"]["input_ids"] == [len(result["rows"][0]["input_ids"])]
    assert json.loads(json.dumps(result)) == result
    page = Path(result["page"]).read_text(encoding="utf-8")
    assert page.count("<svg") >= 6
    assert page.count('<div class="strip">') >= 6


@pytest.mark.parametrize("name", ["mlm", "nsp", "span-corruption", "permutation-lm", "masked-next-token"])
def test_of_a_large_batch_only_the_rows_that_are_shown_are_made(name: str, shards: dict[str, Path]) -> None:
    model, kind = FITS_BETTER.get(name) or FITS[OBJECTIVES[name].architectures[0]]
    changes = {"max_seq_length": 64, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    recipe = apply_overrides(pretraining_recipe(PRESETS[model], objective=OBJECTIVES[name]), changes)
    prepared = open_shards(shards[kind])
    source = make_row_dataset(recipe, prepared, held_out=False)
    whole = make_pretrain_batch_fn(recipe, source, prepared.tokenizer)(0)[0]
    _, shown = first_rows_and_batch(recipe, source, prepared.tokenizer, 3)
    for field, x in shown._asdict().items():
        assert (x is None) == (getattr(whole, field) is None), field
        assert x is None or np.array_equal(x, getattr(whole, field)[:3]), field


CLOSE = {
    "targets": 0.02,
    "masked": 0.06,
    "random": 0.04,
    "kept": 0.04,
    "mean_span": 0.5,
    "pairs": 0.12,
    "infilled": 0.04,
}


@pytest.mark.parametrize("name", ["mlm", "whole-word", "span", "rtd", "nsp", "albert", "permutation-lm", "bart"])
def test_measured_rates_are_the_expected_ones(name: str, shards: dict[str, Path]) -> None:
    model, kind = FITS_BETTER.get(name) or FITS[OBJECTIVES[name].architectures[0]]
    recipe = pretraining_recipe(PRESETS[model], objective=OBJECTIVES[name], data=str(shards[kind]), max_seq_length=96)
    vocab_size = open_shards(shards[kind]).tokenizer.vocab.size
    shown = build_batch_preview(apply_overrides(recipe, {"model.vocab_size": vocab_size}), 2, model, "here")
    found = shown.counts["sample"]
    assert found["rows"] == 256
    for key in shown.expected_rates.keys() & CLOSE.keys():
        assert abs(found[key] - shown.expected_rates[key]) < CLOSE[key], (key, found[key], shown.expected_rates[key])
    assert [row[0] for row in shown.rate_table()][: len(shown.expected_rates)] == [
        k.replace("_", " ") for k in shown.expected_rates
    ]


@pytest.mark.parametrize(("name", "model"), [("span-corruption", "t5-tiny"), ("lm-denoising", "gpt2-tiny")])
def test_short_rows_promise_whole_spans(name: str, model: str, shards: dict[str, Path]) -> None:
    """Rows of 64 have 3 or 4 spans of 10 or 11 tokens: what is promised is what they have, not a mean of 3.0."""
    recipe = pretraining_recipe(
        PRESETS[model], objective=OBJECTIVES[name], data=str(shards["unigram"]), max_seq_length=64
    )
    vocab_size = open_shards(shards["unigram"]).tokenizer.vocab.size
    shown = build_batch_preview(apply_overrides(recipe, {"model.vocab_size": vocab_size}), 2, model, "here")
    for key in ("targets", "mean_span"):
        assert shown.counts["sample"][key] == pytest.approx(shown.expected_rates[key], rel=0.01)
    assert shown.expected_rates["mean_span"] != 3.0


def test_an_objective_that_does_not_fit_the_rows_is_refused(shards: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective\.mean_span"):
        firth.show("t5-tiny", shards["unigram"], overrides={"objective.mean_span": 40.0}, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_parts_of_a_mixture_have_rates_and_notes(shards: dict[str, Path]) -> None:
    recipe = pretraining_recipe(PRESETS["unilm-tiny"], data=str(shards["wordpiece"]), max_seq_length=32)
    recipe = apply_overrides(recipe, {"model.vocab_size": open_shards(shards["wordpiece"]).tokenizer.vocab.size})
    shown = build_batch_preview(recipe, 8, "unilm-tiny", "here")
    for name, share in shown.expected_rates.items():
        assert abs(shown.counts["sample"][name] - share) < 0.12
    assert sum(shown.counts["shown"][name] for name in shown.expected_rates) == pytest.approx(1)
    assert all(seen.notes[0].startswith("part ") for seen in shown.views)


@pytest.mark.parametrize("rows", [0, 10_001, 2**63])
def test_rows_beyond_any_page_are_refused_before_anything_is_read(rows: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--rows is \d+, and must be from 1 to 10,000"):
        firth.show("bert-tiny", tmp_path / "missing.txt", rows=rows, output_dir=tmp_path)
