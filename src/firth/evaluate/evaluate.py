"""A checkpoint and labelled data to scores and saved predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firth.console import say
from firth.errors import UserError, nearest
from firth.files import fresh_folder, read_json, refuse_unwritable, write_json
from firth.metrics import score
from firth.models import Classes, load_model
from firth.tasks import TASK_FILE, TASKS, make_task, write_predictions
from firth.text import read_labelled
from firth.train import Training, choose_machine


def evaluate(
    checkpoint: str | Path,
    task: str,
    data: str | Path,
    output_dir: str | Path,
    columns: Mapping[str, str] | None = None,
    batch_size: int = 32,
    overwrite: bool = False,
    encoding: str = "utf-8",
) -> dict[str, Any]:
    """Score a fine-tuned checkpoint on a labelled file; `metrics` and the path of `predictions`."""
    checkpoint, folder = Path(checkpoint), Path(output_dir)
    if task not in TASKS:
        raise UserError(f"Unknown task {task!r}. {nearest(task, TASKS)}")
    if not overwrite:
        fresh_folder(folder, "--output-dir")
    refuse_unwritable(folder)
    model = load_model(checkpoint)
    if model.tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer.")
    facts = read_json(checkpoint / TASK_FILE) if (checkpoint / TASK_FILE).is_file() else {}
    if facts.get("task", task) != task:
        raise UserError(f"{checkpoint} was fine-tuned for {facts['task']}, not for {task}.")
    labels = model.config.head.names if isinstance(model.config.head, Classes) else facts.get("labels")
    if task == "classify" and labels is None:
        raise UserError(f"{checkpoint} has no classes: fine-tune it first (`firth finetune --task classify`).")
    examples = read_labelled(data, task, columns, part="dev", encoding=encoding)
    for e in examples:
        if labels is not None and e.target not in labels:
            raise UserError(f"{data}, example {e.id}: the label {e.target!r} is none of the checkpoint's.")

    length, target_length = (
        facts.get("max_seq_length", model.config.max_length or 512),
        facts.get("max_target_length", 32),
    )
    work = make_task(task, labels, model.tokenizer, model.config, length, target_length)
    machine = choose_machine(Training())
    items = work.encode(examples)
    for sentence in work.cut:
        say(sentence)
    predictions = work.predict(model.to(machine.device), items, machine, batch_size)
    metrics = score(task, [p.prediction for p in predictions], [e.target for e in examples])
    folder.mkdir(parents=True, exist_ok=True)
    write_predictions(folder / "predictions.jsonl", examples, predictions)
    result = {"metrics": metrics, "predictions": str(folder / "predictions.jsonl"), "examples": len(examples)}
    write_json(folder / "results.json", result)
    return result
