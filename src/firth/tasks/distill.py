"""Distillation for a task: a fine-tuned teacher labels the examples of a smaller student (`models/task_distill.py`).

    firth finetune student/final --teacher teacher/final --task classify --train a.csv --dev b.csv --output-dir small

The teacher reads each training example once, before the first step, and its logits are stored in the run's folder
(`TEACHER_LOGITS_FILE`): a step costs no more than without a teacher, and a resumed run reads them again. Teacher and
student encode the texts each with its own tokenizer. So their logits must belong to something that does not depend on
the tokenizer: a text, a choice or a word. Start and end of an answer (`span-qa`) are tokens: both need one tokenizer.

A teacher also labels texts without a label (`unlabeled`) and copies of the examples with other words (`augment.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from firth.core.console import format_count, progress, quiet, say, warn
from firth.core.errors import UserError, list_names
from firth.core.files import file_sha256, read_object, read_utf8, write_npy, write_text
from firth.core.parse import parse_json
from firth.models import Model, load_model, read_config
from firth.models.hf.tensors import find_weight_files
from firth.tasks.augment import augment_examples, check_augmentation
from firth.tasks.finetuned import head_metadata, load_finetuned
from firth.tasks.head_task import Array, EncodedExample, HeadTask
from firth.tasks.recipe import FinetuneRecipe, read_task_file
from firth.tasks.results import checksum_examples, deciding_metric
from firth.tasks.span_qa import SpanQATask
from firth.tasks.task import Task
from firth.tasks.text_labels import VerbalizedTask
from firth.text import Example, RowNotes, read_labelled
from firth.tokens import load_tokenizer
from firth.train import ComputeConfig
from firth.train.recipe import read_yaml_mapping
from firth.train.resume import read_intermediate, write_intermediate

TEACHER_LOGITS_FILE, TEACHER_FILE = "teacher.npy", "teacher.json"
AUGMENTED_FILE, AUGMENTED_NOTE_FILE = "augmented.jsonl", "augmented.json"
UNLABELED_TASKS = ("classify", "pair", "relation", "word-in-context", "regress", "tag")
DISTILLED_TASKS = (*UNLABELED_TASKS, "choice", "span-qa")
PREDICT_BATCH_SIZE = 64  # examples that the teacher reads at once
LATENCY_EXAMPLES, LATENCY_BATCH_EXAMPLES, LATENCY_BATCH_SIZE = 50, 256, 32
LATENCY_REPEATS = 5  # timings of the same batches
WARMUP_EXAMPLES = 3


class ExtraExample(NamedTuple):
    """A training example without a label. `source` is the index of the example it is a copy of; None: of none."""

    source: int | None
    example: Example


# --- before the run ---------------------------------------------------------------------------------------------------


def check_distillation(recipe: FinetuneRecipe, task: Task) -> None:
    """Raise a UserError if this teacher cannot label this task. Reads no weights and no examples."""
    if not recipe.teacher:
        return
    if recipe.task not in DISTILLED_TASKS or not isinstance(task, HeadTask):
        what = "a task with generated answers" if recipe.task in DISTILLED_TASKS else f"the task {recipe.task}"
        raise UserError(f"teacher is for a student with a head ({', '.join(DISTILLED_TASKS)}), not for {what}.")
    if recipe.crf:
        raise UserError("A CRF scores whole sentences, and a teacher single words: remove crf or teacher.")
    if recipe.unlabeled and recipe.task not in UNLABELED_TASKS:
        raise UserError(f"unlabeled is for the tasks {', '.join(UNLABELED_TASKS)}, not for {recipe.task}.")
    facts = read_teacher_facts(recipe.teacher, task)
    teacher = read_config(recipe.teacher)
    if getattr(teacher.head, "crf", False):
        raise UserError(
            f"{recipe.teacher} has a CRF, which scores whole sentences: a teacher needs a score for each word."
        )
    if recipe.task == "span-qa":
        if facts.get("answer") == "text":
            raise UserError(f"{recipe.teacher} generates its answers. A teacher for span-qa predicts start and end.")
        if load_tokenizer(recipe.teacher).fingerprint != task.tokenizer.fingerprint:
            raise UserError(
                f"{recipe.teacher} has another tokenizer than {recipe.checkpoint}. Start and end of an answer are "
                "tokens: for span-qa, teacher and student need the same one."
            )
        if teacher.max_length is not None and teacher.max_length < task.template.max_length:
            raise UserError(
                f"{recipe.teacher} reads {teacher.max_length:,} tokens at most: add --max-seq-length "
                f"{teacher.max_length}."
            )
    if recipe.augment:
        model = recipe.augment_model or recipe.checkpoint
        check_augmentation(recipe.task, read_config(model), load_tokenizer(model), model)


def read_teacher_facts(checkpoint: str, task: Task) -> dict[str, Any]:
    """Return task.json of the teacher for a student's task; a UserError if it was fine-tuned for something else.

    Of a teacher with several tasks, it is the one of this kind with these labels.
    """
    config = read_config(checkpoint)
    facts = read_task_file(Path(checkpoint)) or head_metadata(config, checkpoint)
    if several := facts.get("tasks"):
        fits = [own for own in several.values() if own["task"] == task.name and has_labels(own, task)]
        if len(fits) != 1:
            raise UserError(
                f"{checkpoint} was fine-tuned for {', '.join(several)}, and {len(fits) or 'none'} of these is "
                f"{task.name} with the labels of train. Fine-tune a teacher for this task alone."
            )
        return fits[0]
    if facts.get("is_inferred") and facts["task"] == "classify":  # the head of `transformers` says no more than that
        facts = {**facts, "task": task.name}
    if facts["task"] != task.name:
        raise UserError(f"{checkpoint} was fine-tuned for {facts['task']}, and cannot teach {task.name}.")
    if not has_labels(facts, task):
        raise UserError(
            f"{checkpoint} knows the labels {list_names(facts['labels'], 10)}, and train has "
            f"{list_names(task.labels, 10)}. Teacher and student need the same labels."
        )
    return facts


def has_labels(facts: Mapping[str, Any], task: Task) -> bool:
    """Whether a teacher has the labels of a student's task, as far as the task has any yet."""
    return not task.labels or task.name == "regress" or set(facts.get("labels", ())) == set(task.labels)


def read_unlabeled(recipe: FinetuneRecipe, notes: RowNotes) -> list[Example]:
    """Return the examples of the unlabelled file; labels in it are not read."""
    if not recipe.unlabeled:
        return []
    examples = read_labelled(
        recipe.unlabeled, recipe.task, recipe.columns, "dev", recipe.encoding, require_labels=False, notes=notes
    )
    return [e._replace(target=None) for e in examples]


# --- copies with other words ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AugmentedNote:
    """augmented.json: what the copies were made from, and their number."""

    key: str
    sha256: str  # of augmented.jsonl


def make_extra_examples(
    recipe: FinetuneRecipe,
    train: Sequence[Example],
    used: Sequence[int],
    unlabeled: Sequence[Example],
    compute: ComputeConfig,
    folder: Path,
) -> list[ExtraExample]:
    """Return the unlabelled examples, and copies of the examples `used`; the copies of an earlier start are kept."""
    extra = [ExtraExample(None, e) for e in unlabeled]
    if not recipe.augment:
        return extra
    checkpoint = recipe.augment_model or recipe.checkpoint
    examples = [train[i] for i in used]
    settings = [
        weights_checksum(checkpoint),
        recipe.augment,
        recipe.augment_rate,
        recipe.seed,
        checksum_examples(examples),
    ]
    key, note = " ".join(map(str, settings)), read_intermediate(folder / AUGMENTED_NOTE_FILE, AugmentedNote)
    if note is not None and note.key == key and has_checksum(folder / AUGMENTED_FILE, note.sha256):
        copies = [
            parse_json(line, AUGMENTED_FILE, n)
            for n, line in enumerate(read_utf8(folder / AUGMENTED_FILE).split("\n"), 1)
            if line
        ]
        return extra + [ExtraExample(used[c["source"]], make_copy(c, examples[c["source"]])) for c in copies]
    say(
        f"replacing words by predictions of {checkpoint}: up to {recipe.augment} copies of each of "
        f"{format_count(len(used), 'example')}"
    )
    with quiet():
        model = load_model(checkpoint).to(compute.device)
    found = augment_examples(examples, recipe.task, model, compute, recipe.augment, recipe.augment_rate, recipe.seed)
    lines = [json.dumps({"source": s, "id": e.id, "texts": e.texts}, ensure_ascii=False) for s, e in found]
    write_text(folder / AUGMENTED_FILE, "".join(f"{line}\n" for line in lines))
    note = AugmentedNote(key, file_sha256(folder / AUGMENTED_FILE))
    write_intermediate(folder / AUGMENTED_NOTE_FILE, asdict(note))
    return extra + [ExtraExample(used[source], example) for source, example in found]


def make_copy(record: Mapping[str, Any], source: Example) -> Example:
    return Example(record["id"], tuple(record["texts"]), spans=source.spans)


# --- the teacher's logits ---------------------------------------------------------------------------------------------


class Teacher(NamedTuple):
    """A fine-tuned model, its task, and the position of each of the student's labels among its own."""

    model: Model
    task: Task
    label_order: list[int]

    def logits(self, examples: Sequence[Example], compute: ComputeConfig) -> list[Array]:
        """Return for each example what the student's head would: (labels of the example, ...)."""
        found: list[Array] = []
        chunk = 32 * PREDICT_BATCH_SIZE
        with progress("the teacher reads", "examples", len(examples)) as shown:
            for first in range(0, len(examples), chunk):
                some = examples[first : first + chunk]
                found += self.chunk_logits(some, compute)
                shown.advance(len(some))
        return found

    def chunk_logits(self, examples: Sequence[Example], compute: ComputeConfig) -> list[Array]:
        items = self.task.encode(examples)
        if isinstance(self.task, HeadTask):
            logits = self.task.compute_logits(self.model, items, compute, PREDICT_BATCH_SIZE)
        else:  # answers as text: probabilities of the labels, or a number
            predictions = self.task.predict(self.model, items, compute, PREDICT_BATCH_SIZE)
            if self.task.name == "regress":
                return [np.array([p.prediction], np.float32) for p in predictions]
            scores = [np.array(list((p.scores or {}).values())) for p in predictions]
            logits = [np.log(np.maximum(p_C, 1e-30)) for p_C in scores]
            logits = [x_C if self.task.name == "choice" else x_C[None] for x_C in logits]
        return [x[:, self.label_order] if self.label_order else x for x in (x.astype(np.float32) for x in logits)]


def load_teacher(checkpoint: str, task: HeadTask, compute: ComputeConfig) -> Teacher:
    facts = read_teacher_facts(checkpoint, task)
    if isinstance(task, SpanQATask):
        facts = {**facts, "max_seq_length": task.template.max_length}  # the same windows
    with quiet():
        model, own, _ = load_finetuned(checkpoint, metadata=facts)
    assert isinstance(own, HeadTask | VerbalizedTask)
    order = [own.labels.index(label) for label in task.labels] if task.name != "regress" else []
    return Teacher(model.to(compute.device).requires_grad_(False), own, order)


@dataclass(frozen=True)
class TeacherNote:
    """teacher.json: a checksum of teacher, examples and labels, and one of the teacher's logits."""

    key: str
    sha256: str  # of teacher.npy


def with_soft_labels(
    recipe: FinetuneRecipe,
    task: HeadTask,
    examples: Sequence[Example],
    items: Sequence[EncodedExample],
    compute: ComputeConfig,
    folder: Path,
) -> list[EncodedExample]:
    """Return the items with the teacher's logits, computed now or read from the run's folder."""
    ends = np.cumsum([task.num_labels(item) for item in items])
    settings = [weights_checksum(recipe.teacher), checksum_examples(examples), int(ends[-1]), *task.labels]
    key, note = f"{crc32(repr(settings).encode()):08x}", read_intermediate(folder / TEACHER_FILE, TeacherNote)
    if note is not None and note.key == key and has_checksum(folder / TEACHER_LOGITS_FILE, note.sha256):
        logits_A = np.load(folder / TEACHER_LOGITS_FILE, allow_pickle=False)
    else:
        say(f"the teacher {recipe.teacher} labels {format_count(len(examples), 'example')}")
        logits_A = np.concatenate(load_teacher(recipe.teacher, task, compute).logits(examples, compute))
        if len(logits_A) != ends[-1]:
            raise UserError(
                f"{recipe.teacher} splits the texts otherwise than {recipe.checkpoint}: it cannot teach it."
            )
        if not np.isfinite(logits_A).all():
            raise UserError(f"{recipe.teacher} predicts NaN or Inf: it cannot be a teacher.")
        write_npy(folder / TEACHER_LOGITS_FILE, logits_A)
        note = TeacherNote(key, file_sha256(folder / TEACHER_LOGITS_FILE))
        write_intermediate(folder / TEACHER_FILE, asdict(note))
    return [replace(item, soft_label=x) for item, x in zip(items, np.split(logits_A, ends[:-1]), strict=True)]


def has_checksum(file: Path, sha256: str) -> bool:
    """Whether a file is as it was written; else, with a warning, it is made again."""
    if file.is_file() and file_sha256(file) == sha256:
        return True
    warn(f"{file} is missing or does not match its checksum. It is made again.")
    return False


def weights_checksum(checkpoint: str) -> str:
    folder = Path(checkpoint)
    return " ".join(file_sha256(folder / name)[:16] for name in find_weight_files(folder))


# --- teacher and student side by side ---------------------------------------------------------------------------------


def compare_models(
    recipe: FinetuneRecipe,
    task: HeadTask,
    dev: Sequence[Example],
    results: Mapping[str, Any],
    compute: ComputeConfig,
    folder: Path,
) -> dict[str, dict[str, Any]]:
    """Return score, parameters, latency and size of teacher, student alone (the baseline run, if any) and student."""
    metric, teacher = deciding_metric(recipe, task), load_teacher(recipe.teacher, task, compute)
    predictions = teacher.task.predict(teacher.model, teacher.task.encode(dev), compute, PREDICT_BATCH_SIZE)
    score = task.score(dev, predictions)[metric]
    models = {
        "teacher": {"checkpoint": recipe.teacher, "mean": score, "std": None, "seeds": [score]}
        | measure_model(teacher.model, teacher.task, dev, compute, Path(recipe.teacher))
    }
    runs = (
        {"student alone": Path(recipe.baseline), "student distilled": folder}
        if is_student_alone(recipe)
        else {"student distilled": folder}
    )
    for name, run in runs.items():
        found = results if run == folder else read_object(run / "results.json")
        with quiet():
            student = load_finetuned(run / "final")
        models[name] = {"checkpoint": str(run / "final"), **{key: found[key] for key in ("mean", "std", "seeds")}}
        models[name] |= measure_model(student.model.to(compute.device), student.task, dev, compute, run / "final")
    return models


def is_student_alone(recipe: FinetuneRecipe) -> bool:
    """Whether the baseline is a run of the same checkpoint without a teacher."""
    file = Path(recipe.baseline) / "recipe.yaml"
    if not recipe.baseline or not file.is_file() or not (Path(recipe.baseline) / "final").is_dir():
        return False
    other = read_yaml_mapping(file)
    return not other.get("teacher") and other.get("checkpoint") == recipe.checkpoint


def measure_model(
    model: Model, task: Task, examples: Sequence[Example], compute: ComputeConfig, folder: Path
) -> dict[str, Any]:
    """Return the parameters of a model, its milliseconds per example and the bytes of its weights.

    Both latencies are medians after a warm-up: another program on the machine disturbs a few timings, seldom most.
    """
    single = list(examples[:LATENCY_EXAMPLES])

    def seconds(some: Sequence[Example], batch_size: int) -> float:
        began = time.perf_counter()
        task.predict(model, task.encode(some), compute, batch_size)
        return time.perf_counter() - began

    for e in single[:WARMUP_EXAMPLES]:
        seconds([e], 1)
    many = list(examples[:LATENCY_BATCH_EXAMPLES])
    seconds(many, LATENCY_BATCH_SIZE)
    in_batches = median(seconds(many, LATENCY_BATCH_SIZE) for _ in range(LATENCY_REPEATS))
    return {
        "parameters": model.num_parameters,
        "ms_per_example": 1000 * median(seconds([e], 1) for e in single),
        "ms_per_example_in_batches": 1000 * in_batches / len(many),
        "bytes": sum((folder / name).stat().st_size for name in find_weight_files(folder)),
        "device": compute.device.type,
    }
