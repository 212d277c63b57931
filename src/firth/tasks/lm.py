"""Dialogues, instructions and plain texts: the answers are learned, given what was said before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.core.console import format_count, progress
from firth.core.errors import UserError
from firth.metrics import compute_metrics
from firth.models import Model, ModelConfig, head_for_task, make_sequence_template
from firth.objectives import Batch
from firth.tasks.chat import ASSISTANT_ROLE, AssistantSpan, ChatMessages, ChatTemplate, add_chat_template
from firth.tasks.seq2seq_batch import (
    DecoderExample,
    PackedAnswers,
    pack_decoder_examples,
    pack_seq2seq_examples,
    score_answers,
)
from firth.tasks.task import Prediction, TruncatingTokenizer
from firth.tasks.text_to_text import AnswerConfig, check_task_can_generate
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import ComputeConfig

PLAIN_TEXT_ROLE = "text"  # the role of a plain text, all of which is learned
IdentifiedDialogue = tuple[str | int, ChatMessages]  # the id of an example, and its dialogue


class DialogueTurn(NamedTuple):
    """What an encoder reads and its decoder answers."""

    ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class EncodedDialogue:
    """A dialogue or a text: one line or several for a decoder, turns for an encoder-decoder.

    What frames and ends a text is learned and not scored, so that scores are of the text alone, as those of `evaluate`.
    """

    parts: tuple[DecoderExample, ...] | tuple[DialogueTurn, ...]
    scored_mask: np.ndarray  # for each token that is asked, part by part: whether it is of the text
    num_bytes: int  # of the text that is scored

    @property
    def num_tokens(self) -> int:
        return sum(len(p.ids) + (len(p.answer_ids) if isinstance(p, DialogueTurn) else 0) for p in self.parts)


class LanguageModelingTask:
    """Language modelling of the answers of dialogues, or of whole texts. A prediction is what they cost the model.

    Dialogues become text by the tokenizer's chat template, which is made where there is none; those that are too long
    lose their beginning. Long texts are read in several pieces.
    """

    name = "lm"
    metric = "perplexity"
    labels: tuple[str, ...] = ()

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, answer_config: AnswerConfig, roles: Sequence[str]
    ) -> None:
        check_task_can_generate(self.name, config)
        self.tokenizer = add_chat_template(tokenizer, config, roles) if roles else tokenizer
        self.roles, self.is_decoder = tuple(roles), config.architecture == "decoder"
        self.template, self.pad_id = make_sequence_template(config, tokenizer.vocab), tokenizer.vocab.pad
        self.max_length = min(answer_config.max_seq_length, config.max_length or answer_config.max_seq_length)
        self.answer_tokenizer = TruncatingTokenizer(tokenizer, config, answer_config.max_target_length)
        self.answer_config, self.num_truncated, self.num_special_lookalikes, self.num_changed_answers = (
            answer_config,
            0,
            0,
            0,
        )
        if self.max_length < len(self.template.prefix_ids) + 2:
            raise UserError(f"max_seq_length={self.max_length} has no room for a text.")

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.answer_config.day)

    @property
    def notices(self) -> list[str]:
        found = []
        if self.num_truncated:
            some = format_count(self.num_truncated, "dialogue was", "dialogues were")
            found.append(f"{some} longer than {self.max_length} tokens, and lost the beginning.")
        if self.num_special_lookalikes:
            some = format_count(self.num_special_lookalikes, "message holds", "messages hold")
            found.append(f"{some} what looks like a special token, and is read as one.")
        if self.num_changed_answers:
            some = format_count(self.num_changed_answers, "answer is", "answers are")
            found.append(f"{some} changed by the chat template later on, and not learned.")
        return [*found, *self.answer_tokenizer.truncation_notices("answer")]

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        return replace(config, head=head_for_task(config, "lm"))

    def templated_tokenizer(self) -> Tokenizer:
        """As it is: the chat template has the frame."""
        return self.tokenizer

    def metadata(self) -> dict[str, Any]:
        target = {} if self.is_decoder else {"max_target_length": self.answer_config.max_target_length}
        return {
            "task": self.name,
            "answer": "words",
            "max_seq_length": self.max_length,
            **target,
            "roles": list(self.roles),
            **({"day": self.answer_config.day} if self.answer_config.day else {}),
        }

    # --- examples to items

    def encode(self, examples: Sequence[Example]) -> list[EncodedDialogue]:
        texts = iter(self.tokenizer.encode_batch([e.texts[1] for e in examples if is_plain_text(e)]))
        spoken = [(e.id, self.parse_messages(e)) for e in examples if not is_plain_text(e)]
        dialogues = self.encode_dialogues(spoken) if self.is_decoder else self.encode_turns(spoken)
        return [self.encode_plain_text(e, next(texts)) if is_plain_text(e) else next(dialogues) for e in examples]

    def parse_messages(self, example: Example) -> ChatMessages:
        """Who says what, once it is sure that there is something to learn."""
        messages = list(zip(example.texts[::2], example.texts[1::2], strict=True))
        self.chat_template.validate_messages(messages, example.id)
        self.num_special_lookalikes += sum(
            self.special_token_pattern.search(content) is not None for _, content in messages
        )
        return messages

    @cached_property
    def special_token_pattern(self) -> re.Pattern[str]:
        """Anything that looks like a special token."""
        names = (str(self.tokenizer.backend.id_to_token(i)) for i in self.tokenizer.vocab.special_ids)
        return re.compile("|".join(map(re.escape, names)))

    def encode_plain_text(self, example: Example, ids: list[int]) -> EncodedDialogue:
        """All of a text, in as many pieces as it takes; the last one ends it."""
        if not self.is_decoder:
            raise UserError(
                f"Example {example.id}: an encoder-decoder learns answers to something. Give messages, or prompt and "
                "response; a plain text is for a decoder."
            )
        before, whole = list(self.template.prefix_ids), [*ids, self.template.eos_id]
        room = self.max_length - len(before)
        pieces = [[*before, *whole[first : first + room]] for first in range(0, len(whole), room)]
        lines = tuple(DecoderExample(p, range(len(p) - 1)) for p in pieces if len(p) > 1)
        scored = np.ones(sum(len(line.target_positions) for line in lines), bool)
        scored[-1:] = len(lines) < len(pieces)  # the end, unless it stands alone and is not asked
        return EncodedDialogue(lines, scored, len(example.texts[1].encode()))

    def encode_dialogues(self, dialogues: Sequence[IdentifiedDialogue]) -> Iterator[EncodedDialogue]:
        """Each dialogue as one line, in which the answers are asked."""
        rendered = [self.chat_template.render_with_answers(messages, where) for where, messages in dialogues]
        for (_, messages), (_, found) in zip(dialogues, rendered, strict=True):
            self.num_changed_answers += len(answer_indices(messages)) - len(found)
        encodings = self.tokenizer.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (text, found), encoding in zip(rendered, encodings, strict=True):
            yield self.encode_rendered(text, found, encoding)

    def encode_rendered(self, text: str, answer_spans: Sequence[AssistantSpan], encoding: Encoding) -> EncodedDialogue:
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learned, content = np.zeros((2, len(starts)), bool)
        for stretch in answer_spans:
            begin, end = stretch.content_span
            learned |= (starts >= stretch.start) & (starts < stretch.end)
            content |= (ends > begin) & (starts < end)
        ids, before = list(encoding.ids), list(self.template.prefix_ids)
        kept = len(before) if ids[: len(before)] == before else 0
        lost = max(0, len(ids) - self.max_length)
        self.num_truncated += lost > 0
        asked = np.flatnonzero(learned[1:])
        if lost:
            ids, asked = [*ids[:kept], *ids[kept + lost :]], asked[asked >= kept + lost] - lost
        from_character = int(starts[asked[0] + lost + 1]) if len(asked) else len(text)
        scored = [
            text[max(begin, from_character) : end] for begin, end in (stretch.content_span for stretch in answer_spans)
        ]
        num_bytes = sum(len(part.encode()) for part in scored)
        return EncodedDialogue((DecoderExample(ids, asked.tolist()),), content[asked + lost + 1], num_bytes)

    def encode_turns(self, dialogues: Sequence[IdentifiedDialogue]) -> Iterator[EncodedDialogue]:
        """Each answer by itself, with all that was said before it."""
        before = [
            self.chat_template.render(said[:i], True, where) for where, said in dialogues for i in answer_indices(said)
        ]
        read = iter(self.tokenizer.encode_batch(before, parse_special=True))
        written = iter(
            self.answer_tokenizer.encode_texts(said[i][1] for _, said in dialogues for i in answer_indices(said))
        )
        for _, said in dialogues:
            parts = tuple(DialogueTurn(self.truncate_left(next(read)), next(written)) for _ in answer_indices(said))
            contents = [said[i][1] for i in answer_indices(said)]
            num_bytes = sum(
                self.count_answer_bytes(part.answer_ids, text) for part, text in zip(parts, contents, strict=True)
            )
            framed = len(self.answer_tokenizer.prefix_ids)
            scored = [[False] * framed + [True] * (len(part.answer_ids) - framed - 1) + [False] for part in parts]
            yield EncodedDialogue(parts, np.concatenate(scored), num_bytes)

    def truncate_left(self, ids: list[int]) -> list[int]:
        """What an encoder reads, without its beginning where it is too long, in its frame."""
        before, end = list(self.template.prefix_ids), self.template.eos_id
        ids = ids if ids[-1:] == [end] else [*ids, end]
        kept, lost = len(before) if ids[: len(before)] == before else 0, max(0, len(ids) - self.max_length)
        self.num_truncated += lost > 0
        return [*ids[:kept], *ids[kept + lost :]]

    def count_answer_bytes(self, answer_ids: list[int], text: str) -> int:
        """Of an answer, or of what is left of it."""
        whole = len(answer_ids) < self.answer_tokenizer.max_length
        return len((text if whole else self.tokenizer.decode(answer_ids)).encode())

    # --- items to batches and scores

    def collate(self, items: Sequence[EncodedDialogue]) -> Batch:
        return self.pack_items(items).batch

    def pack_items(self, items: Sequence[EncodedDialogue]) -> PackedAnswers:
        if self.is_decoder:
            lines = [part for item in items for part in item.parts if isinstance(part, DecoderExample)]
            return pack_decoder_examples(lines, self.max_length, self.pad_id)
        turns = [part for item in items for part in item.parts if isinstance(part, DialogueTurn)]
        length = max(self.max_length, self.answer_tokenizer.max_length)
        return pack_seq2seq_examples(
            [t.ids for t in turns], [[t.answer_ids] for t in turns], length, self.pad_id, self.template.decoder_start_id
        )

    def predict(
        self, model: Model, items: Sequence[EncodedDialogue], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """What the text of each item costs (`nats`), over how many tokens and bytes, and how many were foreseen."""
        model.eval()
        found: list[Prediction] = []
        with progress("reading", "dialogues", len(items)) as shown:
            for first in range(0, len(items), batch_size):
                some = items[first : first + batch_size]
                laid = self.pack_items(some)
                logp_A, right_A, _ = score_answers(model, laid, compute)
                item_P = np.repeat(np.arange(len(some)), [len(item.parts) for item in some])
                scored_A = np.concatenate([item.scored_mask for item in some])
                parts = (laid.sum_by_answer(value_A * scored_A) for value_A in (-logp_A, np.ones(len(logp_A)), right_A))
                nats, tokens, right = (np.bincount(item_P, weights=part, minlength=len(some)) for part in parts)
                for i, item in enumerate(some):
                    costs = {"nats": float(nats[i]), "tokens": int(tokens[i]), "bytes": item.num_bytes}
                    found.append(Prediction(costs | {"right": int(right[i])}))
                shown.advance(len(some))
        return found

    def calibrate(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        return list(predictions)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        costs = [p.prediction for p in predictions]
        if not any(c["tokens"] for c in costs):
            raise UserError("There is nothing to score: no text has a token.")
        scores = compute_metrics(self.name, [c["nats"] for c in costs], [(c["tokens"], c["bytes"]) for c in costs])
        return scores | {"token_accuracy": sum(c["right"] for c in costs) / sum(c["tokens"] for c in costs)}


def answer_indices(messages: ChatMessages) -> list[int]:
    """Which messages are answers."""
    return [i for i, (role, _) in enumerate(messages) if role == ASSISTANT_ROLE]


def is_plain_text(example: Example) -> bool:
    return example.texts[::2] == (PLAIN_TEXT_ROLE,)


def collect_roles(examples: Sequence[Example]) -> list[str]:
    """Who speaks in dialogues; nobody in plain texts."""
    return sorted({role for e in examples if not is_plain_text(e) for role in e.texts[::2]})
