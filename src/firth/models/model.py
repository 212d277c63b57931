"""Encoder, Decoder, EncoderDecoder: a batch in, hidden states, logits and loss out.

B rows, T places, U places of the decoder, K asked places, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.errors import UserError
from firth.models.config import Classes, FanIn, LMHead, ModelConfig
from firth.models.heads import IGNORED, Choice, Vocabulary
from firth.models.stack import Embedding, Stack

if TYPE_CHECKING:
    from firth.tokens import Tokenizer


@dataclass
class Output:
    """What a call with the Hugging Face input names returns. `loss` is the mean over what was asked."""

    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None


# A batch is anything with the fields of `firth.objectives.Batch`: the two rooms meet by these names alone.
Reads = Any


class Model(nn.Module):
    """What all shapes share: a head on some states, a loss, saving."""

    tokenizer: Tokenizer | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if wrong := config.problems():
            raise UserError("; ".join(wrong) + ".")
        self.config = config
        self.embed = Embedding(config)
        self.head = Vocabulary(config, config.head) if isinstance(config.head, LMHead) else Choice(config, config.head)

    def read(self, batch: Reads) -> Tensor:
        """The states (B, T or U, D) that the head answers from."""
        raise NotImplementedError

    def asked_states(self, batch: Reads) -> Tensor:
        """The states at the asked places, (B, K, D); all of them when nothing in particular is asked."""
        x_BTD = self.read(batch)
        if batch.asked is None:
            return x_BTD
        flat = batch.asked + torch.arange(len(x_BTD), device=x_BTD.device)[:, None] * x_BTD.shape[1]
        return x_BTD.flatten(0, 1)[flat]

    def logits(self, batch: Reads) -> Tensor:
        """(B, K, V) at the asked places, or (B, classes)."""
        x = self.asked_states(batch)
        return self.head(x, self.embed.tokens.weight) if isinstance(self.head, Vocabulary) else self.head(x[:, 0])

    def loss(self, batch: Reads) -> Tensor:
        """The loss summed over what is asked; the caller divides by the count over the whole global batch."""
        x = self.asked_states(batch)
        if isinstance(self.head, Vocabulary):
            return self.head.loss(x.flatten(0, 1), batch.labels.flatten(), self.embed.tokens.weight)
        return F.cross_entropy(self.head(x[:, 0]).float(), batch.target, reduction="sum")

    def answer(self, x: Tensor, labels: Tensor | None, last: Tensor | None, shift: bool) -> tuple[Tensor, Any]:
        """Logits and mean loss for a call with the Hugging Face names."""
        if isinstance(self.head, Choice):
            first = last if last is not None else torch.zeros(len(x), dtype=torch.long, device=x.device)
            logits = self.head(x[torch.arange(len(x), device=x.device), first])
            return logits, None if labels is None else F.cross_entropy(logits.float(), labels)
        logits = self.head(x, self.embed.tokens.weight)
        if labels is None:
            return logits, None
        scores, wanted = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
        return logits, F.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED)

    def check_length(self, length: int) -> None:
        limit = self.config.max_length
        if limit is not None and length > limit:
            raise UserError(f"A text of {length} tokens is longer than the {limit} places that this model has learned.")

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write a Hugging Face folder; the tokenizer goes along when the model has one."""
        from firth.models.weights import save_model

        save_model(self, Path(folder), overwrite)


class Encoder(Model):
    """One stack in which all see all."""

    causal = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.stack = Stack(config, config.num_layers, self.causal)
        initialise(self)

    def read(self, batch: Reads) -> Tensor:
        return self.stack(self.embed(batch.tokens, batch.position, batch.segment), batch.doc, batch.rank)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> Output:
        self.check_length(input_ids.shape[1])
        states: list[Tensor] | None = [] if output_hidden_states else None
        x = self.stack(self.embed(input_ids, position_ids, token_type_ids), as_doc(attention_mask), states=states)
        last = None
        if self.causal:
            seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            last = (seen * torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)).argmax(1)
        logits, loss = self.answer(x, labels, last, shift=self.causal)
        return Output(logits, loss, tuple(states) if states is not None else None)


class Decoder(Encoder):
    """One stack in which each sees what came before."""

    causal = True


class EncoderDecoder(Model):
    """Two stacks that share their embedding; the second reads the first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.encoder = Stack(config, config.num_layers, causal=False)
        self.decoder = Stack(config, config.decoder_layers, causal=True, cross=True)
        initialise(self)

    def encode(self, batch: Reads) -> Tensor:
        return self.encoder(self.embed(batch.tokens, batch.position, batch.segment), batch.doc, batch.rank)

    def read(self, batch: Reads, encoded: Tensor | None = None) -> Tensor:
        read = self.encode(batch) if encoded is None else encoded
        x = self.embed(batch.decoder_tokens, batch.decoder_position)
        return self.decoder(x, batch.decoder_doc, read=read, read_doc=batch.doc)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> Output:
        """`decoder_input_ids` are made of `labels` when they are not given: a pad, then all but the last."""
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("An encoder-decoder needs decoder_input_ids or labels.")
            pad = self.tokenizer.vocab.pad if self.tokenizer is not None else 0
            decoder_input_ids = F.pad(labels.masked_fill(labels == IGNORED, pad), (1, -1), value=pad)
        states: list[Tensor] | None = [] if output_hidden_states else None
        doc = as_doc(attention_mask)
        read = self.encoder(self.embed(input_ids), doc)
        asking = None if doc is None else torch.zeros_like(decoder_input_ids)
        rank = None if decoder_attention_mask is None else padding_last(decoder_attention_mask)
        x = self.decoder(self.embed(decoder_input_ids), asking, rank, read, doc, states)
        logits, loss = self.answer(x, labels, None, shift=False)
        return Output(logits, loss, tuple(states) if states is not None else None, read)


SHAPES: dict[str, Callable[[ModelConfig], Model]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder-decoder": EncoderDecoder,
}


def make_model(config: ModelConfig) -> Model:
    return SHAPES[config.shape](config)


def as_doc(attention_mask: Tensor | None) -> Tensor | None:
    """Padding as a document of its own (-1), so that text never sees it; None when there is no padding."""
    return None if attention_mask is None else attention_mask.long() - 1


def padding_last(attention_mask: Tensor) -> Tensor:
    """The order of places with padding after all text: text never sees it, and it sees something, as softmax needs."""
    length = attention_mask.shape[1]
    return torch.arange(length, device=attention_mask.device) + length * (1 - attention_mask.long())


def count_parameters(config: ModelConfig) -> int:
    """How many numbers a model of this config has, without making it."""
    with torch.device("meta"):
        return make_model(config).num_parameters


@torch.no_grad()
def initialise(model: Model) -> None:
    """Starting weights as published for the family: the spread by `config.init`, biases 0, norms 1."""
    config, init = model.config, model.config.init
    for name, p in model.named_parameters():
        if p.ndim < 2:
            if name.endswith("bias"):
                p.zero_()
            continue
        if isinstance(init, FanIn):
            std = fan_in_std(name, config)
        elif init.scale_residual and name.endswith(("attention.out.weight", "mlp.down.weight")):
            std = init.std / math.sqrt(2 * config.num_layers)
        else:
            std = init.std
        p.normal_(0.0, std)
        if isinstance(init, FanIn) and name.endswith(("attention.qkv.weight", "cross.qkv.weight")):
            p[: config.num_heads * config.head_size] *= config.head_size**-0.5  # the scores are not scaled


def fan_in_std(name: str, config: ModelConfig) -> float:
    """T5's spreads: 1 for embeddings and the untied head, 1/sqrt(inputs) for matrices."""
    if name.endswith(("embed.tokens.weight", "head.weight")):
        return 1.0
    if name.endswith("out.weight"):
        return (config.num_heads * config.head_size) ** -0.5
    if name.endswith("down.weight"):
        return config.mlp.dim**-0.5
    return config.dim**-0.5


def with_classes(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """The same model with a head over these classes."""
    if config.shape == "encoder-decoder":
        raise UserError("An encoder-decoder answers in words: classes are its targets, not a head.")
    return replace(config, head=Classes(names, pooled=config.shape == "encoder"))
