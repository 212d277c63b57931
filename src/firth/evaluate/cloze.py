"""Does a model know the word that is missing, or which ending is right, without having been trained to answer?"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import CausalScorer, Scorer, SplitText, make_scorer, unknown_token_messages
from firth.evaluate.logprobs import LogprobQuery, TokenLogprobs
from firth.metrics import accuracy
from firth.models import Model
from firth.tasks import Prediction
from firth.text import Example

BLANK_PATTERN = re.compile(r"\[MASK\]|<mask>|___+")


def evaluate_cloze(checkpoint: Model | str | Path, examples: Sequence[Example], **settings: Any) -> Evaluation:
    """How often the model, left to itself, would write just the answer; and the answer's mean log-probability.

    The answer stands where the context has a blank (___ or [MASK]), or else at its end, after a space. A decoder
    continues what comes before it (LAMBADA). An encoder gets as many masks as the answer has tokens. An
    encoder-decoder gets one hole, and must end its span where the answer ends. An answer that the tokenizer cannot
    spell is wrong, and has no log-probability; `known` is the share of the others. `settings`: those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    parts = [split_cloze(scorer, example) for example in examples]
    hits, logp, predictions = [], [], []  # log-probabilities only of answers that can be spelled
    for ((query, answer),) in scorer.score_spans(parts, jointly=True):
        hits.append(scorer.is_exact_match(query, answer))
        spelled = scorer.is_in_vocabulary(query)
        logp += [scorer.answer_logp(answer)] if spelled else []
        predictions.append(Prediction(predicted_text(scorer, query, answer), {"logp": logp[-1]} if spelled else None))
    mean_logp, unknown = float(np.mean(logp)) if logp else math.nan, len(hits) - len(logp)
    metrics = {"accuracy": float(np.mean(hits)), "answer_logp": mean_logp, "known": len(logp) / len(hits)}
    said = [f"{unknown:,} of {len(hits):,} answers have a word that the tokenizer does not know, and count as wrong."]
    facts = {"method": scorer.method, "unknown": unknown}
    return Evaluation(
        metrics, predictions, facts, [*said * bool(unknown), *unseen_context_message(scorer, parts), *scorer.notices]
    )


def split_cloze(scorer: Scorer, example: Example) -> SplitText:
    """The context with its answer, cut around the answer. A space before it belongs to it, as tokenizers have it."""
    if example.target is None:
        raise UserError(f"Example {example.id} has no answer, and a cloze asks how likely that is.")
    before, after = example.texts[0], ""
    if blanks := list(BLANK_PATTERN.finditer(before)):
        if len(blanks) > 1:
            raise UserError(f"Example {example.id} has {len(blanks)} blanks, and one answer. Write one blank.")
        before, after = before[: blanks[0].start()], before[blanks[0].end() :]
    elif before and not before[-1].isspace():
        before += " "
    return scorer.split_at_span(
        before + example.target + after, len(before.rstrip()), len(before + example.target), f"Example {example.id}"
    )


def predicted_text(scorer: Scorer, query: LogprobQuery, logprobs: TokenLogprobs) -> str:
    """What the model would write, up to the first token at which it leaves the answer; an encoder fills all masks."""
    best, labels = logprobs.top_ids.tolist(), query.labels
    if query.decoder_input_ids is None and not isinstance(scorer, CausalScorer):
        return scorer.tokenizer.decode(best).strip()
    wrong = next((i for i, token in enumerate(best) if token != labels[i]), len(best) - 1)
    return scorer.tokenizer.decode(best[: wrong + 1]).strip()


def unseen_context_message(scorer: Scorer, splits: Sequence[SplitText]) -> list[str]:
    """A decoder does not see what comes after a blank."""
    num = sum(bool(part.after) for part in splits) if scorer.is_exact else 0
    some = format_count(num, "text goes on after its blank", "texts go on after their blank")
    return [f"{some}, which this model does not see."] if num else []


def evaluate_choice(
    checkpoint: Model | str | Path, examples: Sequence[Example], delimiter: str = " ", **settings: Any
) -> Evaluation:
    """How often the right one of several endings is the likeliest after the context, for a model as it is.

    `accuracy` compares sums of log-probabilities, `accuracy_norm` divides them by the ending's bytes, so that a long
    ending is no worse for being long. Where several are the likeliest none is chosen, and that is wrong. The
    `delimiter` stands between context and ending ("\\nAnswer: " suits questions). `settings`: those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    parts = [
        split_choice(scorer, example.texts[0] + delimiter, text, example.id)
        for example in examples
        for text in example.texts[1:]
    ]
    found = list(scorer.score_spans(parts, jointly=False))
    sums = iter([sum(float(answer.logprobs.sum()) for _, answer in answers) for answers in found])
    unknown = sum(scorer.count_unknown(query.labels) for answers in found for query, _ in answers)
    predictions = []
    for example in examples:
        choices = example.texts[1:]
        logp = np.array([next(sums) for _ in choices])
        per_byte = logp / [len(text.encode()) for text in choices]
        scores = {str(i): value for i, value in enumerate(logp.tolist())}
        predictions.append(Prediction(unique_argmax(logp), scores, {"normalised": unique_argmax(per_byte)}))
    facts = {"method": scorer.method, "unknown": unknown}
    ties = sum(prediction.prediction is None for prediction in predictions)
    some = format_count(ties, "example has several likeliest choices", "examples have several likeliest choices")
    said = [*([f"{some}, and count as wrong."] if ties else []), *unknown_token_messages(unknown), *scorer.notices]
    return Evaluation(choice_metrics(examples, predictions), predictions, facts, said)


def unique_argmax(logp: np.ndarray) -> int | None:
    """The place of the highest; None where several are.

    >>> unique_argmax(np.array([-2.0, -1.0, -3.0])), unique_argmax(np.array([-1.0, -1.0, -3.0]))
    (1, None)
    """
    best = np.flatnonzero(logp == logp.max())
    return int(best[0]) if len(best) == 1 else None


def split_choice(scorer: Scorer, context: str, choice_text: str, example_id: str | int) -> SplitText:
    return scorer.split_at_span(
        context + choice_text, len(context.rstrip()), len(context + choice_text), f"Example {example_id}"
    )


def choice_metrics(examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Both accuracies; none where a file has no answers."""
    right = [example.target for example in examples]
    if any(target is None for target in right):
        return {}
    normalised = [(prediction.extra or {})["normalised"] for prediction in predictions]
    plain = accuracy([prediction.prediction for prediction in predictions], right)
    return {"accuracy": plain, "accuracy_norm": accuracy(normalised, right)}
