"""Dialogues as text: chat templates, which a tokenizer keeps where Hugging Face looks for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from firth.core.errors import UserError
from firth.models import ModelConfig, make_sequence_template
from firth.tokens import Tokenizer

CHAT_TEMPLATE_KEY = "chat_template"  # in tokenizer_config.json
ASSISTANT_ROLE = "assistant"
CHAT_ROLES = ("system", "user", ASSISTANT_ROLE)
MESSAGE_TEMPLATE = "{{ '<|' + message['role'] + '|> ' + message['content'] }}"  # of our own template
ChatMessages = Sequence[tuple[str, str]]  # role and text of each


def add_chat_template(tokenizer: Tokenizer, config: ModelConfig, roles: Sequence[str]) -> Tokenizer:
    """The same tokenizer where it has a template; otherwise one with a token for each role, and a template of ours."""
    if tokenizer.config.get(CHAT_TEMPLATE_KEY):
        return tokenizer
    more = tokenizer.with_special_tokens([role_token(role) for role in dict.fromkeys((*CHAT_ROLES, *roles))])
    return Tokenizer(
        more.backend, more.special_tokens, more.config | {CHAT_TEMPLATE_KEY: build_chat_template(tokenizer, config)}
    )


def role_token(role: str) -> str:
    return f"<|{role}|>"


def build_chat_template(tokenizer: Tokenizer, config: ModelConfig) -> str:
    """Each message behind the token of its role, all in the model's own frame.

    A decoder ends every answer. An encoder-decoder reads the turns as one text, and its answer is the decoder's.
    """
    frame = make_sequence_template(config, tokenizer.vocab)
    *before_it, end = (str(tokenizer.backend.id_to_token(i)) for i in (*frame.prefix_ids, frame.eos_id))
    before = "".join(before_it)
    if config.architecture == "encoder-decoder":
        return f"{before}{{% for message in messages %}}{MESSAGE_TEMPLATE}{{% endfor %}}{end}"
    ended = f"{{% if message['role'] == '{ASSISTANT_ROLE}' %}}{end}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{role_token(ASSISTANT_ROLE)}{{% endif %}}"
    return f"{before}{{% for message in messages %}}{MESSAGE_TEMPLATE}{ended}{{% endfor %}}{prompt}"


class AssistantSpan(NamedTuple):
    """An answer in a rendered dialogue: its characters [start, end), and those of its content alone, if found."""

    start: int
    end: int
    content_span: tuple[int, int]


class ChatTemplate:
    """The template of a tokenizer, rendered as `transformers` renders it; on some `day`, or today."""

    def __init__(self, tokenizer: Tokenizer, day: str = "") -> None:
        self.tokenizer, self.source = tokenizer, get_chat_template(tokenizer)
        self.special_tokens = {f"{role}_token": token for role, token in tokenizer.special_tokens.items()}
        self.template = compile_chat_template(self.source, day)

    def render(self, messages: ChatMessages, add_generation_prompt: bool = False, example_id: Any = "") -> str:
        """The text; with `add_generation_prompt` it goes on to where an answer begins."""
        import jinja2

        given = [{"role": role, "content": content} for role, content in messages]
        known = {"messages": given, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return str(self.template.render(**known, **self.special_tokens))
        except (jinja2.TemplateError, TypeError) as e:
            raise UserError(
                f"Example {example_id}: this checkpoint's chat template refuses the messages ({e})."
            ) from None

    def validate_messages(self, messages: ChatMessages, example_id: Any) -> None:
        """Refuse what has no answer, and roles that our own template has no token for."""
        roles = [role for role, _ in messages]
        if ASSISTANT_ROLE not in roles:
            raise UserError(
                f"Example {example_id}: no message has the role {ASSISTANT_ROLE}, so there is nothing to learn; its roles are "
                f"{', '.join(dict.fromkeys(roles))}."
            )
        for role in roles:
            if MESSAGE_TEMPLATE in self.source and self.tokenizer.backend.token_to_id(role_token(role)) is None:
                raise UserError(
                    f"Example {example_id}: the role {role!r} did not occur in what this model was tuned on."
                )

    def render_with_answers(self, messages: ChatMessages, example_id: Any = "") -> tuple[str, list[AssistantSpan]]:
        """A dialogue up to its last answer, and where its answers stand.

        An answer is what comes after that with which a template asks for it. Of those that a template changes once the
        dialogue goes on (it may leave out what was thought before an answer), only the last is found.
        """
        last = max(i for i, (role, _) in enumerate(messages) if role == ASSISTANT_ROLE)
        text, found = self.render(messages[: last + 1], example_id=example_id), []
        for i, (role, content) in enumerate(messages[: last + 1]):
            if role != ASSISTANT_ROLE:
                continue
            before, after = (
                self.render(messages[:i], True, example_id),
                self.render(messages[: i + 1], example_id=example_id),
            )
            if after.startswith(before) and text.startswith(after):
                found.append(
                    AssistantSpan(len(before), len(after), locate_content(text, content, len(before), len(after)))
                )
        if not found or found[-1].end != len(text):
            raise UserError(
                f"Example {example_id}: the chat template of this checkpoint does not begin its last answer with what it "
                "asks for answers with (add_generation_prompt), so it cannot be told which part is the answer."
            )
        return text, found


def locate_content(text: str, content: str, start: int, end: int) -> tuple[int, int]:
    """Where the content of an answer stands; all of the answer where a template has changed it."""
    at = text.find(content.strip(), start, end)
    return (start, end) if at < 0 else (at, at + len(content.strip()))


def get_chat_template(tokenizer: Tokenizer) -> str:
    """The template; of several with names the one called default."""
    found = tokenizer.config.get(CHAT_TEMPLATE_KEY)
    if isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get("default")
    if not isinstance(found, str):
        raise UserError("This checkpoint's tokenizer has no chat template (chat_template in tokenizer_config.json).")
    return found


def template_uses_date(tokenizer: Tokenizer) -> bool:
    """Whether what dialogues become depends on when that is."""
    return "strftime_now" in str(tokenizer.config.get(CHAT_TEMPLATE_KEY))


def compile_chat_template(source: str, day: str = "") -> Any:
    """A Jinja template in a sandbox, with what templates on Hugging Face count on."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("Chat templates are written in Jinja: install it (pip install jinja2).") from None

    class Generation(Extension):
        """{% generation %} marks answers for others; here what it holds is passed on."""

        tags = {"generation"}  # noqa: RUF012, Jinja reads it from the class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    def now(form: str) -> str:
        return (datetime.fromisoformat(day) if day else datetime.now()).strftime(form)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = to_json
    env.globals |= {"raise_exception": refuse, "strftime_now": now}
    try:
        return env.from_string(source)
    except TemplateError as e:
        raise UserError(f"The chat template of this checkpoint cannot be read: {e}.") from None
