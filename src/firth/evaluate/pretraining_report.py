"""report.html of a pretraining run: what its loss means, samples before and after training, and the next commands.

A loss is hard to read alone. Three references help: perplexity (e to the loss), the number of equally likely tokens
that are as hard to choose among; the unigram entropy, the loss of a model that knows token frequencies and no context;
and the same passages completed by the weights that the run started from. These weights are a function of the recipe,
so they are built again after training. Training itself does nothing for the report.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.core.chart import Point, loss_chart
from firth.core.console import format_count, format_duration, quiet, say
from firth.core.errors import UserError
from firth.core.files import MODEL_CARD_FILE, read_object, read_utf8, read_yaml
from firth.core.html import HtmlPage, format_cell
from firth.evaluate.card import write_model_card
from firth.evaluate.health import add_doctor_section
from firth.evaluate.report import add_source_table, format_commands, loss_series
from firth.generate import fill, generate_results
from firth.generate.config import GenerationConfig
from firth.generate.ngram import generate_ngram_results
from firth.generate.text import REPLACEMENT_CHAR
from firth.models import Model, count_parameters, load_model
from firth.objectives.registry import name_objective
from firth.static.ngram import load_ngram
from firth.tokens import MixedShards, Shards, ShardSet, Tokenizer, open_shards
from firth.train import Recipe, last_checkpoint, load_recipe, read_log, token_loss_name
from firth.train.dataloader import open_recipe_shards
from firth.train.distributed import SINGLE_PROCESS, select_device
from firth.train.findings import Finding
from firth.train.log import read_last_losses
from firth.train.pretrain import build_pretrain_model
from firth.train.samples import read_samples
from firth.train.schedule import GOLDEN_RATIO

NUM_PASSAGES = 6
MAX_SEARCHED_DOCUMENTS = 200  # documents in which passages are searched
MAX_SEARCHED_TOKENS = 2000  # tokens of a document in which they are searched
MIN_PASSAGE_WORDS, MAX_PASSAGE_WORDS, MAX_PASSAGE_TOKENS = 6, 30, 60
NUM_GUESSES = 4  # words shown for a blank
NEW_TOKENS = 24  # length of a continuation
SAMPLING = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9)
CONTINUATION_CAPTION = "The marked end of each sentence was not shown. Sampled with temperature 0.8."
CHECKPOINTS_CAPTION = "What the run wrote to samples.jsonl with its checkpoints; the marked part was not shown."
MAX_SHOWN_CHECKPOINTS = 8  # of many checkpoints
MAX_SHOWN_CHARS = 300  # characters of a continuation on the page
BLANK_PATTERN = re.compile(r"\[MASK\]|<mask>|___")  # `fill` would read it as another blank
EQUAL_NATS = 0.05  # smaller differences are not called better or worse
PART_DESCRIPTIONS = {
    "mlm": "hidden tokens, from the text around them",
    "lm": "the next token, from the text before it",
    "nsp": "whether the second text follows the first; chance is 50%",
    "sop": "whether two sentences are in their order; chance is 50%",
    "boundary": "hidden tokens, from the two ends of their span",
    "generator": "hidden tokens, by the generator that fills them in",
    "rtd": "which tokens a generator replaced",
    "masked": "hidden tokens, in the rows with masks",
    "causal": "the next token, in the other rows",
    "soft": "the teacher's probabilities",
    "cosine": "the directions of the teacher's hidden states",
    "feature_map": "the teacher's hidden states, layer by layer",
    "mean": "the means of the teacher's hidden states",
    "variance": "the variances of the teacher's hidden states",
    "attention": "the teacher's attention",
    "regularization": "penalty on large and fast changing activations",
}


class Passage(NamedTuple):
    """A held-out sentence with one part that the model has to find: a word, or the second half."""

    before: str
    answer: str
    after: str


class Sentence(NamedTuple):
    ids: list[int]
    word_starts: list[int]  # indices of the tokens that start a word


class SampleSide(NamedTuple):
    """What one model makes of a passage: words with their probabilities, or a continuation."""

    title: str
    guesses: Sequence[tuple[str, float]]
    text: str


class PassageSample(NamedTuple):
    passage: Passage
    sides: Sequence[SampleSide]


# --- files ----------------------------------------------------------------------------------------------------------


def write_pretraining_report_and_card(
    folder: Path, results: Mapping[str, Any], findings: Sequence[Finding] | None = None
) -> dict[str, str]:
    """Write report.html, and README.md in final/ unless there is one; return the report, a summary and a next command.

    The report of a finished run is written once.
    """
    recipe, report = load_recipe(folder / "recipe.yaml", Recipe), folder / "report.html"
    final, finished = folder / "final", folder / "results.json"
    if not (final / MODEL_CARD_FILE).exists():  # it may have been edited
        write_model_card(final)
    if not report.is_file() or report.stat().st_mtime_ns < finished.stat().st_mtime_ns:
        write_pretraining_report(folder, recipe, results, final, findings)
    commands = next_commands(recipe, final)
    return {"report": str(report), "summary": summarize_loss(recipe, results), "next": next(iter(commands.values()))}


def write_interrupted_report(folder: Path, seconds: float, findings: Sequence[Finding] | None = None) -> None:
    """Write the report of an interrupted run from its log and its last checkpoint, if it has made a step."""
    recipe_file, log_file = folder / "recipe.yaml", folder / "log.jsonl"
    log = read_log(log_file) if recipe_file.is_file() and log_file.is_file() else []
    if not log:
        return
    recipe = load_recipe(recipe_file, Recipe)
    loss, metrics = read_last_losses(log_file)
    evaluation: dict[str, Any] = next((line for line in reversed(log) if "eval_loss" in line), {})
    results = {
        "steps": log[-1]["step"],
        "loss": loss,
        **metrics,
        **{name: value for name, value in evaluation.items() if name.startswith("eval_") and "/" not in name},
        "unigram_entropy": open_recipe_shards(recipe).unigram_entropy,
        **{name: max(line.get(name, 0) for line in log) for name in ("tokens", "words_seen", "passes")},
        "parameters": count_parameters(recipe.model),
        "seconds": seconds,
    }
    write_pretraining_report(folder, recipe, results, last_checkpoint(folder), findings)
    say(f"The report so far is {folder / 'report.html'}.")


def write_ngram_report(folder: Path, results: Mapping[str, Any]) -> dict[str, str]:
    """Write the report of an n-gram model; return it with a summary and the next command."""
    recipe = read_yaml(folder / "recipe.yaml")
    shards, final = open_shards(recipe["data"]), folder / "final"
    passages = find_passages(shards, fills=False, max_length=None)
    page = HtmlPage(f"n-grams up to order {len(results['ngrams'])}", "pretrain")
    loss, is_held_out = find_token_loss(results)
    source = "held-out text" if is_held_out else "the training text (no text is held out)"
    entropy, summary = results["unigram_entropy"], compare_loss(loss, results["unigram_entropy"])
    page.add_lead(f"{summary[0].upper()}{summary[1:]}.")
    page.add_paragraph(
        f"On {source} the loss is {loss:.2f} nats per token; token frequencies alone have {entropy:.2f}."
    )
    page.add_table(["order", "n-grams"], list(enumerate(results["ngrams"], 1)), "Distinct n-grams that were counted.")
    if passages:
        generated = generate_ngram_results(load_ngram(final), [p.before for p in passages], SAMPLING)
        texts = [result["text"][len(p.before) :] for p, result in zip(passages, generated, strict=True)]
        sides = [[SampleSide("after counting", (), shorten(text))] for text in texts]
        samples = [PassageSample(passage, side) for passage, side in zip(passages, sides, strict=True)]
        page.add_fragment("pretraining.html.j2", "passages", samples, CONTINUATION_CAPTION)
    command = f'firth generate {shlex.quote(str(final))} "The" --temperature 0.8'
    page.add_heading("Next")
    page.add_code(command)
    page.save(folder / "report.html")
    return {"report": str(folder / "report.html"), "summary": summary, "next": command}


def write_pretraining_report(
    folder: Path,
    recipe: Recipe,
    results: Mapping[str, Any],
    checkpoint: Path | None,
    findings: Sequence[Finding] | None = None,
) -> None:
    """Write report.html; `checkpoint` is the trained model, whose samples are shown; `findings` are the doctor's."""
    shards, log = open_recipe_shards(recipe), read_log(folder / "log.jsonl")
    page = HtmlPage(f"{recipe.model.family} on {describe_text(folder, recipe)}", "pretrain")
    if results["steps"] < recipe.max_steps:
        page.add_paragraph(
            f"This run stopped at step {results['steps']:,} of {recipe.max_steps:,}. The same command with --resume "
            "continues it, and replaces this page."
        )
    summary = summarize_loss(recipe, results)
    page.add_lead(f"{summary[0].upper()}{summary[1:]}.")
    page.add_paragraph(" ".join([*describe_loss(recipe, results), *describe_trend(log, results.get("best_step"))]))
    page.add_facts(run_facts(recipe, results, shards))
    add_loss_section(page, recipe, results, log)
    if findings is not None:
        add_doctor_section(page, findings)
    add_samples_section(page, recipe, shards, checkpoint)
    add_checkpoints_section(page, read_samples(folder))
    page.add_heading("Next")
    page.add_code(format_commands(next_commands(recipe, folder / "final")))
    page.add_heading("Recipe")
    page.add_code(read_utf8(folder / "recipe.yaml"), "Every setting of this run: recipe.yaml.")
    page.save(folder / "report.html")


# --- words for numbers ----------------------------------------------------------------------------------------------


def describe_text(folder: Path, recipe: Recipe) -> str:
    """Name the text of a run: the files that it was given, its shards, or the sources of its mix."""
    source = folder / "source.json"
    given = read_object(source).get("data", []) if source.is_file() else []
    names = [Path(str(name)).name for name in given] or [*recipe.sources] or [Path(recipe.data).name]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def find_token_loss(results: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the loss per token, and whether it is that of held-out text."""
    held_out = results.get(token_loss_name(results))
    return (held_out, True) if held_out is not None else (results.get(token_loss_name(results, "")) or math.nan, False)


def comparable_unigram_entropy(recipe: Recipe, results: Mapping[str, Any]) -> float | None:
    """Return the unigram entropy; None for encoder-decoders, whose labels are not the hidden words alone."""
    return None if recipe.model.architecture == "encoder-decoder" else results.get("unigram_entropy")


def compare_loss(loss: float, entropy: float) -> str:
    """Compare a loss with the unigram entropy.

    >>> compare_loss(5.55, 6.14), compare_loss(6.21, 6.14)
    ('0.59 nats better than word frequencies', '0.07 nats worse than word frequencies')
    >>> compare_loss(6.12, 6.14)
    'no better than word frequencies (6.12 against 6.14 nats)'
    """
    if abs(loss - entropy) < EQUAL_NATS:
        return f"no better than word frequencies ({loss:.2f} against {entropy:.2f} nats)"
    return f"{abs(loss - entropy):.2f} nats {'better' if loss < entropy else 'worse'} than word frequencies"


def summarize_loss(recipe: Recipe, results: Mapping[str, Any]) -> str:
    """Return the outcome of a run in half a sentence, for the terminal."""
    loss, is_held_out = find_token_loss(results)
    entropy = comparable_unigram_entropy(recipe, results)
    if entropy is None:
        return f"{'held-out' if is_held_out else 'training'} loss {loss:.2f} nats per token"
    where = "" if is_held_out else " on the training text (no text is held out)"
    remedy = "" if loss <= entropy - EQUAL_NATS else ": `firth doctor` says why"
    return f"{compare_loss(loss, entropy)}{where}{remedy}"


def describe_loss(recipe: Recipe, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences that say what the loss means."""
    loss, is_held_out = find_token_loss(results)
    if not math.isfinite(loss):
        yield "There is no loss to judge yet."
        return
    text = "held-out text" if is_held_out else "the training text (no text is held out)"
    choices = math.exp(min(loss, 50.0))
    count = f"{choices:.1f}" if choices < 10 else f"{choices:,.0f}"
    yield (
        f"On {text} the loss is {loss:.2f} nats per predicted token. The model is as uncertain as if it chose among "
        f"{count} equally likely tokens (perplexity, e to the {loss:.2f})."
    )
    accuracy = results.get("eval_mlm_accuracy", results.get("eval_lm_accuracy"))
    if accuracy is not None:
        yield f"Its first guess is right for {100 * accuracy:.1f}% of them."
    if recipe.model.architecture == "encoder-decoder":
        yield "Its labels contain sentinels, or words that the encoder reads, so word frequencies are no baseline."
    entropy = comparable_unigram_entropy(recipe, results)
    if entropy is None:
        return
    yield f"A model that knows only how frequent each token is has {entropy:.2f}."
    if loss <= entropy - EQUAL_NATS:
        times = math.exp(min(entropy - loss, 50.0))
        yield (
            f"So this model uses the context: on (geometric) average it gives the right token {times:.1f} times the "
            "probability that its frequency does."
        )
    else:
        yield "So on this text the model is no better than that: `firth doctor` says why."


def describe_trend(log: Sequence[Mapping[str, Any]], kept_step: int | None = None) -> Iterator[str]:
    """Yield a sentence where the held-out loss still fell at the end of training, or had risen again.

    `kept_step` is the step whose weights the model has, if that is not the last one.
    """
    points, name = held_out_points(log), token_loss_name({key for line in log for key in line}, "")
    if len(points) < 3:
        return
    best_step, best = min(points, key=lambda point: point[1])
    last = points[-1][1]
    if last > best + EQUAL_NATS:
        losses = [(line["step"], line[name]) for line in log if line.get(name) is not None]
        near = points[-1][0] / 20  # steps
        early, late = ([y for x, y in losses if abs(x - at) <= near] for at in (best_step, points[-1][0]))
        is_learned = not (early and late) or fmean(late) < fmean(early)
        cause = ": the model learns the training text by heart. Take more text, fewer steps or a smaller model"
        lowest = f"The held-out loss was lowest at step {best_step:,} ({best:.2f})"
        yield f"{lowest} and has risen since{cause * is_learned}."
        if kept_step is not None:
            yield f"The model has the weights of step {kept_step:,}."
    elif points[-2][1] - last > EQUAL_NATS:
        yield "The loss still fell at the end: a longer run would learn more."


def held_out_points(log: Sequence[Mapping[str, Any]]) -> list[Point]:
    name = token_loss_name({key for line in log for key in line})
    return [(line["step"], line[name]) for line in log if line.get(name) is not None]


def run_facts(recipe: Recipe, results: Mapping[str, Any], shards: ShardSet | MixedShards) -> dict[str, str]:
    """Return model, text read, time and speed of a run as rows of a table."""
    parts = shard_sets(shards)
    tokens = results.get("tokens") or 0
    seconds, speed = results.get("seconds"), results.get("tokens_per_second")
    facts = {
        "model": f"{recipe.model.family} ({recipe.model.architecture}), {results['parameters']:,} parameters",
        "objective": name_objective(recipe.objective),
        "text": f"{sum(part.train.num_words for part in parts):,} words in {shards.num_tokens:,} tokens",
        "words seen": f"{results['words_seen']:,} ({tokens:,} tokens with special ones)",
        "passes over the text": f"{results['passes']:.2f}",
        "steps": f"{results['steps']:,} of {format_count(recipe.global_batch_size, 'row')}",
        "time": format_duration(seconds) if seconds is not None else "",
        "speed": f"{speed:,.0f} tokens per second" if speed else "",
    }
    return {name: fact for name, fact in facts.items() if fact}


def shard_sets(shards: ShardSet | MixedShards) -> list[ShardSet]:
    return list(shards.sources.values()) if isinstance(shards, MixedShards) else [shards]


def next_commands(recipe: Recipe, final: Path) -> dict[str, str]:
    """Return commands to paste, by their purpose, the most useful one first."""
    model = shlex.quote(str(final))
    task = "text-to-text" if recipe.model.architecture == "encoder-decoder" else "classify"
    tune = f"firth finetune {model} --task {task} --train train.csv --dev dev.csv --output-dir tuned"
    use = {
        "encoder": {"Fill a blank": f'firth fill {model} "The ___ of the sea."'},
        "decoder": {"Continue a text": f'firth generate {model} "The" --temperature 0.8'},
        "encoder-decoder": {"Fill a blank": f'firth fill {model} "The ___ of the sea."'},
    }[recipe.model.architecture]
    tuning = {
        f"Fine-tune it on your labels (columns {'source, target' if task != 'classify' else 'text, label'})": tune
    }
    first = use | tuning if recipe.model.architecture == "decoder" else tuning | use
    return first | {
        "Fine-tune the same model from random weights: what did pretraining bring?": (
            tune.replace("--output-dir tuned", "--output-dir scratch --from-scratch")
        ),
        "Score it on other text": f"firth evaluate {model} --task perplexity --data other.txt",
        "Write it for transformers, and compare the logits": (
            f"firth export {model} --output-dir for-transformers --check"
        ),
    }


# --- sections -------------------------------------------------------------------------------------------------------


def add_loss_section(
    page: HtmlPage, recipe: Recipe, results: Mapping[str, Any], log: Sequence[Mapping[str, Any]]
) -> None:
    """Add the loss curve, the parts of the loss and the sources of a mix."""
    page.add_heading("The loss")
    train, held_out = loss_series(log)
    entropy = comparable_unigram_entropy(recipe, results)
    line = " The dashed line is a model of token frequencies alone." if entropy is not None else ""
    page.add_chart(loss_chart(train, held_out, entropy), f"Loss by step, in nats per predicted token.{line}")
    if rows := loss_part_rows(results):
        page.add_table(["part", "training", "held out", "what is predicted"], rows, "The parts of the loss at the end.")
    add_source_table(page, results)


def loss_part_rows(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table of losses and accuracies, for a loss of several parts."""
    names = dict.fromkeys(name.removeprefix("eval_") for name in results)
    parts = [name for name in names if name.endswith(("_loss", "_accuracy")) and name != "eval_loss"]
    if not any(name.endswith("_loss") for name in parts):
        return []

    def cell(name: str) -> str:
        value = results.get(name)
        return format_cell(value) if value is None or name.endswith("_loss") else f"{100 * value:.1f}%"

    descriptions = dict(PART_DESCRIPTIONS)
    if "masked_loss" in parts:
        descriptions["lm"] = "the tokens of both kinds of rows"
    return [
        (part.replace("_", " "), cell(part), cell(f"eval_{part}"), descriptions.get(part.rpartition("_")[0], ""))
        for part in parts
    ]


def add_samples_section(
    page: HtmlPage, recipe: Recipe, shards: ShardSet | MixedShards, checkpoint: Path | None
) -> None:
    """Add a few passages, completed by the weights at the start of the run and by the trained model."""
    if checkpoint is None:
        return
    has_held_out = any(part.held_out is not None for part in shard_sets(shards))
    page.add_heading("Before and after training")
    try:
        samples = sample_before_and_after(recipe, shards, checkpoint)
    except UserError as e:
        page.add_paragraph(f"No samples: {e}")
        return
    if not samples:
        page.add_paragraph("No samples: no sentence of the text has a fitting length.")
        return
    source = "The sentences were held out." if has_held_out else "No text is held out: these sentences were trained on."
    if samples[0].sides[-1].guesses:
        right = [
            sum(s.sides[i].guesses[0][0] == s.passage.answer for s in samples) for i in range(len(samples[0].sides))
        ]
        counts = ", ".join(
            f"{n} of {len(samples)} {side.title}" for n, side in zip(right, samples[0].sides, strict=True)
        )
        caption = (
            f"The marked word was hidden; the likeliest words and their probabilities. First guess right: {counts}."
        )
    else:
        caption = CONTINUATION_CAPTION
    page.add_fragment("pretraining.html.j2", "passages", samples, f"{caption} {source}")


def add_checkpoints_section(page: HtmlPage, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add what the checkpoints of the run made of the same sentences while it trained."""
    if not lines:
        return
    last = len(lines) - 1
    shown = dict.fromkeys(round(i * last / max(MAX_SHOWN_CHECKPOINTS - 1, 1)) for i in range(MAX_SHOWN_CHECKPOINTS))
    page.add_heading("At each checkpoint")
    page.add_fragment(
        "pretraining.html.j2", "checkpoints", group_samples([lines[i] for i in shown]), CHECKPOINTS_CAPTION
    )


def group_samples(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Passage, list[tuple[str, str]]]]:
    """Return each passage with what the checkpoints made of it, by step: a continuation, or words and probabilities."""
    found: dict[Passage, list[tuple[str, str]]] = {}
    for line in lines:
        for sample in line["samples"]:
            passage = Passage(sample["before"], sample.get("answer", ""), sample.get("after", ""))
            guesses = ", ".join(f"{word} {100 * p:.0f}%" for word, p in sample.get("guesses", []))
            found.setdefault(passage, []).append((f"{line['step']:,}", guesses or sample.get("text", "")))
    return list(found.items())


# --- samples --------------------------------------------------------------------------------------------------------


def sample_before_and_after(recipe: Recipe, shards: ShardSet | MixedShards, checkpoint: Path) -> list[PassageSample]:
    """Complete passages of the text with the weights at the start of the run and with a trained checkpoint."""
    fills = completes_by_filling(recipe)
    device = select_device(SINGLE_PROCESS, recipe)
    with quiet(), torch.random.fork_rng(devices=[]):
        trained = load_model(checkpoint).to(device)
        passages = find_passages(shards, fills, trained.config.max_length)
        if not passages:
            return []
        after = complete_passages(trained, passages, fills, "after training")
        del trained
        try:
            start = build_pretrain_model(recipe, shards.tokenizer).to(device)
        except (UserError, OSError):  # the checkpoint that the run started from is gone
            return [PassageSample(*pair) for pair in zip(passages, ([side] for side in after), strict=True)]
        before = complete_passages(
            start, passages, fills, "before training" if recipe.checkpoint else "with random weights"
        )
    return [PassageSample(passage, sides) for passage, *sides in zip(passages, before, after, strict=True)]


def completes_by_filling(recipe: Recipe) -> bool:
    """Whether a model fills the blanks of a passage; else it continues the passage."""
    return recipe.model.architecture != "decoder" or recipe.model.has_sentinel_prompt


def complete_passages(model: Model, passages: Sequence[Passage], fills: bool, title: str) -> list[SampleSide]:
    if not fills:
        prompts = [passage.before.rstrip() for passage in passages]
        results = generate_results(model, prompts, SAMPLING, logprobs=False)
        return [SampleSide(title, (), shorten(result["new"])) for result in results]
    sides = []
    for passage in passages:
        (blank,) = fill(model, f"{passage.before}[MASK]{passage.after}", NUM_GUESSES)
        sides.append(SampleSide(title, [(shorten(guess.text), guess.probability) for guess in blank.guesses], ""))
    return sides


def shorten(text: str) -> str:
    """Return a text for the page, on one line; bytes of untrained models may be control characters."""
    shown = "".join(c if c.isprintable() else REPLACEMENT_CHAR for c in " ".join(text.split()))
    return shown[:MAX_SHOWN_CHARS] or "(nothing)"


def find_passages(shards: ShardSet | MixedShards, fills: bool, max_length: int | None) -> list[Passage]:
    """Return a few sentences of held-out text, or of the training text without one, from as many documents."""
    max_tokens = min(MAX_PASSAGE_TOKENS, (max_length or 512) - 8 - (0 if fills else NEW_TOKENS))
    parts = [part.held_out or part.train for part in shard_sets(shards)]
    documents: dict[tuple[int, int], list[Sentence]] = {}
    for number in range(MAX_SEARCHED_DOCUMENTS):
        part = number % len(parts)
        index = int(number * GOLDEN_RATIO % 1 * parts[part].num_documents)
        if (part, index) not in documents:
            documents[part, index] = find_sentences(parts[part], index, max_tokens)
        if sum(map(bool, documents.values())) == NUM_PASSAGES:
            break
    passages: list[Passage] = []
    for sentence in chain.from_iterable(zip_longest(*documents.values())):  # the first of each, then the second
        if sentence is not None and len(passages) < NUM_PASSAGES:
            make = blank_word if fills else cut_in_half
            passages += make(shards.tokenizer, sentence, len(passages))
    return passages


def find_sentences(part: Shards, index: int, max_tokens: int) -> list[Sentence]:
    """Return the first sentences of a document that have a fitting length."""
    start, stop = (int(offset) for offset in part.offsets[index : index + 2])
    stop = min(stop, start + MAX_SEARCHED_TOKENS)
    ends = start + 1 + np.flatnonzero(part.sentence_ends(start, stop))
    found = []
    for first, last in pairwise(np.union1d([start, stop], ends).tolist()):
        is_start = part.word_starts(first, last)
        if last - first <= max_tokens and MIN_PASSAGE_WORDS <= is_start.sum() <= MAX_PASSAGE_WORDS:
            found.append(Sentence(part.tokens[first:last].tolist(), np.flatnonzero(is_start).tolist()))
    return found[:NUM_PASSAGES]


def blank_word(tokenizer: Tokenizer, sentence: Sentence, number: int) -> list[Passage]:
    """Hide one word of a sentence, if one is a single token of letters; `number` varies its position."""
    ids, text = sentence.ids, tokenizer.decode(sentence.ids)
    starts, found = {*sentence.word_starts, len(ids)}, []
    for i in sentence.word_starts[1:-1]:
        before, with_word = tokenizer.decode(ids[:i]), tokenizer.decode(ids[: i + 1])
        answer = with_word[len(before) :].strip()
        categories = {unicodedata.category(c) for c in answer}
        is_word = i + 1 in starts and {kind[0] for kind in categories} in ({"L"}, {"L", "M"})
        is_word = is_word and (len(answer) > 1 or categories == {"Lo"})  # one letter is a word of CJK scripts alone
        if is_word and text.startswith(with_word) and with_word.startswith(before):
            found.append(Passage(with_word.removesuffix(answer).lstrip(), answer, text[len(with_word) :]))
    is_readable = tokenizer.vocab.unk not in ids and not BLANK_PATTERN.search(text)
    return [found[len(found) * (number % 3 + 1) // 4]] if found and is_readable else []


def cut_in_half(tokenizer: Tokenizer, sentence: Sentence, number: int) -> list[Passage]:
    """Hide the second half of a sentence."""
    half = sentence.word_starts[len(sentence.word_starts) // 2]
    text, before = tokenizer.decode(sentence.ids), tokenizer.decode(sentence.ids[:half])
    is_readable = tokenizer.vocab.unk not in sentence.ids and text.startswith(before) and before.strip()
    return [Passage(before.lstrip(), text[len(before) :], "")] if is_readable else []
