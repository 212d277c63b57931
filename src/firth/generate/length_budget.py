"""How much a model can read and write: the places that it has, and how far it was trained to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from firth.core.console import format_count, warn
from firth.models import EncoderDecoder, Model
from firth.models.config import Rotary

TokenIds = Sequence[int]
INITIAL_NEW_TOKENS = 512  # places for new tokens that are made at once; as many again, and more, when these are full
emitted_warnings: WeakKeyDictionary[Model, set[str]] = WeakKeyDictionary()  # what was said about a model already


class LengthBudget(NamedTuple):
    """Prompts as far as they are read, and how many tokens can be written after each."""

    prompts: list[TokenIds]
    budgets: list[int]

    @property
    def max_new_tokens(self) -> int:
        return max(self.budgets)


def make_length_budget(model: Model, prompts: Sequence[TokenIds], max_new_tokens: int) -> LengthBudget:
    """The room that a model has for prompts and `max_new_tokens` new tokens after each.

    A model that counts its places writes up to the last of them. A prompt that leaves less room than is wanted loses
    its beginning, but never so much that less than half of the places are left to it. The encoder of an
    encoder-decoder has places of its own.
    """
    limit = model.config.max_length
    if limit is None:
        return LengthBudget(list(prompts), [max_new_tokens] * len(prompts))
    if isinstance(model, EncoderDecoder):
        room = LengthBudget([ids[-limit:] for ids in prompts], [min(max_new_tokens, limit)] * len(prompts))
    else:
        # the last token that is written is not read
        new = [min(max_new_tokens, max(limit + 1 - len(ids), limit // 2)) for ids in prompts]
        room = LengthBudget([ids[-(limit + 1 - n) :] for ids, n in zip(prompts, new, strict=True)], new)
    warn_truncation(model, prompts, room, max_new_tokens)
    return room


def warn_truncation(model: Model, prompts: Sequence[TokenIds], budget: LengthBudget, max_new_tokens: int) -> None:
    """Say what is cut, once for each model."""
    limit = model.config.max_length
    if any(len(read) < len(ids) for read, ids in zip(budget.prompts, prompts, strict=True)):
        warn_once(
            model, f"A prompt is too long for this model, which has {limit:,} places: only its latest tokens are read."
        )
    if min(budget.budgets) < max_new_tokens:
        some = format_count(min(budget.budgets), "token is", "tokens are")
        warn_once(
            model,
            f"This model has {limit:,} places, where a text ends: {some} written at most, not {max_new_tokens:,}.",
        )


def warn_context_length(model: Model, length: int) -> None:
    """Say, once, that a text is longer than any that a model with rotary places was made for."""
    position = model.config.position
    if isinstance(position, Rotary) and length > position.length:
        warn_once(model, f"The text is longer than the {position.length:,} tokens that this model was made for.")


def warn_once(model: Model, message: str) -> None:
    said = emitted_warnings.setdefault(model, set())
    if message not in said:
        said.add(message)
        warn(message)
