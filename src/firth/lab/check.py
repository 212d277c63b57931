"""A check-up of a text and of tokenizers for it: what was counted, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.models import PRESETS, count_parameters
from firth.recipes import default_vocab_size
from firth.text import HELD_OUT_FRACTION, Corpus, Example, read_labelled
from firth.text.labelled import infer_task
from firth.text.leak_detection import LeakFinder
from firth.tokens import Tokenizer
from firth.tokens.checkup import SAMPLE_CHARS, check_documents, make_excerpt
from firth.tokens.fertility import TokenizerFit, measure_fit, split_sample, train_candidate_tokenizers

COMPARED_TOKENIZER_KINDS = ("byte-bpe", "wordpiece", "unigram")  # that are compared unless others are named

# Times that 95% of the pieces that are used should be seen: a vector that is trained less often stays near its random
# start. The idea is of Gowda & May 2020, who ask for 100 in translation.
MIN_TOKEN_OCCURRENCES = 10
MIN_TOKENS_SAVED_SHARE = 0.02  # share of the tokens that a larger vocabulary must save
SAME_FERTILITY_TOLERANCE = 0.03  # kinds that differ by less are taken as equal
MAX_LOST_CHARACTERS_SHARE = 1e-4  # share of the characters that a tokenizer may lose
MAX_UNKNOWN_TOKENS_SHARE = 1e-3  # share of the tokens that may be unknown
MAX_KEEP_TOKEN_RATIO, MAX_EXTEND_TOKEN_RATIO = (
    1.15,
    1.5,
)  # tokens that a given tokenizer needs where one made for the text needs 1
MAX_EXTEND_UNKNOWN_SHARE = 0.01  # share of unknown tokens that no extension mends
MIN_WHOLE_DOCUMENTS_SHARE = 0.9  # share of the documents that a row should hold whole
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
MAX_USEFUL_EPOCHS = 4  # repetitions that teach nearly as much as new text (Muennighoff et al. 2023)
MIN_DUPLICATES_SHARE = 0.01  # share of the documents that is worth a word
MIN_SUSPICIOUS_SHARE = 0.01
MAX_LISTED_LEAKS = 100  # labelled examples that are named; all are counted
PRESETS_BY_ARCHITECTURE = {
    "encoder": ("bert-tiny", "bert-mini", "bert-small", "bert-medium", "bert-base", "bert-large"),
    "decoder": ("gpt2-tiny", "gpt2-mini", "gpt2-small", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "encoder-decoder": ("t5-tiny", "t5-mini", "t5-small", "t5-base", "t5-large"),
}


@dataclass(frozen=True)
class Advice:
    """What to do, and why."""

    about: str
    do: str
    why: str


@dataclass(frozen=True)
class CorpusCheck:
    """What `firth check` found, for the terminal, the page and JSON alike."""

    reading: str
    text: dict[str, Any]
    sample: dict[str, Any]
    fits: list[TokenizerFit]
    left_out: list[str]
    chosen: str | None  # the name of the tokenizer that the advice is for
    models: list[dict[str, Any]]
    advice: list[Advice]
    leaks: dict[str, Any] | None = None  # what of a labelled file stands in the text, where one was named

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
    """Read a text once; on a sample of it measure the tokenizer that is given, and others trained for it.

    On the way the examples of a labelled file are looked for, if there is one.
    """
    search = LeakFinder(labelled.examples) if labelled else None
    found = check_documents(corpus, corpus.total_bytes, sample, search.scan if search else None)
    say(corpus.describe())
    leaked = summarize_leaks(labelled, search) if labelled and search else None
    text, parts = found.facts(), split_sample(found.sample.documents.values())
    scale = found.num_characters / max(found.sample.characters, 1)
    fits = [measure_fit(tokenizer, parts, scale, name, given=True)] if tokenizer is not None else []
    left_out: list[str] = []
    for trained in train_candidate_tokenizers(
        parts, kinds, vocab_sizes or candidate_vocab_sizes(text["bytes"]), lowercase
    ):
        if isinstance(trained, str):
            left_out.append(trained)
        else:
            fits.append(measure_fit(trained, parts, scale, f"{trained.kind} {trained.vocab.size:,}"))
    chosen = choose_tokenizer([fit for fit in fits if not fit.given]) or next(iter(fits), None)
    about = {
        "documents": len(parts.all_documents),
        "characters": found.sample.characters,
        "share": 1 / scale,
        "measured_documents": len(parts.measured),
        "measured_apart": parts.is_disjoint,
    }
    models = suggest_models(text, chosen) if chosen else []
    advice = [*leakage_advice(leaked), *all_advice(text, fits, chosen, models)]
    best = chosen.name if chosen else None
    return CorpusCheck(corpus.describe(), text, about, fits, left_out, best, models, advice, leaked)


class LabelledFile(NamedTuple):
    """A labelled file that is looked for in a text."""

    file: str
    task: str
    examples: list[Example]


def read_leak_examples(
    file: str, task: str | None = None, columns: Mapping[str, str] | None = None, encoding: str = "utf-8"
) -> LabelledFile:
    """The examples of a labelled file as texts to look for; answers may be missing, as in a test set."""
    try:
        task = task or infer_task(file, columns, encoding)
        examples = read_labelled(file, task, columns, encoding=encoding, require_labels=False)
    except UserError as e:
        raise UserError(str(e).replace("--columns", "--labelled-columns")) from None
    if task == "tag":  # its texts are single words
        examples = [example._replace(texts=(" ".join(example.texts),)) for example in examples]
    return LabelledFile(file, task, examples)


def summarize_leaks(labelled: LabelledFile, search: LeakFinder) -> dict[str, Any]:
    """How many examples stand in the text: word for word, or half of their runs of words and more; worst first."""
    found = {leak.example_index: leak for leak in reversed(search.found_leaks())}  # the worst text of each example
    worst = sorted(found.values(), key=lambda leak: (-leak.share, leak.example_index))
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
    """The vocabulary sizes to compare: what Firth takes for so much text, half of it, and twice."""
    usual = default_vocab_size(text_bytes)
    return (usual // 2, usual, 2 * usual)


# Which tokenizer


def choose_tokenizer(fits: Sequence[TokenizerFit]) -> TokenizerFit | None:
    """The best size of each kind, and of these the kind that loses nothing and needs the fewest tokens.

    Kinds that are about equal count as equal: then the first in order of `COMPARED_TOKENIZER_KINDS`, which has no unknown words.
    """
    kinds = list(dict.fromkeys(sorted((fit.kind for fit in fits), key=kind_preference)))
    best = [choose_vocab_size([fit for fit in fits if fit.kind == kind]) for kind in kinds]
    if not best:
        return None
    whole = [
        fit for fit in best if fit.lost <= MAX_LOST_CHARACTERS_SHARE and fit.unknown <= MAX_UNKNOWN_TOKENS_SHARE
    ] or best
    fewest = max(fit.bytes_per_token for fit in whole)
    return next(fit for fit in whole if fit.bytes_per_token >= (1 - SAME_FERTILITY_TOLERANCE) * fewest)


def kind_preference(kind: str) -> int:
    return COMPARED_TOKENIZER_KINDS.index(kind) if kind in COMPARED_TOKENIZER_KINDS else len(COMPARED_TOKENIZER_KINDS)


def choose_vocab_size(fits: Sequence[TokenizerFit]) -> TokenizerFit:
    """The largest vocabulary whose tokens are seen often enough, as long as it saves tokens worth the name."""
    best, *larger = sorted(fits, key=lambda fit: fit.vocab_size)
    for fit in larger:
        if (
            fit.times_seen >= MIN_TOKEN_OCCURRENCES
            and 1 - best.bytes_per_token / fit.bytes_per_token >= MIN_TOKENS_SAVED_SHARE
        ):
            best = fit
    return best


def compare_with_trained(current: TokenizerFit, trained: Sequence[TokenizerFit]) -> tuple[TokenizerFit, float] | None:
    """The best tokenizer made for this text that is no larger than the given one, and the tokens given/made."""
    if not trained:
        return None
    no_larger = [fit for fit in trained if fit.vocab_size <= current.vocab_size]
    rival = (
        max(no_larger, key=lambda fit: fit.bytes_per_token) if no_larger else min(trained, key=lambda f: f.vocab_size)
    )
    return rival, rival.bytes_per_token / current.bytes_per_token


def tokenizer_decision(ratio: float, unknown: float) -> str:
    """
    >>> [tokenizer_decision(*x) for x in ((1.05, 0), (1.3, 0), (1.05, 0.005), (2.0, 0), (1.05, 0.05))]
    ['keep', 'extend', 'extend', 'retrain', 'retrain']
    """
    if ratio > MAX_EXTEND_TOKEN_RATIO or unknown > MAX_EXTEND_UNKNOWN_SHARE:
        return "retrain"
    return "extend" if ratio > MAX_KEEP_TOKEN_RATIO or unknown > MAX_UNKNOWN_TOKENS_SHARE else "keep"


# Which model


def estimate_train_tokens(corpus_stats: dict[str, Any], fit: TokenizerFit) -> int:
    """About how many tokens there are to train on: without duplicates, and without what is held out."""
    return round(
        corpus_stats["characters"]
        * (1 - corpus_stats["duplicate_share"])
        * (1 - HELD_OUT_FRACTION)
        / fit.characters_per_token
    )


def suggest_models(corpus_stats: dict[str, Any], fit: TokenizerFit) -> list[dict[str, Any]]:
    """Presets of each shape with this vocabulary, and how often each would read this text for 20 tokens a parameter."""
    tokens, found = max(estimate_train_tokens(corpus_stats, fit), 1), []
    for shape, names in PRESETS_BY_ARCHITECTURE.items():
        for name in names:
            parameters = count_parameters(replace(PRESETS[name], vocab_size=fit.vocab_size))
            epochs = TOKENS_PER_PARAMETER * parameters / tokens
            found.append({"name": name, "shape": shape, "parameters": parameters, "epochs": epochs})
            if epochs > 5 * MAX_USEFUL_EPOCHS:  # far too large; a still larger one tells nothing
                break
    return [{**model, "fits": model["name"] in largest_fitting_models(found)} for model in found]


def largest_fitting_models(models: Sequence[dict[str, Any]]) -> list[str]:
    """For each shape the largest model that need not read the text too often, or else the smallest."""
    chosen = []
    for shape in dict.fromkeys(model["shape"] for model in models):
        first, *others = (model for model in models if model["shape"] == shape)
        chosen.append([first, *(model for model in others if model["epochs"] <= MAX_USEFUL_EPOCHS)][-1]["name"])
    return chosen


# In words


def all_advice(
    corpus_stats: dict[str, Any],
    fits: Sequence[TokenizerFit],
    chosen: TokenizerFit | None,
    models: Sequence[dict[str, Any]],
) -> Iterator[Advice]:
    """What to do, in the order in which a person would do it."""
    yield from cleaning_advice(corpus_stats)
    trained = [fit for fit in fits if not fit.given]
    for given in (fit for fit in fits if fit.given):
        if compared := compare_with_trained(given, trained):
            yield existing_tokenizer_advice(given, *compared)
    if chosen is None:
        return
    if not chosen.given:
        yield new_tokenizer_advice(chosen, trained)
    yield row_length_advice(chosen)
    yield model_size_advice(corpus_stats, chosen, models)


def leakage_advice(leaks: dict[str, Any] | None) -> Iterator[Advice]:
    if leaks is None or not leaks["exact"] + leaks["near"]:
        return
    found = format_count(leaks["exact"] + leaks["near"], "example")
    yield Advice(
        "leakage",
        f"Do not score on what stands in this text ({found} of {leaks['file']}), or take it out of the text.",
        f"That is {leaks['share']:.1%} of those that can be compared: {leaks['exact']:,} word for word, "
        f"{leaks['near']:,} for the greater part. A model that has read a test beforehand is tested on its memory.",
    )


def cleaning_advice(corpus_stats: dict[str, Any]) -> Iterator[Advice]:
    documents = max(corpus_stats["documents"], 1)
    if corpus_stats["duplicate_share"] >= MIN_DUPLICATES_SHARE:
        yield Advice(
            "duplicates",
            f"Nothing: `firth prepare` drops {format_count(corpus_stats['duplicates'], 'copy', 'copies')} by itself.",
            f"They are {corpus_stats['duplicate_share']:.1%} of the documents; a model learns by heart what it reads often.",
        )
    near = corpus_stats["near_duplicates"]
    if near["share"] >= MIN_DUPLICATES_SHARE:
        yield Advice(
            "near duplicates",
            "`firth prepare --dedup near` drops them too.",
            f"About {near['share']:.1%} of the different documents share four fifths of their runs of five words with "
            "one before them.",
        )
    if many := [
        found for found in corpus_stats["suspicious"] if found["documents"] >= MIN_SUSPICIOUS_SHARE * documents
    ]:
        yield Advice(
            "dirt",
            "Look at these before training: " + ", ".join(found["name"] for found in many) + ".",
            " ".join(
                f"{f['name']} in {f['documents'] / documents:.1%} of the documents: {f['meaning']}." for f in many
            ),
        )
    if lines := corpus_stats["repeated_lines"]:
        yield Advice(
            "repeated lines",
            "Remove those that are no text of the documents.",
            f"{lines[0]['line']!r} stands in {lines[0]['documents']:,} documents; see the list.",
        )


def existing_tokenizer_advice(current: TokenizerFit, rival: TokenizerFit, ratio: float) -> Advice:
    """Keep, extend or retrain the tokenizer of a checkpoint."""
    decision = tokenizer_decision(ratio, current.unknown)
    actions = {
        "keep": "Keep it: no model has to learn new tokens.",
        "extend": "Extend it by the words that it splits worst, and go on pretraining so that they are learned.",
        "retrain": "Train a new one. Its token vectors start anew, so this wants pretraining, not only fine-tuning.",
    }
    return Advice(
        f"{current.name}: {decision}",
        actions[decision],
        f"It needs {ratio:.2f} times the tokens of {rival.name}, which was trained on this text "
        f"({current.pieces_per_word:.2f} pieces per word against {rival.pieces_per_word:.2f}), and {current.unknown:.2%} "
        f"of its tokens are unknown. A token of its own for the thousand words that cost most would save "
        f"{current.saved:.1%} of the tokens. Rule: keep up to {MAX_KEEP_TOKEN_RATIO} times and {MAX_UNKNOWN_TOKENS_SHARE:.1%} unknown, retrain over "
        f"{MAX_EXTEND_TOKEN_RATIO} times or {MAX_EXTEND_UNKNOWN_SHARE:.0%}, extend in between.",
    )


def new_tokenizer_advice(chosen: TokenizerFit, trained: Sequence[TokenizerFit]) -> Advice:
    rest = [fit.bytes_per_token for fit in trained if fit is not chosen]
    others = f" (the others {min(rest):.2f} to {max(rest):.2f})" if rest else ""
    few = "" if chosen.times_seen >= MIN_TOKEN_OCCURRENCES else " (too few: try smaller ones with --vocab-sizes)"
    return Advice(
        "a new tokenizer",
        f"--kind {chosen.kind} --vocab-size {chosen.vocab_size}",
        f"{chosen.bytes_per_token:.2f} bytes per token{others}, {chosen.lost:.2%} of the characters lost, "
        f"{chosen.unknown:.2%} of the tokens unknown. 95% of the pieces that it uses occur at least "
        f"{chosen.times_seen:,.0f} times in this text{few}. Rule: the largest vocabulary of which that is "
        f"{MIN_TOKEN_OCCURRENCES} times or more and that saves {MIN_TOKENS_SAVED_SHARE:.0%} of the tokens; of the kinds that lose nothing the one "
        f"with the fewest tokens, within {SAME_FERTILITY_TOLERANCE:.0%} that without unknown words. T5 needs unigram, for its sentinels.",
    )


def row_length_advice(fit: TokenizerFit) -> Advice:
    enough = next((length for length, share in fit.rows.items() if share >= MIN_WHOLE_DOCUMENTS_SHARE), max(fit.rows))
    shares = ", ".join(f"{length}: {share:.0%}" for length, share in fit.rows.items())
    return Advice(
        "row length",
        f"--max-seq-length {enough}",
        f"Documents that fit whole, with {fit.name}: {shares}. Rule: the shortest row that holds {MIN_WHOLE_DOCUMENTS_SHARE:.0%} of the "
        "documents. Short documents share a row, longer ones go on in the next.",
    )


def model_size_advice(corpus_stats: dict[str, Any], fit: TokenizerFit, models: Sequence[dict[str, Any]]) -> Advice:
    fitting = [model for model in models if model["fits"]]
    return Advice(
        "model size",
        "About " + ", ".join(f"{m['name']} ({m['parameters'] / 1e6:.1f}M, {m['epochs']:.1f} epochs)" for m in fitting),
        f"There are about {estimate_train_tokens(corpus_stats, fit):,} tokens to train on, without duplicates and the "
        f"{HELD_OUT_FRACTION:.0%} held out. Rule: the largest that reads {TOKENS_PER_PARAMETER} tokens per parameter in at most "
        f"{MAX_USEFUL_EPOCHS} epochs, or the smallest there is. It is an orientation for language models that read from left to "
        "right; encoders bear many more epochs.",
    )
