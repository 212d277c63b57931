"""Dialogues as text: chat templates, which a tokenizer keeps where Hugging Face looks for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from firth.errors import UserError
from firth.models import ModelConfig, framing
from firth.tokens import Tokenizer

TEMPLATE = "chat_template"  # in tokenizer_config.json
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
TURN = "{{ '<|' + message['role'] + '|> ' + message['content'] }}"  # of our own template
Messages = Sequence[tuple[str, str]]  # role and text of each


def with_template(tokenizer: Tokenizer, config: ModelConfig, roles: Sequence[str]) -> Tokenizer:
    """The same tokenizer where it has a template; otherwise one with a token for each role, and a template of ours."""
    if tokenizer.config.get(TEMPLATE):
        return tokenizer
    more = tokenizer.with_tokens([mark(role) for role in dict.fromkeys((*ROLES, *roles))])
    return Tokenizer(more.backend, more.roles, more.config | {TEMPLATE: own_template(tokenizer, config)})


def mark(role: str) -> str:
    return f"<|{role}|>"


def own_template(tokenizer: Tokenizer, config: ModelConfig) -> str:
    """Each message behind the token of its role, all in the model's own frame.

    A decoder ends every answer. An encoder-decoder reads the turns as one text, and its answer is the decoder's.
    """
    frame = framing(config, tokenizer.vocab)
    *before_it, end = (str(tokenizer.backend.id_to_token(i)) for i in (*frame.before, frame.end))
    before = "".join(before_it)
    if config.shape == "encoder-decoder":
        return f"{before}{{% for message in messages %}}{TURN}{{% endfor %}}{end}"
    ended = f"{{% if message['role'] == '{ASSISTANT}' %}}{end}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{mark(ASSISTANT)}{{% endif %}}"
    return f"{before}{{% for message in messages %}}{TURN}{ended}{{% endfor %}}{prompt}"


class Stretch(NamedTuple):
    """An answer in a rendered dialogue: its characters [start, end), and those of its content alone, if found."""

    start: int
    end: int
    content: tuple[int, int]


class Chat:
    """The template of a tokenizer, rendered as `transformers` renders it; on some `day`, or today."""

    def __init__(self, tokenizer: Tokenizer, day: str = "") -> None:
        self.tokenizer, self.source = tokenizer, template_of(tokenizer)
        self.names = {f"{role}_token": token for role, token in tokenizer.roles.items()}
        self.template = compiled(self.source, day)

    def render(self, messages: Messages, prompt: bool = False, where: Any = "") -> str:
        """The text; with `prompt` it goes on to where an answer begins."""
        import jinja2

        given = [{"role": role, "content": content} for role, content in messages]
        known = {"messages": given, "add_generation_prompt": prompt, "tools": None, "documents": None}
        try:
            return str(self.template.render(**known, **self.names))
        except (jinja2.TemplateError, TypeError) as e:
            raise UserError(f"Example {where}: this checkpoint's chat template refuses the messages ({e}).") from None

    def check(self, messages: Messages, where: Any) -> None:
        """Refuse what has no answer, and roles that our own template has no token for."""
        roles = [role for role, _ in messages]
        if ASSISTANT not in roles:
            raise UserError(
                f"Example {where}: no message has the role {ASSISTANT}, so there is nothing to learn; its roles are "
                f"{', '.join(dict.fromkeys(roles))}."
            )
        for role in roles:
            if TURN in self.source and self.tokenizer.backend.token_to_id(mark(role)) is None:
                raise UserError(f"Example {where}: the role {role!r} did not occur in what this model was tuned on.")

    def answers(self, messages: Messages, where: Any = "") -> tuple[str, list[Stretch]]:
        """A dialogue up to its last answer, and where its answers stand.

        An answer is what comes after that with which a template asks for it. Of those that a template changes once the
        dialogue goes on (it may leave out what was thought before an answer), only the last is found.
        """
        last = max(i for i, (role, _) in enumerate(messages) if role == ASSISTANT)
        text, found = self.render(messages[: last + 1], where=where), []
        for i, (role, content) in enumerate(messages[: last + 1]):
            if role != ASSISTANT:
                continue
            before, after = self.render(messages[:i], True, where), self.render(messages[: i + 1], where=where)
            if after.startswith(before) and text.startswith(after):
                found.append(Stretch(len(before), len(after), inside(text, content, len(before), len(after))))
        if not found or found[-1].end != len(text):
            raise UserError(
                f"Example {where}: the chat template of this checkpoint does not begin its last answer with what it "
                "asks for answers with (add_generation_prompt), so it cannot be told which part is the answer."
            )
        return text, found


def inside(text: str, content: str, start: int, end: int) -> tuple[int, int]:
    """Where the content of an answer stands; all of the answer where a template has changed it."""
    at = text.find(content.strip(), start, end)
    return (start, end) if at < 0 else (at, at + len(content.strip()))


def template_of(tokenizer: Tokenizer) -> str:
    """The template; of several with names the one called default."""
    found = tokenizer.config.get(TEMPLATE)
    if isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get("default")
    if not isinstance(found, str):
        raise UserError("This checkpoint's tokenizer has no chat template (chat_template in tokenizer_config.json).")
    return found


def asks_for_the_day(tokenizer: Tokenizer) -> bool:
    """Whether what dialogues become depends on when that is."""
    return "strftime_now" in str(tokenizer.config.get(TEMPLATE))


def compiled(source: str, day: str = "") -> Any:
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
