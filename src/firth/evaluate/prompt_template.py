"""Prompt templates: how an example and its label become a text.

    {text}
    Topic: {label}

`{label}` stands for the answer. In a demonstration the right label is written there; in the query the model fills it
in. A decoder continues the text before `{label}`. An encoder, and an encoder-decoder that restores spans, also reads
the text after it: such a cloze is a "pattern" of PET (Schick & Schütze 2021, "Exploiting cloze questions", section
3.1), and the word that stands for a label is its verbalizer.

Fields are replaced by name and by nothing else. A template is not a Python format string: `{text.x}`, `{text[0]}` and
`{text:>9}` are refused, so that a template from a file cannot reach into objects. Literal braces are doubled.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import NamedTuple

from firth.core.errors import UserError, did_you_mean, list_names, quote
from firth.text import Example

LABEL_FIELD = "label"
DEMONSTRATION_SEPARATOR = "\n\n"  # as lm-eval's fewshot_delimiter

# The fields of a template by task; {label} comes with each of them.
FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "classify": ("text",),
    "pair": ("text_a", "text_b"),
    "relation": ("text", "head", "tail"),
    "choice": ("context",),
}
# "it-was" and the cloze of two texts are those of Gao et al. (2021), "Making pre-trained language models better
# few-shot learners", table 1; "question" of a pair is that of GPT-3 (Brown et al. 2020, figure G.31).
BUILT_IN_TEMPLATES: dict[str, dict[str, str]] = {
    "classify": {
        "label": "Text: {text}\nLabel: {label}",
        "category": "{text}\nCategory: {label}",
        "about": "{text} This is about {label}.",
        "it-was": "{text} It was {label}.",
    },
    "pair": {
        "label": "Text 1: {text_a}\nText 2: {text_b}\nLabel: {label}",
        "question": "{text_a}\nQuestion: {text_b} True or False?\nAnswer: {label}",
        "cloze": "{text_a}? {label}, {text_b}",
    },
    "relation": {
        "relation": "{text}\nRelation of {head} to {tail}: {label}",
        "question": "{text}\nQuestion: What is {head} to {tail}?\nAnswer: {label}",
    },
    "choice": {
        "plain": "{context} {label}",
        "question": "Question: {context}\nAnswer: {label}",
    },
}


class Piece(NamedTuple):
    """Literal text, and the field after it; "" at the end."""

    literal: str
    field: str


class PromptTemplate(NamedTuple):
    """The pieces before and after the label. `name` is that of a built-in template, or the text itself."""

    name: str
    before: tuple[Piece, ...]
    after: tuple[Piece, ...]

    @property
    def has_fields_after_label(self) -> bool:
        return any(piece.field for piece in self.after)

    def prompt(self, fields: Mapping[str, str]) -> str:
        """The text before the label.

        >>> parse_template("{text}\\nTopic: {label}.", "classify").prompt({"text": "The team won."})
        'The team won.\\nTopic: '
        """
        return fill_pieces(self.before, fields)

    def ending(self, fields: Mapping[str, str]) -> str:
        """The text after the label."""
        return fill_pieces(self.after, fields)

    def demonstration(self, fields: Mapping[str, str], label: str) -> str:
        """A solved example, with the separator after it."""
        return self.prompt(fields) + label + self.ending(fields) + DEMONSTRATION_SEPARATOR


def template_fields(task: str, example: Example) -> dict[str, str]:
    """The texts of an example by the fields of its task's templates.

    >>> template_fields("relation", Example(1, ("Ann met Bo.",), spans=((0, 3), (8, 10))))
    {'text': 'Ann met Bo.', 'head': 'Ann', 'tail': 'Bo'}
    """
    texts = example.texts[:1] if task == "choice" else example.texts
    marked = [texts[0][begin:end] for begin, end in example.spans] if task == "relation" else []
    return dict(zip(FIELD_NAMES[task], (*texts, *marked), strict=True))


def fill_pieces(pieces: tuple[Piece, ...], fields: Mapping[str, str]) -> str:
    return "".join(literal + (fields[field] if field else "") for literal, field in pieces)


def parse_template(text: str, task: str) -> PromptTemplate:
    """Parse a template, or take the built-in one of this name.

    >>> parse_template("{text.__class__} {label}", "classify")
    Traceback (most recent call last):
    firth.core.errors.UserError: --template: {text.__class__} is not a field. This task has {text}, {label}.
    """
    built_in, known = BUILT_IN_TEMPLATES[task], (*FIELD_NAMES[task], LABEL_FIELD)
    if "{" not in text and text not in built_in:
        raise UserError(
            f"--template: {quote(text)} is not a template of the task {task}. {did_you_mean(text, built_in)} "
            f"Or write one with the fields {list_fields(known)}."
        )
    pieces: list[Piece] = []
    try:
        for literal, name, spec, conversion in Formatter().parse(built_in.get(text, text)):
            if name is not None and (name not in known or spec or conversion):
                written = f"{name}{'!' * bool(conversion)}{conversion or ''}{':' * bool(spec)}{spec or ''}"
                raise UserError(f"--template: {{{written}}} is not a field. This task has {list_fields(known)}.")
            pieces.append(Piece(literal, name or ""))
    except ValueError as e:  # a single brace
        raise UserError(f"--template {quote(text)}: {e}. Write a literal brace twice, as {{{{.") from None
    labels = [i for i, piece in enumerate(pieces) if piece.field == LABEL_FIELD]
    if len(labels) != 1:
        raise UserError(f"--template {quote(text)} has {{label}} {len(labels)} times. Write it once.")
    if not any(piece.field not in ("", LABEL_FIELD) for piece in pieces):
        raise UserError(f"--template {quote(text)} reads no text. Use {list_fields(FIELD_NAMES[task])}.")
    at = labels[0]
    return PromptTemplate(text, (*pieces[:at], Piece(pieces[at].literal, "")), tuple(pieces[at + 1 :]))


def list_fields(names: tuple[str, ...]) -> str:
    return list_names([f"{{{name}}}" for name in names])
