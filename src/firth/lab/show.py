"""What a model will read and predict, before any training: the first rows of a run, made by the code of training.

Shapes: B rows, L positions of the source row, T of the model's input, U of the decoder, K target slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import numpy as np

from firth.core.serialization import to_dict
from firth.lab.show_row import (
    BatchTrace,
    RowView,
    build_row_view,
    infilled_spans,
    is_text_token,
    masked_tokens,
    predicts_in_place,
    select_row,
    trace_batch,
)
from firth.objectives import IGNORE_INDEX, Batch, Mixture, Objective
from firth.objectives.seq2seq import BARTStages
from firth.tokens import MixedDataset, MixedShards, RowDataset, Rows, ShardSet, Tokenizer, Vocabulary
from firth.train import Recipe
from firth.train.batch_size import whole_batch_recipe
from firth.train.dataloader import (
    make_batch_rng,
    make_pretrain_batch_fn,
    make_row_dataset,
    open_recipe_shards,
    single_stage_recipe,
)
from firth.train.pretrain import check_tokenizer_fit
from firth.train.ramp import ramp_stages

SAMPLE_ROWS = 256  # rows that rates are measured on


@dataclass(frozen=True)
class BatchPreview:
    """The result of `firth show`, for the terminal, the page and JSON."""

    header: dict[str, str]
    views: list[RowView]
    rows: list[dict[str, Any]]
    objective: dict[str, Any]
    counts: dict[str, dict[str, float]]
    expected_rates: dict[str, float]
    shapes: dict[str, list[int]]

    def to_dict(self) -> dict[str, Any]:
        names = ("rows", "objective", "counts", "expected_rates", "shapes")
        return {name: getattr(self, name) for name in names}

    def rate_table(self) -> list[tuple[str, float | None, float | None, float | None]]:
        """Return rows of name, expected rate, rate in the sample, rate in the rows that are shown."""
        shown, sample = self.counts["shown"], self.counts["sample"]
        names = [name for name in dict.fromkeys([*self.expected_rates, *sample]) if name != "rows"]
        return [
            (name.replace("_", " "), self.expected_rates.get(name), sample.get(name), shown.get(name)) for name in names
        ]


def build_batch_preview(recipe: Recipe, num_rows: int, model: str, data: str) -> BatchPreview:
    """Return a preview of the first rows of a run's first step; `model` and `data` are the user's names for them."""
    shards = open_recipe_shards(recipe)
    tokenizer, objective, vocab = shards.tokenizer, recipe.objective, shards.tokenizer.vocab
    check_tokenizer_fit(recipe, tokenizer)
    recipe = whole_batch_recipe(recipe)
    recipe = single_stage_recipe(recipe, ramp_stages(recipe)[0])
    dataset = make_row_dataset(recipe, shards, held_out=False)
    rows, batch = first_rows_and_batch(recipe, dataset, tokenizer, max(num_rows, SAMPLE_ROWS))
    rng = make_batch_rng(recipe, rows.stream_index)
    trace = trace_batch(objective, rows, rng, vocab)
    part_B = objective.sample_parts(rng) if isinstance(objective, Mixture) else None
    shown_rows, shown_batch = take_rows(rows, num_rows), take_rows(batch, num_rows)
    shown_trace = BatchTrace(take_rows(trace.batch, num_rows), trace.bart[:num_rows])
    return BatchPreview(
        header=build_header(recipe, shards, dataset, batch, model, data),
        views=[
            preview_row(recipe, tokenizer, shown_rows, shown_batch, shown_trace, b, part_B) for b in range(num_rows)
        ],
        rows=[row_to_dict(shown_rows, shown_batch, b) for b in range(num_rows)],
        objective=to_dict(recipe)["objective"],
        counts={
            "shown": measure_rates(shown_rows, shown_batch, shown_trace, vocab)
            | mixture_part_rates(objective, part_B, num_rows),
            "sample": measure_rates(rows, batch, trace, vocab)
            | mixture_part_rates(objective, part_B, len(rows.input_ids)),
        },
        expected_rates=dict(objective.expected_rates(rows)),
        shapes={name: list(x.shape[1:]) for name, x in batch._asdict().items() if x is not None},
    )


def preview_row(
    recipe: Recipe,
    tokenizer: Tokenizer,
    rows: Rows,
    batch: Batch,
    trace: BatchTrace,
    b: int,
    part_B: np.ndarray | None,
) -> RowView:
    """Return the view of row `b`; in a mixture, of its part."""
    objective, is_causal = recipe.objective, recipe.model.architecture == "decoder"
    if part_B is None:
        return build_row_view(rows, batch, trace, b, tokenizer, objective, is_causal)
    assert isinstance(objective, Mixture)
    i = int(part_B[b])
    view = build_row_view(rows, batch, trace, b, tokenizer, objective.parts[i].objective, is_causal)
    part = format_objective(to_dict(objective)["parts"][i]["objective"])
    return view._replace(notes=[f"part {i + 1}: {part}", *view.notes])


def mixture_part_rates(objective: Objective, part_B: np.ndarray | None, num_rows: int) -> dict[str, float]:
    """Return the share of the first rows that each part of a mixture has."""
    if part_B is None or not isinstance(objective, Mixture):
        return {}
    return {f"part {i + 1}": float((part_B[:num_rows] == i).mean()) for i in range(len(objective.parts))}


def first_rows_and_batch(
    recipe: Recipe, dataset: RowDataset, tokenizer: Tokenizer, num_rows: int, progress: float | None = None
) -> tuple[Rows, Batch]:
    """Return the first rows of a run before noise, and the batches of its first steps, concatenated.

    `progress` makes them as after this share of the run.
    """
    if (
        recipe.global_batch_size > num_rows and not recipe.batch_ramp and not recipe.length_ramp
    ):  # the rest is not shown
        recipe = replace(recipe, per_device_train_batch_size=num_rows, gradient_accumulation_steps=1, processes=1)
    batches = make_pretrain_batch_fn(recipe, dataset, tokenizer, progress=progress)
    steps = takewhile(lambda step: step * recipe.global_batch_size < num_rows, count())
    micro_batches = [batch for step in steps for batch in batches(step)]
    fields = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*micro_batches, strict=True))
    return dataset.get_rows(np.arange(num_rows)), take_rows(Batch(*fields), num_rows)


def take_rows(rows: Any, num_rows: int) -> Any:
    """Return the first rows of Rows or of a Batch."""
    return type(rows)(*(None if x is None else x[:num_rows] for x in rows))


def row_to_dict(rows: Rows, batch: Batch, b: int) -> dict[str, Any]:
    fields = {name: None if x is None else x[b].tolist() for name, x in batch._asdict().items()}
    return {"index": int(rows.stream_index[b]), "source": rows.input_ids[b].tolist(), **fields}


# --- header -------------------------------------------------------------------------------------------------------


def build_header(
    recipe: Recipe, shards: ShardSet | MixedShards, dataset: RowDataset, batch: Batch, model: str, data: str
) -> dict[str, str]:
    """Return what the preview was made of, by name."""
    tokenizer, config = shards.tokenizer, recipe.model
    sizes = {"T = {} input tokens": batch.input_ids, "U = {} of the decoder": batch.decoder_input_ids}
    sizes["K = {} target slots"] = batch.target_positions
    mix = (
        {"mix": "; ".join(map(str, dataset.share_table(dataset.num_rows)))} if isinstance(dataset, MixedDataset) else {}
    )
    return {
        "model": f"{model}: {config.family}, {config.architecture}",
        "objective": format_objective(to_dict(recipe)["objective"]),
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab.size:,} tokens ({tokenizer.fingerprint})",
        "data": f"{data}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens to train on",
        **mix,
        "rows": f"{dataset.num_rows:,} rows of {dataset.row_length} tokens, {100 * dataset.fill_ratio:.1f}% filled",
        "shapes": ", ".join(name.format(x.shape[1]) for name, x in sizes.items() if x is not None),
    }


def format_objective(value: Any) -> str:
    """Return an objective in one line.

    >>> format_objective({"kind": "MLM", "rate": 0.15, "masking": {"kind": "TokenMasking"}})
    'MLM(rate 0.15, masking TokenMasking)'
    >>> format_objective({"kind": "Mixture", "parts": [{"objective": {"kind": "CLM"}, "weight": 2.0}]})
    'Mixture(parts [CLM, weight 2])'
    """
    if isinstance(value, Mapping):
        fields = {name: format_objective(part) for name, part in value.items() if name != "kind"}
        inside = ", ".join(part if name == "objective" else f"{name} {part}" for name, part in fields.items())
        if "kind" not in value:
            return inside
        return f"{value['kind']}({inside})" if inside else value["kind"]
    if isinstance(value, list):
        return "[" + "; ".join(map(format_objective, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- rates --------------------------------------------------------------------------------------------------------


def measure_rates(rows: Rows, batch: Batch, trace: BatchTrace, vocab: Vocabulary) -> dict[str, float]:
    """Return the noise rates of some rows, by the names of `expected_rates`; rates that do not apply are left out.

    - targets: share of the text that is predicted
    - masked, random, kept: shares of the targets that are predicted in place (MLM)
    - mean_span, spans: length of a span (in words, where the rows have word starts), and spans per row
    - infilled, masked, deleted, permuted, rotated: BART's noise (see `bart_rates`)
    - tokens_used, decoder_used: share of positions that are not padding
    - pairs: share of pairs with label 1
    - masked_rows: share of the rows of masked next-token prediction, or of mlm-and-clm, that are masked
    - masked_row_targets: share of the text of these rows that is predicted, by the model or by a generator
    - detected_rows: share of the rows whose masks a generator fills
    - encoder_targets: share of the text that an encoder-decoder's encoder predicts
    """
    directions = batch.labels.shape[1] if batch.labels.ndim == 3 else 1
    num_targets = is_text_token(batch.labels, vocab).sum() / directions
    rates = {"rows": len(rows.input_ids), "targets": num_targets / max(rows.maskable.sum(), 1)}
    rates |= mlm_rates(batch, trace.batch, vocab) | bart_rates(rows, trace)
    rates |= span_statistics(rows, batch, trace.batch, vocab)
    filled = np.ones(batch.input_ids.shape, bool) if batch.document_ids is None else batch.document_ids >= 0
    rates["tokens_used"] = filled.mean()
    if batch.decoder_input_ids is not None:
        rates["decoder_used"] = (batch.labels != IGNORE_INDEX).mean()
    if batch.encoder_labels is not None:
        rates["encoder_targets"] = (batch.encoder_labels != IGNORE_INDEX).sum() / max(rows.maskable.sum(), 1)
    if batch.pair_labels is not None:
        rates["pairs"] = batch.pair_labels.mean()
    has_row_kinds = batch.attention_rank is not None and batch.target_positions is None and batch.labels.ndim == 2
    if has_row_kinds:
        rates |= masked_row_rates(rows, batch, trace.batch, vocab)
    return {name: float(value) for name, value in rates.items()}


def masked_row_rates(rows: Rows, batch: Batch, trace: Batch, vocab: Vocabulary) -> dict[str, float]:
    """Return the share of masked rows among masked and causal ones, and the rates of their targets.

    In a trace a label is the position of its token, wherever the model predicts it.
    """
    is_masked_B, label_BL = (batch.attention_rank == 0).all(1), trace.labels
    rates = {"masked_rows": is_masked_B.mean()}
    if batch.generator_labels is not None:
        rates["detected_rows"] = (batch.generator_labels != IGNORE_INDEX).any(1).mean()
        label_BL = np.concatenate([label_BL, trace.generator_labels], axis=1)
    row_N, slot_N = np.nonzero(is_masked_B[:, None] & (label_BL >= 0))
    if not len(row_N):
        return {}
    at_N = label_BL[row_N, slot_N]
    kept_N, is_mask_N = trace.input_ids[row_N, at_N] >= 0, batch.input_ids[row_N, at_N] == vocab.mask
    rates["masked_row_targets"] = len(row_N) / rows.maskable[is_masked_B].sum()
    if kept_N.all():
        return rates
    masked = (is_mask_N & ~kept_N).mean()
    return rates | {"masked": masked, "random": 1 - masked - kept_N.mean(), "kept": kept_N.mean()}


def mlm_rates(batch: Batch, trace: Batch, vocab: Vocabulary) -> dict[str, float]:
    """Return the shares of MLM's targets that are masked, random and kept; empty where all are kept (XLNet)."""
    in_place_B = predicts_in_place(trace)
    if not in_place_B.any():
        return {}
    used_BK = in_place_B[:, None] & (batch.labels != IGNORE_INDEX)
    ids, source = (np.take_along_axis(x.input_ids, batch.target_positions, 1)[used_BK] for x in (batch, trace))
    kept, masked = source >= 0, (source < 0) & (ids == vocab.mask)
    if kept.all():
        return {}
    return {"masked": masked.mean(), "random": (~masked & ~kept).mean(), "kept": kept.mean()}


def span_statistics(rows: Rows, batch: Batch, trace: Batch, vocab: Vocabulary) -> dict[str, float]:
    """Return the number of spans per row and their mean length, for sentinels and for targets in place."""
    opens_BK = np.isin(batch.labels, vocab.sentinel_ids)
    if opens_BK.any():
        has_spans = opens_BK.any(-1)
        num_spans, num_tokens = opens_BK.sum(), is_text_token(batch.labels[has_spans], vocab).sum()
        return {"spans": num_spans / has_spans.sum(), "mean_span": num_tokens / num_spans}
    in_place_B = predicts_in_place(trace)
    if not in_place_B.any():
        return {}
    target_BL = np.zeros(rows.input_ids.shape, bool)
    row, slot = np.nonzero(in_place_B[:, None] & (batch.labels != IGNORE_INDEX))
    target_BL[row, batch.target_positions[row, slot]] = True
    first_BL = target_BL & ~np.pad(target_BL, ((0, 0), (1, 0)))[:, :-1]
    words_BL = target_BL if rows.word_start is None else target_BL & (rows.word_start | first_BL)
    return {"spans": first_BL.sum() / in_place_B.sum(), "mean_span": words_BL.sum() / max(first_BL.sum(), 1)}


def bart_rates(rows: Rows, trace: BatchTrace) -> dict[str, float]:
    """Return the rates of BART's noise, each measured between two stages of the corruption.

    `infilled`, `masked` and `deleted` are shares of the text. `permuted` is the share of the documents with at least
    two sentences whose order changed, `rotated` a share of all documents.
    """
    total: Counter[str] = Counter()
    for b, stages in enumerate(trace.bart):
        if stages is not None:
            total += count_bart_noise(select_row(rows, b), stages)
    rates = {name: total[name] / total["text"] for name in ("infilled", "masked", "deleted") if total[name]}
    if total["spans"]:
        rates["mean_span"] = total["infilled"] / total["spans"]
    if total["several_sentences"]:
        rates["permuted"] = total["permuted"] / total["several_sentences"]
    if total["rotated"]:
        rates["rotated"] = total["rotated"] / total["documents"]
    return rates


def count_bart_noise(source_row: Rows, stages: BARTStages) -> Counter[str]:
    """Count the tokens, spans and documents of one row that each noise changed."""
    spans, doc = infilled_spans(stages), source_row.document_ids
    counts = Counter(
        text=int(source_row.maskable.sum()),
        infilled=sum(map(len, spans.values())),
        spans=len(spans),
        masked=len(masked_tokens(stages)),
        deleted=int((stages.rotated.document_ids >= 0).sum() - (stages.deleted.document_ids >= 0).sum()),
        documents=int(doc.max() + 1),
        rotated=len(np.unique(doc[stages.rotated.input_ids != stages.permuted.input_ids])),
    )
    if source_row.sentence_end is not None:
        several = np.flatnonzero(np.bincount(doc[source_row.sentence_end & (doc >= 0)]) > 1)
        moved = np.unique(doc[stages.permuted.input_ids != stages.original.input_ids])
        counts |= Counter(several_sentences=len(several), permuted=len(np.intersect1d(several, moved)))
    return counts
