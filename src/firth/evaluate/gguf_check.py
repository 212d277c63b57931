"""Run a GGUF file in llama.cpp, by the package llama-cpp-python, and compare token ids and outputs with our own.

A decoder's logits, an encoder-decoder's logits and an encoder's hidden states are compared at every position of a
random text. llama.cpp computes GELU from a table of float16 values and multiplies quantized weights by activations that
it quantizes as well, so that the outputs differ by more than float32 rounds: the tolerance is a share of the largest
output, by the type of the file.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firth.core.errors import UserError
from firth.evaluate.onnx_graph import example_text
from firth.evaluate.token_check import ODD_TEXTS, SCRIPT_TEXTS
from firth.models import Model
from firth.text.open_text import import_optional
from firth.tokens import Tokenizer

Array = np.ndarray
TOLERANCES = {"f32": 5e-3, "f16": 2e-2, "q8_0": 0.25}  # largest difference, as a share of the largest output
CHECK_TOKENS, MAX_TOKENS = 24, 4096
FLOAT32_TYPE, NO_POOLING, NO_FLASH_ATTENTION = 0, 0, 0  # ggml_type, llama_pooling_type, llama_flash_attn_type


def import_llama_cpp() -> Any:
    """Import llama-cpp-python. Call this before anything is written: the check cannot run without it."""
    try:
        return import_optional("llama_cpp", "--check of GGUF")
    except UserError:
        raise UserError("--check of GGUF needs the package llama-cpp-python: pip install llama-cpp-python") from None


@cache
def make_silent_log() -> Any:
    """Return a log function that prints nothing. It is kept for ever: llama.cpp calls it whenever it is used again."""
    return import_llama_cpp().llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """A GGUF file, opened by llama.cpp on the CPU, with a KV cache in float32."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        self.api = api = import_llama_cpp()
        api.llama_log_set(make_silent_log(), ctypes.c_void_p(0))
        api.llama_backend_init()
        settings = api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            raise UserError(f"{path}: llama.cpp cannot open this file.")
        context = api.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = max(num_tokens, 64)
        context.n_threads = context.n_threads_batch = 1
        context.type_k = context.type_v = FLOAT32_TYPE
        context.flash_attn_type, context.pooling_type, context.embeddings = NO_FLASH_ATTENTION, NO_POOLING, True
        self.context = api.llama_init_from_model(self.model, context)
        self.vocab = api.llama_model_get_vocab(self.model)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        data, ids = text.encode(), (self.api.llama_token * MAX_TOKENS)()
        count = self.api.llama_tokenize(self.vocab, data, len(data), ids, MAX_TOKENS, False, False)
        return list(ids[:count])

    def run(self, ids: list[int], encode: bool = False) -> None:
        """Compute these tokens, with outputs at all of them."""
        batch = self.api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        code = (self.api.llama_encode if encode else self.api.llama_decode)(self.context, batch)
        self.api.llama_batch_free(batch)
        if code:
            raise UserError(f"llama.cpp cannot compute this file (code {code}).")

    def outputs(self, count: int, width: int, embeddings: bool) -> Array:
        """Return the logits or the hidden states at the last positions computed, (count, width)."""
        read = self.api.llama_get_embeddings_ith if embeddings else self.api.llama_get_logits_ith
        rows = [np.ctypeslib.as_array(read(self.context, i), (width,)).copy() for i in range(count)]
        return np.stack(rows)

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


@torch.no_grad()
def compare_with_llama_cpp(model: Model, path: Path, dtype: str) -> dict[str, Any]:
    """Return the largest difference of an output, its tolerance, and the texts of which llama.cpp makes other ids."""
    config = model.config
    length = min(CHECK_TOKENS, config.max_length or CHECK_TOKENS)
    input_ids, _, _ = example_text(config, 1, length)
    ids = input_ids[0].tolist()
    llama = LlamaCpp(path, length)
    try:
        if config.architecture == "encoder":
            llama.run(ids, encode=True)
            theirs = llama.outputs(length, config.dim, embeddings=True)
            states = model(input_ids=input_ids, output_hidden_states=True).hidden_states
            assert states is not None
            ours = states[-1][0]
        elif config.architecture == "decoder":
            llama.run(ids)
            theirs, ours = (
                llama.outputs(length, config.vocab_size, embeddings=False),
                model(input_ids=input_ids).logits[0],
            )
        else:
            llama.run(ids, encode=True)
            llama.run(ids[: length // 2])
            theirs = llama.outputs(length // 2, config.vocab_size, embeddings=False)
            ours = model(input_ids=input_ids, decoder_input_ids=input_ids[:, : length // 2]).logits[0]
        assert model.tokenizer is not None
        texts = differing_texts(llama, model.tokenizer)
    finally:
        llama.close()
    difference = np.abs(theirs - ours.numpy()).max() / max(1.0, float(ours.abs().max()))
    return {
        "max_difference": float(difference),
        "tolerance": TOLERANCES[dtype],
        "compared_with": "llama.cpp",
        "other_token_ids": texts,
    }


def differing_texts(llama: LlamaCpp, tokenizer: Tokenizer) -> list[str]:
    """Return the texts of `token_check.py` of which llama.cpp makes other ids."""
    return [text for text in (*SCRIPT_TEXTS, *ODD_TEXTS) if llama.tokenize(text) != tokenizer.encode(text)]
