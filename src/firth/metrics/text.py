"""Metrics of generated text (BLEU, chrF, ROUGE, exact match) and of likelihood (perplexity, bits per byte).

`bleu`, `chrf` and `rouge` are from 0 to 100, as usual; `exact_match` is from 0 to 1. A reference is one text or a list
of equally right texts. sacrebleu and rouge-score are imported on use, since they are slow to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from firth.core.errors import UserError
from firth.metrics.classification import check_same_length

Reference = str | Sequence[str]


def as_reference_lists(predictions: Sequence[str], references: Sequence[Reference]) -> list[list[str]]:
    """Return the list of references of each prediction, after checking the lengths."""
    check_same_length(predictions, references)
    choices = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
    for i, texts in enumerate(choices):
        if not texts:
            raise UserError(f"Example {i} (counted from 0) has no reference. Give at least one text.")
    return choices


def _transpose_references(reference_lists: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Return the first reference of every example, then the second ..., padded with None, as sacrebleu takes them.

    >>> _transpose_references([["a", "b"], ["c"]])
    [['a', 'c'], ['b', None]]
    """
    return [list(stream) for stream in zip_longest(*reference_lists)]


def exact_match(
    predictions: Sequence[str], references: Sequence[Reference], normalize_fn: Callable[[str], str] = str.strip
) -> float:
    """Return the share of predictions that equal a reference after normalization. Default: strip whitespace.

    `normalise_squad` is the normalization of SQuAD.
    """
    choices = as_reference_lists(predictions, references)
    pairs = zip(predictions, choices, strict=True)
    hits = [normalize_fn(prediction) in {normalize_fn(text) for text in texts} for prediction, texts in pairs]
    return sum(hits) / len(hits)


def bleu(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """Return corpus BLEU by sacrebleu, with its default tokenization (13a) and smoothing."""
    from sacrebleu import corpus_bleu

    streams: Any = _transpose_references(as_reference_lists(predictions, references))
    return float(corpus_bleu(predictions, streams).score)


def chrf(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """Return corpus chrF2 by sacrebleu: an F-score of character n-grams, which suits any script."""
    from sacrebleu import corpus_chrf

    streams: Any = _transpose_references(as_reference_lists(predictions, references))
    return float(corpus_chrf(predictions, streams).score)


def rouge(predictions: Sequence[str], references: Sequence[Reference]) -> dict[str, float]:
    """Return the mean F-measure of shared words (1), bigrams (2) and the longest common subsequence (l, lsum).

    Words are stemmed (Porter), as in published figures. `rouge_l` takes a text as one sequence. `rouge_lsum`, the
    ROUGE-L of papers on summaries, takes each line as a sentence and unites the common subsequences of a reference
    sentence with all predicted ones (Lin 2004, section 3.2). Of several references, the best one counts, for each
    measure separately. rouge-score ignores all characters except a to z and digits: use `chrf` for other scripts.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = {"rouge1": "rouge_1", "rouge2": "rouge_2", "rougeL": "rouge_l", "rougeLsum": "rouge_lsum"}
    scorer = RougeScorer([*names], use_stemmer=True)
    pairs = zip(predictions, as_reference_lists(predictions, references), strict=True)
    scores = [scorer.score_multi(texts, prediction) for prediction, texts in pairs]
    return {name: 100 * sum(s[key].fmeasure for s in scores) / len(scores) for key, name in names.items()}


def perplexity(nats: float, tokens: int) -> float:
    """Return exp(nats / tokens): the number of equally likely tokens with the same uncertainty.

    `nats` is the sum of -ln p over all `tokens`. Perplexities are comparable only for the same tokenizer.
    """
    assert tokens > 0, "no token was scored"
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Return the code length in bits per byte of UTF-8, which is comparable between tokenizers."""
    assert num_bytes > 0, "no text was scored"
    return nats / math.log(2) / num_bytes
