"""Score a checkpoint on a suite of tasks: GLUE, SuperGLUE, or a YAML file that lists tasks.

For each task the checkpoint is fine-tuned with several seeds and scored on dev. A task's score is the mean of its
official metrics; the suite's score is the mean over tasks (Wang et al. 2018, section 5). Tasks that need no fine-tuning
are scored directly. Each finished task is saved at once, so that a suite can be resumed.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.core.console import format_count, quiet, run_series, say, warn
from firth.core.errors import UserError, did_you_mean, quote, shorten
from firth.core.files import check_output_folder, read_object, read_yaml, write_json, write_results
from firth.core.html import HtmlPage, format_cell
from firth.evaluate.evaluate import ZERO_SHOT_TASKS, check_evaluation, evaluate, evaluate_finetuned
from firth.evaluate.likelihood import choose_scoring_method, text_metric_names
from firth.evaluate.report import write_run_report_and_card
from firth.metrics import f1, format_metric, mean_and_std, squad_per_question
from firth.models import read_config
from firth.models.presets import checkpoint_hint
from firth.recipes import finetuning_defaults, with_rate_candidates
from firth.static.ngram import is_ngram
from firth.tasks import (
    FINETUNE_TASKS,
    FinetuneRecipe,
    Prediction,
    finetune,
    metric_names,
    read_predictions,
    write_predictions,
)
from firth.tasks.finetune_data import check_labels
from firth.tasks.recipe import read_task_file
from firth.tasks.registry import LABEL_TASKS
from firth.tasks.results import check_metric
from firth.text import Example, SuiteTask, find_glue_suite, find_superglue_suite, read_labelled, read_suite
from firth.text.formats.glue import GLUE_TASKS
from firth.text.formats.superglue import SUPERGLUE_TASKS
from firth.text.suite import PLAIN_TEXT_TASKS
from firth.train import apply_overrides, run_folder
from firth.train.folder import check_run_folder

KNOWN_SUITES = {
    "glue": (find_glue_suite, tuple(GLUE_TASKS)),
    "superglue": (find_superglue_suite, tuple(SUPERGLUE_TASKS)),
}
SUITE_RESULTS_FILE, SUITE_SETTINGS_FILE, SUITE_TASK_RESULTS_FILE = "results.json", "suite.json", "suite_task.json"
DEFAULT_SUITE_SEEDS = 3
# recipe fields that the suite sets itself
SUITE_RECIPE_FIELDS = ("checkpoint", "task", "train", "dev", "columns", "output_dir", "seeds")
MODE_ZERO_SHOT, MODE_ALREADY_FINETUNED, MODE_FINETUNE = "as it is", "fine-tuned already", "fine-tuned"
# metrics of `superglue_extra_scores`, by task
SUPERGLUE_EXTRA_METRICS = {"multirc": ("exact_match",), "record": ("exact_match", "f1")}
SUITE_COLUMNS = ["task", "metrics", "how", "score", "deviation"]
SCORE_CAPTION = (
    "A score is the mean of its metrics, from 0 to 100 as on the leaderboards: shares, correlations and mcc are "
    "multiplied by 100."
)
PERCENT_METRICS = ("chrf", "bleu", "rouge_1", "rouge_2", "rouge_l", "rouge_lsum")  # from 0 to 100
# lower is better, or without a bound: not averaged
UNBOUNDED_METRICS = (
    *(*text_metric_names(True), *text_metric_names(False), "answer_logp"),
    *("mean_absolute_error", "margin", "reward_chosen", "reward_rejected"),
)
ZERO_SHOT_METRICS = {  # metrics without fine-tuning, where they differ from those after fine-tuning
    "minimal-pairs": ("accuracy", "group_accuracy"),
    "cloze": ("accuracy", "answer_logp", "known"),
    "choice": ("accuracy", "accuracy_norm", "accuracy_bytes"),
    "analogy": ("accuracy", "section_accuracy", "known"),
}


def evaluate_suite(
    checkpoint: str | Path,
    suite: str | Path,
    output_dir: str | Path,
    data: str | Path | None = None,
    seeds: int = DEFAULT_SUITE_SEEDS,
    tasks: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Score a checkpoint on all tasks of a suite: "glue" or "superglue" in the folder `data`, or a YAML file.

    For each task the checkpoint is fine-tuned with `seeds` seeds, unless it was already fine-tuned on that file or the
    task needs none, and scored on the task's dev files. `options` are fields of the fine-tuning recipe. A task's score
    is the mean of its official metrics over its dev files, scaled to 0 to 1; the average is over tasks, as in GLUE,
    without perplexities and other unbounded metrics. `resume` keeps finished tasks.
    """
    checkpoint, folder = Path(checkpoint), Path(output_dir)
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder. {checkpoint_hint(checkpoint)}")
    available, all_names = find_suite_tasks(suite, data)
    chosen = select_suite_tasks(available, tasks)
    check_suite_tasks(checkpoint, chosen, folder, seeds, options or {})
    settings = {"checkpoint": str(checkpoint), "suite": str(suite), "seeds": seeds, "options": dict(options or {})}
    open_suite_folder(folder, settings, resume, overwrite)
    check_finished_tasks(folder, chosen.values())
    done: dict[str, dict[str, Any]] = {}
    files = {task.name: folder / task.name / SUITE_TASK_RESULTS_FILE for task in chosen.values()}
    with run_series([task_bytes(task) for task in chosen.values() if not files[task.name].is_file()]) as series:
        for number, task in enumerate(chosen.values(), 1):
            if files[task.name].is_file():
                say(f"{task.name} ({number} of {len(chosen)}) is done already.")
            else:
                say(f"{task.name} ({number} of {len(chosen)})")
                result = run_suite_task(checkpoint, task, folder / task.name, seeds, dict(options or {}))
                write_json(files[task.name], result | {"files": task_inputs(task)})
                series.end_run()
            done[task.name] = read_object(files[task.name])
            write_results(folder / SUITE_RESULTS_FILE, summarize_suite(settings, done, all_names, folder))
    result = summarize_suite(settings, done, all_names, folder)
    write_suite_page(folder / "report.html", result)
    write_results(folder / SUITE_RESULTS_FILE, result)
    if not result["complete"]:
        warn(f"the average is over {len(done)} of {len(all_names)} tasks; missing: {', '.join(result['missing'])}.")
    if result["left_out"]:
        warn(f"{', '.join(result['left_out'])}: the score is NaN, and not in the average.")
    if result["off_scale"]:
        warn(f"{', '.join(result['off_scale'])}: the score has no bound, and is not in the average.")
    return result


# --- which tasks ----------------------------------------------------------------------------------------------------


def find_suite_tasks(suite: str | Path, data: str | Path | None) -> tuple[dict[str, SuiteTask], tuple[str, ...]]:
    """Return the tasks whose files exist, and the names of all tasks of the suite."""
    if str(suite) in KNOWN_SUITES:
        if data is None:
            raise UserError(f"--suite {shorten(suite)} needs --data FOLDER, with one folder for each task.")
        find_tasks, names = KNOWN_SUITES[str(suite)]
        return find_tasks(data), names
    if Path(suite).suffix not in (".yaml", ".yml"):
        near = did_you_mean(str(suite), KNOWN_SUITES)
        raise UserError(f"Unknown suite {quote(str(suite))}. {near} Or name a .yaml file.")
    available = read_suite(suite)
    return available, tuple(available)


def select_suite_tasks(available: Mapping[str, SuiteTask], tasks: Sequence[str]) -> dict[str, SuiteTask]:
    """The named tasks, or all, that have a dev file. Names of GLUE can be in capitals."""
    tasks = [name if name in available else name.lower() for name in tasks]
    for name in tasks:
        if name not in available:
            raise UserError(f"The suite has no task {quote(name)} here. {did_you_mean(name, available)}")
    chosen = {name: task for name, task in available.items() if not tasks or name in tasks}
    for name, task in chosen.items():
        if not task.dev:
            warn(f"{name} has no dev file, and is skipped.")
    return {name: task for name, task in chosen.items() if task.dev}


def check_suite_tasks(
    checkpoint: Path, tasks: Mapping[str, SuiteTask], folder: Path, seeds: int, options: Mapping[str, Any]
) -> None:
    """Refuse unknown recipe fields, labels and metrics before any training."""
    if own := [name for name in options if name in SUITE_RECIPE_FIELDS]:
        raise UserError(
            f"{own[0]} is set by the suite: leave it out." + (" Use --seeds N." if own[0] == "seeds" else "")
        )
    apply_overrides(FinetuneRecipe(), with_rate_candidates({"learning_rate": 0.0}, options)[1])
    for task in tasks.values():
        mode = choose_task_mode(checkpoint, task)
        if mode == MODE_ZERO_SHOT:
            check_zero_shot_task(checkpoint, task)
        elif mode == MODE_FINETUNE and task.settings:
            name = next(iter(task.settings))
            raise UserError(
                f"{task.name}: the setting {name} is for a task without fine-tuning, and this task has a train file."
            )
        dev = check_task_metrics(checkpoint, task, mode, options.get("encoding", "utf-8"))
        if mode == MODE_FINETUNE:
            recipe = build_task_recipe(checkpoint, task, folder / task.name, seeds, options)
            recipe.check()
            check_metric(recipe, dev[0])
            if task.task in LABEL_TASKS:
                with quiet():
                    train = read_labelled(recipe.train, task.task, task.columns, "train", recipe.encoding)
                    for file, examples in zip(task.dev.values(), dev, strict=True):
                        check_labels(train, examples, replace(recipe, dev=str(file)))


def check_zero_shot_task(checkpoint: Path, task: SuiteTask) -> None:
    """Refuse a task that the checkpoint cannot do without fine-tuning, or that lacks a setting."""
    try:
        check_evaluation(checkpoint, task.task, read_task_file(checkpoint), task.settings)
        if "train" in task.settings:
            with quiet():
                read_labelled(task.settings["train"], task.task, task.columns, "train")
    except UserError as e:
        raise UserError(f"{task.name}: {e}") from None
    if task.task == "word-in-context" and not {"threshold", "train"} & set(task.settings):
        raise UserError(
            f"{task.name}: no threshold for the cosine. Write `settings: {{threshold: 0.6}}` into the suite, or "
            "`settings: {train: FILE}` to choose it on that file; `train: FILE` fine-tunes."
        )


def check_task_metrics(checkpoint: Path, task: SuiteTask, mode: str, encoding: str) -> list[list[Example]]:
    """Refuse metrics that a dev file does not have; return the examples of each dev file."""
    names, dev_examples = task.metrics, []
    for file in task.dev.values():
        with quiet():  # notices on the file are printed when it is scored
            examples = (
                read_labelled(file, task.task, task.columns, "dev", encoding)
                if task.task not in PLAIN_TEXT_TASKS
                else []
            )
        dev_examples.append(examples)
        own = zero_shot_metric_names(checkpoint, task) if mode == MODE_ZERO_SHOT else ()
        known = own or (*metric_names(task.task, examples), *SUPERGLUE_EXTRA_METRICS.get(task.name, ()))
        names = names or known[:1]
        if missing := [name for name in names if name not in known]:
            two = " f1 is for files with two classes." if missing == ["f1"] and "accuracy" in known else ""
            raise UserError(
                f"{task.name}: {file}: the task {task.task} has no metric {quote(missing[0])} here, but "
                f"{', '.join(dict.fromkeys(known))}.{two}"
            )
        if len(names) > 1 and (unbounded := [name for name in names if name in UNBOUNDED_METRICS]):
            raise UserError(f"{task.name}: {unbounded[0]} has no bound and cannot be averaged: name one metric.")
    return dev_examples


def zero_shot_metric_names(checkpoint: Path, task: SuiteTask) -> tuple[str, ...]:
    """Metrics without fine-tuning; empty if they are those after fine-tuning."""
    if task.task not in PLAIN_TEXT_TASKS:
        return ZERO_SHOT_METRICS.get(task.task, ())
    exact = (
        is_ngram(checkpoint)
        or choose_scoring_method(read_config(checkpoint), task.settings.get("method", "auto"))[1].is_exact
    )
    return text_metric_names(exact)


def open_suite_folder(folder: Path, settings: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
    """Make the suite's folder, or resume one with the same settings."""
    if resume and (folder / SUITE_SETTINGS_FILE).is_file():
        before = read_object(folder / SUITE_SETTINGS_FILE)
        if changed := [name for name in settings if before.get(name) != settings[name]]:
            name = changed[0]
            raise UserError(f"{folder} was started with {name}={before.get(name)}, not {settings[name]}: start over.")
        return
    if overwrite and (folder / SUITE_SETTINGS_FILE).is_file():
        runs, inputs = list(folder.glob("*/run")), [settings["checkpoint"]]
        for run in runs:
            check_run_folder(run, resume=False, overwrite=True, inputs=inputs)
        for done in folder.glob(f"*/{SUITE_TASK_RESULTS_FILE}"):
            done.unlink()
        for run in runs:
            with run_folder(run, overwrite=True, inputs=inputs):  # removes the earlier run
                pass
    elif not resume and (folder / SUITE_SETTINGS_FILE).is_file():
        raise UserError(f"{folder} exists already. --resume resumes its suite, --overwrite starts over.")
    elif not resume:
        check_output_folder(folder, "--output-dir")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SUITE_SETTINGS_FILE, dict(settings))


def check_finished_tasks(folder: Path, tasks: Iterable[SuiteTask]) -> None:
    """Refuse to resume a suite with tasks that were scored on other files."""
    for task in tasks:
        done = folder / task.name / SUITE_TASK_RESULTS_FILE
        if done.is_file() and read_object(done).get("files", task_inputs(task)) != task_inputs(task):
            raise UserError(
                f"{task.name} in {folder} was scored on other files or settings than it has now: start over."
            )


def task_inputs(task: SuiteTask) -> dict[str, Any]:
    """Everything but the checkpoint that the scores of a task depend on."""
    files = {"train": task.train, **{f"dev {name}": file for name, file in task.dev.items()}}
    paths = {name: None if file is None else str(file.resolve()) for name, file in files.items()}
    settings = {"settings": dict(task.settings)} if task.settings else {}
    return paths | {"metrics": list(task.metrics), "columns": dict(task.columns), **settings}


# --- one task -------------------------------------------------------------------------------------------------------


def task_bytes(task: SuiteTask) -> int:
    """Return the bytes of a task's files, to which the time of its fine-tuning is about proportional."""
    return sum(file.stat().st_size for file in (task.train, *task.dev.values()) if file is not None)


def run_suite_task(
    checkpoint: Path, task: SuiteTask, task_folder: Path, seeds: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Scores of each dev file, with mean and standard deviation over the seeds."""
    how = choose_task_mode(checkpoint, task)
    if how == MODE_FINETUNE:
        parts = finetune_and_score(checkpoint, task, task_folder, seeds, options)
        how = f"{MODE_FINETUNE}, {format_count(seeds, 'seed')}"
    else:
        score = score_zero_shot if how == MODE_ZERO_SHOT else score_finetuned
        parts = {name: [score(checkpoint, task, file, task_folder / name)] for name, file in task.dev.items()}
    return summarize_task(task, parts) | {"task": task.task, "how": how, "run": str(task_folder)}


def choose_task_mode(checkpoint: Path, task: SuiteTask) -> str:
    """Whether a task is scored without fine-tuning, with the checkpoint's own, or after fine-tuning."""
    tuned = is_finetuned_on(checkpoint, task)
    if task.task not in FINETUNE_TASKS or (task.train is None and task.task in ZERO_SHOT_TASKS and not tuned):
        return MODE_ZERO_SHOT
    if not tuned and task.train is None:
        raise UserError(f"{task.name} has no train file, and {checkpoint} was not fine-tuned for it.")
    return MODE_ALREADY_FINETUNED if tuned else MODE_FINETUNE


def is_finetuned_on(checkpoint: Path, task: SuiteTask) -> bool:
    """Whether a checkpoint was fine-tuned on the suite's own train file."""
    recipe = checkpoint.absolute().parent / "recipe.yaml"
    if read_task_file(checkpoint).get("task") != task.task:
        return False
    if task.train is None:
        return True
    if not recipe.is_file():
        return False
    train = (read_yaml(recipe) or {}).get("train")
    return train is not None and Path(train).resolve() == task.train.resolve()


def score_zero_shot(checkpoint: Path, task: SuiteTask, file: Path, task_folder: Path) -> dict[str, float]:
    """Scores of a task without fine-tuning."""
    result = evaluate(checkpoint, task.task, file, task_folder, task.columns, overwrite=True, **task.settings)
    return dict(result["metrics"])


def score_finetuned(
    checkpoint: Path, task: SuiteTask, file: Path, task_folder: Path, encoding: str = "utf-8"
) -> dict[str, float]:
    """Scores of a fine-tuned checkpoint on a dev file, with SuperGLUE's extra metrics."""
    examples = read_labelled(file, task.task, task.columns, "dev", encoding)
    outcome = evaluate_finetuned(checkpoint, task.task, read_task_file(checkpoint), examples)
    task_folder.mkdir(parents=True, exist_ok=True)
    write_predictions(task_folder / "predictions.jsonl", examples, outcome.predictions)
    return {**outcome.metrics, **superglue_extra_scores(task.name, examples, outcome.predictions)}


def finetune_and_score(
    checkpoint: Path, task: SuiteTask, task_folder: Path, seeds: int, options: Mapping[str, Any]
) -> dict[str, list[dict[str, float]]]:
    """Fine-tune, and score each seed on each dev file; the run itself scores the first."""
    (first, file), *others = task.dev.items()
    recipe = build_task_recipe(checkpoint, task, task_folder, seeds, options)
    results = finetune(recipe, resume=True)
    with quiet():  # the run has printed all notices on this file
        examples = read_labelled(file, task.task, task.columns, "dev", recipe.encoding)
    write_run_report_and_card(task_folder / "run", results, examples)
    converged = [seed for seed in range(seeds) if seed not in results["diverged"]]
    runs = [task_folder / "run" / f"seed-{seed}" for seed in converged]
    parts = {
        first: [
            {**results["scores"][seed], **superglue_extra_scores(task.name, examples, load_run_predictions(run))}
            for seed, run in zip(converged, runs, strict=True)
        ]
    }
    for name, other in others:
        parts[name] = [
            score_finetuned(run / "final", task, other, task_folder / f"{name}-{run.name}", recipe.encoding)
            for run in runs
        ]
    return parts


def build_task_recipe(
    checkpoint: Path, task: SuiteTask, task_folder: Path, seeds: int, options: Mapping[str, Any]
) -> FinetuneRecipe:
    """The model's fine-tuning defaults with `options`. The first official metric selects the best seed."""
    first = next((name for name in task.metrics if name not in SUPERGLUE_EXTRA_METRICS.get(task.name, ())), "")
    defaults = finetuning_defaults(read_config(checkpoint), options.get("optim"), bool(options.get("lora_rank")))
    fields, changes = with_rate_candidates(defaults, options)
    return apply_overrides(
        FinetuneRecipe(**fields),
        {
            "metric": first,
            **changes,
            "checkpoint": str(checkpoint),
            "task": task.task,
            "train": str(task.train),
            "dev": str(next(iter(task.dev.values()))),
            "columns": dict(task.columns),
            "output_dir": str(task_folder / "run"),
            "seeds": seeds,
        },
    )


def load_run_predictions(run: Path) -> list[Prediction]:
    return [Prediction(line["prediction"]) for line in read_predictions(run / "predictions.jsonl")]


def superglue_extra_scores(
    name: str, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """MultiRC: share of questions with all answers right. ReCoRD: exact match and F1 of the entity's words."""
    answers = [prediction.prediction for prediction in predictions]
    if name == "multirc":
        hits_by_question: dict[str, list[bool]] = defaultdict(list)
        for example, answer in zip(examples, answers, strict=True):
            hits_by_question[str(example.id).rsplit("-", 1)[0]].append(answer == example.target)
        targets = [example.target for example in examples]
        exact_match = statistics.fmean(all(hits) for hits in hits_by_question.values())
        return {"exact_match": exact_match, "f1": f1(answers, targets, max(targets))}
    if name == "record":
        words = [record_entity(example, answer) for example, answer in zip(examples, answers, strict=True)]
        exact, f1_each = squad_per_question(words, [example.references for example in examples])
        return {"exact_match": float(exact.mean()), "f1": float(f1_each.mean())}
    return {}


def record_entity(example: Example, choice: int) -> str:
    """The entity that a choice of ReCoRD puts into the gap."""
    begin, end = example.spans[choice]
    return example.texts[1 + choice][begin:end]


def summarize_task(task: SuiteTask, parts: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Official metrics of each dev file, and the task's score: the mean over them, for each seed.

    Metrics from 0 to 100 are divided by 100 in the score.
    """
    first = next(iter(parts.values()))[0]
    names = task.metrics or (next(iter(first)),)
    for part, (scores, *_) in parts.items():
        if missing := [name for name in names if name not in scores]:
            near = did_you_mean(missing[0], scores)
            raise UserError(f"{task.name}: the task {task.task} has no metric {quote(missing[0])} on {part}. {near}")
    num_seeds = len(next(iter(parts.values())))
    each = [
        statistics.fmean(
            statistics.fmean(to_unit_scale(name, scores[seed][name]) for name in names) for scores in parts.values()
        )
        for seed in range(num_seeds)
    ]
    mean, std = mean_and_std(each)
    metrics = {
        part: {name: mean_and_std([scores[name] for scores in seeds])[0] for name in names}
        for part, seeds in parts.items()
    }
    return {"metrics": metrics, "score": mean, "std": std, "seeds": each}


def to_unit_scale(metric: str, value: float) -> float:
    return value / 100 if metric in PERCENT_METRICS else value


# --- the table ------------------------------------------------------------------------------------------------------


def summarize_suite(
    settings: Mapping[str, Any], finished: Mapping[str, Mapping[str, Any]], all_names: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Results of the finished tasks. Scores are from 0 to 1, or from -1 to 1 (mcc, correlations).

    The average excludes NaN scores (`left_out`) and unbounded metrics (`off_scale`): perplexities, bits per byte,
    log-probabilities, errors and rewards.
    """
    missing = [name for name in all_names if name not in finished]
    left_out = [name for name, task in finished.items() if not math.isfinite(task["score"])]
    off_scale = [name for name, task in finished.items() if has_unbounded_metric(task)]
    scores = [task["score"] for name, task in finished.items() if name not in (*left_out, *off_scale)]
    return {
        **settings,
        "output_dir": str(folder),
        "average": statistics.fmean(scores) if scores else None,
        "complete": not missing,
        "missing": missing,
        "left_out": left_out,
        "off_scale": off_scale,
        "tasks": dict(finished),
    }


def has_unbounded_metric(task: Mapping[str, Any]) -> bool:
    return any(name in UNBOUNDED_METRICS for scores in task.get("metrics", {}).values() for name in scores)


def suite_table(result: Mapping[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """Rows of task, metrics, mode, score and standard deviation, with the average last."""
    rows = [
        (name, format_metrics(task["metrics"]), task["how"], task["score"], task["std"])
        for name, task in result["tasks"].items()
    ]
    incomplete = f"incomplete: without {', '.join(result['missing'])}" if result["missing"] else ""
    nan = f"excluded, NaN: {', '.join(result['left_out'])}" if result["left_out"] else ""
    unbounded = f"excluded, unbounded: {', '.join(result['off_scale'])}" if result["off_scale"] else ""
    excluded = (*result["left_out"], *result["off_scale"])
    averaged = [task for name, task in result["tasks"].items() if name not in excluded]
    average, std = (result["average"], average_std(averaged)) if averaged else (math.nan, math.nan)
    return [*rows, ("average", "; ".join(filter(None, (incomplete, nan, unbounded))), "", average, std)]


def format_suite_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Format the table of a suite; scores are from 0 to 100, except those of unbounded metrics."""
    rows = []
    for name, metrics, how, *scores in suite_table(result):
        unbounded = name in result["off_scale"]
        rows.append((name, metrics, how, *(format_cell(x) if unbounded else f"{100 * x:.1f}" for x in scores)))
    return rows


def average_std(tasks: Sequence[Mapping[str, Any]]) -> float:
    """Standard deviation of the average over seeds; a task with one score has it for every seed.

    >>> average_std([{"seeds": [0.5, 0.75], "score": 0.625}, {"seeds": [0.75, 0.5], "score": 0.625}])
    0.0
    """
    num_seeds = max(len(task["seeds"]) for task in tasks)
    averages = [
        statistics.fmean(task["seeds"][i] if len(task["seeds"]) == num_seeds else task["score"] for task in tasks)
        for i in range(num_seeds)
    ]
    return mean_and_std(averages)[1]


def format_metrics(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """
    >>> format_metrics({"matched": {"accuracy": 0.5}, "mismatched": {"accuracy": 0.25}})
    'matched accuracy 50.0%, mismatched accuracy 25.0%'
    """
    named = len(metrics) > 1
    parts = [(f"{part} " if named else "", name, x) for part, scores in metrics.items() for name, x in scores.items()]
    return ", ".join(f"{part}{name} {format_metric(name, x)}" for part, name, x in parts)


def write_suite_page(path: Path, result: Mapping[str, Any]) -> None:
    page = HtmlPage(f"{result['suite']}: {result['checkpoint']}")
    page.add_table(SUITE_COLUMNS, format_suite_rows(result), SCORE_CAPTION)
    if not result["complete"]:
        page.add_paragraph(f"The average is incomplete: {', '.join(result['missing'])} were not scored.")
    if result["left_out"]:
        page.add_paragraph(f"Not in the average, NaN score: {', '.join(result['left_out'])}.")
    if result["off_scale"]:
        page.add_paragraph(f"Not in the average, unbounded score: {', '.join(result['off_scale'])}.")
    page.save(path)
