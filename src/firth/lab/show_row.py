"""One row as a person sees it: tokens with marks, answers, and who sees whom.

Everything is read off the fields of `Batch` and the row before noise, so that an objective that is added later is
shown too. L places of the source, T places that are read, U of the decoder, K asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from firth.objectives import IGNORE_INDEX, Batch
from firth.objectives.visibility import visibility_matrix
from firth.tokens import Rows, Tokenizer, Vocabulary

RowsOrBatch = TypeVar("RowsOrBatch", Rows, Batch)
TokenFormatter = Callable[..., str]  # ids of tokens, one after the other -> how they look
TOKEN_KINDS = {
    "masked": "hidden; what stood there is given with it",
    "random": "replaced by a random token, and asked",
    "kept": "left as it was, and asked",
    "asked": "asked, and unseen by the query that answers; the number is its turn",
    "sentinel": "stands for the span that is given with it",
    "answer": "asked: the model has to write it",
    "hidden": "asked, and hidden in what is read",
    "deleted": "asked, and deleted without a trace",
    "number": "where this sentence stood before the order was changed",
    "special": "special token",
}
PAIR_LABEL_MEANINGS = {  # by the rows that an objective reads: what the two labels of a pair mean
    "next": ("the second text follows the first", "random next: the second text is from elsewhere"),
    "order": ("in order", "swapped: the second text stood before the first"),
}


class TokenView(NamedTuple):
    """One token as a person sees it. `under` is what stood there before, or what it stands for."""

    text: str  # begins with a space where the token does
    kind: str  # one of KINDS, or "text"
    original_text: str
    id: int
    position: int
    document: int
    token_type: int
    is_target: bool = False  # it is asked of the tokens before it, in one stack

    @property
    def title(self) -> str:
        return f"id {self.id}, place {self.position}, document {self.document}"


class SequenceView(NamedTuple):
    """One sequence of a row: what is read, or what is asked."""

    name: str
    tokens: list[TokenView]
    num_padding: int


class AttentionMaskView(NamedTuple):
    """Who sees whom: `seen[i, j]` is whether i sees j. Padding is left out."""

    name: str
    mask: np.ndarray

    @property
    def title(self) -> str:
        return f"{self.name}: all see all" if self.mask.all() else self.name


class RowView(NamedTuple):
    """All that is shown of a row."""

    row_index: int  # its place in the stream of all rows
    notes: list[str]
    sequences: list[SequenceView]
    attention_masks: list[AttentionMaskView]


class TokenMark(NamedTuple):
    """What is to be said of one place: its kind, the ids to write with it, its turn among those asked."""

    kind: str
    original_ids: Sequence[int] = ()
    is_target: bool = False
    prediction_order: int = 0


def build_row_view(rows: Rows, batch: Batch, b: int, tokenizer: Tokenizer, objective: Any, is_causal: bool) -> RowView:
    """All that there is to see in row `b`."""
    row, one = select_row(rows, b), select_row(batch, b)
    text = make_token_formatter(tokenizer)
    query = "query" in getattr(objective, "extras", ())
    return RowView(
        row_index=int(rows.stream_index[b]),
        notes=describe_row(one, objective, text),
        sequences=build_sequences(
            row, one, tokenizer.vocab, text, bool(rows_predicted_in_place(rows.input_ids, batch)[b]), query
        ),
        attention_masks=build_attention_masks(one, is_causal, query),
    )


def select_row(rows: RowsOrBatch, b: int) -> RowsOrBatch:
    """Row `b` of Rows or of a Batch, its arrays without the B."""
    return type(rows)(*(None if x is None else x[b] for x in rows))  # type: ignore[arg-type]


def rows_read_in_place(source_BL: np.ndarray, batch: Batch) -> np.ndarray:
    """Of which rows (B,) every token is read where it stood before noise; only those that are asked may be changed."""
    B, L = source_BL.shape
    if batch.decoder_input_ids is not None or batch.input_ids.shape != (B, L):
        return np.zeros(B, bool)
    may_BL = np.zeros((B, L), bool)
    if batch.target_positions is not None:
        row, slot = np.nonzero(batch.labels != IGNORE_INDEX)
        may_BL[row, batch.target_positions[row, slot]] = True
    return ((batch.input_ids == source_BL) | may_BL).all(1)


def rows_predicted_in_place(source_BL: np.ndarray, batch: Batch) -> np.ndarray:
    """Of which rows (B,) what is asked is what stood at the place itself, not the next token."""
    if batch.target_positions is None:
        return np.zeros(len(source_BL), bool)
    own_BK = (
        np.take_along_axis(source_BL, np.minimum(batch.target_positions, source_BL.shape[1] - 1), 1) == batch.labels
    )
    return rows_read_in_place(source_BL, batch) & (own_BK | (batch.labels == IGNORE_INDEX)).all(1)


def is_text_token(token_ids: np.ndarray, vocab: Vocabulary) -> np.ndarray:
    """Which ids are text; a word that the tokenizer does not know is."""
    return ~np.isin(token_ids, [i for i in vocab.special_ids if i != vocab.unk]) & (token_ids >= 0)


# --- sequences ----------------------------------------------------------------------------------------------------


def build_sequences(
    source_row: Rows,
    batch_row: Batch,
    vocab: Vocabulary,
    format_tokens: TokenFormatter,
    predicts_in_place: bool,
    has_query_stream: bool,
) -> list[SequenceView]:
    """The sequences of a row: what is read and, where a decoder writes, what it has to write.

    `predicts_in_place`: tokens are asked in their own places, as in MLM. `has_query_stream`: by a second stream, which does not see them.
    """
    doc = np.zeros(len(batch_row.input_ids), int) if batch_row.document_ids is None else batch_row.document_ids
    found = default_marks(batch_row.input_ids, vocab)
    if batch_row.decoder_input_ids is not None:
        return build_encoder_decoder_sequences(source_row, batch_row, doc, found, vocab, format_tokens)
    if predicts_in_place:
        found |= mark_mlm_noise(source_row, batch_row, vocab, has_query_stream)
    else:
        found |= mark_next_token_targets(batch_row, doc)
        found |= mark_sentinels(batch_row, doc, vocab, found)
    return [build_sequence("reads", batch_row.input_ids, doc, found, format_tokens, batch_row.token_type_ids)]


def build_encoder_decoder_sequences(
    source_row: Rows,
    batch_row: Batch,
    document_ids: np.ndarray,
    marks: dict[int, TokenMark],
    vocab: Vocabulary,
    format_tokens: TokenFormatter,
) -> list[SequenceView]:
    """What an encoder reads and a decoder has to write; what the decoder reads too, unless it is just that, later."""
    said_doc = np.where(batch_row.labels == IGNORE_INDEX, -1, batch_row.decoder_document_ids)
    said = default_marks(batch_row.labels, vocab, "answer")
    said |= {i: TokenMark("sentinel") for i, label in enumerate(batch_row.labels) if label in vocab.sentinel_ids}
    read_numbers: dict[int, int] = {}
    said_numbers: dict[int, int] = {}
    if is_full_reconstruction(source_row, batch_row, vocab):
        match = align_with_labels(source_row, batch_row, vocab)
        hidden = positions_behind_masks(batch_row, match, vocab)
        marks |= {i: TokenMark("masked", batch_row.labels[places]) for i, places in hidden.items()}
        lost = np.setdiff1d(np.flatnonzero(is_text_token(batch_row.labels, vocab)), match).tolist()
        said |= dict.fromkeys(lost, TokenMark("deleted"))
        said |= {j: TokenMark("hidden") for places in hidden.values() for j in places}
        read_numbers, said_numbers = number_moved_sentences(source_row, batch_row, match, vocab)
    else:
        marks |= mark_sentinels(batch_row, document_ids, vocab, marks)
    reads = build_sequence(
        "encoder reads", batch_row.input_ids, document_ids, marks, format_tokens, batch_row.token_type_ids, read_numbers
    )
    writes = build_sequence(
        "decoder writes", batch_row.labels, said_doc, said, format_tokens, number_by_position=said_numbers
    )
    if find_decoder_start_token(batch_row, said_doc) is not None:
        return [reads, writes]
    decoder = build_sequence(
        "decoder reads",
        batch_row.decoder_input_ids,
        said_doc,
        default_marks(batch_row.decoder_input_ids, vocab),
        format_tokens,
    )
    return [reads, decoder, writes]


def default_marks(token_ids: np.ndarray, vocab: Vocabulary, kind: str = "text") -> dict[int, TokenMark]:
    return {i: TokenMark(kind if known else "special") for i, known in enumerate(is_text_token(token_ids, vocab))}


def build_sequence(
    name: str,
    token_ids: np.ndarray,
    document_ids: np.ndarray,
    marks: dict[int, TokenMark],
    format_tokens: TokenFormatter,
    token_type_ids: np.ndarray | None = None,
    number_by_position: dict[int, int] | None = None,
) -> SequenceView:
    pieces = []
    for i in np.flatnonzero(document_ids >= 0).tolist():
        mark, part = marks[i], 0 if token_type_ids is None else int(token_type_ids[i])
        if number_by_position and i in number_by_position:
            pieces.append(TokenView(f" {number_by_position[i]}", "number", "", -1, i, int(document_ids[i]), part))
        now, under = (
            format_tokens(int(token_ids[i])),
            format_tokens(*map(int, mark.original_ids)) if len(mark.original_ids) else str(mark.prediction_order or ""),
        )
        if mark.kind in ("masked", "sentinel") and under and not under.startswith(" "):
            now = now.lstrip(" ")  # hides the rest of a word
        pieces.append(
            TokenView(now, mark.kind, under.strip(), int(token_ids[i]), i, int(document_ids[i]), part, mark.is_target)
        )
    return SequenceView(name, pieces, int((document_ids < 0).sum()))


def labels_by_position(batch_row: Batch) -> dict[int, int]:
    """What is asked at each place of one stack. (A bidirectional model is asked everything: its forward half.)"""
    labels = batch_row.labels if batch_row.labels.ndim == 1 else batch_row.labels[0]
    places = np.arange(len(labels)) if batch_row.target_positions is None else batch_row.target_positions
    return {int(i): int(label) for i, label in zip(places, labels, strict=True) if label != IGNORE_INDEX}


def mark_next_token_targets(batch_row: Batch, document_ids: np.ndarray) -> dict[int, TokenMark]:
    """The tokens of one stack that are asked of what stands before them, where these are not simply all tokens."""
    asked = labels_by_position(batch_row)
    next_ = {
        i + 1 for i, label in asked.items() if i + 1 < len(batch_row.input_ids) and batch_row.input_ids[i + 1] == label
    }
    inner = set(np.flatnonzero((document_ids[1:] == document_ids[:-1]) & (document_ids[1:] >= 0)) + 1)
    return {} if len(next_) < len(asked) or inner <= next_ else {i: TokenMark("answer", is_target=True) for i in next_}


def mark_mlm_noise(
    source_row: Rows, batch_row: Batch, vocab: Vocabulary, has_query_stream: bool
) -> dict[int, TokenMark]:
    """What was masked, replaced, or left as it was although it is asked."""
    asked, found = labels_by_position(batch_row), {}
    for i, (now, before) in enumerate(zip(batch_row.input_ids.tolist(), source_row.input_ids.tolist(), strict=True)):
        if now != before:
            found[i] = TokenMark("masked" if now == vocab.mask else "random", [before])
        elif i in asked and not has_query_stream:
            found[i] = TokenMark("kept")
        elif i in asked:
            earlier = (
                0
                if batch_row.attention_rank is None
                else sum(batch_row.attention_rank[j] < batch_row.attention_rank[i] for j in asked)
            )
            found[i] = TokenMark("asked", prediction_order=int(earlier) + 1)
    return found


def mark_sentinels(
    batch_row: Batch, document_ids: np.ndarray, vocab: Vocabulary, marks: dict[int, TokenMark]
) -> dict[int, TokenMark]:
    """The spans that sentinels stand for, as the answers give them, document by document."""
    if batch_row.labels.ndim == 2:
        return {}
    said_doc = (
        batch_row.decoder_document_ids
        if batch_row.decoder_input_ids is not None
        else document_ids
        if batch_row.target_positions is None
        else document_ids[batch_row.target_positions]
    )
    spans: dict[tuple[int, int], list[int]] = {}
    current: list[int] = []
    for label, d, known in zip(
        batch_row.labels.tolist(), said_doc.tolist(), is_text_token(batch_row.labels, vocab), strict=True
    ):
        if label in vocab.sentinel_ids:
            current = spans.setdefault((d, label), [])
        elif known:
            current.append(label)
    places = [i for i, t in enumerate(batch_row.input_ids.tolist()) if t in vocab.sentinel_ids]
    return {
        i: TokenMark("sentinel", is_target=True)
        if marks[i].is_target
        else TokenMark("sentinel", spans.get((int(document_ids[i]), int(batch_row.input_ids[i])), ()))
        for i in places
    }


def find_decoder_start_token(batch_row: Batch, label_document_ids: np.ndarray) -> int | None:
    """The token that starts the decoder, when it reads what it has to write one place later; None when it does not."""
    used = np.flatnonzero(label_document_ids >= 0)
    first = used[np.diff(label_document_ids[used], prepend=-1) != 0]
    rest = np.setdiff1d(used, first)
    starts = set(batch_row.decoder_input_ids[first].tolist())
    same = np.array_equal(batch_row.decoder_input_ids[rest], batch_row.labels[rest - 1])
    return starts.pop() if same and len(starts) == 1 else None


# --- a text that is to be restored --------------------------------------------------------------------------------


def is_full_reconstruction(source_row: Rows, batch_row: Batch, vocab: Vocabulary) -> bool:
    """Whether the decoder has to write the whole text of the row, in its own order."""
    return np.array_equal(
        batch_row.labels[is_text_token(batch_row.labels, vocab)], source_row.input_ids[source_row.maskable]
    )


def label_sentence_ends(source_row: Rows, batch_row: Batch, vocab: Vocabulary) -> np.ndarray:
    """Which places of what is to be written end a sentence (U,); none where the row does not say."""
    ends_U = np.zeros(len(batch_row.labels), bool)
    if source_row.sentence_end is not None:
        ends_U[is_text_token(batch_row.labels, vocab)] = source_row.sentence_end[source_row.maskable]
    return ends_U


def align_with_labels(source_row: Rows, batch_row: Batch, vocab: Vocabulary) -> np.ndarray:
    """For each token that the encoder reads the place it has in what is to be written, -1 for none.

    Long stretches that occur once are found first, wherever they stand, then shorter ones in what is left, each as far
    as its sentence goes: so sentences are found that changed places. Single tokens go to the nearest place.
    """
    ends = label_sentence_ends(source_row, batch_row, vocab).tolist()
    read = list(
        zip(
            np.where(is_text_token(batch_row.input_ids, vocab), batch_row.input_ids, -1).tolist(),
            batch_row.document_ids.tolist(),
            strict=True,
        )
    )
    said = list(
        zip(
            np.where(is_text_token(batch_row.labels, vocab), batch_row.labels, -2).tolist(),
            batch_row.decoder_document_ids.tolist(),
            strict=True,
        )
    )
    match, taken = [-1] * len(read), [False] * len(said)

    def pair(i: int, j: int) -> bool:
        fits = 0 <= i < len(read) and 0 <= j < len(said) and match[i] < 0 and not taken[j] and read[i] == said[j]
        if fits:
            match[i], taken[j] = j, True
        return fits

    for n in (16, 8, 4, 2, 1):
        places: dict[tuple, list[int]] = {}
        for j in range(len(said) - n + 1):
            if not any(taken[j : j + n]) and not any(ends[j : j + n - 1]):
                places.setdefault(tuple(said[j : j + n]), []).append(j)
        for i in range(len(read) - n + 1):
            found = places.get(tuple(read[i : i + n]), ()) if match[i] < 0 else ()
            if len(found) == 1:
                k = 0
                while pair(i + k, found[0] + k) and not ends[found[0] + k]:
                    k += 1
                k = -1
                while found[0] + k >= 0 and not ends[found[0] + k] and pair(i + k, found[0] + k):
                    k -= 1
    for i, token in enumerate(read):
        if match[i] < 0 and (free := [j for j, other in enumerate(said) if other == token and not taken[j]]):
            expected = match[i - 1] + 1 if i else 0
            pair(i, min(free, key=lambda j: abs(j - expected)))
    return np.array(match)


def positions_behind_masks(batch_row: Batch, alignment: np.ndarray, vocab: Vocabulary) -> dict[int, list[int]]:
    """For each mask the places of what it hides: what is missing right after its left neighbour, and before its right.

    These are two stretches where the mask joins two sentences that stood apart. Of masks side by side each hides one
    token where that comes out even, else the first hides all.
    """
    missing = is_text_token(batch_row.labels, vocab)
    missing[alignment[alignment >= 0]] = False
    masks = np.flatnonzero(batch_row.input_ids == vocab.mask)
    found: dict[int, list[int]] = {i: [] for i in masks.tolist()}
    for side_by_side in np.split(masks, np.flatnonzero(np.diff(masks) > 1) + 1) if len(masks) else []:
        first, last = int(side_by_side[0]), int(side_by_side[-1])
        left, right = (alignment[k] if 0 <= k < len(alignment) else -1 for k in (first - 1, last + 1))
        after = take_missing_run(missing, left + 1, 1) if left >= 0 else []
        before = take_missing_run(missing, right - 1, -1) if right >= 0 else []
        hidden = after + before[::-1]
        if len(hidden) == len(side_by_side):
            found |= {first + k: [place] for k, place in enumerate(hidden)}
        else:
            found[first] = hidden
    return found


def take_missing_run(is_missing: np.ndarray, position: int, step: int) -> list[int]:
    """The places from here on that are missing; each is found once."""
    found: list[int] = []
    while 0 <= position < len(is_missing) and is_missing[position]:
        found.append(position)
        is_missing[position] = False
        position += step
    return found


def number_moved_sentences(
    source_row: Rows, batch_row: Batch, alignment: np.ndarray, vocab: Vocabulary
) -> tuple[dict[int, int], dict[int, int]]:
    """Numbers for the sentences of a text whose order was changed: where each begins, as it is read and as it was."""
    kept = np.flatnonzero(alignment >= 0)
    if source_row.sentence_end is None or (np.diff(alignment[kept]) > 0).all():
        return {}, {}
    ends_U = label_sentence_ends(source_row, batch_row, vocab)
    number_U = np.where(is_text_token(batch_row.labels, vocab), np.cumsum(ends_U) - ends_U + 1, 0)
    return first_position_of_runs(kept, number_U[alignment]), first_position_of_runs(np.flatnonzero(number_U), number_U)


def first_position_of_runs(positions: np.ndarray, run_ids: np.ndarray) -> dict[int, int]:
    """The first of each stretch of places that have the same number."""
    return {next(i for i in group): n for n, group in groupby(positions.tolist(), lambda i: int(run_ids[i]))}


# --- in words -----------------------------------------------------------------------------------------------------


def describe_row(batch_row: Batch, objective: Any, format_tokens: TokenFormatter) -> list[str]:
    """What else there is to say of a row."""
    found = []
    if batch_row.pair_labels is not None:
        meaning = PAIR_LABEL_MEANINGS.get(getattr(objective, "row_layout", ""), ("it follows", "it does not follow"))[
            int(batch_row.pair_labels)
        ]
        found.append(f"pair: {int(batch_row.pair_labels)}, {meaning}")
    if batch_row.decoder_input_ids is not None:
        said_doc = np.where(batch_row.labels == IGNORE_INDEX, -1, batch_row.decoder_document_ids)
        if (start := find_decoder_start_token(batch_row, said_doc)) is not None:
            found.append(
                f"The decoder reads what it has to write one place later, after {format_tokens(start).strip()}."
            )
    elif batch_row.labels is not None and batch_row.labels.ndim == 2:
        found.append("Every token is asked twice: of all that stand before it, and of all that stand after it.")
    elif batch_row.target_positions is None:
        found.append(
            "Each token is asked of those before it."
            if batch_row.attention_rank is None
            else "Only what is marked is asked."
        )
    if "generator" in getattr(objective, "extras", ()):
        found.append("A small generator fills the masks; the model then says of every token whether it was replaced.")
    if batch_row.span_boundaries is not None and (batch_row.labels != IGNORE_INDEX).any():
        found.append(
            "Each span is asked of its edges too: "
            + "; ".join(describe_span_boundaries(batch_row, format_tokens))
            + "."
        )
    return found


def describe_span_boundaries(batch_row: Batch, format_tokens: TokenFormatter) -> Iterable[str]:
    """Each span that is asked, between the two tokens that stand around it."""
    used = batch_row.labels != IGNORE_INDEX
    for (left, right), places in groupby(
        np.flatnonzero(used), lambda k: tuple(batch_row.span_boundaries[k, :2].tolist())
    ):
        span = format_tokens(*(int(batch_row.labels[k]) for k in places))
        around = [format_tokens(int(batch_row.input_ids[i])).strip() for i in (left, right)]
        yield f"{around[0]} ‹{span.strip()}› {around[1]}"


def make_token_formatter(tokenizer: Tokenizer) -> TokenFormatter:
    """How tokens look together: a space first where a word begins, and nothing that a terminal would obey."""
    special = set(tokenizer.vocab.special_ids)

    def piece(i: int) -> str:
        token = tokenizer.backend.id_to_token(i) or f"<{i}>"
        if i in special:
            return " " + token
        if tokenizer.kind == "wordpiece":
            return token[2:] if token.startswith("##") else " " + token
        if tokenizer.kind in ("char", "word"):
            return " " + token
        return token.replace("▁", " ").replace("</w>", " ")

    @cache
    def text(*ids: int) -> str:
        if tokenizer.kind == "byte-bpe" and special.isdisjoint(ids):
            whole = tokenizer.decode(ids)  # a character may be made of several tokens
        else:
            whole = "".join(map(piece, ids))
        start = " " if whole.startswith(" ") and whole.strip(" ") else ""
        inner = whole[len(start) :]
        return start + "".join(c if c == " " and len(ids) > 1 else escape_character(c) for c in inner)

    return text


def escape_character(c: str) -> str:
    """
    >>> escape_character("a"), escape_character(" "), escape_character("\\n"), escape_character("\\x1b")
    ('a', '␣', '⏎', '\\\\x1b')
    """
    named = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return named.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())


# --- who sees whom ------------------------------------------------------------------------------------------------


def build_attention_mask(batch_row: Batch, is_causal: bool, is_strict: bool = False) -> np.ndarray:
    """Who sees whom in one stack, (T, T), or (2, T, T) where a row is read both ways; by the rule of `models.see`."""
    T = len(batch_row.input_ids)
    rank = (
        batch_row.attention_rank
        if batch_row.attention_rank is not None
        else np.arange(T)
        if is_causal
        else np.zeros(T, int)
    )
    ranks = rank if rank.ndim == 2 else rank[None]
    seen = np.stack([visibility_matrix(batch_row.document_ids, r, is_strict) for r in ranks])
    return seen if rank.ndim == 2 else seen[0]


def build_attention_masks(batch_row: Batch, is_causal: bool, has_query_stream: bool) -> list[AttentionMaskView]:
    """Every sight that the model has, without padding."""
    T = len(batch_row.input_ids)
    text = np.arange(T) if batch_row.document_ids is None else np.flatnonzero(batch_row.document_ids >= 0)
    seen = build_attention_mask(batch_row, is_causal and batch_row.decoder_input_ids is None)[..., text[:, None], text]
    if batch_row.decoder_input_ids is not None:
        said = np.flatnonzero(batch_row.labels != IGNORE_INDEX)
        later = Batch(batch_row.decoder_input_ids, document_ids=batch_row.decoder_document_ids)
        across = (
            np.ones((len(batch_row.labels), T), bool)
            if batch_row.document_ids is None
            else batch_row.decoder_document_ids[:, None] == batch_row.document_ids
        )
        return [
            AttentionMaskView("encoder", seen),
            AttentionMaskView("decoder", build_attention_mask(later, is_causal=True)[said[:, None], said]),
            AttentionMaskView("decoder sees encoder", across[said[:, None], text]),
        ]
    if seen.ndim == 3:
        return [AttentionMaskView("forward", seen[0]), AttentionMaskView("backward", seen[1])]
    if has_query_stream:
        asking = batch_row.target_positions[batch_row.labels != IGNORE_INDEX]
        before = build_attention_mask(batch_row, is_causal, is_strict=True)[asking[:, None], text]
        return [AttentionMaskView("content", seen), AttentionMaskView("query (of the asked places)", before)]
    return [AttentionMaskView("who sees whom", seen)]


def downsample_mask(mask: np.ndarray, max_cells: int) -> np.ndarray:
    """The same picture in at most so many cells a side; a cell is dark when half of it is."""
    size = -(-max(mask.shape) // max_cells)
    rows, columns = (-(-n // size) for n in mask.shape)
    share = np.full((rows * size, columns * size), np.nan)
    share[: mask.shape[0], : mask.shape[1]] = mask
    return np.nanmean(share.reshape(rows, size, columns, size), axis=(1, 3)) >= 0.5
