"""`firth doctor`: what is wrong with a run, from its folder.

The facts of a run are collected once: its log and timings, counts of its shards, the first batches made again, n-gram
models of the same text, the forecast of the planner. Then every rule is examined (`train/log_rules.py`,
`lab/text_rules.py`, `lab/batch_rules.py` and below). A rule whose facts are gone, such as removed shards, is named in
`not_examined`. Nothing is trained and nothing is written.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.console import quiet, warn
from firth.core.errors import UserError
from firth.core.files import read_object
from firth.core.memory import return_freed_memory
from firth.lab.batch_rules import BATCH_RULES, MAX_UNLABELLED_TOKENS, BatchFacts, count_labels
from firth.lab.expected_loss import expect_run_loss
from firth.lab.show import first_rows_and_batch, measure_rates
from firth.lab.show_row import predicts_in_place, trace_batch
from firth.lab.text_rules import TEXT_RULES, TextFacts, collect_example_facts, collect_text_facts
from firth.models import flops_per_token, read_config
from firth.objectives import IGNORE_INDEX, Batch
from firth.recipes.pretraining import recommend_rate
from firth.static.ngram import boundary_tokens, count_ngrams, predictable_tokens
from firth.tasks.failure import explain_failed_seed, find_constant_label
from firth.tasks.finetune import make_run_task
from firth.tasks.finetune_data import read_finetune_data
from firth.tasks.lm import EncodedDialogue, is_plain_text
from firth.tasks.recipe import FinetuneRecipe
from firth.text import Example
from firth.tokens import MixedShards, PackedDataset, Shards, ShardSet, load_tokenizer
from firth.tokens.checkup import make_excerpt
from firth.train import Recipe, load_recipe, read_log
from firth.train.dataloader import (
    make_batch_rng,
    make_ramp_datasets,
    make_row_dataset,
    open_recipe_shards,
    run_progress,
)
from firth.train.distributed import SINGLE_PROCESS, select_device
from firth.train.findings import Evidence, Finding, Rule, examine, sort_findings
from firth.train.log_rules import (
    FINETUNING_RULES,
    LOG_RULES,
    LogFacts,
    References,
    find_spikes,
    last_phase_from,
    repeat_command,
    skipped_lines,
)
from firth.train.ramp import first_row_of_step, ramp_stages, stage_at
from firth.train.recipe import read_yaml_mapping
from firth.train.timings import TIMINGS_FILE, sum_timings

SAMPLE_ROWS = 128  # rows whose labels are counted
FIRST_SHARE = 0.1  # of a run's steps whose labels are compared with those of the first rows, where labels change
SAMPLE_EXAMPLES = 256  # labelled examples, likewise
NGRAM_TRAIN_TOKENS, NGRAM_EVAL_TOKENS = 2_000_000, 200_000  # tokens of the n-gram references
FORECAST_RATIO = 1.25  # loss over the forecast, from which a run is behind it
TRIGRAM_MIN_STEPS, TRIGRAM_MIN_PASSES = 2000, 1.0  # of a run that should have passed a trigram model


@dataclass(frozen=True)
class Diagnosis:
    """The result of `firth doctor`."""

    run: str
    kind: str
    references: References
    loss: float | None
    findings: list[Finding]
    num_rules: int
    not_examined: list[str] = field(default_factory=list)  # rules whose facts are missing, and why

    @property
    def exit_code(self) -> int:
        """0: healthy, or information alone; 1: a warning or an error."""
        return int(any(finding.level != "info" for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "kind": self.kind,
            "loss": self.loss,
            "references": self.references.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "rules": self.num_rules,
            "not_examined": self.not_examined,
        }


NO_LOG = "the log: {} is missing, or has no line of a step"


def diagnose_run(folder: str | Path) -> Diagnosis:
    """Examine the run in a folder: a pretraining or a fine-tuning."""
    folder = Path(folder)
    recipe_file = folder / "recipe.yaml"
    if not recipe_file.is_file():
        parent = folder.parent / "recipe.yaml"
        hint = (
            f"Name its run: {folder.parent}."
            if parent.is_file()
            else "Name the folder of a pretraining or fine-tuning."
        )
        raise UserError(f"{folder} is not a run folder: it has no recipe.yaml. {hint}")
    plain = read_yaml_mapping(recipe_file)
    with quiet():
        if "objective" in plain and "model" in plain:
            recipe = load_recipe(recipe_file, Recipe)
            sources = {name: seen_from_here(data, recipe.output_dir, folder) for name, data in recipe.sources.items()}
            data = seen_from_here(recipe.data, recipe.output_dir, folder)
            return diagnose_pretraining(folder, replace(recipe, data=data, sources=sources))
        if "task" in plain or "tasks" in plain:
            tuning = load_recipe(recipe_file, FinetuneRecipe)
            files: dict[str, Any] = {
                name: seen_from_here(getattr(tuning, name), tuning.output_dir, folder)
                for name in ("checkpoint", "train", "dev")
            }
            return diagnose_finetuning(folder, replace(tuning, **files))
    raise UserError(f"{folder} holds word vectors or n-grams: the doctor knows language models and fine-tunings.")


def seen_from_here(path: str, output_dir: str, run: Path) -> str:
    """Return a path of a recipe as it is seen from the current folder: it is relative to where the run was started.

    >>> seen_from_here("no-such-shards", "run", Path("run"))
    'no-such-shards'
    """
    output, here = Path(output_dir).parts, run.resolve()
    if not path or Path(path).is_absolute() or Path(output_dir).is_absolute() or here.parts[-len(output) :] != output:
        return path
    found = Path(*here.parts[: -len(output)], path)
    return str(found) if found.exists() and not (Path(path).exists() and found.samefile(path)) else path


def try_diagnosis(folder: Path) -> list[Finding] | None:
    """Return the findings for a report; None, with a warning, where a run cannot be examined."""
    return_freed_memory()  # of training, in the same process
    try:
        return diagnose_run(folder).findings
    except Exception as e:
        warn(f"the doctor could not examine the run ({type(e).__name__}: {e}). The run itself is not affected.")
        return None


# --- pretraining ----------------------------------------------------------------------------------------------------


def diagnose_pretraining(folder: Path, recipe: Recipe) -> Diagnosis:
    lines = read_run_log(folder / "log.jsonl")
    timings = sum_timings(read_run_log(folder / TIMINGS_FILE))
    not_examined = [] if lines else [NO_LOG.format("log.jsonl")]
    shards: ShardSet | MixedShards | None = None
    try:
        shards = open_recipe_shards(recipe)
    except (UserError, OSError) as e:
        not_examined.append(f"the text and its labels: {e}")
    facts = LogFacts(
        recipe,
        lines,
        is_finished=(folder / "results.json").is_file(),
        recommended_rate=recommend_rate(recipe),
        timings=timings,
        flops_per_token=3 * flops_per_token(recipe.model, recipe.max_seq_length),
        run=str(folder),
    )
    batch_facts, findings = None, list[Finding]()
    if shards is not None:
        batch_facts, label_entropy = collect_batch_facts(recipe, shards, facts, str(folder))
        facts = replace(facts, references=collect_references(recipe, shards, facts, label_entropy))
        for train, held_out in shard_parts(shards):
            facts_of_text = collect_text_facts(shards.tokenizer, train, held_out, recipe.checkpoint)
            findings += examine(TEXT_RULES, facts_of_text)
        findings += examine(BATCH_RULES, batch_facts)
    findings += examine((*LOG_RULES, *REFERENCE_RULES), facts)
    if shards is not None:
        findings = [with_step_text(finding, facts, recipe, shards) for finding in findings]
    rules = (len(LOG_RULES) + len(REFERENCE_RULES)) * bool(lines)
    rules += (len(TEXT_RULES) + len(BATCH_RULES)) * (shards is not None)
    return Diagnosis(
        str(folder),
        "pretraining",
        facts.references,
        facts.kept_loss,
        sort_findings(first_of_each(findings)),
        rules,
        not_examined,
    )


def read_run_log(path: Path) -> list[dict[str, Any]]:
    return read_log(path) if path.is_file() else []


def first_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding per rule: several sources or seeds may have the same."""
    return list({finding.rule: finding for finding in reversed(findings)}.values())[::-1]


def shard_parts(shards: ShardSet | MixedShards) -> Iterator[tuple[Shards, Shards | None]]:
    """Yield training part and held-out part of each source."""
    for part in shards.sources.values() if isinstance(shards, MixedShards) else [shards]:
        yield part.train, part.held_out


def collect_batch_facts(
    recipe: Recipe, shards: ShardSet | MixedShards, log: LogFacts, run: str
) -> tuple[BatchFacts, float]:
    """Make the first rows of a run again and count their labels; also return the entropy of the labels."""
    vocab, objective = shards.tokenizer.vocab, recipe.objective
    dataset = make_row_dataset(recipe, shards, held_out=False)
    plain, progress = replace(recipe, batch_ramp=0.0, length_ramp=0.0), last_phase_from(recipe)
    rows, batch = first_rows_and_batch(plain, dataset, shards.tokenizer, SAMPLE_ROWS, progress)
    rng = make_batch_rng(recipe, rows.stream_index, progress=progress)
    trace = trace_batch(objective, rows, rng, vocab)
    rates, expected = measure_rates(rows, batch, trace, vocab), objective.expected_rates(rows)
    in_place = predicts_in_place(trace.batch).mean() > 0.5 and recipe.model.architecture == "encoder"
    # Of masked and causal rows, the masked ones alone hide tokens.
    name = "masked_row_targets" if "masked_row_targets" in expected else "targets"
    promised_rate, logged_rate = logged_mask_rate(log, recipe)
    facts = BatchFacts(
        recipe,
        **count_labels(batch),
        masked_share=rates.get(name) if in_place or name == "masked_row_targets" else None,
        expected_rate=expected.get(name),
        measured_rate=rates.get(name) if name in expected else None,
        logged_share=logged_label_share(log, recipe, progress),
        promised_rate=promised_rate,
        logged_rate=logged_rate,
        run=run,
    )
    return facts, label_entropy(batch)


def logged_label_share(log: LogFacts, recipe: Recipe, progress: float) -> float | None:
    """Return labels per token over the logged steps; None where the log has no counts, or too few.

    Where labels follow the progress of the run, only the first steps after `progress` count, like the rows made again.
    """
    tokens, targets = log.series("tokens"), log.series("targets")
    if len(tokens) != len(targets):
        return None
    read = np.diff(tokens.values, prepend=0.0) / np.maximum(np.diff(tokens.steps, prepend=0.0), 1)
    done = (targets.steps - 1) / max(recipe.max_steps, 1)
    counts = (done >= progress) & (done < progress + FIRST_SHARE * (1 - progress)) | (
        not recipe.objective.follows_progress
    )
    if counts.sum() < 5 or (
        recipe.objective.follows_progress and counts.sum() * recipe.global_batch_size < SAMPLE_ROWS
    ):
        return None
    return float(targets.values[counts].sum() / max(read[counts].sum(), 1))


def logged_mask_rate(log: LogFacts, recipe: Recipe) -> tuple[float | None, float | None]:
    """Return the mask rate that the objective promises for the last step, and the one in the log."""
    logged = log.series("mask_rate")
    if not len(logged):
        return None, None
    promised = recipe.objective.mask_rate_at(run_progress(recipe, int(logged.steps[-1]) - 1))
    return promised, float(logged.values[-1])


def label_entropy(batch: Batch) -> float:
    """Return the entropy of the labels of some rows, in nats."""
    labels = batch.labels[batch.labels != IGNORE_INDEX]
    share = np.unique(labels, return_counts=True)[1] / max(labels.size, 1)
    return float(-(share * np.log(share)).sum())


def collect_references(recipe: Recipe, shards: ShardSet | MixedShards, log: LogFacts, entropy: float) -> References:
    """Return what the loss should be. Labels of an encoder-decoder hold sentinels: their entropy is the baseline."""
    is_comparable = recipe.model.architecture != "encoder-decoder"
    references = References(math.log(recipe.model.vocab_size), shards.unigram_entropy if is_comparable else entropy)
    if not isinstance(shards, ShardSet):
        return references
    if is_comparable:
        bigram, trigram = ngram_losses(shards)
        references = replace(references, bigram=bigram, trigram=trigram)
    return replace(references, forecast=forecast_loss(recipe, shards, log))


def ngram_losses(shards: ShardSet) -> tuple[float | None, float | None]:
    """Return the held-out losses of Kneser-Ney models of order 2 and 3; None for a tokenizer without an end token."""
    vocab = shards.tokenizer.vocab
    try:
        predictable = predictable_tokens(vocab)
    except UserError:
        return None, None
    ids, starts = concat_sampled_documents(shards.train, vocab, NGRAM_TRAIN_TOKENS)
    held_out, is_start = concat_sampled_documents(shards.held_out or shards.train, vocab, NGRAM_EVAL_TOKENS)
    is_predicted = ~is_start[1:]
    models = (count_ngrams(ids, starts, vocab.size, predictable, order) for order in (2, 3))
    with np.errstate(divide="ignore"):  # start tokens have no probability
        bigram, trigram = (float(-model.log_probs(held_out)[is_predicted].mean()) for model in models)
    return bigram, trigram


def concat_sampled_documents(shards: Shards, vocab: Any, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(T,) documents from all over the text, between start and end tokens, and (T,) whether a token is a start token.

    The held-out loss that they are compared with is that of a sample of all rows, too.
    """
    first, end = boundary_tokens(vocab)
    parts = [shards.document_tokens(d)[:num_tokens] for d in shards.sample_documents(num_tokens).tolist()]
    ids = np.concatenate([np.concatenate([[first], part, [end]]) for part in parts]).astype(np.int64)
    starts = np.zeros(len(ids), bool)
    starts[np.cumsum([0, *(len(part) + 2 for part in parts[:-1])])] = True
    return ids, starts


def forecast_loss(recipe: Recipe, shards: ShardSet, log: LogFacts) -> float | None:
    """Return the planner's forecast for the text that was read; None outside of the measured runs."""
    passes = max((line.get("passes") or 0.0 for line in log.lines), default=0.0)
    device_type = log.timings.get("device") or select_device(SINGLE_PROCESS, recipe).type
    return expect_run_loss(recipe, passes * shards.num_tokens, shards.num_tokens, shards.unigram_entropy, device_type)


def check_behind_forecast(facts: LogFacts) -> Evidence | None:
    loss, forecast = facts.kept_loss, facts.references.forecast
    if not facts.is_finished or loss is None or forecast is None or loss < FORECAST_RATIO * forecast:
        return None
    return Evidence(
        {"loss": loss, "forecast": forecast},
        "Other runs of this size and this much text reached less: settings differ from the recommended ones.",
        facts.command(f"--learning-rate {facts.recommended_rate:.1g}" if facts.recommended_rate else "--dry-run"),
    )


def check_behind_trigram(facts: LogFacts) -> Evidence | None:
    loss, trigram, passes = facts.kept_loss, facts.references.trigram, facts.series("passes")
    is_long = facts.last_step >= TRIGRAM_MIN_STEPS and len(passes) and passes.values[-1] >= TRIGRAM_MIN_PASSES
    if (
        not (facts.is_finished and is_long)
        or loss is None
        or trigram is None
        or loss < trigram
        or facts.is_above_unigrams
    ):
        return None
    return Evidence(
        {"loss": loss, "trigram model": trigram, "bigram model": facts.references.bigram},
        "A model that counts three tokens is better: this one is too small, or was trained too briefly.",
        facts.command(f"--max-steps {4 * facts.last_step}"),
    )


REFERENCE_RULES: tuple[Rule[LogFacts], ...] = (
    Rule(
        "behind-forecast",
        "info",
        "the loss is behind the planner's forecast",
        f"the held-out loss is {FORECAST_RATIO:g} times the forecast, within the range of measured runs",
        check_behind_forecast,
    ),
    Rule(
        "behind-trigram",
        "info",
        "a trigram model is better",
        f"after {TRIGRAM_MIN_STEPS:,} steps and {TRIGRAM_MIN_PASSES:g} pass the loss is above that of a trigram model",
        check_behind_trigram,
    ),
)


# --- the text of a step ---------------------------------------------------------------------------------------------


def with_step_text(finding: Finding, facts: LogFacts, recipe: Recipe, shards: ShardSet | MixedShards) -> Finding:
    """Add the most unusual row of the step that a finding is about: its text, and its documents."""
    if finding.rule == "loss-spikes":
        step = max(find_spikes(facts), key=lambda spike: spike[1] - spike[2])[0]
    elif finding.rule == "divergence":
        step = skipped_lines(facts)[0]["step"]
    else:
        return finding
    return replace(finding, evidence=finding.evidence | find_unusual_row(recipe, shards, step))


def find_unusual_row(recipe: Recipe, shards: ShardSet | MixedShards, step: int) -> dict[str, Any]:
    """Return the row of a step (from 1) whose tokens are the rarest: its place in the stream, documents, beginning."""
    stages = ramp_stages(recipe)
    stage = stage_at(stages, step - 1)
    by_length = {recipe.max_seq_length: make_row_dataset(recipe, shards, held_out=False)}
    dataset = (by_length | make_ramp_datasets(recipe, shards))[stage.seq_length]
    num_skipped = sum(count for first, count in recipe.skips if step - 1 >= first)
    widest = max(s.step_rows for s in stages if s.seq_length == stage.seq_length)
    first = first_row_of_step(stage, step - 1) + num_skipped * widest
    rows = dataset.get_rows(np.arange(first, first + stage.step_rows))
    counts = sum(
        np.bincount(np.asarray(part.tokens[:10_000_000], np.int64), minlength=shards.tokenizer.vocab.size)
        for part, _ in shard_parts(shards)
    )
    surprisal_V = -np.log((counts + 0.5) / (np.sum(counts) + 0.5))
    mean_B = np.where(rows.maskable, surprisal_V[rows.input_ids], 0).sum(1) / np.maximum(rows.maskable.sum(1), 1)
    b = int(mean_B.argmax())
    text = shards.tokenizer.decode(rows.input_ids[b][rows.maskable[b]].tolist())
    found: dict[str, Any] = {"row": int(rows.stream_index[b])}
    if isinstance(dataset, PackedDataset) and rows.row_index is not None:
        _, _, starts, _ = dataset.row_pieces(rows.row_index[b : b + 1])
        documents = np.unique(np.searchsorted(dataset.shards.offsets, starts, side="right") - 1).tolist()
        found["documents"] = ", ".join(map(str, documents[:5]))
    return found | {"text": make_excerpt(text)}


# --- fine-tuning ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinetuneFacts:
    """The recipe, the examples and the results of a fine-tuning."""

    recipe: FinetuneRecipe
    train: list[Example]
    dev: list[Example]
    results: dict[str, Any]
    run: str


def diagnose_finetuning(folder: Path, recipe: FinetuneRecipe) -> Diagnosis:
    findings, not_examined, num_rules = list[Finding](), list[str](), 0
    for seed in sorted(folder.glob("seed-*")) or [folder / "seed-0"]:
        if not (lines := read_run_log(seed / "log.jsonl")):
            not_examined.append(NO_LOG.format(f"{seed.name}/log.jsonl"))
            continue
        own = examine(FINETUNING_RULES, LogFacts(recipe, lines, run=str(folder)))
        findings += [replace(finding, evidence={"seed": seed.name, **finding.evidence}) for finding in own]
        num_rules = len(FINETUNING_RULES)
    try:
        data = read_finetune_data(recipe)
    except (UserError, OSError) as e:
        not_examined.append(f"the examples: {e}")
    else:
        results = read_object(folder / "results.json") if (folder / "results.json").is_file() else {}
        findings += examine(FINETUNE_RULES, FinetuneFacts(recipe, data.train, data.dev, results, str(folder)))
        findings += examine(TEXT_RULES, example_text_facts(recipe, data.train, data.dev))
        num_rules += len(FINETUNE_RULES) + len(TEXT_RULES)
        if (batch_facts := collect_example_batch_facts(recipe, data.train, str(folder))) is not None:
            findings += examine(BATCH_RULES, batch_facts)
            num_rules += len(BATCH_RULES)
    findings = sort_findings(first_of_each(findings))
    return Diagnosis(str(folder), "fine-tuning", References(), None, findings, num_rules, not_examined)


def example_text_facts(recipe: FinetuneRecipe, train: Sequence[Example], dev: Sequence[Example]) -> TextFacts:
    """Count the tokens of examples; the texts of one example are one line."""

    def texts(examples: Sequence[Example]) -> list[str]:
        own = (e.texts[1::2] if recipe.task == "lm" else e.texts for e in examples)
        return [" ".join(t if isinstance(t, str) else " ".join(t) for t in parts) for parts in own]

    return collect_example_facts(load_tokenizer(recipe.checkpoint), texts(train), texts(dev), recipe.checkpoint)


def collect_example_batch_facts(recipe: FinetuneRecipe, train: Sequence[Example], run: str) -> BatchFacts | None:
    """Make the first batch of a task again and count its labels; None for several tasks at once."""
    if recipe.tasks:
        return None
    task = make_run_task(recipe, train, load_tokenizer(recipe.checkpoint), read_config(recipe.checkpoint))
    chosen = list(train[:SAMPLE_EXAMPLES])
    items = task.encode(chosen)
    batch = task.collate(items)
    dialogues = dict[str, int]()
    pairs = zip(items, chosen, strict=True)
    if own := [item for item, e in pairs if isinstance(item, EncodedDialogue) and not is_plain_text(e)]:
        dialogues = {
            "count": len(own),
            "empty": sum(not item.scored_mask.any() for item in own),  # the end token alone is no answer
            "full": sum(item.num_tokens - len(item.scored_mask) <= MAX_UNLABELLED_TOKENS for item in own),
        }
    return BatchFacts(recipe, **count_task_labels(batch), dialogues=dialogues, run=run)


def count_task_labels(batch: Batch) -> dict[str, Any]:
    """Count the labels of a task; one label of a text stands for all of its tokens."""
    counts = count_labels(batch)
    if batch.task_labels is not None:
        counts["num_tokens"] = counts["num_labels"]
    return counts


def check_failed_seeds(facts: FinetuneFacts) -> Evidence | None:
    causes = facts.results.get("failure_causes") or {}
    if not causes:
        return None
    first_seed = Path(facts.run) / f"seed-{next(iter(causes))}"
    cause, options = explain_failed_seed(facts.recipe, facts.train, facts.dev, first_seed)
    return Evidence(
        {"seeds at or below chance": len(causes), "of": facts.recipe.seeds},
        f"{cause[0].upper()}{cause[1:]}.",
        repeat_command(facts.recipe, facts.run, options)
        if options
        else f"firth check {shlex.quote(facts.recipe.train)}",
    )


def check_constant_label(facts: FinetuneFacts) -> Evidence | None:
    found = None if facts.recipe.tasks else find_constant_label(facts.recipe, facts.train, facts.dev)
    if found is None:
        return None
    command = repeat_command(facts.recipe, facts.run, found.options) if found.options else ""
    return Evidence({"examples": len(facts.train)}, f"{found.sentence}.", command)


FINETUNE_RULES: tuple[Rule[FinetuneFacts], ...] = (
    Rule(
        "failed-seeds",
        "error",
        "seeds do not beat chance",
        "a seed's dev score is at or below that of a constant prediction",
        check_failed_seeds,
    ),
    Rule(
        "one-label",
        "warning",
        "almost all labels are the same",
        "95% of the labels of train or dev are one label",
        check_constant_label,
    ),
)
ALL_RULES: tuple[Rule[Any], ...] = (*LOG_RULES, *REFERENCE_RULES, *TEXT_RULES, *BATCH_RULES, *FINETUNE_RULES)
