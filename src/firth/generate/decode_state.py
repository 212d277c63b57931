"""Autoregressive decoding with a KV cache: prefill, then one decode step per token.

A causal language model predicts one token at a time. Computed naively, step t runs the model over all t tokens so far,
so that n new tokens cost n forward passes over up to n tokens each. But causal attention makes the keys and values of a
token independent of every later token. They are computed once and kept in the KV cache, one pair of tensors per layer.
Decoding then has two phases (Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 2):

1. Prefill: one forward pass over whole prompts fills the cache and gives the logits of the first new token. All
   positions run in parallel, so that large matmuls limit it (compute-bound).
2. Decode step: one token per row goes through the model. Its query attends to the cached keys and values, and its own
   key and value are appended. Each step reads all weights and the whole cache for one token (memory-bound).

The cache takes 2 * layers * kv_heads * head_dim * tokens numbers per sequence. `CachedDecode` allocates it in advance,
at a capacity that doubles when it is full. On a GPU its shapes are therefore constant over many steps, and a step can
be replayed as a CUDA graph (`cuda_graph.py`). An encoder-decoder encodes its prompt once in prefill; the cache also
keeps the cross-attention keys and values.

Two decode states have no KV cache. `LstmDecode` carries the recurrent state of an AWD-LSTM, whose size does not depend
on the length. `UncachedDecode` recomputes the whole sequence at each step: for relative positions that cannot be
cached, for LSTM decoders with attention, for `use_cache=False`, and in the tests, which compare cached decoding with
it.

A prefix LM's prompt attends to all of itself (`models/prompt_form.py`); its keys and values do not depend on later
tokens either, so that it is cached in the same way. UniLM predicts each token at a [MASK] (Dong et al. 2019, section
2.3). A decode step is then two: the last token enters the cache; a [MASK] after it gives the logits, and its keys and
values are overwritten by the token that is chosen. An encoder that was also trained on causal rows (masked next-token
prediction) reads and writes with causal attention, as a decoder does.

B rows, T positions, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from firth.core.console import warn
from firth.core.errors import UserError
from firth.generate.cuda_graph import CudaGraphDecode
from firth.generate.length_budget import INITIAL_NEW_TOKENS, warn_context_length
from firth.models import (
    Encoder,
    EncoderDecoder,
    LMHead,
    Model,
    ModelConfig,
    Stack,
    get_eos_token_ids,
    load_model,
    make_sequence_template,
)
from firth.models.config import BAG_OF_WORDS_FAMILY, AWDLSTMConfig, ELMoConfig
from firth.models.kv_cache import KVCache, can_cache
from firth.objectives import Batch
from firth.objectives.visibility import attention_rank
from firth.tokens import TokenIds, Tokenizer

# Prompt index and generated ids of each row -> logits (B, V) of the next token.
NextLogitsFn = Callable[[Sequence[int], Sequence[TokenIds]], Tensor]
CACHE_MULTIPLE_TOKENS = 64  # the cache capacity on a GPU is a multiple of this
MIN_CUDA_GRAPH_TOKENS = 32  # shorter outputs do not repay the capture, which costs several steps


class DecodeState(Protocol):
    """State of a batch during decoding. Both phases return logits (B, V) of the next token."""

    def prefill(self) -> Tensor:
        """Run the model over the prompts; return the logits of the first new token."""

    def decode_step(self, token_B: Tensor) -> Tensor:
        """Append one token to each row; return the logits of the token after it."""

    def select_rows(self, row_B: Tensor, same_prompt: bool = False) -> None:
        """Keep these rows, in this order.

        `same_prompt`: rows move only among the beams of one prompt, so that cross-attention keys and values stay.
        """


def make_decode_state(
    model: Model, prompts: Sequence[TokenIds], max_new_tokens: int, use_cache: bool = True
) -> DecodeState:
    """Return the decode state that fits the model; warn where the model cannot use a KV cache."""
    if not use_cache:
        return UncachedDecode(model, prompts)
    if isinstance(model.config.recurrent, AWDLSTMConfig):
        return LstmDecode(model, prompts)
    if not can_cache(model.config):
        has_bigrams = bool(model.config.num_bigram_buckets)
        kind = "embeddings of bigrams" if has_bigrams else f"{type(model.config.position).__name__} positions"
        kind = "an LSTM decoder with attention" if model.config.recurrent is not None else kind
        warn(f"Models with {kind} have no KV cache: each new token recomputes the whole sequence.")
        return UncachedDecode(model, prompts)
    return CachedDecode(model, prompts, max_new_tokens)


# --- without a KV cache -------------------------------------------------------------------------------------------


class UncachedDecode:
    """Decode without a cache: every step recomputes the whole sequence."""

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
        self.prompt_index = [self.prompt_index[row] for row in rows]
        self.generated_ids = [list(self.generated_ids[row]) for row in rows]


def make_next_logits_fn(model: Model, prompts: Sequence[TokenIds]) -> NextLogitsFn:
    """Return a function that computes the next-token logits (B, V) from whole sequences."""
    return (
        encoder_decoder_next_logits_fn(model, prompts)
        if isinstance(model, EncoderDecoder)
        else decoder_next_logits_fn(model, prompts)
    )


def decoder_next_logits_fn(model: Model, prompts: Sequence[TokenIds]) -> NextLogitsFn:
    """Run a decoder, or UniLM, over prompt and generated ids."""
    pad, limit, mask_ids = require_tokenizer(model).vocab.pad, model.config.max_length, list(get_mask_ids(model))

    def next_logits(prompt_index: Sequence[int], generated_ids: Sequence[TokenIds]) -> Tensor:
        # Rows beyond max_length are finished already; the cut only keeps them computable.
        sequences = [[*prompts[i], *ids, *mask_ids][:limit] for i, ids in zip(prompt_index, generated_ids, strict=True)]
        input_ids, document_ids = pad_right(sequences, pad)
        last = np.array([[len(ids) - 1] for ids in sequences])
        batch = Batch(input_ids, document_ids=document_ids, target_positions=last)
        if model.config.has_bidirectional_prompt or model.config.is_causal_encoder:
            rank_BT = prompt_attention_rank(model, [prompts[i] for i in prompt_index], input_ids.shape[1])
            token_types_BT = (rank_BT > 0).astype(np.int64) if mask_ids else None  # UniLM's two segments
            batch = batch._replace(attention_rank=rank_BT, token_type_ids=token_types_BT)
        return drop_padded_vocab(model, model.logits(batch.to(embedding_device(model)))[:, 0])

    return next_logits


def prompt_attention_rank(model: Model, prompts: Sequence[TokenIds], width: int) -> np.ndarray:
    """Return (B, T): 0 in a prompt, which attends to all of itself, then 1, 2, ... (prefix LM).

    The sentinel at the end of a denoiser's prompt begins the answer. An encoder that was trained on causal rows too
    (masked next-token prediction) reads the prompt causally.
    """
    if model.config.is_causal_encoder:
        return np.tile(np.arange(width), (len(prompts), 1))
    sentinels = require_tokenizer(model).vocab.sentinel_ids if model.config.has_sentinel_prompt else ()
    lengths = [len(ids) - (ids[-1] in sentinels) for ids in prompts]
    return attention_rank(np.arange(width), np.array(lengths)[:, None])


def get_mask_ids(model: Model) -> tuple[int, ...]:
    """Return the token at which UniLM predicts the next one; empty for a model that predicts at the last token."""
    if not model.config.predicts_at_mask:
        return ()
    mask_id = require_tokenizer(model).vocab.mask
    if mask_id is None:
        raise UserError("The tokenizer of this model has no mask token, at which it predicts.")
    return (mask_id,)


def encoder_decoder_next_logits_fn(model: EncoderDecoder, prompts: Sequence[TokenIds]) -> NextLogitsFn:
    """Encode the prompts once; run the decoder over its start token and the generated ids."""
    start = make_sequence_template(model.config, require_tokenizer(model).vocab).decoder_start_id
    device = embedding_device(model)
    source, encoded = encode_prompt_batch(model, prompts)

    def next_logits(prompt_index: Sequence[int], generated_ids: Sequence[TokenIds]) -> Tensor:
        row_B = torch.tensor(prompt_index, device=device)
        decoder_ids_BU = torch.tensor([[start, *ids] for ids in generated_ids], device=device)  # of equal length
        batch = Batch(
            source.input_ids[row_B],
            document_ids=source.document_ids[row_B],
            decoder_input_ids=decoder_ids_BU,
            decoder_document_ids=torch.zeros_like(decoder_ids_BU),
        )
        last_BD = model.hidden_states(batch, encoded[row_B])[:, -1]
        return drop_padded_vocab(model, model.head(last_BD, model.embed.tokens.weight))

    return next_logits


def encode_prompt_batch(model: EncoderDecoder, prompts: Sequence[TokenIds]) -> tuple[Batch, Tensor]:
    """Return the prompts as a batch, and the encoder's hidden states (B, T, D)."""
    source = Batch(*pad_right(prompts, require_tokenizer(model).vocab.pad)).to(embedding_device(model))
    return source, model.encode(source)


class LstmDecode:
    """Decode with an LSTM: its recurrent state (h, c per layer) summarizes all tokens so far."""

    def __init__(self, model: Model, prompts: Sequence[TokenIds]) -> None:
        self.model, self.prompts, self.device = model, prompts, embedding_device(model)
        self.state: dict[str, Tensor] = {}

    def prefill(self) -> Tensor:
        lengths = [len(ids) for ids in self.prompts]
        rows, logits, states = list[int](), list[Tensor](), list[dict[str, Tensor]]()
        for length in sorted(set(lengths)):  # one pass per length: padding would enter the recurrent state
            group = [row for row, n in enumerate(lengths) if n == length]
            input_ids_BT = torch.tensor([list(self.prompts[row]) for row in group], device=self.device)
            logits.append(self.forward_tokens(input_ids_BT, {}))
            rows, states = rows + group, [*states, self.state]
        order = torch.tensor(rows, device=self.device).argsort()
        self.state = {name: torch.cat([state[name] for state in states])[order] for name in states[0]}
        return torch.cat(logits)[order]

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


# --- with a KV cache ----------------------------------------------------------------------------------------------


class CachedDecode:
    """Decode with a KV cache: a step runs one token per row. The capacity doubles when the cache is full."""

    def __init__(self, model: Model, prompts: Sequence[TokenIds], max_new_tokens: int) -> None:
        self.model, self.prompts, self.mask_ids = model, prompts, get_mask_ids(model)
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
        assert isinstance(self.model, Encoder)
        return self.model.stack

    def embed(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        """Return the embeddings of the prompt, or of new tokens at `position_ids_BT` (UniLM: token type 1)."""
        position_embedding = self.model.decoder_embed if isinstance(self.model, EncoderDecoder) else None
        is_new_text = self.mask_ids and position_ids_BT is not None
        return self.model.embed(
            input_ids_BT,
            position_ids_BT,
            torch.ones_like(input_ids_BT) if is_new_text else None,
            position_embedding=position_embedding,
        )

    def prefill(self) -> Tensor:
        lengths = [len(ids) for ids in self.decoder_prompts]
        input_ids, document_ids = pad_right(self.decoder_prompts, require_tokenizer(self.model).vocab.pad)
        x_BTD = self.embed(torch.from_numpy(input_ids).to(self.device))
        encoded, encoded_document_ids = None, None
        if isinstance(self.model, EncoderDecoder):
            source, encoded = encode_prompt_batch(self.model, self.prompts)
            encoded_document_ids = source.document_ids if len(set(map(len, self.prompts))) > 1 else None
        warn_context_length(self.model, max(lengths))
        config = self.model.config
        needs_rank = config.has_bidirectional_prompt or config.is_causal_encoder
        if needs_rank and not isinstance(self.model, EncoderDecoder):
            rank_BT = prompt_attention_rank(self.model, self.prompts, input_ids.shape[1])
            masks = {"document_ids": document_ids, "attention_rank": rank_BT}
        else:  # causal: no token attends to the padding after it
            masks = {}
        masks_BT = {name: torch.from_numpy(x).to(self.device) for name, x in masks.items()}
        y_BTD = self.cache.prefill(x_BTD, lengths, encoded, encoded_document_ids, **masks_BT)
        if self.mask_ids:
            return self.forward_mask()
        return self.compute_logits(y_BTD[torch.arange(len(lengths)), torch.tensor(lengths) - 1])

    def decode_step(self, token_B: Tensor) -> Tensor:
        if self.cache.max_row_length + len(self.mask_ids) >= self.cache.size:
            self.cache.grow(min(self.max_capacity, 2 * self.cache.size))
            self.cuda_graph = None  # the graph holds the addresses of the old tensors
        warn_context_length(self.model, self.cache.max_row_length + 1)
        if self.uses_cuda_graph and self.cuda_graph is None:
            self.cuda_graph = CudaGraphDecode(self.forward_step, token_B)
        logits_BV = (self.cuda_graph or self.forward_step)(token_B)
        self.cache.advance()
        return logits_BV

    def forward_step(self, token_B: Tensor) -> Tensor:
        x_BD = self.forward_token(token_B)
        if not self.mask_ids:
            return self.compute_logits(x_BD)
        self.cache.advance()
        logits_BV = self.forward_mask()
        self.cache.advance(-1)
        return logits_BV

    def forward_mask(self) -> Tensor:
        """Return the logits at a [MASK] after each row. It does not stay in the cache: the next token overwrites it."""
        return self.compute_logits(self.forward_token(torch.full_like(self.cache.next_position_B, self.mask_ids[0])))

    def forward_token(self, token_B: Tensor) -> Tensor:
        """Return the hidden states (B, D) of one token after each row, and store its keys and values."""
        position_B = self.cache.next_position_B
        if self.max_length is not None:
            position_B = position_B.clamp(max=self.max_length - 1)  # finished rows may be beyond it
        x_B1D = self.embed(token_B[:, None], position_B[:, None])
        return self.cache.decode_step(x_B1D)[:, 0]

    def compute_logits(self, x_BD: Tensor) -> Tensor:
        return drop_padded_vocab(self.model, self.model.head(x_BD, self.model.embed.tokens.weight))

    def select_rows(self, row_B: Tensor, same_prompt: bool = False) -> None:
        if len(row_B) != self.num_rows:
            self.cuda_graph = None  # a graph is captured for one batch size
        self.cache.reorder(row_B, same_prompt)
        self.num_rows = len(row_B)


# --- shared helpers -----------------------------------------------------------------------------------------------


def drop_padded_vocab(model: Model, logits_BV: Tensor) -> Tensor:
    """Drop logits beyond the tokenizer's vocabulary: some published models pad their embedding."""
    return logits_BV[:, : require_tokenizer(model).vocab.size]


def embedding_device(model: Model) -> torch.device:
    return model.embed.tokens.weight.device


def pad_right(rows: Sequence[TokenIds], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and document ids, both (B, T): document 0 for tokens, -1 for padding."""
    width = max(map(len, rows))
    input_ids = np.array([[*ids, *[pad_id] * (width - len(ids))] for ids in rows])
    document_ids = np.array([[0] * len(ids) + [-1] * (width - len(ids)) for ids in rows])
    return input_ids, document_ids


# --- checks -------------------------------------------------------------------------------------------------------


def require_tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise UserError("This model has no tokenizer: its folder needs a tokenizer.json.")
    return model.tokenizer


def check_can_generate(model: Model) -> tuple[int, ...]:
    """Return the EOS ids of a model that can generate; raise a UserError for any other model."""
    check_has_lm_head(model.config)
    if isinstance(model.config.recurrent, ELMoConfig):
        raise UserError("ELMo is bidirectional and cannot generate text. Use a decoder such as gpt2.")
    can_write = model.config.predicts_at_mask or model.config.is_causal_encoder
    if model.config.architecture == "encoder" and not can_write:
        raise UserError("An encoder cannot generate text. It can fill blanks: firth fill CHECKPOINT 'The ___ is red.'")
    return get_eos_token_ids(model, require_tokenizer(model).vocab)


def load_language_model(checkpoint: str | Path) -> Model:
    model = load_model(checkpoint)
    refuse_random_head(model, checkpoint)
    return model


def refuse_random_head(model: Model, source: str | Path) -> None:
    """Raise UserError for a checkpoint without its LM head, as many are published: random weights would answer."""
    if model.has_random_head and isinstance(model.config.head, LMHead):
        raise UserError(
            f"{source} was saved without its LM head, so it predicts no words. `firth embed` and `firth finetune` "
            f"need none, `firth pretrain {source} --data TEXT` trains a new one."
        )


def check_has_lm_head(config: ModelConfig) -> None:
    if not isinstance(config.head, LMHead):
        raise UserError(
            "This model has a task head instead of an LM head. Use the checkpoint that it was fine-tuned from."
        )
    if config.family == BAG_OF_WORDS_FAMILY:
        raise UserError("Word vectors cannot predict the next or a masked word. Use a language model.")


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Put the model into eval mode (no dropout); restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
