"""The bytes that each token adds to a decoded text, whatever the kind of the tokenizer.

Constrained decoding (`generate/constraint.py`) asks of every token: does the text stay valid if the model writes it?
So it needs the bytes of each token. The decoder of tokenizer.json defines them:

- byte-level BPE spells bytes as printable characters (GPT-2: "Ġ" is a space), and a token may end inside a character;
- Unigram writes "▁" for a space, and "<0xC3>" for a byte; the space before the first word is dropped;
- a character tokenizer writes itself;
- WordPiece, word tokenizers and BPE with "</w>" do not say whether a space stands between two words. `"`, `name`, `"`
  may be `"name"` or `" name "`. Their decoder guesses, and would never write a JSON key. Here both readings are kept:
  `starts_word` and `ends_word` tell where a space may stand, and the constraint decides. Two words of WordPiece need a
  space or punctuation between them: `##` continues a word. A piece with "</w>" may be followed by any other, since a
  model that ends a word too early could not go on otherwise.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.tokens.builders import METASPACE_ESCAPES
from firth.tokens.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(NamedTuple):
    """The bytes of V tokens. A special token has none (b"")."""

    pieces: list[bytes]
    drops_first_space: bool = False  # decoding removes one space at the beginning of a text
    starts_word: np.ndarray | None = None  # (V,) bool: a space may stand before it; None: spaces are in the pieces
    ends_word: np.ndarray | None = None  # (V,) bool: a space may stand after it
    words_can_join: bool = False  # two words may stand together without a space or punctuation between them

    @property
    def has_optional_spaces(self) -> bool:
        """Whether the tokens leave open where spaces stand."""
        return self.starts_word is not None


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bytes of each id, as the decoder of the tokenizer writes it."""
    steps = decoder_steps(json.loads(tokenizer.backend.to_str())["decoder"])
    kinds, special = [step["type"] for step in steps], set(tokenizer.vocab.special_ids)
    names = [None if i in special else tokenizer.backend.id_to_token(i) for i in range(tokenizer.vocab.size)]
    if "ByteLevel" in kinds:
        return TokenBytes([b"" if name is None else byte_level_bytes(name) for name in names])
    if "WordPiece" in kinds or not steps:  # without a decoder, tokens are joined by spaces
        prefix = next((step["prefix"] for step in steps if step["type"] == "WordPiece"), "\0")
        starts = np.array([name is not None and not name.startswith(prefix) for name in names])
        pieces = [b"" if name is None else name.removeprefix(prefix).encode() for name in names]
        return TokenBytes(pieces, starts_word=starts, ends_word=np.ones_like(starts))
    if "BPEDecoder" in kinds:
        suffix = next(step["suffix"] for step in steps if step["type"] == "BPEDecoder")
        ends = np.array([name is not None and name.endswith(suffix) for name in names])
        pieces = [b"" if name is None else name.removesuffix(suffix).encode() for name in names]
        return TokenBytes(pieces, starts_word=np.ones_like(ends), ends_word=ends, words_can_join=True)
    known = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if other := [kind for kind in kinds if kind not in known]:
        raise UserError(f"The bytes of this tokenizer's tokens are unknown: its decoder has a step {other[0]}.")
    pieces = [b"" if name is None else metaspace_bytes(name, steps) for name in names]
    return TokenBytes(pieces, drops_first_space=any(map(is_first_space_dropped, steps)))


def decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder, of nested sequences too."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in decoder_steps(inner)]
    return [decoder]


def is_first_space_dropped(step: dict[str, Any]) -> bool:
    """Whether a step removes the space that encoding puts before the first word."""
    if step["type"] == "Metaspace":
        return bool(step["prepend_scheme"] != "never")
    return step["type"] == "Strip" and step["content"] == " " and step["start"] > 0


def metaspace_bytes(name: str, steps: list[dict[str, Any]]) -> bytes:
    """Return the bytes of a token whose decoder replaces characters and knows byte tokens."""
    for step in steps:
        if step["type"] == "Metaspace":
            name = name.replace(step["replacement"], " ")
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            name = name.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "ByteFallback" and (match := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
    # Half of an escaped "▁" is no text: the next token decides what it becomes.
    return b"" if any(escape[0] in name for _, escape in METASPACE_ESCAPES) else name.encode()


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable ones are themselves, others follow U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(name: str) -> bytes:
    """Return the bytes of a byte-level token; a token that was added as text is its own UTF-8.

    >>> byte_level_bytes("Ġa"), byte_level_bytes("Ã"), byte_level_bytes("€")
    (b' a', b'\\xc3', b'\\xe2\\x82\\xac')
    """
    alphabet = byte_level_alphabet()
    return bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else name.encode()


def is_word_break(char: str) -> bool:
    """Whether BERT's pre-tokenizer splits at a character without a space: punctuation, and Chinese characters.

    >>> [is_word_break(c) for c in "a1é,_{中"]
    [False, False, False, True, True, True, True]
    """
    if ord(char) < 128:
        return not char.isalnum() and char > " "
    return unicodedata.category(char).startswith("P") or "㐀" <= char <= "鿿" or "豈" <= char <= "﫿"


def space_is_usual(before: str, after: str) -> bool:
    """Whether written text usually has a space between two words, at the end of `before` and the start of `after`.

    >>> space_is_usual('{"name":', '"'), space_is_usual('{"', "name"), space_is_usual("3.", "14")
    (True, False, False)
    """
    last, first = before[-1:], after[:1]
    if not last or not first:
        return False
    if last in ".,:" and before[-2:-1].isdigit() and first.isdigit():
        return False
    if last in ",:;.!?":
        return not is_word_break(first) or first in "\"'([{-"
    return not is_word_break(last) and not is_word_break(first)
