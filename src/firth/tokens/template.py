"""A frame in the tokenizer that is saved, so that `transformers` reads raw texts as the model or its task does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from firth.tokens.tokenizer import Tokenizer

TEXT_A, TEXT_B = -1, -2  # stand for the ids of a first and of a second text
TOKEN_TYPE_IDS = "token_type_ids"


class TokenTemplate(Protocol):
    """One text, or two, in a frame: the tokens, and the segment of each."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def token_type_ids(self) -> list[int]: ...


def with_sequence_template(
    tokenizer: Tokenizer, templates: Sequence[TokenTemplate], use_token_types: bool
) -> Tokenizer:
    """The tokenizer, which puts a text A (and a text B, if there is a second sheet) into the frame of these sheets.

    It is the same one where it does so already, and where it reads in a way of its own. Ids of texts never change.
    """
    if type(tokenizer) is not Tokenizer or all(
        applies_template(tokenizer, sheet, use_token_types) for sheet in templates
    ):
        return tokenizer
    names = {i: str(tokenizer.backend.id_to_token(i)) for sheet in templates for i in sheet.ids if i >= 0}
    patterns = [template_pieces(sheet, names) for sheet in templates]
    pair = patterns[1] if len(patterns) > 1 else ["$A:0", "$B:1"]
    template = processors.TemplateProcessing(
        single=patterns[0], pair=pair, special_tokens=[(name, i) for i, name in names.items()]
    )
    backend = Backend.from_str(tokenizer.backend.to_str())
    kept = find_byte_level_processor(json.loads(backend.to_str())["post_processor"])
    backend.post_processor = processors.Sequence([kept, template]) if kept is not None else template
    config = dict(tokenizer.config)
    inputs = config.get("model_input_names", [])
    if use_token_types and inputs and TOKEN_TYPE_IDS not in inputs:
        config["model_input_names"] = [*inputs, TOKEN_TYPE_IDS]
    return Tokenizer(backend, tokenizer.special_tokens, config)


def template_pieces(template: TokenTemplate, names: dict[int, str]) -> list[str]:
    """The sheet as `tokenizers` spells it: ["<s>:0", "$A:0", "</s>:0"]."""
    spelled = {**names, TEXT_A: "$A", TEXT_B: "$B"}
    return [f"{spelled[i]}:{of}" for i, of in zip(template.ids, template.token_type_ids, strict=True)]


def applies_template(tokenizer: Tokenizer, template: TokenTemplate, use_token_types: bool) -> bool:
    """Whether a tokenizer makes this sheet of a text, or of two."""
    found = tokenizer.backend.encode("a", "b" if TEXT_B in template.ids else None, add_special_tokens=True)
    ids: list[int] = []
    of: list[int] = []
    for i, segment in zip(template.ids, template.token_type_ids, strict=True):
        here = [i] if i >= 0 else tokenizer.encode({TEXT_A: "a", TEXT_B: "b"}[i])
        ids, of = [*ids, *here], [*of, *[segment] * len(here)]
    return found.ids == ids and (not use_token_types or found.type_ids == of)


def find_byte_level_processor(processor: dict[str, Any] | None) -> processors.PostProcessor | None:
    """What a tokenizer over bytes says about the characters of its tokens, which has to stay."""
    for one in [] if processor is None else processor.get("processors", [processor]):
        if one["type"] == "ByteLevel":
            return processors.ByteLevel(**{name: value for name, value in one.items() if name != "type"})
    return None
