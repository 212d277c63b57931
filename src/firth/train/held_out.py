"""The loss on held-out text: the same rows and the same masks in every evaluation, whatever the seed and the batch.

So the losses of two steps, or of two runs of one recipe, differ by the weights alone.
Several processes share the batches, and add up their losses in the order of one process.

A model of masked and causal rows is evaluated on as many of each, whatever share its training masks: causal rows have
several times as many labels, which are harder, so that a mean over other shares would be another number. An
encoder-decoder whose encoder predicts masked tokens is evaluated on span corruption alone, as one without them.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from firth.core.console import warn
from firth.core.errors import UserError
from firth.models import Model
from firth.objectives import Batch, MaskedNextToken, held_out_objective
from firth.tokens import MixedDataset, RowDataset, Tokenizer
from firth.tokens.permutation import permute_indices
from firth.train.compute import ComputeConfig
from firth.train.dataloader import HELD_OUT_SEED, HELD_OUT_STREAMS, make_batch
from firth.train.distributed import SINGLE_PROCESS
from firth.train.recipe import Recipe
from firth.train.step import (
    RecurrentStateDict,
    dropout_seed,
    is_out_of_memory,
    num_rows,
    split_micro_batches,
    with_recurrent_state,
)
from firth.train.step_runner import metric_means, sum_of_means

EVAL_ROWS_SEED = zlib.crc32(b"held-out rows")


def choose_eval_rows(recipe: Recipe, dataset: RowDataset) -> np.ndarray:
    """Return the indices of the held-out rows that every evaluation reads: at most `eval_rows`, sampled at random.

    Held-out rows lie in the order of the text, full rows of long documents first: the first of them would all come from
    the first file. The sample is the same for every seed, so that their losses can be compared. The rows of a stream
    continue each other, and its streams begin all over the text: there the first rows are read.
    """
    count = min(dataset.num_rows, recipe.eval_rows)
    if recipe.order == "stream":
        return np.arange(count)
    return np.sort(permute_indices(np.arange(count), dataset.num_rows, EVAL_ROWS_SEED))


class LossSums(NamedTuple):
    """Summed losses and figures of some rows, and the counts that divide them."""

    totals: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def loss(self) -> float:
        return float(sum_of_means(self.totals, self.counts))

    @property
    def metrics(self) -> dict[str, float]:
        divisors = {name: max(n, 1) for name, n in self.counts.items()}
        figures = {f"eval_{name}": value for name, value in metric_means(self.totals, divisors).items()}
        return {"eval_loss": self.loss, **figures}


class HeldOutLoss:
    """A function model -> mean losses on held-out documents, with the same rows and the same noise every time.

    Processes share the batches, except with `order=stream`, where each batch continues the previous one and every
    process reads all. Losses are summed in batch order, so the result equals that of one process.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: RowDataset,
        tokenizer: Tokenizer,
        compute: ComputeConfig,
        rows: np.ndarray | None = None,
    ) -> None:
        self.recipe = replace(recipe, teacher="", seed=HELD_OUT_SEED)  # the masks of every other model
        self.dataset, self.vocab, self.compute = dataset, tokenizer.vocab, compute
        self.rows, self.halvings = choose_eval_rows(recipe, dataset) if rows is None else rows, 0
        self.dist_context = compute.dist_context if recipe.order == "packed" else SINGLE_PROCESS

    def __call__(self, model: Model) -> dict[str, float]:
        return self.sums(model).metrics

    @torch.no_grad()
    def sums(self, model: Model) -> LossSums:
        model.eval()
        size, rank, world_size = self.batch_size, self.dist_context.rank, self.dist_context.world_size
        num_batches = -(-len(self.rows) // size)
        losses: dict[str, float] = {}
        counts: Counter[str] = Counter()
        left: list[RecurrentStateDict] = []
        for first_index in range(0, num_batches, world_size):
            # A process without a batch of its own repeats the last: collectives inside the model need all processes.
            index = min(first_index + rank, num_batches - 1)
            first, is_own = index * size, index == first_index + rank
            rows = self.rows[first : first + size]
            batch = make_batch(self.recipe, self.dataset, rows, self.vocab, step=0, progress=1.0)
            torch.manual_seed(dropout_seed(HELD_OUT_SEED, first, 0))  # for models that sample tokens (ELECTRA)
            with self.compute.autocast(), with_recurrent_state(model, batch, left.pop() if left else {}, 0, left):
                parts = self.batch_losses(model, batch)
            indices = range(first_index, min(first_index + world_size, num_batches))
            losses |= {f"{name}/{i}": 0.0 for name in parts for i in indices}
            if is_own:
                losses |= {f"{name}/{index}": part.item() for name, part in parts.items()}
            counts.update({name: n * is_own for name, n in batch.loss_counts.items()})
        self.compute.dist_context.reshard(model)
        totals: dict[str, float] = defaultdict(float)
        for key, value in self.dist_context.all_reduce_sum(losses).items():
            totals[key.rpartition("/")[0]] += value
        return LossSums(totals, {name: int(n) for name, n in self.dist_context.all_reduce_sum(counts).items()})

    @property
    def batch_size(self) -> int:
        is_stream = self.recipe.order == "stream"
        return HELD_OUT_STREAMS if is_stream else self.recipe.per_device_train_batch_size

    def batch_losses(self, model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the summed losses of a batch; out of memory halves it, unless its rows must stay together."""
        while True:
            try:
                pieces = split_micro_batches([batch], self.halvings)
                parts = [model.losses(rows.to(self.compute.device), with_metrics=True) for rows in pieces]
                return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
            except RuntimeError as e:
                if not is_out_of_memory(e):
                    raise
            must_not_split = (
                batch.reset_state is not None or batch.group_ids is not None or self.compute.dist_context.is_sharded
            )
            if must_not_split or num_rows(batch) <= 2**self.halvings:
                less = "lower --per-device-train-batch-size, or shorten --max-seq-length"
                raise UserError(f"Out of memory in an evaluation: {less}.")
            self.halvings += 1
            rows = -(-self.batch_size // 2**self.halvings)
            warn(f"out of memory: evaluations use batches of {rows} rows from here on")
            if self.compute.device.type == "cuda":
                torch.cuda.empty_cache()


class MaskedAndCausalLoss:
    """A function model -> mean losses with every second held-out row masked, and of masked and causal rows apart."""

    def __init__(self, recipe: Recipe, dataset: RowDataset, tokenizer: Tokenizer, compute: ComputeConfig) -> None:
        assert isinstance(recipe.objective, MaskedNextToken)
        rows, self.parts = choose_eval_rows(recipe, dataset), dict[str, HeldOutLoss]()
        for first, (name, masked_share) in enumerate((("masked", 1.0), ("causal", 0.0))):
            objective = replace(recipe.objective, masked_share=masked_share)
            if len(own := rows[first::2]):
                part_recipe = replace(recipe, objective=objective)
                self.parts[name] = HeldOutLoss(part_recipe, dataset, tokenizer, compute, own)

    def __call__(self, model: Model) -> dict[str, float]:
        sums = {name: part.sums(model) for name, part in self.parts.items()}
        totals, counts = defaultdict[str, float](float), Counter[str]()
        for part in sums.values():
            counts.update(part.counts)
            for name, total in part.totals.items():
                totals[name] += total
        return LossSums(totals, counts).metrics | {f"eval_{name}_loss": part.loss for name, part in sums.items()}


def make_evaluation(
    recipe: Recipe, dataset: RowDataset, tokenizer: Tokenizer, compute: ComputeConfig
) -> Callable[[Model], dict[str, float]]:
    """Return the function model -> held-out losses; of a mix also those of each source, as `eval_loss/SOURCE`.

    The sources share `eval_rows` once more, so that an evaluation of a mix takes about twice as long.
    """
    recipe = replace(recipe, objective=held_out_objective(recipe.objective))
    has_two_kinds = isinstance(recipe.objective, MaskedNextToken) and recipe.objective.has_both_kinds
    make = MaskedAndCausalLoss if has_two_kinds and recipe.order == "packed" else HeldOutLoss
    mixed = make(recipe, dataset, tokenizer, compute)
    if not isinstance(dataset, MixedDataset):
        return mixed
    source_recipe = replace(recipe, eval_rows=-(-recipe.eval_rows // len(dataset.datasets)))
    by_source = {
        name: make(source_recipe, source, tokenizer, compute)
        for name, source in zip(dataset.source_names, dataset.datasets, strict=True)
    }

    def evaluate(model: Model) -> dict[str, float]:
        found = mixed(model)
        for source, loss_fn in by_source.items():
            found |= {f"{name}/{source}": value for name, value in loss_fn(model).items()}
        return found

    return evaluate
