"""The tokens of words that were met before: most of a text is made of few words, and need not be tokenised again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from string import punctuation
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from firth.tokens.kinds import ESCAPES, LINE, PATTERNS, WORD
from firth.tokens.tokenizer import Tokenizer

MARK = "\ufdd3"  # between stretches that are tokenised together; Unicode promises that it is no character
GROUP = 500  # stretches
LONGEST = 40  # characters of a stretch that may come again
MOST = 2**25  # bytes that all of them may take
ENTRY = 160  # bytes of one, beside its characters and tokens
RUN = re.compile(r" \s")
STRETCH = re.compile(r"(?<=\S)(?= )")


class Habit(NamedTuple):
    """What a tokenizer does with space: the tokens before a space, and those from it on, never depend on each other.

    That is so at every space or, where a run of spaces counts as one, at the first of a run.
    """

    runs: bool = False
    newline: str = ""  # " " where it is the same as a space, "\n" where words part before it as they do before a space
    after: str = ""  # characters after which words part in any case
    aside: tuple[tuple[str, str], ...] = ()  # how to set aside, by spaces that change nothing, what words often touch


ASIDE = ((",", " ,"), (".", " ."), (")", " )"), ("(", "( "), ('"', ' " '), (";", " ;"), (":", " :"), ("-", " - "))
BERT = Habit(newline=" ", after=punctuation, aside=ASIDE)
WORDS = Habit(newline=" ", aside=ASIDE)
UNIGRAM = Habit(newline="\n")
GPT2 = Habit(runs=True, newline="\n")
LLAMA3 = Habit(runs=True)


def habit_of(tokenizer: Tokenizer) -> Habit | None:
    """The habit of a tokenizer that is built like one of ours, else None."""
    state = json.loads(tokenizer.backend.to_str())
    before, cut = (steps(state[name]) for name in ("normalizer", "pre_tokenizer"))
    own_words = any(not token["special"] for token in state["added_tokens"])
    gaps = tokenizer.backend.get_vocab_size() != tokenizer.vocab.size  # in one of which the mark would lie
    if own_words or gaps or tokenizer.backward or state["model"].get("dropout"):
        return None
    plain = all(step["type"] == "Lowercase" or is_spelling(step) for step in before)
    match [step["type"] for step in cut]:
        case ["BertPreTokenizer"] if plain or [step["type"] for step in before] == ["BertNormalizer"]:
            return BERT
        case ["Split"] if plain and is_split(cut[0], WORD, "Removed"):
            return WORDS
        case ["Split", "Metaspace"] if plain and is_split(cut[0], LINE, "Isolated") and cut[1]["split"]:
            return UNIGRAM
        case ["ByteLevel"] if plain and cut[0]["use_regex"] and not cut[0]["add_prefix_space"]:
            return GPT2
        case ["Split", "ByteLevel"] if plain and is_split(cut[0], PATTERNS["llama3"], "Isolated"):
            return None if cut[1]["use_regex"] or cut[1]["add_prefix_space"] else LLAMA3
    return None


def steps(state: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps that a part of tokenizer.json is made of."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for name in ("normalizers", "pretokenizers") for part in state.get(name, ()) for step in steps(part)]


def is_spelling(step: Mapping[str, Any]) -> bool:
    """Whether a step writes one character as others, none of them a space."""
    known = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in ESCAPES]
    return step in known


def is_split(step: Mapping[str, Any], pattern: str, behavior: str) -> bool:
    return step["pattern"] == {"Regex": pattern} and step["behavior"] == behavior


class Piece(NamedTuple):
    """A part of a text, up to where a sentence ends: the stretch that begins the text, others, and plain ones.

    A plain stretch is a space and what follows it up to the next; it is kept without that space.
    """

    opening: str | None
    others: Sequence[str]
    plain: Sequence[str]


class Known:
    """Tokenises texts, and remembers the stretches between spaces. `habit` is that of the tokenizer.

    When they have filled `memory` they are forgotten; those that are frequent are soon back.
    """

    def __init__(self, tokenizer: Tokenizer, habit: Habit, memory: int = MOST) -> None:
        backend = Backend.from_str(tokenizer.backend.to_str())
        backend.add_tokens([AddedToken(MARK, normalized=False)])
        self.tokenizer, self.habit = tokenizer, habit
        self.marked = Tokenizer(backend, tokenizer.roles, tokenizer.config)
        self.mark = backend.token_to_id(MARK)
        self.known: dict[str, bytes] = {}
        self.size, self.memory = 0, memory

    def cut(self, text: str, edges: Sequence[int]) -> list[Piece] | None:
        """The pieces of a text that end at some characters; None where one of these may be within a token."""
        if MARK in text:
            return None
        newline, after = self.habit.newline, self.habit.after
        if not all(text[e] == " " or (text[e] == "\n" and newline) or text[e - 1] in after for e in edges):
            return None
        pieces = [text[start:end] for start, end in pairwise([0, *edges, len(text)])]
        if newline == " ":
            pieces = self._set_aside([piece.replace("\n", " ") for piece in pieces])
        return [self._piece(piece, i == 0) for i, piece in enumerate(pieces)]

    def _set_aside(self, pieces: Sequence[str]) -> list[str]:
        """Pieces without newlines, with spaces around what words often touch; all at once, which is faster."""
        text = "\n".join(pieces)
        for mark, apart in self.habit.aside:
            text = text.replace(mark, apart)
        return text.split("\n")

    def _piece(self, text: str, first: bool) -> Piece:
        others: list[str] = []
        if self.habit.runs and (text.endswith(" ") or RUN.search(text)):
            others, plain = STRETCH.split(text), []
        else:
            begin, *plain = text.split(" ")
            others = [begin] if begin else []
        if first and others and not others[0].startswith(" "):
            return Piece(others[0], others[1:], plain)
        return Piece(None, others, plain)

    def __call__(self, texts: Sequence[Sequence[Piece]]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each text: its tokens, which of them start a word, and how many each piece has."""
        pieces = list(chain.from_iterable(texts))
        opening = self._openings({piece.opening for piece in pieces if piece.opening is not None})
        others = self._stretches(list(set(chain.from_iterable(piece.others for piece in pieces))))
        long = self._learn(pieces)
        known, found = self.known, []
        for text in texts:
            blobs = [
                (opening[piece.opening] if piece.opening is not None else b"")
                + b"".join([others[stretch] for stretch in piece.others])
                + b"".join([known[stretch] for stretch in piece.plain])
                for piece in text
            ]
            both_N = np.frombuffer(b"".join(blobs), np.uint32)
            found.append((both_N >> 1, (both_N & 1).astype(bool), np.array([len(blob) // 4 for blob in blobs])))
        for stretch in long:
            del known[stretch]
        return found

    def _openings(self, stretches: Iterable[str]) -> dict[str, bytes]:
        """Of stretches that begin a text, before whose first word some tokenizers think a space."""
        texts = list(stretches)
        encodings = self.tokenizer.encodings(texts)
        return {text: packed(e.ids, self.tokenizer.word_starts(e)) for text, e in zip(texts, encodings, strict=True)}

    def _learn(self, pieces: Sequence[Piece]) -> list[str]:
        """Learn the plain stretches that are new, and return those that are too long to be kept."""
        if self.size > self.memory:
            self.known, self.size = {}, 0
        new = list(set(chain.from_iterable(piece.plain for piece in pieces)).difference(self.known))
        blobs = self._stretches([f" {stretch}" for stretch in new]).values()
        self.known.update(zip(new, blobs, strict=True))
        self.size += ENTRY * len(new) + sum(map(len, new)) + sum(map(len, blobs))
        return [stretch for stretch in new if len(stretch) > LONGEST]

    def _stretches(self, stretches: Sequence[str]) -> dict[str, bytes]:
        """Stretches that do not begin a text, many at a time: a mark between them keeps them apart."""
        groups = [stretches[i : i + GROUP] for i in range(0, len(stretches), GROUP)]
        blobs: list[bytes] = []
        for encoding in self.marked.encodings([MARK + MARK.join(group) for group in groups]):
            blob = packed(encoding.ids, self.marked.word_starts(encoding))
            marks = np.flatnonzero(np.frombuffer(blob, np.uint32) >> 1 == self.mark)
            ends = [*(4 * marks[1:]).tolist(), len(blob)]
            blobs += [blob[mark + 4 : end] for mark, end in zip((4 * marks).tolist(), ends, strict=True)]
        return dict(zip(stretches, blobs, strict=True))


def packed(ids: Sequence[int], starts: np.ndarray) -> bytes:
    """Tokens, and which of them start a word, as one number each."""
    return (np.array(ids, np.uint32) << 1 | starts).tobytes()
