"""Let an n-gram model write on: the same choices as for any other, from its probabilities."""

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
    """Texts that begin with the prompts, as `generate_results` gives them."""
    if generation_config.num_beams > 1:
        raise UserError("An n-gram model has no beam search: leave num_beams out.")
    several = range(generation_config.num_return_sequences)
    return [
        {"prompt": i, **continue_ngram_prompt(model, prompt, generation_config, i * len(several) + k)}
        for i, prompt in enumerate(prompts)
        for k in several
    ]


def continue_ngram_prompt(
    model: NgramModel, prompt: str, generation_config: GenerationConfig, row: int
) -> dict[str, Any]:
    """One text; `row` makes its draws differ from those of others."""
    assert model.tokenizer is not None
    before, end = boundary_tokens(model.tokenizer.vocab)
    given = model.tokenizer.encode(prompt)
    past = LogitsProcessor([[before, *given]], generation_config, [end], model.vocab_size, torch.device("cpu"))
    chooser, ids, logprobs = TokenSampler(past, [row]), list[int](), list[float]()
    text, stop = prompt, None
    for place in range(generation_config.max_new_tokens):
        logp_V = np.log(
            np.maximum(
                model.next_token_probs([before, *given, *ids][-model.order + 1 :] if model.order > 1 else []), 1e-300
            )
        )
        token_B = chooser(torch.from_numpy(logp_V)[None], place)
        past.append(token_B)
        token = int(token_B[0])
        logprobs.append(float(logp_V[token]))
        if token == end:
            break
        ids.append(token)
        text = model.tokenizer.decode([*given, *ids])
        stop = next((text.find(s, len(prompt)) for s in generation_config.stop if s in text[len(prompt) :]), None)
        if stop is not None:
            break
    text = text[:stop]
    finished = stop is not None or len(logprobs) > len(ids)
    new = text.removeprefix(model.tokenizer.decode(given))
    found = {"text": text, "new": new, "tokens": ids, "logprobs": logprobs, "score": sum(logprobs)}
    return {**found, "finished": finished}
