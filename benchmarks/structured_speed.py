"""What structured output costs: tokens per second with a JSON schema, beside free text of the same model.

    python benchmarks/structured_speed.py --model gpt2-small --tokens 64

Both sides write the same number of tokens. The schema is a list of records that never ends by itself, so every step
computes a mask. The two sides take turns, and the median of the turns counts. `cpu_slower_by_percent` compares the CPU
time of the process, which other programs on the machine disturb less. `host_us` are the microseconds of CPU time that
the grammar takes for one token, on a walk over permitted tokens drawn at random: the mask, and accepting the token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from firth.generate import GenerationConfig, generate_ids
from firth.generate.constraint import MaskRequest, TokenMasks, make_constraint, unpack_masks
from firth.generate.grammar import read_grammar
from firth.models import Model, get_eos_token_ids, make_model
from firth.models.presets import get_preset
from firth.text.python_docs import make_pydocs_examples
from firth.tokens import Tokenizer, load_tokenizer, train_tokenizer

RECORDS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    },
}


def measure(model: Model, prompts: list[list[int]], num_tokens: int, turns: int) -> dict[str, Any]:
    """Return the tokens per second of both sides, and the share of time that the schema adds."""
    free = GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, temperature=1.0)
    sides = {"free": free, "schema": replace(free, json_schema=RECORDS)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):  # the first one warms up
        for name, config in sides.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            written = generate_ids(model, prompts, generation_config=replace(config, seed=turn))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
            assert all(len(ids) == num_tokens for ids in written)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu_seconds.items()}
    return {
        "tokens_per_second": {name: round(len(prompts) * num_tokens / value, 1) for name, value in medians.items()},
        "slower_by_percent": round(100 * (medians["schema"] / medians["free"] - 1), 2),
        "cpu_slower_by_percent": round(100 * (cpu_medians["schema"] / cpu_medians["free"] - 1), 2),
    }


def measure_host(tokenizer: Tokenizer, eos_ids: tuple[int, ...], num_walks: int = 10) -> dict[str, dict[str, float]]:
    """Return the microseconds of CPU time per token of the mask, and of accepting the token."""
    grammar = read_grammar(GenerationConfig(json_schema=RECORDS))
    assert grammar is not None
    constraint, rng = make_constraint(grammar, tokenizer, eos_ids, True), np.random.default_rng(0)
    masks = TokenMasks(np.zeros((1, constraint.vocabulary.num_words), np.uint32))
    nanoseconds: dict[str, list[int]] = {"mask": [], "accept": []}
    for _ in range(num_walks):
        row = constraint.start_row()
        for _ in range(200):
            start = time.thread_time_ns()
            masks.write([MaskRequest(0, row)])
            nanoseconds["mask"].append(time.thread_time_ns() - start)
            token = int(rng.choice(unpack_masks(masks.permitted_BW, tokenizer.vocab.size)[0].nonzero()[0]))
            start = time.thread_time_ns()
            row.accept(token)
            nanoseconds["accept"].append(time.thread_time_ns() - start)
    return {
        name: {f"p{p}": round(float(np.percentile(values, p)) / 1e3, 1) for p in (50, 98)}
        | {"mean": round(statistics.mean(values) / 1e3, 1)}
        for name, values in nanoseconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-small", help="a preset; its weights stay random")
    parser.add_argument("--tokenizer", help="a folder; default: byte-level BPE, trained on the built-in corpus")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--kind", default="byte-bpe")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
    else:
        texts = [example.texts[0] for example in make_pydocs_examples("classify", "train")]
        records = ['{"name": "Ada", "age": 36, "email": "a@b.example", "tags": ["red", "green", "blue"]}'] * 100
        tokenizer = train_tokenizer([*texts, *records], args.kind, args.vocab_size)
    torch.manual_seed(0)
    model = make_model(replace(get_preset(args.model), vocab_size=tokenizer.vocab.size)).eval()
    model.tokenizer = tokenizer
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    prompts = [tokenizer.encode("A list of persons:")] * args.batch_size
    facts: dict[str, Any] = {"model": args.model, "vocabulary": tokenizer.vocab.size, "batch_size": args.batch_size}
    facts["host_us"] = measure_host(tokenizer, get_eos_token_ids(model, tokenizer.vocab))
    print(json.dumps({**facts, **measure(model, prompts, args.tokens, args.turns)}))


if __name__ == "__main__":
    main()
