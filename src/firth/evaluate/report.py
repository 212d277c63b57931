"""report.html of an evaluation or a fine-tuning run: scores, classes, how it was learned, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from firth.evaluate.card import write_card
from firth.files import CARD
from firth.metrics import Comparison, by_class, by_type, confusion, summarise
from firth.metrics.tagging import are_chunks
from firth.page import Page, loss_curve
from firth.tasks import Prediction, read_predictions
from firth.tasks.results import verdict
from firth.text import Example
from firth.train import read_log

CLASSES = ("classify", "pair", "relation", "word-in-context")
MOST_CLASSES = 30  # a larger table tells nobody anything
MOST_SEEDS = 5  # each with a column of its own
MISTAKES = 20
TOLD = {"loss", "skipped", "rewound_from"}  # lines of the log that are no evaluations have one of these
SHOWN = 400  # characters of a text
FACTS = (
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


def write_report(
    path: Path, result: Mapping[str, Any], examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """One page about one evaluation. Every number comes from it or from the run that made the checkpoint."""
    task = result["task"]
    page = Page(f"{task}: {Path(str(result['data'])).name}")
    page.table(["", ""], [(name, shown(result[name])) for name in FACTS if name in result])
    if result["metrics"]:
        page.heading("Scores")
        page.table(["metric", "score"], list(result["metrics"].items()))
    if result.get("by_group"):
        page.table(["group", "score"], list(result["by_group"].items()), "The accuracy of each group.")
    add_answers(page, task, Path(result["checkpoint"]), examples, predictions)
    page.save(path)


def describe_run(folder: Path, result: Mapping[str, Any], examples: Sequence[Example]) -> Path:
    """The page about a fine-tuning run, and the model card of its model; a card that is there is left alone."""
    page = write_run_report(folder, result, examples)
    if not (folder / "final" / CARD).exists():  # a person may have written in it
        write_card(folder / "final")
    return page


def write_run_report(folder: Path, result: Mapping[str, Any], examples: Sequence[Example]) -> Path:
    """One page about a fine-tuning run, from its results, its recipe and the answers of its best seed."""
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    settings, task = yaml.safe_load(recipe), result["task"]
    page = Page(f"{task}: {Path(settings['dev']).name}")
    start = "random weights" if result["from_scratch"] else "its weights"
    facts = {"checkpoint": f"{settings['checkpoint']} ({start})", "train": settings["train"], "dev": settings["dev"]}
    page.table(["", ""], [*facts.items(), ("examples of dev", len(examples)), ("steps", shown(result["steps"]))])
    page.heading("Scores")
    page.table(*seed_table(result), f"On dev. {result['metric']} decides; seed {result['best_seed']} is final/.")
    if result.get("chance") is not None:
        who = "Vectors that mean nothing get" if task == "embed" else "The commonest answer of train to everything gets"
        guess = f"{who} {result['chance']:.4g} {result['metric']}."
        page.text(guess + (f" No better than that: {shown(result['failed'])} (seeds)." if result["failed"] else ""))
    if result.get("diverged"):
        page.text(f"Broken on the loss, and without a score: {shown(result['diverged'])} (seeds).")
    if test := result.get("bootstrap"):
        found = Comparison(**{name: test[name] for name in Comparison._fields})
        said = verdict(found, result["metric"], test["baseline"], test["between_seeds"])
        page.text(f"{said} (Paired bootstrap over {test['examples']:,} examples.)")
    lines = read_predictions(folder / "predictions.jsonl")
    answers = [Prediction(line["prediction"], line.get("scores")) for line in lines]
    add_answers(page, task, folder / "final", examples, answers)
    page.heading("Recipe")
    page.code(recipe)
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
    seeds = [f"seed {i}" for i in range(len(each))] if len(each) <= MOST_SEEDS else []
    known = {name: [value for value in some if value is not None] for name, some in values.items()}
    rows = [(name, *summarise(known[name]), *(some if seeds else ())) for name, some in values.items()]
    return ["metric", "mean", "deviation", *seeds], rows


def add_answers(
    page: Page, task: str, checkpoint: Path, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """Classes, types, the way there and the mistakes, where a task has such things."""
    answered = [(e, p) for e, p in zip(examples, predictions, strict=True) if e.target is not None]
    if answered and task in CLASSES:
        add_classes(page, [p.prediction for _, p in answered], [e.target for e, _ in answered])
    if answered and task == "tag":
        add_types(page, [p.prediction for _, p in answered], [e.target for e, _ in answered])
    add_curves(page, checkpoint)
    add_mistakes(page, task, list(zip(examples, predictions, strict=True)))


def shown(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def add_classes(page: Page, predicted: Sequence[str], true: Sequence[str]) -> None:
    """How well each class is found, and which is taken for which."""
    rows = by_class(predicted, true)
    page.heading("Classes")
    page.table(["class", "precision", "recall", "F1", "examples"], [(name, *row) for name, row in rows.items()])
    if len(rows) <= MOST_CLASSES:
        names = list(rows)
        counts = confusion(predicted, true, names).tolist()
        table = [(name, *row) for name, row in zip(names, counts, strict=True)]
        page.table(["true \\ predicted", *names], table, "How often a class (row) was taken for which (column).")


def add_types(page: Page, predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> None:
    """How well each kind of stretch is found; parts of speech and the like have none."""
    if are_chunks(true):
        rows = by_type(predicted, true)
        page.heading("Types")
        page.table(["type", "precision", "recall", "F1", "examples"], [(name, *row) for name, row in rows.items()])


def add_curves(page: Page, checkpoint: Path) -> None:
    """The losses of the run that made the checkpoint, where its log lies beside it."""
    run = checkpoint.absolute().parent
    logs = {path.parent.name: path for path in sorted(run.glob("seed-*/log.jsonl"))}
    if not logs and (run / "log.jsonl").is_file():
        logs = {"": run / "log.jsonl"}
    lines = {name: read_log(path) for name, path in logs.items()}
    train = {name: points(log, "loss") for name, log in lines.items()}
    if any(train.values()):
        held_out = {name: points(log, "eval_loss") for name, log in lines.items()}
        page.heading("How it was learned")
        figure = loss_curve(train, held_out)
        figure.axes[0].set_ylabel("loss")  # of an answer, not always of a token
        page.figure(figure, "The loss of the run that made this checkpoint.")
    scores = [
        {"run": name or run.name, **line} for name, log in lines.items() for line in log if not TOLD & line.keys()
    ]
    names = list(dict.fromkeys(name for line in scores for name in line if isinstance(line[name], int | float)))
    if len(scores) > len(lines) and names:  # more than one at the end of each
        rows = [(line["run"], *(line.get(name) for name in names)) for line in scores]
        page.table(["run", *names], rows, "Its scores on the way.")


def points(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in log if line.get(name) is not None]


def add_mistakes(page: Page, task: str, pairs: Sequence[tuple[Example, Prediction]]) -> None:
    """Examples that were answered wrongly, those first of which the model was surest."""
    wrong = sorted((pair for pair in pairs if is_mistake(task, *pair)), key=lambda pair: -sureness(task, *pair))
    if not wrong:
        return
    page.heading("Mistakes")
    rows = [(str(e.id), read(e), short(p.prediction), short(right(task, e))) for e, p in wrong[:MISTAKES]]
    caption = f"{len(wrong):,} of {len(pairs):,} are wrong; here the first {len(rows)}, the surest ones first."
    page.table(["id", "text", "predicted", "right"], rows, caption)


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
    return task in (*CLASSES, "choice", "cloze") and prediction.prediction != example.target


def right(task: str, example: Example) -> Any:
    if task == "span-qa":
        return [answer.text for answer in example.target] or "(no answer)"
    return "good" if task == "minimal-pairs" else example.target


def sureness(task: str, example: Example, prediction: Prediction) -> float:
    """By how much the model preferred its answer to the right one, where it scored both."""
    scores = prediction.scores or {}
    names = str(prediction.prediction), str(right(task, example))
    return scores[names[0]] - scores[names[1]] if all(name in scores for name in names) else 0.0


def read(example: Example) -> str:
    joined = "\n".join(example.texts)
    return joined if len(joined) <= SHOWN else joined[:SHOWN] + " ..."


def short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
