"""Compare the vectors of one word in several contexts, by several models.

Static vectors (word2vec) give a word one vector; contextual models (ELMo, BERT) give each occurrence its own. For each
model: the cosines between the occurrences, and the nearest words of a text. Contextual vectors lie in a narrow cone
(Ethayarajh 2019, section 4.1), so cosines of different models do not compare; the mean cosine of any two words of the
texts is reported beside them.

N occurrences, B rows, T positions, D vector dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.core.console import progress, say
from firth.core.errors import UserError, did_you_mean, quote
from firth.evaluate.embed import (
    EmbedInput,
    LayerChoice,
    apply_template,
    batch_texts_by_length,
    check_layer,
    embed_words_in_texts,
    layer_hidden_states,
    normalize_rows,
    read_encoding,
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

MAX_CANDIDATE_WORDS = 20_000  # words of a text that are searched for neighbours
MAX_SENTENCE_WORDS = 60  # words of a row; longer sentences are split


class Occurrence(NamedTuple):
    """A word in its context: the characters [begin, end) of a text."""

    text: str
    begin: int
    end: int

    @property
    def word(self) -> str:
        return self.text[self.begin : self.end]

    def excerpt(self, context_chars: int = 28) -> str:
        """
        >>> Occurrence("He swung the bat at the ball.", 13, 16).excerpt(10)
        '...swung the [bat] at the ba...'
        """
        before, after = self.text[: self.begin], self.text[self.end :]
        left = before if len(before) <= context_chars else "..." + before[-context_chars:].lstrip()
        right = after if len(after) <= context_chars else after[:context_chars].rstrip() + "..."
        return f"{left}[{self.word}]{right}".replace("\n", " ")


class NearWord(NamedTuple):
    """A neighbour of an occurrence."""

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
    """Cosines between the occurrences of a word in these texts, and its nearest words, by checkpoint.

    A checkpoint of word vectors, or a file of them, gives the word one vector in all texts. The nearest words are
    searched in the texts `among`. `any_two_words` is the mean cosine of two words of the texts, a model's baseline.
    """
    occurrences = find_occurrences(word, texts)
    if len(occurrences) < 2:
        raise UserError(f"{quote(word)} occurs only once. Give two or more texts that contain it.")
    candidates = collect_words(among)
    if len(candidates) == MAX_CANDIDATE_WORDS:
        say(f"searching the first {MAX_CANDIDATE_WORDS:,} words of that text for neighbours")
    return {
        "word": word,
        "texts": list(texts),
        "occurrences": [{"text": list(texts).index(at.text), "begin": at.begin, "end": at.end} for at in occurrences],
        "checkpoints": [
            compare_in_checkpoint(checkpoint, word, occurrences, candidates, layer, top) for checkpoint in checkpoints
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
    """The comparison by one checkpoint."""
    source, name = open_vector_source(checkpoint), "" if isinstance(checkpoint, Model) else str(checkpoint)
    if isinstance(source, WordVectors):
        check_words_known(source, occurrences, name)
    layer = 0 if isinstance(source, WordVectors) else layer
    x_ND = normalize_rows(occurrence_vectors(source, occurrences, layer))
    others = candidates or collect_words([at.text for at in occurrences])
    others, other_ND = drop_zero_vectors(others, normalize_rows(occurrence_vectors(source, others, layer)))
    neighbours = [nearest_occurrences(x_D, others, other_ND, word, top) for x_D in x_ND] if candidates else []
    return {
        "checkpoint": name,
        "kind": vector_kind(source),
        "layer": layer,
        "similarity": np.round(x_ND @ x_ND.T, 6).tolist(),
        "any_two_words": mean_cosine(other_ND),
        "neighbours": [[near_word_to_dict(near) for near in words] for words in neighbours],
    }


def near_word_to_dict(near_word: NearWord) -> dict[str, Any]:
    return {
        "word": near_word.occurrence.word,
        "similarity": near_word.similarity,
        "where": near_word.occurrence.excerpt(),
    }


# --- words in texts -------------------------------------------------------------------------------------------------


def find_occurrences(word: str, texts: Sequence[str]) -> list[Occurrence]:
    """All occurrences of a word, or else of an inflected form (bats, records). A text without one is an error."""
    if not word.strip():
        raise UserError("The word to compare is empty: --compare WORD.")
    occurrences = []
    for number, text in enumerate(texts, 1):
        exact = re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        spans = [match.span() for match in exact] or [
            span for span in [find_inflected_word(word, text)] if span is not None
        ]
        if not spans:
            near = did_you_mean(word, {match.group() for match in ENGLISH_WORD.finditer(text)})
            raise UserError(f"{quote(word)} is not in text {number}, {quote(text)}. {near}")
        occurrences += [Occurrence(text, *span) for span in spans]
    return occurrences


def collect_words(texts: Iterable[str], max_words: int = MAX_CANDIDATE_WORDS) -> list[Occurrence]:
    """The first `max_words` words of texts, each with its sentence as context."""
    occurrences: list[Occurrence] = []
    for text in texts:
        begin = 0
        for end in sentence_end_offsets(text, "en"):
            spans = [match.span() for match in ENGLISH_WORD.finditer(text[begin:end]) if has_letter(match.group())]
            for first in range(0, len(spans), MAX_SENTENCE_WORDS):
                row = spans[first : first + MAX_SENTENCE_WORDS]
                start, stop = row[0][0], row[-1][1] if first + MAX_SENTENCE_WORDS < len(spans) else end - begin
                sentence = text[begin + start : begin + stop]
                occurrences += [Occurrence(sentence, a - start, b - start) for a, b in row]
            begin = end
            if len(occurrences) >= max_words:
                return occurrences[:max_words]
    return occurrences


def has_letter(word: str) -> bool:
    return any(letter.isalpha() for letter in word)


# --- vectors --------------------------------------------------------------------------------------------------------


def open_vector_source(checkpoint: str | Path | Model) -> Model | WordVectors:
    """Open a contextual model, or static word vectors."""
    if not isinstance(checkpoint, Model) and is_ngram(checkpoint):
        raise UserError(f"{checkpoint} is an n-gram model, which has no word vectors.")
    if not isinstance(checkpoint, Model) and not Path(checkpoint).exists():
        raise UserError(f"{checkpoint}: no such checkpoint folder or file of word vectors.")
    if not isinstance(checkpoint, Model) and Path(checkpoint).is_file():
        return load_word_vectors(checkpoint)
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    return whole_word_vectors(model) if model.config.family == BAG_OF_WORDS_FAMILY else open_model(model)


def vector_kind(source: Model | WordVectors) -> str:
    """Whether a word's vector depends on its context."""
    if isinstance(source, WordVectors):
        return "static"
    return "in context, of what came before" if source.config.architecture == "decoder" else "in context"


def check_words_known(vectors: WordVectors, occurrences: Sequence[Occurrence], name: str) -> None:
    for at in occurrences:
        if vectors.find(at.word) is None:
            raise UserError(f"{name}: {quote(at.word)} has no vector. {did_you_mean(at.word, vectors.words[:20_000])}")


def occurrence_vectors(
    source: Model | WordVectors, occurrences: Sequence[Occurrence], layer: LayerChoice
) -> np.ndarray:
    """(N, D): the vector of each occurrence; zeros where there is none."""
    if isinstance(source, WordVectors):
        return embed_words_in_texts(source, [at.text for at in occurrences], [(at.begin, at.end) for at in occurrences])
    by_text: dict[str, list[int]] = {}
    for number, at in enumerate(occurrences):
        by_text.setdefault(at.text, []).append(number)
    single = [numbers[0] for numbers in by_text.values() if len(numbers) == 1]
    vectors: dict[int, np.ndarray] = {}
    if single:  # a long text is truncated around its word
        texts = [occurrences[i].text for i in single]
        spans = [(occurrences[i].begin, occurrences[i].end) for i in single]
        vectors = dict(zip(single, embed_words_in_texts(source, texts, spans, layer), strict=True))
    if len(single) < len(by_text):
        shared = {text: numbers for text, numbers in by_text.items() if len(numbers) > 1}
        vectors |= encode_texts_once(source, occurrences, shared, layer)
    zeros_D = np.zeros_like(next(iter(vectors.values())))  # a layer can be wider than the model
    return np.stack([vectors.get(i, zeros_D) for i in range(len(occurrences))])


@torch.no_grad()
def encode_texts_once(
    model: Model, occurrences: Sequence[Occurrence], by_text: dict[str, list[int]], layer: LayerChoice
) -> dict[int, np.ndarray]:
    """Vectors of several words of each text from one forward pass; words beyond the model's maximum have none."""
    check_layer(model, layer)
    tokenizer = require_tokenizer(model)
    template, texts = make_sequence_template(model.config, tokenizer.vocab), list(by_text)
    prefix, encodings = list(template.prefix_ids), tokenizer.encode_with_offsets(texts)
    max_tokens = resolve_max_length(model, 0) - template.num_special_tokens()
    read = [read_encoding(tokenizer, encoding) for encoding in encodings]
    framed = [apply_template(template, ids[:max_tokens]) for ids, _ in read]
    inputs = [EmbedInput(input_ids, 0, 0, token_type_ids) for input_ids, token_type_ids in framed]
    vectors: dict[int, np.ndarray] = {}
    with eval_mode(model), progress("encoding", "texts", len(texts)) as shown:
        for rows in batch_texts_by_length(inputs, EVAL_BATCH_TOKENS):
            input_ids, document_ids = pad_right([inputs[i].input_ids for i in rows], get_pad_token_id(model))
            types = [inputs[i].token_type_ids or [] for i in rows]
            batch = Batch(
                input_ids, document_ids=document_ids, token_type_ids=pad_right(types, 0)[0] if all(types) else None
            ).to(model.embed.tokens.weight.device)
            x_BTD = layer_hidden_states(model, batch, layer).float().cpu().numpy()
            for x_TD, i in zip(x_BTD, rows, strict=True):
                offsets = list(enumerate(read[i][1][:max_tokens], len(prefix)))
                for number in by_text[texts[i]]:
                    at = occurrences[number]
                    if inside := [t for t, (begin, end) in offsets if begin < at.end and end > at.begin]:
                        vectors[number] = x_TD[inside].mean(0)
            shown.advance(len(rows))
    return vectors


def drop_zero_vectors(occurrences: Sequence[Occurrence], x_ND: np.ndarray) -> tuple[list[Occurrence], np.ndarray]:
    """Keep the occurrences that have a vector."""
    rows = np.flatnonzero(np.abs(x_ND).sum(1))
    return [occurrences[i] for i in rows.tolist()], x_ND[rows]


def mean_cosine(x_ND: np.ndarray) -> float | None:
    """Mean cosine of two different rows of length 1, from the norm of their sum.

    >>> mean_cosine(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    0.3333333333333333
    """
    n = len(x_ND)
    return float((np.square(x_ND.sum(0, dtype=np.float64)).sum() - n) / (n * (n - 1))) if n > 1 else None


def nearest_occurrences(
    x_D: np.ndarray, others: Sequence[Occurrence], x_ND: np.ndarray, word: str, top: int
) -> list[NearWord]:
    """The nearest other words, each at its nearest occurrence."""
    cosine_N, seen, nearest = x_ND @ x_D, set(get_irregular_forms(word.casefold())), list[NearWord]()
    for i in np.argsort(-cosine_N, kind="stable").tolist():
        form = others[i].word.casefold()
        if form not in seen:
            seen.add(form)
            nearest.append(NearWord(others[i], float(cosine_N[i])))
        if len(nearest) == top:
            break
    return nearest
