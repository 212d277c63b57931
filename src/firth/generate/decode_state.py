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

from firth.core.console import warn
from firth.core.errors import UserError
from firth.generate.cuda_graph import CudaGraphDecode
from firth.generate.length_budget import INITIAL_NEW_TOKENS, warn_context_length
from firth.models import (
    Decoder,
    EncoderDecoder,
    LMHead,
    Model,
    ModelConfig,
    Stack,
    get_eos_token_ids,
    make_sequence_template,
)
from firth.models.config import BAG_OF_WORDS_FAMILY, AWDLSTMConfig, ELMoConfig
from firth.models.kv_cache import KVCache, can_cache
from firth.objectives import Batch
from firth.tokens import Tokenizer

TokenIds = Sequence[int]
NextLogitsFn = Callable[
    [Sequence[int], Sequence[TokenIds]], Tensor
]  # some prompts, and what was written after each -> (B, V)
CACHE_MULTIPLE_TOKENS = 64  # on a GPU there is room for a multiple of so many places
MIN_CUDA_GRAPH_TOKENS = 32  # tokens: recording a step takes as long as some steps


class DecodeState(Protocol):
    """Rows that are read token by token. All that it gives are logits (B, V)."""

    def prefill(self) -> Tensor:
        """Of what follows the prompts."""

    def decode_step(self, token_B: Tensor) -> Tensor:
        """Of what follows one more token in each row."""

    def select_rows(self, row_B: Tensor, same_prompt: bool = False) -> None:
        """Go on with these rows; with `same_prompt` they only change with others of the same prompt."""


def make_decode_state(
    model: Model, prompts: Sequence[TokenIds], max_new_tokens: int, use_cache: bool = True
) -> DecodeState:
    """A reading of these prompts. What must be read again and again is said."""
    if not use_cache:
        return UncachedDecode(model, prompts)
    if isinstance(model.config.recurrent, AWDLSTMConfig):
        return LstmDecode(model, prompts)
    if not can_cache(model.config):
        what = f"with {type(model.config.position).__name__} positions"
        what = "that look back at a text by an LSTM" if model.config.recurrent is not None else what
        warn(f"Models {what} remember nothing: each new token takes the reading of the whole text.")
        return UncachedDecode(model, prompts)
    return CachedDecode(model, prompts, max_new_tokens)


# --- the whole row again ------------------------------------------------------------------------------------------


class UncachedDecode:
    """Nothing is remembered: every step reads the whole row."""

    def __init__(self, model: Model, prompts: Sequence[TokenIds]) -> None:
        self.next_logits_fn = make_next_logits_fn(model, prompts)
        self.prompt_index: list[int] = list(range(len(prompts)))  # the prompt of each row
        self.generated_ids: list[list[int]] = [[] for _ in prompts]

    def prefill(self) -> Tensor:
        return self.next_logits_fn(self.prompt_index, self.generated_ids)

    def decode_step(self, token_B: Tensor) -> Tensor:
        for ids, token in zip(self.generated_ids, token_B.tolist(), strict=True):
            ids.append(token)
        return self.next_logits_fn(self.prompt_index, self.generated_ids)

    def select_rows(self, row_B: Tensor, same_prompt: bool = False) -> None:
        rows = row_B.tolist()
        self.prompt_index, self.generated_ids = (
            [self.prompt_index[row] for row in rows],
            [list(self.generated_ids[row]) for row in rows],
        )


def make_next_logits_fn(model: Model, prompts: Sequence[TokenIds]) -> NextLogitsFn:
    """A function that asks the model for the next token of some of the prompts."""
    return (
        encoder_decoder_next_logits_fn(model, prompts)
        if isinstance(model, EncoderDecoder)
        else decoder_next_logits_fn(model, prompts)
    )


def decoder_next_logits_fn(model: Model, prompts: Sequence[TokenIds]) -> NextLogitsFn:
    """A decoder reads the prompt and what came after it."""
    pad, limit = require_tokenizer(model).vocab.pad, model.config.max_length

    def ask(source: Sequence[int], written: Sequence[TokenIds]) -> Tensor:
        seen = [
            [*prompts[row], *ids][:limit] for row, ids in zip(source, written, strict=True)
        ]  # those past it are done
        tokens, doc = pad_right(seen, pad)
        last = np.array([[len(ids) - 1] for ids in seen])
        batch = Batch(tokens, document_ids=doc, target_positions=last).to(embedding_device(model))
        return drop_padded_vocab(model, model.logits(batch)[:, 0])

    return ask


def encoder_decoder_next_logits_fn(model: EncoderDecoder, prompts: Sequence[TokenIds]) -> NextLogitsFn:
    """An encoder reads the prompt once; the decoder, after its start token, what it has written."""
    start, device = (
        make_sequence_template(model.config, require_tokenizer(model).vocab).decoder_start_id,
        embedding_device(model),
    )
    source, encoded = encode_prompt_batch(model, prompts)

    def ask(rows: Sequence[int], written: Sequence[TokenIds]) -> Tensor:
        at = torch.tensor(rows, device=device)
        tokens = torch.tensor([[start, *ids] for ids in written], device=device)  # of equal length
        batch = Batch(
            source.input_ids[at],
            document_ids=source.document_ids[at],
            decoder_input_ids=tokens,
            decoder_document_ids=torch.zeros_like(tokens),
        )
        return drop_padded_vocab(
            model, model.head(model.hidden_states(batch, encoded[at])[:, -1], model.embed.tokens.weight)
        )

    return ask


def encode_prompt_batch(model: EncoderDecoder, prompts: Sequence[TokenIds]) -> tuple[Batch, Tensor]:
    """The prompts as a batch, and what the encoder makes of them."""
    source = Batch(*pad_right(prompts, require_tokenizer(model).vocab.pad)).to(embedding_device(model))
    return source, model.encode(source)


class LstmDecode:
    """A decoder of LSTMs, whose state is all that it needs of the text so far."""

    def __init__(self, model: Model, prompts: Sequence[TokenIds]) -> None:
        self.model, self.prompts, self.device = model, prompts, embedding_device(model)
        self.state: dict[str, Tensor] = {}

    def prefill(self) -> Tensor:
        lengths = [len(ids) for ids in self.prompts]
        rows, found, left = list[int](), list[Tensor](), list[dict[str, Tensor]]()
        for length in sorted(set(lengths)):  # those of equal length together: none is padded
            some = [row for row, n in enumerate(lengths) if n == length]
            found.append(
                self.forward_tokens(torch.tensor([list(self.prompts[row]) for row in some], device=self.device), {})
            )
            rows, left = rows + some, [*left, self.state]
        order = torch.tensor(rows, device=self.device).argsort()
        self.state = {name: torch.cat([part[name] for part in left])[order] for name in left[0]}
        return torch.cat(found)[order]

    def decode_step(self, token_B: Tensor) -> Tensor:
        return self.forward_tokens(token_B[:, None], self.state)

    def forward_tokens(self, input_ids_BT: Tensor, state: dict[str, Tensor]) -> Tensor:
        self.model.load_state(state)
        last_B1 = torch.full((len(input_ids_BT), 1), input_ids_BT.shape[1] - 1, device=self.device)
        logits_BV = self.model.logits(Batch(input_ids_BT, target_positions=last_B1))[:, 0]
        self.state = self.model.pop_state()
        return drop_padded_vocab(self.model, logits_BV)

    def select_rows(self, row_B: Tensor, same_prompt: bool = False) -> None:
        self.state = {name: value[row_B] for name, value in self.state.items()}


# --- one token more -----------------------------------------------------------------------------------------------


class CachedDecode:
    """Keys and values are kept, so that a step reads one token of each row. The room for them grows when it is full."""

    def __init__(self, model: Model, prompts: Sequence[TokenIds], max_new_tokens: int) -> None:
        self.model, self.prompts = model, prompts
        self.device, self.max_length = embedding_device(model), model.config.max_length
        self.on_gpu = self.device.type == "cuda"
        start = make_sequence_template(model.config, require_tokenizer(model).vocab).decoder_start_id
        self.decoder_prompts: Sequence[TokenIds] = (
            [[start] for _ in prompts] if isinstance(model, EncoderDecoder) else prompts
        )
        longest = max(map(len, self.decoder_prompts))
        self.max_capacity = self.round_capacity(longest + max_new_tokens)
        self.cache = KVCache(
            self.stack, min(self.max_capacity, self.round_capacity(longest + INITIAL_NEW_TOKENS)), is_static=self.on_gpu
        )
        self.uses_cuda_graph = self.on_gpu and max_new_tokens >= MIN_CUDA_GRAPH_TOKENS
        self.cuda_graph: CudaGraphDecode | None = None
        self.num_rows = len(prompts)

    def round_capacity(self, size: int) -> int:
        return -(-size // CACHE_MULTIPLE_TOKENS) * CACHE_MULTIPLE_TOKENS if self.on_gpu else size

    @property
    def stack(self) -> Stack:
        if isinstance(self.model, EncoderDecoder):
            return self.model.decoder
        assert isinstance(self.model, Decoder)
        return self.model.stack

    def embed(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        placing = self.model.decoder_embed if isinstance(self.model, EncoderDecoder) else None
        return self.model.embed(input_ids_BT, position_ids_BT, position_embedding=placing)

    def prefill(self) -> Tensor:
        lengths = [len(ids) for ids in self.decoder_prompts]
        tokens, _ = pad_right(self.decoder_prompts, require_tokenizer(self.model).vocab.pad)
        x_BTD = self.embed(torch.from_numpy(tokens).to(self.device))
        read, read_doc = None, None
        if isinstance(self.model, EncoderDecoder):
            source, read = encode_prompt_batch(self.model, self.prompts)
            read_doc = source.document_ids if len(set(map(len, self.prompts))) > 1 else None
        warn_context_length(self.model, max(lengths))
        y_BTD = self.cache.prefill(x_BTD, lengths, read, read_doc)
        return self.compute_logits(y_BTD[torch.arange(len(lengths)), torch.tensor(lengths) - 1])

    def decode_step(self, token_B: Tensor) -> Tensor:
        if self.cache.max_row_length == self.cache.size:
            self.cache.grow(min(self.max_capacity, 2 * self.cache.size))
            self.cuda_graph = None  # its tensors are others now
        warn_context_length(self.model, self.cache.max_row_length + 1)
        if self.uses_cuda_graph and self.cuda_graph is None:
            self.cuda_graph = CudaGraphDecode(self.forward_step, token_B)
        logits_BV = (self.cuda_graph or self.forward_step)(token_B)
        self.cache.advance()
        return logits_BV

    def forward_step(self, token_B: Tensor) -> Tensor:
        place_B = self.cache.next_position_B
        if self.max_length is not None:
            place_B = place_B.clamp(max=self.max_length - 1)  # those past it are done, and only read beside the others
        x_B1D = self.embed(token_B[:, None], place_B[:, None])
        return self.compute_logits(self.cache.decode_step(x_B1D)[:, 0])

    def compute_logits(self, x_BD: Tensor) -> Tensor:
        return drop_padded_vocab(self.model, self.model.head(x_BD, self.model.embed.tokens.weight))

    def select_rows(self, row_B: Tensor, same_prompt: bool = False) -> None:
        if len(row_B) != self.num_rows:
            self.cuda_graph = None  # its tensors are others now
        self.cache.reorder(row_B, same_prompt)
        self.num_rows = len(row_B)


# --- what both need -----------------------------------------------------------------------------------------------


def drop_padded_vocab(model: Model, logits_BV: Tensor) -> Tensor:
    """The logits of tokens that the tokenizer has; some published models have more rows than that."""
    return logits_BV[:, : require_tokenizer(model).vocab.size]


def embedding_device(model: Model) -> torch.device:
    return model.embed.tokens.weight.device


def pad_right(rows: Sequence[TokenIds], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as one array, and their `doc`: 0 for text, -1 for padding."""
    width = max(map(len, rows))
    tokens = np.array([[*ids, *[pad_id] * (width - len(ids))] for ids in rows])
    doc = np.array([[0] * len(ids) + [-1] * (width - len(ids)) for ids in rows])
    return tokens, doc


# --- can it write at all ------------------------------------------------------------------------------------------


def require_tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise UserError("This model has no tokenizer: its folder needs a tokenizer.json.")
    return model.tokenizer


def check_can_generate(model: Model) -> tuple[int, ...]:
    """The end tokens of a model that writes text; a UserError says why another one cannot."""
    check_has_lm_head(model.config)
    if isinstance(model.config.recurrent, ELMoConfig):
        raise UserError("ELMo reads a text both ways, and does not write one. Take a decoder such as gpt2.")
    if model.config.architecture == "encoder":
        raise UserError("An encoder does not write text. It can fill blanks: firth fill CHECKPOINT 'The ___ is red.'")
    return get_eos_token_ids(model, require_tokenizer(model).vocab)


def check_has_lm_head(config: ModelConfig) -> None:
    if not isinstance(config.head, LMHead):
        raise UserError("This model was fine-tuned for another task, and has no words. Take the one that it came from.")
    if config.family == BAG_OF_WORDS_FAMILY:
        raise UserError("Word vectors alone do not say which word comes next, or is missing. Take a language model.")


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Without dropout; the model goes back to training if that is where it was."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
