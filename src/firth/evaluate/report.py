"""report.html of an evaluation or a fine-tuning run: scores, classes, loss curves and mistakes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from firth.core.files import MODEL_CARD_FILE, read_json
from firth.core.html import HtmlPage, plot_loss_curve
from firth.evaluate.card import write_model_card
from firth.metrics import confusion_matrix, mean_and_std, per_class_metrics, per_type_metrics
from firth.metrics.tagging import are_span_tags
from firth.tasks import Prediction, read_predictions
from firth.tasks.multitask import task_of
from firth.tasks.results import describe_comparison
from firth.text import Example
from firth.train import read_log, token_loss_name

CLASS_TASKS = ("classify", "pair", "relation", "word-in-context")
MAX_CONFUSION_TABLE_CLASSES = 30  # classes: a larger confusion matrix is unreadable
MAX_SEED_COLUMNS = 5  # seeds with a column of their own
MAX_MISTAKE_ROWS = 20  # rows of the table of mistakes
TRAIN_LOG_KEYS = {"loss", "skipped", "rewound_from"}  # a log line with one of these is not an evaluation
MAX_TEXT_CHARS = 400  # characters of a text in a table
REPORT_RESULT_KEYS = (
    "task",
    "checkpoint",
    "data",
    "examples",
    "method",
    "tokens",
    "words",
    "bytes",
    "unknown",
    "threshold",
    "layer",
)


Point = tuple[float, float]  # a step and a loss


def write_evaluation_report(
    path: Path, result: Mapping[str, Any], examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """Write the report of one evaluation."""
    task = result["task"]
    page = HtmlPage(f"{task}: {Path(str(result['data'])).name}")
    page.add_table(["", ""], [(name, format_list(result[name])) for name in REPORT_RESULT_KEYS if name in result])
    if result["metrics"]:
        page.add_heading("Scores")
        page.add_table(["metric", "score"], list(result["metrics"].items()))
    if result.get("by_group"):
        page.add_table(["group", "score"], list(result["by_group"].items()), "The accuracy of each group.")
    add_prediction_sections(page, task, Path(result["checkpoint"]), examples, predictions)
    page.save(path)


def write_run_report_and_card(folder: Path, result: Mapping[str, Any], examples: Sequence[Example]) -> Path:
    """Write the report of a fine-tuning run and the card of its model; an existing card is kept."""
    page = write_run_report(folder, result, examples)
    if not (folder / "final" / MODEL_CARD_FILE).exists():  # it may have been edited
        write_model_card(folder / "final")
    return page


def write_run_report(folder: Path, result: Mapping[str, Any], examples: Sequence[Example]) -> Path:
    """Write the report of a fine-tuning run: results, recipe and the predictions of the best seed."""
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    settings, task = yaml.safe_load(recipe), result["task"]
    page = HtmlPage(f"{task}: {', '.join(result.get('tasks', ())) or Path(settings['dev']).name}")
    start = "random weights" if result["from_scratch"] else "pretrained weights"
    facts = {"checkpoint": f"{settings['checkpoint']} ({start})", "train": settings["train"], "dev": settings["dev"]}
    page.add_table(["", ""], [*facts.items(), ("dev examples", len(examples)), ("steps", format_list(result["steps"]))])
    page.add_heading("Scores")
    page.add_table(
        *seed_table(result), f"Scores on dev. final/ is seed {result['best_seed']}, the best by {result['metric']}."
    )
    if result.get("chance") is not None:
        baseline = "Random vectors" if task == "embed" else "Always predicting the most frequent label of train"
        text = f"{baseline} scores {result['chance']:.4g} {result['metric']}."
        failed = f" Seeds that are no better: {format_list(result['failed'])}." if result["failed"] else ""
        page.add_paragraph(text.replace("vectors scores", "vectors score") + failed)
    if result.get("diverged"):
        page.add_paragraph(f"Seeds whose loss diverged, without a score: {format_list(result['diverged'])}.")
    if result.get("comparison"):
        page.add_paragraph(describe_comparison(result["comparison"]))
    lines = read_predictions(folder / "predictions.jsonl")
    predictions = [Prediction(line["prediction"], line.get("scores")) for line in lines]
    if tasks := result.get("tasks"):
        add_task_sections(page, tasks, folder / "final", examples, predictions)
    else:
        add_prediction_sections(page, task, folder / "final", examples, predictions)
    page.add_heading("Recipe")
    page.add_code(recipe)
    page.save(folder / "report.html")
    return folder / "report.html"


def seed_table(result: Mapping[str, Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a run's scores: each metric with mean, standard deviation and the score of each seed.

    A diverged seed has no score.
    """
    scores, diverged = result["scores"], result.get("diverged", ())
    names = dict.fromkeys([result["metric"], *(name for name in scores[0] if all(name in seed for seed in scores))])
    values = {name: [None if i in diverged else seed[name] for i, seed in enumerate(scores)] for name in names}
    if len(scores) == 1:
        return ["metric", "score"], [(name, *row) for name, row in values.items()]
    seeds = [f"seed {i}" for i in range(len(scores))] if len(scores) <= MAX_SEED_COLUMNS else []
    known = {name: [value for value in row if value is not None] for name, row in values.items()}
    rows = [(name, *mean_and_std(known[name]), *(row if seeds else ())) for name, row in values.items()]
    return ["metric", "mean", "deviation", *seeds], rows


def add_task_sections(
    page: HtmlPage,
    tasks: Mapping[str, Any],
    checkpoint: Path,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
) -> None:
    """Add the score of each of several tasks, then its classes and mistakes."""
    page.add_heading("Tasks")
    rows = [(name, t["task"], t["metric"], t["mean"], t["std"]) for name, t in tasks.items()]
    page.add_table(["name", "task", "metric", "mean", "deviation"], rows)
    add_loss_curves(page, checkpoint)
    for name, task in tasks.items():
        own = [(e, p) for e, p in zip(examples, predictions, strict=True) if task_of(e) == name]
        page.add_heading(name)
        add_class_and_mistake_sections(page, task["task"], own)


def add_prediction_sections(
    page: HtmlPage, task: str, checkpoint: Path, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """Add loss curves, classes, entity types and mistakes, as far as the task has them."""
    add_loss_curves(page, checkpoint)
    add_class_and_mistake_sections(page, task, list(zip(examples, predictions, strict=True)))


def add_class_and_mistake_sections(page: HtmlPage, task: str, pairs: Sequence[tuple[Example, Prediction]]) -> None:
    labelled = [(e, p) for e, p in pairs if e.target is not None]
    if labelled and task in CLASS_TASKS:
        add_class_section(page, [p.prediction for _, p in labelled], [e.target for e, _ in labelled])
    if labelled and task == "tag":
        add_type_section(page, [p.prediction for _, p in labelled], [e.target for e, _ in labelled])
    add_mistakes(page, task, pairs)


def format_list(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def add_class_section(page: HtmlPage, predicted: Sequence[str], true: Sequence[str]) -> None:
    """Precision, recall and F1 of each class, and the confusion matrix."""
    rows = per_class_metrics(predicted, true)
    page.add_heading("Classes")
    page.add_table(["class", "precision", "recall", "F1", "examples"], [(name, *row) for name, row in rows.items()])
    if len(rows) <= MAX_CONFUSION_TABLE_CLASSES:
        names = list(rows)
        counts = confusion_matrix(predicted, true, names).tolist()
        table = [(name, *row) for name, row in zip(names, counts, strict=True)]
        page.add_table(
            ["true \\ predicted", *names],
            table,
            "Confusion matrix: true classes in rows, predicted classes in columns.",
        )


def add_type_section(page: HtmlPage, predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> None:
    """Precision, recall and F1 of each entity type; part-of-speech tags have none."""
    if are_span_tags(true):
        rows = per_type_metrics(predicted, true)
        page.add_heading("Types")
        page.add_table(["type", "precision", "recall", "F1", "examples"], [(name, *row) for name, row in rows.items()])


def add_loss_curves(page: HtmlPage, checkpoint: Path) -> None:
    """Loss curves of the run that made the checkpoint, if its log is beside it."""
    run = checkpoint.absolute().parent
    logs = {path.parent.name: path for path in sorted(run.glob("seed-*/log.jsonl"))}
    if not logs and (run / "log.jsonl").is_file():
        logs = {"": run / "log.jsonl"}
    lines = {name: read_log(path) for name, path in logs.items()}
    train, held_out = loss_series(lines[""]) if "" in lines else ({}, {})
    if "" not in lines:
        train = {name: log_points(log, "loss") for name, log in lines.items()}
        held_out = {name: log_points(log, "eval_loss") for name, log in lines.items()}
    if any(train.values()):
        results = read_json(run / "results.json") if (run / "results.json").is_file() else {}
        page.add_heading("Training")
        figure = plot_loss_curve(train, held_out, comparable_entropy(run, results))
        figure.axes[0].set_ylabel("loss")  # per example, not always per token
        page.add_figure(figure, "Loss of the run that made this checkpoint.")
        add_source_table(page, results)
    scores = [
        {"run": name or run.name, **line}
        for name, log in lines.items()
        for line in log
        if not TRAIN_LOG_KEYS & line.keys()
    ]
    names = list(dict.fromkeys(name for line in scores for name in line if isinstance(line[name], int | float)))
    if len(scores) > len(lines) and names:  # more than one at the end of each
        rows = [(line["run"], *(line.get(name) for name in names)) for line in scores]
        page.add_table(["run", *names], rows, "Scores during training.")


def loss_series(log: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Point]], dict[str, list[Point]]]:
    """Return training and held-out losses of a log by name: the parts of a loss, and the sources of a mix.

    A loss without parts has the name "". Held-out documents have no soft targets: there the loss is that over tokens.
    """
    keys = dict.fromkeys(key for line in log for key in line)
    parts = [key for key in keys if key.endswith("_loss") and not key.startswith("eval_")] or ["loss"]
    held_out = {part: f"eval_{part}" for part in parts} | {token_loss_name(keys, ""): token_loss_name(keys)}
    prefix = f"{token_loss_name(keys)}/"
    sources = {key.removeprefix(prefix): log_points(log, key) for key in keys if key.startswith(prefix)}

    def short(part: str) -> str:
        return part.removesuffix("loss").removesuffix("_")

    train = {short(part): log_points(log, part) for part in parts}
    return train, {short(part): log_points(log, key) for part, key in held_out.items()} | sources


def comparable_entropy(run: Path, results: Mapping[str, Any]) -> float | None:
    """Return the unigram entropy of a pretraining run; None where labels contain sentinels (encoder-decoders)."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8")) if "unigram_entropy" in results else {}
    is_seq2seq = recipe.get("model", {}).get("architecture") == "encoder-decoder"
    return None if is_seq2seq else results.get("unigram_entropy")


def add_source_table(page: HtmlPage, results: Mapping[str, Any]) -> None:
    """Add the held-out loss of each source of a mix, beside its unigram entropy."""
    rows = [
        (source["source"], source["share"], source.get(token_loss_name(source)), source.get("unigram_entropy"))
        for source in results.get("mix", ())
    ]
    if rows:
        columns = ["source", "share of rows", "held-out loss", "unigram entropy"]
        page.add_table(columns, rows, "Loss per token of each source. Unigram entropy: a model of frequencies alone.")


def log_points(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in log if line.get(name) is not None]


def add_mistakes(page: HtmlPage, task: str, pairs: Sequence[tuple[Example, Prediction]]) -> None:
    """Wrong predictions, the most confident ones first."""
    wrong = sorted(
        (pair for pair in pairs if is_mistake(task, *pair)), key=lambda pair: -confidence_margin(task, *pair)
    )
    if not wrong:
        return
    page.add_heading("Mistakes")
    rows = [
        (str(e.id), example_text(e), truncated_json(p.prediction), truncated_json(gold_answer(task, e)))
        for e, p in wrong[:MAX_MISTAKE_ROWS]
    ]
    caption = f"{len(wrong):,} of {len(pairs):,} are wrong; the {len(rows)} most confident ones."
    page.add_table(["id", "text", "predicted", "right"], rows, caption)


def is_mistake(task: str, example: Example, prediction: Prediction) -> bool:
    """Whether a prediction is wrong; numbers and generated texts are never counted as wrong."""
    if task == "minimal-pairs":
        return prediction.prediction != "good"
    if example.target is None or (prediction.prediction is None and task != "choice"):
        return False
    if task == "tag":
        return tuple(prediction.prediction) != tuple(example.target)
    if task == "span-qa":
        return prediction.prediction not in ([answer.text for answer in example.target] or [""])
    if task == "analogy":
        return str(prediction.prediction).lower() != example.target.lower()
    return task in (*CLASS_TASKS, "choice", "cloze") and prediction.prediction != example.target


def gold_answer(task: str, example: Example) -> Any:
    if task == "span-qa":
        return [answer.text for answer in example.target] or "(no answer)"
    return "good" if task == "minimal-pairs" else example.target


def confidence_margin(task: str, example: Example, prediction: Prediction) -> float:
    """Score of the prediction minus that of the right label, where the model scored both."""
    scores = prediction.scores or {}
    names = str(prediction.prediction), str(gold_answer(task, example))
    return scores[names[0]] - scores[names[1]] if all(name in scores for name in names) else 0.0


def example_text(example: Example) -> str:
    joined = "\n".join(example.texts)
    return joined if len(joined) <= MAX_TEXT_CHARS else joined[:MAX_TEXT_CHARS] + " ..."


def truncated_json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ..."
