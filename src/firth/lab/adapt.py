"""Adapt a model to a domain: the stages around continued pretraining.

A model that reads another domain has two problems. Its tokenizer splits the words of the domain into many pieces, and
its weights have never seen the text. Continued pretraining solves the second (Gururangan et al. 2020, "Don't Stop
Pretraining"), new tokens solve the first. Both have a price: the model forgets what it does not read any more. A share
of general text in every step (replay) keeps most of it (Ibrahim et al. 2024, section 6).

So an adaptation measures on both sides, on held-out text of the domain and of the general kind, before and after:

- bits per byte, which do not depend on the tokenizer (`evaluate/text_bits.py`);
- fragmentation: tokens per word, and the words that are split worst;
- forgetting: by how much the bits per byte of general text have risen.

The functions here measure, choose new tokens and write the weights that training starts from; `commands/adapt.py` puts
them in order around the one training loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from firth.core.console import format_count, quiet, say
from firth.core.errors import UserError
from firth.core.files import atomic_folder, read_json
from firth.evaluate.text_bits import BitsChange, TextBits, compare_text_bits, measure_text_bits
from firth.generate.decode_state import check_has_lm_head
from firth.lab.adapt_texts import SplitText, TextSample
from firth.models import Model, flops_per_token, grow_embeddings, load_model, read_config, write_model
from firth.models.presets import checkpoint_hint
from firth.static.ngram import is_ngram
from firth.text import Document
from firth.tokens import Tokenizer, load_tokenizer
from firth.tokens.extend import EXTENDED_KINDS, NewToken, extend_tokenizer, propose_tokens
from firth.tokens.fertility import SplitCounter
from firth.train.recipe import read_yaml_mapping

MEASURED_BYTES = 200_000  # bytes of each held-out text that are measured
MIN_CPU_MEASURED_BYTES = 20_000  # the same for a large model on a CPU
CPU_MEASURE_FLOPS = 3e12  # operations of a measurement on a CPU: about a minute
ASSUMED_BYTES_PER_TOKEN = 3.0
SCORED_TWICE = 2  # sliding windows read each token about twice

# New tokens by default: a token needs some dozens of occurrences to learn its vector, and each costs two rows.
AUTO_MAX_NEW_TOKENS = 4096
AUTO_MIN_TOKEN_COUNT = 30
MIN_SAVED_SHARE = 0.03  # share of the tokens that new tokens must save
MAX_LISTED_TOKENS = 50
OWN_RUN_FIELDS = ("max_seq_length", "order", "memory", "split")  # kept from the run of the checkpoint


# --- which checkpoints ----------------------------------------------------------------------------------------------


def check_adaptable(checkpoint: Path) -> None:
    """Raise UserError for a folder whose model cannot be trained further on text, or not measured."""
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder. {checkpoint_hint(checkpoint)}")
    if (checkpoint / "adapter_config.json").is_file():
        raise UserError(
            f"{checkpoint} is an adapter (LoRA), not a model. Merge it into its base first, or adapt the base."
        )
    if is_ngram(checkpoint):
        raise UserError(f"{checkpoint} is an n-gram model, which is counted, not trained: count the new text as well.")
    config = read_config(checkpoint)
    if (read_json(checkpoint / "config.json") or {}).get("quantization_config"):
        raise UserError(f"{checkpoint} is quantized: rounded weights cannot be trained. Adapt the model before it.")
    if config.get_extra("generator") is not None:
        raise UserError(
            f"{checkpoint} detects replaced tokens (ELECTRA) and predicts no words, so bits per byte cannot be "
            f"measured. `firth pretrain {checkpoint} --data TEXT` trains it further without measuring."
        )
    try:
        check_has_lm_head(config)
    except UserError as e:
        raise UserError(f"{checkpoint}: {e}") from None
    load_tokenizer(checkpoint)


def read_own_run_fields(checkpoint: Path) -> dict[str, Any]:
    """Return the row length and the order of the text in the run of a checkpoint; empty where there is no run."""
    recipe = checkpoint.absolute().parent / "recipe.yaml"
    saved = read_yaml_mapping(recipe) if recipe.is_file() else {}
    return {name: saved[name] for name in OWN_RUN_FIELDS if name in saved and "model" in saved}


# --- measurements ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorstWord:
    """A word that is split into many tokens."""

    word: str
    count: int
    pieces: float
    split: str  # "ki·ta·bu"


@dataclass(frozen=True)
class AddedToken:
    """A new token, as results.json lists it."""

    token: str
    count: int  # in the text to train on
    saved_per_mb: float  # tokens that it saves in a megabyte of the domain
    old_pieces: tuple[str, ...]


@dataclass(frozen=True)
class TextMeasure:
    """A model and its tokenizer on one held-out text."""

    bits: TextBits
    tokens: int
    tokens_per_word: float
    words_split: float  # share of the words
    unknown: float  # share of the tokens
    worst_words: tuple[WorstWord, ...]

    def summary(self) -> dict[str, Any]:
        """Return the figures, without lists."""
        fragmentation = {name: getattr(self, name) for name in ("tokens", "tokens_per_word", "words_split", "unknown")}
        return {**self.bits.to_dict(), **fragmentation}


Measures = dict[str, TextMeasure]  # "domain", and "general" where there is such a text


@dataclass(frozen=True)
class AdaptStart:
    """What is known before training, as adapt.json keeps it for a resumed run."""

    measured_bytes: int
    seconds: float  # of one measurement, which the minutes of the run have to include once more
    before: Measures
    start: Measures  # with new tokens that are not trained yet; empty without
    new_tokens: tuple[AddedToken, ...]  # those that save most first
    tokens_saved: float  # share of the domain's held-out tokens that the new tokens save
    decision: str


def choose_measured_bytes(checkpoint: Path) -> int:
    """Return the bytes of a text to measure on; fewer for a model that takes long on a CPU."""
    if torch.cuda.is_available():
        return MEASURED_BYTES
    flops_per_byte = SCORED_TWICE * flops_per_token(read_config(checkpoint), 512) / ASSUMED_BYTES_PER_TOKEN
    return int(min(MEASURED_BYTES, max(MIN_CPU_MEASURED_BYTES, CPU_MEASURE_FLOPS / flops_per_byte)))


def measure_model(checkpoint: Path, samples: Mapping[str, TextSample]) -> Measures:
    """Measure a checkpoint on each text."""
    with quiet():
        model = load_model(checkpoint)
    return {name: measure_text(model, sample) for name, sample in samples.items()}


def measure_text(model: Model, sample: TextSample) -> TextMeasure:
    assert model.tokenizer is not None, "checked before"
    counter = SplitCounter(model.tokenizer)
    counter.add_documents([Document(text, "") for text in sample.texts])
    words, tokens = max(counter.word_counts.total(), 1), max(counter.num_tokens, 1)
    return TextMeasure(
        measure_text_bits(model, sample.texts),
        counter.num_tokens,
        counter.piece_counts.total() / words,
        counter.num_split / words,
        counter.unknown_texts.total() / tokens,
        tuple(WorstWord(**word) for word in counter.worst_words()),
    )


# --- new tokens -----------------------------------------------------------------------------------------------------


class TokenChoice(NamedTuple):
    """Tokens to add, the tokenizer with them, and why."""

    tokens: Sequence[NewToken]
    tokenizer: Tokenizer
    saved_share: float  # of the tokens of held-out domain text
    reason: str


def choose_new_tokens(tokenizer: Tokenizer, text: SplitText, sample: TextSample, requested: int | None) -> TokenChoice:
    """Choose the tokens of a domain: `requested` of them, or with None as many as pay.

    They are found in the text to train on, and judged on held-out text: they pay if they save `MIN_SAVED_SHARE` of
    its tokens. Each must occur often enough to learn its vector.
    """
    if requested == 0:
        return TokenChoice((), tokenizer, 0.0, "no new tokens (--new-tokens 0)")
    if tokenizer.kind not in EXTENDED_KINDS:
        return TokenChoice((), tokenizer, 0.0, f"no new tokens: a tokenizer of kind {tokenizer.kind} takes none")
    limits = (requested, {}) if requested else (AUTO_MAX_NEW_TOKENS, {"min_count": AUTO_MIN_TOKEN_COUNT})
    found = propose_tokens(tokenizer, train_texts(text), limits[0], **limits[1])
    if not found:
        return TokenChoice((), tokenizer, 0.0, "no new tokens: no word of the domain is split often enough")
    extended = extend_tokenizer(tokenizer, found)
    before, after = (sum(map(len, t.encode_batch(sample.texts))) for t in (tokenizer, extended))
    saved = 1 - after / max(before, 1)
    per_megabyte = (before - after) / max(sample.num_bytes, 1) * 1e6
    saves = (
        f"{format_count(len(found), 'new token')} would save {saved:.1%} of the tokens of held-out domain text, "
        f"{per_megabyte:,.0f} per MB"
    )
    if requested is None and saved < MIN_SAVED_SHARE and not any(new.unknown for new in found):
        return TokenChoice(
            (), tokenizer, saved, f"{saves}, less than {MIN_SAVED_SHARE:.0%}: not added (--new-tokens N adds them)"
        )
    return TokenChoice(found, extended, saved, f"{saves}: added")


def train_texts(text: SplitText) -> Iterator[str]:
    """Yield the texts to train on."""
    return (side for document, held_out in text if not held_out for side in document.texts)


def list_new_tokens(choice: TokenChoice, train_bytes: int) -> tuple[AddedToken, ...]:
    """Return the new tokens, those that save most first."""
    found = sorted(choice.tokens, key=lambda new: -new.saved_tokens)
    megabytes = max(train_bytes, 1) / 1e6
    return tuple(
        AddedToken(new.text or new.token, new.count, new.saved_tokens / megabytes, new.old_pieces) for new in found
    )


def write_start(checkpoint: Path, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint with an extended tokenizer: new rows start at the mean of their old pieces."""
    with quiet():
        model = load_model(checkpoint)
    assert model.tokenizer is not None, "checked before"
    grow_embeddings(model, model.tokenizer, tokenizer)
    model.tokenizer = tokenizer
    with atomic_folder(folder) as temporary:
        write_model(model, temporary)


# --- results --------------------------------------------------------------------------------------------------------


def collect_results(begun: AdaptStart, after: Measures, replay: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of an adaptation: both texts before and after, the changes, forgetting, new tokens."""
    changes = {name: compare_text_bits(begun.before[name].bits, after[name].bits) for name in begun.before}
    texts = {
        name: {
            "before": begun.before[name].summary(),
            **({"with_new_tokens": begun.start[name].summary()} if begun.start else {}),
            "after": after[name].summary(),
            **changes[name]._asdict(),
        }
        for name in begun.before
    }
    forgotten = changes.get("general")
    return {
        **texts,
        "forgetting": None if forgotten is None else forgotten.change,
        "new_tokens": {
            "added": len(begun.new_tokens),
            "saved": begun.tokens_saved,
            "decision": begun.decision,
            "best": [asdict(new) for new in begun.new_tokens[:MAX_LISTED_TOKENS]],
        },
        "replay": dict(replay),
        "worst_words": [asdict(word) for word in begun.before["domain"].worst_words],
        "summary": summarize(begun.before, after, changes),
    }


def summarize(before: Measures, after: Measures, changes: Mapping[str, BitsChange]) -> str:
    """Return the outcome in a sentence or two."""
    parts = [
        f"bits per byte on the domain {describe_change(before['domain'], after['domain'], changes['domain'])}",
        f"tokens per word {before['domain'].tokens_per_word:.2f} -> {after['domain'].tokens_per_word:.2f}",
    ]
    if "general" in changes:
        parts.append(f"forgetting on general text {describe_interval(changes['general'])} bits per byte")
    else:
        parts.append("forgetting not measured (no general text)")
    return "; ".join(parts)


def describe_change(before: TextMeasure, after: TextMeasure, change: BitsChange) -> str:
    return f"{before.bits.bits_per_byte:.3f} -> {after.bits.bits_per_byte:.3f} ({describe_interval(change)})"


def describe_interval(change: BitsChange) -> str:
    """
    >>> describe_interval(BitsChange(-0.1234, 0.01)), describe_interval(BitsChange(0.2, None))
    ('-0.123 ± 0.010', '+0.200')
    """
    return f"{change.change:+.3f}" + (f" ± {change.interval:.3f}" if change.interval is not None else "")


def say_measures(title: str, measures: Measures) -> None:
    for name, one in measures.items():
        say(
            f"{title}: {one.bits.bits_per_byte:.3f} bits per byte and {one.tokens_per_word:.2f} tokens per word on "
            f"{sum(one.bits.bytes):,} bytes of held-out {name} text ({one.bits.method})"
        )
