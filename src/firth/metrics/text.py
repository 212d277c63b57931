"""How near a written text is to the one that was wanted, and how well a model foresees text.

`bleu`, `chrf` and `rouge_l` go from 0 to 100, as their official tools print them; `exact_match` from 0 to 1.
A reference is one text, or a list of texts that are equally right.
The libraries are slow to import, so the functions that need them import them themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from firth.errors import UserError, nearest
from firth.metrics.classification import accuracy, check_paired, macro_f1, mcc

Reference = str | Sequence[str]
Metric = Callable[[Any, Any], float]


def _choices(predictions: Sequence[str], references: Sequence[Reference]) -> list[list[str]]:
    """For each prediction, the texts that are right; checked."""
    check_paired(predictions, references)
    choices = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
    for i, texts in enumerate(choices):
        if not texts:
            raise UserError(f"Example {i} (counted from 0) has no reference. Give at least one text.")
    return choices


def _streams(choices: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """The first reference of every example, then the second ... as sacrebleu wants them; None where there is none.

    >>> _streams([["a", "b"], ["c"]])
    [['a', 'c'], ['b', None]]
    """
    return [list(stream) for stream in zip_longest(*choices)]


def exact_match(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """The share of predictions that equal a reference, but for white space at the ends."""
    choices = _choices(predictions, references)
    hits = [p.strip() in {text.strip() for text in texts} for p, texts in zip(predictions, choices, strict=True)]
    return sum(hits) / len(hits)


def bleu(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """BLEU of the whole corpus by sacrebleu, with its default tokenisation (13a) and smoothing."""
    from sacrebleu import corpus_bleu

    streams: Any = _streams(_choices(predictions, references))
    return float(corpus_bleu(predictions, streams).score)


def chrf(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """chrF2 of the whole corpus by sacrebleu: shared character n-grams, so it needs no words and suits any language."""
    from sacrebleu import corpus_chrf

    streams: Any = _streams(_choices(predictions, references))
    return float(corpus_chrf(predictions, streams).score)


def rouge_l(predictions: Sequence[str], references: Sequence[Reference]) -> float:
    """The mean F-measure of the longest common subsequence of words, without stemming, best reference of each example.

    rouge-score sees only the letters a to z and digits: for other scripts use `chrf`.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    pairs = zip(predictions, _choices(predictions, references), strict=True)
    scores = [scorer.score_multi(texts, prediction)["rougeL"].fmeasure for prediction, texts in pairs]
    return 100 * sum(scores) / len(scores)


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


# What each task is judged by; the first is the one that stands for the rest.
METRICS: Mapping[str, Mapping[str, Metric]] = {
    "classify": {"accuracy": accuracy, "macro_f1": macro_f1, "mcc": mcc},
    "text-to-text": {"chrf": chrf, "bleu": bleu, "rouge_l": rouge_l, "exact_match": exact_match},
}


def score(task: str, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Every metric of a task by its name."""
    if task not in METRICS:
        raise UserError(f"Unknown task {task!r}. {nearest(task, METRICS)}")
    return {name: metric(predictions, references) for name, metric in METRICS[task].items()}
