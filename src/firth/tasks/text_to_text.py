"""Every task as text to text, as T5 has it: an encoder reads, a decoder writes the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.errors import UserError
from firth.generate import generate_ids
from firth.models import EncoderDecoder, Head, Model, ModelConfig, framing
from firth.objectives import IGNORED, Batch
from firth.tasks.task import Prediction, Reader, by_length, pad_rows
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import Machine


class Item(NamedTuple):
    ids: list[int]
    answer: list[int]


class TextToText:
    """The answer is generated, word by word."""

    metric = "chrf"

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, length: int, target_length: int) -> None:
        if config.shape != "encoder-decoder":
            raise UserError(
                f"text-to-text needs an encoder-decoder, such as t5-tiny; this checkpoint's shape is {config.shape}."
            )
        self.tokenizer, self.target_length = tokenizer, target_length
        self.reader = Reader(tokenizer, config, length)
        self.writer = Reader(tokenizer, config, target_length)
        self.pad, self.start = tokenizer.vocab.pad, framing(config, tokenizer.vocab).start

    @property
    def cut(self) -> list[str]:
        return [*self.reader.say_cut("texts"), *self.writer.say_cut("answers")]

    def head(self, config: ModelConfig) -> Head:
        return config.head

    def facts(self) -> dict[str, Any]:
        return {"task": "text-to-text", "max_target_length": self.target_length}

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        read = self.reader.read(e.texts[0] for e in examples)
        write = self.writer.read(e.target for e in examples)
        return [Item(ids, answer) for ids, answer in zip(read, write, strict=True)]

    def batch(self, items: Sequence[Item]) -> Batch:
        tokens, doc = pad_rows([item.ids for item in items], self.pad)
        answers, answer_doc = pad_rows([item.answer for item in items], self.pad)
        before = np.concatenate([np.full_like(answers[:, :1], self.start), answers[:, :-1]], 1)
        return Batch(
            tokens,
            doc=doc,
            labels=np.where(answer_doc < 0, IGNORED, answers),
            decoder_tokens=before,
            decoder_doc=np.zeros_like(before),  # padding comes last, and a decoder does not look ahead
        )

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        found: list[Prediction | None] = [None] * len(items)
        for places in by_length(items, size, lambda item: len(item.ids)):
            with machine.precision():
                written = generate_ids(model, [items[i].ids for i in places], self.target_length)
            for i, ids in zip(places, written, strict=True):
                found[i] = Prediction(self.tokenizer.decode(ids))
        return [p for p in found if p is not None]


class LabelWords(TextToText):
    """Classification by an encoder-decoder: the label whose words are the likeliest answer."""

    metric = "accuracy"

    def __init__(
        self, labels: Sequence[str], tokenizer: Tokenizer, config: ModelConfig, length: int, target_length: int
    ) -> None:
        super().__init__(tokenizer, config, length, target_length)
        self.labels = tuple(labels)
        self.answers = self.writer.read(self.labels)
        if len(set(map(tuple, self.answers))) < len(self.labels):
            raise UserError(
                f"Some labels have the same first {target_length} tokens: raise max_target_length or shorten them."
            )

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"task": "classify", "labels": list(self.labels)}

    @torch.no_grad()
    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        assert isinstance(model, EncoderDecoder)
        model.eval()
        score_NC = np.zeros((len(items), len(self.labels)))
        for places in by_length(items, size, lambda item: len(item.ids)):
            for c, answer in enumerate(self.answers):
                batch = self.batch([Item(items[i].ids, answer) for i in places]).to(machine.device)
                if c == 0:
                    with machine.precision():
                        encoded = model.encode(batch)
                with machine.precision():
                    x_BUD = model.read(batch, encoded)
                    logits_BUV = model.head(x_BUD, model.embed.tokens.weight)
                word_BU = logits_BUV.float().log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
                score_NC[places, c] = (word_BU * (batch.labels != IGNORED)).sum(-1).cpu().numpy()
        probability_NC = np.exp(score_NC - np.logaddexp.reduce(score_NC, axis=1, keepdims=True))
        return [
            Prediction(self.labels[int(p_C.argmax())], dict(zip(self.labels, p_C.tolist(), strict=True)))
            for p_C in probability_NC
        ]
