"""HeadTask: tasks whose predictions are computed by a task head on hidden states of packed rows.

A head reads the hidden states at target positions: [CLS] for a class, the first token of each word for a tag, entity
markers for a relation. Several texts share a row (`packing.py`). Attention stays inside a text, because the
attention mask compares document ids, so that a prediction does not depend on the other texts of its row. Each row
has K slots for target positions; unused slots carry label -100.

A prefix LM reads a text as its prompt: every token attends to all of it (`ModelConfig.has_bidirectional_decoder`). Any
other decoder keeps its LM head as an auxiliary loss (Radford et al. 2018, section 3.2), hence `labels` beside
`task_labels`.

N texts, B rows, T positions of a row, K slots of a row, A labels of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.core.errors import UserError, list_names, quote, shorten
from firth.metrics import compute_metrics
from firth.models import Head, Model, ModelConfig
from firth.models.config import (
    AuxiliaryLM,
    ClassificationHead,
    ELMoConfig,
    LMHead,
    MultipleChoiceHead,
    MultiTaskHead,
    RegressionHead,
)
from firth.models.task_heads import TASK_HEAD_TYPES
from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.logits_runner import LogitsRunner
from firth.tasks.packing import TextPacking, pack_texts
from firth.tasks.shape_buckets import MAX_TRIAL_BATCHES, batch_shape, fit_shape_buckets, unpad_logits
from firth.tasks.task import Prediction, batch_indices_by_length
from firth.tasks.template import DELIMITER_TOKEN, EXTRACT_TOKEN, EncodedSequence, TaskTemplate
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.lexicon import to_open_vocab
from firth.tokens.template import with_template
from firth.train import ComputeConfig

Array = np.ndarray
TOKEN_LEVEL_TASKS = ("tag", "span-qa", "relation", "word-in-context")


@dataclass(frozen=True)
class EncodedExample:
    """An encoded example: one or several token sequences, and the label (None if unknown)."""

    sequences: tuple[EncodedSequence, ...]
    label: Any = None
    soft_label: Array | None = field(default=None, kw_only=True)  # the teacher's logits, in distillation

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class PackedBatch(NamedTuple):
    """A batch without labels, and the slot of each label in the flattened (B, K)."""

    batch: Batch
    packing: TextPacking
    label_slots: Array  # (A,)


class HeadTask:
    """Base class. A subclass defines the encoding, the labels and the meaning of the logits."""

    name: str
    metric: str
    sequences_per_label = 1  # 2: both orders of a text pair give one label
    positions_per_label = 1  # 2: the markers of both entities give one label
    num_shapes = 0  # distinct batch shapes of the last prediction
    head_name: str | None = None  # in a model with several heads
    logits_runner: LogitsRunner | None = None  # keeps its CUDA graphs between predictions

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        max_length: int,
        labels: Sequence[str] = (),
        is_training: bool = True,
    ) -> None:
        if config.architecture == "decoder" and is_training and config.recurrent is None:
            tokenizer = tokenizer.with_special_tokens((DELIMITER_TOKEN, EXTRACT_TOKEN))
        if isinstance(config.recurrent, ELMoConfig):
            tokenizer = to_open_vocab(tokenizer)
        if tokenizer.is_reversed and self.name in TOKEN_LEVEL_TASKS:
            raise UserError(
                f"A model that reads backward can label whole texts only: {self.name} needs a forward model."
            )
        self.tokenizer, self.labels, self.architecture = tokenizer, tuple(labels), config.architecture
        self.template = TaskTemplate(tokenizer, config, max_length)
        self.has_short_rows = False  # rows as short as a batch allows, for predictions
        self.label_to_id = {label: i for i, label in enumerate(self.labels)}
        reads_encoder = config.reads_encoder_with(TASK_HEAD_TYPES[self.name])
        self.feeds_decoder = config.architecture == "encoder-decoder" and not reads_encoder

    # --- defined by each task

    @abstractmethod
    def encode(self, examples: Sequence[Example]) -> Sequence[EncodedExample]: ...

    @abstractmethod
    def add_labels(self, packed: PackedBatch, items: Sequence[Any]) -> Batch:
        """Return the batch of packed items with their labels."""

    @abstractmethod
    def decode_logits(self, items: Sequence[Any], logits: Array, packed: PackedBatch) -> list[Prediction]:
        """Convert the logits of a batch to predictions."""

    @abstractmethod
    def head_config(self, config: ModelConfig) -> Head:
        """Return the head of this task for this model."""

    # --- shared

    @property
    def notices(self) -> list[str]:
        return self.template.truncation_notices()

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        """Set the head; a decoder keeps language modelling as auxiliary loss (Radford et al. 2018, section 3.2)."""
        head, lm_head = self.head_config(config), config.head
        if config.recurrent is not None:
            return replace(config, head=head, extras=())
        if (
            config.architecture == "decoder"
            and not config.has_bidirectional_prompt  # every token would see the next one
            and isinstance(head, ClassificationHead | RegressionHead | MultipleChoiceHead)
            and isinstance(lm_head, LMHead)
        ):
            return replace(config, head=head, extras=(AuxiliaryLM(head=lm_head),))
        return replace(config, head=head, extras=())

    def check_head(self, config: ModelConfig, checkpoint: str) -> None:
        """Raise a UserError if the head of a checkpoint is not this task's: one of its files is damaged."""
        own = config.head
        if isinstance(own, MultiTaskHead) and self.head_name is not None:
            own = {named.name: named.head for named in own.heads}.get(self.head_name, own)
        heads = (own, self.head_config(config))
        kinds = [(type(head), len(getattr(head, "names", ()))) for head in heads]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"{checkpoint}: task.json and config.json do not belong together, since the model has no head for the "
                f"task {self.name}" + (f" with {len(self.labels):,} labels." if self.labels else ".")
            )

    def templated_tokenizer(self) -> Tokenizer:
        return with_template(self.tokenizer, self.template.sequence_template)

    def metadata(self) -> dict[str, Any]:
        labels = {"labels": list(self.labels)} if self.labels else {}
        head = {"head": self.head_name} if self.head_name is not None else {}
        return {"task": self.name, "answer": "head", **labels, "max_seq_length": self.template.max_length, **head}

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute_metrics(self.name, [p.prediction for p in predictions], [e.target for e in examples])

    def label_id(self, label: str, example: Example) -> int:
        if label not in self.label_to_id:
            raise UserError(
                f"Example {shorten(example.id)}: the label {quote(label)} is none of {list_names(self.labels)}."
            )
        return self.label_to_id[label]

    def collate(self, items: Sequence[Any]) -> Batch:
        packed = self.pack_items(items)
        if self.architecture == "decoder":  # targets of the auxiliary LM loss
            labels_BT = next_token_labels(packed.batch.input_ids, packed.batch.document_ids)
            packed = packed._replace(batch=packed.batch._replace(labels=labels_BT))
        return self.add_labels(packed, items)

    def model_inputs(self, packed: PackedBatch) -> Batch:
        """Return what the model reads in a prediction."""
        return packed.batch

    def pack_items(self, items: Sequence[EncodedExample]) -> PackedBatch:
        """Pack the sequences of the items into rows; gather their target positions into slots."""
        sequences = [sequence for item in items for sequence in item.sequences]
        lengths = [sequence.num_tokens for sequence in sequences]
        row_tokens = self.template.max_length
        if self.has_short_rows:
            runner = self.logits_runner
            row_tokens = min(row_tokens, max(lengths) if runner is None else runner.row_tokens(max(lengths)))
        packing = pack_texts(lengths, row_tokens, self.sequences_per_label)
        document_ids_BT, position_ids_BT = packing.document_ids_and_positions()
        input_ids_BT = packing.scatter(list(chain.from_iterable(s.ids for s in sequences)), self.tokenizer.vocab.pad)
        token_type_ids_BT = (
            packing.scatter(list(chain.from_iterable(s.token_type_ids for s in sequences)), 0)
            if self.template.sequence_template.has_token_types
            else None
        )
        count_N = np.array([len(s.target_positions) for s in sequences])
        in_sequence_A = np.array([position for s in sequences for position in s.target_positions], np.int64)
        position_A = in_sequence_A + np.repeat(packing.start, count_N)
        each = self.sequences_per_label * self.positions_per_label
        width, slot_A = packing.allocate_slots(count_N, each)
        target_positions_BK = np.zeros((packing.num_rows, width), np.int64)
        target_positions_BK.reshape(-1)[slot_A] = position_A
        batch = Batch(
            input_ids_BT,
            document_ids=document_ids_BT,
            position_ids=position_ids_BT,
            token_type_ids=token_type_ids_BT,
            target_positions=target_positions_BK,
            head=self.head_name,
        )
        if self.feeds_decoder:
            batch = self.add_decoder_inputs(batch)
        return PackedBatch(batch, packing, slot_A[::each] // each)

    def add_decoder_inputs(self, batch: Batch) -> Batch:
        """Feed the decoder the same texts, shifted right by one position."""
        shifted_BT = np.roll(batch.input_ids, 1, 1)
        shifted_BT[batch.position_ids == 0] = self.template.sequence_template.decoder_start_id
        return batch._replace(
            decoder_input_ids=shifted_BT,
            decoder_document_ids=batch.document_ids,
            decoder_position_ids=batch.position_ids,
        )

    def scatter_labels(self, packed: PackedBatch, label_A: Any, fill_value: float, dtype: Any = np.int64) -> Array:
        """(B, K): the label of each slot, `fill_value` in unused ones."""
        assert packed.batch.target_positions is not None
        shape = packed.batch.target_positions.shape
        label_BK = np.full(
            (shape[0], shape[1] // (self.sequences_per_label * self.positions_per_label)), fill_value, dtype
        )
        label_BK.reshape(-1)[packed.label_slots] = label_A
        return label_BK

    def num_labels(self, item: Any) -> int:
        """Return the number of slots that hold labels of an item."""
        return 1

    def split_logits(self, items: Sequence[Any], logits: Array, packed: PackedBatch) -> list[Array]:
        """Split the logits of a batch by item, (labels of the item, ...) each."""
        ends = np.cumsum([self.num_labels(item) for item in items])
        return np.split(gather_answer_logits(logits, packed), ends[:-1])

    def scatter_soft_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Array | None:
        """(B, K, ...): the teacher's logits of each slot, NaN in unused ones; None without a teacher."""
        given = [item.soft_label for item in items if item.soft_label is not None]
        if not given:
            return None
        soft_A = np.concatenate(given)
        shape = self.scatter_labels(packed, 0, 0).shape
        soft_BK = np.full((*shape, *soft_A.shape[1:]), np.nan, np.float32)
        soft_BK.reshape(-1, *soft_A.shape[1:])[packed.label_slots] = soft_A
        return soft_BK

    @torch.no_grad()
    def compute_logits(
        self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int
    ) -> list[Array]:
        """Return the logits of each item, in order (`split_logits`); computed in order of length."""
        model.eval()
        computing = copy(self)
        computing.has_short_rows = not compute.compile
        order = [i for batch in batch_indices_by_length(items, batch_size, lambda x: x.num_tokens) for i in batch]
        logits: dict[int, Array] = {}
        for chunk, logits_BK, packed in computing.batch_logits(model, [items[i] for i in order], compute, batch_size):
            found = computing.split_logits(chunk, logits_BK, packed)
            logits |= dict(zip(order[len(logits) : len(logits) + len(chunk)], found, strict=True))
        return [logits[i] for i in range(len(items))]

    @torch.no_grad()
    def predict(self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int) -> list[Prediction]:
        """Predict in eval mode. For compiled models, pad batches to a few shapes to limit recompilation.

        A model that is not compiled takes any shape, and gets rows as short as the longest text of the batch: attention
        over a long row of several texts computes scores between texts, only to mask them. A copy of the task makes
        these rows: another thread may collate the next training batch meanwhile.
        """
        model.eval()
        predicting = copy(self)
        predicting.has_short_rows = not compute.compile
        predictions = predicting.predict_batches(model, items, compute, batch_size)
        self.num_shapes = predicting.num_shapes
        return predictions

    def predict_batches(
        self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        predictions: list[Prediction] = []
        for chunk, logits, packed in self.batch_logits(model, items, compute, batch_size):
            predictions += self.decode_logits(chunk, logits, packed)
        return predictions

    def batch_logits(
        self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int
    ) -> Iterator[tuple[Sequence[Any], Array, PackedBatch]]:
        """Yield the items of each batch with their logits; the runner may compute the next batch meanwhile."""
        runner = self.logits_runner or LogitsRunner(model, compute)
        chunks = runner.split(items, batch_size)
        shapes = (
            fit_shape_buckets(map(self.collate, chunks[:MAX_TRIAL_BATCHES]), self.tokenizer.vocab.pad)
            if compute.compile
            else None
        )
        seen_shapes = set()
        launched: deque[tuple[Sequence[Any], PackedBatch, Callable[[], Array]]] = deque()
        for chunk in chunks:
            packed = self.pack_items(chunk)
            inputs = self.model_inputs(packed)
            padded = inputs if shapes is None else shapes(inputs)
            read_logits = runner.launch(padded, self.tokenizer.vocab.pad)
            seen_shapes.add(batch_shape(padded))
            self.num_shapes = len(seen_shapes)
            launched.append((chunk, packed, partial(read_unpadded, read_logits, inputs, padded)))
            if len(launched) > runner.num_ahead:
                done, was_packed, read = launched.popleft()
                yield done, read(), was_packed
        for done, was_packed, read in launched:
            yield done, read(), was_packed


def read_unpadded(read_logits: Callable[[], Array], batch: Batch, padded: Batch) -> Array:
    """Wait for the logits of a padded batch, and cut them to those of the batch."""
    return unpad_logits(read_logits(), batch_shape(batch), batch_shape(padded))


def next_token_labels(input_ids_BT: Array, document_ids_BT: Array) -> Array:
    """(B, T): the next token in the same text; -100 at the last one and at padding."""
    labels_BT = np.full_like(input_ids_BT, IGNORE_INDEX)
    has_next = (document_ids_BT[:, 1:] == document_ids_BT[:, :-1]) & (document_ids_BT[:, 1:] >= 0)
    labels_BT[:, :-1][has_next] = input_ids_BT[:, 1:][has_next]
    return labels_BT


def gather_answer_logits(logits: Array, packed: PackedBatch) -> Array:
    """Select the logits (A, ...) of used slots from (B, K, ...)."""
    return logits.reshape(-1, *logits.shape[2:])[packed.label_slots]


def softmax(x: Array) -> Array:
    """Softmax over the last axis, shifted by the maximum against overflow."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
