"""The doctor's rules on the text of a run: its tokens, its tokenizer, and its held-out part.

A model learns what the shards say. Held-out text of another domain makes every evaluation pessimistic; templates and
duplicates make it optimistic; unknown tokens and single bytes hide words; a special token that is written out in the
text is read as letters. All of it shows in counts of token ids, so no text is read again.

V vocabulary size.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.lab.check import MAX_EXTEND_UNKNOWN_SHARE
from firth.tokens import Tokenizer
from firth.tokens.checkup import make_excerpt
from firth.tokens.shards import Shards
from firth.tokens.token_bytes import token_bytes
from firth.train.findings import Evidence, Rule

MAX_COUNTED_TOKENS = 10_000_000  # of a part, from documents all over it, whose frequencies are counted
MAX_SEARCHED_TOKENS = 1_000_000  # in which repeated lines and special tokens are searched
SMOOTHING = 0.5  # added to each count before two distributions are compared
NUM_RANDOM_PARTS = 12  # random parts of the training text that the held-out part is compared with
MIN_COMPARED_TOKENS = 2_000  # of a held-out part
KL_NATS, KL_FACTOR = 0.15, 2.0  # divergence above the mean of random parts, in nats and as a factor of it
KL_MAX_FACTOR = 1.25  # and above the largest of them: a few long documents differ much by chance
MIN_LINE_TOKENS = 8  # of a line that is compared with others
DUPLICATED_SHARE = 0.2  # of the tokens, in lines that occurred before
FREQUENT_SHARE = 0.002  # of the tokens, from which a token belongs to the skeleton of a line
MIN_SKELETON_TOKENS, MIN_TEMPLATE_LINES = 6, 5  # frequent tokens in a skeleton, and lines that share it
TEMPLATED_SHARE = 0.35  # of the tokens, in lines that share a skeleton
SHORT_PIECE_SHARE = 0.4  # of the tokens that are a single letter or byte
CHARACTER_KINDS = ("char", "elmo-characters", "byte", "bytes")  # tokenizers whose tokens are single characters
MIN_SPECIAL_LOOKALIKES = 10  # special tokens written out in the text
CHECK_COMMAND = "firth check TEXT --kinds none"
UNUSED_SHARE, MIN_UNUSED_TOKENS = 0.3, 300  # of the vocabulary without an occurrence


class RepeatedLines(NamedTuple):
    """Shares of the tokens, and the most frequent line of each kind."""

    duplicated: float
    templated: float
    duplicate: Sequence[int]
    template: Sequence[int]


@dataclass(frozen=True)
class TextFacts:
    """Counts of a training text and of the text it is evaluated on."""

    tokenizer: Tokenizer
    counts: np.ndarray  # of the training text
    held_out_counts: np.ndarray | None
    random_divergences: np.ndarray  # KL of random parts of the training text, as large as the held-out part
    repeated: RepeatedLines
    special_counts: dict[str, int]  # special tokens that are written out in the text
    checkpoint: str = ""  # that the run starts from, whose tokenizer it must keep

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def tokenizer_command(self) -> str:
        """The command for a tokenizer that suits the text, which shards do not name."""
        if self.checkpoint:
            return f"firth adapt {shlex.quote(self.checkpoint)} --data TEXT --output-dir adapted"
        return "firth tokenizer TEXT --kind byte-bpe --output-dir tokenizer"


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each id occurs."""
    return np.bincount(np.asarray(tokens, np.int64), minlength=vocab_size)


def gather_documents(shards: Shards, documents: np.ndarray) -> np.ndarray:
    """Return the tokens of these documents, one after the other."""
    parts = (shards.document_tokens(d)[:MAX_COUNTED_TOKENS] for d in documents.tolist())
    return np.concatenate([shards.tokens[:0], *parts])


def collect_text_facts(tokenizer: Tokenizer, train: Shards, held_out: Shards | None, checkpoint: str) -> TextFacts:
    """Count the tokens of shards."""
    size = tokenizer.vocab.size
    tokens = np.asarray(train.tokens[:MAX_SEARCHED_TOKENS])
    bounds = first_line_bounds(train, len(tokens))
    sample_D = train.sample_documents(MAX_COUNTED_TOKENS)
    counts = count_tokens(gather_documents(train, sample_D), size)
    held_out_counts: np.ndarray | None = None
    if held_out is not None:
        sampled = gather_documents(held_out, held_out.sample_documents(MAX_COUNTED_TOKENS))
        held_out_counts = count_tokens(sampled, size)

    def read(documents: np.ndarray) -> np.ndarray:
        return gather_documents(train, sample_D[documents])

    return TextFacts(
        tokenizer,
        counts,
        held_out_counts,
        random_divergences(
            np.diff(train.offsets)[sample_D], read, counts, 0 if held_out is None else held_out.num_tokens
        ),
        find_repeated_lines(tokens, bounds, counts, tokenizer.vocab.unk),
        count_special_lookalikes(tokenizer, tokens),
        checkpoint,
    )


def collect_example_facts(tokenizer: Tokenizer, train: Iterable[str], dev: Iterable[str], checkpoint: str) -> TextFacts:
    """Count the tokens of labelled examples, of which each text is a line."""
    size, parts = tokenizer.vocab.size, [tokenizer.encode_batch(list(texts)) for texts in (train, dev)]
    ids = [np.array([i for text in part for i in text], np.int64) for part in parts]
    counts = [count_tokens(array, size) for array in ids]
    bounds = np.cumsum([0, *map(len, parts[0])])

    def read(texts: np.ndarray) -> np.ndarray:
        return np.array([i for text in texts.tolist() for i in parts[0][text]], np.int64)

    random = random_divergences(np.diff(bounds), read, counts[0], int(counts[1].sum()))
    repeated = find_repeated_lines(ids[0], bounds, counts[0], tokenizer.vocab.unk)
    return TextFacts(
        tokenizer, counts[0], counts[1], random, repeated, count_special_lookalikes(tokenizer, ids[0]), checkpoint
    )


def first_line_bounds(shards: Shards, num_tokens: int) -> np.ndarray:
    """Return where sentences and documents begin and end in the first tokens; large shards are not read further."""
    has_sentences = shards.has_bit("sentence_end")
    ends = 1 + np.flatnonzero(shards.sentence_ends(0, num_tokens)) if has_sentences else np.zeros(0, np.int64)
    last = int(np.searchsorted(shards.offsets, num_tokens, side="right"))
    return np.union1d(ends, shards.offsets[:last])


# --- measures -------------------------------------------------------------------------------------------------------


def divergence(counts_V: np.ndarray, reference_V: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of two smoothed unigram distributions, in nats.

    >>> divergence(np.array([5, 5]), np.array([5, 5]))
    0.0
    """
    used = (counts_V > 0) | (reference_V > 0)
    p, q = (x[used] + SMOOTHING for x in (counts_V, reference_V))
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


def random_divergences(
    sizes: np.ndarray, ids_of: Callable[[np.ndarray], np.ndarray], counts_V: np.ndarray, num_tokens: int
) -> np.ndarray:
    """Return the divergences of some random documents, together as many tokens as the held-out part, from all others.

    `sizes` has the tokens of each document, and `ids_of` returns those of some documents.
    """
    if num_tokens < MIN_COMPARED_TOKENS:
        return np.zeros(1)
    rng, found = np.random.default_rng(0), list[float]()
    for _ in range(NUM_RANDOM_PARTS):
        order = rng.permutation(len(sizes))
        chosen = order[: int(np.searchsorted(np.cumsum(sizes[order]), min(num_tokens, MAX_COUNTED_TOKENS))) + 1]
        own_V = count_tokens(ids_of(chosen), len(counts_V))
        found.append(divergence(own_V, np.maximum(counts_V - own_V, 0)))
    return np.array(found)


def find_repeated_lines(
    tokens: np.ndarray, bounds: np.ndarray, counts_V: np.ndarray, unk: int | None = None
) -> RepeatedLines:
    """Return the shares of the tokens in lines that occurred before, and in lines that share a skeleton.

    The skeleton of a line is the sequence of its frequent tokens: what is left of "Order 1234 was shipped to Leeds."
    when the rare ones are removed. Natural sentences hardly ever share a long one.
    """
    frequent_V = counts_V >= FREQUENT_SHARE * max(counts_V.sum(), 1)
    is_frequent = frequent_V[tokens]
    lines, skeletons, sizes = list[bytes](), list[bytes](), list[int]()
    for start, end in pairwise(join_short_lines(bounds).tolist()):
        line = tokens[start:end]
        if (line != unk).sum() >= MIN_LINE_TOKENS:
            skeleton = line[is_frequent[start:end]]
            lines.append(line.tobytes())
            skeletons.append(skeleton.tobytes() if len(skeleton) >= MIN_SKELETON_TOKENS else b"")
            sizes.append(end - start)
    total, seen = max(sum(sizes), 1), set[bytes]()
    duplicated = 0
    for line_bytes, size in zip(lines, sizes, strict=True):
        duplicated += size if line_bytes in seen else 0
        seen.add(line_bytes)
    skeleton_counts, line_counts = Counter(s for s in skeletons if s), Counter(lines)
    # a skeleton counts where different lines share it: equal ones are duplicates
    different = Counter(s for _, s in {(line, s) for line, s in zip(lines, skeletons, strict=True)} if s)
    templates = {s for s, n in different.items() if n >= MIN_TEMPLATE_LINES}
    templated = sum(size for s, size in zip(skeletons, sizes, strict=True) if s in templates)
    top_template = max(templates, key=lambda s: skeleton_counts[s], default=b"")
    example = next((line for line, s in zip(lines, skeletons, strict=True) if s == top_template), b"")
    top_line = max(line_counts, key=lambda line: line_counts[line], default=b"")
    return RepeatedLines(
        duplicated / total,
        templated / total,
        np.frombuffer(top_line, tokens.dtype).tolist(),
        np.frombuffer(example, tokens.dtype).tolist(),
    )


def join_short_lines(bounds: np.ndarray) -> np.ndarray:
    """Join short lines that follow each other until they are long enough to be compared; a long one stays alone.

    A text of one short line that repeats itself would else have no line at all.

    >>> join_short_lines(np.array([0, 3, 6, 9, 12, 30, 33, 50])).tolist()
    [0, 9, 12, 30, 33, 50]
    """
    sizes, kept = np.diff(bounds).tolist(), [*bounds[:1].tolist()]
    for size, end in zip(sizes, bounds[1:].tolist(), strict=True):
        is_short, joined = size < MIN_LINE_TOKENS, end - kept[-1]
        if not is_short and joined > size:
            kept.append(end - size)
        if not is_short or joined >= MIN_LINE_TOKENS:
            kept.append(end)
    return np.array(kept + [b for b in bounds[-1:].tolist() if b != kept[-1]])


def count_special_lookalikes(tokenizer: Tokenizer, tokens: np.ndarray) -> dict[str, int]:
    """Return the special tokens whose text is written out in the text, with their counts."""
    found = dict[str, int]()
    for i in tokenizer.vocab.special_ids:
        name = str(tokenizer.backend.id_to_token(i))
        count = sum(count_sequence(tokens, ids) for ids in spellings(tokenizer, name))
        if count:
            found[name] = count
    return found


def spellings(tokenizer: Tokenizer, name: str) -> set[tuple[int, ...]]:
    """Return the ids of a text at the beginning of a text, after a space and after a letter; without unknown ones."""
    found = set[tuple[int, ...]]()
    for before in ("", "a ", "a"):
        ids, start = tokenizer.encode(before + name), tokenizer.encode(before)
        ids = ids[len(start) :] if ids[: len(start)] == start else []
        if len(ids) > 1 and tokenizer.vocab.unk not in ids:
            found.add(tuple(ids))
    return found


def count_sequence(tokens: np.ndarray, ids: Sequence[int]) -> int:
    """Return how often a sequence of ids occurs.

    >>> count_sequence(np.array([1, 2, 3, 1, 2]), (1, 2))
    2
    """
    at = np.flatnonzero(tokens[: len(tokens) - len(ids) + 1] == ids[0])
    for offset, i in enumerate(ids[1:], 1):
        at = at[tokens[at + offset] == i]
    return len(at)


def short_pieces(tokenizer: Tokenizer) -> np.ndarray | None:
    """(V,) which tokens are one letter or one byte that is no ASCII character; None where their bytes are unknown."""
    try:
        pieces = [piece.strip() for piece in token_bytes(tokenizer).pieces]
    except UserError:
        return None
    return np.array([len(piece) == 1 and (piece.isalpha() or piece[0] >= 128) for piece in pieces])


# --- rules ----------------------------------------------------------------------------------------------------------


def check_domain_shift(facts: TextFacts) -> Evidence | None:
    held_out = facts.held_out_counts
    if held_out is None or held_out.sum() < MIN_COMPARED_TOKENS or facts.num_tokens < MIN_COMPARED_TOKENS:
        return None
    kl, random = divergence(held_out, facts.counts), float(facts.random_divergences.mean())
    if kl < max(random + KL_NATS, KL_FACTOR * random, KL_MAX_FACTOR * facts.random_divergences.max()):
        return None
    ratio_V = np.log((held_out + 1) / held_out.sum()) - np.log((facts.counts + 1) / facts.num_tokens)
    top = np.argsort(-held_out / held_out.sum() * ratio_V)[:5].tolist()
    words = ", ".join(repr(facts.tokenizer.decode([i], skip_special_tokens=False).strip()) for i in top)
    return Evidence(
        {"KL of unigrams": kl, "KL of random parts of train": random, "typical tokens": words},
        "The evaluated text is of another domain than the training text: its loss does not measure this training.",
        CHECK_COMMAND,
    )


def check_duplicated_lines(facts: TextFacts) -> Evidence | None:
    if facts.repeated.duplicated < DUPLICATED_SHARE:
        return None
    line = make_excerpt(facts.tokenizer.decode(facts.repeated.duplicate))
    return Evidence(
        {"share of the text": facts.repeated.duplicated, "most frequent": line},
        "Lines occur again and again: the model learns them by heart, and held-out text holds them too.",
        CHECK_COMMAND,
    )


def check_templated_lines(facts: TextFacts) -> Evidence | None:
    if facts.repeated.templated < TEMPLATED_SHARE:
        return None
    line = make_excerpt(facts.tokenizer.decode(facts.repeated.template))
    return Evidence(
        {"share of the text": facts.repeated.templated, "most frequent": line},
        "Lines differ in a few words alone, as records of a form do: there is little language to learn.",
        CHECK_COMMAND,
    )


def check_unknown_tokens(facts: TextFacts) -> Evidence | None:
    unk = facts.tokenizer.vocab.unk
    share = 0.0 if unk is None else float(facts.counts[unk] / max(facts.num_tokens, 1))
    if share < MAX_EXTEND_UNKNOWN_SHARE:
        return None
    return Evidence(
        {"unknown tokens": share, "vocabulary": facts.tokenizer.vocab.size},
        "The tokenizer was made for another text: it has no pieces for many words.",
        facts.tokenizer_command,
    )


def check_short_pieces(facts: TextFacts) -> Evidence | None:
    short_V = None if facts.tokenizer.kind in CHARACTER_KINDS else short_pieces(facts.tokenizer)
    if short_V is None or not short_V[facts.tokenizer.vocab.non_special_ids].any():
        return None
    share = float(facts.counts[short_V].sum() / max(facts.num_tokens, 1))
    is_all_characters = short_V[facts.tokenizer.vocab.non_special_ids].mean() > 0.5
    if share < SHORT_PIECE_SHARE or is_all_characters:
        return None
    return Evidence(
        {"one-byte pieces": share, "vocabulary": facts.tokenizer.vocab.size},
        "The tokenizer splits words into letters or bytes: it was made for another language, or is too small.",
        facts.tokenizer_command,
    )


def check_special_lookalikes(facts: TextFacts) -> Evidence | None:
    count = sum(facts.special_counts.values())
    if count < MIN_SPECIAL_LOOKALIKES:
        return None
    return Evidence(
        {"occurrences": count, **facts.special_counts},
        "Special tokens are written out in the text, as letters: the model learns to write them, and no end of a text.",
        CHECK_COMMAND,
    )


def check_untrained_embeddings(facts: TextFacts) -> Evidence | None:
    short_V = short_pieces(facts.tokenizer)
    ids = facts.tokenizer.vocab.non_special_ids
    ids = ids if short_V is None else ids[~short_V[ids]]
    unused = ids[facts.counts[ids] == 0]
    if facts.checkpoint or len(unused) < max(UNUSED_SHARE * len(ids), MIN_UNUSED_TOKENS):
        return None
    numbers = {"tokens without an occurrence": len(unused), "share of the vocabulary": len(unused) / len(ids)}
    if facts.held_out_counts is not None:
        numbers["occurrences in held-out text"] = int(facts.held_out_counts[unused].sum())
    return Evidence(
        numbers,
        "Their embeddings keep their random values: the vocabulary is too large for the text, or made for another.",
        facts.tokenizer_command,
    )


TEXT_RULES: tuple[Rule[TextFacts], ...] = (
    Rule(
        "domain-shift",
        "warning",
        "dev is of another domain than train",
        f"the KL divergence of their unigrams exceeds the mean of random parts of train by {KL_NATS} nats and a factor "
        f"of {KL_FACTOR:g}, and the largest of them by a factor of {KL_MAX_FACTOR:g}",
        check_domain_shift,
    ),
    Rule(
        "duplicated-lines",
        "warning",
        "the text repeats its lines",
        f"{DUPLICATED_SHARE:.0%} of the tokens are in lines of {MIN_LINE_TOKENS} tokens or more that occurred before",
        check_duplicated_lines,
    ),
    Rule(
        "templated-lines",
        "warning",
        "the text is made of templates",
        f"{TEMPLATED_SHARE:.0%} of the tokens are in lines whose frequent tokens, {MIN_SKELETON_TOKENS} or more, are "
        f"those of {MIN_TEMPLATE_LINES} different lines, in the same order",
        check_templated_lines,
    ),
    Rule(
        "unknown-tokens",
        "warning",
        "the tokenizer does not know the text",
        f"{MAX_EXTEND_UNKNOWN_SHARE:.0%} of the tokens are unknown",
        check_unknown_tokens,
    ),
    Rule(
        "short-pieces",
        "warning",
        "the tokenizer splits words into letters or bytes",
        f"{SHORT_PIECE_SHARE:.0%} of the tokens are one letter or byte",
        check_short_pieces,
    ),
    Rule(
        "special-in-text",
        "warning",
        "special tokens are written out in the text",
        f"{MIN_SPECIAL_LOOKALIKES} or more occurrences",
        check_special_lookalikes,
    ),
    Rule(
        "untrained-embeddings",
        "warning",
        "embeddings are never trained",
        f"{UNUSED_SHARE:.0%} of the vocabulary, and {MIN_UNUSED_TOKENS} tokens or more, never occur in the text",
        check_untrained_embeddings,
    ),
)
