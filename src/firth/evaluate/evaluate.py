"""Score a checkpoint on a file, and save predictions, results and a report.

Four kinds of tasks: plain text (perplexity, pseudo-likelihood), tasks without fine-tuning (`ZERO_SHOT_TASKS`: minimal
pairs, cloze, choice, word vectors; induction), labels in context (`shots`), and the task that a checkpoint was
fine-tuned for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firth.core.console import format_count, say
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import (
    check_output_folder,
    check_writable,
    is_missing_or_empty,
    read_object,
    replace_nonfinite,
    write_results,
    write_text,
)
from firth.evaluate.cloze import evaluate_choice, evaluate_cloze
from firth.evaluate.embed import evaluate_text_similarity, evaluate_word_in_context
from firth.evaluate.evaluation import Evaluation
from firth.evaluate.in_context import IN_CONTEXT_TASKS, evaluate_in_context
from firth.evaluate.induction import RANDOM_TOKENS, evaluate_induction
from firth.evaluate.likelihood import (
    aggregate_likelihoods,
    choose_scoring_method,
    lowercasing_messages,
    make_scorer,
    unknown_token_messages,
)
from firth.evaluate.minimal_pairs import evaluate_minimal_pairs
from firth.evaluate.ngram import NgramScorer
from firth.evaluate.report import write_evaluation_report
from firth.evaluate.vectors import evaluate_analogies, evaluate_word_similarity, load_word_vectors
from firth.metrics import compute_metrics
from firth.models import load_model, read_config
from firth.models.presets import checkpoint_hint
from firth.static.ngram import is_ngram
from firth.tasks import FINETUNE_TASKS, Prediction, format_predictions, make_task, make_task_without_examples
from firth.tasks.head_task import HeadTask
from firth.tasks.recipe import read_task_file
from firth.tasks.results import label_of_f1
from firth.tasks.span_qa import SpanQATask
from firth.text import Corpus, Example, RowNotes, read_labelled
from firth.text.examples import TASK_SYNONYMS
from firth.text.labelled_row import MAX_LISTED_ROWS
from firth.text.suite import PLAIN_TEXT_TASKS
from firth.tokens import load_tokenizer
from firth.train import TrainingConfig, choose_compute

BATCH_SIZE = 32  # examples that a fine-tuned model computes at once
LIKELIHOOD_OPTIONS = ("method", "max_seq_length", "stride", "batch_tokens")
BATCHING_OPTIONS = ("max_seq_length", "batch_tokens")
IN_CONTEXT_OPTIONS = (
    *("shots", "template", "train", "seeds", "verbalizer", "random_labels"),
    *("method", *BATCHING_OPTIONS),
)
INDUCTION_TASK, INDUCTION_OPTIONS = "induction", ("method", *BATCHING_OPTIONS)
# Tasks that need no fine-tuning: the function that scores each, and the settings that it takes.
ZERO_SHOT_TASKS: dict[str, tuple[Callable[..., Evaluation], tuple[str, ...]]] = {
    "minimal-pairs": (evaluate_minimal_pairs, LIKELIHOOD_OPTIONS),
    "cloze": (evaluate_cloze, LIKELIHOOD_OPTIONS),
    "choice": (evaluate_choice, ("delimiter", *LIKELIHOOD_OPTIONS)),
    "word-in-context": (evaluate_word_in_context, ("train", "threshold", "layer", "batch_tokens")),
    "embed": (evaluate_text_similarity, ("pool", "layer", *BATCHING_OPTIONS)),
    "word-similarity": (evaluate_word_similarity, ("limit",)),
    "analogy": (evaluate_analogies, ("limit",)),
}
# Settings of a task by a checkpoint that was fine-tuned for it, by task and answer. Default: ensemble.
FINETUNED_OPTIONS = {("span-qa", "head"): ("train", "threshold")}
WORD_VECTOR_TASKS = ("word-similarity", "analogy")
VECTOR_FILE_TASKS = (*WORD_VECTOR_TASKS, "word-in-context")  # also take a file of word vectors
PATH_RESULT_KEYS = ("checkpoint", "data", "ensemble")  # keys of results.json whose values are paths
SELF_LABELLED_TASKS = ("lm", "embed")  # the texts are the labels
EVALUATION_TASKS = tuple(sorted({*FINETUNE_TASKS, *ZERO_SHOT_TASKS, *PLAIN_TEXT_TASKS, INDUCTION_TASK}))


def evaluate(
    checkpoint: str | Path,
    task: str,
    data: str | Path | Sequence[str | Path] | None,
    output_dir: str | Path,
    columns: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    overwrite: bool = False,
    encoding: str = "utf-8",
    documents: str = "auto",
    numbered: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Score a checkpoint on a file: one fine-tuned for the task, or any checkpoint for a task without fine-tuning.

    Returns `metrics`, and how they were computed. `settings` are those of the task (see ZERO_SHOT_TASKS); None is
    ignored. With `shots`, labels are scored in context. "induction" needs no `data`. A file without labels gives
    predictions and no scores; a file with some labels is refused. Writes results.json, predictions.jsonl and
    report.html to `output_dir`; with `numbered` to OUTPUT_DIR-2 ... if it has other results.
    """
    checkpoint, folder = Path(checkpoint), Path(output_dir)
    settings = {name: value for name, value in settings.items() if value is not None}
    facts = read_task_file(checkpoint)
    if task in facts.get("tasks", {}):  # one of several, by its name
        facts = facts["tasks"][task]
        task = facts["task"]
    check_evaluation(checkpoint, task, facts, settings)
    if batch_size is not None and not is_finetuned_for(task, facts, settings):
        raise UserError(f"batch_size is for fine-tuned models, and {checkpoint} is not asked as one. Leave it out.")
    if documents != "auto" and task not in PLAIN_TEXT_TASKS:
        raise UserError(f"documents is for plain text, and the task {task} reads examples. Leave it out.")
    if not overwrite and not numbered:
        check_output_folder(folder, "--output-dir")
    check_writable(folder)
    if task == INDUCTION_TASK:
        data = RANDOM_TOKENS
        examples, outcome = evaluate_induction(checkpoint, **settings)
    elif data is None:
        raise UserError(f"No data to score the task {task} on: give --data FILE.")
    elif task in PLAIN_TEXT_TASKS:
        examples, outcome = evaluate_text(checkpoint, Corpus(data, documents, columns, encoding), settings)
    else:
        if not isinstance(data, str | Path):
            raise UserError(f"The task {task} is scored on one file; {len(data)} were given.")
        notes = RowNotes(str(data))
        examples = read_labelled(data, task, columns, "dev", encoding, require_labels=False, notes=notes)
        check_all_or_no_labels(data, examples)
        if "train" in settings:
            settings["train"] = read_labelled(settings["train"], task, columns, "train", encoding)
        outcome = evaluate_examples(checkpoint, task, facts, data, examples, settings, batch_size or BATCH_SIZE)
        if records := notes.to_records():
            outcome = outcome._replace(details={**outcome.details, "notes": records})
    for notice in outcome.notices:
        say(notice)
    if not outcome.metrics:
        say("The file has no labels: there are predictions, but no scores.")
    return save_evaluation(folder, checkpoint, task, data, examples, outcome, numbered and not overwrite)


def evaluate_examples(
    checkpoint: Path,
    task: str,
    task_metadata: Mapping[str, Any],
    data: str | Path,
    examples: Sequence[Example],
    settings: Mapping[str, Any],
    batch_size: int,
) -> Evaluation:
    """Score the examples of a file: labels in context, the checkpoint's own task, or a task without fine-tuning."""
    if "shots" in settings:
        return evaluate_in_context(checkpoint, task, examples, **settings)
    if not is_finetuned_for(task, task_metadata, settings):
        return evaluate_zero_shot(checkpoint, task, examples, settings)
    try:
        decision = {name: settings[name] for name in ("train", "threshold") if name in settings}
        outcome = evaluate_finetuned(checkpoint, task, task_metadata, examples, batch_size, **decision)
        if "ensemble" in settings:
            outcome = ensemble_predictions(outcome, task, settings["ensemble"], examples, batch_size)
    except UserError as e:
        raise UserError(f"{data}: {e}") from None
    return outcome


def check_all_or_no_labels(data: str | Path, examples: Sequence[Example]) -> None:
    """Refuse a file in which some examples have a label and others do not."""
    lacking = [str(example.id) for example in examples if example.target is None]
    if 0 < len(lacking) < len(examples):
        which = ", ".join(lacking[:MAX_LISTED_ROWS]) + (", ..." if len(lacking) > MAX_LISTED_ROWS else "")
        raise UserError(
            f"{data}: {format_count(len(lacking), 'example has', 'examples have')} no label (id or line {which}), and "
            f"{len(examples) - len(lacking):,} have one. Add the missing labels, or remove these examples; a file "
            "without labels gives predictions alone."
        )


def is_finetuned_for(task: str, task_metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's own head predicts; text-to-text also works without fine-tuning.

    `embed` always goes through `embed_texts`, which `firth embed` calls too: both give the same vectors. With `shots`
    the language model predicts.
    """
    own = task_metadata.get("task") == task or (task in FINETUNE_TASKS and task not in ZERO_SHOT_TASKS)
    return own and task != "embed" and "shots" not in settings


def check_evaluation(
    checkpoint: Path, task: str, task_metadata: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Refuse a wrong task, checkpoint or setting before any data are read."""
    if task not in EVALUATION_TASKS:
        raise UserError(f"Unknown task {quote(task)}. {did_you_mean(task, EVALUATION_TASKS, TASK_SYNONYMS)}")
    if not checkpoint.is_dir() and not (task in VECTOR_FILE_TASKS and checkpoint.is_file()):
        also = ", nor a file of word vectors" if task in VECTOR_FILE_TASKS else ""
        raise UserError(f"{checkpoint} is not a checkpoint folder{also}. {checkpoint_hint(checkpoint)}")
    tuned, in_context = task_metadata.get("task"), "shots" in settings
    if in_context and task not in IN_CONTEXT_TASKS:
        raise UserError(f"shots are for the tasks {', '.join(IN_CONTEXT_TASKS)}, not for {task}.")
    if in_context or task == INDUCTION_TASK:
        choose_scoring_method(read_config(checkpoint), settings.get("method", "auto"))
    elif tuned not in (None, task) and task in FINETUNE_TASKS:
        raise UserError(f"{checkpoint} was fine-tuned for {tuned}, not for {task}.")
    elif checkpoint.is_dir() and tuned != task:
        check_zero_shot_model(checkpoint, task, settings)
    if tuned is None and not in_context and task in FINETUNE_TASKS and task not in (*ZERO_SHOT_TASKS, "text-to-text"):
        how = f"fine-tune it first (`firth finetune {checkpoint} --task {task} ...`)"
        how += ", or score labels in a prompt (--shots 0)" if task in IN_CONTEXT_TASKS else ""
        raise UserError(f"{checkpoint} was not fine-tuned for the task {task}: {how}.")
    known = (
        LIKELIHOOD_OPTIONS
        if task in PLAIN_TEXT_TASKS
        else INDUCTION_OPTIONS
        if task == INDUCTION_TASK
        else IN_CONTEXT_OPTIONS
        if in_context
        else FINETUNED_OPTIONS.get((task, task_metadata.get("answer", "head")), ("ensemble",))
        if is_finetuned_for(task, task_metadata, settings)
        else ZERO_SHOT_TASKS[task][1]
    )
    if wrong := [name for name in settings if name not in known]:
        takes = f"It takes {', '.join(known)}." if known else "It takes none: the checkpoint has its own."
        raise UserError(f"{wrong[0]} is not a setting of the task {task}. {takes}")


def check_zero_shot_model(checkpoint: Path, task: str, settings: Mapping[str, Any]) -> None:
    """Refuse a task that this model cannot do without fine-tuning."""
    if is_ngram(checkpoint) and task in PLAIN_TEXT_TASKS:
        return
    config = read_config(checkpoint)
    if task in PLAIN_TEXT_TASKS or "method" in ZERO_SHOT_TASKS.get(task, (None, ()))[1]:
        choose_scoring_method(config, settings.get("method", "auto"))
    elif task not in ZERO_SHOT_TASKS:
        make_task_without_examples(task, load_tokenizer(checkpoint), config)


def evaluate_text(checkpoint: Path, corpus: Corpus, settings: Mapping[str, Any]) -> tuple[list[Example], Evaluation]:
    """Score the likelihood of each document, and of all of them."""
    scorer = NgramScorer(checkpoint, **settings) if is_ngram(checkpoint) else make_scorer(checkpoint, **settings)
    examples: list[Example] = []

    def texts() -> Any:
        for document in corpus:
            examples.append(Example(document.source, (document.text[:1000],)))  # enough to identify it in the report
            yield document.text

    likelihoods = list(scorer.score_texts(texts()))
    metrics, facts = aggregate_likelihoods(scorer, likelihoods)
    notices = [corpus.describe(), *scorer.notices, *unknown_token_messages(facts["unknown"])]
    notices += lowercasing_messages(scorer.tokenizer) if scorer.is_exact else []
    predictions = [Prediction(one.logp, extra={"tokens": one.tokens, "bytes": one.bytes}) for one in likelihoods]
    return examples, Evaluation(metrics, predictions, facts, notices)


def evaluate_zero_shot(
    checkpoint: Path, task: str, examples: Sequence[Example], settings: Mapping[str, Any]
) -> Evaluation:
    """Score a task that needs no fine-tuning."""
    measure, _ = ZERO_SHOT_TASKS[task]
    if task in WORD_VECTOR_TASKS:
        return measure(load_word_vectors(checkpoint, **settings), examples)
    return measure(load_word_vectors(checkpoint) if checkpoint.is_file() else checkpoint, examples, **settings)


def evaluate_finetuned(
    checkpoint: Path,
    task: str,
    task_metadata: Mapping[str, Any],
    examples: Sequence[Example],
    batch_size: int = BATCH_SIZE,
    train: Sequence[Example] | None = None,
    threshold: float | None = None,
) -> Evaluation:
    """Predict with a fine-tuned checkpoint; scored if every example has a label.

    `threshold` sets the no-answer threshold of `span-qa`; else it is chosen on `train`. Default: the checkpoint's own.
    """
    model = load_model(checkpoint)
    if model.tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer.")
    head_task = make_task(task, task_metadata, model.tokenizer, model.config)
    if isinstance(head_task, HeadTask):
        head_task.check_head(model.config, str(checkpoint))
    compute = choose_compute(TrainingConfig())
    model.to(compute.device)
    details: dict[str, Any] = {"labels": list(head_task.labels)} if head_task.labels else {}
    if isinstance(head_task, SpanQATask):
        if threshold is None and train is not None:
            tuned = make_task(task, task_metadata, model.tokenizer, model.config)
            assert isinstance(tuned, SpanQATask)
            threshold = tuned.best_threshold(train, tuned.predict(model, tuned.encode(train), compute, batch_size))
        if threshold is not None:
            head_task.threshold, head_task.allows_no_answer = threshold, True
        details |= {"threshold": head_task.threshold} if head_task.allows_no_answer else {}
    predictions = head_task.predict(model, head_task.encode(examples), compute, batch_size)
    labelled = task in SELF_LABELLED_TASKS or all(example.target is not None for example in examples)
    metrics = head_task.score(examples, predictions) if labelled else {}
    return Evaluation(metrics, predictions, details, head_task.notices)


def ensemble_predictions(
    evaluation: Evaluation, task: str, others: Sequence[str | Path], examples: Sequence[Example], batch_size: int
) -> Evaluation:
    """Average the probabilities of checkpoints that were fine-tuned for the same labels (ULMFiT, section 5)."""
    all_scores = [[p.scores for p in evaluation.predictions]]
    for other in map(Path, others):
        facts = read_task_file(other)
        check_evaluation(other, task, facts, {})
        result = evaluate_finetuned(other, task, facts, examples, batch_size)
        if result.details != evaluation.details:
            raise UserError(f"--ensemble {other}: its labels differ from those of the first checkpoint.")
        all_scores.append([p.scores for p in result.predictions])
    predictions = []
    for scores in zip(*all_scores, strict=True):
        if None in scores:
            raise UserError(f"--ensemble averages label probabilities, and the task {task} has none.")
        mean = {name: sum(one[name] for one in scores) / len(scores) for name in scores[0]}
        best = max(mean, key=mean.__getitem__)
        predictions.append(Prediction(int(best) if task == "choice" else best, mean))
    targets = [example.target for example in examples]
    metrics = compute_metrics(task, [p.prediction for p in predictions], targets) if None not in targets else {}
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
    """Write predictions, report and results; return the results."""
    lines = format_predictions(examples, evaluation.predictions)
    result = {
        "task": task,
        "checkpoint": str(checkpoint),
        "data": str(data) if isinstance(data, str | Path) else list(map(str, data)),
        "examples": len(examples),
        "metrics": dict(evaluation.metrics),
        **label_of_f1(evaluation.metrics, examples),
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
    """The first of NAME, NAME-2, NAME-3 ... that is empty or has these very results."""
    path, number = folder, 1
    while not is_missing_or_empty(path) and not has_same_results(path, result, predictions_jsonl):
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    if path != folder:
        say(f"{folder} has other results: these are in {path}. --overwrite replaces the former.")
    return path


def has_same_results(folder: Path, result: Mapping[str, Any], predictions_jsonl: str) -> bool:
    """Whether a folder has these results, computed from the same files."""
    results, predictions = folder / "results.json", folder / "predictions.jsonl"
    if not results.is_file() or not predictions.is_file():
        return False
    before, now = read_object(results), json.loads(json.dumps(replace_nonfinite(result)))
    same_names = all(are_same_files(before.pop(name, None), now.pop(name, None)) for name in PATH_RESULT_KEYS)
    same_scores = all(before.get(name) == value for name, value in now.items())
    return same_names and same_scores and predictions.read_text(encoding="utf-8") == predictions_jsonl


def are_same_files(a: Any, b: Any) -> bool:
    """Whether two paths, or two lists of paths, are the same files."""
    first, second = ([x] if isinstance(x, str) else list(x or ()) for x in (a, b))
    return [Path(x).absolute() for x in first] == [Path(x).absolute() for x in second]
