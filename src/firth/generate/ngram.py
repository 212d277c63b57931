"""Let an n-gram model write on: the same choices as for any other, from its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from firth.errors import UserError
from firth.generate.choose import Chooser, Past
from firth.generate.decoding import Decoding
from firth.models.ngram import Ngram, frame_of


def write_ngrams(model: Ngram, prompts: Sequence[str], decoding: Decoding) -> list[dict[str, Any]]:
    """Texts that begin with the prompts, as `generate_results` gives them."""
    if decoding.num_beams > 1:
        raise UserError("An n-gram model has no beam search: leave num_beams out.")
    several = range(decoding.num_return_sequences)
    return [
        {"prompt": i, **write_on(model, prompt, decoding, i * len(several) + k)}
        for i, prompt in enumerate(prompts)
        for k in several
    ]


def write_on(model: Ngram, prompt: str, decoding: Decoding, row: int) -> dict[str, Any]:
    """One text; `row` makes its draws differ from those of others."""
    assert model.tokenizer is not None
    before, end = frame_of(model.tokenizer.vocab)
    given = model.tokenizer.encode(prompt)
    past = Past([[before, *given]], decoding, [end], model.vocab_size, torch.device("cpu"))
    chooser, ids, logprobs = Chooser(past, [row]), list[int](), list[float]()
    text, stop = prompt, None
    for place in range(decoding.max_new_tokens):
        logp_V = np.log(
            np.maximum(model.next([before, *given, *ids][-model.order + 1 :] if model.order > 1 else []), 1e-300)
        )
        token_B = chooser(torch.from_numpy(logp_V)[None], place)
        past.add(token_B)
        token = int(token_B[0])
        logprobs.append(float(logp_V[token]))
        if token == end:
            break
        ids.append(token)
        text = model.tokenizer.decode([*given, *ids])
        stop = next((text.find(s, len(prompt)) for s in decoding.stop if s in text[len(prompt) :]), None)
        if stop is not None:
            break
    text = text[:stop]
    finished = stop is not None or len(logprobs) > len(ids)
    new = text.removeprefix(model.tokenizer.decode(given))
    found = {"text": text, "new": new, "tokens": ids, "logprobs": logprobs, "score": sum(logprobs)}
    return {**found, "finished": finished}
