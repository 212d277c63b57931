"""report.html of an evaluation or a fine-tuning run: scores, classes, loss curves and mistakes.

Shares are percentages (`format_metric`). The examples with their mistakes are those of `examples_page.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firth.core.chart import Axis, Point, Reference, Series, histogram, line_chart, loss_chart
from firth.core.console import say
from firth.core.errors import quote
from firth.core.files import MODEL_CARD_FILE, format_bytes, read_object, read_utf8, read_yaml
from firth.core.html import HtmlPage
from firth.core.parse import parse_yaml
from firth.evaluate.card import write_model_card
from firth.evaluate.examples_page import CLASS_TASKS, NO_LABEL, PAIR_TASKS, add_examples
from firth.evaluate.health import add_doctor_section
from firth.evaluate.search_page import SEARCH_PAGE, format_value, write_search_page
from firth.metrics import ClassMetrics, format_metric, mean_and_std, per_class_metrics, per_type_metrics
from firth.metrics.tagging import are_span_tags
from firth.tasks import Prediction, read_predictions
from firth.tasks.chain import describe_chain
from firth.tasks.multitask import task_of
from firth.tasks.preference import pair_rewards
from firth.tasks.rate_trial import format_loss
from firth.tasks.results import describe_comparison
from firth.tasks.search import DIMENSION_WORDS
from firth.text import Example
from firth.train import read_log, token_loss_name
from firth.train.findings import Finding

MAX_SEED_COLUMNS = 5  # seeds with a column of their own
TRAIN_LOG_KEYS = {"loss", "skipped", "rewound_from"}  # a log line with one of these is not an evaluation
MAX_COMMAND_CHARS = 78  # characters of a line of a command on the page
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
    "shots",
    "seeds",
    "templates",
    "labels",
    "copy_tokens",
)


def write_evaluation_report(
    path: Path, result: Mapping[str, Any], examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """Write the report of one evaluation."""
    task = result["task"]
    page = HtmlPage(f"{task}: {Path(str(result['data'])).name}")
    page.add_facts((name, format_list(result[name])) for name in REPORT_RESULT_KEYS if name in result)
    if result["metrics"]:
        page.add_heading("Scores")
        if "std" in result:
            add_in_context_scores(page, result)
        else:
            rows = name_positive_class(format_score_rows(result["metrics"].items()), result)
            page.add_table(["metric", "score"], rows)
    if "repeated_loss_by_position" in result:
        add_induction_figure(page, result)
    if result.get("by_group"):
        rows = [(group, format_metric("accuracy", score)) for group, score in result["by_group"].items()]
        page.add_table(["group", "score"], rows, "The accuracy of each group.")
    add_prediction_sections(page, task, Path(result["checkpoint"]), examples, predictions)
    page.save(path)


def add_in_context_scores(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """Scores over seeds and templates, then those of each template."""
    rows = [(name, value, result["std"].get(name)) for name, value in result["metrics"].items()]
    page.add_table(["metric", "mean", "deviation"], format_score_rows(rows), "Over all seeds and templates.")
    rows = [
        (name, *(format_metric("accuracy", one[key]) for key in ("accuracy", "std")))
        for name, one in result["by_template"].items()
    ]
    page.add_table(["template", "accuracy", "deviation"], rows, "Over seeds. The examples below are of the first run.")


def add_induction_figure(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """Loss by position of a random sequence, repeated and not."""
    names = {"unrepeated_loss_by_position": "not repeated", "repeated_loss_by_position": "repeated"}
    chart = line_chart(
        [Series(name, list(enumerate(result[key]))) for key, name in names.items()],
        Axis("position in the copy (tokens)"),
        Axis("loss (nats per token)"),
        [Reference("uniform guess", result["uniform_loss"])],
    )
    page.add_chart(chart, "Loss on random tokens. A model with induction copies them, and the second curve falls.")


def write_run_report_and_card(
    folder: Path, result: Mapping[str, Any], examples: Sequence[Example], findings: Sequence[Finding] | None = None
) -> Path:
    """Write the report of a fine-tuning run and the card of its model; an existing card is kept."""
    page = write_run_report(folder, result, examples, findings)
    if not (folder / "final" / MODEL_CARD_FILE).exists():  # it may have been edited
        write_model_card(folder / "final")
    return page


def write_run_report(
    folder: Path, result: Mapping[str, Any], examples: Sequence[Example], findings: Sequence[Finding] | None = None
) -> Path:
    """Write the report of a fine-tuning run: results, the doctor's findings, recipe, predictions of the best seed."""
    recipe = read_utf8(folder / "recipe.yaml")
    settings, task = parse_yaml(recipe, str(folder / "recipe.yaml")), result["task"]
    page = HtmlPage(f"{task}: {', '.join(result.get('tasks', ())) or Path(settings['dev']).name}")
    start = "random weights" if result["from_scratch"] else "pretrained weights"
    facts = {"checkpoint": f"{settings['checkpoint']} ({start})", "train": settings["train"], "dev": settings["dev"]}
    if len(result.get("chain", ())) > 1:
        facts["chain"] = describe_chain(result["chain"])
    page.add_facts([*facts.items(), ("dev examples", len(examples)), ("steps", format_list(result["steps"]))])
    page.add_heading("Scores")
    columns, rows = seed_table(result)
    caption = f"Scores on dev. final/ is seed {result['best_seed']}, the best by {result['metric']}."
    page.add_table(columns, name_positive_class(format_score_rows(rows), result), caption)
    if result.get("chance") is not None:
        failed = f" Seeds that are no better: {format_list(result['failed'])}." if result["failed"] else ""
        page.add_paragraph(describe_chance(result) + failed)
    for seed, cause in result.get("failure_causes", {}).items():
        page.add_paragraph(f"Seed {seed} is at or below chance. Likely cause: {cause}.")
    if result.get("diverged"):
        page.add_paragraph(f"Seeds whose loss diverged, without a score: {format_list(result['diverged'])}.")
    if result.get("comparison"):
        page.add_paragraph(describe_comparison(result["comparison"]))
    if findings is not None:
        add_doctor_section(page, findings)
    add_distillation_section(page, result)
    add_rate_section(page, result)
    if result.get("search"):
        add_search_section(page, result["search"])
        say(f"what the search has tried: {write_search_page(folder, result)}")
    lines = read_predictions(folder / "predictions.jsonl")
    predictions = [Prediction(line["prediction"], line.get("scores"), line) for line in lines]
    if tasks := result.get("tasks"):
        add_task_sections(page, tasks, folder / "final", examples, predictions)
    else:
        add_prediction_sections(page, task, folder / "final", examples, predictions)
    page.add_heading("Recipe")
    page.add_code(recipe)
    page.save(folder / "report.html")
    return folder / "report.html"


def describe_chance(result: Mapping[str, Any]) -> str:
    """Say what the best constant or random prediction scores.

    >>> describe_chance({"task": "classify", "metric": "accuracy", "chance": 0.9})
    'Always predicting the most frequent label of train scores 90.0% accuracy.'
    """
    baselines = {"embed": "Random vectors", **dict.fromkeys(PAIR_TASKS, "A random order of the answers")}
    baseline = baselines.get(result["task"], "Always predicting the most frequent label of train")
    text = f"{baseline} scores {format_metric(result['metric'], result['chance'])} {result['metric']}."
    return text.replace("vectors scores", "vectors score")


def distillation_table(result: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns and rows of teacher and student: score, parameters, latency and size."""
    metric, models = result["metric"], result["distillation"]
    columns = ["model", metric, "deviation", "parameters", "ms, one by one", "ms, in batches", "size"]
    rows = []
    for name, model in models.items():
        scores = (format_metric(metric, model["mean"]), format_metric(metric, model["std"]))
        times = (f"{model[key]:.2f}" for key in ("ms_per_example", "ms_per_example_in_batches"))
        rows.append((name, *scores, f"{model['parameters']:,}", *times, format_bytes(model["bytes"])))
    return columns, rows


def add_distillation_section(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """Add the table of teacher and student."""
    if not result.get("distillation"):
        return
    page.add_heading("Distillation")
    columns, rows = distillation_table(result)
    devices = {model["device"] for model in result["distillation"].values()}
    caption = (
        f"Scores on dev. Milliseconds per example on this machine ({', '.join(devices)}), from text to prediction: one "
        "example at a time, and in batches of 32. The size is that of the weights on disk."
    )
    page.add_table(columns, rows, caption)
    if "student alone" not in result["distillation"]:
        page.add_paragraph("A student without a teacher was not trained: --against alone trains one too.")


def add_rate_section(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """Add the learning rate of a run and, where several were tried, the loss of each."""
    trial = result.get("learning_rate_trial")
    if not trial:
        return
    page.add_heading("Learning rate")
    if trial["skipped"]:
        page.add_paragraph(f"{trial['chosen']:g}, the default. No others were tried: {trial['reason']}.")
        return
    rows = [
        (f"{rate:g}", format_loss(loss), "chosen" if rate == trial["chosen"] else "")
        for rate, loss in zip(trial["rates"], trial["losses"], strict=True)
    ]
    split = (
        f"{trial['train_examples']:,} examples of train, and the loss is that of {trial['held_out_examples']:,} others"
    )
    times = f"{trial['factor']:.1f} times as high, as a trial is short,"
    caption = f"Each rate was tried {times} for {trial['steps']:,} steps on {split} of train. Dev was not read."
    page.add_table(["learning rate", "held-out loss", ""], rows, caption)
    page.add_paragraph(f"{trial['chosen']:g} was taken: {trial['reason']}.")


def add_search_section(page: HtmlPage, search: Mapping[str, Any]) -> None:
    """Add the setting that a search has chosen; search.html has all of them."""
    page.add_heading("Search")
    rows = [
        (DIMENSION_WORDS[name], format_value(name, search["settings"][search["chosen"]])) for name in search["fields"]
    ]
    page.add_table(["", "chosen"], rows, f"{search['reason']}. Dev was not read. {SEARCH_PAGE} shows what was tried.")


def name_positive_class(rows: Iterable[tuple[str, ...]], result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Name the class that "f1" is of in rows of formatted scores.

    >>> name_positive_class([("accuracy", "94%"), ("f1", "0%")], {"positive_label": "spam"})
    [('accuracy', '94%'), ("f1 of 'spam'", '0%')]
    """
    own = f"f1 of {quote(result['positive_label'])}" if "positive_label" in result else "f1"
    return [(own if name == "f1" else name, *cells) for name, *cells in rows]


def format_score_rows(rows: Iterable[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    """Format rows of a metric's name and its values."""
    return [(name, *(format_metric(name, value) for value in values)) for name, *values in rows]


def format_commands(commands: Mapping[str, str]) -> str:
    """Format commands, each under its purpose; long ones are continued on the next line, before an option.

    >>> print(format_commands({"Say it": "firth say " + "x" * 60 + " --loud --twice"}))
    # Say it
    firth say xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx --loud \\
        --twice
    """
    blocks = []
    for purpose, command in commands.items():
        lines: list[str] = []
        for part in re.split(r" (?=--)", command):
            if lines and len(lines[-1]) + len(part) < MAX_COMMAND_CHARS:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
        blocks.append(f"# {purpose}\n" + " \\\n    ".join(lines))
    return "\n\n".join(blocks)


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
    rows = [
        (name, t["task"], t["metric"], *(format_metric(t["metric"], t[key]) for key in ("mean", "std")))
        for name, t in tasks.items()
    ]
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
        predicted = [NO_LABEL if p.prediction is None else p.prediction for _, p in labelled]  # None: a tie
        add_class_section(page, predicted, [e.target for e, _ in labelled])
    if labelled and task == "tag":
        add_type_section(page, [p.prediction for _, p in labelled], [e.target for e, _ in labelled])
    if task in PAIR_TASKS:
        add_margin_figure(page, [p.prediction for _, p in pairs])
    add_examples(page, task, pairs)


def add_margin_figure(page: HtmlPage, predictions: Sequence[Any]) -> None:
    """Add a histogram of the margins: the reward of the chosen answer less that of the rejected one."""
    margins = [rewards[0] - rewards[1] for p in predictions if (rewards := pair_rewards(p)) is not None]
    if not margins:
        return
    page.add_heading("Margins")
    x = Axis("margin: reward of the chosen answer less that of the rejected one")
    chart = histogram(margins, min(40, max(5, len(margins) // 4)), x, Axis("pairs"), [Reference("no preference", 0.0)])
    right = sum(margin > 0 for margin in margins)
    share = format_metric("accuracy", right / len(margins))
    page.add_chart(chart, f"{right:,} of {len(margins):,} pairs ({share}) are on the right side of 0.")


def format_list(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def add_class_section(page: HtmlPage, predicted: Sequence[str], true: Sequence[str]) -> None:
    """Precision, recall and F1 of each class."""
    page.add_heading("Classes")
    add_class_table(page, "class", per_class_metrics(predicted, true))


def add_type_section(page: HtmlPage, predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> None:
    """Precision, recall and F1 of each entity type; of each tag, if tags mark no spans."""
    if are_span_tags([*true, *predicted]):
        page.add_heading("Types")
        add_class_table(page, "type", per_type_metrics(predicted, true))
    else:
        page.add_heading("Tags")
        flat_predicted, flat_true = ([tag for tags in side for tag in tags] for side in (predicted, true))
        add_class_table(page, "tag", per_class_metrics(flat_predicted, flat_true))


def add_class_table(page: HtmlPage, kind: str, metrics: Mapping[str, ClassMetrics]) -> None:
    shares = {name: [format_metric("f1", share) for share in row[:3]] for name, row in metrics.items()}
    rows = [(name, *shares[name], row.support) for name, row in metrics.items()]
    page.add_table([kind, "precision", "recall", "F1", "examples"], rows)


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
        results = read_object(run / "results.json") if (run / "results.json").is_file() else {}
        page.add_heading("Training")
        chart = loss_chart(train, held_out, comparable_entropy(run, results), "loss")  # not always per token
        page.add_chart(chart, "Loss of the run that made this checkpoint.")
        add_pair_curves(page, lines)
        add_source_table(page, results)
    scores = [
        {"run": name or run.name, **line}
        for name, log in lines.items()
        for line in log
        if not TRAIN_LOG_KEYS & line.keys()
    ]
    names = list(dict.fromkeys(name for line in scores for name in line if isinstance(line[name], int | float)))
    if len(scores) > len(lines) and names:  # more than one at the end of each
        rows = [(line["run"], *(format_metric(name, line.get(name)) for name in names)) for line in scores]
        page.add_table(["run", *names], rows, "Scores during training.")


def add_pair_curves(page: HtmlPage, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Add accuracy, margin and rewards of the training batches, for a run on pairs of answers or on labelled ones."""
    captions = {
        "accuracy": "Share of the pairs of each batch whose chosen answer has the higher reward; of single answers, of "
        "those whose reward has the sign of their label.",
        "margin": "Mean reward of the chosen answers of each batch less that of the rejected ones.",
        "reward_chosen": "Mean reward of the chosen, or good, answers of each batch.",
        "reward_rejected": "Mean reward of the rejected, or bad, answers of each batch.",
        "kl": "How far the model has moved, as KTO estimates it from answers of other prompts.",
    }
    steps = {name: [line for line in log if "loss" in line] for name, log in logs.items()}
    logged = {key for log in steps.values() for line in log for key in line}
    if not logged & {"reward_chosen", "reward_rejected"}:
        return
    for metric, caption in captions.items():
        if metric not in logged:
            continue
        series = [Series(name, log_points(log, metric)) for name, log in steps.items()]
        page.add_chart(line_chart(series, Axis("step"), Axis(metric)), caption)


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
    recipe = read_yaml(run / "recipe.yaml") if "unigram_entropy" in results else {}
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
