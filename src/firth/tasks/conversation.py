"""A conversation with a model that was fine-tuned on dialogues, in the checkpoint's chat template.

    conversation = Conversation(firth.load("chat/final"), system="Answer in one sentence.")
    for piece in conversation.reply("Who wrote Hamlet?"):
        print(piece, end="", flush=True)

The whole dialogue is rendered again for every answer, since a template may change earlier messages. When it outgrows
the model's positions, the oldest exchange is left out; the system message stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.core.errors import UserError
from firth.generate import stream_text
from firth.generate.decode_state import require_tokenizer
from firth.models import Model
from firth.tasks.chat import ASSISTANT_ROLE, CHAT_TEMPLATE_KEY
from firth.tasks.prompts import encode_messages

DEFAULT_NEW_TOKENS = 256


class Conversation:
    """The messages so far, as (role, text), and the model that answers. `settings` are fields of GenerationConfig."""

    def __init__(self, model: Model, system: str = "", **settings: Any) -> None:
        if not require_tokenizer(model).config.get(CHAT_TEMPLATE_KEY):
            raise UserError(
                "This checkpoint has no chat template, so it knows no dialogues: `firth finetune CHECKPOINT --task lm` "
                "on a file with `messages` teaches it, and `firth generate` continues a text."
            )
        self.model, self.system = model, system
        self.settings = {"max_new_tokens": DEFAULT_NEW_TOKENS, **settings}
        self.messages: list[tuple[str, str]] = []
        self.num_forgotten = 0  # messages that were left out because the dialogue was too long
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [("system", self.system)] if self.system else []

    def reply(self, text: str) -> Iterator[str]:
        """Yield the answer to a message in pieces. Both are remembered when the answer is complete."""
        messages, prompt_ids = self.fit([*self.messages, ("user", text)])
        answer = ""
        for piece in stream_text(self.model, prompt_ids, **self.settings):
            answer += piece
            yield piece
        self.messages = [*messages, (ASSISTANT_ROLE, answer.strip())]

    def fit(self, messages: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[int]]:
        """Return the messages that fit, and their ids: the oldest exchange is left out until the rest fits."""
        limit, first = self.model.config.max_length, int(bool(self.system))
        max_prompt_tokens = limit and limit - min(self.settings["max_new_tokens"], limit // 2)
        ids = encode_messages(self.model, messages)
        while max_prompt_tokens and len(ids) > max_prompt_tokens and len(messages) > first + 1:
            messages = [*messages[:first], *messages[first + 2 :]]
            self.num_forgotten += 2
            ids = encode_messages(self.model, messages)
        return messages, ids
