"""An open vocabulary for ELMo: every word has an id, and every id its characters, so no word is unknown.

W words, C characters of a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firth.core.console import format_count, say
from firth.tokens.characters import (
    BOS_CHAR,
    EOS_CHAR,
    MAX_ELMO_WORD_BYTES,
    PAD_CHAR,
    encode_word_chars,
    sentence_boundary_chars,
)
from firth.tokens.tokenizer import Tokenizer

FIRST_OPEN_WORD_ID = 2**32  # ids from here on are words outside of the vocabulary; shards never hold them
_open_words: list[str] = []  # by id, for the life of this process
_open_word_ids: dict[str, int] = {}


def open_word_to_id(word: str) -> int:
    """Return the id of a word outside of the vocabulary, the same for the life of this process."""
    if word not in _open_word_ids:
        _open_word_ids[word] = FIRST_OPEN_WORD_ID + len(_open_words)
        _open_words.append(word)
    return _open_word_ids[word]


def id_to_open_word(word_id: int) -> str:
    return _open_words[word_id - FIRST_OPEN_WORD_ID]


@dataclass(frozen=True)
class WordEncoding:
    """The words of a text, with the fields of an `Encoding` of the `tokenizers` library."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]

    def __len__(self) -> int:
        return len(self.ids)


class OpenVocabTokenizer(Tokenizer):
    """A word tokenizer that gives unknown words an id too, for models that read words as characters."""

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        return self.encode_batch([text], parse_special)[0]

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[list[int]]:
        if parse_special:
            return super().encode_batch(texts, parse_special)
        return [self._apply_direction(words.ids) for words in self.encode_with_offsets(texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[WordEncoding]:  # type: ignore[override]
        encodings = []
        for text, encoding in zip(texts, super().encode_with_offsets(texts), strict=True):
            ids = encoding.ids
            if self.vocab.unk in ids:
                ids = [
                    open_word_to_id(w) if i == self.vocab.unk else i
                    for i, w in zip(ids, self.pre_tokenize(text), strict=True)
                ]
            encodings.append(WordEncoding(ids, encoding.offsets, encoding.word_ids))
        return encodings


def to_open_vocab(tokenizer: Tokenizer) -> OpenVocabTokenizer:
    """Return the tokenizer with an open vocabulary."""
    if isinstance(tokenizer, OpenVocabTokenizer):
        return tokenizer
    return OpenVocabTokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.config)


class WordCharTable:
    """The characters of all words: those of the vocabulary, and open ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.vocab
        spelled = encode_word_chars(str(tokenizer.backend.id_to_token(i)) for i in range(vocab.size))
        if spelled.num_truncated:
            longer = format_count(spelled.num_truncated, "word of the vocabulary is", "words of the vocabulary are")
            say(f"{longer} longer than {MAX_ELMO_WORD_BYTES} bytes: truncated.")
        self.char_ids, self.has_warned = torch.from_numpy(spelled.char_ids), False
        boundaries = {vocab.bos: BOS_CHAR, vocab.cls: BOS_CHAR, vocab.eos: EOS_CHAR, vocab.sep: EOS_CHAR}
        for token_id, char in boundaries.items():
            if token_id is not None:
                self.char_ids[token_id] = torch.from_numpy(sentence_boundary_chars(char))
        self.char_ids[vocab.pad] = PAD_CHAR

    def lookup_chars(self, word_W: Tensor) -> Tensor:
        """Return the characters (W, C) of the words with these ids."""
        if self.char_ids.device != word_W.device:
            self.char_ids = self.char_ids.to(word_W.device)
        spelled_WC = self.char_ids[word_W.clamp(max=len(self.char_ids) - 1)].long()
        is_open = word_W >= FIRST_OPEN_WORD_ID
        if bool(is_open.any()):
            open_words = encode_word_chars(id_to_open_word(i) for i in word_W[is_open].tolist())
            if open_words.num_truncated and not self.has_warned:
                say(f"Some words of the text are longer than {MAX_ELMO_WORD_BYTES} bytes: truncated.")
                self.has_warned = True
            spelled_WC[is_open] = torch.from_numpy(open_words.char_ids).to(spelled_WC)
        return spelled_WC
