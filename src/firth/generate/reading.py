"""What a model says about the next token: from what it remembers, or by reading the whole row again.

B rows, T places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from firth.console import warn
from firth.errors import UserError
from firth.generate.record import Recorded
from firth.generate.room import FIRST_ROOM, tell_length
from firth.models import Decoder, EncoderDecoder, LMHead, Model, ModelConfig, Stack, ends_of, framing
from firth.models.cache import Cache, can_cache
from firth.models.config import AWDLSTM, BAG, ELMo
from firth.objectives import Batch
from firth.tokens import Tokenizer

Ids = Sequence[int]
Ask = Callable[[Sequence[int], Sequence[Ids]], Tensor]  # some prompts, and what was written after each -> (B, V)
ROUND = 64  # on a GPU there is room for a multiple of so many places
WORTH_RECORDING = 32  # tokens: recording a step takes as long as some steps


class Reading(Protocol):
    """Rows that are read token by token. All that it gives are logits (B, V)."""

    def first(self) -> Tensor:
        """Of what follows the prompts."""

    def next(self, token_B: Tensor) -> Tensor:
        """Of what follows one more token in each row."""

    def take(self, row_B: Tensor, same_source: bool = False) -> None:
        """Go on with these rows; with `same_source` they only change with others of the same prompt."""


def read_prompts(model: Model, prompts: Sequence[Ids], max_new_tokens: int, cache: bool = True) -> Reading:
    """A reading of these prompts. What must be read again and again is said."""
    if not cache:
        return Rereading(model, prompts)
    if isinstance(model.config.recurrent, AWDLSTM):
        return Recurring(model, prompts)
    if not can_cache(model.config):
        what = f"with {type(model.config.position).__name__} positions"
        what = "that look back at a text by an LSTM" if model.config.recurrent is not None else what
        warn(f"Models {what} remember nothing: each new token takes the reading of the whole text.")
        return Rereading(model, prompts)
    return Remembering(model, prompts, max_new_tokens)


# --- the whole row again ------------------------------------------------------------------------------------------


class Rereading:
    """Nothing is remembered: every step reads the whole row."""

    def __init__(self, model: Model, prompts: Sequence[Ids]) -> None:
        self.ask = reader(model, prompts)
        self.source: list[int] = list(range(len(prompts)))  # the prompt of each row
        self.written: list[list[int]] = [[] for _ in prompts]

    def first(self) -> Tensor:
        return self.ask(self.source, self.written)

    def next(self, token_B: Tensor) -> Tensor:
        for ids, token in zip(self.written, token_B.tolist(), strict=True):
            ids.append(token)
        return self.ask(self.source, self.written)

    def take(self, row_B: Tensor, same_source: bool = False) -> None:
        rows = row_B.tolist()
        self.source, self.written = [self.source[row] for row in rows], [list(self.written[row]) for row in rows]


def reader(model: Model, prompts: Sequence[Ids]) -> Ask:
    """A function that asks the model for the next token of some of the prompts."""
    return answers(model, prompts) if isinstance(model, EncoderDecoder) else continues(model, prompts)


def continues(model: Model, prompts: Sequence[Ids]) -> Ask:
    """A decoder reads the prompt and what came after it."""
    pad, limit = tokenizer_of(model).vocab.pad, model.config.max_length

    def ask(source: Sequence[int], written: Sequence[Ids]) -> Tensor:
        seen = [
            [*prompts[row], *ids][:limit] for row, ids in zip(source, written, strict=True)
        ]  # those past it are done
        tokens, doc = pad_right(seen, pad)
        last = np.array([[len(ids) - 1] for ids in seen])
        batch = Batch(tokens, doc=doc, asked=last).to(device_of(model))
        return known(model, model.logits(batch)[:, 0])

    return ask


def answers(model: EncoderDecoder, prompts: Sequence[Ids]) -> Ask:
    """An encoder reads the prompt once; the decoder, after its start token, what it has written."""
    start, device = framing(model.config, tokenizer_of(model).vocab).start, device_of(model)
    source, encoded = encode(model, prompts)

    def ask(rows: Sequence[int], written: Sequence[Ids]) -> Tensor:
        at = torch.tensor(rows, device=device)
        tokens = torch.tensor([[start, *ids] for ids in written], device=device)  # of equal length
        batch = Batch(
            source.tokens[at], doc=source.doc[at], decoder_tokens=tokens, decoder_doc=torch.zeros_like(tokens)
        )
        return known(model, model.head(model.read(batch, encoded[at])[:, -1], model.embed.tokens.weight))

    return ask


def encode(model: EncoderDecoder, prompts: Sequence[Ids]) -> tuple[Batch, Tensor]:
    """The prompts as a batch, and what the encoder makes of them."""
    source = Batch(*pad_right(prompts, tokenizer_of(model).vocab.pad)).to(device_of(model))
    return source, model.encode(source)


class Recurring:
    """A decoder of LSTMs, whose state is all that it needs of the text so far."""

    def __init__(self, model: Model, prompts: Sequence[Ids]) -> None:
        self.model, self.prompts, self.device = model, prompts, device_of(model)
        self.state: dict[str, Tensor] = {}

    def first(self) -> Tensor:
        lengths = [len(ids) for ids in self.prompts]
        rows, found, left = list[int](), list[Tensor](), list[dict[str, Tensor]]()
        for length in sorted(set(lengths)):  # those of equal length together: none is padded
            some = [row for row, n in enumerate(lengths) if n == length]
            found.append(self.read(torch.tensor([list(self.prompts[row]) for row in some], device=self.device), {}))
            rows, left = rows + some, [*left, self.state]
        order = torch.tensor(rows, device=self.device).argsort()
        self.state = {name: torch.cat([part[name] for part in left])[order] for name in left[0]}
        return torch.cat(found)[order]

    def next(self, token_B: Tensor) -> Tensor:
        return self.read(token_B[:, None], self.state)

    def read(self, token_BT: Tensor, state: dict[str, Tensor]) -> Tensor:
        self.model.take_up(state)
        last_B1 = torch.full((len(token_BT), 1), token_BT.shape[1] - 1, device=self.device)
        logits_BV = self.model.logits(Batch(token_BT, asked=last_B1))[:, 0]
        self.state = self.model.hand_on()
        return known(self.model, logits_BV)

    def take(self, row_B: Tensor, same_source: bool = False) -> None:
        self.state = {name: value[row_B] for name, value in self.state.items()}


# --- one token more -----------------------------------------------------------------------------------------------


class Remembering:
    """Keys and values are kept, so that a step reads one token of each row. The room for them grows when it is full."""

    def __init__(self, model: Model, prompts: Sequence[Ids], max_new_tokens: int) -> None:
        self.model, self.prompts = model, prompts
        self.device, self.limit = device_of(model), model.config.max_length
        self.on_gpu = self.device.type == "cuda"
        start = framing(model.config, tokenizer_of(model).vocab).start
        self.begun: Sequence[Ids] = [[start] for _ in prompts] if isinstance(model, EncoderDecoder) else prompts
        longest = max(map(len, self.begun))
        self.most = self.rounded(longest + max_new_tokens)
        self.cache = Cache(self.stack, min(self.most, self.rounded(longest + FIRST_ROOM)), fixed=self.on_gpu)
        self.record = self.on_gpu and max_new_tokens >= WORTH_RECORDING
        self.recorded: Recorded | None = None
        self.num_rows = len(prompts)

    def rounded(self, size: int) -> int:
        return -(-size // ROUND) * ROUND if self.on_gpu else size

    @property
    def stack(self) -> Stack:
        if isinstance(self.model, EncoderDecoder):
            return self.model.decoder
        assert isinstance(self.model, Decoder)
        return self.model.stack

    def embed(self, token_BT: Tensor, place_BT: Tensor | None = None) -> Tensor:
        placing = self.model.decoder_embed if isinstance(self.model, EncoderDecoder) else None
        return self.model.embed(token_BT, place_BT, placing=placing)

    def first(self) -> Tensor:
        lengths = [len(ids) for ids in self.begun]
        tokens, _ = pad_right(self.begun, tokenizer_of(self.model).vocab.pad)
        x_BTD = self.embed(torch.from_numpy(tokens).to(self.device))
        read, read_doc = None, None
        if isinstance(self.model, EncoderDecoder):
            source, read = encode(self.model, self.prompts)
            read_doc = source.doc if len(set(map(len, self.prompts))) > 1 else None
        tell_length(self.model, max(lengths))
        y_BTD = self.cache.begin(x_BTD, lengths, read, read_doc)
        return self.logits(y_BTD[torch.arange(len(lengths)), torch.tensor(lengths) - 1])

    def next(self, token_B: Tensor) -> Tensor:
        if self.cache.width == self.cache.size:
            self.cache.grow(min(self.most, 2 * self.cache.size))
            self.recorded = None  # its tensors are others now
        tell_length(self.model, self.cache.width + 1)
        if self.record and self.recorded is None:
            self.recorded = Recorded(self.step, token_B)
        logits_BV = (self.recorded or self.step)(token_B)
        self.cache.advance()
        return logits_BV

    def step(self, token_B: Tensor) -> Tensor:
        place_B = self.cache.place_B
        if self.limit is not None:
            place_B = place_B.clamp(max=self.limit - 1)  # those past it are done, and only read beside the others
        x_B1D = self.embed(token_B[:, None], place_B[:, None])
        return self.logits(self.cache.add(x_B1D)[:, 0])

    def logits(self, x_BD: Tensor) -> Tensor:
        return known(self.model, self.model.head(x_BD, self.model.embed.tokens.weight))

    def take(self, row_B: Tensor, same_source: bool = False) -> None:
        if len(row_B) != self.num_rows:
            self.recorded = None  # its tensors are others now
        self.cache.take(row_B, same_source)
        self.num_rows = len(row_B)


# --- what both need -----------------------------------------------------------------------------------------------


def known(model: Model, logits_BV: Tensor) -> Tensor:
    """The logits of tokens that the tokenizer has; some published models have more rows than that."""
    return logits_BV[:, : tokenizer_of(model).vocab.size]


def device_of(model: Model) -> torch.device:
    return model.embed.tokens.weight.device


def pad_right(rows: Sequence[Ids], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as one array, and their `doc`: 0 for text, -1 for padding."""
    width = max(map(len, rows))
    tokens = np.array([[*ids, *[pad] * (width - len(ids))] for ids in rows])
    doc = np.array([[0] * len(ids) + [-1] * (width - len(ids)) for ids in rows])
    return tokens, doc


# --- can it write at all ------------------------------------------------------------------------------------------


def tokenizer_of(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise UserError("This model has no tokenizer: its folder needs a tokenizer.json.")
    return model.tokenizer


def check_writes(model: Model) -> tuple[int, ...]:
    """The end tokens of a model that writes text; a UserError says why another one cannot."""
    check_words(model.config)
    if isinstance(model.config.recurrent, ELMo):
        raise UserError("ELMo reads a text both ways, and does not write one. Take a decoder such as gpt2.")
    if model.config.shape == "encoder":
        raise UserError("An encoder does not write text. It can fill blanks: firth fill CHECKPOINT 'The ___ is red.'")
    return ends_of(model, tokenizer_of(model).vocab)


def check_words(config: ModelConfig) -> None:
    if not isinstance(config.head, LMHead):
        raise UserError("This model was fine-tuned for another task, and has no words. Take the one that it came from.")
    if config.family == BAG:
        raise UserError("Word vectors alone do not say which word comes next, or is missing. Take a language model.")


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Without dropout; the model goes back to training if that is where it was."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
