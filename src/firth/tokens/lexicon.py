"""Words without a vocabulary: each has an id, and each id a spelling, so that no word is unknown (ELMo).

W words, C characters of a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firth.core.console import format_count, say
from firth.tokens.characters import BOS_CHAR, EOS_CHAR, PAD_CHAR, encode_word_chars, sentence_boundary_chars
from firth.tokens.tokenizer import Tokenizer

FIRST_OPEN_WORD_ID = 2**32  # ids from here on are those of words that a tokenizer does not have; shards never hold them
_open_words: list[str] = []  # each met once by this process, in the order of their ids
_open_word_ids: dict[str, int] = {}


def open_word_to_id(word: str) -> int:
    """The id of a word that is in no vocabulary: the same for the same word, as long as this process lives."""
    if word not in _open_word_ids:
        _open_word_ids[word] = FIRST_OPEN_WORD_ID + len(_open_words)
        _open_words.append(word)
    return _open_word_ids[word]


def id_to_open_word(word_id: int) -> str:
    return _open_words[word_id - FIRST_OPEN_WORD_ID]


@dataclass(frozen=True)
class WordEncoding:
    """The words of a text, in place of an encoding of the `tokenizers` library."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]

    def __len__(self) -> int:
        return len(self.ids)


class OpenVocabTokenizer(Tokenizer):
    """A tokenizer of words that has an id for every word, also for one that it has never met.

    It is for models that read words by their characters; what such a model predicts is in the vocabulary.
    """

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        return self.encode_batch([text], parse_special)[0]

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[list[int]]:
        if parse_special:
            return super().encode_batch(texts, parse_special)
        return [self._apply_direction(words.ids) for words in self.encode_with_offsets(texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[WordEncoding]:  # type: ignore[override]
        found = []
        for text, encoding in zip(texts, super().encode_with_offsets(texts), strict=True):
            ids = encoding.ids
            if self.vocab.unk in ids:
                ids = [
                    open_word_to_id(w) if i == self.vocab.unk else i
                    for i, w in zip(ids, self.pre_tokenize(text), strict=True)
                ]
            found.append(WordEncoding(ids, encoding.offsets, encoding.word_ids))
        return found


def to_open_vocab(tokenizer: Tokenizer) -> OpenVocabTokenizer:
    """The same tokenizer, for a model that knows no unknown words."""
    if isinstance(tokenizer, OpenVocabTokenizer):
        return tokenizer
    return OpenVocabTokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.config)


class WordCharTable:
    """How the words of a tokenizer are spelled, and all others that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.vocab
        spelled = encode_word_chars(str(tokenizer.backend.id_to_token(i)) for i in range(vocab.size))
        if spelled.num_truncated:
            longer = format_count(spelled.num_truncated, "word of the vocabulary is", "words of the vocabulary are")
            say(f"{longer} longer than a word may be: the end is lost.")
        self.char_ids, self.has_warned = torch.from_numpy(spelled.char_ids), False
        marks = {vocab.bos: BOS_CHAR, vocab.cls: BOS_CHAR, vocab.eos: EOS_CHAR, vocab.sep: EOS_CHAR}
        for number, mark in marks.items():
            if number is not None:
                self.char_ids[number] = torch.from_numpy(sentence_boundary_chars(mark))
        self.char_ids[vocab.pad] = PAD_CHAR

    def lookup_chars(self, word_W: Tensor) -> Tensor:
        """(W, C): the characters of the words with these ids."""
        if self.char_ids.device != word_W.device:
            self.char_ids = self.char_ids.to(word_W.device)
        spelled_WC = self.char_ids[word_W.clamp(max=len(self.char_ids) - 1)].long()
        is_open = word_W >= FIRST_OPEN_WORD_ID
        if bool(is_open.any()):
            met = encode_word_chars(id_to_open_word(number) for number in word_W[is_open].tolist())
            if met.num_truncated and not self.has_warned:
                say("Some words of the text are longer than a word may be, and lose their end.")
                self.has_warned = True
            spelled_WC[is_open] = torch.from_numpy(met.char_ids).to(spelled_WC)
        return spelled_WC
