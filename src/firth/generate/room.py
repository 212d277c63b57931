"""How much a model can read and write: the places that it has, and how far it was trained to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from firth.console import count, warn
from firth.models import EncoderDecoder, Model
from firth.models.config import Rotary

Ids = Sequence[int]
FIRST_ROOM = 512  # places for new tokens that are made at once; as many again, and more, when these are full
told: WeakKeyDictionary[Model, set[str]] = WeakKeyDictionary()  # what was said about a model already


class Room(NamedTuple):
    """Prompts as far as they are read, and how many tokens can be written after each."""

    prompts: list[Ids]
    new: list[int]

    @property
    def most(self) -> int:
        return max(self.new)


def make_room(model: Model, prompts: Sequence[Ids], wanted: int) -> Room:
    """The room that a model has for prompts and `wanted` new tokens after each.

    A model that counts its places writes up to the last of them. A prompt that leaves less room than is wanted loses
    its beginning, but never so much that less than half of the places are left to it. The encoder of an
    encoder-decoder has places of its own.
    """
    limit = model.config.max_length
    if limit is None:
        return Room(list(prompts), [wanted] * len(prompts))
    if isinstance(model, EncoderDecoder):
        room = Room([ids[-limit:] for ids in prompts], [min(wanted, limit)] * len(prompts))
    else:
        # the last token that is written is not read
        new = [min(wanted, max(limit + 1 - len(ids), limit // 2)) for ids in prompts]
        room = Room([ids[-(limit + 1 - n) :] for ids, n in zip(prompts, new, strict=True)], new)
    tell_room(model, prompts, room, wanted)
    return room


def tell_room(model: Model, prompts: Sequence[Ids], room: Room, wanted: int) -> None:
    """Say what is cut, once for each model."""
    limit = model.config.max_length
    if any(len(read) < len(ids) for read, ids in zip(room.prompts, prompts, strict=True)):
        once(
            model, f"A prompt is too long for this model, which has {limit:,} places: only its latest tokens are read."
        )
    if min(room.new) < wanted:
        some = count(min(room.new), "token is", "tokens are")
        once(model, f"This model has {limit:,} places, where a text ends: {some} written at most, not {wanted:,}.")


def tell_length(model: Model, length: int) -> None:
    """Say, once, that a text is longer than any that a model with rotary places was made for."""
    position = model.config.position
    if isinstance(position, Rotary) and length > position.length:
        once(model, f"The text is longer than the {position.length:,} tokens that this model was made for.")


def once(model: Model, message: str) -> None:
    said = told.setdefault(model, set())
    if message not in said:
        said.add(message)
        warn(message)
