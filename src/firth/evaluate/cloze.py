"""Cloze and multiple choice without fine-tuning: predict a missing word, or choose the most likely ending.

Cloze (LAMBADA, Paperno et al. 2016; LAMA, Petroni et al. 2019) counts how often greedy prediction gives the answer.
Multiple choice compares log p(ending | context) of the endings, as sums, per character or per byte (Brown et al. 2020,
section 2.4 normalises by tokens). The harness of Gao et al. (lm-eval) calls these acc, acc_norm and acc_bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError, shorten
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import CausalScorer, Scorer, SplitText, make_scorer, unknown_token_messages
from firth.evaluate.logprobs import LogprobQuery, TokenLogprobs
from firth.metrics import accuracy
from firth.models import Model
from firth.tasks import Prediction
from firth.text import Example

BLANK_PATTERN = re.compile(r"\[MASK\]|<mask>|___+")


def evaluate_cloze(checkpoint: Model | str | Path, examples: Sequence[Example], **settings: Any) -> Evaluation:
    """Accuracy of greedy predictions of the answer, and the answer's mean log-probability.

    The answer replaces the context's blank (___ or [MASK]), or follows the context after a space. A decoder continues
    the text before the blank. An encoder gets one mask per token of the answer. An encoder-decoder gets one sentinel,
    and must end its span where the answer ends. An answer with an unknown token is wrong and has no log-probability;
    `known` is the share of the others. `settings`: those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    parts = [split_cloze(scorer, example) for example in examples]
    hits, logp, predictions = [], [], []  # log-probabilities only of answers without unknown tokens
    for ((query, answer),) in scorer.score_spans(parts, jointly=True):
        hits.append(scorer.is_exact_match(query, answer))
        known = scorer.is_in_vocabulary(query)
        logp += [scorer.answer_logp(answer)] if known else []
        predictions.append(Prediction(predicted_text(scorer, query, answer), {"logp": logp[-1]} if known else None))
    mean_logp, unknown = float(np.mean(logp)) if logp else math.nan, len(hits) - len(logp)
    metrics = {"accuracy": float(np.mean(hits)), "answer_logp": mean_logp, "known": len(logp) / len(hits)}
    notices = [f"{unknown:,} of {len(hits):,} answers have an unknown token and count as wrong."] if unknown else []
    facts = {"method": scorer.method, "unknown": unknown}
    return Evaluation(metrics, predictions, facts, [*notices, *unseen_context_message(scorer, parts), *scorer.notices])


def split_cloze(scorer: Scorer, example: Example) -> SplitText:
    """The context with its answer, split around the answer, which includes the space before it as in tokenizers."""
    if example.target is None:
        raise UserError(f"Example {shorten(example.id)} has no answer to score: add it to the column answer.")
    before, after = example.texts[0], ""
    if blanks := list(BLANK_PATTERN.finditer(before)):
        if len(blanks) > 1:
            raise UserError(f"Example {shorten(example.id)} has {len(blanks)} blanks and one answer. Write one blank.")
        before, after = before[: blanks[0].start()], before[blanks[0].end() :]
    elif before and not before[-1].isspace():
        before += " "
    return scorer.split_at_span(
        before + example.target + after,
        len(before.rstrip()),
        len(before + example.target),
        f"Example {shorten(example.id)}",
    )


def predicted_text(scorer: Scorer, query: LogprobQuery, logprobs: TokenLogprobs) -> str:
    """Greedy prediction: of an encoder all masks; of the others up to the first token that differs from the answer."""
    best, labels = logprobs.top_ids.tolist(), query.labels
    if query.decoder_input_ids is None and not isinstance(scorer, CausalScorer):
        return scorer.tokenizer.decode(best).strip()
    wrong = next((i for i, token in enumerate(best) if token != labels[i]), len(best) - 1)
    return scorer.tokenizer.decode(best[: wrong + 1]).strip()


def unseen_context_message(scorer: Scorer, splits: Sequence[SplitText]) -> list[str]:
    """A notice that a decoder does not see the text after a blank."""
    num = sum(bool(part.after) for part in splits) if scorer.is_exact else 0
    count = format_count(num, "text continues after its blank", "texts continue after their blank")
    return [f"{count}, which this model does not see."] if num else []


def evaluate_choice(
    checkpoint: Model | str | Path, examples: Sequence[Example], delimiter: str = " ", **settings: Any
) -> Evaluation:
    """Accuracy of choosing the most likely ending after the context, without fine-tuning.

    `accuracy` compares sums of log-probabilities. `accuracy_norm` divides them by the ending's characters (acc_norm of
    lm-eval), `accuracy_bytes` by its bytes, which removes the penalty on long endings. Both differ only for endings
    with characters outside of ASCII. A tie is wrong. `delimiter` separates context and ending ("\\nAnswer: " suits
    questions) and is not counted. `settings`: those of `make_scorer`.
    """
    scorer = make_scorer(checkpoint, **settings)
    parts = [
        split_choice(scorer, example.texts[0] + delimiter, text, example.id)
        for example in examples
        for text in example.texts[1:]
    ]
    scored = list(scorer.score_spans(parts, jointly=False))
    sums = iter([sum(float(one.logprobs.sum()) for _, one in endings) for endings in scored])
    unknown = sum(scorer.count_unknown(query.labels) for endings in scored for query, _ in endings)
    predictions = [
        choice_prediction(np.array([next(sums) for _ in example.texts[1:]]), example.texts[1:]) for example in examples
    ]
    facts = {"method": scorer.method, "unknown": unknown}
    ties = sum(prediction.prediction is None for prediction in predictions)
    tied = f"{format_count(ties, 'example ties', 'examples tie')} between several choices and count as wrong."
    notices = [*[tied] * bool(ties), *unknown_token_messages(unknown), *scorer.notices]
    return Evaluation(choice_metrics(examples, predictions), predictions, facts, notices)


def choice_prediction(logp: np.ndarray, choices: Sequence[str]) -> Prediction:
    """The choice with the highest log-probability; `extra` has those per character and per byte."""
    sizes = {"per_character": [len(text) for text in choices], "per_byte": [len(text.encode()) for text in choices]}
    scores = {str(i): value for i, value in enumerate(logp.tolist())}
    return Prediction(unique_argmax(logp), scores, {name: unique_argmax(logp / size) for name, size in sizes.items()})


def unique_argmax(logp: np.ndarray) -> int | None:
    """Index of the maximum; None if it occurs more than once.

    >>> unique_argmax(np.array([-2.0, -1.0, -3.0])), unique_argmax(np.array([-1.0, -1.0, -3.0]))
    (1, None)
    """
    best = np.flatnonzero(logp == logp.max())
    return int(best[0]) if len(best) == 1 else None


def split_choice(scorer: Scorer, context: str, choice_text: str, example_id: str | int) -> SplitText:
    return scorer.split_at_span(
        context + choice_text, len(context.rstrip()), len(context + choice_text), f"Example {shorten(example_id)}"
    )


def choice_metrics(examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
    """All accuracies; empty for a file without labels."""
    targets = [example.target for example in examples]
    if any(target is None for target in targets):
        return {}
    chosen = {"accuracy": [prediction.prediction for prediction in predictions]}
    for metric, field in {"accuracy_norm": "per_character", "accuracy_bytes": "per_byte"}.items():
        chosen[metric] = [(prediction.extra or {})[field] for prediction in predictions]
    return {metric: accuracy(choices, targets) for metric, choices in chosen.items()}
