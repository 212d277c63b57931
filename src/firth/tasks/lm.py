"""Dialogues, instructions and plain texts: the answers are learned, given what was said before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.console import count, progress
from firth.errors import UserError
from firth.metrics import score
from firth.models import Model, ModelConfig, framing, head_for
from firth.objectives import Batch
from firth.tasks.chat import ASSISTANT, Chat, Messages, Stretch, with_template
from firth.tasks.task import Prediction, Reader
from firth.tasks.text_to_text import Writing, check_writes
from firth.tasks.writing import Laid, Line, foresee, lay_lines, lay_pairs
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import Machine

TEXT = "text"  # the role of a plain text, all of which is learned
Ids = list[int]
Spoken = tuple[str | int, Messages]  # the id of an example, and its dialogue


class Turn(NamedTuple):
    """What an encoder reads and its decoder answers."""

    ids: Ids
    answer: Ids


@dataclass(frozen=True)
class Item:
    """A dialogue or a text: one line or several for a decoder, turns for an encoder-decoder.

    What frames and ends a text is learned and not scored, so that scores are of the text alone, as those of `evaluate`.
    """

    parts: tuple[Line, ...] | tuple[Turn, ...]
    scored: np.ndarray  # for each token that is asked, part by part: whether it is of the text
    bytes: int  # of the text that is scored

    @property
    def size(self) -> int:
        return sum(len(p.ids) + (len(p.answer) if isinstance(p, Turn) else 0) for p in self.parts)


class Dialogue:
    """Language modelling of the answers of dialogues, or of whole texts. A prediction is what they cost the model.

    Dialogues become text by the tokenizer's chat template, which is made where there is none; those that are too long
    lose their beginning. Long texts are read in several pieces.
    """

    name = "lm"
    metric = "perplexity"
    labels: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, writing: Writing, roles: Sequence[str]) -> None:
        check_writes(self.name, config)
        self.tokenizer = with_template(tokenizer, config, roles) if roles else tokenizer
        self.roles, self.decoder = tuple(roles), config.shape == "decoder"
        self.frame, self.pad = framing(config, tokenizer.vocab), tokenizer.vocab.pad
        self.length = min(writing.max_seq_length, config.max_length or writing.max_seq_length)
        self.writer = Reader(tokenizer, config, writing.max_target_length)
        self.writing, self.cut, self.alike, self.changed = writing, 0, 0, 0
        if self.length < len(self.frame.before) + 2:
            raise UserError(f"max_seq_length={self.length} has no room for a text.")

    @cached_property
    def chat(self) -> Chat:
        return Chat(self.tokenizer, self.writing.day)

    @property
    def said(self) -> list[str]:
        found = []
        if self.cut:
            some = count(self.cut, "dialogue was", "dialogues were")
            found.append(f"{some} longer than {self.length} tokens, and lost the beginning.")
        if self.alike:
            some = count(self.alike, "message holds", "messages hold")
            found.append(f"{some} what looks like a special token, and is read as one.")
        if self.changed:
            some = count(self.changed, "answer is", "answers are")
            found.append(f"{some} changed by the chat template later on, and not learned.")
        return [*found, *self.writer.say_cut("answer")]

    def head(self, config: ModelConfig) -> ModelConfig:
        return replace(config, head=head_for(config, "lm"))

    def framed(self) -> Tokenizer:
        """As it is: the chat template has the frame."""
        return self.tokenizer

    def facts(self) -> dict[str, Any]:
        target = {} if self.decoder else {"max_target_length": self.writing.max_target_length}
        return {
            "task": self.name,
            "answer": "words",
            "max_seq_length": self.length,
            **target,
            "roles": list(self.roles),
            **({"day": self.writing.day} if self.writing.day else {}),
        }

    # --- examples to items

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        texts = iter(self.tokenizer.encode_batch([e.texts[1] for e in examples if is_text(e)]))
        spoken = [(e.id, self.messages(e)) for e in examples if not is_text(e)]
        dialogues = self.read_lines(spoken) if self.decoder else self.read_turns(spoken)
        return [self.read_text(e, next(texts)) if is_text(e) else next(dialogues) for e in examples]

    def messages(self, example: Example) -> Messages:
        """Who says what, once it is sure that there is something to learn."""
        messages = list(zip(example.texts[::2], example.texts[1::2], strict=True))
        self.chat.check(messages, example.id)
        self.alike += sum(self.special.search(content) is not None for _, content in messages)
        return messages

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Anything that looks like a special token."""
        names = (str(self.tokenizer.backend.id_to_token(i)) for i in self.tokenizer.vocab.special)
        return re.compile("|".join(map(re.escape, names)))

    def read_text(self, example: Example, ids: Ids) -> Item:
        """All of a text, in as many pieces as it takes; the last one ends it."""
        if not self.decoder:
            raise UserError(
                f"Example {example.id}: an encoder-decoder learns answers to something. Give messages, or prompt and "
                "response; a plain text is for a decoder."
            )
        before, whole = list(self.frame.before), [*ids, self.frame.end]
        room = self.length - len(before)
        pieces = [[*before, *whole[first : first + room]] for first in range(0, len(whole), room)]
        lines = tuple(Line(p, range(len(p) - 1)) for p in pieces if len(p) > 1)
        scored = np.ones(sum(len(line.asked) for line in lines), bool)
        scored[-1:] = len(lines) < len(pieces)  # the end, unless it stands alone and is not asked
        return Item(lines, scored, len(example.texts[1].encode()))

    def read_lines(self, dialogues: Sequence[Spoken]) -> Iterator[Item]:
        """Each dialogue as one line, in which the answers are asked."""
        rendered = [self.chat.answers(messages, where) for where, messages in dialogues]
        for (_, messages), (_, found) in zip(dialogues, rendered, strict=True):
            self.changed += len(answers(messages)) - len(found)
        encodings = self.tokenizer.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (text, found), encoding in zip(rendered, encodings, strict=True):
            yield self.line(text, found, encoding)

    def line(self, text: str, found: Sequence[Stretch], encoding: Encoding) -> Item:
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learned, content = np.zeros((2, len(starts)), bool)
        for stretch in found:
            begin, end = stretch.content
            learned |= (starts >= stretch.start) & (starts < stretch.end)
            content |= (ends > begin) & (starts < end)
        ids, before = list(encoding.ids), list(self.frame.before)
        kept = len(before) if ids[: len(before)] == before else 0
        lost = max(0, len(ids) - self.length)
        self.cut += lost > 0
        asked = np.flatnonzero(learned[1:])
        if lost:
            ids, asked = [*ids[:kept], *ids[kept + lost :]], asked[asked >= kept + lost] - lost
        from_character = int(starts[asked[0] + lost + 1]) if len(asked) else len(text)
        scored = [text[max(begin, from_character) : end] for begin, end in (stretch.content for stretch in found)]
        num_bytes = sum(len(part.encode()) for part in scored)
        return Item((Line(ids, asked.tolist()),), content[asked + lost + 1], num_bytes)

    def read_turns(self, dialogues: Sequence[Spoken]) -> Iterator[Item]:
        """Each answer by itself, with all that was said before it."""
        before = [self.chat.render(said[:i], True, where) for where, said in dialogues for i in answers(said)]
        read = iter(self.tokenizer.encode_batch(before, specials=True))
        written = iter(self.writer.read(said[i][1] for _, said in dialogues for i in answers(said)))
        for _, said in dialogues:
            parts = tuple(Turn(self.shorten(next(read)), next(written)) for _ in answers(said))
            contents = [said[i][1] for i in answers(said)]
            num_bytes = sum(self.num_bytes(part.answer, text) for part, text in zip(parts, contents, strict=True))
            framed = len(self.writer.before)
            scored = [[False] * framed + [True] * (len(part.answer) - framed - 1) + [False] for part in parts]
            yield Item(parts, np.concatenate(scored), num_bytes)

    def shorten(self, ids: Ids) -> Ids:
        """What an encoder reads, without its beginning where it is too long, in its frame."""
        before, end = list(self.frame.before), self.frame.end
        ids = ids if ids[-1:] == [end] else [*ids, end]
        kept, lost = len(before) if ids[: len(before)] == before else 0, max(0, len(ids) - self.length)
        self.cut += lost > 0
        return [*ids[:kept], *ids[kept + lost :]]

    def num_bytes(self, answer: Ids, text: str) -> int:
        """Of an answer, or of what is left of it."""
        whole = len(answer) < self.writer.length
        return len((text if whole else self.tokenizer.decode(answer)).encode())

    # --- items to batches and scores

    def batch(self, items: Sequence[Item]) -> Batch:
        return self.lay(items).batch

    def lay(self, items: Sequence[Item]) -> Laid:
        if self.decoder:
            lines = [part for item in items for part in item.parts if isinstance(part, Line)]
            return lay_lines(lines, self.length, self.pad)
        turns = [part for item in items for part in item.parts if isinstance(part, Turn)]
        length = max(self.length, self.writer.length)
        return lay_pairs([t.ids for t in turns], [[t.answer] for t in turns], length, self.pad, self.frame.start)

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        """What the text of each item costs (`nats`), over how many tokens and bytes, and how many were foreseen."""
        model.eval()
        found: list[Prediction] = []
        with progress("reading", "dialogues", len(items)) as shown:
            for first in range(0, len(items), size):
                some = items[first : first + size]
                laid = self.lay(some)
                logp_A, right_A, _ = foresee(model, laid, machine)
                item_P = np.repeat(np.arange(len(some)), [len(item.parts) for item in some])
                scored_A = np.concatenate([item.scored for item in some])
                parts = (laid.sums(value_A * scored_A) for value_A in (-logp_A, np.ones(len(logp_A)), right_A))
                nats, tokens, right = (np.bincount(item_P, weights=part, minlength=len(some)) for part in parts)
                for i, item in enumerate(some):
                    costs = {"nats": float(nats[i]), "tokens": int(tokens[i]), "bytes": item.bytes}
                    found.append(Prediction(costs | {"right": int(right[i])}))
                shown.advance(len(some))
        return found

    def settle(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        return list(predictions)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        costs = [p.prediction for p in predictions]
        if not any(c["tokens"] for c in costs):
            raise UserError("There is nothing to score: no text has a token.")
        scores = score(self.name, [c["nats"] for c in costs], [(c["tokens"], c["bytes"]) for c in costs])
        return scores | {"token_accuracy": sum(c["right"] for c in costs) / sum(c["tokens"] for c in costs)}


def answers(messages: Messages) -> list[int]:
    """Which messages are answers."""
    return [i for i, (role, _) in enumerate(messages) if role == ASSISTANT]


def is_text(example: Example) -> bool:
    return example.texts[::2] == (TEXT,)


def roles_of(examples: Sequence[Example]) -> list[str]:
    """Who speaks in dialogues; nobody in plain texts."""
    return sorted({role for e in examples if not is_text(e) for role in e.texts[::2]})
