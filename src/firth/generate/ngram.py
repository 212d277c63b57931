"""Generate text with an n-gram model, with the samplers of neural models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from firth.core.errors import UserError
from firth.generate.config import GenerationConfig
from firth.generate.sampling import LogitsProcessor, TokenSampler
from firth.static.ngram import NgramModel, boundary_tokens


def generate_ngram_results(
    model: NgramModel, prompts: Sequence[str], generation_config: GenerationConfig
) -> list[dict[str, Any]]:
    """Return the results of all prompts, in the form of `generate_results`."""
    if generation_config.num_beams > 1:
        raise UserError("n-gram models do not support beam search: set num_beams=1.")
    if generation_config.constraint:
        raise UserError(f"n-gram models do not support {generation_config.constraint}. Use a decoder such as gpt2.")
    num = generation_config.num_return_sequences
    return [
        {"prompt": i, **continue_ngram_prompt(model, prompt, generation_config, i * num + k)}
        for i, prompt in enumerate(prompts)
        for k in range(num)
    ]


def continue_ngram_prompt(
    model: NgramModel, prompt: str, generation_config: GenerationConfig, row: int
) -> dict[str, Any]:
    """Generate one text; `row` selects its random stream."""
    assert model.tokenizer is not None
    before, end = boundary_tokens(model.tokenizer.vocab)
    prompt_ids = model.tokenizer.encode(prompt)
    processor = LogitsProcessor(
        [[before, *prompt_ids]], generation_config, [end], model.vocab_size, torch.device("cpu")
    )
    sampler, ids, logprobs = TokenSampler(processor, [row]), list[int](), list[float]()
    text, stop = prompt, None
    for step in range(generation_config.max_new_tokens):
        logp_V = np.log(
            np.maximum(
                model.next_token_probs([before, *prompt_ids, *ids][-model.order + 1 :] if model.order > 1 else []),
                1e-300,
            )
        )
        token_B = sampler(torch.from_numpy(logp_V)[None], step)
        processor.append(token_B)
        token = int(token_B[0])
        logprobs.append(float(logp_V[token]))
        if token == end:
            break
        ids.append(token)
        text = model.tokenizer.decode([*prompt_ids, *ids])
        stop = next((text.find(s, len(prompt)) for s in generation_config.stop if s in text[len(prompt) :]), None)
        if stop is not None:
            break
    text = text[:stop]
    finished = stop is not None or len(logprobs) > len(ids)
    new = text.removeprefix(model.tokenizer.decode(prompt_ids))
    result = {"text": text, "new": new, "tokens": ids, "logprobs": logprobs, "score": sum(logprobs)}
    return {**result, "finished": finished}
