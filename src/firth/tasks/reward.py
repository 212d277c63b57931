"""Reward models: one number for an answer to a prompt, learned from pairs of answers.

A pair says which of two answers to a prompt is preferred. The Bradley-Terry model makes a probability of the
difference of their rewards: p(chosen over rejected) = sigmoid(r(chosen) - r(rejected)). The loss is its negative
log-likelihood (Ouyang et al. 2022, equation 1):

    -log sigmoid(r(chosen) - r(rejected) - margin)

`margin` is a column of the file, 0 without one: the rewards of clearly different answers must differ by more (Touvron
et al. 2023, Llama 2, section 3.2.2). A constant that is added to all rewards changes nothing in this loss. With
`center_rewards_coefficient` c, the term c (r(chosen) + r(rejected)) ** 2 keeps rewards around 0 (Eisenstein et al.
2023). Both are those of TRL's RewardTrainer.

A prompt and its answer are one dialogue in the tokenizer's chat template. A decoder reads the reward at the last token
that is not padding, an encoder at [CLS]: where `transformers` reads it, so that `AutoModelForSequenceClassification`
(one label) gives the same number.

Shapes: B rows, K target slots of a row, N slots of all rows, A answers of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.models import Head, Model, ModelConfig, head_for_task, make_sequence_template
from firth.objectives import Batch
from firth.tasks.chat import ASSISTANT_ROLE, ChatMessages, ChatTemplate, add_chat_template, list_rows
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits
from firth.tasks.preference import BAD, GOOD, check_answers_differ
from firth.tasks.task import Prediction
from firth.tasks.template import EncodedSequence
from firth.tasks.text_to_text import AnswerConfig
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.tokenizer import tokenizer_errors

DEFAULT_ROLES = ("user", ASSISTANT_ROLE)


class RewardTask(HeadTask):
    """Rewards of answers. A prediction has the reward of each answer of an example: chosen and rejected, or one."""

    name = "reward"
    metric = "accuracy"

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, answer_config: AnswerConfig, roles: Sequence[str]
    ) -> None:
        if config.architecture == "encoder-decoder" or config.recurrent is not None:
            raise UserError(
                "The task reward needs a transformer that is an encoder or a decoder (bert, gpt2, llama ...), and this "
                f"is {config.family}."
            )
        if roles:  # none: the tokenizer of a published model, with its own template
            tokenizer = add_chat_template(tokenizer, config, roles)
        # is_training=False: the chat template ends with an end token, and needs no <extract>
        super().__init__(tokenizer, config, answer_config.max_seq_length, is_training=False)
        self.roles, self.day = tuple(roles), answer_config.day
        self.prefix_ids = make_sequence_template(config, tokenizer.vocab).prefix_ids
        self.file = ""  # whose examples are encoded, for messages
        self.truncated: list[tuple[str, str | int]] = []

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.day)

    @property
    def notices(self) -> list[str]:
        if not self.truncated:
            return []
        count = format_count(len(self.truncated), "dialogue was", "dialogues were")
        length = self.template.max_length
        return [f"{count} longer than {length} tokens, and lost the beginning ({list_rows(self.truncated)})."]

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, self.name)

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        return replace(config, head=self.head_config(config), extras=())

    def templated_tokenizer(self) -> Tokenizer:
        """Return the tokenizer unchanged: the chat template adds the special tokens."""
        return self.tokenizer

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"roles": list(self.roles), **({"day": self.day} if self.day else {})}

    # --- examples to items

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        dialogues = [(e.id, dialogue) for e in examples for dialogue in answered_dialogues(e)]
        for example_id, messages in dialogues:
            self.chat_template.validate_messages(messages, example_id)
        texts = [self.chat_template.render(messages, example_id=example_id) for example_id, messages in dialogues]
        with tokenizer_errors():
            encodings = self.tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        sequences = iter(
            self.build_sequence(list(encoding.ids), example_id)
            for (example_id, _), encoding in zip(dialogues, encodings, strict=True)
        )
        items = [EncodedExample(tuple(next(sequences) for _ in e.references), e.target) for e in examples]
        for e, item in zip(examples, items, strict=True):
            check_answers_differ([sequence.ids for sequence in item.sequences], e.id, self.template.max_length)
        return items

    def build_sequence(self, ids: list[int], example_id: str | int) -> EncodedSequence:
        """Truncate a dialogue on the left, behind the prefix, and find the position of its reward."""
        num_prefix = len(self.prefix_ids) if tuple(ids[: len(self.prefix_ids)]) == self.prefix_ids else 0
        if num_lost := max(0, len(ids) - self.template.max_length):
            self.truncated.append((self.file, example_id))
            ids = [*ids[:num_prefix], *ids[num_prefix + num_lost :]]
        position = len(ids) - 1 if self.template.reads_last_token else 0
        if self.architecture == "decoder":  # `transformers` takes the last token that is not padding, which may be eos
            pad = self.tokenizer.vocab.pad
            position = max((i for i, token in enumerate(ids) if token != pad), default=position)
        return EncodedSequence(ids, [0] * len(ids), (position,))

    # --- items to batches and scores

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Batch:
        """Both answers of a pair are in one batch. `group_ids` number them, with the side in the last bit."""
        numbers = [2 * i + side for i, item in enumerate(items) for side in range(len(item.sequences))]
        margins = [item.label or 0.0 for item in items for _ in item.sequences]
        return packed.batch._replace(
            labels=None,
            group_ids=self.scatter_labels(packed, np.array(numbers, np.int64), -1),
            task_labels=self.scatter_labels(packed, margins, 0.0, np.float32),
        )

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        rewards = iter(gather_answer_logits(logits, packed).reshape(-1).tolist())
        return [Prediction([next(rewards) for _ in item.sequences]) for item in items]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return reward_scores([p.prediction for p in predictions])


def answered_dialogues(example: Example) -> list[ChatMessages]:
    """Return the prompt of an example with each of its answers."""
    prompt = list(zip(example.texts[::2], example.texts[1::2], strict=True))
    return [[*prompt, (ASSISTANT_ROLE, answer)] for answer in example.references]


def reward_scores(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the share of pairs whose chosen answer has the higher reward, the mean margin and the mean rewards.

    >>> reward_scores([[1.0, 0.5], [0.0, 0.5]])
    {'accuracy': 0.5, 'margin': 0.0, 'reward_chosen': 0.5, 'reward_rejected': 0.5}
    """
    chosen, rejected = np.array(rewards, np.float64).T
    return {
        "accuracy": float((chosen > rejected).mean()),
        "margin": float((chosen - rejected).mean()),
        "reward_chosen": float(chosen.mean()),
        "reward_rejected": float(rejected.mean()),
    }


class RewardLoss:
    """The loss function of a run: a batch of answers -> the summed loss and figures to log.

    It is divided by the number of answers of the step (`Batch.num_targets`). The loss of a pair counts for both of its
    answers, so the result is the mean over pairs.
    """

    def __init__(self, model: Model, center_rewards_coefficient: float = 0.0) -> None:
        self.model, self.center = model, center_rewards_coefficient

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        reward_N, group_N = self.model.logits(batch).float().flatten(), batch.group_ids.flatten()
        is_used_N = group_N >= 0
        size = 2 * group_N.numel() + 2  # a fixed shape: an answer has one slot, and the last one takes unused slots
        index_N = torch.where(is_used_N, group_N, size - 1)
        zero = reward_N.new_zeros(size)

        def by_pair(value_N: Tensor) -> Tensor:
            return zero.index_add(0, index_N, value_N * is_used_N).view(-1, 2)

        reward, margin = by_pair(reward_N), by_pair(batch.task_labels.flatten())[:, GOOD]
        weight = 2 * by_pair(is_used_N.to(zero.dtype)).prod(1)
        chosen, rejected = reward[:, GOOD], reward[:, BAD]
        loss = -F.logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected).square()
        with torch.no_grad():
            figures = {
                "accuracy": chosen > rejected,
                "margin": chosen - rejected,
                "reward_chosen": chosen,
                "reward_rejected": rejected,
            }
            sums = {f"{name}/targets": (value * weight).sum() for name, value in figures.items()}
        return {"targets": (loss * weight).sum(), **sums}
