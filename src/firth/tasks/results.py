"""Summarize fine-tuning seeds: mean and standard deviation, failed seeds, and significance against a baseline run.

A seed fails if it does not beat the best constant prediction (`chance_score`), or if its loss diverges. The difference
from a baseline is tested over seeds and dev examples (`metrics.compare_seeds`), because both vary.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from firth.core.console import format_count, say, warn
from firth.core.errors import UserError, quote, shorten
from firth.core.files import (
    atomic_folder,
    copy_file,
    read_manifest,
    read_object,
    read_utf8,
    write_results,
    write_text,
)
from firth.core.parse import parse_json
from firth.metrics import (
    AdditiveScore,
    additive_entity_score,
    bootstrap_scores,
    compare_seeds,
    compute_metrics,
    failed_runs,
    format_difference,
    format_metric,
    is_additive_metric,
    make_additive_score,
    mean_and_std,
)
from firth.metrics.bootstrap import MIN_SEEDS
from firth.metrics.pairs import random_retrieval_scores, scores_from_ranks
from firth.metrics.task_metrics import positive_label
from firth.tasks.chain import read_chain
from firth.tasks.embed import all_have_scores
from firth.tasks.failure import explain_failed_seed
from firth.tasks.multitask import AVERAGE_METRIC, MultiTask, split_by_task
from firth.tasks.preference import is_preferred
from firth.tasks.rate_trial import RATE_TRIAL_FILE, load_trial
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.search import SEARCH_FILE, Search
from firth.tasks.tag import excluded_entity_types
from firth.tasks.task import Prediction, Task
from firth.text import Example
from firth.text.records import preview_value
from firth.train.recipe import read_yaml_mapping
from firth.train.resume import read_intermediate

PREDICTIONS_FILE = "predictions.jsonl"
DIVERGED_KEY = "diverged"  # in a seed's results: the error; in a run's results: the diverged seeds
LM_METRICS = ("perplexity", "bits_per_byte")
LOWER_IS_BETTER_METRICS = (*LM_METRICS, "mean_absolute_error")
MAX_CONSTANT_GUESSES = 20  # most frequent answers tried as a constant prediction
ZERO_CHANCE_TASKS = ("regress", "embed")  # a constant prediction has correlation 0
ERROR_SAMPLES = 200  # of a bootstrap for a standard error alone
BOOTSTRAP_SAMPLES, BOOTSTRAP_MAX_SECONDS = 1000, 120  # upper limits of one bootstrap


FIXED_TASK_METRICS = {  # tasks whose metrics do not depend on the examples
    "regress": ("pearson", "spearman", "mean_absolute_error"),
    "choice": ("accuracy",),
    "text-to-text": ("chrf", "bleu", "rouge_1", "rouge_2", "rouge_l", "rouge_lsum", "exact_match", "answer_match"),
    "lm": (*LM_METRICS, "token_accuracy"),
    "preference": ("accuracy", "margin", "reward_chosen", "reward_rejected"),
    "reward": ("accuracy", "margin", "reward_chosen", "reward_rejected"),
}


def metric_names(task: str, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the metrics of a task on these examples: F1 needs two classes, entity scores need span tags."""
    if task in FIXED_TASK_METRICS:
        return FIXED_TASK_METRICS[task]
    true = [e.target for e in examples]
    if task == "span-qa":  # without the best scores over thresholds, which are chosen on these very examples
        return tuple(compute_metrics(task, [""] * len(true), true))
    if task == "embed" and None in true:
        return tuple(scores_from_ranks(np.ones(1, np.int64), np.ones(1, np.int64)))
    return tuple(compute_metrics(task, true, true))


def check_metric(recipe: FinetuneRecipe, dev: Sequence[Example], task: Task | None = None) -> None:
    """Raise if the task does not have `recipe.metric` on dev. Runs before training."""
    if not recipe.metric:
        return
    known = multitask_metric_names(task, dev) if isinstance(task, MultiTask) else metric_names(recipe.task, dev)
    if recipe.metric not in known:
        raise UserError(
            f"{recipe.dev}: the task {recipe.task} has no score {quote(recipe.metric)} here. "
            f"metric is one of {', '.join(known)}."
        )


def multitask_metric_names(task: MultiTask, dev: Sequence[Example]) -> tuple[str, ...]:
    """Return the average, and the metrics of each task as NAME.METRIC."""
    own = split_by_task(dev)
    names = (f"{name}.{m}" for name, part in task.tasks.items() for m in metric_names(part.name, own[name]))
    return (AVERAGE_METRIC, *names)


def deciding_metric(recipe: FinetuneRecipe, task: Task) -> str:
    """Name of the metric that selects the best step and seed."""
    return recipe.metric or task.metric


def is_lower_better(metric: str) -> bool:
    """Whether a metric, or NAME.METRIC of one of several tasks, is an error."""
    return metric.rpartition(".")[2] in LOWER_IS_BETTER_METRICS


def orient_score(metric: str, scores: Mapping[str, float]) -> float:
    """Return the score of `metric`, negated if lower is better."""
    return -scores[metric] if is_lower_better(metric) else scores[metric]


def summarize_seeds(
    recipe: FinetuneRecipe,
    task: Task,
    train: Sequence[Example],
    dev: Sequence[Example],
    runs: Sequence[Mapping[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    """Return mean and standard deviation over the seeds' results `runs`, and copy the best seed's model to final/.

    A diverged seed has no score: it counts as failed and is excluded from the means.
    """
    diverged = [i for i, run in enumerate(runs) if DIVERGED_KEY in run]
    completed = [i for i in range(len(runs)) if i not in diverged]
    if not completed:
        raise UserError(f"The loss of all {len(runs)} seeds diverged. The first: {runs[0][DIVERGED_KEY]}")
    names = runs[completed[0]]["scores"]
    metric, scores = deciding_metric(recipe, task), [run.get("scores", dict.fromkeys(names, math.nan)) for run in runs]
    values, completed_scores = [s[metric] for s in scores], [scores[i] for i in completed]
    best = completed[index_of_best([orient_score(metric, s) for s in completed_scores])]
    copy_best_seed(folder, folder / f"seed-{best}")
    mean, std = mean_and_std([s[metric] for s in completed_scores])
    say_how_to_read(metric, mean, len(runs), best, diverged)
    failures = exclude_failed_seeds(values, chance_score(task, metric, train, dev), diverged)
    causes = explain_failed_seeds(recipe, train, dev, folder, failures.get("failed", ()), diverged)
    warn_about_failed_seeds(failures, causes, metric, len(runs))
    trial, search = load_trial(folder / RATE_TRIAL_FILE), read_intermediate(folder / SEARCH_FILE, Search)
    *earlier_links, link = read_chain(folder / f"seed-{best}" / "final")
    results = {
        "output_dir": str(folder),
        "task": recipe.task,
        "metric": metric,
        "mean": mean,
        "std": std,
        "seeds": values,
        **{
            name: mean_and_std([s[name] for s in completed_scores])[0]
            for name in names
            if all(name in s for s in completed_scores)
        },
        **label_of_f1(names, dev),
        **failures,
        **({"failure_causes": {str(i): cause for i, cause in causes.items()}} if causes else {}),
        **({"tasks": summarize_tasks(task, completed_scores)} if isinstance(task, MultiTask) else {}),
        DIVERGED_KEY: diverged,
        "scores": scores,
        "comparison": None,
        "from_scratch": recipe.from_scratch,
        "chain": [*earlier_links, link | {"score": mean}],
        "learning_rate": recipe.learning_rate,
        "learning_rate_trial": trial.to_results() if trial and trial.chosen == recipe.learning_rate else None,
        "search": search.to_results() if search and search.chosen is not None and recipe.search else None,
        "best_seed": best,
        "steps": [run["steps"] for run in runs],
        "best_steps": [run.get("best_step") for run in runs],
        "seconds": sum(run["seconds"] for run in runs),
        "examples_per_second": mean_and_std([runs[i]["examples_per_second"] for i in completed])[0],
        "predictions": str(folder / PREDICTIONS_FILE),
    }
    write_results(folder / "results.json", results)
    if recipe.baseline:
        results["comparison"] = compare_with_baseline(recipe, task, dev, folder)
        write_results(folder / "results.json", results)
    return results


def label_of_f1(metrics: Iterable[str], examples: Sequence[Example]) -> dict[str, str]:
    """Return {"positive_label": the class that "f1" is of}, of two classes; otherwise nothing."""
    label = positive_label([e.target for e in examples]) if {"f1", "mcc"} <= set(metrics) else None
    return {} if label is None else {"positive_label": label}


def copy_best_seed(folder: Path, seed_folder: Path) -> None:
    """Copy model and predictions of a seed into the run folder."""
    for name in ("final", "adapter"):
        if (seed_folder / name).is_dir():
            copy_folder(seed_folder / name, folder / name)
    read_predictions(seed_folder / PREDICTIONS_FILE)  # a finished seed's may be damaged
    write_text(folder / PREDICTIONS_FILE, read_utf8(seed_folder / PREDICTIONS_FILE))


def say_how_to_read(metric: str, mean: float, num_seeds: int, best: int, diverged: Sequence[int]) -> None:
    """Print which seeds the mean leaves out, and that the best seed is no result."""
    if diverged:
        names = ", ".join(f"seed-{i}" for i in diverged)
        warn(f"{names} diverged: {metric} is the mean of {num_seeds - len(diverged)} of {num_seeds} seeds.")
    if math.isnan(mean):
        warn(f"{metric} is not a number in some seed.")
    if num_seeds > 1:
        say(
            f"seed-{best} has the best {metric} on dev, so its model is final/. Report the mean: the best of several "
            "seeds is too optimistic."
        )


def summarize_tasks(task: MultiTask, scores: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the deciding metric of each task over the seeds: mean, standard deviation and values."""
    summary = {}
    for name, part in task.tasks.items():
        values = [seed[f"{name}.{part.metric}"] for seed in scores]
        mean, std = mean_and_std(values)
        summary[name] = {"task": part.name, "metric": part.metric, "mean": mean, "std": std, "seeds": values}
    return summary


def index_of_best(values: Sequence[float]) -> int:
    """Index of the highest value, the first among equals. NaN counts as the lowest."""
    return max(range(len(values)), key=lambda i: -math.inf if math.isnan(values[i]) else values[i])


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder that `atomic_folder` wrote: the files that its manifest lists, and no other."""
    manifest = read_manifest(source)
    with atomic_folder(target, manifest["kind"]) as temporary:
        for name in manifest["files"]:
            copy_file(source / name, temporary / name, source)


# --- seeds that learned nothing -------------------------------------------------------------------------------------


def exclude_failed_seeds(values: Sequence[float], chance: float | None, diverged: Sequence[int] = ()) -> dict[str, Any]:
    """Return the failed seeds (not above `chance`, or diverged), and mean and deviation of the others."""
    if chance is None:
        return {"failed": list(diverged)} if diverged else {}
    bad = failed_runs(values, chance)
    good = [v for i, v in enumerate(values) if i not in bad]
    mean, std = mean_and_std(good) if good else (None, None)
    return {"chance": chance, "failed": bad, "mean_without_failed": mean, "std_without_failed": std}


def explain_failed_seeds(
    recipe: FinetuneRecipe,
    train: Sequence[Example],
    dev: Sequence[Example],
    folder: Path,
    failed: Sequence[int],
    diverged: Sequence[int],
) -> dict[int, str]:
    """Return the likely cause of each seed at or below chance; that of a diverged one was printed."""
    own = [i for i in failed if i not in diverged]
    return {i: explain_failed_seed(recipe, train, dev, folder / f"seed-{i}").sentence for i in own}


def warn_about_failed_seeds(
    failures: Mapping[str, Any], causes: Mapping[int, str], metric: str, num_seeds: int
) -> None:
    """Print how many seeds did not beat chance, and the likely causes, each once."""
    if not failures.get("failed") or "chance" not in failures:
        return
    mean, chance = failures["mean_without_failed"], format_metric(metric, failures["chance"])
    others = "" if mean is None else f"; the mean of the others is {format_metric(metric, mean)}"
    different = list(dict.fromkeys(causes.values()))
    cause = "".join(f" Likely cause: {text}." for text in different[:1])
    if len(different) > 1:
        first = {text: f"seed-{i}" for i, text in reversed(list(causes.items()))}
        cause = " Likely causes: " + " ".join(f"{first[text]}: {text}." for text in different)
    counted = f"{len(failures['failed'])} of {format_count(num_seeds, 'seed')}"
    warn(f"{counted} did not beat chance ({metric} {chance}){others}.{cause}")


def chance_score(task: Task, metric: str, train: Sequence[Example], dev: Sequence[Example]) -> float | None:
    """Return the best score of a constant prediction, among train's most frequent answers. None where there is none.

    For retrieval ("embed"), return the expected score of random embeddings: every rank is equally likely.
    """
    if task.name == "lm" or is_lower_better(metric):
        return None
    if task.name in ("preference", "reward"):
        return 0.5 if metric == "accuracy" else None
    if isinstance(task, MultiTask):
        return multitask_chance_score(task, metric, train, dev)
    if task.name == "embed" and not all_have_scores(dev):
        return random_retrieval_scores([e.texts for e in dev])[metric]
    if task.name in ZERO_CHANCE_TASKS:
        return 0.0
    values = [
        task.score(dev, [Prediction(guess) for guess in guesses])[metric]
        for guesses in constant_guesses(task.name, train, dev)
    ]
    return max(0.0 if math.isnan(value) else value for value in values)


def multitask_chance_score(
    task: MultiTask, metric: str, train: Sequence[Example], dev: Sequence[Example]
) -> float | None:
    """Return the chance score of NAME.METRIC, or the average of the tasks' own."""
    train_by_task, dev_by_task = split_by_task(train), split_by_task(dev)
    if metric != AVERAGE_METRIC:
        name = next(name for name in task.tasks if metric.startswith(f"{name}."))
        metric = metric.removeprefix(f"{name}.")
        return chance_score(task.tasks[name], metric, train_by_task[name], dev_by_task[name])
    return task.average(
        {
            f"{name}.{part.metric}": chance_score(part, part.metric, train_by_task[name], dev_by_task[name]) or 0.0
            for name, part in task.tasks.items()
        }
    )


def constant_guesses(name: str, train: Sequence[Example], dev: Sequence[Example]) -> list[list[Any]]:
    """Return constant predictions for dev, one list per frequent answer of train. Dev's most frequent may differ."""
    if name == "tag":
        commonest = Counter(tag for e in train for tag in e.target).most_common(1)[0][0]
        return [[(commonest,) * len(e.target) for e in dev]]
    if name == "span-qa":
        return [[""] * len(dev)]  # the empty prediction: no answer
    num_guesses = 1 if name in ("text-to-text", "extract") else MAX_CONSTANT_GUESSES
    common = Counter(e.target for e in train).most_common(num_guesses)
    return [[answer] * len(dev) for answer, _ in common]


# --- predictions, and those of another run --------------------------------------------------------------------------


def write_predictions(path: Path, examples: Sequence[Example], predictions: Sequence[Prediction]) -> None:
    write_text(path, format_predictions(examples, predictions))


def format_predictions(examples: Sequence[Example], predictions: Sequence[Prediction]) -> str:
    """Return JSON lines, one object per example in order, with all references if there are several."""
    lines = []
    for e, p in zip(examples, predictions, strict=True):
        line: dict[str, Any] = {"id": e.id, "prediction": p.prediction, "reference": e.target}
        line |= {"references": e.references} if len(e.references) > 1 else {}
        line |= {"scores": p.scores} if p.scores else {}
        lines.append(json.dumps((p.extra or {}) | line, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def read_predictions(path: Path) -> list[dict[str, Any]]:
    r"""Read a file of `write_predictions`. Only \n ends a line: a text may hold U+2028, where `splitlines` cuts."""
    lines = enumerate(read_utf8(path).split("\n"), 1)
    return [check_prediction(parse_json(line, str(path), number), path, number) for number, line in lines if line]


def check_prediction(line: Any, path: Path, number: int) -> dict[str, Any]:
    """Return a line of a file of predictions; a UserError if it is not what `format_predictions` writes."""
    is_complete = isinstance(line, dict) and {"id", "prediction", "reference"} <= line.keys()
    if is_complete and isinstance(line["reference"], str):
        is_complete = isinstance(line["prediction"], str | None)
    scores = line.get("scores") or {} if is_complete else {}
    if not (is_complete and isinstance(scores, dict) and all(isinstance(s, int | float) for s in scores.values())):
        raise UserError(
            f"{path}:{number}: not a prediction (id, prediction, reference, and scores by label). Remove "
            f"{path.parent}: a resumed run makes it again."
        )
    return line


def disambiguate_ids(ids: Iterable[Any]) -> list[tuple[Any, int]]:
    """Pair each id with the number of its earlier occurrences, so that equal ids stay distinct.

    >>> disambiguate_ids(["a", "b", "a"])
    [('a', 0), ('b', 0), ('a', 1)]
    """
    seen: Counter[Any] = Counter()
    pairs = []
    for id in ids:
        pairs.append((id, seen[id]))
        seen[id] += 1
    return pairs


def load_seed_predictions(folder: Path, *fields: str) -> list[dict[tuple[Any, int], Any]]:
    """Return each seed's predictions by `disambiguate_ids` id. Without seed folders, only those of the best seed.

    `fields` names the value to read (default: "prediction"). Of several names, each line's first existing one counts.
    """
    seeds = sorted(folder.glob("seed-*"), key=lambda seed: (len(seed.name), seed.name))  # seed-2 before seed-10
    files = [file for seed in seeds if (file := seed / PREDICTIONS_FILE).is_file()]
    if not files and not (folder / PREDICTIONS_FILE).is_file():
        raise UserError(f"{folder} has no {PREDICTIONS_FILE}: name the folder of a finished run as the baseline.")
    predictions, names = [], fields or ("prediction",)
    for file in files or [folder / PREDICTIONS_FILE]:
        try:
            lines = read_predictions(file)
            keys = disambiguate_ids(line["id"] for line in lines)
            values = [line[next((name for name in names if name in line), names[-1])] for line in lines]
            predictions.append(dict(zip(keys, values, strict=True)))
        except (KeyError, TypeError):
            raise UserError(f"{file} does not hold predictions of a run.") from None
    return predictions


def checksum_examples(examples: Sequence[Example]) -> str:
    """Return the CRC-32 of the examples as hex."""
    crc = 0
    for e in examples:
        crc = crc32(repr(e[:]).encode(), crc)
    return f"{crc:08x}"


def check_baseline(recipe: FinetuneRecipe, dev: Sequence[Example]) -> None:
    """Raise if the baseline run has another task or other dev answers. Runs before training."""
    if not recipe.baseline:
        return
    baseline_answers = load_seed_predictions(Path(recipe.baseline), "references", "reference")
    baseline_ids = set.intersection(*map(set, baseline_answers))
    examples = dict(zip(disambiguate_ids(e.id for e in dev), dev, strict=True))
    dev_ids = set(examples)
    if not dev_ids & baseline_ids:
        raise UserError(f"{recipe.baseline} and {recipe.dev} have no example in common: no id is in both.")
    for key, e in examples.items():
        dev_answer = json.loads(json.dumps(e.references if len(e.references) > 1 else e.target))  # tuples become lists
        if key in baseline_ids and baseline_answers[0][key] != dev_answer:
            raise UserError(
                f"{recipe.baseline} is a run on another dev file: the answer to example {shorten(key[0])} was "
                f"{preview_value(baseline_answers[0][key])} there, and is {preview_value(dev_answer)} in {recipe.dev}."
            )
    if dev_ids != baseline_ids:
        warn(
            f"{recipe.baseline} and {recipe.dev} have other examples: "
            f"{format_count(len(dev_ids - baseline_ids), 'id is', 'ids are')} in dev alone, "
            f"{len(baseline_ids - dev_ids):,} in the baseline alone. "
            f"The {len(dev_ids & baseline_ids):,} in both are compared."
        )
    elif has_other_examples(Path(recipe.baseline), dev):
        warn(f"{recipe.baseline} has the same ids and answers as {recipe.dev}, but other texts or another order.")
    results_file = Path(recipe.baseline) / "results.json"
    if results_file.is_file() and (baseline_task := read_object(results_file).get("task", recipe.task)) != recipe.task:
        raise UserError(f"{recipe.baseline} is a run of the task {baseline_task}, and this one is of {recipe.task}.")


def has_other_examples(run: Path, dev: Sequence[Example]) -> bool:
    """Whether a run's saved dev checksum differs from that of `dev`."""
    recipe = read_yaml_mapping(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else {}
    return recipe.get("dev_checksum", "") not in ("", checksum_examples(dev))


def compare_with_baseline(recipe: FinetuneRecipe, task: Task, dev: Sequence[Example], folder: Path) -> dict[str, Any]:
    """Return the difference of the seed means from the baseline, tested over the seeds and the dev examples."""
    seed_folders = [folder / f"seed-{i}" for i in range(recipe.seeds)]
    # a diverged seed has no predictions
    run_predictions = [load_seed_predictions(seed)[0] for seed in seed_folders if (seed / PREDICTIONS_FILE).is_file()]
    metric, baseline_predictions = deciding_metric(recipe, task), load_seed_predictions(Path(recipe.baseline))
    keys = disambiguate_ids(e.id for e in dev)
    seeds = [*run_predictions, *baseline_predictions]
    shared = [i for i, key in enumerate(keys) if all(key in seed for seed in seeds)]
    both, keys = [dev[i] for i in shared], [keys[i] for i in shared]

    score_fn = make_sample_score_fn(task, metric, both)
    answers = [[seed[key] for key in keys] for seed in seeds]
    score_S, sampled_RS = bootstrap_scores(
        score_fn, answers, both, BOOTSTRAP_SAMPLES, max_seconds=BOOTSTRAP_MAX_SECONDS
    )
    n, paired = len(run_predictions), has_paired_seeds(recipe, len(run_predictions), len(baseline_predictions))
    comparison = compare_seeds(score_S[:n], score_S[n:], sampled_RS[:, :n], sampled_RS[:, n:], len(both), paired)
    found = comparison._asdict() | {
        "metric": metric,
        "baseline": recipe.baseline,
        "examples": len(both),
        "num_seeds": [n, len(baseline_predictions)],
        "paired_seeds": paired,
    }
    say(describe_comparison(found))
    return found


def make_sample_score_fn(
    task: Task, metric: str, examples: Sequence[Example]
) -> Callable[[Sequence[Any], Sequence[Example]], Any]:
    """Return the score of predictions on examples as a function that a bootstrap calls for each sample."""

    def score_answers(answers: Sequence[Any], examples: Sequence[Example]) -> Any:
        scores = task.score(examples, [Prediction(a) for a in answers])
        return scores.get(metric, math.nan)  # one class alone has no F1

    def sum_answers(answers: Sequence[Any], examples: Sequence[Example]) -> AdditiveScore:
        """The same as per-example sums: resampling then adds them up and does not score again."""
        return additive_task_score(task.name, metric, answers, examples)

    return sum_answers if is_additive_metric(task.name, metric, [e.target for e in examples]) else score_answers


def score_with_error(
    task: Task, metric: str, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> tuple[float | None, float | None]:
    """Return a score and its standard error over the examples, by the bootstrap; None where it is not a number."""
    score = task.score(examples, predictions).get(metric, math.nan)
    if not math.isfinite(score):
        return None, None
    answers = [p.prediction for p in predictions]
    _, sampled_R1 = bootstrap_scores(make_sample_score_fn(task, metric, examples), [answers], examples, ERROR_SAMPLES)
    finite = sampled_R1[np.isfinite(sampled_R1)]
    return score, float(finite.std(ddof=1)) if len(finite) > 1 else None


def has_paired_seeds(recipe: FinetuneRecipe, num_seeds: int, num_baseline_seeds: int) -> bool:
    """Whether seed i of both runs trains on the same few examples (`shots`), so that their luck with them cancels."""
    if not recipe.shots or num_seeds != recipe.seeds or num_baseline_seeds != recipe.seeds:
        return False
    file = Path(recipe.baseline) / "recipe.yaml"
    other = read_yaml_mapping(file) if file.is_file() else {}
    return all(other.get(name) == getattr(recipe, name) for name in ("shots", "seed", "train_checksum"))


def additive_task_score(
    name: str, metric: str, predictions: Sequence[Any], examples: Sequence[Example]
) -> AdditiveScore:
    """Return a task's score as per-example sums."""
    true = [e.target for e in examples]
    if name == "tag" and metric != "accuracy":
        return additive_entity_score(metric.removeprefix("entity_"), predictions, true, excluded_entity_types(examples))
    if name == "text-to-text":
        return make_additive_score(name, metric, predictions, [list(e.references) or e.target for e in examples])
    if name == "lm":
        return make_additive_score(
            name, metric, [a["nats"] for a in predictions], [(a["tokens"], a["bytes"]) for a in predictions]
        )
    if name == "preference" and metric == "accuracy":
        return make_additive_score(
            "choice", metric, [is_preferred(answers) for answers in predictions], [True] * len(true)
        )
    if name == "reward" and metric == "accuracy":
        return make_additive_score(
            "choice", metric, [chosen > rejected for chosen, rejected in predictions], [True] * len(true)
        )
    return make_additive_score(name, metric, predictions, true)


def describe_comparison(found: Mapping[str, Any]) -> str:
    """Say how large a difference is, over what its interval and p-value are, and whether it may be chance."""
    metric, baseline, difference, p_value = (found[k] for k in ("metric", "baseline", "difference", "p_value"))
    if p_value is None or math.isnan(p_value):
        known = difference is not None and math.isfinite(difference)
        where = "in most samples of dev" if known else "in one of both runs, or in both"
        return f"{metric} cannot be compared with {baseline}: it is not a number {where}."
    ours, theirs = found["num_seeds"]
    values = difference, found["low"], found["high"]
    signed, low, high = (format_difference(metric, x) for x in values)
    examples = format_count(found["examples"], "dev example")
    interval = f"{low.removesuffix(' points')} to {high}"
    start = f"{metric} is {signed} against {baseline} (95%: {interval}, {format_p_value(p_value)}, over "
    if found["over"] == "examples":
        return (
            f"{start}{examples} alone): {ours} and {format_count(theirs, 'seed')} are too few to judge whether other "
            f"seeds agree. Give both runs --seeds 5; {MIN_SEEDS} are the least."
        )
    freedom = found["degrees_of_freedom"]
    test = "" if freedom is None or math.isnan(freedom) else f"; t with {freedom:.3g} degrees of freedom"
    pairs = f"{ours} pairs of seeds" if found["paired_seeds"] else f"{ours} and {theirs} seeds"
    verdict = "that is more than chance" if p_value < 0.05 else "that may be chance"
    return f"{start}{pairs} and {examples}{test}): {verdict}."


def format_p_value(p_value: float) -> str:
    """
    >>> format_p_value(0.0000001), format_p_value(0.001), format_p_value(0.2444)
    ('p < 0.001', 'p = 0.001', 'p = 0.244')
    """
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3g}"
