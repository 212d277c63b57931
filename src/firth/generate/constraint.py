"""Constrained decoding: at each step, forbid every token after which the text could no longer match a grammar.

A grammar (`grammar.py`) is a set of texts: the JSON of a schema, the matches of a regex, a few choices. llguidance
reads the bytes of the text so far and walks a trie of all tokens, to find those whose bytes keep the text a prefix of
some text of the set. The other tokens get the logit -inf, and EOS is permitted only where the text is complete. So the
model still chooses, by its own probabilities, but only among valid continuations (Willard & Louf 2023; Geng et al.
2023).

    state = constraint.start(num_rows)
    scores_BV.masked_fill_(state.forbidden(), -inf)    # before a token is chosen
    state.accept(token_B)                              # after it

A mask takes some 10 µs, most of them in llguidance, which writes one bit for each token into memory that is allocated
once (`TokenMasks`); a GPU reads the bits from there. The masks of many rows are computed by several threads. A mask is
computed when it is asked for: on a GPU, the model's kernels run meanwhile.

Byte-level, Unigram and character tokens say exactly which bytes they add. WordPiece, word and BPE-with-"</w>" tokens do
not say whether a space stands before a word (`tokens/token_bytes.py`). There, a row keeps several readings of its
tokens at once, each with a matcher of its own. Those that the grammar rejects are dropped, and of those that a schema
cannot tell apart (`json_prefix.py`), the most usual one stays. The most usual one of all is the text.

B rows, V vocabulary, W words of 32 bits, one for each token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.errors import UserError, quote
from firth.generate.grammar import MAX_CACHED_GRAMMARS, Grammar, byte_matcher, import_llguidance
from firth.generate.json_number import NumberTokens, is_infinite, is_within_string, number_tail
from firth.generate.json_prefix import JsonPrefix, StringRules
from firth.tokens import TokenIds, Tokenizer
from firth.tokens.token_bytes import is_word_break, space_is_usual, token_bytes

MAX_READINGS = 32  # of a row
BITS = 32  # of a word of a mask
MIN_THREADED_MASKS = 8  # fewer masks take less time than to wake threads
# by a byte of a mask: eight bools, true where the bit is 0
FORBIDDEN_BOOLS = np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.uint64)[
    :, 0
]
compiled_vocabularies: WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], ConstraintVocabulary]] = WeakKeyDictionary()


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)


def pack_mask(mask_V: np.ndarray) -> np.ndarray:
    """(W,) uint32: one bit for each entry, the first one the lowest.

    >>> pack_mask(np.array([True, False, True])).tolist()
    [5]
    """
    bits = np.zeros(num_mask_words(len(mask_V)) * BITS, dtype=bool)
    bits[: len(mask_V)] = mask_V
    return np.packbits(bits, bitorder="little").view(np.uint32)


def unpack_masks(mask_BW: np.ndarray, vocab_size: int) -> np.ndarray:
    """(B, V) bool, from words of any type."""
    return np.unpackbits(mask_BW.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(bool)


@cache
def mask_threads() -> Any:
    """Return the threads that compute the masks of a batch."""
    return import_llguidance().LLExecutor()


class ConstraintVocabulary:
    """The tokens of a tokenizer for llguidance; tokens with optional spaces occur twice: `name`, and ` name`."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: TokenIds) -> None:
        llguidance = import_llguidance()
        if tokenizer.is_reversed:
            raise UserError("This model writes from the end of a text to its beginning: it cannot follow a grammar.")
        self.spelling, self.kind = token_bytes(tokenizer), tokenizer.kind
        self.constraints: dict[tuple[str, bool], Constraint] = {}  # by grammar
        self.size, self.eos_ids = tokenizer.vocab.size, [i for i in eos_ids if i < tokenizer.vocab.size]
        self.num_words, self.is_exact = num_mask_words(self.size), not self.spelling.has_optional_spaces
        self.spaced_offset = self.num_words * BITS  # of ` name` from `name`: the masks of both begin with a word
        self.tokens = list(self.spelling.pieces)
        if not self.is_exact:
            assert self.spelling.starts_word is not None
            self.tokens += [b""] * (self.spaced_offset - self.size)
            self.tokens += [
                b" " + piece if starts and piece else b""
                for piece, starts in zip(self.spelling.pieces, self.spelling.starts_word, strict=True)
            ]
            begins_with_break = np.array([bool(p) and is_word_break(p.decode()[0]) for p in self.spelling.pieces])
            self.starts_word_W = pack_mask(self.spelling.starts_word)
            self.joins_word_W = pack_mask(~self.spelling.starts_word | begins_with_break)
        is_eos = np.zeros(self.size, dtype=bool)
        is_eos[self.eos_ids] = True
        self.eos_W = pack_mask(is_eos)
        self.eos_bits = [(int(i), int(self.eos_W[i])) for i in self.eos_W.nonzero()[0]]
        self.numbers = NumberTokens(self.spelling.pieces)
        self.bos_token_id, self.eos_token_id = None, self.eos_ids[0]
        self.special_token_ids = list(tokenizer.vocab.special_ids)
        self.llguidance_tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=self.eos_ids, slices=llguidance.LLTokenizer.json_slices()
        )

    def pack_tokens(self, tokens: Sequence[int]) -> np.ndarray:
        """(W,): the bits of these tokens."""
        return pack_mask(np.isin(np.arange(self.size), tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """Required by llguidance for forced text, which `Grammar.to_llguidance` switches off."""
        return []


def make_constraint(grammar: Grammar, tokenizer: Tokenizer, eos_ids: TokenIds, is_continuation: bool) -> Constraint:
    """Return the constraint. Vocabularies are built once for each tokenizer, constraints once for each grammar."""
    vocabularies = compiled_vocabularies.setdefault(tokenizer, {})
    if tuple(eos_ids) not in vocabularies:
        vocabularies[tuple(eos_ids)] = ConstraintVocabulary(tokenizer, eos_ids)
    vocabulary = vocabularies[tuple(eos_ids)]
    key = (grammar.to_llguidance(), is_continuation)
    if key not in vocabulary.constraints:
        while len(vocabulary.constraints) >= MAX_CACHED_GRAMMARS:
            vocabulary.constraints.pop(next(iter(vocabulary.constraints)))
        vocabulary.constraints[key] = Constraint(grammar, vocabulary, is_continuation)
    return vocabulary.constraints[key]


class Constraint:
    """A grammar for the tokens of one tokenizer.

    A text that continues a prompt (`is_continuation`) may begin with one space, which is no part of it.
    """

    def __init__(self, grammar: Grammar, vocabulary: ConstraintVocabulary, is_continuation: bool) -> None:
        self.first_prefix: JsonPrefix | None = None
        if vocabulary.spelling.has_optional_spaces and grammar.is_json:
            grammar = grammar.with_fixed_spaces()  # readings are for the spaces inside of texts
            self.first_prefix = JsonPrefix(StringRules(grammar.body["json_schema"]))
        self.grammar, self.vocabulary = grammar, vocabulary
        self.numbers = vocabulary.numbers if vocabulary.is_exact and grammar.is_json else None
        leading_space = ""
        if not self.vocabulary.spelling.has_optional_spaces:
            if is_continuation and not byte_matcher(grammar).validate_tokens(b" "):
                leading_space = '" "?'
            elif self.vocabulary.spelling.drops_first_space and not is_continuation:
                leading_space = '" "'
        self.has_leading_space = bool(leading_space)
        self.matcher = import_llguidance().LLMatcher(
            self.vocabulary.llguidance_tokens, grammar.to_llguidance(leading_space), log_level=0
        )
        if self.matcher.is_error():
            raise UserError(f"{grammar.kind}: {self.matcher.get_error().splitlines()[0]}")
        start = self.start_row()
        start.permitted()
        if start.ended:
            raise UserError(self.describe_missing_tokens())

    def describe_missing_tokens(self) -> str:
        """Return which characters the grammar begins with and the tokenizer lacks."""
        first = byte_matcher(self.grammar).compute_bitmask()
        chars = [chr(i) for i in range(32, 127) if first[i // 8] >> (i % 8) & 1]
        return (
            f"No token of this {self.vocabulary.kind} tokenizer can begin the text: it must start with "
            f"{' or '.join(map(quote, chars[:3])) or 'another character'}. Train a tokenizer on text that contains it, "
            "or take a byte-level one (--kind byte-bpe)."
        )

    def start_row(self) -> ConstraintRow:
        return ConstraintRow(self, [Reading(self.matcher.deep_copy(), prefix=self.first_prefix)])

    def start(self, num_rows: int, vocab_size: int, device: torch.device) -> ConstraintState:
        """Return the state of `num_rows` rows, whose logits have `vocab_size` entries."""
        return ConstraintState([self.start_row() for _ in range(num_rows)], vocab_size, device)

    @property
    def may_change_spaces(self) -> bool:
        """Whether later tokens may decide where spaces stood."""
        return self.vocabulary.spelling.has_optional_spaces

    def text(self, ids: TokenIds) -> str:
        """Return the text of new ids, without the space that leads from the prompt to it."""
        if self.may_change_spaces:
            readings = self.read(ids)
            return readings[0].text if readings else ""
        text = b"".join(self.vocabulary.spelling.pieces[token] for token in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.has_leading_space else text

    def read(self, ids: TokenIds) -> list[Reading]:
        """Return the readings of new ids: the complete ones if there are any, otherwise all; the most usual first."""
        row = self.start_row()
        row.accept_all(ids)
        return [reading for reading in row.readings if reading.matcher.is_accepting()] or row.readings

    def facts(self, ids: TokenIds) -> dict[str, Any]:
        """Return whether the text is `complete`, and its `value`: of JSON parsed, None if the text was cut."""
        complete = any(reading.matcher.is_accepting() for reading in self.read(ids))
        value = text = self.text(ids)
        if complete and self.grammar.is_json:
            try:
                value = json.loads(text)
            except RecursionError:  # a thousand lists in each other
                complete = False
        return {"complete": complete, "value": value if complete else None}


@dataclass(frozen=True)
class Reading:
    """One way to read the tokens of a row: its matcher, and with optional spaces its text."""

    matcher: Any
    text: str = ""
    ends_word: bool = False  # whether a space may follow
    num_tokens: int = 0
    unusual: tuple[int, ...] = ()  # the tokens whose space is not the usual one, the last first
    prefix: JsonPrefix | None = None  # of a JSON schema

    @property
    def rank(self) -> tuple[int, int, list[int]]:
        """Names as the schema has them come first, then few unusual spaces, then late ones.

        Of late ones, the grammar had less time to reject those that are wrong.
        """
        num_misread = self.prefix.num_misread if self.prefix else 0
        return num_misread, len(self.unusual), [-at for at in self.unusual]

    @property
    def state(self) -> tuple[Hashable, int]:
        """Equal for readings of the same tokens that the grammar cannot tell apart. The second is a length."""
        return (self.text, 0) if self.prefix is None else self.prefix.state

    @property
    def may_hold_number(self) -> bool:
        """Whether this is JSON, outside of strings."""
        return self.prefix is not None and self.prefix.string is None

    def makes_infinite(self, piece: str, has_space: bool) -> bool:
        """Whether a number becomes infinite with the next piece."""
        if not self.may_hold_number:
            return False
        return is_infinite((b"" if has_space else number_tail(self.text.encode())) + piece.encode())

    def copy(self) -> Reading:
        return replace(self, matcher=self.matcher.deep_copy())


class MaskRequest(NamedTuple):
    """A row whose next mask is wanted. Where it may not end yet, EOS is permitted only if nothing else is."""

    number: int  # of its mask
    row: ConstraintRow
    may_end: bool = True


class TokenMasks:
    """One bit for each token and row: whether it may follow. llguidance writes into this memory."""

    def __init__(self, permitted_BW: np.ndarray) -> None:
        assert permitted_BW.flags.c_contiguous
        assert permitted_BW.dtype.itemsize * 8 == BITS
        self.permitted_BW = permitted_BW.view(np.uint32)
        self.address, self.row_bytes = permitted_BW.ctypes.data, permitted_BW.strides[0]

    def write(self, requests: Sequence[MaskRequest]) -> None:
        """Compute the masks of these rows; the others stay."""
        jobs = [(r.row.readings[0].matcher, r.number) for r in requests if r.row.has_one_reading]
        if len(jobs) < MIN_THREADED_MASKS:
            for matcher, number in jobs:
                matcher.unsafe_compute_mask_ptr(self.address + number * self.row_bytes, self.row_bytes)
        else:
            mask_threads().unsafe_compute_mask_ptr(jobs, self.address, self.row_bytes, len(self.permitted_BW))
        for number, row, may_end in requests:
            row.finish_mask(self.permitted_BW[number], may_end)


class ConstraintRow:
    """The readings of one row, the most usual first. A row without readings can only end."""

    def __init__(self, constraint: Constraint, readings: list[Reading], ended: bool = False) -> None:
        self.constraint, self.vocabulary = constraint, constraint.vocabulary
        self.readings, self.ended = readings, ended
        self.tokens: list[int] = []  # of exact bytes, so far

    def copy(self) -> ConstraintRow:
        row = ConstraintRow(self.constraint, [reading.copy() for reading in self.readings], self.ended)
        row.tokens = self.tokens.copy()
        return row

    @property
    def has_one_reading(self) -> bool:
        """Whether the mask of llguidance is that of the row, apart from EOS: exact bytes have one reading."""
        return self.vocabulary.is_exact and not self.ended and bool(self.readings)

    def permitted(self) -> np.ndarray:
        """(V,) bool: the tokens that may follow."""
        masks = TokenMasks(np.zeros((1, self.vocabulary.num_words), dtype=np.uint32))
        masks.write([MaskRequest(0, self)])
        return unpack_masks(masks.permitted_BW, self.vocabulary.size)[0]

    def finish_mask(self, permitted_W: np.ndarray, may_end: bool) -> None:
        """Permit EOS only where the text is complete, or where the row has ended or cannot go on.

        Of a row with one reading, `permitted_W` already is the mask of llguidance, which permits EOS at a dead end too.
        """
        vocabulary = self.vocabulary
        if self.ended or not self.readings:
            self.ended = True
            permitted_W[:] = vocabulary.eos_W
            return
        if not vocabulary.is_exact:
            permitted_W[:] = self.mask_of_readings()
        large_W = self.large_numbers()
        if large_W is not None:
            permitted_W &= ~large_W
        is_complete = any(reading.matcher.is_accepting() for reading in self.readings)
        is_own_mask = vocabulary.is_exact and large_W is None
        if is_complete and may_end:
            permitted_W |= vocabulary.eos_W
        elif is_complete or not is_own_mask or any(permitted_W[i] & bits for i, bits in vocabulary.eos_bits):
            permitted_W &= ~vocabulary.eos_W
            if not permitted_W.any():
                self.ended = not is_complete
                permitted_W[:] = vocabulary.eos_W

    def large_numbers(self) -> np.ndarray | None:
        """(W,): the tokens with which a number of exact bytes becomes infinite; None if there are none."""
        numbers, tokens = self.constraint.numbers, self.tokens
        if numbers is None or not (numbers.long or (tokens and tokens[-1] in numbers.ends_in_number)):
            return None  # at almost every token
        large = numbers.too_large(numbers.tail(tokens))
        if not large or is_within_string(b"".join(numbers.pieces[token] for token in tokens)):
            return None
        return self.vocabulary.pack_tokens(large)

    def mask_of_readings(self) -> np.ndarray:
        """(W,): the tokens that may follow in one of the readings."""
        mask_W = self.with_spaces(self.readings[0])
        for reading in self.readings[1:]:
            mask_W = mask_W | self.with_spaces(reading)
        return mask_W

    def with_spaces(self, reading: Reading) -> np.ndarray:
        """(W,): the tokens that may follow with a space or without one."""
        vocabulary = self.vocabulary
        own = np.frombuffer(reading.matcher.compute_bitmask(), np.uint32)
        joined_W, spaced_W = own[: 2 * vocabulary.num_words].reshape(2, -1)  # a word more may follow
        if reading.may_hold_number and (large := vocabulary.numbers.too_large(number_tail(reading.text.encode()))):
            joined_W, spaced_W = (own_W & ~vocabulary.pack_tokens(large) for own_W in (joined_W, spaced_W))
        if not reading.num_tokens:
            return joined_W & vocabulary.starts_word_W
        if not reading.ends_word:
            return joined_W
        # two words without a space would be one
        if not vocabulary.spelling.words_can_join and not is_word_break(reading.text[-1]):
            joined_W = joined_W & vocabulary.joins_word_W
        return joined_W | spaced_W

    def accept(self, token: int) -> None:
        """Append a token. Special tokens are no text."""
        if token in self.vocabulary.eos_ids:
            self.ended = True
        elif not self.vocabulary.spelling.pieces[token] or not self.readings:
            return
        elif not self.vocabulary.is_exact:
            self.readings = self.extend_readings(token)
        elif self.readings[0].matcher.try_consume_tokens([token]):
            self.tokens.append(token)
        else:
            self.readings = []

    def accept_all(self, tokens: TokenIds) -> None:
        """Append tokens; several at once where that is possible."""
        if not self.vocabulary.is_exact or not self.readings:
            for token in tokens:
                self.accept(token)
            return
        eos_ids, pieces = self.vocabulary.eos_ids, self.vocabulary.spelling.pieces
        self.ended = self.ended or any(token in eos_ids for token in tokens)
        own = [token for token in tokens if pieces[token] and token not in eos_ids]
        self.tokens += own
        if self.readings[0].matcher.try_consume_tokens(own) < len(own):
            self.readings = []

    def extend_readings(self, token: int) -> list[Reading]:
        """Return the readings with the next token, with and without a space before it."""
        tokens = self.vocabulary.spelling
        assert tokens.starts_word is not None
        assert tokens.ends_word is not None
        piece, ends_word = tokens.pieces[token].decode(), bool(tokens.ends_word[token])
        found = list[tuple[Reading, int]]()  # each with the token that its matcher has to consume
        for reading in self.readings:
            is_boundary = bool(reading.num_tokens) and reading.ends_word and bool(tokens.starts_word[token])
            is_joinable = tokens.words_can_join or is_word_break(reading.text[-1:] or " ") or is_word_break(piece[0])
            usual = is_boundary and space_is_usual(reading.text, piece)
            for has_space in [usual, not usual] if is_boundary and is_joinable else [is_boundary]:
                own = token + self.vocabulary.spaced_offset * has_space
                if not reading.matcher.validate_tokens([own]) or reading.makes_infinite(piece, has_space):
                    continue
                unusual = (reading.num_tokens,) if has_space != usual and is_joinable else ()
                added = " " * has_space + piece
                longer = Reading(
                    reading.matcher,
                    reading.text + added,
                    ends_word,
                    reading.num_tokens + 1,
                    (*unusual, *reading.unusual),
                    reading.prefix and reading.prefix.extend(added),
                )
                found.append((longer, own))
        kept, readings = select_readings(found) if len(found) > 1 else found, list[Reading]()
        num_uses = Counter(id(reading.matcher) for reading, _ in kept)  # the last one needs no copy
        for reading, own in kept:
            num_uses[id(reading.matcher)] -= 1
            readings.append(reading.copy() if num_uses[id(reading.matcher)] else reading)
            readings[-1].matcher.consume_token(own)
        return readings


def select_readings(found: list[tuple[Reading, int]]) -> list[tuple[Reading, int]]:
    """Return a reading of each state, the most usual one of all first.

    Of too many, the shortest and the longest of their kind stay beside the most usual ones: the one that a bound on the
    length permits is among them, or close to them.
    """
    by_state: dict[tuple[Hashable, int], tuple[Reading, int]] = {}
    for item in sorted(found, key=lambda item: item[0].rank):
        by_state.setdefault(item[0].state, item)
    lengths: dict[Hashable, list[int]] = {}
    for known, length in by_state:
        lengths.setdefault(known, []).append(length)
    first, *others = by_state
    others.sort(key=lambda state: min(lengths[state[0]]) < state[1] < max(lengths[state[0]]))
    chosen = {first, *others[: MAX_READINGS - 1]}
    return [item for state, item in by_state.items() if state in chosen]


class ConstraintState:
    """The constraint of a batch: `forbidden` before a token is chosen, `accept` after it."""

    def __init__(self, rows: list[ConstraintRow], vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.set_rows(rows)

    def set_rows(self, rows: list[ConstraintRow]) -> None:
        """Allocate bits, their bytes, and eight bools for each byte. Scores without a token are forbidden."""
        self.rows = rows
        self.masks = TokenMasks(np.zeros((len(rows), rows[0].vocabulary.num_words), dtype=np.uint32))
        self.bytes = self.masks.permitted_BW.view(np.uint8).reshape(-1)
        self.bools = np.zeros(len(self.bytes), dtype=np.uint64)
        known_BV = torch.from_numpy(self.bools.view(bool).reshape(len(rows), -1))[:, : self.vocab_size]
        self.known_BV, self.num_unknown = known_BV, self.vocab_size - known_BV.shape[1]

    def forbidden(self, may_end: bool = True) -> Tensor:
        """(B, V) bool: the tokens that may not follow: all but EOS in a row that has ended or cannot go on.

        On a CPU the next call overwrites it.
        """
        self.masks.write([MaskRequest(i, row, may_end) for i, row in enumerate(self.rows)])
        np.take(FORBIDDEN_BOOLS, self.bytes, out=self.bools, mode="clip")
        forbidden_BV = F.pad(self.known_BV, (0, self.num_unknown), value=True) if self.num_unknown else self.known_BV
        return forbidden_BV if self.device.type == "cpu" else forbidden_BV.to(self.device)

    def accept(self, token_B: Iterable[int]) -> None:
        """Append a token to each row."""
        for row, token in zip(self.rows, token_B, strict=True):
            row.accept(token)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row that occurs twice is copied."""
        selected, used = list[ConstraintRow](), set[int]()
        for row in rows:
            selected.append(self.rows[row].copy() if row in used else self.rows[row])
            used.add(row)
        if len(selected) == len(self.rows):
            self.rows = selected
        else:
            self.set_rows(selected)
