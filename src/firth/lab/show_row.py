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

from firth.objectives import IGNORED, Batch
from firth.objectives.sight import matrix
from firth.tokens import Rows, Tokenizer, Vocabulary

R = TypeVar("R", Rows, Batch)
Text = Callable[..., str]  # ids of tokens, one after the other -> how they look
KINDS = {
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
PAIRS = {  # by the rows that an objective reads: what the two labels of a pair mean
    "next": ("the second text follows the first", "random next: the second text is from elsewhere"),
    "order": ("in order", "swapped: the second text stood before the first"),
}


class Piece(NamedTuple):
    """One token as a person sees it. `under` is what stood there before, or what it stands for."""

    text: str  # begins with a space where the token does
    kind: str  # one of KINDS, or "text"
    under: str
    id: int
    place: int
    doc: int
    segment: int
    written: bool = False  # it is asked of the tokens before it, in one stack

    @property
    def title(self) -> str:
        return f"id {self.id}, place {self.place}, document {self.doc}"


class Strip(NamedTuple):
    """One sequence of a row: what is read, or what is asked."""

    name: str
    pieces: list[Piece]
    padding: int


class Picture(NamedTuple):
    """Who sees whom: `seen[i, j]` is whether i sees j. Padding is left out."""

    name: str
    seen: np.ndarray

    @property
    def title(self) -> str:
        return f"{self.name}: all see all" if self.seen.all() else self.name


class View(NamedTuple):
    """All that is shown of a row."""

    row: int  # its place in the stream of all rows
    facts: list[str]
    strips: list[Strip]
    pictures: list[Picture]


class Mark(NamedTuple):
    """What is to be said of one place: its kind, the ids to write with it, its turn among those asked."""

    kind: str
    under: Sequence[int] = ()
    written: bool = False
    turn: int = 0


def view(rows: Rows, batch: Batch, b: int, tokenizer: Tokenizer, objective: Any, causal: bool) -> View:
    """All that there is to see in row `b`."""
    row, one = one_row(rows, b), one_row(batch, b)
    text = surface(tokenizer)
    query = "query" in getattr(objective, "extras", ())
    return View(
        row=int(rows.index[b]),
        facts=facts(one, objective, text),
        strips=strips(row, one, tokenizer.vocab, text, bool(of_their_places(rows.tokens, batch)[b]), query),
        pictures=pictures(one, causal, query),
    )


def one_row(rows: R, b: int) -> R:
    """Row `b` of Rows or of a Batch, its arrays without the B."""
    return type(rows)(*(None if x is None else x[b] for x in rows))  # type: ignore[arg-type]


def in_place(source_BL: np.ndarray, batch: Batch) -> np.ndarray:
    """Of which rows (B,) every token is read where it stood before noise; only those that are asked may be changed."""
    B, L = source_BL.shape
    if batch.decoder_tokens is not None or batch.tokens.shape != (B, L):
        return np.zeros(B, bool)
    may_BL = np.zeros((B, L), bool)
    if batch.asked is not None:
        row, slot = np.nonzero(batch.labels != IGNORED)
        may_BL[row, batch.asked[row, slot]] = True
    return ((batch.tokens == source_BL) | may_BL).all(1)


def of_their_places(source_BL: np.ndarray, batch: Batch) -> np.ndarray:
    """Of which rows (B,) what is asked is what stood at the place itself, not the next token."""
    if batch.asked is None:
        return np.zeros(len(source_BL), bool)
    own_BK = np.take_along_axis(source_BL, np.minimum(batch.asked, source_BL.shape[1] - 1), 1) == batch.labels
    return in_place(source_BL, batch) & (own_BK | (batch.labels == IGNORED)).all(1)


def is_text(tokens: np.ndarray, vocab: Vocabulary) -> np.ndarray:
    """Which ids are text; a word that the tokenizer does not know is."""
    return ~np.isin(tokens, [i for i in vocab.special if i != vocab.unk]) & (tokens >= 0)


# --- sequences ----------------------------------------------------------------------------------------------------


def strips(row: Rows, one: Batch, vocab: Vocabulary, text: Text, own: bool, query: bool) -> list[Strip]:
    """The sequences of a row: what is read and, where a decoder writes, what it has to write.

    `own`: tokens are asked in their own places, as in MLM. `query`: by a second stream, which does not see them.
    """
    doc = np.zeros(len(one.tokens), int) if one.doc is None else one.doc
    found = plain_marks(one.tokens, vocab)
    if one.decoder_tokens is not None:
        return two_stacks(row, one, doc, found, vocab, text)
    if own:
        found |= changed(row, one, vocab, query)
    else:
        found |= written(one, doc)
        found |= at_sentinels(one, doc, vocab, found)
    return [strip("reads", one.tokens, doc, found, text, one.segment)]


def two_stacks(
    row: Rows, one: Batch, doc: np.ndarray, found: dict[int, Mark], vocab: Vocabulary, text: Text
) -> list[Strip]:
    """What an encoder reads and a decoder has to write; what the decoder reads too, unless it is just that, later."""
    said_doc = np.where(one.labels == IGNORED, -1, one.decoder_doc)
    said = plain_marks(one.labels, vocab, "answer")
    said |= {i: Mark("sentinel") for i, label in enumerate(one.labels) if label in vocab.sentinels}
    read_numbers: dict[int, int] = {}
    said_numbers: dict[int, int] = {}
    if restores(row, one, vocab):
        match = align(row, one, vocab)
        hidden = behind_masks(one, match, vocab)
        found |= {i: Mark("masked", one.labels[places]) for i, places in hidden.items()}
        lost = np.setdiff1d(np.flatnonzero(is_text(one.labels, vocab)), match).tolist()
        said |= dict.fromkeys(lost, Mark("deleted"))
        said |= {j: Mark("hidden") for places in hidden.values() for j in places}
        read_numbers, said_numbers = sentence_numbers(row, one, match, vocab)
    else:
        found |= at_sentinels(one, doc, vocab, found)
    reads = strip("encoder reads", one.tokens, doc, found, text, one.segment, read_numbers)
    writes = strip("decoder writes", one.labels, said_doc, said, text, numbers=said_numbers)
    if late(one, said_doc) is not None:
        return [reads, writes]
    decoder = strip("decoder reads", one.decoder_tokens, said_doc, plain_marks(one.decoder_tokens, vocab), text)
    return [reads, decoder, writes]


def plain_marks(tokens: np.ndarray, vocab: Vocabulary, kind: str = "text") -> dict[int, Mark]:
    return {i: Mark(kind if known else "special") for i, known in enumerate(is_text(tokens, vocab))}


def strip(
    name: str,
    tokens: np.ndarray,
    doc: np.ndarray,
    found: dict[int, Mark],
    text: Text,
    segment: np.ndarray | None = None,
    numbers: dict[int, int] | None = None,
) -> Strip:
    pieces = []
    for i in np.flatnonzero(doc >= 0).tolist():
        mark, part = found[i], 0 if segment is None else int(segment[i])
        if numbers and i in numbers:
            pieces.append(Piece(f" {numbers[i]}", "number", "", -1, i, int(doc[i]), part))
        now, under = text(int(tokens[i])), text(*map(int, mark.under)) if len(mark.under) else str(mark.turn or "")
        if mark.kind in ("masked", "sentinel") and under and not under.startswith(" "):
            now = now.lstrip(" ")  # hides the rest of a word
        pieces.append(Piece(now, mark.kind, under.strip(), int(tokens[i]), i, int(doc[i]), part, mark.written))
    return Strip(name, pieces, int((doc < 0).sum()))


def answers(one: Batch) -> dict[int, int]:
    """What is asked at each place of one stack. (A bidirectional model is asked everything: its forward half.)"""
    labels = one.labels if one.labels.ndim == 1 else one.labels[0]
    places = np.arange(len(labels)) if one.asked is None else one.asked
    return {int(i): int(label) for i, label in zip(places, labels, strict=True) if label != IGNORED}


def written(one: Batch, doc: np.ndarray) -> dict[int, Mark]:
    """The tokens of one stack that are asked of what stands before them, where these are not simply all tokens."""
    asked = answers(one)
    next_ = {i + 1 for i, label in asked.items() if i + 1 < len(one.tokens) and one.tokens[i + 1] == label}
    inner = set(np.flatnonzero((doc[1:] == doc[:-1]) & (doc[1:] >= 0)) + 1)
    return {} if len(next_) < len(asked) or inner <= next_ else {i: Mark("answer", written=True) for i in next_}


def changed(row: Rows, one: Batch, vocab: Vocabulary, query: bool) -> dict[int, Mark]:
    """What was masked, replaced, or left as it was although it is asked."""
    asked, found = answers(one), {}
    for i, (now, before) in enumerate(zip(one.tokens.tolist(), row.tokens.tolist(), strict=True)):
        if now != before:
            found[i] = Mark("masked" if now == vocab.mask else "random", [before])
        elif i in asked and not query:
            found[i] = Mark("kept")
        elif i in asked:
            earlier = 0 if one.rank is None else sum(one.rank[j] < one.rank[i] for j in asked)
            found[i] = Mark("asked", turn=int(earlier) + 1)
    return found


def at_sentinels(one: Batch, doc: np.ndarray, vocab: Vocabulary, found: dict[int, Mark]) -> dict[int, Mark]:
    """The spans that sentinels stand for, as the answers give them, document by document."""
    if one.labels.ndim == 2:
        return {}
    said_doc = one.decoder_doc if one.decoder_tokens is not None else doc if one.asked is None else doc[one.asked]
    spans: dict[tuple[int, int], list[int]] = {}
    current: list[int] = []
    for label, d, known in zip(one.labels.tolist(), said_doc.tolist(), is_text(one.labels, vocab), strict=True):
        if label in vocab.sentinels:
            current = spans.setdefault((d, label), [])
        elif known:
            current.append(label)
    places = [i for i, t in enumerate(one.tokens.tolist()) if t in vocab.sentinels]
    return {
        i: Mark("sentinel", written=True)
        if found[i].written
        else Mark("sentinel", spans.get((int(doc[i]), int(one.tokens[i])), ()))
        for i in places
    }


def late(one: Batch, said_doc: np.ndarray) -> int | None:
    """The token that starts the decoder, when it reads what it has to write one place later; None when it does not."""
    used = np.flatnonzero(said_doc >= 0)
    first = used[np.diff(said_doc[used], prepend=-1) != 0]
    rest = np.setdiff1d(used, first)
    starts = set(one.decoder_tokens[first].tolist())
    same = np.array_equal(one.decoder_tokens[rest], one.labels[rest - 1])
    return starts.pop() if same and len(starts) == 1 else None


# --- a text that is to be restored --------------------------------------------------------------------------------


def restores(row: Rows, one: Batch, vocab: Vocabulary) -> bool:
    """Whether the decoder has to write the whole text of the row, in its own order."""
    return np.array_equal(one.labels[is_text(one.labels, vocab)], row.tokens[row.real])


def sentence_ends(row: Rows, one: Batch, vocab: Vocabulary) -> np.ndarray:
    """Which places of what is to be written end a sentence (U,); none where the row does not say."""
    ends_U = np.zeros(len(one.labels), bool)
    if row.sentence_end is not None:
        ends_U[is_text(one.labels, vocab)] = row.sentence_end[row.real]
    return ends_U


def align(row: Rows, one: Batch, vocab: Vocabulary) -> np.ndarray:
    """For each token that the encoder reads the place it has in what is to be written, -1 for none.

    Long stretches that occur once are found first, wherever they stand, then shorter ones in what is left, each as far
    as its sentence goes: so sentences are found that changed places. Single tokens go to the nearest place.
    """
    ends = sentence_ends(row, one, vocab).tolist()
    read = list(zip(np.where(is_text(one.tokens, vocab), one.tokens, -1).tolist(), one.doc.tolist(), strict=True))
    said = list(
        zip(np.where(is_text(one.labels, vocab), one.labels, -2).tolist(), one.decoder_doc.tolist(), strict=True)
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


def behind_masks(one: Batch, match: np.ndarray, vocab: Vocabulary) -> dict[int, list[int]]:
    """For each mask the places of what it hides: what is missing right after its left neighbour, and before its right.

    These are two stretches where the mask joins two sentences that stood apart. Of masks side by side each hides one
    token where that comes out even, else the first hides all.
    """
    missing = is_text(one.labels, vocab)
    missing[match[match >= 0]] = False
    masks = np.flatnonzero(one.tokens == vocab.mask)
    found: dict[int, list[int]] = {i: [] for i in masks.tolist()}
    for side_by_side in np.split(masks, np.flatnonzero(np.diff(masks) > 1) + 1) if len(masks) else []:
        first, last = int(side_by_side[0]), int(side_by_side[-1])
        left, right = (match[k] if 0 <= k < len(match) else -1 for k in (first - 1, last + 1))
        after = missing_from(missing, left + 1, 1) if left >= 0 else []
        before = missing_from(missing, right - 1, -1) if right >= 0 else []
        hidden = after + before[::-1]
        if len(hidden) == len(side_by_side):
            found |= {first + k: [place] for k, place in enumerate(hidden)}
        else:
            found[first] = hidden
    return found


def missing_from(missing: np.ndarray, place: int, step: int) -> list[int]:
    """The places from here on that are missing; each is found once."""
    found: list[int] = []
    while 0 <= place < len(missing) and missing[place]:
        found.append(place)
        missing[place] = False
        place += step
    return found


def sentence_numbers(
    row: Rows, one: Batch, match: np.ndarray, vocab: Vocabulary
) -> tuple[dict[int, int], dict[int, int]]:
    """Numbers for the sentences of a text whose order was changed: where each begins, as it is read and as it was."""
    kept = np.flatnonzero(match >= 0)
    if row.sentence_end is None or (np.diff(match[kept]) > 0).all():
        return {}, {}
    ends_U = sentence_ends(row, one, vocab)
    number_U = np.where(is_text(one.labels, vocab), np.cumsum(ends_U) - ends_U + 1, 0)
    return first_of_each(kept, number_U[match]), first_of_each(np.flatnonzero(number_U), number_U)


def first_of_each(places: np.ndarray, number: np.ndarray) -> dict[int, int]:
    """The first of each stretch of places that have the same number."""
    return {next(i for i in group): n for n, group in groupby(places.tolist(), lambda i: int(number[i]))}


# --- in words -----------------------------------------------------------------------------------------------------


def facts(one: Batch, objective: Any, text: Text) -> list[str]:
    """What else there is to say of a row."""
    found = []
    if one.pair is not None:
        meaning = PAIRS.get(getattr(objective, "layout", ""), ("it follows", "it does not follow"))[int(one.pair)]
        found.append(f"pair: {int(one.pair)}, {meaning}")
    if one.decoder_tokens is not None:
        said_doc = np.where(one.labels == IGNORED, -1, one.decoder_doc)
        if (start := late(one, said_doc)) is not None:
            found.append(f"The decoder reads what it has to write one place later, after {text(start).strip()}.")
    elif one.labels is not None and one.labels.ndim == 2:
        found.append("Every token is asked twice: of all that stand before it, and of all that stand after it.")
    elif one.asked is None:
        found.append("Each token is asked of those before it." if one.rank is None else "Only what is marked is asked.")
    if "generator" in getattr(objective, "extras", ()):
        found.append("A small generator fills the masks; the model then says of every token whether it was replaced.")
    if one.boundary is not None and (one.labels != IGNORED).any():
        found.append("Each span is asked of its edges too: " + "; ".join(edges(one, text)) + ".")
    return found


def edges(one: Batch, text: Text) -> Iterable[str]:
    """Each span that is asked, between the two tokens that stand around it."""
    used = one.labels != IGNORED
    for (left, right), places in groupby(np.flatnonzero(used), lambda k: tuple(one.boundary[k, :2].tolist())):
        span = text(*(int(one.labels[k]) for k in places))
        around = [text(int(one.tokens[i])).strip() for i in (left, right)]
        yield f"{around[0]} ‹{span.strip()}› {around[1]}"


def surface(tokenizer: Tokenizer) -> Text:
    """How tokens look together: a space first where a word begins, and nothing that a terminal would obey."""
    special = set(tokenizer.vocab.special)

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
        return start + "".join(c if c == " " and len(ids) > 1 else visible(c) for c in inner)

    return text


def visible(c: str) -> str:
    """
    >>> visible("a"), visible(" "), visible("\\n"), visible("\\x1b")
    ('a', '␣', '⏎', '\\\\x1b')
    """
    named = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return named.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())


# --- who sees whom ------------------------------------------------------------------------------------------------


def sight(one: Batch, causal: bool, strict: bool = False) -> np.ndarray:
    """Who sees whom in one stack, (T, T), or (2, T, T) where a row is read both ways; by the rule of `models.see`."""
    T = len(one.tokens)
    rank = one.rank if one.rank is not None else np.arange(T) if causal else np.zeros(T, int)
    ranks = rank if rank.ndim == 2 else rank[None]
    seen = np.stack([matrix(one.doc, r, strict) for r in ranks])
    return seen if rank.ndim == 2 else seen[0]


def pictures(one: Batch, causal: bool, query: bool) -> list[Picture]:
    """Every sight that the model has, without padding."""
    T = len(one.tokens)
    text = np.arange(T) if one.doc is None else np.flatnonzero(one.doc >= 0)
    seen = sight(one, causal and one.decoder_tokens is None)[..., text[:, None], text]
    if one.decoder_tokens is not None:
        said = np.flatnonzero(one.labels != IGNORED)
        later = Batch(one.decoder_tokens, doc=one.decoder_doc)
        across = np.ones((len(one.labels), T), bool) if one.doc is None else one.decoder_doc[:, None] == one.doc
        return [
            Picture("encoder", seen),
            Picture("decoder", sight(later, causal=True)[said[:, None], said]),
            Picture("decoder sees encoder", across[said[:, None], text]),
        ]
    if seen.ndim == 3:
        return [Picture("forward", seen[0]), Picture("backward", seen[1])]
    if query:
        asking = one.asked[one.labels != IGNORED]
        before = sight(one, causal, strict=True)[asking[:, None], text]
        return [Picture("content", seen), Picture("query (of the asked places)", before)]
    return [Picture("who sees whom", seen)]


def shrink(seen: np.ndarray, most: int) -> np.ndarray:
    """The same picture in at most so many cells a side; a cell is dark when half of it is."""
    size = -(-max(seen.shape) // most)
    rows, columns = (-(-n // size) for n in seen.shape)
    share = np.full((rows * size, columns * size), np.nan)
    share[: seen.shape[0], : seen.shape[1]] = seen
    return np.nanmean(share.reshape(rows, size, columns, size), axis=(1, 3)) >= 0.5
