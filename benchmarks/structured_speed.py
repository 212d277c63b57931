"""What structured output costs: tokens per second with a JSON schema, beside free text of the same model.

    python benchmarks/structured_speed.py --model gpt2-small --tokens 64

Both sides write the same number of tokens. The schema is a list of records that never ends by itself, so every step
computes a mask. The two sides take turns, and the median of the turns counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from firth.generate import GenerationConfig, generate_ids
from firth.models import Model, make_model
from firth.models.presets import get_preset
from firth.text.python_docs import make_pydocs_examples
from firth.tokens import load_tokenizer, train_tokenizer

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
    sides, seconds = {"free": free, "schema": replace(free, json_schema=RECORDS)}, {"free": [], "schema": []}
    for turn in range(turns + 1):  # the first one warms up
        for name, config in sides.items():
            start = time.perf_counter()
            written = generate_ids(model, prompts, generation_config=replace(config, seed=turn))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            assert all(len(ids) == num_tokens for ids in written)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    speed = {name: round(len(prompts) * num_tokens / value, 1) for name, value in medians.items()}
    return {"tokens_per_second": speed, "slower_by_percent": round(100 * (medians["schema"] / medians["free"] - 1), 2)}


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
    facts = {"model": args.model, "vocabulary": tokenizer.vocab.size, "batch_size": args.batch_size}
    print(json.dumps({**facts, **measure(model, prompts, args.tokens, args.turns)}))


if __name__ == "__main__":
    main()
