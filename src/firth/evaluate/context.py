"""One word in several texts: how alike its vectors are there by this model and by that, and what lies near them.

N occurrences, B rows, T places, D numbers of a vector.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.console import progress, say
from firth.errors import UserError, nearest
from firth.evaluate.asking import BATCH_TOKENS, padding
from firth.evaluate.embed import Layer, Reading, by_length, check_layer, layer_states, unit, words_in_texts
from firth.evaluate.likelihood import open_model, reading_length
from firth.evaluate.vectors import WordVectors, token_vectors, word_vectors
from firth.generate.reading import evaluating, pad_right, tokenizer_of
from firth.models import Model, framing, load_model
from firth.models.config import BAG
from firth.models.ngram import is_ngram
from firth.objectives import Batch
from firth.text.words import WORD, find_word, forms_of
from firth.tokens.edges import sentence_edges

MOST = 20_000  # words of a text among which the nearest are looked for
LONGEST = 60  # words of a sentence that are read at once


class Occurrence(NamedTuple):
    """A word where it stands: the characters [begin, end) of a text."""

    text: str
    begin: int
    end: int

    @property
    def word(self) -> str:
        return self.text[self.begin : self.end]

    def shown(self, around: int = 28) -> str:
        """
        >>> Occurrence("He swung the bat at the ball.", 13, 16).shown(12)
        '...swung the [bat] at the ball...'
        """
        before, after = self.text[: self.begin], self.text[self.end :]
        left = before if len(before) <= around else "..." + before[-around:].lstrip()
        right = after if len(after) <= around else after[:around].rstrip() + "..."
        return f"{left}[{self.word}]{right}".replace("\n", " ")


class Near(NamedTuple):
    """A word in a text that has a vector near to another's."""

    at: Occurrence
    similarity: float


def compare_contexts(
    word: str,
    texts: Sequence[str],
    checkpoints: Sequence[str | Path | Model],
    layer: int = -1,
    among: Iterable[str] = (),
    top: int = 5,
) -> dict[str, Any]:
    """The vectors of a word where it stands in these texts, by each checkpoint: their cosines, and what is near them.

    A checkpoint may be one of word vectors, or a file of them: then the word has one vector in all texts. `among` are
    texts among whose words the nearest ones are looked for. Cosines of different models cannot be compared as they are:
    `any_two_words` is what any two words of the texts have on average.
    """
    places = occurrences_of(word, texts)
    if len(places) < 2:
        raise UserError(f"{word!r} stands in one place only. Give two or more texts that have the word.")
    candidates = words_of(among)
    if len(candidates) == MOST:
        say(f"the nearest are looked for among the first {MOST:,} words of that text")
    return {
        "word": word,
        "texts": list(texts),
        "occurrences": [{"text": list(texts).index(at.text), "begin": at.begin, "end": at.end} for at in places],
        "checkpoints": [by_one(checkpoint, word, places, candidates, layer, top) for checkpoint in checkpoints],
    }


def by_one(
    checkpoint: str | Path | Model,
    word: str,
    places: Sequence[Occurrence],
    candidates: Sequence[Occurrence],
    layer: int,
    top: int,
) -> dict[str, Any]:
    """What one checkpoint says."""
    source, name = open_source(checkpoint), "" if isinstance(checkpoint, Model) else str(checkpoint)
    if isinstance(source, WordVectors):
        refuse_unknown(source, places, name)
    layer = 0 if isinstance(source, WordVectors) else layer
    x_ND = unit(vectors_of(source, places, layer))
    others = candidates or words_of([at.text for at in places])
    others, other_ND = known(others, unit(vectors_of(source, others, layer)))
    found = [nearest_to(x_D, others, other_ND, word, top) for x_D in x_ND] if candidates else []
    return {
        "checkpoint": name,
        "kind": kind_of(source),
        "layer": layer,
        "similarity": np.round(x_ND @ x_ND.T, 6).tolist(),
        "any_two_words": mean_cosine(other_ND),
        "neighbours": [[plain(near) for near in some] for some in found],
    }


def plain(near: Near) -> dict[str, Any]:
    return {"word": near.at.word, "similarity": near.similarity, "where": near.at.shown()}


# --- words in texts -------------------------------------------------------------------------------------------------


def occurrences_of(word: str, texts: Sequence[str]) -> list[Occurrence]:
    """Every place of a word: as it is, or else in another form (bats, records). A text without it is an error."""
    if not word.strip():
        raise UserError("Which word is to be compared? It is empty.")
    found = []
    for number, text in enumerate(texts, 1):
        exact = re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        spans = [match.span() for match in exact] or [span for span in [find_word(word, text)] if span is not None]
        if not spans:
            near = nearest(word, {match.group() for match in WORD.finditer(text)})
            raise UserError(f"{word!r} is not in text {number}, {text!r}. {near}")
        found += [Occurrence(text, *span) for span in spans]
    return found


def words_of(texts: Iterable[str], most: int = MOST) -> list[Occurrence]:
    """The words of some texts, sentence by sentence, up to so many."""
    found: list[Occurrence] = []
    for text in texts:
        begin = 0
        for end in sentence_edges(text, "en"):
            spans = [match.span() for match in WORD.finditer(text[begin:end]) if has_letter(match.group())]
            for first in range(0, len(spans), LONGEST):
                some = spans[first : first + LONGEST]
                start, stop = some[0][0], some[-1][1] if first + LONGEST < len(spans) else end - begin
                sentence = text[begin + start : begin + stop]
                found += [Occurrence(sentence, a - start, b - start) for a, b in some]
            begin = end
            if len(found) >= most:
                return found[:most]
    return found


def has_letter(word: str) -> bool:
    return any(letter.isalpha() for letter in word)


# --- vectors --------------------------------------------------------------------------------------------------------


def open_source(checkpoint: str | Path | Model) -> Model | WordVectors:
    """A model, or the vectors that words have whatever stands around them."""
    if not isinstance(checkpoint, Model) and is_ngram(checkpoint):
        raise UserError(f"{checkpoint} is an n-gram model: it counts words, and has no vectors of them.")
    if not isinstance(checkpoint, Model) and not Path(checkpoint).exists():
        raise UserError(f"{checkpoint}: no such checkpoint folder or file of word vectors.")
    if not isinstance(checkpoint, Model) and Path(checkpoint).is_file():
        return word_vectors(checkpoint)
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    return token_vectors(model) if model.config.family == BAG else open_model(model)


def kind_of(source: Model | WordVectors) -> str:
    """What a word's vector depends on."""
    if isinstance(source, WordVectors):
        return "static"
    return "in context, of what came before" if source.config.shape == "decoder" else "in context"


def refuse_unknown(vectors: WordVectors, places: Sequence[Occurrence], name: str) -> None:
    for at in places:
        if vectors.find(at.word) is None:
            raise UserError(f"{name}: {at.word!r} has no vector. {nearest(at.word, vectors.words[:20_000])}")


def vectors_of(source: Model | WordVectors, places: Sequence[Occurrence], layer: Layer) -> np.ndarray:
    """(N, D): each word where it stands; zeros where it has no vector."""
    if isinstance(source, WordVectors):
        return words_in_texts(source, [at.text for at in places], [(at.begin, at.end) for at in places])
    by_text: dict[str, list[int]] = {}
    for number, at in enumerate(places):
        by_text.setdefault(at.text, []).append(number)
    alone = [numbers[0] for numbers in by_text.values() if len(numbers) == 1]
    found: dict[int, np.ndarray] = {}
    if alone:  # a long text is cut around its word
        texts, spans = [places[i].text for i in alone], [(places[i].begin, places[i].end) for i in alone]
        found = dict(zip(alone, words_in_texts(source, texts, spans, layer), strict=True))
    if len(alone) < len(by_text):
        together = {text: numbers for text, numbers in by_text.items() if len(numbers) > 1}
        found |= read_once(source, places, together, layer)
    nothing_D = np.zeros_like(next(iter(found.values())))  # a layer may be wider than the model
    return np.stack([found.get(i, nothing_D) for i in range(len(places))])


@torch.no_grad()
def read_once(
    model: Model, places: Sequence[Occurrence], by_text: dict[str, list[int]], layer: Layer
) -> dict[int, np.ndarray]:
    """Several words of each text, whose states come from one reading, but for words beyond what can be read."""
    check_layer(model, layer)
    tokenizer = tokenizer_of(model)
    frame, texts = framing(model.config, tokenizer.vocab), list(by_text)
    room, encodings = reading_length(model, 0) - len(frame.before) - 1, tokenizer.encodings(texts)
    readings = [Reading([*frame.before, *encoding.ids[:room], frame.end], 0, 0) for encoding in encodings]
    found: dict[int, np.ndarray] = {}
    with evaluating(model), progress("reading", "texts", len(texts)) as shown:
        for rows in by_length(readings, BATCH_TOKENS):
            tokens, doc = pad_right([readings[i].ids for i in rows], padding(model))
            batch = Batch(tokens, doc=doc).to(model.embed.tokens.weight.device)
            x_BTD = layer_states(model, batch, layer).float().cpu().numpy()
            for x_TD, i in zip(x_BTD, rows, strict=True):
                offsets = list(enumerate(encodings[i].offsets[:room], len(frame.before)))
                for number in by_text[texts[i]]:
                    at = places[number]
                    if inside := [t for t, (begin, end) in offsets if begin < at.end and end > at.begin]:
                        found[number] = x_TD[inside].mean(0)
            shown.advance(len(rows))
    return found


def known(places: Sequence[Occurrence], x_ND: np.ndarray) -> tuple[list[Occurrence], np.ndarray]:
    """Those that have a vector."""
    has = np.flatnonzero(np.abs(x_ND).sum(1))
    return [places[i] for i in has.tolist()], x_ND[has]


def mean_cosine(x_ND: np.ndarray) -> float | None:
    """The mean cosine of two different rows, which are all 1 long.

    >>> mean_cosine(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    0.3333333333333333
    """
    n = len(x_ND)
    return float((np.square(x_ND.sum(0, dtype=np.float64)).sum() - n) / (n * (n - 1))) if n > 1 else None


def nearest_to(x_D: np.ndarray, others: Sequence[Occurrence], x_ND: np.ndarray, word: str, top: int) -> list[Near]:
    """The nearest other words, each once, where it is nearest."""
    cosine_N, seen, found = x_ND @ x_D, set(forms_of(word.casefold())), list[Near]()
    for i in np.argsort(-cosine_N, kind="stable").tolist():
        form = others[i].word.casefold()
        if form not in seen:
            seen.add(form)
            found.append(Near(others[i], float(cosine_N[i])))
        if len(found) == top:
            break
    return found
