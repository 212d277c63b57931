"""Words without a vocabulary: each has an id, and each id a spelling, so that no word is unknown (ELMo).

W words, C characters of a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firth.console import count, say
from firth.tokens.characters import BEGIN_SENTENCE, END_SENTENCE, PADDING, characters, edge
from firth.tokens.tokenizer import Tokenizer

OPEN = 2**32  # ids from here on are those of words that a tokenizer does not have; shards never hold them
_words: list[str] = []  # each met once by this process, in the order of their ids
_ids: dict[str, int] = {}


def id_of(word: str) -> int:
    """The id of a word that is in no vocabulary: the same for the same word, as long as this process lives."""
    if word not in _ids:
        _ids[word] = OPEN + len(_words)
        _words.append(word)
    return _ids[word]


def word_of(number: int) -> str:
    return _words[number - OPEN]


@dataclass(frozen=True)
class Words:
    """The words of a text, in place of an encoding of the `tokenizers` library."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]

    def __len__(self) -> int:
        return len(self.ids)


class OpenTokenizer(Tokenizer):
    """A tokenizer of words that has an id for every word, also for one that it has never met.

    It is for models that read words by their characters; what such a model predicts is in the vocabulary.
    """

    def encode(self, text: str, specials: bool = False) -> list[int]:
        return self.encode_batch([text], specials)[0]

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[list[int]]:
        if specials:
            return super().encode_batch(texts, specials)
        return [self._in_order(words.ids) for words in self.encodings(texts)]

    def encodings(self, texts: Sequence[str]) -> list[Words]:  # type: ignore[override]
        found = []
        for text, encoding in zip(texts, super().encodings(texts), strict=True):
            ids = encoding.ids
            if self.vocab.unk in ids:
                ids = [id_of(w) if i == self.vocab.unk else i for i, w in zip(ids, self.words(text), strict=True)]
            found.append(Words(ids, encoding.offsets, encoding.word_ids))
        return found


def opened(tokenizer: Tokenizer) -> OpenTokenizer:
    """The same tokenizer, for a model that knows no unknown words."""
    if isinstance(tokenizer, OpenTokenizer):
        return tokenizer
    return OpenTokenizer(tokenizer.backend, tokenizer.roles, tokenizer.config)


class Lexicon:
    """How the words of a tokenizer are spelled, and all others that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.vocab
        spelled = characters(str(tokenizer.backend.id_to_token(i)) for i in range(vocab.size))
        if spelled.cut:
            longer = count(spelled.cut, "word of the vocabulary is", "words of the vocabulary are")
            say(f"{longer} longer than a word may be: the end is lost.")
        self.table, self.said = torch.from_numpy(spelled.ids), False
        marks = {vocab.bos: BEGIN_SENTENCE, vocab.cls: BEGIN_SENTENCE, vocab.eos: END_SENTENCE, vocab.sep: END_SENTENCE}
        for number, mark in marks.items():
            if number is not None:
                self.table[number] = torch.from_numpy(edge(mark))
        self.table[vocab.pad] = PADDING

    def spell(self, word_W: Tensor) -> Tensor:
        """(W, C): the characters of the words with these ids."""
        if self.table.device != word_W.device:
            self.table = self.table.to(word_W.device)
        spelled_WC = self.table[word_W.clamp(max=len(self.table) - 1)].long()
        is_open = word_W >= OPEN
        if bool(is_open.any()):
            met = characters(word_of(number) for number in word_W[is_open].tolist())
            if met.cut and not self.said:
                say("Some words of the text are longer than a word may be, and lose their end.")
                self.said = True
            spelled_WC[is_open] = torch.from_numpy(met.ids).to(spelled_WC)
        return spelled_WC
