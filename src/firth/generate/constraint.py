"""Constrained decoding: at each step, forbid every token after which the text could no longer match a grammar.

A grammar (`grammar.py`) is a set of texts: the JSON of a schema, the matches of a regex, a few choices. llguidance
reads the bytes of the text so far and walks a trie of all tokens, to find those whose bytes keep the text a prefix of
some text of the set. The other tokens get the logit -inf, and EOS is permitted only where the text is complete. So the
model still chooses, by its own probabilities, but only among valid continuations (Willard & Louf 2023; Geng et al.
2023).

    state = constraint.start(num_rows)
    scores_BV.masked_fill_(state.forbidden(), -inf)    # before a token is chosen
    state.accept(token_B)                              # after it

A mask takes some 20 µs, since llguidance caches what it learned of the trie. It is computed when it is asked for: on a
GPU, the model's kernels run meanwhile.

Byte-level, Unigram and character tokens say exactly which bytes they add. WordPiece, word and BPE-with-"</w>" tokens do
not say whether a space stands before a word (`tokens/token_bytes.py`). There, a row keeps several readings of its
tokens at once, each with a matcher of its own; those that the grammar rejects are dropped, and the most usual one is
the text.

B rows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from firth.core.errors import UserError, quote
from firth.generate.grammar import MAX_CACHED_GRAMMARS, Grammar, byte_matcher, import_llguidance
from firth.tokens import TokenIds, Tokenizer
from firth.tokens.token_bytes import is_word_break, space_is_usual, token_bytes

MAX_READINGS = 16  # of a row
compiled_vocabularies: WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], ConstraintVocabulary]] = WeakKeyDictionary()


class ConstraintVocabulary:
    """The tokens of a tokenizer for llguidance; tokens with optional spaces occur twice: `name`, and ` name`."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: TokenIds) -> None:
        llguidance = import_llguidance()
        if tokenizer.is_reversed:
            raise UserError("This model writes from the end of a text to its beginning: it cannot follow a grammar.")
        self.spelling, self.kind = token_bytes(tokenizer), tokenizer.kind
        self.constraints: dict[tuple[str, bool], Constraint] = {}  # by grammar
        self.size, self.eos_ids = tokenizer.vocab.size, [i for i in eos_ids if i < tokenizer.vocab.size]
        self.tokens = list(self.spelling.pieces)
        if self.spelling.has_optional_spaces:
            assert self.spelling.starts_word is not None
            self.tokens += [
                b" " + piece if starts and piece else b""
                for piece, starts in zip(self.spelling.pieces, self.spelling.starts_word, strict=True)
            ]
            self.begins_with_break = np.array([bool(p) and is_word_break(p.decode()[0]) for p in self.spelling.pieces])
        self.bos_token_id, self.eos_token_id = None, self.eos_ids[0]
        self.special_token_ids = list(tokenizer.vocab.special_ids)
        self.llguidance_tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=self.eos_ids, slices=llguidance.LLTokenizer.json_slices()
        )

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
        if vocabulary.spelling.has_optional_spaces:
            grammar = grammar.with_fixed_spaces()  # readings are for the spaces inside of texts
        self.grammar, self.vocabulary = grammar, vocabulary
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
        if not start.permitted().any():
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
        return ConstraintRow(self, [Reading(self.matcher.deep_copy())])

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
        for token in ids:
            row.accept(token)
        return [reading for reading in row.readings if reading.matcher.is_accepting()] or row.readings

    def facts(self, ids: TokenIds) -> dict[str, Any]:
        """Return whether the text is `complete`, and its `value`: of JSON parsed, None if the text was cut."""
        complete = any(reading.matcher.is_accepting() for reading in self.read(ids))
        text = self.text(ids)
        return {
            "complete": complete,
            "value": (json.loads(text) if self.grammar.is_json else text) if complete else None,
        }


@dataclass(frozen=True)
class Reading:
    """One way to read the tokens of a row: its matcher, and with optional spaces its text."""

    matcher: Any
    text: str = ""
    ends_word: bool = False  # whether a space may follow
    num_tokens: int = 0
    unusual: tuple[int, ...] = ()  # the tokens whose space is not the usual one, the last first

    def copy(self) -> Reading:
        return replace(self, matcher=self.matcher.deep_copy())


def read_bitmask(reading: Reading) -> np.ndarray:
    """Bool, by the index of `ConstraintVocabulary.tokens`: the tokens whose bytes may follow."""
    bits = np.frombuffer(reading.matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little").view(bool)


class ConstraintRow:
    """The readings of one row, the most usual first. A row without readings can only end."""

    def __init__(self, constraint: Constraint, readings: list[Reading], ended: bool = False) -> None:
        self.constraint, self.vocabulary = constraint, constraint.vocabulary
        self.readings, self.ended = readings, ended

    def copy(self) -> ConstraintRow:
        return ConstraintRow(self.constraint, [reading.copy() for reading in self.readings], self.ended)

    def permitted(self) -> np.ndarray:
        """(V,) bool: the tokens that may follow; none of them where the grammar needs text that no token has."""
        size = self.vocabulary.size
        if self.ended or not self.readings:
            return np.zeros(size, dtype=bool)
        if self.vocabulary.spelling.has_optional_spaces:
            permitted = self.with_spaces(self.readings[0], read_bitmask(self.readings[0]))
            for reading in self.readings[1:]:
                permitted = permitted | self.with_spaces(reading, read_bitmask(reading))
        else:
            permitted = read_bitmask(self.readings[0])[:size]  # exact bytes have one reading
        # llguidance permits EOS at a dead end, too
        permitted[self.vocabulary.eos_ids] = any(reading.matcher.is_accepting() for reading in self.readings)
        return permitted

    def write_forbidden(self, forbidden_V: np.ndarray) -> None:
        """Mark the tokens that may not follow: all but EOS where the row has ended or cannot go on."""
        permitted = self.permitted()[: len(forbidden_V)]
        np.logical_not(permitted, out=forbidden_V[: len(permitted)])
        if not permitted.any():
            self.ended = True
            forbidden_V[self.vocabulary.eos_ids] = False

    def with_spaces(self, reading: Reading, own: np.ndarray) -> np.ndarray:
        """(V,) bool: the tokens that may follow with a space or without one."""
        size, tokens = self.vocabulary.size, self.vocabulary.spelling
        assert tokens.starts_word is not None
        joined, spaced = own[:size], own[size : 2 * size]
        if not reading.num_tokens:
            return joined & tokens.starts_word
        if not reading.ends_word:
            return joined
        if not tokens.words_can_join and not is_word_break(reading.text[-1]):  # two words without a space would be one
            joined = joined & (~tokens.starts_word | self.vocabulary.begins_with_break)
        return joined | spaced

    def accept(self, token: int) -> None:
        """Append a token. Special tokens are no text."""
        if token in self.vocabulary.eos_ids:
            self.ended = True
        elif not self.vocabulary.spelling.pieces[token]:
            return
        elif self.vocabulary.spelling.has_optional_spaces:
            self.readings = self.extend_readings(token)
        else:
            self.readings = [r for r in self.readings if r.matcher.try_consume_tokens([token])]

    def extend_readings(self, token: int) -> list[Reading]:
        """Return the readings with the next token, with and without a space before it."""
        tokens = self.vocabulary.spelling
        assert tokens.starts_word is not None
        assert tokens.ends_word is not None
        piece, ends_word, found = tokens.pieces[token].decode(), bool(tokens.ends_word[token]), list[Reading]()
        for reading in self.readings:
            is_boundary = bool(reading.num_tokens) and reading.ends_word and bool(tokens.starts_word[token])
            is_joinable = tokens.words_can_join or is_word_break(reading.text[-1:] or " ") or is_word_break(piece[0])
            usual = is_boundary and space_is_usual(reading.text, piece)
            for has_space in [usual, not usual] if is_boundary and is_joinable else [is_boundary]:
                own = token + self.vocabulary.size * has_space
                if not reading.matcher.validate_tokens([own]):
                    continue
                matcher = reading.matcher.deep_copy()
                matcher.consume_token(own)
                unusual = (reading.num_tokens,) if has_space != usual and is_joinable else ()
                found.append(
                    Reading(
                        matcher,
                        reading.text + " " * has_space + piece,
                        ends_word,
                        reading.num_tokens + 1,
                        (*unusual, *reading.unusual),
                    )
                )
        # Few unusual spaces come first, then late ones: those that the grammar had less time to reject.
        return sorted(found, key=lambda r: (len(r.unusual), [-at for at in r.unusual]))[:MAX_READINGS]


class ConstraintState:
    """The constraint of a batch: `forbidden` before a token is chosen, `accept` after it."""

    def __init__(self, rows: list[ConstraintRow], vocab_size: int, device: torch.device) -> None:
        self.rows, self.vocab_size, self.device = rows, vocab_size, device
        self.buffer_BV = np.ones((len(rows), vocab_size), dtype=bool)  # tokens beyond the tokenizer's stay forbidden

    def forbidden(self) -> Tensor:
        """(B, V) bool: the tokens that may not follow: all but EOS in a row that has ended or cannot go on.

        On a CPU the next call overwrites it.
        """
        if len(self.buffer_BV) != len(self.rows):
            self.buffer_BV = np.ones((len(self.rows), self.vocab_size), dtype=bool)
        for forbidden_V, row in zip(self.buffer_BV, self.rows, strict=True):
            row.write_forbidden(forbidden_V)
        return torch.from_numpy(self.buffer_BV).to(self.device)

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
        self.rows = selected
