"""Induction: does a model continue a pattern that it has seen once?

A row is a random sequence of tokens, written twice. Nothing predicts the first copy better than the frequency of
tokens. In the second copy each token has followed the token before it already: a model with induction heads looks for
the earlier occurrence and copies what came next (Olsson et al. 2022, "In-context learning and induction heads"). The
loss there falls. This is the simplest kind of in-context learning. A small model may show it where it solves no task.

    first copy   q  w  e  r    loss about ln(vocabulary)
    second copy  q  w  e  r    the loss falls from the second token on

`repeated_loss` is the loss per token of the second copy without its first token, which nothing announces.
`unrepeated_loss` is that of the same tokens before they were repeated, `induction_gain` the difference in nats.
`copy_accuracy` is the share of tokens of the second copy that are the most likely ones.

A decoder gives all losses in one pass. An encoder, and an encoder-decoder that restores spans, predicts one token of
the second copy at a time and sees all others (pseudo-likelihood). Both copies are visible to it, so `unrepeated_loss`
comes from rows in which another random sequence stands before the same tokens. An encoder-decoder with the method
"continuation" reads one copy and writes the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import CausalScorer, ContinuationScorer, Scorer, SplitText, make_scorer
from firth.evaluate.logprobs import LogprobQuery, TokenLogprobs
from firth.metrics import mean_and_std
from firth.models import Model
from firth.tasks import Prediction
from firth.text import Example

RANDOM_TOKENS = "random tokens"  # the data of this task
MAX_COPY_TOKENS = 128
NUM_SEQUENCES = 64
# One row per token: fewer and shorter sequences.
MAX_PSEUDO_COPY_TOKENS, NUM_PSEUDO_SEQUENCES = 32, 16
MIN_COPY_TOKENS = 4
STANDARD_ERRORS = 2  # a gain above this many is no accident
MIN_GAIN = 0.01  # nats: a smaller one is no copying, however sure it is


class CopyLosses(NamedTuple):
    """Losses of the same tokens by position, (sequences, tokens) each, and whether a copied token is the likeliest."""

    unrepeated: np.ndarray
    repeated: np.ndarray
    is_copied: np.ndarray


def evaluate_induction(checkpoint: Model | str | Path, **settings: Any) -> tuple[list[Example], Evaluation]:
    """The loss on a repeated random sequence; `settings`: those of `make_scorer`."""
    scorer = make_scorer(checkpoint, **settings)
    one_pass = isinstance(scorer, CausalScorer | ContinuationScorer)
    count, longest = (NUM_SEQUENCES, MAX_COPY_TOKENS) if one_pass else (NUM_PSEUDO_SEQUENCES, MAX_PSEUDO_COPY_TOKENS)
    length = min(longest, scorer.max_text_tokens // 2)
    ids = scorer.vocab.non_special_ids
    if length < MIN_COPY_TOKENS:
        raise UserError(
            f"The window has {scorer.max_text_tokens} tokens, and two copies need {2 * MIN_COPY_TOKENS}: give a larger "
            "--max-seq-length."
        )
    rng = np.random.default_rng(0)
    first, other = (rng.choice(ids, (count, length)).tolist() for _ in range(2))
    losses = copy_losses(scorer, first, other)
    gain = (losses.unrepeated - losses.repeated)[:, 1:].mean(1)  # of each sequence
    mean, std = mean_and_std(gain.tolist())
    error = std / count**0.5
    metrics = {
        "induction_gain": mean,
        "repeated_loss": float(losses.repeated[:, 1:].mean()),
        "unrepeated_loss": float(losses.unrepeated[:, 1:].mean()),
        "copy_accuracy": float(losses.is_copied[:, 1:].mean()),
    }
    details = {
        "method": scorer.method,
        "copy_tokens": length,
        "uniform_loss": float(np.log(len(ids))),
        "induction_gain_error": error,
        "repeated_loss_by_position": losses.repeated.mean(0).tolist(),
        "unrepeated_loss_by_position": losses.unrepeated.mean(0).tolist(),
    }
    found = "Induction" if mean > max(MIN_GAIN, STANDARD_ERRORS * error) else "No induction"
    notice = (
        f"{found}: a token of a random sequence costs {metrics['unrepeated_loss']:.3f} nats, and {mean:.3f} less when "
        f"the sequence is repeated (standard error {error:.3f})."
    )
    texts = [Example(i, (scorer.tokenizer.decode(row),)) for i, row in enumerate(first)]
    predictions = [Prediction(float(value)) for value in gain]
    return texts, Evaluation(metrics, predictions, details, [notice, *scorer.notices])


def copy_losses(scorer: Scorer, sequences: list[list[int]], others: list[list[int]]) -> CopyLosses:
    """Losses of each sequence, repeated and not."""

    def queries() -> Iterator[list[LogprobQuery]]:
        for tokens, other in zip(sequences, others, strict=True):
            if isinstance(scorer, CausalScorer):
                yield [scorer.blank_query(SplitText([], [*tokens, *tokens], []))]
            elif isinstance(scorer, ContinuationScorer):
                yield [scorer.blank_query(SplitText(before, tokens, [])) for before in (other, tokens)]
            else:
                yield [
                    query
                    for before in (other, tokens)
                    for i in range(len(tokens))
                    for query in scorer.span_queries(SplitText([*before, *tokens[:i]], [tokens[i]], tokens[i + 1 :]))
                ]

    rows = [join_logprobs(group) for group in scorer.score_query_groups(queries(), len(sequences))]
    loss = -np.stack([row.logprobs for row in rows])  # (sequences, 2 tokens)
    best = np.stack([row.top_ids for row in rows])
    length = loss.shape[1] // 2
    return CopyLosses(loss[:, :length], loss[:, length:], best[:, length:] == np.array(sequences))


def join_logprobs(group: list[tuple[LogprobQuery, TokenLogprobs]]) -> TokenLogprobs:
    return TokenLogprobs(
        np.concatenate([one.logprobs for _, one in group]), np.concatenate([one.top_ids for _, one in group])
    )
