"""Chat templates: render a dialogue as text, and find the assistant's answers in it.

A chat template is Jinja source under `chat_template` in tokenizer_config.json, as in `transformers`. It does not mark
the answers, so they are found by rendering prefixes of the dialogue: an answer spans from the end of the rendering
before it (with `add_generation_prompt`) to the end of the rendering that includes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from firth.core.errors import UserError, list_names, quote, reason, shorten
from firth.models import ModelConfig, make_sequence_template
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

    For a decoder, the end token follows every answer. For an encoder-decoder, the messages are one encoder input that
    ends with the end token; the decoder writes the answer.
    """
    template = make_sequence_template(config, tokenizer.vocab)
    *prefix_tokens, end = (str(tokenizer.backend.id_to_token(i)) for i in (*template.prefix_ids, template.eos_id))
    prefix = "".join(prefix_tokens)
    if config.architecture == "encoder-decoder":
        return f"{prefix}{{% for message in messages %}}{MESSAGE_TEMPLATE}{{% endfor %}}{end}"
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
        chat = [{"role": role, "content": content} for role, content in messages]
        variables = {"messages": chat, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return str(self.template.render(**variables, **self.special_tokens))
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
        for role in roles:
            if MESSAGE_TEMPLATE in self.source and self.tokenizer.backend.token_to_id(role_token(role)) is None:
                raise UserError(
                    f"Example {shorten(example_id)}: the role {quote(role)} did not occur in what this model was "
                    "tuned on."
                )

    def render_with_answers(self, messages: ChatMessages, example_id: Any = "") -> tuple[str, list[AssistantSpan]]:
        """Return the text of a dialogue up to its last answer, and the spans of its answers.

        A template may change an answer once later messages follow; some remove the reasoning of earlier answers. An
        answer that is changed in this way has no span.
        """
        last = max(i for i, (role, _) in enumerate(messages) if role == ASSISTANT_ROLE)
        text, spans = self.render(messages[: last + 1], example_id=example_id), []
        for i, (role, content) in enumerate(messages[: last + 1]):
            if role != ASSISTANT_ROLE:
                continue
            before = self.render(messages[:i], True, example_id)
            after = self.render(messages[: i + 1], example_id=example_id)
            if after.startswith(before) and text.startswith(after):
                start, end = len(before), len(after)
                spans.append(AssistantSpan(start, end, locate_content(text, content, start, end)))
        if not spans or spans[-1].end != len(text):
            raise UserError(
                f"Example {shorten(example_id)}: the chat template of this checkpoint does not begin its last answer "
                "with its generation prompt (add_generation_prompt), so the answer cannot be located. Change "
                "chat_template in tokenizer_config.json."
            )
        return text, spans


def locate_content(text: str, content: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of an answer's content; the span of the answer if the template has changed the content."""
    at = text.find(content.strip(), start, end)
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
