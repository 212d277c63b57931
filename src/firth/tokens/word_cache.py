"""A cache of tokenized words, which makes tokenizing a corpus several times faster.

A text repeats few words (Zipf's law), and a tokenizer never merges across a word boundary. So the tokens of a text are
the concatenated tokens of its words, and each distinct word is tokenized once:

1. `find_split_rules` recognises tokenizers for which a cut before a space never changes the tokens on either side. All
   others are not cached.
2. `segment_text` cuts each sentence before its spaces. A segment is a space and the characters up to the next one.
3. Segments that the cache lacks are tokenized many at a time, joined by a separator that the tokenizer keeps apart.
4. The tokens of a text are looked up and joined as bytes: 4 bytes a token, its id and one bit for "starts a word".

The first segment of a text is tokenized separately, because some tokenizers add a space before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from string import punctuation
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken

from firth.tokens.builders import (
    CHAR_WORD_REGEX,
    METASPACE_ESCAPES,
    NON_SPACE_WHITESPACE_REGEX,
    SPLIT_PATTERNS,
    WORD_LEVEL_REGEX,
)
from firth.tokens.tokenizer import Tokenizer, copy_backend

SEGMENT_SEPARATOR = "\ufdd3"  # a Unicode noncharacter, which no text contains
GROUP_SEGMENTS = 500  # segments that are tokenized as one text
MAX_CACHED_SEGMENT_CHARS = 40  # characters: longer segments rarely repeat and are not cached
MAX_WORD_CACHE_BYTES = 2**25  # bytes of the whole cache, by default
CACHE_ENTRY_BYTES = 160  # bytes of an entry beside its characters and tokens
SPACE_RUN_REGEX = re.compile(r" \s")
SEGMENT_START_REGEX = re.compile(r"(?<=\S)(?= )")


class SplitRules(NamedTuple):
    """Where a tokenizer splits words for certain, so that the tokens on both sides do not depend on each other.

    - `merges_space_runs`: only the first space of a run is a split; otherwise every space is.
    - `newline_as`: " " if a newline equals a space, "\\n" if it is a split of its own, "" if it is none.
    - `splits_after`: characters after which words are always split.
    - `isolated`: replacements that put spaces around punctuation without changing the tokens, for more cache hits.
    """

    merges_space_runs: bool = False
    newline_as: str = ""
    splits_after: str = ""
    isolated: tuple[tuple[str, str], ...] = ()


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
UNIGRAM_SPLIT_RULES = CHAR_SPLIT_RULES = SplitRules(newline_as="\n")
GPT2_SPLIT_RULES = SplitRules(merges_space_runs=True, newline_as="\n")
LLAMA3_SPLIT_RULES = SplitRules(merges_space_runs=True)


def find_split_rules(tokenizer: Tokenizer) -> SplitRules | None:
    """Return the split rules of a tokenizer that is built like one of ours, else None."""
    state = json.loads(tokenizer.backend.to_str())
    normalizers, splits = (flatten_steps(state[name]) for name in ("normalizer", "pre_tokenizer"))
    has_added_words = any(not token["special"] for token in state["added_tokens"])
    has_id_gaps = tokenizer.backend.get_vocab_size() != tokenizer.vocab.size  # the separator would fill a gap
    if has_added_words or has_id_gaps or tokenizer.is_reversed or state["model"].get("dropout"):
        return None
    plain = all(step["type"] == "Lowercase" or is_metaspace_escape(step) for step in normalizers)
    match [step["type"] for step in splits]:
        case ["BertPreTokenizer"] if plain or [step["type"] for step in normalizers] == ["BertNormalizer"]:
            return BERT_SPLIT_RULES
        case ["Split"] if plain and is_regex_split(splits[0], WORD_LEVEL_REGEX, "Removed"):
            return WORD_LEVEL_SPLIT_RULES
        case ["Split"] if plain and is_regex_split(splits[0], CHAR_WORD_REGEX, "Isolated"):
            return CHAR_SPLIT_RULES
        case ["Split", "Metaspace"] if (
            plain and is_regex_split(splits[0], NON_SPACE_WHITESPACE_REGEX, "Isolated") and splits[1]["split"]
        ):
            return UNIGRAM_SPLIT_RULES
        case ["ByteLevel"] if plain and splits[0]["use_regex"] and not splits[0]["add_prefix_space"]:
            return GPT2_SPLIT_RULES
        case ["Split", "ByteLevel"] if plain and is_regex_split(splits[0], SPLIT_PATTERNS["llama3"], "Isolated"):
            return None if splits[1]["use_regex"] or splits[1]["add_prefix_space"] else LLAMA3_SPLIT_RULES
    return None


def flatten_steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a component of tokenizer.json, nested sequences included."""
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
    """Whether a step is one of our replacements of a character by others, none of them a space."""
    known = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in METASPACE_ESCAPES]
    return step in known


def is_regex_split(step: Mapping[str, Any], pattern: str, behavior: str) -> bool:
    return step["pattern"] == {"Regex": pattern} and step["behavior"] == behavior


class SegmentedSentence(NamedTuple):
    """The segments of a sentence. Its tokens are those of the three fields, in this order."""

    first_segment: str | None  # begins the text
    uncached_segments: Sequence[str]  # with spaces in unusual positions
    cached_segments: Sequence[str]  # each without the one space before it


class WordCache:
    """Tokenizes texts from cached segments; `rules` are the tokenizer's.

    A cache of more than `max_bytes` is emptied; frequent segments are soon back.
    """

    def __init__(self, tokenizer: Tokenizer, rules: SplitRules, max_bytes: int = MAX_WORD_CACHE_BYTES) -> None:
        backend = copy_backend(tokenizer.backend)
        backend.add_tokens([AddedToken(SEGMENT_SEPARATOR, normalized=False)])
        self.tokenizer, self.rules = tokenizer, rules
        self.separator_tokenizer = Tokenizer(backend, tokenizer.special_tokens, tokenizer.config)
        self.separator_id = backend.token_to_id(SEGMENT_SEPARATOR)
        self.entries: dict[str, bytes] = {}
        self.used_bytes, self.max_bytes = 0, max_bytes

    def segment_text(self, text: str, sentence_ends: Sequence[int]) -> list[SegmentedSentence] | None:
        """Return the segments of each sentence; None if a sentence end may lie inside a token."""
        if SEGMENT_SEPARATOR in text:
            return None
        newline, after = self.rules.newline_as, self.rules.splits_after
        if not all(text[e] == " " or (text[e] == "\n" and newline) or text[e - 1] in after for e in sentence_ends):
            return None
        sentences = [text[start:end] for start, end in pairwise([0, *sentence_ends, len(text)])]
        if newline == " ":
            sentences = self._isolate_punctuation([sentence.replace("\n", " ") for sentence in sentences])
        return [self._segment_sentence(sentence, i == 0) for i, sentence in enumerate(sentences)]

    def _isolate_punctuation(self, sentences: Sequence[str]) -> list[str]:
        """Put spaces around punctuation. The sentences, which have no newlines, are joined: one call is faster."""
        text = "\n".join(sentences)
        for mark, apart in self.rules.isolated:
            text = text.replace(mark, apart)
        return text.split("\n")

    def _segment_sentence(self, text: str, is_first: bool) -> SegmentedSentence:
        uncached: list[str] = []
        if self.rules.merges_space_runs and (text.endswith(" ") or SPACE_RUN_REGEX.search(text)):
            uncached, cached = SEGMENT_START_REGEX.split(text), []
        else:
            begin, *cached = text.split(" ")
            uncached = [begin] if begin else []
        if is_first and uncached and not uncached[0].startswith(" "):
            return SegmentedSentence(uncached[0], uncached[1:], cached)
        return SegmentedSentence(None, uncached, cached)

    def __call__(self, texts: Sequence[Sequence[SegmentedSentence]]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return for each text its ids, which of them start a word, and the number of tokens of each sentence."""
        sentences = list(chain.from_iterable(texts))
        first = self._encode_first_segments({s.first_segment for s in sentences if s.first_segment is not None})
        uncached = self._encode_segments(list(set(chain.from_iterable(s.uncached_segments for s in sentences))))
        long_segments = self._add_new_segments(sentences)
        cached, encoded = self.entries, []
        for text in texts:
            blobs = [
                (first[s.first_segment] if s.first_segment is not None else b"")
                + b"".join([uncached[segment] for segment in s.uncached_segments])
                + b"".join([cached[segment] for segment in s.cached_segments])
                for s in text
            ]
            packed_N = np.frombuffer(b"".join(blobs), np.uint32)
            encoded.append((packed_N >> 1, (packed_N & 1).astype(bool), np.array([len(blob) // 4 for blob in blobs])))
        for segment in long_segments:
            del cached[segment]
        return encoded

    def _encode_first_segments(self, segments: Iterable[str]) -> dict[str, bytes]:
        """Tokenize segments that begin a text, where some tokenizers add a space."""
        texts = list(segments)
        encodings = self.tokenizer.encode_with_offsets(texts)
        return {
            text: pack_tokens(e.ids, self.tokenizer.word_starts(e)) for text, e in zip(texts, encodings, strict=True)
        }

    def _add_new_segments(self, sentences: Sequence[SegmentedSentence]) -> list[str]:
        """Add the segments that the cache lacks; return those that are too long to stay in it."""
        if self.used_bytes > self.max_bytes:
            self.entries, self.used_bytes = {}, 0
        new = list(set(chain.from_iterable(s.cached_segments for s in sentences)).difference(self.entries))
        blobs = self._encode_segments([f" {segment}" for segment in new]).values()
        self.entries.update(zip(new, blobs, strict=True))
        self.used_bytes += CACHE_ENTRY_BYTES * len(new) + sum(map(len, new)) + sum(map(len, blobs))
        return [segment for segment in new if len(segment) > MAX_CACHED_SEGMENT_CHARS]

    def _encode_segments(self, segments: Sequence[str]) -> dict[str, bytes]:
        """Tokenize segments that do not begin a text, many at a time with a separator between them."""
        groups = [segments[i : i + GROUP_SEGMENTS] for i in range(0, len(segments), GROUP_SEGMENTS)]
        blobs: list[bytes] = []
        for encoding in self.separator_tokenizer.encode_with_offsets(
            [SEGMENT_SEPARATOR + SEGMENT_SEPARATOR.join(group) for group in groups]
        ):
            blob = pack_tokens(encoding.ids, self.separator_tokenizer.word_starts(encoding))
            separators = 4 * np.flatnonzero(np.frombuffer(blob, np.uint32) >> 1 == self.separator_id)  # in bytes
            ends = [*separators[1:].tolist(), len(blob)]
            blobs += [blob[start + 4 : end] for start, end in zip(separators.tolist(), ends, strict=True)]
        return dict(zip(segments, blobs, strict=True))


def pack_tokens(ids: Sequence[int], is_word_start: np.ndarray) -> bytes:
    """Pack each id and its "starts a word" bit into one uint32."""
    return (np.array(ids, np.uint32) << 1 | is_word_start).tobytes()
