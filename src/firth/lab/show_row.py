"""One row as a person reads it: tokens with marks, labels, and attention masks.

Marks come from source indices (`objectives.base.trace_sources`): the objective also runs on positions in place of token
ids, so each token of the batch is known to be a token of the source row or an inserted one.

Shapes: B rows, L positions of the source row, T of the model's input, U of the decoder, K target slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from firth.core.console import escape_character
from firth.objectives import (
    IGNORE_INDEX,
    BARTDenoising,
    Batch,
    CLMThenMLM,
    CounterRNG,
    MaskedNextToken,
    Mixture,
    Objective,
)
from firth.objectives.base import index_rows, index_vocabulary, trace_sources
from firth.objectives.corruption import NoisyText
from firth.objectives.seq2seq import BARTStages
from firth.objectives.visibility import visibility_matrix
from firth.tokens import Rows, Tokenizer, Vocabulary
from firth.tokens.token_bytes import byte_level_bytes

RowsOrBatch = TypeVar("RowsOrBatch", Rows, Batch)
TokenFormatter = Callable[..., str]  # consecutive token ids -> their text
TOKEN_KINDS = {
    "masked": "replaced by a mask; the original is beside it",
    "random": "replaced by a random token, and a target",
    "kept": "kept, and a target",
    "target": "a target of the query stream, which does not see it; the number is its order",
    "sentinel": "stands for the span that is given with it",
    "label": "the model has to predict it",
    "hidden": "a label, hidden behind a mask of the input",
    "deleted": "a label, deleted from the input",
    "reward": "the reward is read here",
    "number": "original order of this sentence",
    "special": "special token",
}
GENERATOR_NOTE = "A small generator fills the masks; the model then classifies every token as original or replaced."
PAIR_LABEL_MEANINGS = {  # by row layout: what labels 0 and 1 of a pair mean
    "next": ("the second text follows the first", "random next: the second text is from another document"),
    "order": ("in order", "swapped: the second text comes before the first"),
}


class TokenView(NamedTuple):
    """One token; `original_text` is the text that it replaces or stands for."""

    text: str  # starts with a space where the token does
    kind: str  # one of TOKEN_KINDS, or "text"
    original_text: str
    id: int
    position: int
    document: int
    token_type: int
    is_target: bool = False  # predicted from the tokens before it, in a decoder's row

    @property
    def title(self) -> str:
        return f"id {self.id}, position {self.position}, document {self.document}"


class SequenceView(NamedTuple):
    """One sequence of a row: an input or the labels."""

    name: str
    tokens: list[TokenView]
    num_padding: int


class AttentionMaskView(NamedTuple):
    """An attention mask: `mask[i, j]` is whether i attends to j. Padding is left out."""

    name: str
    mask: np.ndarray

    @property
    def title(self) -> str:
        return f"{self.name}: full" if self.mask.all() else self.name


class RowView(NamedTuple):
    """Everything that is shown of a row."""

    row_index: int | str  # in the stream of all rows; of an example its id
    notes: list[str]
    sequences: list[SequenceView]
    attention_masks: list[AttentionMaskView]


class TokenMark(NamedTuple):
    """The mark of one position: its kind, the ids that it replaces, its order among the targets."""

    kind: str
    original_ids: Sequence[int] = ()
    is_target: bool = False
    prediction_order: int = 0


# --- source indices -----------------------------------------------------------------------------------------------


class RowTrace(NamedTuple):
    """Source indices of one row of a batch, and of each stage of BART's noise where the row has it."""

    batch: Batch
    bart: BARTStages | None


class BatchTrace(NamedTuple):
    """Source indices of a batch (see `trace_sources`), and for each row those of BART's stages, arrays (L,)."""

    batch: Batch
    bart: Sequence[BARTStages | None]

    def row(self, b: int) -> RowTrace:
        return RowTrace(select_row(self.batch, b), self.bart[b])


def trace_batch(objective: Objective, rows: Rows, rng: CounterRNG, vocab: Vocabulary) -> BatchTrace:
    """Run the objective on positions in place of token ids."""
    parts = [part.objective for part in objective.parts] if isinstance(objective, Mixture) else [objective]
    part_B = objective.sample_parts(rng) if isinstance(objective, Mixture) else np.zeros(len(rows.input_ids), int)
    index_args = index_rows(rows), rng, index_vocabulary(vocab)
    stages = [part.corrupt(*index_args) if isinstance(part, BARTDenoising) else None for part in parts]
    bart = [None if stages[i] is None else select_stages(stages[i], b) for b, i in enumerate(part_B.tolist())]
    return BatchTrace(trace_sources(objective, rows, rng, vocab), bart)


def select_stages(stages: BARTStages, b: int) -> BARTStages:
    """Return the stages of row `b`, arrays (L,)."""
    return BARTStages(*(NoisyText(*(x[b] for x in text)) for text in stages))


def select_row(rows: RowsOrBatch, b: int) -> RowsOrBatch:
    """Return row `b` of Rows or of a Batch; its arrays have no B."""
    return type(rows)(*(None if x is None else x[b] for x in rows))  # type: ignore[arg-type]


def predicts_in_place(trace: Batch) -> np.ndarray:
    """Return the rows (B,) whose targets are predicted at their own position, as in MLM, not as the next token."""
    if trace.target_positions is None or trace.decoder_input_ids is not None:
        return np.zeros(len(trace.input_ids), bool)
    return ((trace.labels == trace.target_positions) | (trace.labels == IGNORE_INDEX)).all(1)


def infilled_spans(stages: BARTStages) -> dict[int, list[int]]:
    """Return the source positions that each infilled [MASK] of a row replaces, none for an inserted one.

    The mask of a span stands right after the last token before the span, and no two spans are adjacent.
    """
    before, after = stages.deleted, stages.infilled
    is_mask = (after.input_ids < 0) & (after.document_ids >= 0)
    spans: dict[int, list[int]] = {i: [] for i in np.flatnonzero(is_mask).tolist()}
    position = {source: i for i, source in enumerate(after.input_ids.tolist()) if source >= 0}
    last = -1
    for source in before.input_ids[before.document_ids >= 0].tolist():
        if source in position:
            last = position[source]
        else:
            spans[last + 1].append(source)
    return spans


def masked_tokens(stages: BARTStages) -> dict[int, list[int]]:
    """Return the source position that each [MASK] of a single token replaces."""
    pairs = enumerate(zip(stages.infilled.input_ids.tolist(), stages.masked.input_ids.tolist(), strict=True))
    return {i: [before] for i, (before, after) in pairs if before >= 0 > after}


def is_text_token(token_ids: np.ndarray, vocab: Vocabulary) -> np.ndarray:
    """Return which ids are text; an unknown word counts as text."""
    return ~np.isin(token_ids, [i for i in vocab.special_ids if i != vocab.unk]) & (token_ids >= 0)


# --- sequences ----------------------------------------------------------------------------------------------------


def build_row_view(
    rows: Rows, batch: Batch, trace: BatchTrace, b: int, tokenizer: Tokenizer, objective: Any, is_causal: bool
) -> RowView:
    """Return the view of row `b`."""
    batch_row, format_tokens = select_row(batch, b), make_token_formatter(tokenizer)
    has_query_stream = "query" in getattr(objective, "extras", ())
    return RowView(
        row_index=int(rows.stream_index[b]),
        notes=describe_row(batch_row, objective, format_tokens),
        sequences=build_sequences(
            select_row(rows, b),
            batch_row,
            trace.row(b),
            tokenizer.vocab,
            format_tokens,
            bool(predicts_in_place(trace.batch)[b]),
            has_query_stream,
            masked_row_shift(batch_row, objective),
        ),
        attention_masks=build_attention_masks(batch_row, is_causal, has_query_stream),
    )


def build_sequences(
    source_row: Rows,
    batch_row: Batch,
    trace: RowTrace,
    vocab: Vocabulary,
    format_tokens: TokenFormatter,
    in_place: bool,
    has_query_stream: bool,
    masked_shift: int | None = None,
) -> list[SequenceView]:
    """Return the input of a row and, for an encoder-decoder, the decoder's labels.

    `in_place`: targets are predicted at their own positions, as in MLM. `has_query_stream`: by XLNet's second stream.
    `masked_shift`: positions from a label to its masked token, in a row of `masked-next-token` or `mlm-and-clm`.
    """
    doc = np.zeros(len(batch_row.input_ids), int) if batch_row.document_ids is None else batch_row.document_ids
    marks = default_marks(batch_row.input_ids, vocab)
    if batch_row.decoder_input_ids is not None:
        return build_encoder_decoder_sequences(source_row, batch_row, trace, doc, marks, vocab, format_tokens)
    if in_place or masked_shift is not None:
        targets = [i + (masked_shift or 0) for i in labels_by_position(batch_row)] + generator_targets(batch_row)
        marks |= mark_mlm_noise(source_row, batch_row, trace.batch, vocab, has_query_stream, targets)
    else:
        marks |= mark_next_token_targets(batch_row, doc)
        marks |= mark_sentinels(batch_row, vocab, marks)
    return [build_sequence("input", batch_row.input_ids, doc, marks, format_tokens, batch_row.token_type_ids)]


def masked_row_shift(batch_row: Batch, objective: Any) -> int | None:
    """Positions from a label to its masked token; None for a causal row and for other objectives."""
    is_masked = isinstance(objective, MaskedNextToken) and not batch_row.attention_rank.any()
    return objective.label_shift if is_masked else None


def build_encoder_decoder_sequences(
    source_row: Rows,
    batch_row: Batch,
    trace: RowTrace,
    document_ids: np.ndarray,
    marks: dict[int, TokenMark],
    vocab: Vocabulary,
    format_tokens: TokenFormatter,
) -> list[SequenceView]:
    """Return the encoder's input and the decoder's labels; the decoder's input is the labels shifted right."""
    label_doc = np.where(batch_row.labels == IGNORE_INDEX, -1, batch_row.decoder_document_ids)
    label_marks = default_marks(batch_row.labels, vocab, "label")
    label_marks |= {i: TokenMark("sentinel") for i, label in enumerate(batch_row.labels) if label in vocab.sentinel_ids}
    input_numbers: dict[int, int] = {}
    label_numbers: dict[int, int] = {}
    if trace.bart is None:
        marks |= mark_sentinels(batch_row, vocab, marks) | mark_encoder_targets(batch_row)
    else:  # BART's label at position i is source token i
        spans = infilled_spans(trace.bart) | masked_tokens(trace.bart)
        marks |= {i: TokenMark("masked", source_row.input_ids[span].tolist()) for i, span in spans.items()}
        deleted = np.setdiff1d(np.flatnonzero(source_row.maskable), trace.batch.input_ids).tolist()
        label_marks |= dict.fromkeys(deleted, TokenMark("deleted"))
        label_marks |= {i: TokenMark("hidden") for span in spans.values() for i in span}
        input_numbers, label_numbers = number_moved_sentences(source_row, trace.batch)
    return [
        build_sequence(
            "encoder input",
            batch_row.input_ids,
            document_ids,
            marks,
            format_tokens,
            batch_row.token_type_ids,
            input_numbers,
        ),
        build_sequence(
            "decoder labels", batch_row.labels, label_doc, label_marks, format_tokens, number_by_position=label_numbers
        ),
    ]


def mark_encoder_targets(batch_row: Batch) -> dict[int, TokenMark]:
    """Return the marks of the masked tokens that the encoder predicts itself, or that a generator fills."""
    if batch_row.encoder_labels is None:
        return {}
    targets = zip(batch_row.encoder_target_positions.tolist(), batch_row.encoder_labels.tolist(), strict=True)
    marks = {i: TokenMark("masked", [label]) for i, label in targets if label != IGNORE_INDEX}
    if batch_row.generator_labels is None:
        return marks
    filled = zip(batch_row.generator_positions.tolist(), batch_row.generator_labels.tolist(), strict=True)
    return marks | {i: TokenMark("masked", [label]) for i, label in filled if label != IGNORE_INDEX}


def default_marks(token_ids: np.ndarray, vocab: Vocabulary, kind: str = "text") -> dict[int, TokenMark]:
    return {i: TokenMark(kind if is_text else "special") for i, is_text in enumerate(is_text_token(token_ids, vocab))}


def build_sequence(
    name: str,
    token_ids: np.ndarray,
    document_ids: np.ndarray,
    marks: dict[int, TokenMark],
    format_tokens: TokenFormatter,
    token_type_ids: np.ndarray | None = None,
    number_by_position: dict[int, int] | None = None,
) -> SequenceView:
    tokens = []
    for i in np.flatnonzero(document_ids >= 0).tolist():
        mark, token_type = marks[i], 0 if token_type_ids is None else int(token_type_ids[i])
        if number_by_position and i in number_by_position:
            tokens.append(TokenView(f" {number_by_position[i]}", "number", "", -1, i, int(document_ids[i]), token_type))
        text = format_tokens(int(token_ids[i]))
        original = str(mark.prediction_order or "")
        if len(mark.original_ids):
            original = format_tokens(*map(int, mark.original_ids))
        if mark.kind in ("masked", "sentinel") and original and not original.startswith(" "):
            text = text.lstrip(" ")  # it replaces the rest of a word
        token_id, doc = int(token_ids[i]), int(document_ids[i])
        tokens.append(TokenView(text, mark.kind, original.strip(), token_id, i, doc, token_type, mark.is_target))
    return SequenceView(name, tokens, int((document_ids < 0).sum()))


def labels_by_position(batch_row: Batch) -> dict[int, int]:
    """Return the label of each target position; of a bidirectional LM, those of the forward direction."""
    labels = batch_row.labels if batch_row.labels.ndim == 1 else batch_row.labels[0]
    positions = np.arange(len(labels)) if batch_row.target_positions is None else batch_row.target_positions
    return {int(i): int(label) for i, label in zip(positions, labels, strict=True) if label != IGNORE_INDEX}


def generator_targets(batch_row: Batch) -> list[int]:
    """Return the positions of the masks that a generator fills."""
    if batch_row.generator_labels is None:
        return []
    return batch_row.generator_positions[batch_row.generator_labels != IGNORE_INDEX].tolist()


def mark_next_token_targets(batch_row: Batch, document_ids: np.ndarray) -> dict[int, TokenMark]:
    """Mark the tokens that are predicted from the previous position, unless these are all tokens."""
    predicted = {i + 1 for i in labels_by_position(batch_row)}
    inner = set(np.flatnonzero((document_ids[1:] == document_ids[:-1]) & (document_ids[1:] >= 0)) + 1)
    return {} if inner <= predicted else {i: TokenMark("label", is_target=True) for i in predicted}


def mark_mlm_noise(
    source_row: Rows,
    batch_row: Batch,
    trace_row: Batch,
    vocab: Vocabulary,
    has_query_stream: bool,
    targets: Sequence[int],
) -> dict[int, TokenMark]:
    """Mark targets as masked, random or kept; those of a query stream by the order of prediction."""
    marks = {}
    for i in targets:
        if trace_row.input_ids[i] < 0:
            kind = "masked" if batch_row.input_ids[i] == vocab.mask else "random"
            marks[i] = TokenMark(kind, [int(source_row.input_ids[i])])
        elif has_query_stream:
            rank = batch_row.attention_rank
            earlier = 0 if rank is None else int((rank[targets] < rank[i]).sum())
            marks[i] = TokenMark("target", prediction_order=earlier + 1)
        else:
            marks[i] = TokenMark("kept")
    return marks


def mark_sentinels(batch_row: Batch, vocab: Vocabulary, marks: dict[int, TokenMark]) -> dict[int, TokenMark]:
    """Mark sentinels with their spans: the n-th sentinel of the input is the n-th of the labels."""
    if batch_row.labels.ndim == 2:
        return {}
    spans: list[list[int]] = []
    for label, is_text in zip(batch_row.labels.tolist(), is_text_token(batch_row.labels, vocab), strict=True):
        if label in vocab.sentinel_ids:
            spans.append([])
        elif is_text and spans:
            spans[-1].append(label)
    positions = [i for i, token in enumerate(batch_row.input_ids.tolist()) if token in vocab.sentinel_ids]
    in_text = [i for i in positions if not marks[i].is_target]
    sentinels = {i: TokenMark("sentinel", is_target=True) for i in positions}
    return sentinels | {i: TokenMark("sentinel", span) for i, span in zip(in_text, spans, strict=True)}


def number_moved_sentences(source_row: Rows, trace_row: Batch) -> tuple[dict[int, int], dict[int, int]]:
    """Return sentence numbers by the position where each sentence starts, in BART's input and in its labels.

    Both are empty where the order did not change.
    """
    source_T = trace_row.input_ids
    kept = np.flatnonzero((source_T >= 0) & source_row.maskable[source_T])
    if source_row.sentence_end is None or (np.diff(source_T[kept]) > 0).all():
        return {}, {}
    number_L = np.cumsum(source_row.sentence_end) - source_row.sentence_end + 1
    text = np.flatnonzero(source_row.maskable)
    return first_position_of_runs(kept, number_L[source_T]), first_position_of_runs(text, number_L)


def first_position_of_runs(positions: np.ndarray, run_ids: np.ndarray) -> dict[int, int]:
    """Return the first of each run of positions with the same id."""
    return {next(group): n for n, group in groupby(positions.tolist(), lambda i: int(run_ids[i]))}


# --- notes --------------------------------------------------------------------------------------------------------


def describe_row(batch_row: Batch, objective: Any, format_tokens: TokenFormatter) -> list[str]:
    """Return notes on a row: its pair label, how the decoder reads, further losses."""
    notes = []
    if batch_row.pair_labels is not None:
        label = int(batch_row.pair_labels)
        meanings = PAIR_LABEL_MEANINGS.get(getattr(objective, "row_layout", ""), ("it follows", "it does not follow"))
        notes.append(f"pair: {label}, {meanings[label]}")
    if batch_row.decoder_input_ids is not None:
        start = format_tokens(int(batch_row.decoder_input_ids[0])).strip()
        notes.append(f"The decoder reads its labels shifted right, after {start}.")
        if batch_row.encoder_labels is not None:
            by_generator = generator_targets(batch_row)
            notes.append(GENERATOR_NOTE if by_generator else "The encoder predicts its masked tokens itself.")
    elif batch_row.labels is not None and batch_row.labels.ndim == 2:
        notes.append("Every token is predicted twice: from all tokens before it, and from all tokens after it.")
    elif isinstance(objective, MaskedNextToken):
        shift = masked_row_shift(batch_row, objective)
        where = "its own position" if shift == 0 else "the position before it"
        notes.append(
            GENERATOR_NOTE
            if generator_targets(batch_row)
            else "A causal row: each token is predicted from the tokens before it."
            if shift is None
            else f"A masked row: each target is predicted at {where}, and every token attends to all."
        )
    elif isinstance(objective, CLMThenMLM):
        notes.append(
            f"The first {100 * objective.clm_share:g}% of the steps: each token is predicted from the tokens before "
            "it. The steps after them mask tokens, and every token attends to all."
        )
    elif batch_row.target_positions is None:
        notes.append(
            "Each token is predicted from the tokens before it."
            if batch_row.attention_rank is None
            else "Only marked tokens are predicted."
        )
    if "generator" in getattr(objective, "extras", ()):
        notes.append(GENERATOR_NOTE)
    if batch_row.span_boundaries is not None and (batch_row.labels != IGNORE_INDEX).any():
        spans = "; ".join(describe_span_boundaries(batch_row, format_tokens))
        notes.append(f"Each span is also predicted from its boundary tokens: {spans}.")
    return notes


def describe_span_boundaries(batch_row: Batch, format_tokens: TokenFormatter) -> Iterable[str]:
    """Yield each target span between its two boundary tokens."""
    slots = np.flatnonzero(batch_row.labels != IGNORE_INDEX)
    for boundaries, span in groupby(slots, lambda k: tuple(batch_row.span_boundaries[k, :2].tolist())):
        text = format_tokens(*(int(batch_row.labels[k]) for k in span))
        left, right = (format_tokens(int(batch_row.input_ids[i])).strip() for i in boundaries)
        yield f"{left} ‹{text.strip()}› {right}"


def make_token_formatter(tokenizer: Tokenizer) -> TokenFormatter:
    """Return a function from token ids to printable text, with a leading space where a word starts."""
    special = set(tokenizer.vocab.special_ids)

    def format_token(i: int) -> str:
        token = tokenizer.backend.id_to_token(i) or f"<{i}>"
        if i in special:
            return " " + token
        if tokenizer.kind == "wordpiece":
            return token[2:] if token.startswith("##") else " " + token
        if tokenizer.kind in ("elmo-characters", "word"):
            return " " + token
        if tokenizer.kind == "char":
            return token
        return token.replace("▁", " ").replace("</w>", " ")

    @cache
    def format_tokens(*ids: int) -> str:
        if tokenizer.kind == "byte-bpe" and special.isdisjoint(ids):
            text = tokenizer.decode(ids)  # a character may consist of several tokens
            if "\ufffd" in text:  # a part of one: its bytes
                pieces = [byte_level_bytes(str(tokenizer.backend.id_to_token(i))) for i in ids]
                text = b"".join(pieces).decode(errors="backslashreplace")
        else:
            text = "".join(map(format_token, ids))
        start = " " if text.startswith(" ") and text.strip(" ") else ""
        rest = text[len(start) :]
        return start + "".join(c if c == " " and len(ids) > 1 else escape_character(c) for c in rest)

    return format_tokens


# --- attention masks ----------------------------------------------------------------------------------------------


def build_attention_mask(batch_row: Batch, is_causal: bool, is_strict: bool = False) -> np.ndarray:
    """Return the attention mask of one stack (T, T), or (2, T, T) for a bidirectional LM, as the model builds it."""
    T = len(batch_row.input_ids)
    rank = batch_row.attention_rank
    if rank is None:
        rank = np.arange(T) if is_causal else np.zeros(T, int)
    masks = np.stack([visibility_matrix(batch_row.document_ids, r, is_strict) for r in np.atleast_2d(rank)])
    return masks if rank.ndim == 2 else masks[0]


def build_attention_masks(batch_row: Batch, is_causal: bool, has_query_stream: bool) -> list[AttentionMaskView]:
    """Return every attention mask of the model, without padding."""
    T = len(batch_row.input_ids)
    text = np.arange(T) if batch_row.document_ids is None else np.flatnonzero(batch_row.document_ids >= 0)
    mask = build_attention_mask(batch_row, is_causal and batch_row.decoder_input_ids is None)[..., text[:, None], text]
    if batch_row.decoder_input_ids is not None:
        used = np.flatnonzero(batch_row.labels != IGNORE_INDEX)
        decoder = Batch(batch_row.decoder_input_ids, document_ids=batch_row.decoder_document_ids)
        cross = (
            np.ones((len(batch_row.labels), T), bool)
            if batch_row.document_ids is None
            else batch_row.decoder_document_ids[:, None] == batch_row.document_ids
        )
        return [
            AttentionMaskView("encoder", mask),
            AttentionMaskView("decoder", build_attention_mask(decoder, is_causal=True)[used[:, None], used]),
            AttentionMaskView("cross-attention", cross[used[:, None], text]),
        ]
    if mask.ndim == 3:
        return [AttentionMaskView("forward", mask[0]), AttentionMaskView("backward", mask[1])]
    if has_query_stream:
        targets = batch_row.target_positions[batch_row.labels != IGNORE_INDEX]
        query_mask = build_attention_mask(batch_row, is_causal, is_strict=True)[targets[:, None], text]
        return [AttentionMaskView("content stream", mask), AttentionMaskView("query stream (targets)", query_mask)]
    return [AttentionMaskView("attention mask", mask)]


def downsample_mask(mask: np.ndarray, max_cells: int) -> np.ndarray:
    """Return the mask with at most `max_cells` cells a side; a cell is True where half of it is."""
    size = -(-max(mask.shape) // max_cells)
    rows, columns = (-(-n // size) for n in mask.shape)
    share = np.full((rows * size, columns * size), np.nan)
    share[: mask.shape[0], : mask.shape[1]] = mask
    return np.nanmean(share.reshape(rows, size, columns, size), axis=(1, 3)) >= 0.5
