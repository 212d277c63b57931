"""Compare generation speed with `transformers`: same weights, prompts and number of new tokens, in one process.

    python benchmarks/generate_speed.py [--workload NAME ...] [--repeats N] [--tokens N] [--threads N]
        [--sample] [--separate] [--profile] [--json]

Both sides decode greedily from prompts of equal length, always the same number of tokens; with `--sample` they draw
tokens at a temperature of 0.8, of the 50 likeliest and of 90% of the probability. They alternate, so that
other load on the machine slows both; the reported ratio is the median over the repeats. On a GPU the weights are in
bfloat16 and `transformers` has its static KV cache, which compiles the step; on a CPU float32 and the dynamic cache,
which is faster there. Repeats that compile or capture CUDA graphs are not counted. In float32 both sides must generate
the same tokens; otherwise nothing is measured. `--separate` times our side of all workloads first, where the machine
does nothing else. `--profile` shows the phases of our side, and its kernels.

B rows, T tokens of a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers

from firth import __version__
from firth.core.console import format_count, progress, say, show_table
from firth.generate import GenerationConfig, generate_ids
from firth.generate.device_decode import kept_decodes
from firth.models import ForcedTokens, Model, ModelConfig, get_preset, make_model, to_hf_config
from firth.models.hf.convert import to_hf_tensors
from firth.models.presets import gpt2, llama
from firth.tokens import Vocabulary

OURS, THEIRS = "firth", "transformers"
CHECKED_ROWS, CHECKED_TOKENS = 4, 24  # few: in thousands of choices two tokens may be equally likely
PROFILED_STEPS = 64
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
BART_START_ID = 2
GenerateFn = Callable[[np.ndarray], list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """A model, and the number and length of its prompts."""

    model: ModelConfig
    batch_size: int
    prompt_length: int = 32


ON_CPU: dict[str, Workload] = {
    "gpt2-4x256, 1 row": Workload(gpt2(4, 256, 4), batch_size=1),
    "gpt2-4x256, 64 rows": Workload(gpt2(4, 256, 4), batch_size=64),
}
ON_GPU: dict[str, Workload] = {
    "gpt2, 1 row": Workload(get_preset("gpt2"), batch_size=1, prompt_length=128),
    "gpt2, 64 rows": Workload(get_preset("gpt2"), batch_size=64, prompt_length=128),
    "llama-12x768, 1 row": Workload(llama(12, 768, 12, 2048, num_kv_heads=4), batch_size=1, prompt_length=128),
    "llama-12x768, 64 rows": Workload(llama(12, 768, 12, 2048, num_kv_heads=4), batch_size=64, prompt_length=128),
}
ENCODER_DECODERS: dict[str, Workload] = {
    f"{name}, {rows} row{'s' * (rows > 1)}": Workload(get_preset(name), batch_size=rows, prompt_length=128)
    for name in ("t5-base", "bart-base")
    for rows in (1, 64)
}
WORKLOADS = ON_CPU | ON_GPU | ENCODER_DECODERS


@dataclass(frozen=True)
class Speed:
    """Speed of one side. `ratio` is to `transformers`: the median over the repeats, with both quartiles."""

    workload: str
    side: str
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True)
class NoEosTokenizer:
    """A vocabulary whose EOS id is outside of the logits, so that generation never stops early."""

    vocab: Vocabulary


def make_tokenizer(size: int) -> Any:
    return NoEosTokenizer(Vocabulary(size, 0, None, None, size, 1, BART_START_ID, None, (), special_ids=(0,)))


def random_prompts(workload: Workload, repeat: int) -> np.ndarray:
    """(B, T)"""
    return np.random.default_rng(repeat).integers(
        1, workload.model.vocab_size, size=(workload.batch_size, workload.prompt_length)
    )


# The two sides


def make_sides(workload: Workload, device: torch.device) -> tuple[Model, Any]:
    """Return our model, and the same weights in `transformers`; float32."""
    torch.manual_seed(0)
    model = make_model(workload.model).eval()
    facts = to_hf_config(workload.model, None)
    config = transformers.AutoConfig.for_model(**facts)
    theirs = getattr(transformers, facts["architectures"][0])._from_config(config, attn_implementation="sdpa")
    theirs.load_state_dict(to_hf_tensors(model), strict=False)
    model.tokenizer = make_tokenizer(workload.model.vocab_size)
    model.eos_token_ids, model.forced_tokens = (workload.model.vocab_size,), ForcedTokens()
    return model.to(device), theirs.eval().to(device)


def our_generate_fn(model: Model, tokens: int, choice: dict[str, Any] = GREEDY) -> GenerateFn:
    config = GenerationConfig(**{name: value for name, value in choice.items() if name != "do_sample"})
    return lambda prompts: generate_ids(model, prompts.tolist(), tokens, config)


def their_generate_fn(
    theirs: Any, tokens: int, device: torch.device, static: bool = True, choice: dict[str, Any] = GREEDY
) -> GenerateFn:
    settings = choice | dict(max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, eos_token_id=None)
    is_seq2seq = theirs.config.is_encoder_decoder
    if device.type == "cuda" and static:
        settings["cache_implementation"] = "static"
    generation = theirs.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    if is_seq2seq:
        settings["decoder_start_token_id"] = BART_START_ID if theirs.config.model_type == "bart" else 0

    def generate_fn(prompts: np.ndarray) -> list[list[int]]:
        input_ids = torch.from_numpy(prompts).to(device)
        out = theirs.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)
        return out[:, 1 if is_seq2seq else input_ids.shape[1] :].tolist()

    return generate_fn


# Measuring


def check_same_tokens(name: str, workload: Workload, model: Model, theirs: Any, device: torch.device) -> None:
    prompts = random_prompts(workload, 0)[:CHECKED_ROWS]
    ours = our_generate_fn(model, CHECKED_TOKENS)(prompts)
    if ours != their_generate_fn(theirs, CHECKED_TOKENS, device, static=False)(prompts):
        raise SystemExit(f"{name}: the two sides generate different tokens, so their speeds cannot be compared.")


def time_repeat(generate_fn: GenerateFn, workload: Workload, repeat: int, tokens: int) -> float:
    """Return the seconds of one call."""
    prompts = random_prompts(workload, repeat)
    start = time.perf_counter()
    generated = generate_fn(prompts)
    seconds = time.perf_counter() - start
    assert all(len(ids) == tokens for ids in generated)
    return seconds


def measure(
    name: str,
    workload: Workload,
    device: torch.device,
    repeats: int,
    tokens: int,
    warmup: int,
    profiles: bool = False,
    choice: dict[str, Any] = GREEDY,
) -> list[Speed]:
    """Check that both sides generate the same tokens, then time them in alternation."""
    model, theirs = make_sides(workload, device)
    check_same_tokens(name, workload, model, theirs, device)
    if device.type == "cuda":
        model, theirs = model.bfloat16(), theirs.bfloat16()
    sides = {
        OURS: our_generate_fn(model, tokens, choice),
        THEIRS: their_generate_fn(theirs, tokens, device, choice=choice),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with progress(name, "repeats", warmup + repeats) as bar:
        for repeat in range(warmup + repeats):
            for side, generate_fn in sides.items():
                seconds[side].append(time_repeat(generate_fn, workload, repeat, tokens))
            bar.advance()
    if profiles:
        show_profile(name, model, tokens, choice, random_prompts(workload, 0))
    return summarize_sides(name, workload, tokens, seconds, warmup)


def measure_separately(
    names: Sequence[str],
    device: torch.device,
    repeats: int,
    tokens: int,
    warmup: int,
    profiles: bool,
    choice: dict[str, Any],
) -> list[Speed]:
    """Time our side of all workloads, then the other; print each as soon as it is known."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in names}

    def time_side(name: str, side: str, generate_fn: GenerateFn) -> None:
        workload = WORKLOADS[name]
        times = [time_repeat(generate_fn, workload, repeat, tokens) for repeat in range(warmup + repeats)]
        seconds[name][side], median = times, statistics.median(times[warmup:])
        speed = workload.batch_size * tokens / median
        say(f"{name}, {side}: {speed:,.0f} tokens/s (first call {times[0]:.2f} s, then {median:.4f} s)")

    for name in names:
        model, _ = make_sides(WORKLOADS[name], device)
        model = model.bfloat16() if device.type == "cuda" else model
        time_side(name, OURS, our_generate_fn(model, tokens, choice))
        if profiles:
            show_profile(name, model, tokens, choice, random_prompts(WORKLOADS[name], 0))
    for name in names:
        model, theirs = make_sides(WORKLOADS[name], device)
        check_same_tokens(name, WORKLOADS[name], model, theirs, device)
        theirs = theirs.bfloat16() if device.type == "cuda" else theirs
        time_side(name, THEIRS, their_generate_fn(theirs, tokens, device, choice=choice))
    return [s for name in names for s in summarize_sides(name, WORKLOADS[name], tokens, seconds[name], warmup)]


def summarize_sides(
    name: str, workload: Workload, tokens: int, seconds: dict[str, list[float]], warmup: int
) -> list[Speed]:
    timed = {side: times[warmup:] for side, times in seconds.items()}
    return [summarize(name, side, workload.batch_size * tokens, times, timed[THEIRS]) for side, times in timed.items()]


def show_profile(name: str, model: Model, tokens: int, choice: dict[str, Any], prompts: np.ndarray) -> None:
    """Print the time of the prompt, the time of a decode step on the GPU, and the kernels of a step."""
    start = time.perf_counter()
    our_generate_fn(model, 1, choice)(prompts)
    first = time.perf_counter() - start
    our_generate_fn(model, tokens, choice)(prompts)
    decode = kept_decodes[model]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    decode.run(PROFILED_STEPS, True)
    end.record()
    torch.cuda.synchronize()
    say(f"prompt and one token {first:.4f} s; a step {begin.elapsed_time(end) / PROFILED_STEPS * 1000:.1f} us")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        decode.run(PROFILED_STEPS, True)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    rows = [
        (e.key[:70], f"{e.count / PROFILED_STEPS:.1f}", f"{e.self_device_time_total / PROFILED_STEPS:.1f}")
        for e in events
        if e.self_device_time_total
    ]
    total = sum(e.self_device_time_total for e in events) / PROFILED_STEPS
    table = [*rows[:34], ("all", f"{sum(e.count for e in events) / PROFILED_STEPS:.1f}", f"{total:.1f}")]
    show_table(f"One step of {name}", ("kernel", "launches", "us"), table)


def summarize(name: str, side: str, tokens: int, times: Sequence[float], theirs: Sequence[float]) -> Speed:
    ratios = [b / a for a, b in zip(times, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(name, side, tokens / statistics.median(times), median, low, high)


def table_row(s: Speed) -> tuple[str, ...]:
    quartiles = f"{s.ratio_low:.2f} to {s.ratio_high:.2f}"
    return s.workload, s.side, f"{s.tokens_per_second:,.0f}", f"{s.ratio:.2f}", quartiles


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload",
        action="append",
        choices=WORKLOADS,
        help="a workload; repeat the option for several (all of the device)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side (5)")
    parser.add_argument("--tokens", type=int, help="new tokens per row (64 on a CPU, 256 on a GPU)")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides (torch's default)")
    parser.add_argument("--sample", action="store_true", help="draw tokens, instead of taking the likeliest")
    parser.add_argument("--separate", action="store_true", help="time our side of all workloads first")
    parser.add_argument("--profile", action="store_true", help="show where our time goes (GPU)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    names, tokens = args.workload or list(ON_GPU if on_gpu else ON_CPU), args.tokens or (256 if on_gpu else 64)
    versions = f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    machine = torch.cuda.get_device_name() if on_gpu else format_count(torch.get_num_threads(), "CPU thread")
    say(f"{versions}, Python {sys.version.split()[0]}; {machine}, {os.cpu_count()} CPUs")
    how = "sampled by temperature, top-k and top-p" if args.sample else "greedy"
    say(f"both sides: {tokens} new tokens per row, {how}; transformers with SDPA")

    warmup, profiles = 2 if on_gpu else 1, args.profile and on_gpu
    settings = (device, args.repeats, tokens, warmup, profiles, SAMPLED if args.sample else GREEDY)
    speeds = (
        measure_separately(names, *settings)
        if args.separate
        else [s for name in names for s in measure(name, WORKLOADS[name], *settings)]
    )
    show_table("Generation speed", ("workload", "side", "tokens/s", "ratio", "quartiles"), map(table_row, speeds))
    if args.json:
        facts = {"versions": versions, "machine": machine, "threads": torch.get_num_threads(), "tokens": tokens}
        print(json.dumps(facts | {"repeats": args.repeats, "speeds": [asdict(s) for s in speeds]}))


if __name__ == "__main__":
    main()
