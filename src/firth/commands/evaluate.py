"""Commands that score or ask a checkpoint: `evaluate`, `evaluate_suite`, `predict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firth.commands.arguments import merge_recipe_changes
from firth.commands.results import EvaluationResult
from firth.core.console import say
from firth.core.errors import UserError
from firth.tasks.recipe import TASK_FILE, read_task_file
from firth.train.launch_env import require_single_process

if TYPE_CHECKING:
    from firth.evaluate.predict_input import PredictInput
    from firth.models import Model


def evaluate(
    checkpoint: str | Path,
    task: str | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    output_dir: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    overwrite: bool = False,
    encoding: str = "utf-8",
    documents: str = "auto",
    **settings: Any,
) -> EvaluationResult:
    """Score a checkpoint on a file, and write results, predictions and a report to `output_dir`.

    The default folder is evaluate-TASK-FILE beside the checkpoint, numbered if it has other results. The default `task`
    is the one that the checkpoint was fine-tuned for. `settings` are those of the task, as `stride` for perplexity.
    `columns` renames columns: `{"text": "body"}`. `encoding` and `documents` say how files are read. `overwrite`
    replaces other results in the folder. `shots=4, train=FILE` scores labels in a prompt with demonstrations, without
    fine-tuning. The task "induction" needs no `data`.
    """
    task = task or read_finetuned_task(checkpoint)
    if (data is None) != (task == "induction"):
        needs = f"No data to score the task {task} on: give --data FILE."
        raise UserError(needs if data is None else "The task induction makes its own data: leave out --data.")
    if isinstance(data, Sequence) and not isinstance(data, str) and len(data) == 1:
        data = data[0]
    shots = settings.get("shots")
    name = task if data is None else f"{task}-{short_data_name(data)}"
    name += "-ensemble" * bool(settings.get("ensemble")) + (f"-{shots}-shot" if shots is not None else "")
    path = Path(output_dir) if output_dir else default_evaluation_folder(checkpoint, name)
    settings = {"columns": columns, "overwrite": overwrite, "encoding": encoding, "documents": documents} | settings
    from firth.evaluate import evaluate as evaluate_checkpoint

    return EvaluationResult(evaluate_checkpoint(checkpoint, task, data, path, numbered=output_dir is None, **settings))


def evaluate_suite(
    checkpoint: str | Path,
    suite: str | Path,
    data: str | Path | None = None,
    output_dir: str | Path | None = None,
    tasks: Sequence[str] = (),
    seeds: int = 3,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> EvaluationResult:
    """Fine-tune and score a checkpoint on every task of a suite: "glue", "superglue", or a file that lists tasks.

    `data` has a folder for each task of GLUE or SuperGLUE; `tasks` takes some of them. Each is fine-tuned with `seeds`
    seeds. `options`, `overrides` and the YAML file `config` set fields of the fine-tuning recipe. `metrics` has the
    score of each task and the average. Results are written to `output_dir`; `resume` keeps its finished tasks,
    `overwrite` replaces it.
    """
    path = Path(output_dir) if output_dir else default_evaluation_folder(checkpoint, Path(suite).stem)
    changes = merge_recipe_changes(config, options, overrides, {})
    require_single_process("evaluate-suite runs in one process: start it without torchrun.")
    from firth.evaluate import evaluate_suite as run_suite

    result = run_suite(checkpoint, suite, path, data, seeds, tasks, changes, resume, overwrite)
    scores = {name: task["score"] for name, task in result["tasks"].items()}
    metrics = {**scores, "average": result["average"]}
    files = {"predictions": str(path), "report": str(path / "report.html")}
    return EvaluationResult({**result, "metrics": metrics, **files})


def predict(
    checkpoint: str | Path | Model,
    inputs: str | Mapping[str, Any] | Iterable[PredictInput],
    task: str | None = None,
    batch_size: int | None = None,
    max_new_tokens: int | None = None,
) -> Any:
    """Ask a fine-tuned checkpoint: labels, scores, spans, answers, texts or vectors for new inputs.

    An input is a text, a list of texts (a pair; question and context; context and choices) or a record with the columns
    of the training file. Several inputs give a list of records, a single text or record gives one. `task` selects one
    of several tasks. `batch_size` inputs are computed together. Generated answers have at most `max_new_tokens` tokens:
    by default those of the fine-tuning, for lm 256 or half of the model's positions. To ask repeatedly, load the model
    once: `firth.Predictor(checkpoint).predict(inputs)`.
    """
    from firth.evaluate.predict import Predictor

    single = isinstance(inputs, str | Mapping)
    predictor = Predictor(checkpoint, task or "", batch_size, max_new_tokens=max_new_tokens)
    records = predictor.predict([inputs] if single else inputs)  # type: ignore[list-item]
    for notice in predictor.notices:
        say(notice)
    return records[0] if single else records


def read_finetuned_task(checkpoint: str | Path) -> str:
    """The task that a checkpoint was fine-tuned for."""
    file = Path(checkpoint) / TASK_FILE
    if not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder: there is no such folder.")
    if not file.is_file():
        raise UserError(
            f"{checkpoint} was not fine-tuned, so it predicts no labels. Fine-tune it first "
            f"(firth finetune {checkpoint} ...), or name a task that needs no labels: --task perplexity."
        )
    facts = read_task_file(Path(checkpoint))
    if "tasks" in facts:
        raise UserError(
            f"{checkpoint} was fine-tuned for several tasks: choose one by --task {' or '.join(facts['tasks'])}."
        )
    return str(facts["task"])


def short_data_name(data: str | Path | Sequence[str | Path]) -> str:
    if isinstance(data, str | Path):
        return Path(data).name
    return f"{Path(data[0]).name}-and-{len(data) - 1}-more" if len(data) else ""


def default_evaluation_folder(checkpoint: str | Path, name: str) -> Path:
    """The folder of an evaluation, beside its checkpoint."""
    folder = Path(checkpoint)
    parent = folder.parent if folder.name not in ("", "..") else folder.absolute().parent
    return parent / f"evaluate-{name}"
