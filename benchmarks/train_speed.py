"""Compare training speed with `transformers`: same model, text, settings and machine, in one process.

    python benchmarks/train_speed.py [--workload NAME ...] [--lengths FILE] [--steps N] [--threads N] [--json]
    python benchmarks/train_speed.py --workload NAME --alone [--no-packed] [--without NAME ...] [KEY=VALUE ...]
    python benchmarks/train_speed.py --workload NAME --each [--without NAME ...] [KEY=VALUE[,KEY=VALUE] ...]

A step is forward, loss, backward, gradient clipping and AdamW. Both sides start from the same weights and read the same
ids. They alternate, a few steps each, so that other load on the machine slows both; the ratio is the median over these
turns. Settings are equal: dropout, float32 (on a GPU bfloat16 autocast and torch.compile), fused AdamW with the same
parameter groups. `transformers` runs at its best: SDPA where it has it, no KV cache, and no attention mask where no
token is padding (`--their-mask` passes a mask of ones, which selects another kernel and may be faster). Our packed rows
(four documents that do not attend to each other) have a line of their own. Memory (on a GPU) is the peak allocation of
a side from before its first step, warm-up included, minus the weights.

The workload `documents` has texts of the lengths in a file (--lengths, one number of tokens per line). `transformers`
reads one text per row, padded to the longest of its batch (rounded up to 64, for few shapes); Firth packs them. Only
text tokens count.

`--without` turns off one optimization of our side: `targets` (the head computes every position, not only targets),
`packing` (documents are padded), `prefetch` (a step builds its own batch; otherwise all batches are built before
timing), `pinned` (batches come from pageable memory), `ahead` (each step waits for the previous one), `qkv` (queries,
keys and values are three matmuls). KEY=VALUE sets a recipe field (engine.weights=bf16). `--alone` leaves the peer out.
`--each` runs ablations in one process: our side unchanged, then with each change alone; ratios are to the first.

B rows, L tokens before the noise, T after it, U of the decoder, K targets.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from firth import __version__
from firth.core.console import progress, say, show_table
from firth.models import LMHead, Model, ModelConfig, get_preset, make_model, to_hf_config, with_extras
from firth.models.attention import Attention
from firth.models.fp8.block import Float8Attention
from firth.models.fp8.linear import Float8Linear
from firth.models.hf.convert import to_hf_tensors
from firth.models.presets import bert, gpt2, t5
from firth.objectives import (
    CLM,
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    Batch,
    CounterRNG,
    Objective,
    PermutationLM,
    SpanCorruption,
)
from firth.tokens import Rows, Vocabulary
from firth.tokens.packing import pack_documents, split_documents
from firth.train import ComputeConfig, TrainingConfig, TrainingRun, apply_overrides, choose_compute, parse_overrides
from firth.train.optim import make_optimizer
from firth.train.step import build_step_runner, train_step

DOCUMENTS_PER_ROW = 4
DEFAULT_SETTINGS = TrainingConfig(learning_rate=1e-4, max_grad_norm=1.0, weight_decay=0.01)
OURS, THEIRS, PACKED = "firth", "transformers", "firth, packed"
WITHOUT: dict[str, dict[str, Any]] = {  # optimizations that --without turns off, as changes of our recipe
    "compile": {"compile": False},
    "graphs": {"engine.cuda_graphs": False},
    "fused_attention": {"engine.fused_attention": False},
    "fused_loss": {"engine.fused_loss": False},
    "recompute": {"engine.recompute": False},
    "padding": {"engine.pad_vocabulary": False},
    "residual": {"engine.residual": "float32"},
    "last_layer": {"engine.last_layer": "all"},
    "targets": {},  # these two change our input (see `our_batch`)
    "packing": {},
    "prefetch": {},  # these four have no recipe field (see `measure`, `synchronize_each_step`,
    "pinned": {},  # `disable_optimizations`)
    "ahead": {},
    "qkv": {},
}


@dataclass(frozen=True)
class Workload:
    """A model and its training batches; `target_ratio` is the speedup over `transformers` that we promise."""

    model: ModelConfig
    objective: Objective
    rows: int
    length: int
    target_ratio: float | None = None
    lengths: tuple[int, ...] = ()  # of the documents; empty: all rows are full


ON_CPU: dict[str, Workload] = {
    "bert-4x256": Workload(bert(4, 256, 4), MLM(), rows=64, length=128, target_ratio=1.3),
    "gpt2-4x256": Workload(gpt2(4, 256, 4, vocab_size=30522), CLM(), rows=8, length=512, target_ratio=1.0),
    "t5-4x256": Workload(t5(4, 256, 4, 1024), SpanCorruption(), rows=16, length=128),
}
ON_GPU: dict[str, Workload] = {
    "bert-base-128": Workload(get_preset("bert-base"), MLM(), rows=256, length=128, target_ratio=1.55),
    "bert-base-512": Workload(get_preset("bert-base"), MLM(), rows=64, length=512, target_ratio=1.7),
    "modernbert-base": Workload(get_preset("modernbert-base"), MLM(), rows=256, length=128),
    "gpt2": Workload(get_preset("gpt2"), CLM(), rows=32, length=1024, target_ratio=1.47),
    "gpt2-no-dropout": Workload(
        replace(get_preset("gpt2"), dropout=0.0, attention_dropout=0.0), CLM(), rows=32, length=1024, target_ratio=1.47
    ),
    "llama-3.2-1b": Workload(get_preset("llama-3.2-1b"), CLM(), rows=8, length=2048, target_ratio=1.15),
    "t5.1.1-base": Workload(get_preset("t5.1.1-base"), SpanCorruption(), rows=48, length=512, target_ratio=1.8),
    "bart-base": Workload(get_preset("bart-base"), OBJECTIVES["bart"], rows=48, length=512, target_ratio=1.25),
    "deberta-base": Workload(get_preset("deberta-base"), MLM(), rows=16, length=512, target_ratio=2.5),
    "deberta-v3-base": Workload(get_preset("deberta-v3-base"), MLM(), rows=16, length=512, target_ratio=2.5),
    "xlnet-base": Workload(get_preset("xlnet-base"), PermutationLM(), rows=16, length=512, target_ratio=2.5),
    "albert-base": Workload(get_preset("albert-base"), MLM(), rows=16, length=512, target_ratio=1.3),
}
DOCUMENTS_WORKLOAD = Workload(
    get_preset("bert-base"), MLM(), rows=64, length=512, target_ratio=2.5
)  # --lengths gives the lengths
WORKLOADS = ON_CPU | ON_GPU


@dataclass(frozen=True)
class Speed:
    """Speed of one side. `ratio` is to `transformers`: the median over the turns, with both quartiles."""

    workload: str
    side: str
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    memory: float | None  # GiB


# Batches


def vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary with special ids first and sentinels last."""
    sentinels = tuple(range(size - 1, size - 101, -1))
    return Vocabulary(size, 0, 1, 2, 3, 4, 5, 6, sentinels, special_ids=(*range(7), *reversed(sentinels)))


def random_rows(workload: Workload, vocab: Vocabulary, step: int, documents: int) -> Rows:
    """Return full rows of random text, each with `documents` documents of equal length and their special tokens."""
    B, L = workload.rows, workload.objective.source_length(workload.length)
    template, rng = workload.objective.build_template(vocab), np.random.default_rng(step)
    doc_L = np.arange(L, dtype=np.int32) * documents // L
    starts_L, ends_L = np.diff(doc_L, prepend=-1) > 0, np.diff(doc_L, append=documents) > 0
    tokens_BL, maskable_L = (
        vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=(B, L))],
        np.ones(L, bool),
    )
    for boundary_L, special in ((starts_L, template.prefix_ids), (ends_L, template.suffix_ids)):
        if special:
            tokens_BL[:, boundary_L], maskable_L[boundary_L] = special[0], False
    position_L = np.arange(L, dtype=np.int32) - np.flatnonzero(starts_L)[doc_L]
    doc_BL, position_BL, maskable_BL = (np.tile(a, (B, 1)) for a in (doc_L, position_L, maskable_L))
    rows = Rows(tokens_BL, doc_BL, position_BL, maskable_BL, np.arange(step * B, (step + 1) * B))
    last_BL = maskable_BL & ~np.roll(maskable_BL, -1, 1)  # sentences have about 20 tokens
    return rows._replace(sentence_end=last_BL | (maskable_BL & (rng.random((B, L)) < 1 / 20)))


def make_batch(workload: Workload, step: int, documents: int = 1) -> Batch:
    """Return the batch of a step. Rows of one document need no document ids, and no positions that restart."""
    vocab = vocabulary(workload.model.vocab_size)
    rows = random_rows(workload, vocab, step, documents)
    batch = workload.objective(rows, CounterRNG(0, rows.stream_index), vocab)
    if documents > 1:
        return batch
    return batch._replace(document_ids=None, position_ids=None, decoder_document_ids=None, decoder_position_ids=None)


# Documents of different lengths


def rows_from_lengths(
    pieces: Sequence[Sequence[int]], length: int, objective: Objective, vocab: Vocabulary, seed: int
) -> Rows:
    """Return rows of random texts of these lengths with their special tokens, padded; one row for each list."""
    template, rng, B = objective.build_template(vocab), np.random.default_rng(seed), len(pieces)
    tokens_BL, maskable_BL = np.full((B, length), vocab.pad, dtype=np.int64), np.zeros((B, length), dtype=bool)
    doc_BL, position_BL = np.full((B, length), -1, dtype=np.int32), np.zeros((B, length), dtype=np.int32)
    for b, lengths_of_row in enumerate(pieces):
        start = 0
        for d, n in enumerate(lengths_of_row):
            text = vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=n)]
            input_ids = np.concatenate([template.prefix_ids, text, template.suffix_ids]).astype(np.int64)
            span = slice(start, start + len(input_ids))
            tokens_BL[b, span], doc_BL[b, span] = input_ids, d
            position_BL[b, span] = np.arange(len(input_ids))
            maskable_BL[b, start + len(template.prefix_ids) : start + len(template.prefix_ids) + n] = True
            start += len(input_ids)
    return Rows(tokens_BL, doc_BL, position_BL, maskable_BL, np.arange(seed * B, (seed + 1) * B))


@lru_cache
def packed_pieces(lengths: tuple[int, ...], length: int, num_special: int) -> list[list[int]]:
    """Return the lengths of the documents (or pieces of long ones) that each packed row holds, in random order."""
    packing = pack_documents(np.array(lengths), length, num_special)
    rows = np.split(packing.piece_length, packing.row_first[1:-1])
    return [rows[i].tolist() for i in np.random.default_rng(0).permutation(len(rows))]


@lru_cache
def single_pieces(lengths: tuple[int, ...], length: int, num_special: int) -> list[list[int]]:
    """Return one document, or a piece of a long one, for each row, in random order."""
    _, length_P = split_documents(np.random.default_rng(0).permutation(np.array(lengths)), length - num_special)
    return [[n] for n in length_P.tolist()]


def document_batch(workload: Workload, step: int, packed: bool) -> Batch:
    """Return the documents of a step: packed into rows, or one per row and padded to the longest."""
    vocab, objective, B = vocabulary(workload.model.vocab_size), workload.objective, workload.rows
    num_special, length = objective.build_template(vocab).num_special_tokens(), workload.length
    all_pieces = (packed_pieces if packed else single_pieces)(workload.lengths, length, num_special)
    pieces = [all_pieces[i % len(all_pieces)] for i in range(step * B, (step + 1) * B)]
    if not packed:
        longest = max(n for (n,) in pieces) + num_special
        length = min(length, -(-longest // 64) * 64)
    rows = rows_from_lengths(pieces, length, objective, vocab, step)
    return objective(rows, CounterRNG(0, rows.stream_index), vocab)


def our_batch(workload: Workload, step: int, without: Sequence[str] = (), documents: int = 1) -> Batch:
    """Return the input of our side: packed documents and target positions, unless `without` disables them."""
    if "packing" in without and not workload.lengths:
        raise SystemExit("--without packing is for the workload documents: the rows of the others are full")
    if workload.lengths:
        batch = document_batch(workload, step, "packing" not in without)
    else:
        batch = make_batch(workload, step, documents)
    if "targets" not in without:
        return batch
    if batch.target_positions is None:
        raise SystemExit(
            "--without targets needs an objective with fewer targets than positions: this one predicts every position"
        )
    positions_BT = np.broadcast_to(np.arange(batch.input_ids.shape[1]), batch.input_ids.shape)
    return batch._replace(target_positions=positions_BT.copy(), labels=dense_labels(batch))


@contextmanager
def disable_optimizations(without: Sequence[str]) -> Iterator[None]:
    """Turn off the optimizations of our side that have no recipe field, by patching."""
    with ExitStack() as stack:
        if "pinned" in without:
            stack.enter_context(patch("firth.objectives.batch.to_device_async", lambda t, device: t.to(device)))
        if "qkv" in without:
            for attention in (Attention, Float8Attention):
                stack.enter_context(patch.object(attention, "project_rows", separate_qkv_projections))
        yield


def separate_qkv_projections(self: Attention, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Compute `Attention.project_rows` with separate matmuls for queries, keys and values."""
    if isinstance(self.qkv, Float8Linear):
        raise SystemExit("--without qkv needs matmuls in bfloat16 or float32: leave out fp8")
    query_dim, key_dim, value_dim = self.qkv_sizes
    edges, bias = (0, query_dim, query_dim + key_dim, query_dim + key_dim + value_dim), self.qkv_bias
    parts = [(a, b) for a, b in pairwise(edges) if start <= a and b <= (edges[-1] if stop is None else stop)]
    return torch.cat([F.linear(x, self.qkv.weight[a:b], None if bias is None else bias[a:b]) for a, b in parts], -1)


def dense_labels(batch: Batch) -> np.ndarray:
    """Return a label for every position, IGNORE_INDEX where there is no target."""
    assert batch.target_positions is not None
    labels_BT = np.full_like(batch.input_ids, IGNORE_INDEX)
    row_BK = np.broadcast_to(np.arange(len(labels_BT))[:, None], batch.target_positions.shape)
    used_BK = batch.labels != IGNORE_INDEX
    labels_BT[row_BK[used_BK], batch.target_positions[used_BK]] = batch.labels[used_BK]
    return labels_BT


# Inputs of `transformers`


def their_inputs(batch: Batch, mask: bool = False) -> dict[str, np.ndarray]:
    """Return the batch as a collator of `transformers` does: a label per position, -100 where there is no target.

    `mask` adds an attention mask of ones if no token is padding.
    """
    if mask and batch.document_ids is None:
        return {**their_inputs(batch), "attention_mask": np.ones_like(batch.input_ids)}
    if batch.decoder_input_ids is not None:
        return {"input_ids": batch.input_ids, "decoder_input_ids": batch.decoder_input_ids, "labels": batch.labels}
    if batch.target_positions is None:
        return {"input_ids": batch.input_ids, "labels": batch.input_ids}  # the model shifts the labels
    if batch.attention_rank is not None:  # permutation LM: hidden keys and target positions
        rank_BT = batch.attention_rank
        hidden_BTT = (rank_BT[:, None, :] >= rank_BT[:, :, None]) & (rank_BT[:, None, :] > 0)
        target_BKT = batch.target_positions[:, :, None] == np.arange(rank_BT.shape[1])
        masks = {"perm_mask": hidden_BTT.astype(np.float32), "target_mapping": target_BKT.astype(np.float32)}
        return {"input_ids": batch.input_ids, **masks, "labels": batch.labels}
    mask_inputs = {} if batch.document_ids is None else {"attention_mask": (batch.document_ids >= 0).astype(np.int64)}
    return {"input_ids": batch.input_ids, "labels": dense_labels(batch), **mask_inputs}


# The two sides


def their_model(model: Model) -> Any:
    """Return the same model in `transformers`, with the same weights."""
    facts = to_hf_config(model.config, None)
    config = transformers.AutoConfig.for_model(**facts, use_cache=False)
    model_class = getattr(transformers, facts["architectures"][0])
    try:
        theirs = model_class._from_config(config, attn_implementation="sdpa")
    except ValueError:  # no SDPA for this family
        theirs = model_class._from_config(config, attn_implementation="eager")
    if isinstance(model.config.head, LMHead) and not model.config.head.tied:
        # transformers ties every head of T5.
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    missing_keys = theirs.load_state_dict(to_hf_tensors(model), strict=False).missing_keys
    num_parameters = [sum(p.numel() for p in m.parameters()) for m in (model, theirs)]
    assert num_parameters[0] == num_parameters[1], f"{num_parameters} parameters; missing keys: {missing_keys}"
    return theirs


def our_step(
    compute: ComputeConfig, model: Model, settings: TrainingConfig = DEFAULT_SETTINGS
) -> Callable[[Batch], Tensor]:
    """Return the step of the training loop."""
    run = TrainingRun(settings, compute, model, batch_fn=lambda step: [])
    runner = build_step_runner(run)
    optimizer = make_optimizer(model, settings)
    return lambda batch: train_step(run, runner, optimizer, [batch], 0, settings.learning_rate)


def synchronize_each_step(step: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Return a step that waits for the device by reading its loss."""

    def wait(batch: Batch) -> Tensor:
        loss = step(batch)
        loss.item()
        return loss

    return wait


def their_step(compute: ComputeConfig, theirs: Any, example: Batch, mask: bool = False) -> Callable[[Batch], Tensor]:
    """Return a step for a model of `transformers`, in the first mode that runs.

    Modes: compiled under autocast; compiled with bfloat16 weights (DeBERTa fails under autocast); not compiled.
    """
    if not compute.compile:
        return make_their_step(compute, theirs, False, mask)
    modes = [(False, True), (True, True), (True, False)]
    if theirs.config.model_type == "deberta":
        modes = modes[1:]  # saves a minute of failing compilation
    for bf16_weights, compiled in modes:
        step = make_their_step(compute, theirs.bfloat16() if bf16_weights else theirs, compiled, mask)
        try:
            step(example)
        except Exception as e:  # any error of the model or the compiler
            mode = "bfloat16 weights" if bf16_weights else "autocast"
            say(f"transformers, {mode}: {str(e).strip().splitlines()[0][:100]}")
            torch._dynamo.reset()
        else:
            return step
    raise RuntimeError("the model of transformers runs in none of the modes")


def make_their_step(compute: ComputeConfig, theirs: Any, compiled: bool, mask: bool) -> Callable[[Batch], Tensor]:
    call = torch.compile(theirs) if compiled else theirs
    optimizer = make_optimizer(theirs, DEFAULT_SETTINGS)

    def step(batch: Batch) -> Tensor:
        inputs = {name: on_device(array, compute.device) for name, array in their_inputs(batch, mask).items()}
        theirs.train()
        with compute.autocast():
            loss = call(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), DEFAULT_SETTINGS.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    t = torch.from_numpy(array)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


@torch.no_grad()
def losses_of_both(workload: Workload, compute: ComputeConfig, model: Model, theirs: Any) -> tuple[float, float]:
    """Return the losses of both sides on one batch, without dropout and in float32; they must agree."""
    batch = document_batch(workload, 0, packed=False) if workload.lengths else make_batch(workload, step=0)
    inputs = {name: on_device(array, compute.device) for name, array in their_inputs(batch).items()}
    ours = model.eval().loss(batch.to(compute.device)) / batch.num_targets
    return ours.item(), theirs.eval()(**inputs).loss.item()


# Measuring


def timed(step: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> tuple[float, int]:
    """Return seconds and tokens of these steps; reading the last loss waits for the device."""
    start, batches_done = time.perf_counter(), []
    for batch in batches:
        loss = step(batch)
        batches_done.append(batch)
    loss.item()
    seconds = time.perf_counter() - start
    return seconds, sum(batch.num_tokens for batch in batches_done)


@dataclass
class PeakMemory:
    """Bytes that a side has allocated since before its first step, and the peak by side."""

    device: torch.device
    allocated: int = 0
    peak_by_side: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watch(self, side: str) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        peak = self.allocated + torch.cuda.max_memory_allocated() - before
        self.peak_by_side[side] = max(self.peak_by_side.get(side, 0), peak)
        self.allocated += torch.cuda.memory_allocated() - before

    def gigabytes(self, side: str) -> float | None:
        return self.peak_by_side[side] / 2**30 if side in self.peak_by_side else None


@dataclass(frozen=True)
class Side:
    """The step function, batches and memory of one line of the table."""

    step: Callable[[Batch], Tensor]
    batch: Callable[[int], Batch]
    memory: PeakMemory


def make_sides(
    name: str,
    workload: Workload,
    compute: ComputeConfig,
    ours: ComputeConfig,
    settings: TrainingConfig,
    alone: bool,
    packed: bool,
    their_mask: bool = False,
    without: Sequence[str] = (),
) -> dict[str, Side]:
    """Return both sides with the same weights, after checking that their losses agree; or our side alone."""
    torch.manual_seed(0)
    model = make_model(with_extras(workload.model, workload.objective.extras))
    theirs = None if alone else their_model(model).to(compute.device)
    model.to(compute.device)
    if theirs is not None:
        our_loss, their_loss = losses_of_both(workload, compute, model, theirs)
        assert abs(our_loss - their_loss) < 1e-3 * their_loss, (
            f"{name}: the losses differ: {our_loss} (firth), {their_loss} (transformers)"
        )
    step, memory = our_step(ours, model, settings), PeakMemory(compute.device)
    step = synchronize_each_step(step) if "ahead" in without else step
    sides = {OURS: Side(step, lambda i: our_batch(workload, i, without), memory)}
    if theirs is not None:

        def padded_batch(i: int) -> Batch:
            return document_batch(workload, i, packed=False) if workload.lengths else make_batch(workload, i)

        their_memory = PeakMemory(compute.device)
        with their_memory.watch(THEIRS):
            their_step_fn = their_step(compute, theirs, padded_batch(0), their_mask)
        sides[THEIRS] = Side(their_step_fn, padded_batch, their_memory)
    if packed and not workload.lengths:
        sides[PACKED] = Side(step, lambda i: our_batch(workload, i, without, DOCUMENTS_PER_ROW), memory)
    return sides


def measure(
    name: str,
    workload: Workload,
    compute: ComputeConfig,
    steps: int,
    steps_per_turn: int,
    warmup: int,
    ours: ComputeConfig | None = None,
    settings: TrainingConfig = DEFAULT_SETTINGS,
    alone: bool = False,
    packed: bool = True,
    their_mask: bool = False,
    without: Sequence[str] = (),
) -> list[Speed]:
    """Alternate between the sides, `steps_per_turn` steps each, `steps` in all after the warm-up.

    Batches are built before timing. `ours` and `settings` configure our side where it differs from the default;
    `without` disables optimizations (`prefetch` on both sides).
    """
    sides = make_sides(name, workload, compute, ours or compute, settings, alone, packed, their_mask, without)
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    with progress(name, "turns", (warmup + steps) // steps_per_turn) as bar, disable_optimizations(without):
        for first in range(0, warmup + steps, steps_per_turn):
            for side_name, side in sides.items():
                batches: Iterable[Batch] = map(side.batch, range(first, first + steps_per_turn))
                if "prefetch" not in without:
                    batches = list(batches)
                with side.memory.watch(side_name):
                    seconds, tokens = timed(side.step, batches)
                speeds[side_name].append(tokens / seconds)
            bar.advance()
    counted = {side: side_speeds[warmup // steps_per_turn :] for side, side_speeds in speeds.items()}
    base = counted[OURS if alone else THEIRS]
    return [
        summarize(name, side, side_speeds, base, sides[side].memory.gigabytes(side))
        for side, side_speeds in counted.items()
    ]


def free_memory() -> None:
    """Free compiled code and memory of one workload before the next."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summarize(
    name: str, side: str, speeds_of_side: Sequence[float], base: Sequence[float], memory: float | None
) -> Speed:
    ratios = [a / b for a, b in zip(speeds_of_side, base, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(name, side, statistics.median(speeds_of_side), median, low, high, memory)


def table_rows(name: str, speeds: Sequence[Speed]) -> list[tuple[str, ...]]:
    """Return the table rows of one workload; the first column lists its name, shape and target ratio."""
    workload = WORKLOADS[name]
    facts = (name, batch_shape(workload), f"target: {workload.target_ratio}" if workload.target_ratio else "")
    return [
        (
            fact,
            s.side,
            f"{s.tokens_per_second:,.0f}",
            f"{s.ratio:.2f}",
            f"{s.ratio_low:.2f} to {s.ratio_high:.2f}",
            "" if s.memory is None else f"{s.memory:.1f} GiB",
        )
        for fact, s in zip(facts, speeds, strict=False)
    ]


def batch_shape(workload: Workload) -> str:
    """Return rows x tokens of a batch, as 64x128 or 48x(512+114)."""
    if workload.lengths:
        return f"{workload.rows} rows up to {workload.length}"
    batch = make_batch(workload, step=0)
    B, T = batch.input_ids.shape
    return f"{B}x{T}" if batch.decoder_input_ids is None else f"{B}x({T}+{batch.decoder_input_ids.shape[1]})"


UNUSED_FIELDS = (  # recipe fields that a single step does not read
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_length", "max_steps", "minutes"),
    *("ema_decay", "tail_average", "spike_factor", "save_steps", "eval_steps", "logging_steps", "parallel", "seed"),
)


def make_settings(without: Sequence[str], changes: Sequence[str]) -> TrainingConfig:
    """Return our recipe with these changes."""
    overrides = parse_overrides(changes)
    if unused := [name for name in overrides if name in UNUSED_FIELDS]:
        raise SystemExit(f"{unused[0]} has no effect here: a workload has its own batch, and single steps are timed")
    settings = apply_overrides(
        DEFAULT_SETTINGS, overrides | {k: v for name in without for k, v in WITHOUT[name].items()}
    )
    settings.check()
    return settings


def run_ablations(
    names: Sequence[str],
    compute: ComputeConfig,
    steps: int,
    steps_per_turn: int,
    warmup: int,
    without: Sequence[str],
    changes: Sequence[str],
) -> None:
    """Measure our side unchanged, then with each change alone."""
    modes: dict[str, tuple[TrainingConfig, Sequence[str]]] = {"unchanged": (make_settings([], []), ())}
    modes |= {f"without {name}": (make_settings([name], []), (name,)) for name in without}
    modes |= {change: (make_settings([], change.split(",")), ()) for change in changes}
    rows = []
    for name in names:
        base = None
        for mode, (settings, disabled) in modes.items():
            start = time.perf_counter()
            counts, sides = (steps, steps_per_turn, warmup), (choose_compute(settings), settings)
            (result,) = measure(
                name, WORKLOADS[name], compute, *counts, *sides, alone=True, packed=False, without=disabled
            )
            base = base or result.tokens_per_second
            ratio, seconds = result.tokens_per_second / base, time.perf_counter() - start
            say(f"{name}, {mode}: {result.tokens_per_second:,.0f} ({ratio:.3f}), {seconds:.0f} s")
            memory = "" if result.memory is None else f"{result.memory:.1f} GiB"
            rows.append((name, mode, f"{result.tokens_per_second:,.0f}", f"{ratio:.3f}", memory))
            free_memory()
    show_table("Our side", ("workload", "change", "tokens/s", "ratio", "memory"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_names = [*WORKLOADS, "documents"]
    parser.add_argument(
        "--workload",
        action="append",
        choices=all_names,
        help="a workload; repeat the option for several (all of the device)",
    )
    parser.add_argument("--lengths", help="for the workload documents: file with one document length (tokens) per line")
    parser.add_argument(
        "--without",
        action="append",
        choices=WITHOUT,
        default=[],
        help="turn off an optimization of our side; repeat the option for several",
    )
    parser.add_argument("--alone", action="store_true", help="measure our side only; ratios are to its first line")
    parser.add_argument("--no-packed", action="store_true", help="leave out our packed rows, which compile separately")
    parser.add_argument("--their-mask", action="store_true", help="pass an attention mask of ones to transformers")
    parser.add_argument("--each", action="store_true", help="measure each change alone, beside the unchanged recipe")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="recipe fields of our side, as engine.weights=bf16"
    )
    parser.add_argument("--steps", type=int, help="timed steps of each side (20 on a CPU, 60 on a GPU)")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides (torch's default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()

    if args.lengths:
        lengths = tuple(int(line) for line in Path(args.lengths).read_text().split())
        WORKLOADS["documents"] = replace(WORKLOADS.get("documents", DOCUMENTS_WORKLOAD), lengths=lengths)
    if "documents" in (args.workload or []) and "documents" not in WORKLOADS:
        parser.error("--workload documents needs --lengths FILE")
    compute = choose_compute(DEFAULT_SETTINGS)
    on_gpu = compute.device.type == "cuda"
    names = args.workload or list(ON_GPU if on_gpu else ON_CPU)
    steps, steps_per_turn, warmup = args.steps or (60 if on_gpu else 20), 10 if on_gpu else 1, 10 if on_gpu else 2
    steps_per_turn = min(steps_per_turn, steps)
    versions = f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    say(f"{versions}, Python {sys.version.split()[0]}; {compute}, {os.cpu_count()} CPUs")
    mask = "a mask of ones" if args.their_mask else "no mask"
    say(f"both sides: gradient norm clipped to 1, new inputs every step; transformers with fused AdamW, SDPA, {mask}")

    if args.each:
        run_ablations(names, compute, steps, steps_per_turn, warmup, args.without, args.changes)
        return
    settings = make_settings(args.without, args.changes)
    ours = choose_compute(settings)
    if settings != DEFAULT_SETTINGS or args.without:
        say(f"our side: {', '.join([*(f'without {name}' for name in args.without), *args.changes])}")

    speeds: dict[str, list[Speed]] = {}
    modes = {"alone": args.alone, "packed": not args.no_packed, "their_mask": args.their_mask}
    modes["without"] = args.without
    for name in names:
        results = measure(name, WORKLOADS[name], compute, steps, steps_per_turn, warmup, ours, settings, **modes)
        say(f"{name}: " + ", ".join(f"{s.side} {s.tokens_per_second:,.0f} ({s.ratio:.2f})" for s in results))
        speeds[name] = results
        free_memory()
    columns = ("workload", "side", "tokens/s", "ratio", "quartiles", "memory")
    show_table("Training speed", columns, [line for name in names for line in table_rows(name, speeds[name])])
    if args.json:
        facts = {"versions": versions, "machine": str(compute), "threads": torch.get_num_threads(), "steps": steps}
        facts |= {"without": args.without, "changes": args.changes}
        print(json.dumps(facts | {"speeds": [asdict(s) for results in speeds.values() for s in results]}))


if __name__ == "__main__":
    main()
