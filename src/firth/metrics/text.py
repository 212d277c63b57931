"""How near a written text is to the one that was wanted, and how well a model foresees text.

`bleu`, `chrf` and `rouge` go from 0 to 100, as they are always printed; `exact_match` from 0 to 1.
A reference is one text, or a list of texts that are equally right.
The libraries are slow to import, so the functions that need them import them themselves.
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
    """For each prediction, the texts that are right; checked."""
    check_same_length(predictions, references)
    choices = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
    for i, texts in enumerate(choices):
        if not texts:
            raise UserError(f"Example {i} (counted from 0) has no reference. Give at least one text.")
    return choices


def _transpose_references(reference_lists: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """The first reference of every example, then the second ... as sacrebleu wants them; None where there is none.

    >>> _transpose_references([["a", "b"], ["c"]])
    [['a', 'c'], ['b', None]]
    """
    return [list(stream) for stream in zip_longest(*reference_lists)]


def exact_match(
    predictions: Sequence[str], references: Sequence[Reference], normalize_fn: Callable[[str], str] = str.strip
) -> float:
    """The share of predictions that equal a reference, once both are normalised: here, without white space at the ends.

    `normalise_squad` and `normalise_trivia` are what those two benchmarks do.
    """
    choices = as_reference_lists(predictions, references)
    pairs = zip(predictions, choices, strict=True)
    hits = [normalize_fn(prediction) in {normalize_fn(text) for text in texts} for prediction, texts in pairs]
    return sum(hits) / len(hits)


def bleu(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """BLEU of the whole corpus by sacrebleu, with its default tokenisation (13a) and smoothing."""
    from sacrebleu import corpus_bleu

    streams: Any = _transpose_references(as_reference_lists(predictions, references))
    return float(corpus_bleu(predictions, streams).score)


def chrf(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """chrF2 of the whole corpus by sacrebleu: shared character n-grams, so it needs no words and suits any language."""
    from sacrebleu import corpus_chrf

    streams: Any = _transpose_references(as_reference_lists(predictions, references))
    return float(corpus_chrf(predictions, streams).score)


def rouge(predictions: Sequence[str], references: Sequence[Reference]) -> dict[str, float]:
    """The mean F-measure of shared words (1), word pairs (2) and the longest common subsequence (l), without stemming.

    Of several references, the best counts, for each measure by itself.
    rouge-score sees only the letters a to z and digits: for other scripts use `chrf`.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = {"rouge1": "rouge_1", "rouge2": "rouge_2", "rougeL": "rouge_l"}
    scorer = RougeScorer([*names])
    pairs = zip(predictions, as_reference_lists(predictions, references), strict=True)
    scores = [scorer.score_multi(texts, prediction) for prediction, texts in pairs]
    return {ours: 100 * sum(s[theirs].fmeasure for s in scores) / len(scores) for theirs, ours in names.items()}


def perplexity(nats: float, tokens: int) -> float:
    """Among how many tokens, equally likely, the model might as well have guessed each time.

    `nats` is the sum of -ln p over all `tokens`. It can only be compared between models with the same tokenizer.
    """
    assert tokens > 0, "no token was scored"
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """The bits that the model would need for one byte of UTF-8; it can be compared between tokenizers."""
    assert num_bytes > 0, "no text was scored"
    return nats / math.log(2) / num_bytes
