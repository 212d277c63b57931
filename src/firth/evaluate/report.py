"""report.html of an evaluation or a fine-tuning run: scores, classes, how it was learned, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from firth.core.files import MODEL_CARD_FILE
from firth.core.html import HtmlPage, plot_loss_curve
from firth.evaluate.card import write_model_card
from firth.metrics import Comparison, confusion_matrix, mean_and_std, per_class_metrics, per_type_metrics
from firth.metrics.tagging import are_span_tags
from firth.tasks import Prediction, read_predictions
from firth.tasks.results import describe_comparison
from firth.text import Example
from firth.train import read_log

CLASS_TASKS = ("classify", "pair", "relation", "word-in-context")
MAX_CONFUSION_TABLE_CLASSES = 30  # a larger table tells nobody anything
MAX_SEED_COLUMNS = 5  # each with a column of its own
MAX_MISTAKE_ROWS = 20
TRAIN_LOG_KEYS = {"loss", "skipped", "rewound_from"}  # lines of the log that are no evaluations have one of these
MAX_TEXT_CHARS = 400  # characters of a text
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


def write_evaluation_report(
    path: Path, result: Mapping[str, Any], examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """One page about one evaluation. Every number comes from it or from the run that made the checkpoint."""
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
    """The page about a fine-tuning run, and the model card of its model; a card that is there is left alone."""
    page = write_run_report(folder, result, examples)
    if not (folder / "final" / MODEL_CARD_FILE).exists():  # a person may have written in it
        write_model_card(folder / "final")
    return page


def write_run_report(folder: Path, result: Mapping[str, Any], examples: Sequence[Example]) -> Path:
    """One page about a fine-tuning run, from its results, its recipe and the answers of its best seed."""
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    settings, task = yaml.safe_load(recipe), result["task"]
    page = HtmlPage(f"{task}: {Path(settings['dev']).name}")
    start = "random weights" if result["from_scratch"] else "its weights"
    facts = {"checkpoint": f"{settings['checkpoint']} ({start})", "train": settings["train"], "dev": settings["dev"]}
    page.add_table(
        ["", ""], [*facts.items(), ("examples of dev", len(examples)), ("steps", format_list(result["steps"]))]
    )
    page.add_heading("Scores")
    page.add_table(*seed_table(result), f"On dev. {result['metric']} decides; seed {result['best_seed']} is final/.")
    if result.get("chance") is not None:
        who = "Vectors that mean nothing get" if task == "embed" else "The commonest answer of train to everything gets"
        guess = f"{who} {result['chance']:.4g} {result['metric']}."
        page.add_paragraph(
            guess + (f" No better than that: {format_list(result['failed'])} (seeds)." if result["failed"] else "")
        )
    if result.get("diverged"):
        page.add_paragraph(f"Broken on the loss, and without a score: {format_list(result['diverged'])} (seeds).")
    if test := result.get("bootstrap"):
        found = Comparison(**{name: test[name] for name in Comparison._fields})
        said = describe_comparison(found, result["metric"], test["baseline"], test["between_seeds"])
        page.add_paragraph(f"{said} (Paired bootstrap over {test['examples']:,} examples.)")
    lines = read_predictions(folder / "predictions.jsonl")
    answers = [Prediction(line["prediction"], line.get("scores")) for line in lines]
    add_prediction_sections(page, task, folder / "final", examples, answers)
    page.add_heading("Recipe")
    page.add_code(recipe)
    page.save(folder / "report.html")
    return folder / "report.html"


def seed_table(result: Mapping[str, Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns and rows of a run's scores: each metric with its mean, its deviation, and what each seed has.

    A seed that broke on its loss has nothing.
    """
    each, broken = result["scores"], result.get("diverged", ())
    names = dict.fromkeys([result["metric"], *(name for name in each[0] if all(name in scores for scores in each))])
    values = {name: [None if i in broken else scores[name] for i, scores in enumerate(each)] for name in names}
    if len(each) == 1:
        return ["metric", "score"], [(name, *some) for name, some in values.items()]
    seeds = [f"seed {i}" for i in range(len(each))] if len(each) <= MAX_SEED_COLUMNS else []
    known = {name: [value for value in some if value is not None] for name, some in values.items()}
    rows = [(name, *mean_and_std(known[name]), *(some if seeds else ())) for name, some in values.items()]
    return ["metric", "mean", "deviation", *seeds], rows


def add_prediction_sections(
    page: HtmlPage, task: str, checkpoint: Path, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """Classes, types, the way there and the mistakes, where a task has such things."""
    answered = [(e, p) for e, p in zip(examples, predictions, strict=True) if e.target is not None]
    if answered and task in CLASS_TASKS:
        add_class_section(page, [p.prediction for _, p in answered], [e.target for e, _ in answered])
    if answered and task == "tag":
        add_type_section(page, [p.prediction for _, p in answered], [e.target for e, _ in answered])
    add_loss_curves(page, checkpoint)
    add_mistakes(page, task, list(zip(examples, predictions, strict=True)))


def format_list(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def add_class_section(page: HtmlPage, predicted: Sequence[str], true: Sequence[str]) -> None:
    """How well each class is found, and which is taken for which."""
    rows = per_class_metrics(predicted, true)
    page.add_heading("Classes")
    page.add_table(["class", "precision", "recall", "F1", "examples"], [(name, *row) for name, row in rows.items()])
    if len(rows) <= MAX_CONFUSION_TABLE_CLASSES:
        names = list(rows)
        counts = confusion_matrix(predicted, true, names).tolist()
        table = [(name, *row) for name, row in zip(names, counts, strict=True)]
        page.add_table(["true \\ predicted", *names], table, "How often a class (row) was taken for which (column).")


def add_type_section(page: HtmlPage, predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> None:
    """How well each kind of stretch is found; parts of speech and the like have none."""
    if are_span_tags(true):
        rows = per_type_metrics(predicted, true)
        page.add_heading("Types")
        page.add_table(["type", "precision", "recall", "F1", "examples"], [(name, *row) for name, row in rows.items()])


def add_loss_curves(page: HtmlPage, checkpoint: Path) -> None:
    """The losses of the run that made the checkpoint, where its log lies beside it."""
    run = checkpoint.absolute().parent
    logs = {path.parent.name: path for path in sorted(run.glob("seed-*/log.jsonl"))}
    if not logs and (run / "log.jsonl").is_file():
        logs = {"": run / "log.jsonl"}
    lines = {name: read_log(path) for name, path in logs.items()}
    train = {name: log_points(log, "loss") for name, log in lines.items()}
    if any(train.values()):
        held_out = {name: log_points(log, "eval_loss") for name, log in lines.items()}
        page.add_heading("How it was learned")
        figure = plot_loss_curve(train, held_out)
        figure.axes[0].set_ylabel("loss")  # of an answer, not always of a token
        page.add_figure(figure, "The loss of the run that made this checkpoint.")
    scores = [
        {"run": name or run.name, **line}
        for name, log in lines.items()
        for line in log
        if not TRAIN_LOG_KEYS & line.keys()
    ]
    names = list(dict.fromkeys(name for line in scores for name in line if isinstance(line[name], int | float)))
    if len(scores) > len(lines) and names:  # more than one at the end of each
        rows = [(line["run"], *(line.get(name) for name in names)) for line in scores]
        page.add_table(["run", *names], rows, "Its scores on the way.")


def log_points(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in log if line.get(name) is not None]


def add_mistakes(page: HtmlPage, task: str, pairs: Sequence[tuple[Example, Prediction]]) -> None:
    """Examples that were answered wrongly, those first of which the model was surest."""
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
    caption = f"{len(wrong):,} of {len(pairs):,} are wrong; here the first {len(rows)}, the surest ones first."
    page.add_table(["id", "text", "predicted", "right"], rows, caption)


def is_mistake(task: str, example: Example, prediction: Prediction) -> bool:
    """Whether an answer is plainly wrong; numbers and free texts are nearer or further, not wrong."""
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
    """By how much the model preferred its answer to the right one, where it scored both."""
    scores = prediction.scores or {}
    names = str(prediction.prediction), str(gold_answer(task, example))
    return scores[names[0]] - scores[names[1]] if all(name in scores for name in names) else 0.0


def example_text(example: Example) -> str:
    joined = "\n".join(example.texts)
    return joined if len(joined) <= MAX_TEXT_CHARS else joined[:MAX_TEXT_CHARS] + " ..."


def truncated_json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ..."
