"""What the tasks share whose answers are read from hidden states of packed rows.

N texts, B rows, T places, K answers of a row, A answers in all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.core.errors import UserError
from firth.metrics import compute_metrics
from firth.models import Head, Model, ModelConfig
from firth.models.config import AuxiliaryLM, ClassificationHead, ELMoConfig, LMHead, MultipleChoiceHead, RegressionHead
from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.packing import TextPacking, pack_texts
from firth.tasks.shape_buckets import MAX_TRIAL_BATCHES, batch_shape, fit_shape_buckets, unpad_logits
from firth.tasks.task import Prediction
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
    """An example as a model reads it: one sheet or several, and what is asked (None where nobody knows)."""

    sequences: tuple[EncodedSequence, ...]
    label: Any = None

    @property
    def num_tokens(self) -> int:
        return sum(sheet.num_tokens for sheet in self.sequences)


class PackedBatch(NamedTuple):
    """A batch without its answers, and the slot of each answer in (B, K) laid end to end."""

    batch: Batch
    packing: TextPacking
    label_slots: Array  # (A,)


class HeadTask:
    """A task with a head. What differs is how examples are read, what is asked, and what logits mean."""

    name: str
    metric: str
    sequences_per_label = 1  # so many sheets are one answer: both orders of two texts
    positions_per_label = 1  # so many places of a sheet are one answer
    num_shapes = 0  # that the batches of the last prediction had

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
                f"A model that reads backward labels whole texts, not places in them: {self.name} is not its."
            )
        self.tokenizer, self.labels, self.architecture = tokenizer, tuple(labels), config.architecture
        self.template = TaskTemplate(tokenizer, config, max_length)
        self.label_to_id = {label: i for i, label in enumerate(self.labels)}
        self.feeds_decoder = config.architecture == "encoder-decoder" and config.adds_bos and self.name != "embed"

    # --- what each task says for itself

    @abstractmethod
    def encode(self, examples: Sequence[Example]) -> Sequence[EncodedExample]: ...

    @abstractmethod
    def collate(self, items: Sequence[Any]) -> Batch: ...

    @abstractmethod
    def decode_logits(self, items: Sequence[Any], logits: Array, packed: PackedBatch) -> list[Prediction]:
        """Logits to predictions."""

    @abstractmethod
    def head_config(self, config: ModelConfig) -> Head:
        """The head that this task has in this model."""

    # --- what they share

    @property
    def notices(self) -> list[str]:
        return self.template.truncation_notices()

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        """A decoder goes on learning the language beside its task (Radford et al. 2018, section 3.2)."""
        head, words = self.head_config(config), config.head
        if config.recurrent is not None:
            return replace(config, head=head, extras=())
        if (
            config.architecture == "decoder"
            and isinstance(head, ClassificationHead | RegressionHead | MultipleChoiceHead)
            and isinstance(words, LMHead)
        ):
            return replace(config, head=head, extras=(AuxiliaryLM(head=words),))
        return replace(config, head=head, extras=())

    def templated_tokenizer(self) -> Tokenizer:
        return with_template(self.tokenizer, self.template.sequence_template)

    def metadata(self) -> dict[str, Any]:
        labels = {"labels": list(self.labels)} if self.labels else {}
        return {"task": self.name, "answer": "head", **labels, "max_seq_length": self.template.max_length}

    def calibrate(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        return list(predictions)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute_metrics(self.name, [p.prediction for p in predictions], [e.target for e in examples])

    def label_id(self, label: str, example: Example) -> int:
        if label not in self.label_to_id:
            raise UserError(f"Example {example.id}: the label {label!r} is none of {', '.join(self.labels[:20])}.")
        return self.label_to_id[label]

    def pack_items(self, items: Sequence[EncodedExample]) -> PackedBatch:
        """The sheets of the items in rows, and the places that they ask."""
        sheets = [sheet for item in items for sheet in item.sequences]
        packing = pack_texts([sheet.num_tokens for sheet in sheets], self.template.max_length, self.sequences_per_label)
        doc_BT, position_BT = packing.document_ids_and_positions()
        tokens_BT = packing.scatter(np.concatenate([sheet.ids for sheet in sheets]), self.tokenizer.vocab.pad)
        segment_BT = (
            packing.scatter(np.concatenate([s.token_type_ids for s in sheets]), 0)
            if self.template.sequence_template.has_token_types
            else None
        )
        count_N = np.array([len(sheet.target_positions) for sheet in sheets])
        place_A = np.array([place for s in sheets for place in s.target_positions], np.int64) + np.repeat(
            packing.start, count_N
        )
        each = self.sequences_per_label * self.positions_per_label
        width, entry_A = packing.allocate_slots(count_N, each)
        asked_BK = np.zeros((packing.num_rows, width), np.int64)
        asked_BK.reshape(-1)[entry_A] = place_A
        batch = Batch(
            tokens_BT,
            document_ids=doc_BT,
            position_ids=position_BT,
            token_type_ids=segment_BT,
            target_positions=asked_BK,
        )
        if self.feeds_decoder:
            batch = self.add_decoder_inputs(batch)
        if self.architecture == "decoder":  # which goes on to learn the language
            batch = batch._replace(labels=next_token_labels(tokens_BT, doc_BT))
        return PackedBatch(batch, packing, entry_A[::each] // each)

    def add_decoder_inputs(self, batch: Batch) -> Batch:
        """The decoder reads the same texts, one place later."""
        later_BT = np.roll(batch.input_ids, 1, 1)
        later_BT[batch.position_ids == 0] = self.template.sequence_template.decoder_start_id
        return batch._replace(
            decoder_input_ids=later_BT, decoder_document_ids=batch.document_ids, decoder_position_ids=batch.position_ids
        )

    def scatter_labels(self, packed: PackedBatch, label_A: Any, fill_value: float, dtype: Any = np.int64) -> Array:
        """(B, K): what is asked in each slot."""
        assert packed.batch.target_positions is not None
        shape = packed.batch.target_positions.shape
        target_BK = np.full(
            (shape[0], shape[1] // (self.sequences_per_label * self.positions_per_label)), fill_value, dtype
        )
        target_BK.reshape(-1)[packed.label_slots] = label_A
        return target_BK

    @torch.no_grad()
    def predict(self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int) -> list[Prediction]:
        """Where steps are compiled, the batches have few shapes here too."""
        model.eval()
        found: list[Prediction] = []
        parts = [items[first : first + batch_size] for first in range(0, len(items), batch_size)]
        shapes = (
            fit_shape_buckets(map(self.collate, parts[:MAX_TRIAL_BATCHES]), self.tokenizer.vocab.pad)
            if compute.compile
            else None
        )
        sizes = set()
        for some in parts:
            batch = self.collate(some)
            whole = batch if shapes is None else shapes(batch)
            with compute.autocast():
                logits = model.logits(whole.to(compute.device))
            logits = unpad_logits(logits.float().cpu().numpy(), batch_shape(batch), batch_shape(whole))
            found += self.decode_logits(some, logits, self.pack_items(some))
            sizes.add(batch_shape(whole))
        self.num_shapes = len(sizes)
        return found


def next_token_labels(input_ids_BT: Array, document_ids_BT: Array) -> Array:
    """What follows each token in its text; -100 where nothing does."""
    labels_BT = np.full_like(input_ids_BT, IGNORE_INDEX)
    follows = (document_ids_BT[:, 1:] == document_ids_BT[:, :-1]) & (document_ids_BT[:, 1:] >= 0)
    labels_BT[:, :-1][follows] = input_ids_BT[:, 1:][follows]
    return labels_BT


def gather_answer_logits(logits: Array, packed: PackedBatch) -> Array:
    """(A, ...): the logits (B, K, ...) of the answers."""
    return logits.reshape(-1, *logits.shape[2:])[packed.label_slots]


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
