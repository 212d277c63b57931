"""Supervised fine-tuning (SFT) as language modelling: dialogues, instructions and plain texts.

A dialogue becomes one text by the tokenizer's chat template. The loss covers the tokens of the assistant's answers
alone; the messages before an answer are context. In order:

1. `ChatTemplate` renders the dialogue and returns the character spans of its answers.
2. The tokenizer's offsets turn these spans into tokens. A decoder predicts token t + 1 at position t, so the target
   positions are those before each answer token.
3. A decoder reads a dialogue once, with all answers as targets. An encoder-decoder reads it once per answer: the
   messages so far go to the encoder, the answer to the decoder. So does a prefix LM, whose messages so far attend to
   all of themselves.
4. Several examples are packed into each row (`seq2seq_batch`); attention stays inside each example.

Shapes: A target tokens of a batch, P parts (sequences) of its items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from firth.core.console import format_count, progress
from firth.core.errors import UserError, shorten
from firth.metrics import compute_metrics
from firth.models import Model, ModelConfig, head_for_task, make_sequence_template
from firth.objectives import Batch
from firth.tasks.chat import ASSISTANT_ROLE, AssistantSpan, ChatMessages, ChatTemplate, add_chat_template, list_rows
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
from firth.tokens.tokenizer import tokenizer_errors
from firth.train import ComputeConfig

PLAIN_TEXT_ROLE = "text"  # role of a plain text: every token is a target
IdentifiedDialogue = tuple[str | int, ChatMessages]  # id of an example and its messages
Row = tuple[str, str | int]  # file and id of an example


class DialogueTurn(NamedTuple):
    """Encoder input and decoder target of one answer."""

    ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class EncodedDialogue:
    """A dialogue or a text: one or several sequences for a decoder, turns for an encoder-decoder.

    Special tokens around a text or an answer are trained but not scored, so that perplexity covers the text alone, as
    that of `evaluate` does.
    """

    parts: tuple[DecoderExample, ...] | tuple[DialogueTurn, ...]
    scored_mask: np.ndarray  # (A,) over all parts: whether each target token belongs to the text
    num_bytes: int  # UTF-8 bytes of the scored text, for bits per byte

    @property
    def num_tokens(self) -> int:
        return sum(len(p.ids) + (len(p.answer_ids) if isinstance(p, DialogueTurn) else 0) for p in self.parts)


class LanguageModelingTask:
    """Language modelling of the answers of dialogues, or of all of a plain text.

    A prediction is the negative log-likelihood of the scored tokens. A tokenizer without a chat template gets one. Long
    dialogues are truncated on the left, so that the last answer stays; long texts are split into pieces.
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
        self.has_prefix_attention = self.is_decoder and config.has_bidirectional_prompt
        self.template, self.pad_id = make_sequence_template(config, tokenizer.vocab), tokenizer.vocab.pad
        self.max_length = min(answer_config.max_seq_length, config.max_length or answer_config.max_seq_length)
        self.answer_tokenizer = TruncatingTokenizer(tokenizer, config, answer_config.max_target_length)
        self.answer_config = answer_config
        self.file = ""  # whose examples are encoded, for messages
        self.truncated, self.changed, self.lookalikes, self.joined, self.cut = (list[Row]() for _ in range(5))
        if self.max_length < len(self.template.prefix_ids) + 2:
            raise UserError(f"max_seq_length={self.max_length} is too short for a text: choose a longer one.")

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.answer_config.day)

    @property
    def notices(self) -> list[str]:
        notices = []
        if self.truncated:
            count = format_count(len(self.truncated), "dialogue was", "dialogues were")
            notices.append(
                f"{count} longer than {self.max_length} tokens, and lost the beginning ({list_rows(self.truncated)})."
            )
        if self.lookalikes:
            count = format_count(len(self.lookalikes), "message holds", "messages hold")
            notices.append(
                f"{count} what looks like a special token, and is read as one ({list_rows(self.lookalikes)})."
            )
        if self.changed:
            count = format_count(len(self.changed), "answer is", "answers are")
            notices.append(
                f"{count} changed by the chat template once messages follow, and not learned: the template is not "
                f"prefix-preserving ({list_rows(self.changed)})."
            )
        if self.joined:
            count = format_count(len(self.joined), "answer begins", "answers begin")
            notices.append(
                f"{count} inside of a token that the prompt begins ({list_rows(self.joined)}): the token is learned, "
                "but a prompt by itself ends with another one. Let the generation prompt of the chat template end "
                "without a space, and answers begin with it."
            )
        if self.cut:
            count = format_count(len(self.cut), "answer was", "answers were")
            notices.append(
                f"{count} longer than {self.answer_tokenizer.max_length} tokens, and cut: the model learns to stop "
                f"there ({list_rows(self.cut)}). Raise --max-target-length."
            )
        return notices

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        return replace(config, head=head_for_task(config, "lm"))

    def templated_tokenizer(self) -> Tokenizer:
        """Return the tokenizer unchanged: the chat template adds the special tokens."""
        return self.tokenizer

    def metadata(self) -> dict[str, Any]:
        target = {} if self.is_decoder else {"max_target_length": self.answer_config.max_target_length}
        return {
            "task": self.name,
            "answer": "text",
            "max_seq_length": self.max_length,
            **target,
            "roles": list(self.roles),
            **({"day": self.answer_config.day} if self.answer_config.day else {}),
        }

    # --- examples to items

    def encode(self, examples: Sequence[Example]) -> list[EncodedDialogue]:
        texts = iter(self.tokenizer.encode_batch([e.texts[1] for e in examples if is_plain_text(e)]))
        parsed = [(e.id, self.parse_messages(e)) for e in examples if not is_plain_text(e)]
        dialogues = self.encode_dialogues(parsed) if self.is_decoder else self.encode_turns(parsed)
        return [self.encode_plain_text(e, next(texts)) if is_plain_text(e) else next(dialogues) for e in examples]

    def parse_messages(self, example: Example) -> ChatMessages:
        """Return role and text of each message; refuse a dialogue without an answer."""
        messages = list(zip(example.texts[::2], example.texts[1::2], strict=True))
        self.chat_template.validate_messages(messages, example.id)
        self.lookalikes += [
            (self.file, example.id)
            for _, content in messages
            if self.chat_template.special_pattern.search(content) is not None
        ]
        return messages

    def encode_plain_text(self, example: Example, ids: list[int]) -> EncodedDialogue:
        """Split a text into pieces of up to `max_length` tokens; the last piece ends with the end token."""
        if not self.is_decoder:
            raise UserError(
                f"Example {shorten(example.id)}: an encoder-decoder needs an input and an answer. Give messages, or "
                "prompt and response; a plain text is for a decoder."
            )
        prefix, text_ids = list(self.template.prefix_ids), [*ids, self.template.eos_id]
        step = self.max_length - len(prefix)
        pieces = [[*prefix, *text_ids[first : first + step]] for first in range(0, len(text_ids), step)]
        sequences = tuple(DecoderExample(p, range(len(p) - 1)) for p in pieces if len(p) > 1)
        scored = np.ones(sum(len(s.target_positions) for s in sequences), bool)
        scored[-1:] = len(sequences) < len(pieces)  # the end token, unless it is a piece of its own and no target
        return EncodedDialogue(sequences, scored, len(example.texts[1].encode()))

    def encode_dialogues(self, dialogues: Sequence[IdentifiedDialogue]) -> Iterator[EncodedDialogue]:
        """Encode each dialogue as one sequence whose targets are the answers."""
        rendered = [self.chat_template.render_with_answers(messages, example_id) for example_id, messages in dialogues]
        for (example_id, messages), (_, answer_spans) in zip(dialogues, rendered, strict=True):
            self.changed += [(self.file, example_id)] * (len(answer_indices(messages)) - len(answer_spans))
        with tokenizer_errors():
            encodings = self.tokenizer.backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (example_id, _), (text, answer_spans), encoding in zip(dialogues, rendered, encodings, strict=True):
            item = self.encode_rendered(text, answer_spans, encoding, example_id)
            if not len(item.scored_mask):
                raise UserError(
                    f"Example {shorten(example_id)}: no token of this dialogue has a label: the chat template marks no "
                    "answer of it, or writes none within the last tokens. Delete the line."
                )
            yield item

    def encode_rendered(
        self, text: str, answer_spans: Sequence[AssistantSpan], encoding: Encoding, example_id: str | int
    ) -> EncodedDialogue:
        """Map the answers' characters to target positions, and truncate on the left behind the prefix.

        A token that holds the end of the prompt and the beginning of an answer, as " Yes" after "Answer: ", is a
        target, as in the mask of `transformers`.
        """
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        is_target, is_content = np.zeros((2, len(starts)), bool)
        for span in answer_spans:
            begin, end = span.content_span
            is_own = (np.maximum(ends, starts + 1) > span.start) & (starts < span.end)
            self.joined += [(self.file, example_id)] * bool((starts[is_own] < span.start).any())
            is_target |= is_own
            is_content |= (ends > begin) & (starts < end)
        ids, prefix = list(encoding.ids), list(self.template.prefix_ids)
        num_prefix = len(prefix) if ids[: len(prefix)] == prefix else 0
        num_lost = max(0, len(ids) - self.max_length)
        self.truncated += [(self.file, example_id)] * (num_lost > 0)
        positions = np.flatnonzero(is_target[1:])  # position t predicts token t + 1
        if num_lost:
            ids = [*ids[:num_prefix], *ids[num_prefix + num_lost :]]
            positions = positions[positions >= num_prefix + num_lost] - num_lost
        first_char = int(starts[positions[0] + num_lost + 1]) if len(positions) else len(text)
        contents = (span.content_span for span in answer_spans)
        num_bytes = sum(len(text[max(begin, first_char) : end].encode()) for begin, end in contents)
        scored = is_content[positions + num_lost + 1]
        if self.has_prefix_attention and len(positions):  # one part per answer, up to its end
            answers = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
            return EncodedDialogue(
                tuple(DecoderExample(ids[: answer[-1] + 2], answer.tolist()) for answer in answers), scored, num_bytes
            )
        return EncodedDialogue((DecoderExample(ids, positions.tolist()),), scored, num_bytes)

    def encode_turns(self, dialogues: Sequence[IdentifiedDialogue]) -> Iterator[EncodedDialogue]:
        """Encode each answer separately, with all messages before it as the encoder's input."""
        prompts = [
            self.chat_template.render(messages[:i], True, example_id)
            for example_id, messages in dialogues
            for i in answer_indices(messages)
        ]
        answers = [[messages[i][1] for i in answer_indices(messages)] for _, messages in dialogues]
        prompt_ids = iter(self.tokenizer.encode_batch(prompts, parse_special=True))
        answer_ids = iter(self.answer_tokenizer.encode_texts(text for texts in answers for text in texts))
        ids_of_answers = [e for (e, _), texts in zip(dialogues, answers, strict=True) for _ in texts]
        is_cut = zip(ids_of_answers, self.answer_tokenizer.was_truncated, strict=True)
        self.cut += [(self.file, example_id) for example_id, was_cut in is_cut if was_cut]
        num_prefix = len(self.answer_tokenizer.prefix_ids)
        for (example_id, _), texts in zip(dialogues, answers, strict=True):
            parts = tuple(
                DialogueTurn(self.truncate_left(next(prompt_ids), example_id), next(answer_ids)) for _ in texts
            )
            num_bytes = sum(self.count_answer_bytes(p.answer_ids, text) for p, text in zip(parts, texts, strict=True))
            scored = [[False] * num_prefix + [True] * (len(p.answer_ids) - num_prefix - 1) + [False] for p in parts]
            yield EncodedDialogue(parts, np.concatenate(scored), num_bytes)

    def truncate_left(self, ids: list[int], example_id: str | int) -> list[int]:
        """Add the end token, and drop tokens behind the prefix until `max_length` are left."""
        prefix, end = list(self.template.prefix_ids), self.template.eos_id
        ids = ids if ids[-1:] == [end] else [*ids, end]
        num_prefix = len(prefix) if ids[: len(prefix)] == prefix else 0
        num_lost = max(0, len(ids) - self.max_length)
        self.truncated += [(self.file, example_id)] * (num_lost > 0)
        return [*ids[:num_prefix], *ids[num_prefix + num_lost :]]

    def count_answer_bytes(self, answer_ids: list[int], text: str) -> int:
        """Number of UTF-8 bytes of an answer after truncation."""
        is_complete = len(answer_ids) < self.answer_tokenizer.max_length
        return len((text if is_complete else self.tokenizer.decode(answer_ids)).encode())

    # --- items to batches and scores

    def collate(self, items: Sequence[EncodedDialogue]) -> Batch:
        return self.pack_items(items).batch

    def pack_items(self, items: Sequence[EncodedDialogue]) -> PackedAnswers:
        if self.is_decoder:
            sequences = [part for item in items for part in item.parts if isinstance(part, DecoderExample)]
            prefix_lengths = [(s.target_positions[0] + 1) if len(s.target_positions) else len(s.ids) for s in sequences]
            return pack_decoder_examples(
                sequences, self.max_length, self.pad_id, prefix_lengths if self.has_prefix_attention else None
            )
        turns = [part for item in items for part in item.parts if isinstance(part, DialogueTurn)]
        length = max(self.max_length, self.answer_tokenizer.max_length)
        return pack_seq2seq_examples(
            [t.ids for t in turns], [[t.answer_ids] for t in turns], length, self.pad_id, self.template.decoder_start_id
        )

    def predict(
        self, model: Model, items: Sequence[EncodedDialogue], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        """Negative log-likelihood of each item in nats, its tokens and bytes, and how many tokens argmax predicts."""
        model.eval()
        predictions: list[Prediction] = []
        with progress("reading", "dialogues", len(items)) as shown:
            for first in range(0, len(items), batch_size):
                chunk = items[first : first + batch_size]
                packed = self.pack_items(chunk)
                logp_A, right_A, _ = score_answers(model, packed, compute)
                item_P = np.repeat(np.arange(len(chunk)), [len(item.parts) for item in chunk])
                scored_A = np.concatenate([item.scored_mask for item in chunk])
                values = -logp_A, np.ones(len(logp_A)), right_A
                sums = (packed.sum_by_answer(value_A * scored_A) for value_A in values)
                nats, tokens, right = (np.bincount(item_P, weights=sum_P, minlength=len(chunk)) for sum_P in sums)
                for i, item in enumerate(chunk):
                    costs = {"nats": float(nats[i]), "tokens": int(tokens[i]), "bytes": item.num_bytes}
                    predictions.append(Prediction(costs | {"right": int(right[i])}))
                shown.advance(len(chunk))
        return predictions

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        costs = [p.prediction for p in predictions]
        if not any(c["tokens"] for c in costs):
            raise UserError("There is nothing to score: no text has a token.")
        scores = compute_metrics(self.name, [c["nats"] for c in costs], [(c["tokens"], c["bytes"]) for c in costs])
        return scores | {"token_accuracy": sum(c["right"] for c in costs) / sum(c["tokens"] for c in costs)}


def answer_indices(messages: ChatMessages) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [i for i, (role, _) in enumerate(messages) if role == ASSISTANT_ROLE]


def is_plain_text(example: Example) -> bool:
    return example.texts[::2] == (PLAIN_TEXT_ROLE,)


def collect_roles(examples: Sequence[Example]) -> list[str]:
    """Return the sorted roles of all dialogues; plain texts have none."""
    return sorted({role for e in examples if not is_plain_text(e) for role in e.texts[::2]})
