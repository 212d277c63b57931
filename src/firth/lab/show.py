"""What a model will read and be asked, before any training: the first rows of a run, made as training makes them."""

# Shapes: B rows, L places of the source, T places that are read, U places of the decoder, K asked places.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np

from firth.core.serialization import to_dict
from firth.lab.show_row import (
    RowView,
    align_with_labels,
    build_row_view,
    is_full_reconstruction,
    is_text_token,
    positions_behind_masks,
    rows_predicted_in_place,
    select_row,
)
from firth.objectives import IGNORE_INDEX, Batch, Mixture, Objective
from firth.tokens import MixedDataset, MixedShards, RowDataset, Rows, ShardSet, Tokenizer, Vocabulary
from firth.train import Recipe
from firth.train.dataloader import (
    make_batch_rng,
    make_pretrain_batch_fn,
    make_row_dataset,
    open_recipe_shards,
    single_stage_recipe,
)
from firth.train.pretrain import check_tokenizer_fit
from firth.train.ramp import ramp_stages

SAMPLE_ROWS = 256  # rows that the counts are taken over
MIN_REPORTED_SHARE = 0.005  # a share that may be a wrong reading of what was hidden
MIN_SINGLE_TOKEN_SHARE = (
    0.9  # of the masks, when they stand for single tokens; of spans by Poisson's law, few have one token
)


@dataclass(frozen=True)
class BatchPreview:
    """What `firth show` found, for the terminal, the page and JSON alike."""

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
        """By name: what the recipe promises, and what the sample and the rows that are shown have."""
        shown, sample = self.counts["shown"], self.counts["sample"]
        names = [name for name in dict.fromkeys([*self.expected_rates, *sample]) if name != "rows"]
        return [
            (name.replace("_", " "), self.expected_rates.get(name), sample.get(name), shown.get(name)) for name in names
        ]


def build_batch_preview(recipe: Recipe, num_rows: int, model: str, data: str) -> BatchPreview:
    """The first rows of a run's first step. `model` and `data` are how the user named them."""
    shards = open_recipe_shards(recipe)
    tokenizer, objective, vocab = shards.tokenizer, recipe.objective, shards.tokenizer.vocab
    check_tokenizer_fit(recipe, tokenizer)
    recipe = single_stage_recipe(recipe, ramp_stages(recipe)[0])
    source = make_row_dataset(recipe, shards, held_out=False)
    rows, batch = first_rows_and_batch(recipe, source, tokenizer, max(num_rows, SAMPLE_ROWS))
    few_rows, few = take_rows(rows, num_rows), take_rows(batch, num_rows)
    part_B = (
        objective.sample_parts(make_batch_rng(recipe, rows.stream_index)) if isinstance(objective, Mixture) else None
    )
    return BatchPreview(
        header=build_header(recipe, shards, source, batch, model, data),
        views=[preview_row(recipe, tokenizer, few_rows, few, b, part_B) for b in range(num_rows)],
        rows=[row_to_dict(few_rows, few, b) for b in range(num_rows)],
        objective=to_dict(recipe)["objective"],
        counts={
            "shown": measure_rates(few_rows, few, vocab) | mixture_part_rates(objective, part_B, num_rows),
            "sample": measure_rates(rows, batch, vocab) | mixture_part_rates(objective, part_B, len(rows.input_ids)),
        },
        expected_rates=dict(objective.expected_rates()),
        shapes={name: list(x.shape[1:]) for name, x in batch._asdict().items() if x is not None},
    )


def preview_row(
    recipe: Recipe, tokenizer: Tokenizer, rows: Rows, batch: Batch, b: int, part_B: np.ndarray | None
) -> RowView:
    """Row `b`, shown as a row of the part of a mixture that it is of."""
    objective, causal = recipe.objective, recipe.model.architecture == "decoder"
    if part_B is None:
        return build_row_view(rows, batch, b, tokenizer, objective, causal)
    assert isinstance(objective, Mixture)
    i = int(part_B[b])
    seen = build_row_view(rows, batch, b, tokenizer, objective.parts[i].objective, causal)
    return seen._replace(
        notes=[f"part {i + 1}: {format_objective(to_dict(objective)['parts'][i]['objective'])}", *seen.notes]
    )


def mixture_part_rates(objective: Objective, part_B: np.ndarray | None, num_rows: int) -> dict[str, float]:
    """How many of the first rows are of each part of a mixture, under the names of its promises."""
    if part_B is None or not isinstance(objective, Mixture):
        return {}
    return {f"part {i + 1}": float((part_B[:num_rows] == i).mean()) for i in range(len(objective.parts))}


def first_rows_and_batch(recipe: Recipe, source: RowDataset, tokenizer: Tokenizer, num_rows: int) -> tuple[Rows, Batch]:
    """The first rows of a run before noise, and the batches of its first steps, joined."""
    batches = make_pretrain_batch_fn(recipe, source, tokenizer)
    steps = takewhile(lambda step: step * recipe.global_batch_size < num_rows, count())
    micro = [batch for step in steps for batch in batches(step)]
    fields = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*micro, strict=True))
    return source.get_rows(np.arange(num_rows)), take_rows(Batch(*fields), num_rows)


def take_rows(rows: Any, num_rows: int) -> Any:
    """The first rows of Rows or of a Batch."""
    return type(rows)(*(None if x is None else x[:num_rows] for x in rows))


def row_to_dict(rows: Rows, batch: Batch, b: int) -> dict[str, Any]:
    fields = {name: None if x is None else x[b].tolist() for name, x in batch._asdict().items()}
    return {"index": int(rows.stream_index[b]), "source": rows.input_ids[b].tolist(), **fields}


# --- in words -----------------------------------------------------------------------------------------------------


def build_header(
    recipe: Recipe, shards: ShardSet | MixedShards, source: RowDataset, batch: Batch, model: str, data: str
) -> dict[str, str]:
    """What was looked at."""
    tokenizer, config, plain = shards.tokenizer, recipe.model, to_dict(recipe)["objective"]
    sizes = {"T = {} places are read": batch.input_ids, "U = {} of the decoder": batch.decoder_input_ids}
    sizes["K = {} can be asked"] = batch.target_positions
    return {
        "model": f"{model}: {config.family}, {config.architecture}",
        "objective": format_objective(plain),
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab.size:,} tokens ({tokenizer.fingerprint})",
        "data": f"{data}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens to train on",
        **(
            {"mix": "; ".join(map(str, source.share_table(source.num_rows)))}
            if isinstance(source, MixedDataset)
            else {}
        ),
        "rows": f"{source.num_rows:,} rows of {source.row_length} places, {100 * source.fill_ratio:.1f}% filled",
        "shapes": ", ".join(name.format(x.shape[1]) for name, x in sizes.items() if x is not None),
    }


def format_objective(value: Any) -> str:
    """An objective as a person writes it.

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


# --- in numbers ---------------------------------------------------------------------------------------------------


def measure_rates(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """What is in some rows, under the names by which an objective promises it. What does not occur is left out.

    - asked: of all tokens of text, those that are to be written
    - masked, random, kept: what became of those that are asked in their own places
    - mean_span, spans: tokens of a span (words, where the rows say where words start), and spans of a row
    - infilled, deleted, masked, permuted, rotated: what became of a text to be restored (see `denoising_rates`)
    - tokens_used, decoder_used: places that are not padding
    - pairs: those with label 1
    """
    found = {"rows": len(rows.input_ids), "asked": target_rate(rows, batch, vocab)}
    found |= (
        replacement_rates(rows, batch, vocab)
        | denoising_rates(rows, batch, vocab)
        | span_statistics(rows, batch, vocab)
    )
    filled = np.ones(batch.input_ids.shape, bool) if batch.document_ids is None else batch.document_ids >= 0
    found["tokens_used"] = filled.mean()
    if batch.decoder_input_ids is not None:
        found["decoder_used"] = (batch.labels != IGNORE_INDEX).mean()
    if batch.pair_labels is not None:
        found["pairs"] = batch.pair_labels.mean()
    return {name: float(value) for name, value in found.items()}


def target_rate(rows: Rows, batch: Batch, vocab: Vocabulary) -> float:
    ways = batch.labels.shape[1] if batch.labels.ndim == 3 else 1
    return float(is_text_token(batch.labels, vocab).sum() / ways / max(rows.maskable.sum(), 1))


def replacement_rates(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """What became of the tokens that are asked where they stood; nothing is said where none was changed."""
    own_B = rows_predicted_in_place(rows.input_ids, batch)
    if not own_B.any():
        return {}
    used_BK = own_B[:, None] & (batch.labels != IGNORE_INDEX)
    truth, read = batch.labels[used_BK], np.take_along_axis(batch.input_ids, batch.target_positions, 1)[used_BK]
    if (read == truth).all():
        return {}
    masked, kept = read == vocab.mask, read == truth
    return {"masked": masked.mean(), "random": (~masked & ~kept).mean(), "kept": kept.mean()}


def span_statistics(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """How many spans are hidden and how long they are, where tokens are asked in their places or named by sentinels."""
    opens_BK = np.isin(batch.labels, vocab.sentinel_ids)
    if opens_BK.any():
        some = opens_BK.any(-1)
        num_spans, num_tokens = opens_BK[some].sum(), is_text_token(batch.labels[some], vocab).sum()
        return {"spans": num_spans / some.sum(), "mean_span": num_tokens / num_spans}
    own_B = rows_predicted_in_place(rows.input_ids, batch)
    if not own_B.any():
        return {}
    hidden_BL = np.zeros(rows.input_ids.shape, bool)
    row, slot = np.nonzero(own_B[:, None] & (batch.labels != IGNORE_INDEX))
    hidden_BL[row, batch.target_positions[row, slot]] = True
    first_BL = hidden_BL & ~np.pad(hidden_BL, ((0, 0), (1, 0)))[:, :-1]
    words_BL = hidden_BL if rows.word_start is None else hidden_BL & (rows.word_start | first_BL)
    return {"spans": first_BL.sum() / own_B.sum(), "mean_span": words_BL.sum() / max(first_BL.sum(), 1)}


def denoising_rates(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """What became of texts that the decoder has to write out whole.

    `infilled` and `masked` are the shares of the text that went under masks, of spans and of single tokens; `deleted`
    went without a mask. `permuted` is the share of documents, of those with two sentences at least, in which another
    order is seen, `rotated` of those that begin in their middle. Where a text repeats itself, or where several kinds
    of noise meet, all this is the likeliest reading; a trace of `deleted` and `rotated` is not told.
    """
    if batch.decoder_input_ids is None:
        return {}
    total: Counter[str] = Counter()
    for b in range(len(rows.input_ids)):
        total += count_row_noise(select_row(rows, b), select_row(batch, b), vocab)
    if not total["text"]:
        return {}
    found = {}
    if total["masks"] and total["single"] > MIN_SINGLE_TOKEN_SHARE * total["masks"]:
        found["masked"] = total["masks"] / total["text"]
    elif total["masks"]:
        found = {"infilled": total["hidden"] / total["text"], "mean_span": total["hidden"] / total["masks"]}
    if total["lost"] > MIN_REPORTED_SHARE * total["text"]:
        found["deleted"] = total["lost"] / total["text"]
    if total["several"]:
        found["permuted"] = total["moved"] / total["several"]
    if total["turned"] > MIN_REPORTED_SHARE * total["documents"]:
        found["rotated"] = total["turned"] / total["documents"]
    return found


def count_row_noise(source_row: Rows, batch_row: Batch, vocab: Vocabulary) -> Counter[str]:
    """How many tokens, masks and documents of a row there are of each kind that the shares are made of."""
    if not is_full_reconstruction(source_row, batch_row, vocab):
        return Counter()
    match = align_with_labels(source_row, batch_row, vocab)
    hidden = positions_behind_masks(batch_row, match, vocab)
    sizes = [len(places) for places in hidden.values()]
    text = int(source_row.maskable.sum())
    lost = text - int((match >= 0).sum()) - sum(sizes)
    masks = Counter(hidden=sum(sizes), masks=len(sizes), single=sizes.count(1))
    return Counter(text=text, lost=lost) + masks + count_reordered_documents(source_row, batch_row, match)


def count_reordered_documents(source_row: Rows, batch_row: Batch, alignment: np.ndarray) -> Counter[str]:
    """How many documents there are, and how many of them are read in another order."""
    seen = [
        alignment[(batch_row.document_ids == d) & (alignment >= 0)] for d in range(source_row.document_ids.max() + 1)
    ]
    falls = [int((np.diff(places) < 0).sum()) for places in seen]
    if source_row.sentence_end is None:
        turned = sum(fall == 1 and places[-1] < places[0] for fall, places in zip(falls, seen, strict=True))
        return Counter(documents=len(seen), turned=int(turned))
    several = [source_row.sentence_end[source_row.document_ids == d].sum() > 1 for d in range(len(seen))]
    moved = sum(bool(fall) for fall, is_several in zip(falls, several, strict=True) if is_several)
    return Counter(several=int(sum(several)), moved=moved)
