"""What a model will read and be asked, before any training: the first rows of a run, made as training makes them."""

# Shapes: B rows, L places of the source, T places that are read, U places of the decoder, K asked places.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np

from firth.lab.show_row import View, align, behind_masks, is_text, of_their_places, one_row, restores, view
from firth.objectives import IGNORED, Batch, Mixture, Objective
from firth.plain import to_plain
from firth.tokens import MixedShards, MixedSource, Prepared, Rows, Source, Tokenizer, Vocabulary
from firth.train import Recipe
from firth.train.feed import alone, batch_function, draw, open_data, row_source
from firth.train.pretrain import check_fit
from firth.train.ramp import stages

SAMPLE = 256  # rows that the counts are taken over
TRACE = 0.005  # a share that may be a wrong reading of what was hidden
SINGLE = 0.9  # of the masks, when they stand for single tokens; of spans by Poisson's law, few have one token


@dataclass(frozen=True)
class Shown:
    """What `firth show` found, for the terminal, the page and JSON alike."""

    header: dict[str, str]
    views: list[View]
    rows: list[dict[str, Any]]
    objective: dict[str, Any]
    counts: dict[str, dict[str, float]]
    promises: dict[str, float]
    shapes: dict[str, list[int]]

    def plain(self) -> dict[str, Any]:
        names = ("rows", "objective", "counts", "promises", "shapes")
        return {name: getattr(self, name) for name in names}

    def table(self) -> list[tuple[str, float | None, float | None, float | None]]:
        """By name: what the recipe promises, and what the sample and the rows that are shown have."""
        shown, sample = self.counts["shown"], self.counts["sample"]
        names = [name for name in dict.fromkeys([*self.promises, *sample]) if name != "rows"]
        return [(name.replace("_", " "), self.promises.get(name), sample.get(name), shown.get(name)) for name in names]


def look(recipe: Recipe, num_rows: int, model: str, data: str) -> Shown:
    """The first rows of a run's first step. `model` and `data` are how the user named them."""
    shards = open_data(recipe)
    tokenizer, objective, vocab = shards.tokenizer, recipe.objective, shards.tokenizer.vocab
    check_fit(recipe, tokenizer)
    recipe = alone(recipe, stages(recipe)[0])
    source = row_source(recipe, shards, held_out=False)
    rows, batch = first_rows(recipe, source, tokenizer, max(num_rows, SAMPLE))
    few_rows, few = head(rows, num_rows), head(batch, num_rows)
    part_B = objective.part_of(draw(recipe, rows.index)) if isinstance(objective, Mixture) else None
    return Shown(
        header=header(recipe, shards, source, batch, model, data),
        views=[view_of(recipe, tokenizer, few_rows, few, b, part_B) for b in range(num_rows)],
        rows=[plain_row(few_rows, few, b) for b in range(num_rows)],
        objective=to_plain(recipe)["objective"],
        counts={
            "shown": counts(few_rows, few, vocab) | parts(objective, part_B, num_rows),
            "sample": counts(rows, batch, vocab) | parts(objective, part_B, len(rows.tokens)),
        },
        promises=dict(objective.promises()),
        shapes={name: list(x.shape[1:]) for name, x in batch._asdict().items() if x is not None},
    )


def view_of(recipe: Recipe, tokenizer: Tokenizer, rows: Rows, batch: Batch, b: int, part_B: np.ndarray | None) -> View:
    """Row `b`, shown as a row of the part of a mixture that it is of."""
    objective, causal = recipe.objective, recipe.model.shape == "decoder"
    if part_B is None:
        return view(rows, batch, b, tokenizer, objective, causal)
    assert isinstance(objective, Mixture)
    i = int(part_B[b])
    seen = view(rows, batch, b, tokenizer, objective.parts[i].objective, causal)
    return seen._replace(facts=[f"part {i + 1}: {said(to_plain(objective)['parts'][i]['objective'])}", *seen.facts])


def parts(objective: Objective, part_B: np.ndarray | None, num: int) -> dict[str, float]:
    """How many of the first rows are of each part of a mixture, under the names of its promises."""
    if part_B is None or not isinstance(objective, Mixture):
        return {}
    return {f"part {i + 1}": float((part_B[:num] == i).mean()) for i in range(len(objective.parts))}


def first_rows(recipe: Recipe, source: Source, tokenizer: Tokenizer, num: int) -> tuple[Rows, Batch]:
    """The first rows of a run before noise, and the batches of its first steps, joined."""
    batches = batch_function(recipe, source, tokenizer)
    steps = takewhile(lambda step: step * recipe.global_batch < num, count())
    micro = [batch for step in steps for batch in batches(step)]
    fields = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*micro, strict=True))
    return source.rows(np.arange(num)), head(Batch(*fields), num)


def head(rows: Any, num: int) -> Any:
    """The first rows of Rows or of a Batch."""
    return type(rows)(*(None if x is None else x[:num] for x in rows))


def plain_row(rows: Rows, batch: Batch, b: int) -> dict[str, Any]:
    fields = {name: None if x is None else x[b].tolist() for name, x in batch._asdict().items()}
    return {"index": int(rows.index[b]), "source": rows.tokens[b].tolist(), **fields}


# --- in words -----------------------------------------------------------------------------------------------------


def header(
    recipe: Recipe, shards: Prepared | MixedShards, source: Source, batch: Batch, model: str, data: str
) -> dict[str, str]:
    """What was looked at."""
    tokenizer, config, plain = shards.tokenizer, recipe.model, to_plain(recipe)["objective"]
    sizes = {"T = {} places are read": batch.tokens, "U = {} of the decoder": batch.decoder_tokens}
    sizes["K = {} can be asked"] = batch.asked
    return {
        "model": f"{model}: {config.family}, {config.shape}",
        "objective": said(plain),
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab.size:,} tokens ({tokenizer.fingerprint})",
        "data": f"{data}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens to train on",
        **({"mix": "; ".join(map(str, source.table(source.num_rows)))} if isinstance(source, MixedSource) else {}),
        "rows": f"{source.num_rows:,} rows of {source.length} places, {100 * source.tokens_used:.1f}% filled",
        "shapes": ", ".join(name.format(x.shape[1]) for name, x in sizes.items() if x is not None),
    }


def said(value: Any) -> str:
    """An objective as a person writes it.

    >>> said({"kind": "MLM", "rate": 0.15, "choose": {"kind": "Tokens"}})
    'MLM(rate 0.15, choose Tokens)'
    >>> said({"kind": "Mixture", "parts": [{"objective": {"kind": "CLM"}, "weight": 2.0}]})
    'Mixture(parts [CLM, weight 2])'
    """
    if isinstance(value, Mapping):
        fields = {name: said(part) for name, part in value.items() if name != "kind"}
        inside = ", ".join(part if name == "objective" else f"{name} {part}" for name, part in fields.items())
        if "kind" not in value:
            return inside
        return f"{value['kind']}({inside})" if inside else value["kind"]
    if isinstance(value, list):
        return "[" + "; ".join(map(said, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- in numbers ---------------------------------------------------------------------------------------------------


def counts(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """What is in some rows, under the names by which an objective promises it. What does not occur is left out.

    - asked: of all tokens of text, those that are to be written
    - masked, random, kept: what became of those that are asked in their own places
    - mean_span, spans: tokens of a span (words, where the rows say where words start), and spans of a row
    - infilled, deleted, masked, permuted, rotated: what became of a text to be restored (see `noise_of_restored`)
    - tokens_used, decoder_used: places that are not padding
    - pairs: those with label 1
    """
    found = {"rows": len(rows.tokens), "asked": share_asked(rows, batch, vocab)}
    found |= fates(rows, batch, vocab) | noise_of_restored(rows, batch, vocab) | spans(rows, batch, vocab)
    filled = np.ones(batch.tokens.shape, bool) if batch.doc is None else batch.doc >= 0
    found["tokens_used"] = filled.mean()
    if batch.decoder_tokens is not None:
        found["decoder_used"] = (batch.labels != IGNORED).mean()
    if batch.pair is not None:
        found["pairs"] = batch.pair.mean()
    return {name: float(value) for name, value in found.items()}


def share_asked(rows: Rows, batch: Batch, vocab: Vocabulary) -> float:
    ways = batch.labels.shape[1] if batch.labels.ndim == 3 else 1
    return float(is_text(batch.labels, vocab).sum() / ways / max(rows.real.sum(), 1))


def fates(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """What became of the tokens that are asked where they stood; nothing is said where none was changed."""
    own_B = of_their_places(rows.tokens, batch)
    if not own_B.any():
        return {}
    used_BK = own_B[:, None] & (batch.labels != IGNORED)
    truth, read = batch.labels[used_BK], np.take_along_axis(batch.tokens, batch.asked, 1)[used_BK]
    if (read == truth).all():
        return {}
    masked, kept = read == vocab.mask, read == truth
    return {"masked": masked.mean(), "random": (~masked & ~kept).mean(), "kept": kept.mean()}


def spans(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """How many spans are hidden and how long they are, where tokens are asked in their places or named by sentinels."""
    opens_BK = np.isin(batch.labels, vocab.sentinels)
    if opens_BK.any():
        some = opens_BK.any(-1)
        num_spans, num_tokens = opens_BK[some].sum(), is_text(batch.labels[some], vocab).sum()
        return {"spans": num_spans / some.sum(), "mean_span": num_tokens / num_spans}
    own_B = of_their_places(rows.tokens, batch)
    if not own_B.any():
        return {}
    hidden_BL = np.zeros(rows.tokens.shape, bool)
    row, slot = np.nonzero(own_B[:, None] & (batch.labels != IGNORED))
    hidden_BL[row, batch.asked[row, slot]] = True
    first_BL = hidden_BL & ~np.pad(hidden_BL, ((0, 0), (1, 0)))[:, :-1]
    words_BL = hidden_BL if rows.word_start is None else hidden_BL & (rows.word_start | first_BL)
    return {"spans": first_BL.sum() / own_B.sum(), "mean_span": words_BL.sum() / max(first_BL.sum(), 1)}


def noise_of_restored(rows: Rows, batch: Batch, vocab: Vocabulary) -> dict[str, float]:
    """What became of texts that the decoder has to write out whole.

    `infilled` and `masked` are the shares of the text that went under masks, of spans and of single tokens; `deleted`
    went without a mask. `permuted` is the share of documents, of those with two sentences at least, in which another
    order is seen, `rotated` of those that begin in their middle. Where a text repeats itself, or where several kinds
    of noise meet, all this is the likeliest reading; a trace of `deleted` and `rotated` is not told.
    """
    if batch.decoder_tokens is None:
        return {}
    total: Counter[str] = Counter()
    for b in range(len(rows.tokens)):
        total += noise_of_row(one_row(rows, b), one_row(batch, b), vocab)
    if not total["text"]:
        return {}
    found = {}
    if total["masks"] and total["single"] > SINGLE * total["masks"]:
        found["masked"] = total["masks"] / total["text"]
    elif total["masks"]:
        found = {"infilled": total["hidden"] / total["text"], "mean_span": total["hidden"] / total["masks"]}
    if total["lost"] > TRACE * total["text"]:
        found["deleted"] = total["lost"] / total["text"]
    if total["several"]:
        found["permuted"] = total["moved"] / total["several"]
    if total["turned"] > TRACE * total["documents"]:
        found["rotated"] = total["turned"] / total["documents"]
    return found


def noise_of_row(row: Rows, one: Batch, vocab: Vocabulary) -> Counter[str]:
    """How many tokens, masks and documents of a row there are of each kind that the shares are made of."""
    if not restores(row, one, vocab):
        return Counter()
    match = align(row, one, vocab)
    hidden = behind_masks(one, match, vocab)
    sizes = [len(places) for places in hidden.values()]
    text = int(row.real.sum())
    lost = text - int((match >= 0).sum()) - sum(sizes)
    masks = Counter(hidden=sum(sizes), masks=len(sizes), single=sizes.count(1))
    return Counter(text=text, lost=lost) + masks + order_of_row(row, one, match)


def order_of_row(row: Rows, one: Batch, match: np.ndarray) -> Counter[str]:
    """How many documents there are, and how many of them are read in another order."""
    seen = [match[(one.doc == d) & (match >= 0)] for d in range(row.doc.max() + 1)]
    falls = [int((np.diff(places) < 0).sum()) for places in seen]
    if row.sentence_end is None:
        turned = sum(fall == 1 and places[-1] < places[0] for fall, places in zip(falls, seen, strict=True))
        return Counter(documents=len(seen), turned=int(turned))
    several = [row.sentence_end[row.doc == d].sum() > 1 for d in range(len(seen))]
    moved = sum(bool(fall) for fall, is_several in zip(falls, several, strict=True) if is_several)
    return Counter(several=int(sum(several)), moved=moved)
