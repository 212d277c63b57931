"""How fast Firth trains beside `transformers`: the same model, text, settings and machine, in the same run.

    python benchmarks/train_speed.py [--workload NAME ...] [--lengths FILE] [--steps N] [--threads N] [--json]
    python benchmarks/train_speed.py --workload NAME --alone [--no-packed] [--without NAME ...] [KEY=VALUE ...]
    python benchmarks/train_speed.py --workload NAME --each [--without NAME ...] [KEY=VALUE[,KEY=VALUE] ...]

A step is forward, loss, backward, clipping and AdamW. Both sides start from the same weights, read the same ids and
take turns, so that whatever else the machine does slows both; the ratio is the median over the turns. Settings are
equal: dropout, float32 (on a GPU bfloat16 autocast and torch.compile), fused AdamW with the same groups, clipping.
`transformers` runs at its best: SDPA where it has it, no cache, and no mask where no token is padding (`--their-mask`
gives it one that forbids nothing: another kernel then, which may be faster). Our packed rows (four documents that do
not see each other) have a line of their own. Memory, on a GPU, is the most that a side had
allocated at any time since before its first step, warm-up included, less what was allocated then: the optimizer and
all that a step needs, beside the weights.

The workload `documents` has texts of the lengths in a file (--lengths, one number of tokens per line). `transformers`
reads one text per row, padded to the longest of its batch (to a multiple of 64, so that there are few shapes); Firth
packs them. Only text tokens count.

`--without` turns off one optimization of our side: `targets` (the head reads every position, not only targets),
`packing` (documents are padded too), `prefetch` (a step builds its own batch; all others are built beforehand),
`pinned` (batches come from pageable memory), `ahead` (each step waits for the one before), `qkv` (queries, keys and
values are three matmuls). KEY=VALUE sets a recipe field (engine.weights=bf16). `--alone` leaves the peer out. `--each`
runs ablations in one process: our side as it is, then with each change alone; ratios are to the first.

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

DOCUMENTS = 4  # in a packed row
SETTINGS = TrainingConfig(learning_rate=1e-4, max_grad_norm=1.0, weight_decay=0.01)
OURS, THEIRS, PACKED = "firth", "transformers", "firth, packed"
WITHOUT: dict[str, dict[str, Any]] = {  # what can be switched off, as changes of our recipe
    "compile": {"compile": False},
    "graphs": {"engine.cuda_graphs": False},
    "fused_attention": {"engine.fused_attention": False},
    "fused_loss": {"engine.fused_loss": False},
    "recompute": {"engine.recompute": False},
    "padding": {"engine.pad_vocabulary": False},
    "residual": {"engine.residual": "float32"},
    "last_layer": {"engine.last_layer": "all"},
    "targets": {},  # these two change our input (`our_batch`)
    "packing": {},
    "prefetch": {},  # and these how it does: batches are made beforehand, sent from pinned memory,
    "pinned": {},
    "ahead": {},  # steps are begun before the last one is done (`waited_for`),
    "qkv": {},  # and queries, keys and values are one product (`plainly`)
}


@dataclass(frozen=True)
class Workload:
    """A model and the batches it learns from; `wanted` is the least ratio that we promise."""

    model: ModelConfig
    objective: Objective
    rows: int
    length: int
    wanted: float | None = None
    lengths: tuple[int, ...] = ()  # of documents, where they are not all alike


ON_CPU: dict[str, Workload] = {
    "bert-4x256": Workload(bert(4, 256, 4), MLM(), rows=64, length=128, wanted=1.3),
    "gpt2-4x256": Workload(gpt2(4, 256, 4, vocab_size=30522), CLM(), rows=8, length=512, wanted=1.0),
    "t5-4x256": Workload(t5(4, 256, 4, 1024), SpanCorruption(), rows=16, length=128),
}
ON_GPU: dict[str, Workload] = {
    "bert-base-128": Workload(get_preset("bert-base"), MLM(), rows=256, length=128, wanted=1.55),
    "bert-base-512": Workload(get_preset("bert-base"), MLM(), rows=64, length=512, wanted=1.7),
    "modernbert-base": Workload(get_preset("modernbert-base"), MLM(), rows=256, length=128),
    "gpt2": Workload(get_preset("gpt2"), CLM(), rows=32, length=1024, wanted=1.47),
    "gpt2-no-dropout": Workload(
        replace(get_preset("gpt2"), dropout=0.0, attention_dropout=0.0), CLM(), rows=32, length=1024, wanted=1.47
    ),
    "llama-3.2-1b": Workload(get_preset("llama-3.2-1b"), CLM(), rows=8, length=2048, wanted=1.15),
    "t5.1.1-base": Workload(get_preset("t5.1.1-base"), SpanCorruption(), rows=48, length=512, wanted=1.8),
    "bart-base": Workload(get_preset("bart-base"), OBJECTIVES["bart"], rows=48, length=512, wanted=1.25),
    "deberta-base": Workload(get_preset("deberta-base"), MLM(), rows=16, length=512, wanted=2.5),
    "deberta-v3-base": Workload(get_preset("deberta-v3-base"), MLM(), rows=16, length=512, wanted=2.5),
    "xlnet-base": Workload(get_preset("xlnet-base"), PermutationLM(), rows=16, length=512, wanted=2.5),
    "albert-base": Workload(get_preset("albert-base"), MLM(), rows=16, length=512, wanted=1.3),
}
DOCUMENTS_OF = Workload(get_preset("bert-base"), MLM(), rows=64, length=512, wanted=2.5)  # the lengths are in a file
WORKLOADS = ON_CPU | ON_GPU


@dataclass(frozen=True)
class Speed:
    """One side's line. `ratio` is to `transformers`, the median over the turns, with the middle half of them."""

    workload: str
    side: str
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    memory: float | None  # GiB


# What is read


def vocabulary(size: int) -> Vocabulary:
    """Special ids first, sentinels last, the rest is text."""
    sentinels = tuple(range(size - 1, size - 101, -1))
    return Vocabulary(size, 0, 1, 2, 3, 4, 5, 6, sentinels, special_ids=(*range(7), *reversed(sentinels)))


def random_rows(workload: Workload, vocab: Vocabulary, step: int, documents: int) -> Rows:
    """Full rows of random text, each with so many documents of equal length in their frames."""
    B, L = workload.rows, workload.objective.source_length(workload.length)
    frame, rng = workload.objective.build_template(vocab), np.random.default_rng(step)
    doc_L = np.arange(L, dtype=np.int32) * documents // L
    begins_L, ends_L = np.diff(doc_L, prepend=-1) > 0, np.diff(doc_L, append=documents) > 0
    tokens_BL, real_L = vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=(B, L))], np.ones(L, bool)
    for edge_L, special in ((begins_L, frame.prefix_ids), (ends_L, frame.suffix_ids)):
        if special:
            tokens_BL[:, edge_L], real_L[edge_L] = special[0], False
    position_L = np.arange(L, dtype=np.int32) - np.flatnonzero(begins_L)[doc_L]
    doc_BL, position_BL, real_BL = (np.tile(a, (B, 1)) for a in (doc_L, position_L, real_L))
    rows = Rows(tokens_BL, doc_BL, position_BL, real_BL, np.arange(step * B, (step + 1) * B))
    last_BL = real_BL & ~np.roll(real_BL, -1, 1)  # of a document; a sentence has about 20 tokens
    return rows._replace(sentence_end=last_BL | (real_BL & (rng.random((B, L)) < 1 / 20)))


def make_batch(workload: Workload, step: int, documents: int = 1) -> Batch:
    """What the objective makes of fresh rows. A row of one document needs nothing that tells documents apart."""
    vocab = vocabulary(workload.model.vocab_size)
    rows = random_rows(workload, vocab, step, documents)
    batch = workload.objective(rows, CounterRNG(0, rows.stream_index), vocab)
    if documents > 1:
        return batch
    return batch._replace(document_ids=None, position_ids=None, decoder_document_ids=None, decoder_position_ids=None)


# Documents of different lengths


def rows_of(pieces: Sequence[Sequence[int]], length: int, objective: Objective, vocab: Vocabulary, seed: int) -> Rows:
    """Rows of random texts of these lengths, one row for each list, in their frames; what is left is padding."""
    frame, rng, B = objective.build_template(vocab), np.random.default_rng(seed), len(pieces)
    tokens_BL, real_BL = np.full((B, length), vocab.pad, dtype=np.int64), np.zeros((B, length), dtype=bool)
    doc_BL, position_BL = np.full((B, length), -1, dtype=np.int32), np.zeros((B, length), dtype=np.int32)
    for b, some in enumerate(pieces):
        at = 0
        for d, n in enumerate(some):
            text = vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=n)]
            whole = np.concatenate([frame.prefix_ids, text, frame.suffix_ids]).astype(np.int64)
            place = slice(at, at + len(whole))
            tokens_BL[b, place], doc_BL[b, place] = whole, d
            position_BL[b, place] = np.arange(len(whole))
            real_BL[b, at + len(frame.prefix_ids) : at + len(frame.prefix_ids) + n] = True
            at += len(whole)
    return Rows(tokens_BL, doc_BL, position_BL, real_BL, np.arange(seed * B, (seed + 1) * B))


@lru_cache
def packed_pieces(lengths: tuple[int, ...], length: int, frame: int) -> list[list[int]]:
    """Which documents, or pieces of long ones, share each of our rows; the rows in a random order."""
    packing = pack_documents(np.array(lengths), length, frame)
    rows = np.split(packing.piece_length, packing.row_first[1:-1])
    return [rows[i].tolist() for i in np.random.default_rng(0).permutation(len(rows))]


@lru_cache
def single_pieces(lengths: tuple[int, ...], length: int, frame: int) -> list[list[int]]:
    """One document, or a piece of a long one, in each row; in a random order."""
    _, length_P = split_documents(np.random.default_rng(0).permutation(np.array(lengths)), length - frame)
    return [[n] for n in length_P.tolist()]


def document_batch(workload: Workload, step: int, packed: bool) -> Batch:
    """The documents of a step: as many as fill our rows, or one in each row, padded to the longest."""
    vocab, objective, B = vocabulary(workload.model.vocab_size), workload.objective, workload.rows
    frame, length = objective.build_template(vocab).num_special_tokens(), workload.length
    found = (packed_pieces if packed else single_pieces)(workload.lengths, length, frame)
    pieces = [found[i % len(found)] for i in range(step * B, (step + 1) * B)]
    if not packed:
        longest = max(n for (n,) in pieces) + frame
        length = min(length, -(-longest // 64) * 64)
    rows = rows_of(pieces, length, objective, vocab, step)
    return objective(rows, CounterRNG(0, rows.stream_index), vocab)


def our_batch(workload: Workload, step: int, without: Sequence[str] = (), documents: int = 1) -> Batch:
    """The input of our side: packed documents and target positions, unless `without` disables them."""
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
    return batch._replace(target_positions=positions_BT.copy(), labels=everywhere(batch))


@contextmanager
def plainly(without: Sequence[str]) -> Iterator[None]:
    """Our side by plainer ways than its own, where these have no switch: no run has a reason to."""
    with ExitStack() as stack:
        if "pinned" in without:
            stack.enter_context(patch("firth.objectives.batch.to_device_async", lambda t, device: t.to(device)))
        if "qkv" in without:
            for attention in (Attention, Float8Attention):
                stack.enter_context(patch.object(attention, "project_rows", three_products))
        yield


def three_products(self: Attention, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """What `Attention.project_rows` gives, each of queries, keys and values by itself."""
    if isinstance(self.qkv, Float8Linear):
        raise SystemExit("--without qkv is for products in bfloat16 or float32: leave fp8 out")
    asks, reads, found = self.qkv_sizes
    edges, bias = (0, asks, asks + reads, asks + reads + found), self.qkv_bias
    parts = [(a, b) for a, b in pairwise(edges) if start <= a and b <= (edges[-1] if stop is None else stop)]
    return torch.cat([F.linear(x, self.qkv.weight[a:b], None if bias is None else bias[a:b]) for a, b in parts], -1)


def everywhere(batch: Batch) -> np.ndarray:
    """A label for every position, IGNORE_INDEX where there is no target."""
    assert batch.target_positions is not None
    labels_BT = np.full_like(batch.input_ids, IGNORE_INDEX)
    row_BK = np.broadcast_to(np.arange(len(labels_BT))[:, None], batch.target_positions.shape)
    used_BK = batch.labels != IGNORE_INDEX
    labels_BT[row_BK[used_BK], batch.target_positions[used_BK]] = batch.labels[used_BK]
    return labels_BT


# The same for both sides


def their_inputs(batch: Batch, mask: bool = False) -> dict[str, np.ndarray]:
    """The same batch as a collator of `transformers` gives it: a label per position, -100 where there is no target.

    `mask` adds one that forbids nothing where no token is padding.
    """
    if mask and batch.document_ids is None:
        return {**their_inputs(batch), "attention_mask": np.ones_like(batch.input_ids)}
    if batch.decoder_input_ids is not None:
        return {"input_ids": batch.input_ids, "decoder_input_ids": batch.decoder_input_ids, "labels": batch.labels}
    if batch.target_positions is None:
        return {"input_ids": batch.input_ids, "labels": batch.input_ids}  # the model shifts them itself
    if batch.attention_rank is not None:  # permutation LM: hidden keys and target positions
        rank_BT = batch.attention_rank
        hidden_BTT = (rank_BT[:, None, :] >= rank_BT[:, :, None]) & (rank_BT[:, None, :] > 0)
        target_BKT = batch.target_positions[:, :, None] == np.arange(rank_BT.shape[1])
        masks = {"perm_mask": hidden_BTT.astype(np.float32), "target_mapping": target_BKT.astype(np.float32)}
        return {"input_ids": batch.input_ids, **masks, "labels": batch.labels}
    seen = {} if batch.document_ids is None else {"attention_mask": (batch.document_ids >= 0).astype(np.int64)}
    return {"input_ids": batch.input_ids, "labels": everywhere(batch), **seen}


# The two sides


def their_model(model: Model) -> Any:
    """The same model in `transformers`, with the same weights."""
    facts = to_hf_config(model.config, None)
    config = transformers.AutoConfig.for_model(**facts, use_cache=False)
    kind = getattr(transformers, facts["architectures"][0])
    try:
        theirs = kind._from_config(config, attn_implementation="sdpa")
    except ValueError:  # it has no fused kernel for this family
        theirs = kind._from_config(config, attn_implementation="eager")
    if isinstance(model.config.head, LMHead) and not model.config.head.tied:
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())  # it ties every head of T5
    missing = theirs.load_state_dict(to_hf_tensors(model), strict=False).missing_keys
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, theirs)]
    assert sizes[0] == sizes[1], f"{sizes} parameters; not filled: {missing}"
    return theirs


def our_step(machine: ComputeConfig, model: Model, settings: TrainingConfig = SETTINGS) -> Callable[[Batch], Tensor]:
    """The step of the real loop."""
    run = TrainingRun(settings, machine, model, batch_fn=lambda step: [])
    runner = build_step_runner(run)
    optimizer = make_optimizer(model, settings)
    return lambda batch: train_step(run, runner, optimizer, [batch], 0, settings.learning_rate)


def waited_for(step: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """The same step, of which the loss is read, as loops do that print it."""

    def wait(batch: Batch) -> Tensor:
        loss = step(batch)
        loss.item()
        return loss

    return wait


def their_step(machine: ComputeConfig, theirs: Any, example: Batch, mask: bool = False) -> Callable[[Batch], Tensor]:
    """The same step as one writes it with a model of `transformers`, in the first of some ways that works.

    Compiled under autocast; with weights in bfloat16 (its DeBERTa cannot do autocast); the same, not compiled.
    """
    if not machine.compile:
        return a_step_of_theirs(machine, theirs, False, mask)
    ways = [(False, True), (True, True), (True, False)]
    for half, compiled in ways[1:] if theirs.config.model_type == "deberta" else ways:  # a minute of trying saved
        step = a_step_of_theirs(machine, theirs.bfloat16() if half else theirs, compiled, mask)
        try:
            step(example)
        except Exception as e:  # whatever its model or the compiler trips over
            way = "weights in bfloat16" if half else "autocast"
            say(f"transformers, {way}: {str(e).strip().splitlines()[0][:100]}")
            torch._dynamo.reset()
        else:
            return step
    raise RuntimeError("no way to run the model of transformers")


def a_step_of_theirs(machine: ComputeConfig, theirs: Any, compiled: bool, mask: bool) -> Callable[[Batch], Tensor]:
    call = torch.compile(theirs) if compiled else theirs
    optimizer = make_optimizer(theirs, SETTINGS)

    def step(batch: Batch) -> Tensor:
        inputs = {name: on_device(array, machine.device) for name, array in their_inputs(batch, mask).items()}
        theirs.train()
        with machine.autocast():
            loss = call(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), SETTINGS.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    t = torch.from_numpy(array)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


@torch.no_grad()
def losses(workload: Workload, machine: ComputeConfig, model: Model, theirs: Any) -> tuple[float, float]:
    """What both sides say to one batch, without dropout and in float32: speed means nothing unless they agree."""
    batch = document_batch(workload, 0, packed=False) if workload.lengths else make_batch(workload, step=0)
    inputs = {name: on_device(array, machine.device) for name, array in their_inputs(batch).items()}
    ours = model.eval().loss(batch.to(machine.device)) / batch.num_targets
    return ours.item(), theirs.eval()(**inputs).loss.item()


# Measuring


def timed(step: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> tuple[float, int]:
    """Seconds for these steps, and their tokens; reading the loss at the end waits for the device."""
    start, read = time.perf_counter(), []
    for batch in batches:
        loss = step(batch)
        read.append(batch)
    loss.item()
    seconds = time.perf_counter() - start
    return seconds, sum(batch.num_tokens for batch in read)


@dataclass
class Memory:
    """What someone has allocated on the device since before the first step, and the most of it at any time by side."""

    device: torch.device
    kept: int = 0
    highest: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watch(self, side: str) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        most = self.kept + torch.cuda.max_memory_allocated() - before
        self.highest[side] = max(self.highest.get(side, 0), most)
        self.kept += torch.cuda.memory_allocated() - before

    def gigabytes(self, side: str) -> float | None:
        return self.highest[side] / 2**30 if side in self.highest else None


@dataclass(frozen=True)
class Side:
    """Who steps, what it reads at a step, and whose memory that is."""

    step: Callable[[Batch], Tensor]
    batch: Callable[[int], Batch]
    memory: Memory


def make_sides(
    name: str,
    workload: Workload,
    machine: ComputeConfig,
    ours: ComputeConfig,
    settings: TrainingConfig,
    alone: bool,
    packed: bool,
    their_mask: bool = False,
    without: Sequence[str] = (),
) -> dict[str, Side]:
    """Both sides with the same weights, which agree on the loss; or our own alone."""
    torch.manual_seed(0)
    model = make_model(with_extras(workload.model, workload.objective.extras))
    theirs = None if alone else their_model(model).to(machine.device)
    model.to(machine.device)
    if theirs is not None:
        mine, others = losses(workload, machine, model, theirs)
        assert abs(mine - others) < 1e-3 * others, f"{name}: a loss of {mine} here and {others} there"
    step, memory = our_step(ours, model, settings), Memory(machine.device)
    step = waited_for(step) if "ahead" in without else step
    sides = {OURS: Side(step, lambda i: our_batch(workload, i, without), memory)}
    if theirs is not None:
        padded = lambda i: document_batch(workload, i, packed=False) if workload.lengths else make_batch(workload, i)  # noqa: E731
        memory_of_theirs = Memory(machine.device)
        with memory_of_theirs.watch(THEIRS):
            their = their_step(machine, theirs, padded(0), their_mask)
        sides[THEIRS] = Side(their, padded, memory_of_theirs)
    if packed and not workload.lengths:
        sides[PACKED] = Side(step, lambda i: our_batch(workload, i, without, DOCUMENTS), memory)
    return sides


def measure(
    name: str,
    workload: Workload,
    machine: ComputeConfig,
    steps: int,
    turn: int,
    warmup: int,
    ours: ComputeConfig | None = None,
    settings: TrainingConfig = SETTINGS,
    alone: bool = False,
    packed: bool = True,
    their_mask: bool = False,
    without: Sequence[str] = (),
) -> list[Speed]:
    """Let the sides take turns of `turn` steps each, `steps` in all after the warm-up; their inputs are made before.

    `ours` and `settings` are what our side runs with where that is not what both do; `without` changes what it reads,
    and how (`prefetch` for both sides).
    """
    sides = make_sides(name, workload, machine, ours or machine, settings, alone, packed, their_mask, without)
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    with progress(name, "turns", (warmup + steps) // turn) as shown, plainly(without):
        for first in range(0, warmup + steps, turn):
            for name_of_side, side in sides.items():
                batches: Iterable[Batch] = map(side.batch, range(first, first + turn))
                if "prefetch" not in without:
                    batches = list(batches)
                with side.memory.watch(name_of_side):
                    seconds, tokens = timed(side.step, batches)
                speeds[name_of_side].append(tokens / seconds)
            shown.advance()
    kept = {side: found[warmup // turn :] for side, found in speeds.items()}
    base = kept[OURS if alone else THEIRS]
    return [speed(name, side, found, base, sides[side].memory.gigabytes(side)) for side, found in kept.items()]


def forget() -> None:
    """Free what one workload has compiled and allocated, before the next."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def speed(name: str, side: str, found: Sequence[float], base: Sequence[float], memory: float | None) -> Speed:
    ratios = [a / b for a, b in zip(found, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Speed(name, side, statistics.median(found), middle, low, high, memory)


def lines(name: str, speeds: Sequence[Speed]) -> list[tuple[str, ...]]:
    """The rows of the table for one workload; what it is stands in the first column, one fact a row."""
    workload = WORKLOADS[name]
    facts = (name, shape(workload), f"wanted: {workload.wanted}" if workload.wanted else "")
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


def shape(workload: Workload) -> str:
    """Rows and tokens of a batch, as 64x128 or 48x(512+114)."""
    if workload.lengths:
        return f"{workload.rows} rows up to {workload.length}"
    batch = make_batch(workload, step=0)
    B, T = batch.input_ids.shape
    return f"{B}x{T}" if batch.decoder_input_ids is None else f"{B}x({T}+{batch.decoder_input_ids.shape[1]})"


UNREAD = (  # fields of a run, of which a step by itself reads nothing
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_length", "max_steps", "minutes"),
    *("ema_decay", "spike_factor", "save_steps", "eval_steps", "logging_steps", "parallel", "seed"),
)


def changed(without: Sequence[str], changes: Sequence[str]) -> TrainingConfig:
    """Our recipe with these changes."""
    found = parse_overrides(changes)
    if odd := [name for name in found if name in UNREAD]:
        raise SystemExit(f"{odd[0]} changes nothing here: a workload has its own rows, and each step stands by itself")
    settings = apply_overrides(SETTINGS, found | {k: v for name in without for k, v in WITHOUT[name].items()})
    settings.check()
    return settings


def one_by_one(
    names: Sequence[str],
    machine: ComputeConfig,
    steps: int,
    turn: int,
    warmup: int,
    without: Sequence[str],
    changes: Sequence[str],
) -> None:
    """Our side as it is, and with each change by itself."""
    ways: dict[str, tuple[TrainingConfig, Sequence[str]]] = {"as it is": (changed([], []), ())}
    ways |= {f"without {name}": (changed([name], []), (name,)) for name in without}
    ways |= {change: (changed([], change.split(",")), ()) for change in changes}
    rows = []
    for name in names:
        base = None
        for way, (settings, left_out) in ways.items():
            start = time.perf_counter()
            sizes, sides = (steps, turn, warmup), (choose_compute(settings), settings)
            (found,) = measure(
                name, WORKLOADS[name], machine, *sizes, *sides, alone=True, packed=False, without=left_out
            )
            base = base or found.tokens_per_second
            ratio, seconds = found.tokens_per_second / base, time.perf_counter() - start
            say(f"{name}, {way}: {found.tokens_per_second:,.0f} ({ratio:.3f}), {seconds:.0f} s in all")
            memory = "" if found.memory is None else f"{found.memory:.1f} GiB"
            rows.append((name, way, f"{found.tokens_per_second:,.0f}", f"{ratio:.3f}", memory))
            forget()
    show_table("Our side", ("workload", "recipe", "tokens/s", "ratio", "memory"), rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names_of_all = [*WORKLOADS, "documents"]
    parser.add_argument("--workload", action="append", choices=names_of_all, help="may be given more than once")
    parser.add_argument("--lengths", help="file of the workload documents: the tokens of one document a line")
    parser.add_argument("--without", action="append", choices=WITHOUT, default=[], help="switch off on our side")
    parser.add_argument("--alone", action="store_true", help="only our side; the ratio is then to its first line")
    parser.add_argument("--no-packed", action="store_true", help="leave out our packed rows, which compile once more")
    parser.add_argument("--their-mask", action="store_true", help="a mask for transformers, which forbids nothing")
    parser.add_argument("--each", action="store_true", help="each change by itself, beside the recipe as it is")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="fields of our recipe: engine.weights=bf16")
    parser.add_argument("--steps", type=int, help="timed steps of each side (20 on a CPU, 60 on a GPU)")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()

    if options.lengths:
        lengths = tuple(int(line) for line in Path(options.lengths).read_text().split())
        WORKLOADS["documents"] = replace(WORKLOADS.get("documents", DOCUMENTS_OF), lengths=lengths)
    if "documents" in (options.workload or []) and "documents" not in WORKLOADS:
        parser.error("--workload documents needs --lengths FILE")
    machine = choose_compute(SETTINGS)
    on_gpu = machine.device.type == "cuda"
    names = options.workload or list(ON_GPU if on_gpu else ON_CPU)
    steps, turn, warmup = options.steps or (60 if on_gpu else 20), 10 if on_gpu else 1, 10 if on_gpu else 2
    turn = min(turn, steps)
    versions = f"firth {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    say(f"{versions}, Python {sys.version.split()[0]}; {machine}, {os.cpu_count()} CPUs")
    mask = "a mask that forbids nothing" if options.their_mask else "no mask"
    say(f"both sides: gradients clipped at 1, fresh inputs every step; transformers with fused AdamW, sdpa, {mask}")

    if options.each:
        one_by_one(names, machine, steps, turn, warmup, options.without, options.changes)
        return
    settings = changed(options.without, options.changes)
    ours = choose_compute(settings)
    if settings != SETTINGS or options.without:
        say(f"our side: {', '.join([*(f'without {name}' for name in options.without), *options.changes])}")

    speeds: dict[str, list[Speed]] = {}
    ways = {"alone": options.alone, "packed": not options.no_packed, "their_mask": options.their_mask}
    ways["without"] = options.without
    for name in names:
        found = measure(name, WORKLOADS[name], machine, steps, turn, warmup, ours, settings, **ways)
        say(f"{name}: " + ", ".join(f"{s.side} {s.tokens_per_second:,.0f} ({s.ratio:.2f})" for s in found))
        speeds[name] = found
        forget()
    columns = ("workload", "side", "tokens/s", "ratio", "middle half", "memory")
    show_table("Training speed", columns, [line for name in names for line in lines(name, speeds[name])])
    if options.json:
        facts = {"versions": versions, "machine": str(machine), "threads": torch.get_num_threads(), "steps": steps}
        facts |= {"without": options.without, "changes": options.changes}
        print(json.dumps(facts | {"speeds": [asdict(s) for found in speeds.values() for s in found]}))


if __name__ == "__main__":
    main()
