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

from firth.tokens.builders import METASPACE_ESCAPES, NON_SPACE_WHITESPACE_REGEX, SPLIT_PATTERNS, WORD_LEVEL_REGEX
from firth.tokens.tokenizer import Tokenizer

SEGMENT_SEPARATOR = "\ufdd3"  # between stretches that are tokenised together; Unicode promises that it is no character
GROUP_SEGMENTS = 500  # stretches
MAX_CACHED_SEGMENT_CHARS = 40  # characters of a stretch that may come again
MAX_WORD_CACHE_BYTES = 2**25  # bytes that all of them may take
CACHE_ENTRY_BYTES = 160  # bytes of one, beside its characters and tokens
SPACE_RUN_REGEX = re.compile(r" \s")
SEGMENT_START_REGEX = re.compile(r"(?<=\S)(?= )")


class SplitRules(NamedTuple):
    """What a tokenizer does with space: the tokens before a space, and those from it on, never depend on each other.

    That is so at every space or, where a run of spaces counts as one, at the first of a run.
    """

    merges_space_runs: bool = False
    newline_as: str = (
        ""  # " " where it is the same as a space, "\n" where words part before it as they do before a space
    )
    splits_after: str = ""  # characters after which words part in any case
    isolated: tuple[
        tuple[str, str], ...
    ] = ()  # how to set aside, by spaces that change nothing, what words often touch


ISOLATED_PUNCTUATION = (
    (",", " ,"),
    (".", " ."),
    (")", " )"),
    ("(", "( "),
    ('"', ' " '),
    (";", " ;"),
    (":", " :"),
    ("-", " - "),
)
BERT_SPLIT_RULES = SplitRules(newline_as=" ", splits_after=punctuation, isolated=ISOLATED_PUNCTUATION)
WORD_LEVEL_SPLIT_RULES = SplitRules(newline_as=" ", isolated=ISOLATED_PUNCTUATION)
UNIGRAM_SPLIT_RULES = SplitRules(newline_as="\n")
GPT2_SPLIT_RULES = SplitRules(merges_space_runs=True, newline_as="\n")
LLAMA3_SPLIT_RULES = SplitRules(merges_space_runs=True)


def find_split_rules(tokenizer: Tokenizer) -> SplitRules | None:
    """The habit of a tokenizer that is built like one of ours, else None."""
    state = json.loads(tokenizer.backend.to_str())
    before, cut = (flatten_steps(state[name]) for name in ("normalizer", "pre_tokenizer"))
    own_words = any(not token["special"] for token in state["added_tokens"])
    gaps = tokenizer.backend.get_vocab_size() != tokenizer.vocab.size  # in one of which the mark would lie
    if own_words or gaps or tokenizer.is_reversed or state["model"].get("dropout"):
        return None
    plain = all(step["type"] == "Lowercase" or is_metaspace_escape(step) for step in before)
    match [step["type"] for step in cut]:
        case ["BertPreTokenizer"] if plain or [step["type"] for step in before] == ["BertNormalizer"]:
            return BERT_SPLIT_RULES
        case ["Split"] if plain and is_regex_split(cut[0], WORD_LEVEL_REGEX, "Removed"):
            return WORD_LEVEL_SPLIT_RULES
        case ["Split", "Metaspace"] if (
            plain and is_regex_split(cut[0], NON_SPACE_WHITESPACE_REGEX, "Isolated") and cut[1]["split"]
        ):
            return UNIGRAM_SPLIT_RULES
        case ["ByteLevel"] if plain and cut[0]["use_regex"] and not cut[0]["add_prefix_space"]:
            return GPT2_SPLIT_RULES
        case ["Split", "ByteLevel"] if plain and is_regex_split(cut[0], SPLIT_PATTERNS["llama3"], "Isolated"):
            return None if cut[1]["use_regex"] or cut[1]["add_prefix_space"] else LLAMA3_SPLIT_RULES
    return None


def flatten_steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps that a part of tokenizer.json is made of."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [
        step
        for name in ("normalizers", "pretokenizers")
        for part in component.get(name, ())
        for step in flatten_steps(part)
    ]


def is_metaspace_escape(step: Mapping[str, Any]) -> bool:
    """Whether a step writes one character as others, none of them a space."""
    known = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in METASPACE_ESCAPES]
    return step in known


def is_regex_split(step: Mapping[str, Any], pattern: str, behavior: str) -> bool:
    return step["pattern"] == {"Regex": pattern} and step["behavior"] == behavior


class SegmentedSentence(NamedTuple):
    """A part of a text, up to where a sentence ends: the stretch that begins the text, others, and plain ones.

    A plain stretch is a space and what follows it up to the next; it is kept without that space.
    """

    first_segment: str | None
    uncached_segments: Sequence[str]
    cached_segments: Sequence[str]


class WordCache:
    """Tokenises texts, and remembers the stretches between spaces. `rules` is that of the tokenizer.

    When they have filled `max_bytes` they are forgotten; those that are frequent are soon back.
    """

    def __init__(self, tokenizer: Tokenizer, rules: SplitRules, max_bytes: int = MAX_WORD_CACHE_BYTES) -> None:
        backend = Backend.from_str(tokenizer.backend.to_str())
        backend.add_tokens([AddedToken(SEGMENT_SEPARATOR, normalized=False)])
        self.tokenizer, self.rules = tokenizer, rules
        self.separator_tokenizer = Tokenizer(backend, tokenizer.special_tokens, tokenizer.config)
        self.separator_id = backend.token_to_id(SEGMENT_SEPARATOR)
        self.entries: dict[str, bytes] = {}
        self.used_bytes, self.max_bytes = 0, max_bytes

    def segment_text(self, text: str, sentence_ends: Sequence[int]) -> list[SegmentedSentence] | None:
        """The pieces of a text that end at some characters; None where one of these may be within a token."""
        if SEGMENT_SEPARATOR in text:
            return None
        newline, after = self.rules.newline_as, self.rules.splits_after
        if not all(text[e] == " " or (text[e] == "\n" and newline) or text[e - 1] in after for e in sentence_ends):
            return None
        pieces = [text[start:end] for start, end in pairwise([0, *sentence_ends, len(text)])]
        if newline == " ":
            pieces = self._isolate_punctuation([piece.replace("\n", " ") for piece in pieces])
        return [self._segment_sentence(piece, i == 0) for i, piece in enumerate(pieces)]

    def _isolate_punctuation(self, sentences: Sequence[str]) -> list[str]:
        """Pieces without newlines, with spaces around what words often touch; all at once, which is faster."""
        text = "\n".join(sentences)
        for mark, apart in self.rules.isolated:
            text = text.replace(mark, apart)
        return text.split("\n")

    def _segment_sentence(self, text: str, is_first: bool) -> SegmentedSentence:
        others: list[str] = []
        if self.rules.merges_space_runs and (text.endswith(" ") or SPACE_RUN_REGEX.search(text)):
            others, plain = SEGMENT_START_REGEX.split(text), []
        else:
            begin, *plain = text.split(" ")
            others = [begin] if begin else []
        if is_first and others and not others[0].startswith(" "):
            return SegmentedSentence(others[0], others[1:], plain)
        return SegmentedSentence(None, others, plain)

    def __call__(self, texts: Sequence[Sequence[SegmentedSentence]]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each text: its tokens, which of them start a word, and how many each piece has."""
        pieces = list(chain.from_iterable(texts))
        opening = self._encode_first_segments(
            {piece.first_segment for piece in pieces if piece.first_segment is not None}
        )
        others = self._encode_segments(list(set(chain.from_iterable(piece.uncached_segments for piece in pieces))))
        long = self._add_new_segments(pieces)
        known, found = self.entries, []
        for text in texts:
            blobs = [
                (opening[piece.first_segment] if piece.first_segment is not None else b"")
                + b"".join([others[stretch] for stretch in piece.uncached_segments])
                + b"".join([known[stretch] for stretch in piece.cached_segments])
                for piece in text
            ]
            both_N = np.frombuffer(b"".join(blobs), np.uint32)
            found.append((both_N >> 1, (both_N & 1).astype(bool), np.array([len(blob) // 4 for blob in blobs])))
        for stretch in long:
            del known[stretch]
        return found

    def _encode_first_segments(self, segments: Iterable[str]) -> dict[str, bytes]:
        """Of stretches that begin a text, before whose first word some tokenizers think a space."""
        texts = list(segments)
        encodings = self.tokenizer.encode_with_offsets(texts)
        return {
            text: pack_tokens(e.ids, self.tokenizer.word_starts(e)) for text, e in zip(texts, encodings, strict=True)
        }

    def _add_new_segments(self, sentences: Sequence[SegmentedSentence]) -> list[str]:
        """Learn the plain stretches that are new, and return those that are too long to be kept."""
        if self.used_bytes > self.max_bytes:
            self.entries, self.used_bytes = {}, 0
        new = list(set(chain.from_iterable(piece.cached_segments for piece in sentences)).difference(self.entries))
        blobs = self._encode_segments([f" {stretch}" for stretch in new]).values()
        self.entries.update(zip(new, blobs, strict=True))
        self.used_bytes += CACHE_ENTRY_BYTES * len(new) + sum(map(len, new)) + sum(map(len, blobs))
        return [stretch for stretch in new if len(stretch) > MAX_CACHED_SEGMENT_CHARS]

    def _encode_segments(self, segments: Sequence[str]) -> dict[str, bytes]:
        """Stretches that do not begin a text, many at a time: a mark between them keeps them apart."""
        groups = [segments[i : i + GROUP_SEGMENTS] for i in range(0, len(segments), GROUP_SEGMENTS)]
        blobs: list[bytes] = []
        for encoding in self.separator_tokenizer.encode_with_offsets(
            [SEGMENT_SEPARATOR + SEGMENT_SEPARATOR.join(group) for group in groups]
        ):
            blob = pack_tokens(encoding.ids, self.separator_tokenizer.word_starts(encoding))
            marks = np.flatnonzero(np.frombuffer(blob, np.uint32) >> 1 == self.separator_id)
            ends = [*(4 * marks[1:]).tolist(), len(blob)]
            blobs += [blob[mark + 4 : end] for mark, end in zip((4 * marks).tolist(), ends, strict=True)]
        return dict(zip(segments, blobs, strict=True))


def pack_tokens(ids: Sequence[int], is_word_start: np.ndarray) -> bytes:
    """Tokens, and which of them start a word, as one number each."""
    return (np.array(ids, np.uint32) << 1 | is_word_start).tobytes()
