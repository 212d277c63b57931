"""Every metric of a task by its name.

All go from 0 to 1, correlations and `mcc` from -1 to 1, but BLEU, chrF and ROUGE, which go from 0 to 100 as they are
always printed, and `perplexity` and `bits_per_byte`, of which less is better. nan means that nothing can be said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from firth.errors import UserError, nearest
from firth.metrics.classification import accuracy, check_paired, f1, macro_f1, mcc, micro_f1
from firth.metrics.correlation import pearson, spearman, word_similarity
from firth.metrics.pairs import analogy_hits, by_group, pair_hits, retrieval
from firth.metrics.squad import normalise_squad, squad_each
from firth.metrics.tagging import are_chunks, entity_f1, entity_precision, entity_recall, tag_accuracy
from firth.metrics.text import bits_per_byte, bleu, chrf, exact_match, perplexity, rouge

Scores = dict[str, float]


def score(task: str, predictions: Sequence[Any], references: Sequence[Any]) -> Scores:
    """Every metric of a task by its name; the first stands for the rest. `SCORERS` says what each task takes."""
    if task not in SCORERS:
        raise UserError(f"Unknown task {task!r}. {nearest(task, SCORERS)}")
    return SCORERS[task](predictions, references)


def _labels(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """Labels. If there are two, also the F1 of the one that is last in sorted order: "1" of "0" and "1"."""
    scores = {
        "accuracy": accuracy(predictions, references),
        "macro_f1": macro_f1(predictions, references),
        "mcc": mcc(predictions, references),
    }
    two = len(set(references)) == 2
    return scores | ({"f1": f1(predictions, references, positive=max(references))} if two else {})


def _relations(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """Labels, of which "no_relation" is not counted as found (TACRED)."""
    return {
        "f1": micro_f1(predictions, references, without={"no_relation"}),
        "accuracy": accuracy(predictions, references),
        "macro_f1": macro_f1(predictions, references),
    }


def _numbers(predictions: Sequence[float], references: Sequence[float]) -> Scores:
    """Numbers."""
    return {"pearson": pearson(predictions, references), "spearman": spearman(predictions, references)}


def _choices(predictions: Sequence[int], references: Sequence[int]) -> Scores:
    """The number of the choice."""
    return {"accuracy": accuracy(predictions, references)}


def _tags(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Scores:
    """The tags of each sentence. Parts of speech and the like, which mark no stretches, have accuracy only."""
    right = {"accuracy": tag_accuracy(predictions, references)}
    if not are_chunks(references):
        return right
    return {
        "entity_f1": entity_f1(predictions, references),
        "entity_precision": entity_precision(predictions, references),
        "entity_recall": entity_recall(predictions, references),
    } | right


def _answers(predictions: Sequence[str], references: Sequence[Sequence[Any]]) -> Scores:
    """An answer, "" for none; the right answers, none at all for a question without one."""
    exact, f1_each = squad_each(predictions, references)
    return {"f1": float(f1_each.mean()), "exact_match": float(exact.mean())}


def _texts(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> Scores:
    """A text; the right text, or several. Answers to questions are matched as SQuAD and closed-book tests do it."""
    return {
        "chrf": chrf(predictions, references),
        "bleu": bleu(predictions, references),
        **rouge(predictions, references),
        "exact_match": exact_match(predictions, references),
        "answer_match": exact_match(predictions, references, normalise_squad),
    }


def _likelihoods(predictions: Sequence[float], references: Sequence[tuple[int, int]]) -> Scores:
    """The sum of -ln p of each text; its (tokens scored, bytes)."""
    nats, tokens, num_bytes = _sums(predictions, references)
    return {"perplexity": perplexity(nats, tokens), "bits_per_byte": bits_per_byte(nats, num_bytes)}


def _pseudo_likelihoods(predictions: Sequence[float], references: Sequence[tuple[int, int]]) -> Scores:
    """As `_likelihoods`, of tokens that saw both sides: no code could be so short, so there are no bits."""
    nats, tokens, _ = _sums(predictions, references)
    return {"pseudo_perplexity": perplexity(nats, tokens)}


def _sums(predictions: Sequence[float], references: Sequence[tuple[int, int]]) -> tuple[float, int, int]:
    check_paired(predictions, references)
    return math.fsum(predictions), sum(tokens for tokens, _ in references), sum(size for _, size in references)


def _vectors(predictions: Sequence[Any], references: Sequence[float | None]) -> Scores:
    """The similarity of each pair of texts and the true one; or, without a truth (None), a vector for each text."""
    check_paired(predictions, references)
    known = [true for true in references if true is not None]
    if len(known) == len(references):
        return {"spearman": spearman(predictions, known), "pearson": pearson(predictions, known)}
    vectors_a, vectors_b = zip(*predictions, strict=True)
    return retrieval(np.stack(vectors_a), np.stack(vectors_b))


def _minimal_pairs(predictions: Sequence[tuple[float, float]], references: Sequence[str]) -> Scores:
    """The scores of the good and of the bad sentence; the group of the pair."""
    hits = pair_hits(predictions)
    groups = by_group(hits, references)
    return {"accuracy": float(hits.mean()), "group_accuracy": statistics.fmean(groups.values())}


def _cloze(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> Scores:
    """The word that fills the gap."""
    return {"accuracy": exact_match(predictions, references)}


def _similar_words(predictions: Sequence[float | None], references: Sequence[float]) -> Scores:
    """The similarity of two words, None if one is not known; what people said."""
    correlation, known = word_similarity(predictions, references)
    return {"spearman": correlation, "known": known}


def _analogies(predictions: Sequence[str | None], references: Sequence[tuple[str, str]]) -> Scores:
    """The fourth word, None if a word is not known; the right one and its section. Accuracy is over those known."""
    check_paired(predictions, references)
    words, sections = zip(*references, strict=True)
    hits = analogy_hits(predictions, words)
    known = [hit for hit in hits if hit is not None]
    by_section = by_group(hits, sections)
    return {
        "accuracy": statistics.fmean(known) if known else math.nan,
        "section_accuracy": statistics.fmean(by_section.values()) if by_section else math.nan,
        "known": len(known) / len(hits),
    }


SCORERS: Mapping[str, Callable[[Any, Any], Scores]] = {
    "classify": _labels,
    "pair": _labels,
    "word-in-context": _labels,
    "relation": _relations,
    "regress": _numbers,
    "choice": _choices,
    "tag": _tags,
    "span-qa": _answers,
    "text-to-text": _texts,
    "lm": _likelihoods,
    "perplexity": _likelihoods,
    "pseudo-likelihood": _pseudo_likelihoods,
    "embed": _vectors,
    "minimal-pairs": _minimal_pairs,
    "cloze": _cloze,
    "word-similarity": _similar_words,
    "analogy": _analogies,
}
