"""The laws of our noise beside implementations that we did not write, on the same rows, and beside T5's procedure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from firth.objectives import (
    IGNORE_INDEX,
    MLM,
    Batch,
    CounterRNG,
    DecoderDenoising,
    PermutationLM,
    SpanCorruption,
    WholeWordMasking,
    visibility,
)
from firth.tokens import Rows, SequenceTemplate, Vocabulary

transformers = pytest.importorskip("transformers")

PAD, END, UNK, CLS, SEP, MASK = range(6)
SPECIAL = ("[PAD]", "[END]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZE = 1000
VOCAB = Vocabulary(
    SIZE, PAD, UNK, None, END, CLS, SEP, MASK, tuple(range(999, 899, -1)), (*range(6), *range(900, 1000))
)
UNLIKELY = 1e-3  # seeds are fixed: what passes once passes always


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of theirs with the same special ids as ours."""
    words = {**{name: i for i, name in enumerate(SPECIAL)}, **{f"w{i}": i for i in range(6, SIZE)}}
    names = dict(
        zip(("pad_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
    )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel(words, unk_token="[UNK]")), **names)
    assert len(made) == SIZE
    return made


def make_rows(count: int, length: int, template: SequenceTemplate, seed: int = 0) -> Rows:
    """Rows of one document of random text with its special tokens; some end in padding, up to a quarter of the row."""
    rng = np.random.default_rng(seed)
    position, before, after = np.arange(length), len(template.prefix_ids), len(template.suffix_ids)
    filled = np.where(np.arange(count) % 2, length - rng.integers(0, length // 4, count), length)[:, None]
    maskable = (position >= before) & (position < filled - after)
    tokens = np.where(maskable, rng.integers(6, 900, (count, length)), PAD)
    if before:
        tokens[:, :before] = template.prefix_ids
    if after:
        tokens[(position >= filled - after) & (position < filled)] = template.suffix_ids[0]
    doc = np.where(position < filled, 0, -1).astype(np.int32)
    starts = maskable & ((rng.random((count, length)) < 0.6) | (position == before))
    index = np.arange(count)
    return Rows(tokens, doc, np.where(doc < 0, 0, position).astype(np.int32), maskable, index, word_start=starts)


def collate(collator: Any, rows: Rows) -> dict[str, np.ndarray]:
    """What a collator of theirs makes of the same rows, with the inputs that it needs."""
    if isinstance(collator, transformers.DataCollatorForPermutationLanguageModeling):
        return collator([{"input_ids": row} for row in rows.input_ids.tolist()])
    examples = [
        {"input_ids": ids, "special_tokens_mask": special, "attention_mask": seen}
        for ids, special, seen in zip(
            rows.input_ids.tolist(),
            (~rows.maskable).astype(int).tolist(),
            (rows.document_ids >= 0).astype(int).tolist(),
            strict=True,
        )
    ]
    if collator.whole_word_mask:
        for example, offsets in zip(examples, offset_mapping(rows).tolist(), strict=True):
            example["offset_mapping"] = offsets
    return collator(examples)


def offset_mapping(rows: Rows) -> np.ndarray:
    """Where in the text each token would lie: tokens are a letter long, and a space comes before every word."""
    assert rows.word_start is not None
    start = np.cumsum(np.where(rows.word_start, 2, 1) * rows.maskable, 1)
    return np.stack([np.where(rows.maskable, start, 0), np.where(rows.maskable, start + 1, 0)], 2)


def asked_mask(batch: Batch) -> np.ndarray:
    mask = np.zeros(batch.input_ids.shape, bool)
    row, slot = np.nonzero(batch.labels != IGNORE_INDEX)
    mask[row, batch.target_positions[row, slot]] = True
    return mask


def alike(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> float:
    """The chance that two samples of whole numbers from one law differ at least this much; rare ones are one cell."""
    most = int(max(np.max(a), np.max(b))) + 1
    table = np.array([np.bincount(x, minlength=most) for x in (a, b)])
    common = table.sum(0) >= 20
    cells = np.concatenate([table[:, common], table[:, ~common].sum(1, keepdims=True)], 1)
    return float(stats.chi2_contingency(cells[:, cells.sum(0) > 0]).pvalue)


def run_lengths(mask: np.ndarray) -> np.ndarray:
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    return np.nonzero(edges == -1)[1] - np.nonzero(edges == 1)[1]


# --- masked tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", ["np", "pt"])
def test_masks_follow_the_laws_of_the_published_collator(tokenizer: Any, tensors: str) -> None:
    rows = make_rows(4000, 128, MLM().build_template(VOCAB))
    assert rows.maskable.sum() > 400_000
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, seed=1, return_tensors=tensors)
    theirs = {name: np.asarray(array) for name, array in collate(collator, rows).items()}
    batch = MLM()(rows, CounterRNG(1, rows.stream_index), VOCAB)
    sides = {
        "ours": (asked_mask(batch), batch.input_ids),
        "theirs": (theirs["labels"] != IGNORE_INDEX, theirs["input_ids"]),
    }
    facts, target_positions = {}, {}
    for side, (is_target, read) in sides.items():
        assert not is_target[~rows.maskable].any()
        assert (read[~is_target] == rows.input_ids[~is_target]).all()
        masked, kept = read[is_target] == MASK, read[is_target] == rows.input_ids[is_target]
        facts[side] = [is_target.sum() / rows.maskable.sum(), masked.mean(), kept.mean(), (~masked & ~kept).mean()]
        target_positions[side] = np.nonzero(is_target)[1]
    assert facts["ours"][0] == pytest.approx(facts["theirs"][0], abs=0.005)
    assert facts["ours"][1:] == pytest.approx(facts["theirs"][1:], abs=0.01)
    assert (theirs["labels"][sides["theirs"][0]] == rows.input_ids[sides["theirs"][0]]).all()
    assert alike(target_positions["ours"] // 8, target_positions["theirs"] // 8) > UNLIKELY, (
        "each part of the row as often"
    )


def test_whole_words_beside_the_published_collator(tokenizer: Any) -> None:
    rows = make_rows(600, 128, MLM().build_template(VOCAB))
    assert rows.word_start is not None
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=True, mask_replace_prob=1.0, random_replace_prob=0.0, seed=1, return_tensors="np"
    )
    theirs = collate(collator, rows)
    batch = MLM(masking=WholeWordMasking(), mask_prob=1.0, random_prob=0.0)(
        rows, CounterRNG(1, rows.stream_index), VOCAB
    )
    word = np.cumsum(rows.word_start, 1) + 200 * rows.stream_index[:, None]
    size = np.bincount(word[rows.maskable], minlength=word.max() + 1)
    sizes = {}
    for side, is_target, read in (
        ("ours", asked_mask(batch), batch.input_ids),
        ("theirs", theirs["labels"] != IGNORE_INDEX, theirs["input_ids"]),
    ):
        hidden = np.bincount(word[is_target], minlength=len(size))
        assert ((hidden == 0) | (hidden == size)).all(), "words are whole"
        assert (read[is_target] == MASK).all()
        assert is_target.sum() / rows.maskable.sum() == pytest.approx(0.15, abs=0.01)
        sizes[side] = np.bincount(hidden[hidden > 0], minlength=12)[1:5] / (hidden > 0).sum()
    # Theirs tosses a coin for each word. Ours, like BERT's published preprocessing, fills the slots of a row and
    # passes over words that no longer fit, so that single tokens are a little more frequent.
    assert sizes["ours"] == pytest.approx(sizes["theirs"], abs=0.06)
    assert sizes["ours"][0] > sizes["theirs"][0]


# --- permutation LM -----------------------------------------------------------------------------------------------


def test_permutation_lm_beside_the_published_collator(tokenizer: Any) -> None:
    """Beside the one that returns tensors: the one that returns arrays draws spans of up to six tokens."""
    rows = make_rows(900, 128, SequenceTemplate())
    rows = rows._replace(
        input_ids=np.where(rows.maskable, rows.input_ids, 50),
        maskable=np.ones_like(rows.maskable),
        document_ids=0 * rows.document_ids,
    )
    collator = transformers.DataCollatorForPermutationLanguageModeling(tokenizer, return_tensors="pt")
    transformers.set_seed(1)  # it draws from the global generator
    parts = [
        collate(collator, Rows(*(None if f is None else f[i : i + 100] for f in rows))) for i in range(0, 900, 100)
    ]  # type: ignore[arg-type]
    target = np.concatenate([np.asarray(part["labels"]) != IGNORE_INDEX for part in parts])
    batch = PermutationLM()(rows, CounterRNG(1, rows.stream_index), VOCAB)
    ours = asked_mask(batch)
    assert ours.mean() == pytest.approx(target.mean(), abs=0.005)
    assert ours.mean() == pytest.approx(1 / 6, abs=0.005)
    assert alike(run_lengths(ours), run_lengths(target)) > UNLIKELY
    assert alike(np.nonzero(ours)[1] // 8, np.nonzero(target)[1] // 8) > UNLIKELY

    # Who may not see whom: given their targets and their order, our rule says the same.
    for hidden, mask in zip(target[:100], np.asarray(parts[0]["perm_mask"]).astype(bool), strict=True):
        turn = (~mask[:, hidden]).sum(1)  # how many targets each position sees: for a target, those before it
        rank = np.where(hidden, turn + 1, 0)
        assert sorted(rank[hidden]) == list(range(1, hidden.sum() + 1))
        content, query = visibility.visibility_matrix(None, rank), visibility.visibility_matrix(None, rank, strict=True)
        assert ((~mask | np.eye(len(mask), dtype=bool)) == content).all(), "the content stream also sees itself"
        assert (~mask[hidden] == query[hidden]).all(), "the query stream does not"


def test_our_ranks_give_a_mask_like_theirs() -> None:
    """Against `_local_perm` of XLNet's data_utils.py, in its own words, with our order."""
    rows = make_rows(50, 64, PermutationLM().build_template(VOCAB))
    rows = rows._replace(document_ids=0 * rows.document_ids)
    batch = PermutationLM()(rows, CounterRNG(1, rows.stream_index), VOCAB)
    for is_masked, rank, non_func_tokens in zip(asked_mask(batch), batch.attention_rank, rows.maskable, strict=True):
        masked_or_func_tokens = ~(~is_masked & non_func_tokens)
        rev_index = np.where(masked_or_func_tokens, rank, -1)
        target_tokens = masked_or_func_tokens & non_func_tokens
        assert (target_tokens == is_masked).all()
        self_rev_index = np.where(target_tokens, rev_index, rev_index + 1)
        perm_mask = (self_rev_index[:, None] <= rev_index[None, :]) & masked_or_func_tokens[None, :]
        assert ((~perm_mask | np.eye(64, dtype=bool)) == visibility.visibility_matrix(None, rank)).all()
        query = visibility.visibility_matrix(None, rank, strict=True)
        assert (~perm_mask[target_tokens] == query[target_tokens]).all()


# --- span corruption ----------------------------------------------------------------------------------------------


def published_lengths(text: int, density: float, mean: float) -> tuple[int, int]:
    """Numbers of input and target tokens, with EOS, by the T5 paper's procedure (section 3.1.4)."""
    noise = min(max(round(text * density), 1), text - 1)
    spans = max(round(noise / mean), 1)
    return text - noise + spans + 1, noise + spans + 1


def tie(text: int, density: float, mean: float) -> bool:
    """Halves are rounded up here, and to the even number there."""
    noise = text * density
    return abs(noise % 1 - 0.5) < 1e-6 or abs(round(noise) / mean % 1 - 0.5) < 1e-6


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 32.0)])
def test_lengths_are_the_published_ones(density: float, mean: float) -> None:
    objective = SpanCorruption(density, mean)
    for text in range(8, 1200):
        if not tie(text, density, mean):
            assert objective.encoder_decoder_lengths(text + 1) == published_lengths(text, density, mean)


def test_a_row_of_512_is_made_of_568_tokens() -> None:
    assert published_lengths(568, 0.15, 3.0) == (512, 114)
    assert published_lengths(569, 0.15, 3.0)[0] > 512
    assert SpanCorruption().source_length(512) == 568 + 1
    assert SpanCorruption().encoder_decoder_lengths(569) == (512, 114)
    assert sum(DecoderDenoising().encoder_decoder_lengths(569)) == 512 + 114


def published_mask(length: int, density: float, mean: float, rng: np.random.Generator) -> np.ndarray:
    """The published procedure in our words: cut noise and text into as many pieces, which take turns, text first."""
    noise = round(length * density)
    spans = round(noise / mean)

    def segments(total: int) -> list[int]:
        cuts = np.sort(rng.choice(np.arange(1, total), spans - 1, replace=False)).tolist()
        return [b - a for a, b in pairwise([0, *cuts, total])]

    turns = [n for pair in zip(segments(length - noise), segments(noise), strict=True) for n in pair]
    return np.repeat(np.arange(2 * spans) % 2 == 1, turns)


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 3.0)])
def test_noise_follows_the_published_law(density: float, mean: float) -> None:
    objective, count, text = SpanCorruption(density, mean), 250, 568
    rows = make_rows(count, text + 1, objective.build_template(VOCAB))
    rows = rows._replace(
        maskable=np.tile(np.arange(text + 1) < text, (count, 1)), document_ids=np.zeros_like(rows.document_ids)
    )
    ours = objective.build_noise_mask(rows, CounterRNG(2, rows.stream_index))[:, :-1]
    rng = np.random.default_rng(0)
    theirs = np.stack([published_mask(text, density, mean, rng) for _ in range(count)])
    assert (ours.sum(1) == theirs.sum(1)).all()
    assert alike(run_lengths(ours), run_lengths(theirs)) > UNLIKELY, "noise spans"
    assert alike(run_lengths(~ours), run_lengths(~theirs)) > UNLIKELY, "and the text between them"
    starts = [np.nonzero(np.diff(mask.astype(np.int8), axis=1) == 1)[1] for mask in (ours, theirs)]
    assert alike(starts[0] // 40, starts[1] // 40) > UNLIKELY
    assert not ours[:, 0].any()
    assert ours[:, -1].all()
