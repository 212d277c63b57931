"""A frame in the tokenizer that is saved, so that `transformers` reads raw texts as the model or its task does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from firth.tokens.tokenizer import Tokenizer

A, B = -1, -2  # stand for the ids of a first and of a second text
TYPES = "token_type_ids"


class Sheet(Protocol):
    """One text, or two, in a frame: the tokens, and the segment of each."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def segment(self) -> list[int]: ...


def framed(tokenizer: Tokenizer, sheets: Sequence[Sheet], segments: bool) -> Tokenizer:
    """The tokenizer, which puts a text A (and a text B, if there is a second sheet) into the frame of these sheets.

    It is the same one where it does so already, and where it reads in a way of its own. Ids of texts never change.
    """
    if type(tokenizer) is not Tokenizer or all(reads(tokenizer, sheet, segments) for sheet in sheets):
        return tokenizer
    names = {i: str(tokenizer.backend.id_to_token(i)) for sheet in sheets for i in sheet.ids if i >= 0}
    patterns = [pattern(sheet, names) for sheet in sheets]
    pair = patterns[1] if len(patterns) > 1 else ["$A:0", "$B:1"]
    template = processors.TemplateProcessing(
        single=patterns[0], pair=pair, special_tokens=[(name, i) for i, name in names.items()]
    )
    backend = Backend.from_str(tokenizer.backend.to_str())
    kept = byte_level(json.loads(backend.to_str())["post_processor"])
    backend.post_processor = processors.Sequence([kept, template]) if kept is not None else template
    config = dict(tokenizer.config)
    inputs = config.get("model_input_names", [])
    if segments and inputs and TYPES not in inputs:
        config["model_input_names"] = [*inputs, TYPES]
    return Tokenizer(backend, tokenizer.roles, config)


def pattern(sheet: Sheet, names: dict[int, str]) -> list[str]:
    """The sheet as `tokenizers` spells it: ["<s>:0", "$A:0", "</s>:0"]."""
    spelled = {**names, A: "$A", B: "$B"}
    return [f"{spelled[i]}:{of}" for i, of in zip(sheet.ids, sheet.segment, strict=True)]


def reads(tokenizer: Tokenizer, sheet: Sheet, segments: bool) -> bool:
    """Whether a tokenizer makes this sheet of a text, or of two."""
    found = tokenizer.backend.encode("a", "b" if B in sheet.ids else None, add_special_tokens=True)
    ids: list[int] = []
    of: list[int] = []
    for i, segment in zip(sheet.ids, sheet.segment, strict=True):
        here = [i] if i >= 0 else tokenizer.encode({A: "a", B: "b"}[i])
        ids, of = [*ids, *here], [*of, *[segment] * len(here)]
    return found.ids == ids and (not segments or found.type_ids == of)


def byte_level(processor: dict[str, Any] | None) -> processors.PostProcessor | None:
    """What a tokenizer over bytes says about the characters of its tokens, which has to stay."""
    for one in [] if processor is None else processor.get("processors", [processor]):
        if one["type"] == "ByteLevel":
            return processors.ByteLevel(**{name: value for name, value in one.items() if name != "type"})
    return None
