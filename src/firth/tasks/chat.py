"""Chat templates: render a dialogue as text, and find the assistant's answers in it.

A chat template is Jinja source under `chat_template` in tokenizer_config.json, as in `transformers`. Some templates
mark the answers with {% generation %}. Most do not (Llama, Qwen, Gemma), so that answers are found by rendering
prefixes of the dialogue: an answer spans from the end of the rendering before it (with `add_generation_prompt`) to the
end of the rendering that includes it. This needs a prefix-preserving template: the rendering of a longer dialogue
begins with that of a shorter one.

White space after the end token of an answer belongs to the template, and not to the answer: a model stops at the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from firth.core.errors import UserError, list_names, quote, reason, shorten
from firth.models import ModelConfig, make_sequence_template
from firth.text.labelled_row import MAX_LISTED_ROWS
from firth.tokens import Tokenizer

CHAT_TEMPLATE_KEY = "chat_template"  # in tokenizer_config.json
ASSISTANT_ROLE = "assistant"
MAX_DATE_FORMAT_CHARS = 100
CHAT_ROLES = ("system", "user", ASSISTANT_ROLE)
MESSAGE_TEMPLATE = "{{ '<|' + message['role'] + '|> ' + message['content'] }}"  # in the template that Firth adds
ChatMessages = Sequence[tuple[str, str]]  # (role, text) of each message


def add_chat_template(tokenizer: Tokenizer, config: ModelConfig, roles: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with a chat template.

    A tokenizer without one gets Firth's template and a special token for each role.
    """
    if tokenizer.config.get(CHAT_TEMPLATE_KEY):
        return tokenizer
    extended = tokenizer.with_special_tokens([role_token(role) for role in dict.fromkeys((*CHAT_ROLES, *roles))])
    return Tokenizer(
        extended.backend,
        extended.special_tokens,
        extended.config | {CHAT_TEMPLATE_KEY: build_chat_template(tokenizer, config)},
    )


def role_token(role: str) -> str:
    return f"<|{role}|>"


def build_chat_template(tokenizer: Tokenizer, config: ModelConfig) -> str:
    """Return Jinja source that writes each message behind its role token, with the model's prefix before the first.

    For a decoder, the end token follows every answer. For an encoder, and for the encoder of an encoder-decoder (whose
    decoder writes the answer), all messages are one input that ends with the end token.
    """
    template = make_sequence_template(config, tokenizer.vocab)
    prefix, suffix, end = (
        "".join(str(tokenizer.backend.id_to_token(i)) for i in ids)
        for ids in (template.prefix_ids, template.suffix_ids, (template.eos_id,))
    )
    if config.architecture != "decoder":
        return f"{prefix}{{% for message in messages %}}{MESSAGE_TEMPLATE}{{% endfor %}}{suffix}"
    ended = f"{{% if message['role'] == '{ASSISTANT_ROLE}' %}}{end}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{role_token(ASSISTANT_ROLE)}{{% endif %}}"
    return f"{prefix}{{% for message in messages %}}{MESSAGE_TEMPLATE}{ended}{{% endfor %}}{prompt}"


class AssistantSpan(NamedTuple):
    """Characters [start, end) of an answer in a rendered dialogue, and those of its content without special tokens."""

    start: int
    end: int
    content_span: tuple[int, int]


class ChatTemplate:
    """A tokenizer's template, rendered as `transformers` does; `day` sets its date (default: today)."""

    def __init__(self, tokenizer: Tokenizer, day: str = "") -> None:
        self.tokenizer, self.source = tokenizer, get_chat_template(tokenizer)
        self.special_tokens = {f"{role}_token": token for role, token in tokenizer.special_tokens.items()}
        self.template = compile_chat_template(self.source, day)

    def render(self, messages: ChatMessages, add_generation_prompt: bool = False, example_id: Any = "") -> str:
        """Return the text; `add_generation_prompt` appends the tokens that begin an answer."""
        return self.render_marked(messages, add_generation_prompt, example_id)[0]

    def render_marked(
        self, messages: ChatMessages, add_generation_prompt: bool = False, example_id: Any = ""
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans that the template marks with {% generation %}."""
        chat = [{"role": role, "content": content} for role, content in messages]
        variables = {"messages": chat, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            text, marked = self.template.render_marked(**variables, **self.special_tokens)
            return str(text), marked
        except Exception as e:  # a template may raise any: ZeroDivisionError, KeyError, RecursionError, MemoryError
            where = f"Example {shorten(example_id)}: this" if example_id != "" else "This"
            raise UserError(f"{where} checkpoint's chat template refuses the messages ({describe(e)}).") from None

    def validate_messages(self, messages: ChatMessages, example_id: Any) -> None:
        """Refuse a dialogue without an answer, and roles without a token in Firth's template."""
        roles = [role for role, _ in messages]
        if ASSISTANT_ROLE not in roles:
            raise UserError(
                f"Example {shorten(example_id)}: no message has the role {ASSISTANT_ROLE}, so there is nothing to "
                f"learn; its roles are {list_names(dict.fromkeys(roles))}."
            )
        self.validate_roles(roles, example_id)

    def validate_roles(self, roles: Iterable[str], example_id: Any) -> None:
        """Refuse roles without a token in Firth's template."""
        for role in roles:
            if MESSAGE_TEMPLATE in self.source and self.tokenizer.backend.token_to_id(role_token(role)) is None:
                raise UserError(
                    f"Example {shorten(example_id)}: the role {quote(role)} did not occur in what this model was "
                    "tuned on."
                )

    def render_with_answers(self, messages: ChatMessages, example_id: Any = "") -> tuple[str, list[AssistantSpan]]:
        """Return the text of a dialogue up to its last answer, and the spans of its answers.

        A template may change an answer once later messages follow; some remove the reasoning of earlier answers. An
        answer that is changed in this way has no span, unless the template marks it. What follows its end token may
        differ.
        """
        last = max(i for i, (role, _) in enumerate(messages) if role == ASSISTANT_ROLE)
        text, marked = self.render_marked(messages[: last + 1], example_id=example_id)
        contents = {i: content for i, (role, content) in enumerate(messages[: last + 1]) if role == ASSISTANT_ROLE}
        if marked:
            known = contents.values() if len(marked) == len(contents) else [""] * len(marked)
            return text, [self.make_span(text, content, *span) for span, content in zip(marked, known, strict=True)]
        spans = []
        for i, content in contents.items():
            before = self.render(messages[:i], True, example_id)
            after = self.render(messages[: i + 1], example_id=example_id)
            end = len(after) if text.startswith(after) else self.shared_end(text, after, content, len(before))
            if after.startswith(before) and end is not None:
                spans.append(self.make_span(text, content, len(before), end))
        if not (after.startswith(before) and text == after):
            raise UserError(
                f"Example {shorten(example_id)}: the chat template of this checkpoint is not prefix-preserving: with "
                "its last answer, the dialogue does not begin with the text before the answer and its generation "
                "prompt (add_generation_prompt), so the answer cannot be located. Mark answers by {% generation %} ... "
                "{% endgeneration %} in chat_template of tokenizer_config.json, or change it."
            )
        return text, spans

    def shared_end(self, text: str, after: str, content: str, start: int) -> int | None:
        """Return where an answer ends in both texts, behind its end token; None if its content differs.

        Some templates (Phi 3) write an end of text behind a dialogue, which is not there when messages follow.
        """
        ends = [match.end() for match in self.special_pattern.finditer(after, start)]
        shared = max((end for end in ends if text.startswith(after[:end])), default=start)
        return shared if content.strip() and content.strip() in after[start:shared] else None

    def find_answer_end(self) -> int | None:
        """Return the id of the special token that ends answers in this template; None if there is none."""
        try:
            text, (span,) = self.render_with_answers([("user", "A"), (ASSISTANT_ROLE, "B")])
        except UserError:  # a template may want other messages
            return None
        match = self.special_pattern.search(text, span.content_span[1], span.end)
        return None if match is None else self.tokenizer.backend.token_to_id(match.group())

    def make_span(self, text: str, content: str, start: int, end: int) -> AssistantSpan:
        """Return the span of an answer without the white space after its end token."""
        content_end = end
        *_, last = (None, *self.special_pattern.finditer(text, start, end))
        if last is not None and not text[last.end() : end].strip():
            content_end, end = last.span()
        return AssistantSpan(start, end, locate_content(text, content, start, content_end))

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Pattern that matches the text of any special token."""
        names = (str(self.tokenizer.backend.id_to_token(i)) for i in self.tokenizer.vocab.special_ids)
        return re.compile("|".join(map(re.escape, names)))


def list_rows(rows: Iterable[tuple[str, Any]]) -> str:
    """Return files and ids of examples, the first of each file.

    >>> list_rows([("a.jsonl", 3), ("a.jsonl", 3), ("b.jsonl", "x")]), list_rows([("", i) for i in range(9)])
    ('a.jsonl: example 3; b.jsonl: example x', 'example 0, 1, 2, ...')
    """
    by_file: dict[str, dict[Any, None]] = {}
    for file, example_id in rows:
        by_file.setdefault(file, {})[example_id] = None
    listed = []
    for file, ids in by_file.items():
        first = ", ".join(shorten(i) for i in list(ids)[:MAX_LISTED_ROWS])
        listed.append(f"{file}: " * bool(file) + f"example {first}" + ", ..." * (len(ids) > MAX_LISTED_ROWS))
    return "; ".join(listed)


def locate_content(text: str, content: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of an answer's content; all before its end token if the template has changed the content."""
    at = text.find(content.strip(), start, end) if content else -1
    return (start, end) if at < 0 else (at, at + len(content.strip()))


def get_chat_template(tokenizer: Tokenizer) -> str:
    """Return the template's source; of several named templates, the one named default."""
    source = tokenizer.config.get(CHAT_TEMPLATE_KEY)
    if isinstance(source, list):
        source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}.get("default")
    if not isinstance(source, str):
        raise UserError("This checkpoint's tokenizer has no chat template (chat_template in tokenizer_config.json).")
    return source


def template_uses_date(tokenizer: Tokenizer) -> bool:
    """Whether the rendered text depends on the date."""
    return "strftime_now" in str(tokenizer.config.get(CHAT_TEMPLATE_KEY))


def compile_chat_template(source: str, day: str = "") -> Any:
    """Compile a template in a sandbox with limits, with the filters and functions that `transformers` provides."""
    try:
        from jinja2 import TemplateError

        from firth.tasks.chat_sandbox import LimitedTemplate
    except ImportError:
        raise UserError("Chat templates are written in Jinja: install it (pip install jinja2).") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    def now(form: str) -> str:
        return (datetime.fromisoformat(day) if day else datetime.now()).strftime(form[:MAX_DATE_FORMAT_CHARS])

    try:
        return LimitedTemplate(source, {"tojson": to_json}, {"raise_exception": refuse, "strftime_now": now})
    except Exception as e:  # a syntax error, or a RecursionError, a MemoryError, a SyntaxError of the compiled code
        raise UserError(f"The chat template of this checkpoint cannot be read: {describe(e)}.") from None


def describe(error: Exception) -> str:
    """Return an exception of a template as words; many have no message."""
    return reason(error) or type(error).__name__
