"""A checkpoint and data to scores, saved predictions and a page that shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firth.core.console import format_count, say
from firth.core.errors import UserError, did_you_mean
from firth.core.files import (
    check_output_folder,
    check_writable,
    is_missing_or_empty,
    read_json,
    replace_nonfinite,
    write_results,
    write_text,
)
from firth.evaluate.cloze import evaluate_choice, evaluate_cloze
from firth.evaluate.embed import evaluate_text_similarity, evaluate_word_in_context
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.likelihood import aggregate_likelihoods, choose_scoring_method, make_scorer, unknown_token_messages
from firth.evaluate.minimal_pairs import evaluate_minimal_pairs
from firth.evaluate.ngram import NgramScorer
from firth.evaluate.report import write_evaluation_report
from firth.evaluate.vectors import evaluate_analogies, evaluate_word_similarity, load_word_vectors
from firth.metrics import compute_metrics
from firth.models import load_model, read_config
from firth.static.ngram import is_ngram
from firth.tasks import FINETUNE_TASKS, TASK_FILE, Prediction, format_predictions, make_task, make_task_without_examples
from firth.text import Corpus, Example, RowNotes, read_labelled
from firth.text.labelled_row import MAX_LISTED_ROWS
from firth.text.suite import PLAIN_TEXT_TASKS
from firth.tokens import load_tokenizer
from firth.train import TrainingConfig, choose_compute

LIKELIHOOD_OPTIONS = ("method", "max_seq_length", "stride", "batch_tokens")
BATCHING_OPTIONS = ("max_seq_length", "batch_tokens")
# What a checkpoint can be asked without having been fine-tuned for it, and what each of these may be told.
ZERO_SHOT_TASKS: dict[str, tuple[Callable[..., Evaluation], tuple[str, ...]]] = {
    "minimal-pairs": (evaluate_minimal_pairs, LIKELIHOOD_OPTIONS),
    "cloze": (evaluate_cloze, LIKELIHOOD_OPTIONS),
    "choice": (evaluate_choice, ("delimiter", *LIKELIHOOD_OPTIONS)),
    "word-in-context": (evaluate_word_in_context, ("train", "threshold", "layer", "batch_tokens")),
    "embed": (evaluate_text_similarity, ("pool", "layer", *BATCHING_OPTIONS)),
    "word-similarity": (evaluate_word_similarity, ("limit",)),
    "analogy": (evaluate_analogies, ("limit",)),
}
WORD_VECTOR_TASKS = ("word-similarity", "analogy")  # ask word vectors
VECTOR_FILE_TASKS = (*WORD_VECTOR_TASKS, "word-in-context")  # take a file of word vectors too
PATH_RESULT_KEYS = ("checkpoint", "data", "ensemble")  # of files, in the results
SELF_LABELLED_TASKS = (
    "lm",
    "embed",
)  # are scored without further answers: on what is said, on which texts belong together
EVALUATION_TASKS = tuple(sorted({*FINETUNE_TASKS, *ZERO_SHOT_TASKS, *PLAIN_TEXT_TASKS}))


def evaluate(
    checkpoint: str | Path,
    task: str,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    columns: Mapping[str, str] | None = None,
    batch_size: int = 32,
    overwrite: bool = False,
    encoding: str = "utf-8",
    documents: str = "auto",
    numbered: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Score a checkpoint on a file: one that was fine-tuned for the task, or any one where the task needs no training.

    `metrics` are the scores, and the rest says how they came about. `settings` are what the task can be told (see
    ZERO_SHOT); None means left out. A file without answers gives predictions and no scores; one that lacks some is
    refused. Writes results.json, predictions.jsonl and report.html to `output_dir`; with `numbered` to a folder beside
    it where it has other results.
    """
    checkpoint, folder = Path(checkpoint), Path(output_dir)
    settings = {name: value for name, value in settings.items() if value is not None}
    facts = read_task_metadata(checkpoint)
    check_evaluation(checkpoint, task, facts, settings)
    if not overwrite and not numbered:
        check_output_folder(folder, "--output-dir")
    check_writable(folder)
    if task in PLAIN_TEXT_TASKS:
        examples, outcome = evaluate_text(checkpoint, Corpus(data, documents, columns, encoding), settings)
    else:
        if not isinstance(data, str | Path):
            raise UserError(f"The task {task} is scored on one file; {len(data)} were given.")
        notes = RowNotes(str(data))
        examples = read_labelled(data, task, columns, "dev", encoding, require_labels=False, notes=notes)
        check_all_or_no_labels(data, examples)
        if is_finetuned_for(task, facts):
            try:
                outcome = evaluate_finetuned(checkpoint, task, facts, examples, batch_size)
                if "ensemble" in settings:
                    outcome = ensemble_predictions(outcome, task, settings["ensemble"], examples, batch_size)
            except UserError as e:
                raise UserError(f"{data}: {e}") from None
        else:
            if "train" in settings:
                settings["train"] = read_labelled(settings["train"], task, columns, "train", encoding)
            outcome = evaluate_zero_shot(checkpoint, task, examples, settings)
        if found := notes.to_records():
            outcome = outcome._replace(details={**outcome.details, "notes": found})
    for sentence in outcome.notices:
        say(sentence)
    if not outcome.metrics:
        say("The file has no answers: there are predictions, and no scores.")
    return save_evaluation(folder, checkpoint, task, data, examples, outcome, numbered and not overwrite)


def check_all_or_no_labels(data: str | Path, examples: Sequence[Example]) -> None:
    """A file has all its answers, and is scored, or none."""
    lacking = [str(example.id) for example in examples if example.target is None]
    if 0 < len(lacking) < len(examples):
        which = ", ".join(lacking[:MAX_LISTED_ROWS]) + (", ..." if len(lacking) > MAX_LISTED_ROWS else "")
        raise UserError(
            f"{data}: {format_count(len(lacking), 'example has', 'examples have')} no answer (id or line {which}), and "
            f"{len(examples) - len(lacking):,} have one. Fill in what is missing, or take it out; a file without any "
            "answers gives predictions alone."
        )


def read_task_metadata(checkpoint: Path) -> dict[str, Any]:
    """What a fine-tuned checkpoint was tuned for; nothing for any other."""
    return dict(read_json(checkpoint / TASK_FILE)) if (checkpoint / TASK_FILE).is_file() else {}


def is_finetuned_for(task: str, task_metadata: Mapping[str, Any]) -> bool:
    """Whether the checkpoint answers itself; text to text needs no tuning to be written."""
    return task_metadata.get("task") == task or (task in FINETUNE_TASKS and task not in ZERO_SHOT_TASKS)


def check_evaluation(
    checkpoint: Path, task: str, task_metadata: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Refuse what cannot be done before anything is read."""
    if task not in EVALUATION_TASKS:
        raise UserError(f"Unknown task {task!r}. {did_you_mean(task, EVALUATION_TASKS)}")
    if not checkpoint.is_dir() and not (task in VECTOR_FILE_TASKS and checkpoint.is_file()):
        also = ", nor a file of word vectors" if task in VECTOR_FILE_TASKS else ""
        raise UserError(f"{checkpoint} is not a checkpoint folder{also}. `firth pretrain` makes one: RUN/final.")
    tuned = task_metadata.get("task")
    if tuned not in (None, task) and task in FINETUNE_TASKS:
        raise UserError(f"{checkpoint} was fine-tuned for {tuned}, not for {task}.")
    if checkpoint.is_dir() and tuned != task:
        check_zero_shot_model(checkpoint, task, settings)
    if tuned is None and task in FINETUNE_TASKS and task not in (*ZERO_SHOT_TASKS, "text-to-text"):
        how = f"fine-tune it first (`firth finetune {checkpoint} --task {task} ...`)"
        raise UserError(f"{checkpoint} has not learned the task {task}: {how}.")
    known = (
        LIKELIHOOD_OPTIONS
        if task in PLAIN_TEXT_TASKS
        else ("ensemble",)
        if is_finetuned_for(task, task_metadata)
        else ZERO_SHOT_TASKS[task][1]
    )
    if wrong := [name for name in settings if name not in known]:
        takes = f"It takes {', '.join(known)}." if known else "It takes none: they are the checkpoint's own."
        raise UserError(f"{wrong[0]} is no setting of the task {task}. {takes}")


def check_zero_shot_model(checkpoint: Path, task: str, settings: Mapping[str, Any]) -> None:
    """Refuse what a model that was not tuned for a task cannot do, whatever the data are."""
    if is_ngram(checkpoint) and task in PLAIN_TEXT_TASKS:
        return
    config = read_config(checkpoint)
    if task in PLAIN_TEXT_TASKS or "method" in ZERO_SHOT_TASKS.get(task, (None, ()))[1]:
        choose_scoring_method(config, settings.get("method", "auto"))
    elif task not in ZERO_SHOT_TASKS:
        make_task_without_examples(task, load_tokenizer(checkpoint), config)


def evaluate_text(checkpoint: Path, corpus: Corpus, settings: Mapping[str, Any]) -> tuple[list[Example], Evaluation]:
    """How likely each document is, and all of them together."""
    scorer = NgramScorer(checkpoint, **settings) if is_ngram(checkpoint) else make_scorer(checkpoint, **settings)
    examples: list[Example] = []

    def texts() -> Any:
        for document in corpus:
            examples.append(Example(document.source, (document.text[:1000],)))  # enough to show which one it is
            yield document.text

    found = list(scorer.score_texts(texts()))
    metrics, facts = aggregate_likelihoods(scorer, found)
    said = [corpus.describe(), *scorer.notices, *unknown_token_messages(facts["unknown"])]
    predictions = [Prediction(one.logp, extra={"tokens": one.tokens, "bytes": one.bytes}) for one in found]
    return examples, Evaluation(metrics, predictions, facts, said)


def evaluate_zero_shot(
    checkpoint: Path, task: str, examples: Sequence[Example], settings: Mapping[str, Any]
) -> Evaluation:
    """Ask a checkpoint as it is."""
    measure, _ = ZERO_SHOT_TASKS[task]
    if task in WORD_VECTOR_TASKS:
        return measure(load_word_vectors(checkpoint, **settings), examples)
    return measure(load_word_vectors(checkpoint) if checkpoint.is_file() else checkpoint, examples, **settings)


def evaluate_finetuned(
    checkpoint: Path, task: str, task_metadata: Mapping[str, Any], examples: Sequence[Example], batch_size: int = 32
) -> Evaluation:
    """Let a fine-tuned checkpoint answer; scored where every example has its answer."""
    model = load_model(checkpoint)
    if model.tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer.")
    work = make_task(task, task_metadata, model.tokenizer, model.config)
    machine = choose_compute(TrainingConfig())
    items = work.encode(examples)
    predictions = work.predict(model.to(machine.device), items, machine, batch_size)
    answered = task in SELF_LABELLED_TASKS or all(example.target is not None for example in examples)
    labels = {"labels": list(work.labels)} if work.labels else {}
    return Evaluation(work.score(examples, predictions) if answered else {}, predictions, labels, work.notices)


def ensemble_predictions(
    evaluation: Evaluation, task: str, others: Sequence[str | Path], examples: Sequence[Example], batch_size: int
) -> Evaluation:
    """The mean of the probabilities of several checkpoints that were tuned for the same labels (ULMFiT, section 5)."""
    all_scores = [[p.scores for p in evaluation.predictions]]
    for other in map(Path, others):
        facts = read_task_metadata(other)
        check_evaluation(other, task, facts, {})
        found = evaluate_finetuned(other, task, facts, examples, batch_size)
        if found.details != evaluation.details:
            raise UserError(f"{other} knows other labels than the first checkpoint: their answers cannot be joined.")
        all_scores.append([p.scores for p in found.predictions])
    predictions = []
    for several in zip(*all_scores, strict=True):
        if None in several:
            raise UserError(f"The task {task} has no probabilities of labels, whose mean could be taken.")
        mean = {name: sum(scores[name] for scores in several) / len(several) for name in several[0]}
        predictions.append(Prediction(max(mean, key=mean.__getitem__), mean))
    true = [example.target for example in examples]
    metrics = compute_metrics(task, [p.prediction for p in predictions], true) if None not in true else {}
    facts = {**evaluation.details, "ensemble": [str(other) for other in others]}
    return evaluation._replace(metrics=metrics, predictions=predictions, details=facts)


def save_evaluation(
    folder: Path,
    checkpoint: Path,
    task: str,
    data: Any,
    examples: Sequence[Example],
    evaluation: Evaluation,
    numbered: bool = False,
) -> dict[str, Any]:
    """Write what was found; the result of the verb."""
    lines = format_predictions(examples, evaluation.predictions)
    result = {
        "task": task,
        "checkpoint": str(checkpoint),
        "data": str(data) if isinstance(data, str | Path) else list(map(str, data)),
        "examples": len(examples),
        "metrics": dict(evaluation.metrics),
        **evaluation.details,
    }
    folder = next_free_results_folder(folder, result, lines) if numbered else folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "predictions.jsonl", lines)
    result |= {"predictions": str(folder / "predictions.jsonl"), "report": str(folder / "report.html")}
    write_evaluation_report(folder / "report.html", result, examples, evaluation.predictions)
    write_results(folder / "results.json", result)
    return result


def next_free_results_folder(folder: Path, result: Mapping[str, Any], predictions_jsonl: str) -> Path:
    """The first of NAME, NAME-2, NAME-3 ... in which nothing is, or just these results. Another than NAME is said."""
    place, number = folder, 1
    while not is_missing_or_empty(place) and not has_same_results(place, result, predictions_jsonl):
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    if place != folder:
        say(f"{folder} has other results, and stays: these are in {place}. --overwrite replaces the others.")
    return place


def has_same_results(folder: Path, result: Mapping[str, Any], predictions_jsonl: str) -> bool:
    """Whether a folder has just these results, of the same files."""
    results, predictions = folder / "results.json", folder / "predictions.jsonl"
    if not results.is_file() or not predictions.is_file():
        return False
    before, now = read_json(results), json.loads(json.dumps(replace_nonfinite(result)))
    same_names = all(are_same_files(before.pop(name, None), now.pop(name, None)) for name in PATH_RESULT_KEYS)
    same_scores = all(before.get(name) == value for name, value in now.items())
    return same_names and same_scores and predictions.read_text(encoding="utf-8") == predictions_jsonl


def are_same_files(a: Any, b: Any) -> bool:
    """Whether two names, or two lists of names, mean the same files."""
    first, second = ([x] if isinstance(x, str) else list(x or ()) for x in (a, b))
    return [Path(x).absolute() for x in first] == [Path(x).absolute() for x in second]
