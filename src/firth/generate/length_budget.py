"""Length budget: how many prompt tokens are kept and how many new tokens fit into the context.

A model with learned or sinusoid positions has `max_length` positions. Prompt and new tokens share them, except for the
last new token, which is never an input. RoPE, ALiBi and T5 biases have no such limit, but lose quality beyond the
training length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from firth.core.console import format_count, warn
from firth.core.errors import UserError
from firth.models import EncoderDecoder, Model, make_sequence_template
from firth.models.config import Rotary
from firth.tokens import TokenIds

INITIAL_NEW_TOKENS = 512  # first allocation for new tokens; it doubles when full
emitted_warnings: WeakKeyDictionary[Model, set[str]] = WeakKeyDictionary()


class LengthBudget(NamedTuple):
    """Truncated prompts, and the maximum number of new tokens of each."""

    prompts: list[TokenIds]
    budgets: list[int]

    @property
    def max_new_tokens(self) -> int:
        return max(self.budgets)


def make_length_budget(model: Model, prompts: Sequence[TokenIds], max_new_tokens: int) -> LengthBudget:
    """Fit the prompts and `max_new_tokens` new tokens of each into the context.

    A prompt that leaves too little space loses its beginning (left truncation), but keeps at least half of the
    positions. An encoder-decoder has separate positions for the prompt and for the new tokens. Models that read [CLS]
    or <s> before every text still do; a decoder reads its begin token only where a text begins.
    """
    for i, ids in enumerate(prompts, 1):
        if not ids:
            raise UserError(f"Prompt {i} has no tokens, so there is nothing to continue. A chat template may be empty.")
    limit = model.config.max_length
    if limit is None:
        return LengthBudget(list(prompts), [max_new_tokens] * len(prompts))
    prefix = () if model.config.architecture == "decoder" else prefix_ids(model)
    if isinstance(model, EncoderDecoder):
        kept = [drop_beginning(ids, limit, prefix) for ids in prompts]
        budget = LengthBudget(kept, [min(max_new_tokens, limit)] * len(prompts))
    else:
        # + 1: the last new token is not an input, so that it needs no position. UniLM predicts it at a [MASK] there.
        total = limit if model.config.predicts_at_mask else limit + 1
        budgets = [min(max_new_tokens, max(total - len(ids), limit // 2)) for ids in prompts]
        kept = [drop_beginning(ids, total - n, prefix) for ids, n in zip(prompts, budgets, strict=True)]
        budget = LengthBudget(kept, budgets)
    warn_truncation(model, prompts, budget, max_new_tokens)
    return budget


def prefix_ids(model: Model) -> TokenIds:
    """Return the special tokens before every text of a model."""
    return () if model.tokenizer is None else make_sequence_template(model.config, model.tokenizer.vocab).prefix_ids


def drop_beginning(ids: TokenIds, length: int, prefix: TokenIds = ()) -> TokenIds:
    """Return the last `length` ids, behind the prefix if they begin with it.

    >>> drop_beginning([1, 2, 3, 4], 3), drop_beginning([1, 2, 3, 4], 3, (1,)), drop_beginning([1, 2], 3, (1,))
    ([2, 3, 4], [1, 3, 4], [1, 2])
    """
    if len(ids) <= length or [*ids[: len(prefix)]] != [*prefix]:
        return ids[-length:]
    return [*prefix, *ids[len(prefix) + len(ids) - length :]]


def warn_truncation(model: Model, prompts: Sequence[TokenIds], budget: LengthBudget, max_new_tokens: int) -> None:
    """Warn, once per model, about truncated prompts and reduced outputs."""
    limit = model.config.max_length
    if any(len(truncated) < len(ids) for truncated, ids in zip(budget.prompts, prompts, strict=True)):
        warn_once(model, f"A prompt is too long for this model's {limit:,} positions: only its last tokens are used.")
    if min(budget.budgets) < max_new_tokens:
        limited = format_count(min(budget.budgets), "new token", "new tokens")
        warn_once(model, f"This model has {limit:,} positions: at most {limited}, not {max_new_tokens:,}.")


def warn_context_length(model: Model, length: int) -> None:
    """Warn, once per model, when a sequence exceeds the training length of a RoPE model."""
    position = model.config.position
    if isinstance(position, Rotary) and length > position.length:
        warn_once(model, f"The text is longer than the {position.length:,} tokens of this model's training context.")


def warn_once(model: Model, message: str) -> None:
    emitted = emitted_warnings.setdefault(model, set())
    if message not in emitted:
        emitted.add(message)
        warn(message)
