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

from firth.core.console import progress, say
from firth.core.errors import UserError, did_you_mean
from firth.evaluate.embed import (
    EmbedInput,
    LayerChoice,
    batch_texts_by_length,
    check_layer,
    embed_words_in_texts,
    layer_hidden_states,
    normalize_rows,
)
from firth.evaluate.likelihood import open_model, resolve_max_length
from firth.evaluate.logprobs import EVAL_BATCH_TOKENS, get_pad_token_id
from firth.evaluate.vectors import WordVectors, load_word_vectors, whole_word_vectors
from firth.generate.decode_state import eval_mode, pad_right, require_tokenizer
from firth.models import Model, load_model, make_sequence_template
from firth.models.config import BAG_OF_WORDS_FAMILY
from firth.objectives import Batch
from firth.static.ngram import is_ngram
from firth.text.inflection import ENGLISH_WORD, find_inflected_word, get_irregular_forms
from firth.tokens.boundaries import sentence_end_offsets

MAX_CANDIDATE_WORDS = 20_000  # words of a text among which the nearest are looked for
MAX_SENTENCE_WORDS = 60  # words of a sentence that are read at once


class Occurrence(NamedTuple):
    """A word where it stands: the characters [begin, end) of a text."""

    text: str
    begin: int
    end: int

    @property
    def word(self) -> str:
        return self.text[self.begin : self.end]

    def excerpt(self, context_chars: int = 28) -> str:
        """
        >>> Occurrence("He swung the bat at the ball.", 13, 16).excerpt(12)
        '...swung the [bat] at the ball...'
        """
        before, after = self.text[: self.begin], self.text[self.end :]
        left = before if len(before) <= context_chars else "..." + before[-context_chars:].lstrip()
        right = after if len(after) <= context_chars else after[:context_chars].rstrip() + "..."
        return f"{left}[{self.word}]{right}".replace("\n", " ")


class NearWord(NamedTuple):
    """A word in a text that has a vector near to another's."""

    occurrence: Occurrence
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
    places = find_occurrences(word, texts)
    if len(places) < 2:
        raise UserError(f"{word!r} stands in one place only. Give two or more texts that have the word.")
    candidates = collect_words(among)
    if len(candidates) == MAX_CANDIDATE_WORDS:
        say(f"the nearest are looked for among the first {MAX_CANDIDATE_WORDS:,} words of that text")
    return {
        "word": word,
        "texts": list(texts),
        "occurrences": [{"text": list(texts).index(at.text), "begin": at.begin, "end": at.end} for at in places],
        "checkpoints": [
            compare_in_checkpoint(checkpoint, word, places, candidates, layer, top) for checkpoint in checkpoints
        ],
    }


def compare_in_checkpoint(
    checkpoint: str | Path | Model,
    word: str,
    occurrences: Sequence[Occurrence],
    candidates: Sequence[Occurrence],
    layer: int,
    top: int,
) -> dict[str, Any]:
    """What one checkpoint says."""
    source, name = open_vector_source(checkpoint), "" if isinstance(checkpoint, Model) else str(checkpoint)
    if isinstance(source, WordVectors):
        check_words_known(source, occurrences, name)
    layer = 0 if isinstance(source, WordVectors) else layer
    x_ND = normalize_rows(occurrence_vectors(source, occurrences, layer))
    others = candidates or collect_words([at.text for at in occurrences])
    others, other_ND = drop_zero_vectors(others, normalize_rows(occurrence_vectors(source, others, layer)))
    found = [nearest_occurrences(x_D, others, other_ND, word, top) for x_D in x_ND] if candidates else []
    return {
        "checkpoint": name,
        "kind": vector_kind(source),
        "layer": layer,
        "similarity": np.round(x_ND @ x_ND.T, 6).tolist(),
        "any_two_words": mean_cosine(other_ND),
        "neighbours": [[near_word_to_dict(near) for near in some] for some in found],
    }


def near_word_to_dict(near_word: NearWord) -> dict[str, Any]:
    return {
        "word": near_word.occurrence.word,
        "similarity": near_word.similarity,
        "where": near_word.occurrence.excerpt(),
    }


# --- words in texts -------------------------------------------------------------------------------------------------


def find_occurrences(word: str, texts: Sequence[str]) -> list[Occurrence]:
    """Every place of a word: as it is, or else in another form (bats, records). A text without it is an error."""
    if not word.strip():
        raise UserError("Which word is to be compared? It is empty.")
    found = []
    for number, text in enumerate(texts, 1):
        exact = re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        spans = [match.span() for match in exact] or [
            span for span in [find_inflected_word(word, text)] if span is not None
        ]
        if not spans:
            near = did_you_mean(word, {match.group() for match in ENGLISH_WORD.finditer(text)})
            raise UserError(f"{word!r} is not in text {number}, {text!r}. {near}")
        found += [Occurrence(text, *span) for span in spans]
    return found


def collect_words(texts: Iterable[str], max_words: int = MAX_CANDIDATE_WORDS) -> list[Occurrence]:
    """The words of some texts, sentence by sentence, up to so many."""
    found: list[Occurrence] = []
    for text in texts:
        begin = 0
        for end in sentence_end_offsets(text, "en"):
            spans = [match.span() for match in ENGLISH_WORD.finditer(text[begin:end]) if has_letter(match.group())]
            for first in range(0, len(spans), MAX_SENTENCE_WORDS):
                some = spans[first : first + MAX_SENTENCE_WORDS]
                start, stop = some[0][0], some[-1][1] if first + MAX_SENTENCE_WORDS < len(spans) else end - begin
                sentence = text[begin + start : begin + stop]
                found += [Occurrence(sentence, a - start, b - start) for a, b in some]
            begin = end
            if len(found) >= max_words:
                return found[:max_words]
    return found


def has_letter(word: str) -> bool:
    return any(letter.isalpha() for letter in word)


# --- vectors --------------------------------------------------------------------------------------------------------


def open_vector_source(checkpoint: str | Path | Model) -> Model | WordVectors:
    """A model, or the vectors that words have whatever stands around them."""
    if not isinstance(checkpoint, Model) and is_ngram(checkpoint):
        raise UserError(f"{checkpoint} is an n-gram model: it counts words, and has no vectors of them.")
    if not isinstance(checkpoint, Model) and not Path(checkpoint).exists():
        raise UserError(f"{checkpoint}: no such checkpoint folder or file of word vectors.")
    if not isinstance(checkpoint, Model) and Path(checkpoint).is_file():
        return load_word_vectors(checkpoint)
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    return whole_word_vectors(model) if model.config.family == BAG_OF_WORDS_FAMILY else open_model(model)


def vector_kind(source: Model | WordVectors) -> str:
    """What a word's vector depends on."""
    if isinstance(source, WordVectors):
        return "static"
    return "in context, of what came before" if source.config.architecture == "decoder" else "in context"


def check_words_known(vectors: WordVectors, occurrences: Sequence[Occurrence], name: str) -> None:
    for at in occurrences:
        if vectors.find(at.word) is None:
            raise UserError(f"{name}: {at.word!r} has no vector. {did_you_mean(at.word, vectors.words[:20_000])}")


def occurrence_vectors(
    source: Model | WordVectors, occurrences: Sequence[Occurrence], layer: LayerChoice
) -> np.ndarray:
    """(N, D): each word where it stands; zeros where it has no vector."""
    if isinstance(source, WordVectors):
        return embed_words_in_texts(source, [at.text for at in occurrences], [(at.begin, at.end) for at in occurrences])
    by_text: dict[str, list[int]] = {}
    for number, at in enumerate(occurrences):
        by_text.setdefault(at.text, []).append(number)
    alone = [numbers[0] for numbers in by_text.values() if len(numbers) == 1]
    found: dict[int, np.ndarray] = {}
    if alone:  # a long text is cut around its word
        texts, spans = [occurrences[i].text for i in alone], [(occurrences[i].begin, occurrences[i].end) for i in alone]
        found = dict(zip(alone, embed_words_in_texts(source, texts, spans, layer), strict=True))
    if len(alone) < len(by_text):
        together = {text: numbers for text, numbers in by_text.items() if len(numbers) > 1}
        found |= encode_texts_once(source, occurrences, together, layer)
    nothing_D = np.zeros_like(next(iter(found.values())))  # a layer may be wider than the model
    return np.stack([found.get(i, nothing_D) for i in range(len(occurrences))])


@torch.no_grad()
def encode_texts_once(
    model: Model, occurrences: Sequence[Occurrence], by_text: dict[str, list[int]], layer: LayerChoice
) -> dict[int, np.ndarray]:
    """Several words of each text, whose states come from one reading, but for words beyond what can be read."""
    check_layer(model, layer)
    tokenizer = require_tokenizer(model)
    frame, texts = make_sequence_template(model.config, tokenizer.vocab, cls_last=False), list(by_text)
    room, encodings = resolve_max_length(model, 0) - len(frame.prefix_ids) - 1, tokenizer.encode_with_offsets(texts)
    readings = [EmbedInput([*frame.prefix_ids, *encoding.ids[:room], frame.eos_id], 0, 0) for encoding in encodings]
    found: dict[int, np.ndarray] = {}
    with eval_mode(model), progress("reading", "texts", len(texts)) as shown:
        for rows in batch_texts_by_length(readings, EVAL_BATCH_TOKENS):
            tokens, doc = pad_right([readings[i].input_ids for i in rows], get_pad_token_id(model))
            batch = Batch(tokens, document_ids=doc).to(model.embed.tokens.weight.device)
            x_BTD = layer_hidden_states(model, batch, layer).float().cpu().numpy()
            for x_TD, i in zip(x_BTD, rows, strict=True):
                offsets = list(enumerate(encodings[i].offsets[:room], len(frame.prefix_ids)))
                for number in by_text[texts[i]]:
                    at = occurrences[number]
                    if inside := [t for t, (begin, end) in offsets if begin < at.end and end > at.begin]:
                        found[number] = x_TD[inside].mean(0)
            shown.advance(len(rows))
    return found


def drop_zero_vectors(occurrences: Sequence[Occurrence], x_ND: np.ndarray) -> tuple[list[Occurrence], np.ndarray]:
    """Those that have a vector."""
    has = np.flatnonzero(np.abs(x_ND).sum(1))
    return [occurrences[i] for i in has.tolist()], x_ND[has]


def mean_cosine(x_ND: np.ndarray) -> float | None:
    """The mean cosine of two different rows, which are all 1 long.

    >>> mean_cosine(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    0.3333333333333333
    """
    n = len(x_ND)
    return float((np.square(x_ND.sum(0, dtype=np.float64)).sum() - n) / (n * (n - 1))) if n > 1 else None


def nearest_occurrences(
    x_D: np.ndarray, others: Sequence[Occurrence], x_ND: np.ndarray, word: str, top: int
) -> list[NearWord]:
    """The nearest other words, each once, where it is nearest."""
    cosine_N, seen, found = x_ND @ x_D, set(get_irregular_forms(word.casefold())), list[NearWord]()
    for i in np.argsort(-cosine_N, kind="stable").tolist():
        form = others[i].word.casefold()
        if form not in seen:
            seen.add(form)
            found.append(NearWord(others[i], float(cosine_N[i])))
        if len(found) == top:
            break
    return found
