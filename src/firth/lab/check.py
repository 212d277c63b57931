"""The check of a corpus: statistics of the text, a comparison of tokenizers, and advice that follows from both.

The text is read once, with bounded memory. Tokenizers are trained and measured on a sample. Each piece of advice names
the rule behind it, so that a person can decide otherwise.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from firth.core.console import format_count, say
from firth.core.errors import UserError, quote
from firth.lab.check_commands import adapt_commands, limited_length, suggest_commands
from firth.models import count_parameters, get_preset
from firth.models.presets import ARCHITECTURE_FAMILIES, SHAPE_LADDER
from firth.recipes import default_vocab_size
from firth.text import HELD_OUT_FRACTION, Corpus, Example, read_labelled
from firth.text.labelled import infer_task
from firth.text.leak_detection import LeakFinder
from firth.tokens import Tokenizer
from firth.tokens.checkup import SAMPLE_CHARS, check_documents, make_excerpt
from firth.tokens.extend import EXTENDED_KINDS
from firth.tokens.fertility import TokenizerFit, measure_fit, split_sample, train_candidate_tokenizers
from firth.train.recipe import MAX_ROW_TOKENS

COMPARED_TOKENIZER_KINDS = ("byte-bpe", "wordpiece", "unigram")  # default of --kinds

# Minimum occurrences of 95% of the tokens that are used: an embedding that is trained less often stays near its random
# initialisation. After Gowda & May 2020, who use 100 for translation.
MIN_TOKEN_OCCURRENCES = 10
MIN_TOKENS_SAVED_SHARE = 0.02  # share of the tokens that a larger vocabulary must save
SAME_FERTILITY_TOLERANCE = 0.03  # relative difference in bytes per token below which kinds count as equal
MAX_LOST_CHARACTERS_SHARE = 1e-4  # share of the characters that a tokenizer may lose
MAX_UNKNOWN_TOKENS_SHARE = 1e-3  # share of the tokens that may be unknown
# Tokens of a given tokenizer per token of one that was trained on the text: up to which to keep it, or to extend it.
MAX_KEEP_TOKEN_RATIO, MAX_EXTEND_TOKEN_RATIO = 1.15, 1.5
MAX_EXTEND_UNKNOWN_SHARE = 0.01  # share of unknown tokens above which an extension does not help
MIN_WHOLE_DOCUMENTS_SHARE = 0.9  # share of the documents that should fit into a row uncut
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
MAX_USEFUL_EPOCHS = 4  # repeated text is nearly worth new text up to here (Muennighoff et al. 2023)
MIN_DUPLICATES_SHARE = 0.01  # share of the documents from which to advise
MIN_SUSPICIOUS_SHARE = 0.01  # share of the documents from which to advise
MAX_LISTED_LEAKS = 100  # labelled examples in the result; all are counted


@dataclass(frozen=True)
class Advice:
    """A topic, what to do, and why."""

    about: str
    do: str
    why: str


@dataclass(frozen=True)
class CorpusCheck:
    """The result of `firth check`, for the terminal, the page and JSON."""

    reading: str
    text: dict[str, Any]
    sample: dict[str, Any]
    fits: list[TokenizerFit]
    left_out: list[str]
    chosen: str | None  # name of the tokenizer that the advice is for
    models: list[dict[str, Any]]
    advice: list[Advice]
    leaks: dict[str, Any] | None = None  # labelled examples that occur in the text
    commands: list[str] = field(default_factory=list)  # to paste, from the text to a pretrained model

    def to_dict(self) -> dict[str, Any]:
        return {
            "reading": self.reading,
            "text": self.text,
            "sample": self.sample,
            "tokenizers": [fit.to_dict() for fit in self.fits],
            "left_out": self.left_out,
            "chosen": self.chosen,
            "models": self.models,
            "advice": [asdict(advice) for advice in self.advice],
            "leaks": self.leaks,
            "commands": self.commands,
        }


def check_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer | None = None,
    name: str = "",
    kinds: Sequence[str] = COMPARED_TOKENIZER_KINDS,
    vocab_sizes: Sequence[int] = (),
    sample: int = SAMPLE_CHARS,
    lowercase: bool = False,
    labelled: LabelledFile | None = None,
) -> CorpusCheck:
    """Read a corpus once; measure the given tokenizer, and others trained for the text, on a sample.

    With `labelled`, also search the text for the examples of a labelled file.
    """
    search = LeakFinder(labelled.examples) if labelled else None
    stats = check_documents(corpus, corpus.total_bytes, sample, search.scan if search else None)
    say(corpus.describe())
    leaked = summarize_leaks(labelled, search) if labelled and search else None
    text, parts = stats.facts(), split_sample(stats.sample.documents.values())
    scale = stats.num_characters / max(stats.sample.characters, 1)
    fits = [measure_fit(tokenizer, parts, scale, name, given=True)] if tokenizer is not None else []
    tokenizers = {name: tokenizer} if tokenizer is not None else {}
    left_out: list[str] = []
    for trained in train_candidate_tokenizers(
        parts, kinds, vocab_sizes or candidate_vocab_sizes(text["bytes"]), lowercase
    ):
        if isinstance(trained, str):
            left_out.append(trained)
        else:
            fits.append(measure_fit(trained, parts, scale, f"{trained.kind} {trained.vocab.size:,}"))
            tokenizers[fits[-1].name] = trained
    chosen = choose_tokenizer([fit for fit in fits if not fit.given]) or next(iter(fits), None)
    sample_stats = {
        "documents": len(parts.all_documents),
        "characters": stats.sample.characters,
        "share": 1 / scale,
        "measured_documents": len(parts.measured),
        "measured_apart": parts.is_disjoint,
    }
    models = suggest_models(text, chosen) if chosen else []
    advice = [*leakage_advice(leaked), *all_advice(text, fits, chosen, models)]
    best = chosen.name if chosen else None
    commands: list[str] = []
    if chosen is not None:
        decisions = {fit.name: decide_tokenizer(fit, fits) for fit in fits if fit.given}
        kept = next((fit for fit in fits if decisions.get(fit.name, "retrain") != "retrain"), None)
        used = kept or chosen
        commands = adapt_commands(corpus, name, advised_normal_forms(text)) if name else []
        commands += suggest_commands(
            corpus,
            tokenizers[used.name],
            name if kept else "",
            used.vocab_size,
            models,
            choose_row_length(used),
            advised_normal_forms(text),
            text["near_duplicates"]["share"] >= MIN_DUPLICATES_SHARE,
            lowercase,
            extends=decisions.get(used.name) == "extend",
        )
    return CorpusCheck(corpus.describe(), text, sample_stats, fits, left_out, best, models, advice, leaked, commands)


class LabelledFile(NamedTuple):
    """A labelled file whose examples are searched for in the text."""

    file: str
    task: str
    examples: list[Example]


def read_leak_examples(
    file: str, task: str | None = None, columns: Mapping[str, str] | None = None, encoding: str = "utf-8"
) -> LabelledFile:
    """Read the examples of a labelled file; labels may be missing, as in a test set."""
    try:
        task = task or infer_task(file, columns, encoding)
        examples = read_labelled(file, task, columns, encoding=encoding, require_labels=False)
    except UserError as e:
        raise UserError(str(e).replace("--columns", "--labelled-columns")) from None
    if task == "tag":  # its texts are single words
        examples = [example._replace(texts=(" ".join(example.texts),)) for example in examples]
    return LabelledFile(file, task, examples)


def summarize_leaks(labelled: LabelledFile, search: LeakFinder) -> dict[str, Any]:
    """Return how many examples occur in the text: verbatim, or at least half of their n-grams; worst first."""
    by_example = {leak.example_index: leak for leak in reversed(search.found_leaks())}  # the worst of each example
    worst = sorted(by_example.values(), key=lambda leak: (-leak.share, leak.example_index))
    exact = sum(leak.share == 1 for leak in worst)
    return {
        "file": labelled.file,
        "task": labelled.task,
        "examples": search.num_examples,
        "compared": search.num_compared,
        "exact": exact,
        "near": len(worst) - exact,
        "share": len(worst) / max(search.num_compared, 1),
        "found": [
            {"id": leak.example_id, "share": leak.share, "source": leak.source, "text": make_excerpt(leak.text)}
            for leak in worst[:MAX_LISTED_LEAKS]
        ],
    }


def candidate_vocab_sizes(text_bytes: int) -> tuple[int, ...]:
    """Return the vocabulary sizes to compare: half the default for this amount of text, the default, and twice."""
    default = default_vocab_size(text_bytes)
    return (default // 2, default, 2 * default)


# --- tokenizers ---------------------------------------------------------------------------------------------------


def choose_tokenizer(fits: Sequence[TokenizerFit]) -> TokenizerFit | None:
    """Return the tokenizer with the fewest tokens among kinds that lose nothing, each at its best vocabulary size.

    Among about equal kinds, the first of `COMPARED_TOKENIZER_KINDS` wins: byte-BPE has no unknown words.
    """
    kinds = list(dict.fromkeys(sorted((fit.kind for fit in fits), key=kind_preference)))
    best = [choose_vocab_size([fit for fit in fits if fit.kind == kind]) for kind in kinds]
    if not best:
        return None
    lossless = [
        fit for fit in best if fit.lost <= MAX_LOST_CHARACTERS_SHARE and fit.unknown <= MAX_UNKNOWN_TOKENS_SHARE
    ] or best
    most_bytes = max(fit.bytes_per_token for fit in lossless)
    return next(fit for fit in lossless if fit.bytes_per_token >= (1 - SAME_FERTILITY_TOLERANCE) * most_bytes)


def kind_preference(kind: str) -> int:
    return COMPARED_TOKENIZER_KINDS.index(kind) if kind in COMPARED_TOKENIZER_KINDS else len(COMPARED_TOKENIZER_KINDS)


def choose_vocab_size(fits: Sequence[TokenizerFit]) -> TokenizerFit:
    """Return the largest vocabulary whose tokens occur often enough and that saves enough tokens over a smaller one."""
    best, *larger = sorted(fits, key=lambda fit: fit.vocab_size)
    for fit in larger:
        if (
            fit.times_seen >= MIN_TOKEN_OCCURRENCES
            and 1 - best.bytes_per_token / fit.bytes_per_token >= MIN_TOKENS_SAVED_SHARE
        ):
            best = fit
    return best


def compare_with_trained(current: TokenizerFit, trained: Sequence[TokenizerFit]) -> tuple[TokenizerFit, float] | None:
    """Return the best trained tokenizer that is not larger than the given one, and tokens given / trained."""
    if not trained:
        return None
    no_larger = [fit for fit in trained if fit.vocab_size <= current.vocab_size]
    rival = (
        max(no_larger, key=lambda fit: fit.bytes_per_token) if no_larger else min(trained, key=lambda f: f.vocab_size)
    )
    return rival, rival.bytes_per_token / current.bytes_per_token


def tokenizer_decision(ratio: float, unknown: float) -> str:
    """Decide by the ratio of tokens and the share of unknown tokens.

    >>> [tokenizer_decision(*x) for x in ((1.05, 0), (1.3, 0), (1.05, 0.005), (2.0, 0), (1.05, 0.05))]
    ['keep', 'extend', 'extend', 'retrain', 'retrain']
    """
    if ratio > MAX_EXTEND_TOKEN_RATIO or unknown > MAX_EXTEND_UNKNOWN_SHARE:
        return "retrain"
    return "extend" if ratio > MAX_KEEP_TOKEN_RATIO or unknown > MAX_UNKNOWN_TOKENS_SHARE else "keep"


def decide_tokenizer(given: TokenizerFit, fits: Sequence[TokenizerFit]) -> str:
    """Return keep, extend or retrain for a given tokenizer; a kind that cannot be extended is retrained."""
    compared = compare_with_trained(given, [fit for fit in fits if not fit.given])
    decision = "keep" if compared is None else tokenizer_decision(compared[1], given.unknown)
    return "retrain" if decision == "extend" and given.kind not in EXTENDED_KINDS else decision


# --- models -------------------------------------------------------------------------------------------------------


def estimate_train_tokens(corpus_stats: dict[str, Any], fit: TokenizerFit) -> int:
    """Estimate the number of training tokens: without duplicates and the held-out split."""
    return round(
        corpus_stats["characters"]
        * (1 - corpus_stats["duplicate_share"])
        * (1 - HELD_OUT_FRACTION)
        / fit.characters_per_token
    )


def suggest_models(corpus_stats: dict[str, Any], fit: TokenizerFit) -> list[dict[str, Any]]:
    """Return sizes of each architecture with this vocabulary, and the epochs that 20 tokens per parameter take."""
    tokens, models = max(estimate_train_tokens(corpus_stats, fit), 1), []
    for architecture in ARCHITECTURE_FAMILIES:
        for num_layers, dim in SHAPE_LADDER:
            name = f"{architecture}-{num_layers}x{dim}"
            parameters = count_parameters(replace(get_preset(name), vocab_size=fit.vocab_size))
            epochs = TOKENS_PER_PARAMETER * parameters / tokens
            models.append({"name": name, "architecture": architecture, "parameters": parameters, "epochs": epochs})
            if epochs > 5 * MAX_USEFUL_EPOCHS:  # far too large already
                break
    return [{**model, "fits": model["name"] in largest_fitting_models(models)} for model in models]


def largest_fitting_models(models: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each architecture the largest model within MAX_USEFUL_EPOCHS, or the smallest."""
    chosen = []
    for architecture in dict.fromkeys(model["architecture"] for model in models):
        first, *others = (model for model in models if model["architecture"] == architecture)
        chosen.append([first, *(model for model in others if model["epochs"] <= MAX_USEFUL_EPOCHS)][-1]["name"])
    return chosen


# --- advice -------------------------------------------------------------------------------------------------------


def all_advice(
    corpus_stats: dict[str, Any],
    fits: Sequence[TokenizerFit],
    chosen: TokenizerFit | None,
    models: Sequence[dict[str, Any]],
) -> Iterator[Advice]:
    """Yield advice in the order in which a person would follow it."""
    yield from cleaning_advice(corpus_stats)
    trained = [fit for fit in fits if not fit.given]
    for given in (fit for fit in fits if fit.given):
        if compared := compare_with_trained(given, trained):
            yield existing_tokenizer_advice(given, *compared, decide_tokenizer(given, fits))
    if chosen is None:
        return
    if not chosen.given:
        yield new_tokenizer_advice(chosen, trained)
    yield row_length_advice(chosen, models)
    yield model_size_advice(corpus_stats, chosen, models)


def leakage_advice(leaks: dict[str, Any] | None) -> Iterator[Advice]:
    if leaks is None or not leaks["exact"] + leaks["near"]:
        return
    num_leaks = format_count(leaks["exact"] + leaks["near"], "example")
    yield Advice(
        "leakage",
        f"Do not score on examples that occur in this text ({num_leaks} of {leaks['file']}), or remove them from it.",
        f"That is {leaks['share']:.1%} of the examples that can be compared: {leaks['exact']:,} word for word, "
        f"{leaks['near']:,} for the greater part. Scores on a test that was in the training text measure memory.",
    )


def cleaning_advice(corpus_stats: dict[str, Any]) -> Iterator[Advice]:
    documents = max(corpus_stats["documents"], 1)
    if corpus_stats["duplicate_share"] >= MIN_DUPLICATES_SHARE:
        yield Advice(
            "duplicates",
            f"Nothing: `firth prepare` drops the {format_count(corpus_stats['duplicates'], 'copy', 'copies')}.",
            f"They are {corpus_stats['duplicate_share']:.1%} of the documents; models memorise repeated text.",
        )
    near = corpus_stats["near_duplicates"]
    if near["share"] >= MIN_DUPLICATES_SHARE:
        yield Advice(
            "near duplicates",
            "`firth prepare --dedup near` drops them too.",
            f"About {near['share']:.1%} of the different documents share four fifths of their runs of five words with "
            "one before them.",
        )
    if frequent := [x for x in corpus_stats["suspicious"] if x["documents"] >= MIN_SUSPICIOUS_SHARE * documents]:
        yield Advice(
            "dirt",
            "Look at these before training: " + ", ".join(x["name"] for x in frequent) + ".",
            " ".join(
                f"{x['name']} in {x['documents'] / documents:.1%} of the documents: {x['meaning']}." for x in frequent
            ),
        )
    if forms := advised_normal_forms(corpus_stats):
        yield Advice(
            "spellings",
            f"--normalize {','.join(forms)} joins spellings that look the same; give it to every command.",
            " ".join(
                f"{format_count(x['words'], 'word')} ({format_count(x['occurrences'], 'occurrence')}) with "
                f"{x['difference']}: "
                + "; ".join(" / ".join(f"{w} ({n:,})" for w, n in example.items()) for example in x["examples"])
                + "."
                for x in corpus_stats["spellings"]
            )
            + " Invisible characters are removed." * ("invisible" in forms)
            + " To a tokenizer they are different words. A tokenizer that is trained with the option does the same to "
            "every text that it reads.",
        )
    if lines := corpus_stats["repeated_lines"]:
        yield Advice(
            "repeated lines",
            "Remove lines that are not text, such as headers and menus.",
            f"{quote(lines[0]['line'])} is in {lines[0]['documents']:,} documents; see the list.",
        )


def advised_normal_forms(corpus_stats: dict[str, Any]) -> list[str]:
    """Return the forms of `--normalize` that join spellings or remove characters found in the text."""
    invisible = any(x["name"] == "invisible characters" for x in corpus_stats["suspicious"])
    return [*(variant["form"] for variant in corpus_stats["spellings"]), *["invisible"] * invisible]


def existing_tokenizer_advice(current: TokenizerFit, rival: TokenizerFit, ratio: float, decision: str) -> Advice:
    """Advise to keep, extend or retrain the tokenizer of a checkpoint."""
    actions = {
        "keep": "Keep it: no embeddings have to be trained anew. `firth adapt` trains its checkpoint on this text.",
        "extend": "Extend it by the words that it splits worst: "
        f"`firth tokenizer --extend {shlex.quote(current.name)} TEXT... --output-dir tok`. The model of a checkpoint "
        "needs embeddings for them: `firth adapt` adds and trains them.",
        "retrain": "Train a new one. Its embeddings start from scratch: this needs pretraining, not only fine-tuning. "
        "`firth adapt` keeps a checkpoint, and adds words of this text to its tokenizer.",
    }
    return Advice(
        f"{current.name}: {decision}",
        actions[decision],
        f"It needs {ratio:.2f} times the tokens of {rival.name}, which was trained on this text "
        f"({current.pieces_per_word:.2f} pieces per word against {rival.pieces_per_word:.2f}), and "
        f"{current.unknown:.2%} of its tokens are unknown. One token each for the thousand words that cost most would "
        f"save {current.saved:.1%} of the tokens. Rule: keep up to {MAX_KEEP_TOKEN_RATIO} times and "
        f"{MAX_UNKNOWN_TOKENS_SHARE:.1%} unknown, retrain over {MAX_EXTEND_TOKEN_RATIO} times or "
        f"{MAX_EXTEND_UNKNOWN_SHARE:.0%}, extend in between.",
    )


def new_tokenizer_advice(chosen: TokenizerFit, trained: Sequence[TokenizerFit]) -> Advice:
    rest = [fit.bytes_per_token for fit in trained if fit is not chosen]
    others = f" (the others {min(rest):.2f} to {max(rest):.2f})" if rest else ""
    few = "" if chosen.times_seen >= MIN_TOKEN_OCCURRENCES else " (too few: try smaller ones with --vocab-sizes)"
    return Advice(
        "a new tokenizer",
        f"`firth tokenizer --kind {chosen.kind} --vocab-size {chosen.vocab_size}`",
        f"{chosen.bytes_per_token:.2f} bytes per token{others}, {chosen.lost:.2%} of the characters lost, "
        f"{chosen.unknown:.2%} of the tokens unknown. 95% of the tokens that it uses occur at least "
        f"{chosen.times_seen:,.0f} times in this text{few}. Rule: the largest vocabulary with at least "
        f"{MIN_TOKEN_OCCURRENCES} occurrences that saves {MIN_TOKENS_SAVED_SHARE:.0%} of the tokens; of the kinds that "
        f"lose nothing the one with the fewest tokens, within {SAME_FERTILITY_TOLERANCE:.0%} the one without unknown "
        "words. T5 needs unigram, for its sentinels.",
    )


def choose_row_length(fit: TokenizerFit) -> int:
    """Return the shortest row that holds `MIN_WHOLE_DOCUMENTS_SHARE` of the documents, or the longest."""
    return next((length for length, share in fit.rows.items() if share >= MIN_WHOLE_DOCUMENTS_SHARE), max(fit.rows))


def row_length_advice(fit: TokenizerFit, models: Sequence[dict[str, Any]]) -> Advice:
    fitting = [model["name"] for model in models if model["fits"]]
    preset = min(fitting, key=lambda name: limited_length(name, MAX_ROW_TOKENS))
    length, limit = choose_row_length(fit), limited_length(preset, MAX_ROW_TOKENS)
    shares = ", ".join(f"{length}: {share:.0%}" for length, share in fit.rows.items())
    limited = f" More than {limit:,} are not advised: attention takes longer." if length > limit else ""
    return Advice(
        "row length",
        f"--max-seq-length {min(length, limit)}",
        f"Documents that fit uncut, with {fit.name}: {shares}. Rule: the shortest row that holds "
        f"{MIN_WHOLE_DOCUMENTS_SHARE:.0%} of the documents.{limited} Short documents share a row, longer ones continue "
        "in the next.",
    )


def model_size_advice(corpus_stats: dict[str, Any], fit: TokenizerFit, models: Sequence[dict[str, Any]]) -> Advice:
    fitting = [model for model in models if model["fits"]]
    return Advice(
        "model size",
        "About " + ", ".join(f"{m['name']} ({m['parameters'] / 1e6:.1f}M, {m['epochs']:.1f} epochs)" for m in fitting),
        f"There are about {estimate_train_tokens(corpus_stats, fit):,} tokens to train on, without duplicates and the "
        f"{HELD_OUT_FRACTION:.0%} held out. Rule: the largest model that reads {TOKENS_PER_PARAMETER} tokens per "
        f"parameter in at most {MAX_USEFUL_EPOCHS} epochs, or the smallest. It is for causal language models; encoders "
        "tolerate many more epochs. `firth plan` chooses the size for your time and machine.",
    )
