"""Distillation for tasks: the loss by hand, the teacher's labels, copies with other words, exact resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tasks.conftest import write_jsonl
from tasks.small import CPU, model_for, parts
from tasks.test_multihead import EXAMPLES, stop_after

import firth
from firth.core.errors import UserError
from firth.models import load_model, read_config
from firth.models.task_distill import TaskDistillation
from firth.tasks import distill
from firth.tasks.augment import augment_examples, whole_words
from firth.tasks.distill import load_teacher, with_soft_labels
from firth.tasks.head_task import HeadTask
from firth.tasks.registry import make_task
from firth.tasks.shape_buckets import BatchShape, batch_shape, pad_batch
from firth.text import Example
from firth.tokens import load_tokenizer
from firth.train.folder import check_run_folder

T = 3.0


def kl_by_hand(teacher: Any, student: Any) -> float:
    """t^2 * sum p (log p - log q), for the classes of one target."""
    p, q = (np.exp(np.asarray(x, np.float64) / T) for x in (teacher, student))
    p, q = p / p.sum(), q / q.sum()
    return float(T**2 * (p * (np.log(p) - np.log(q))).sum())


def test_latencies_are_medians_after_a_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock: 1 ms per example, and 9 s more in the first calls and in every third one later."""
    now, calls = 0.0, Counter[int]()

    def predict(model: Any, items: list[Any], compute: Any, batch_size: int) -> list[Any]:
        nonlocal now
        calls[len(items)] += 1
        late = calls[len(items)] == 1 or calls[len(items)] % 3 == 0
        now += 0.001 * len(items) + 9.0 * late
        return []

    monkeypatch.setattr(distill.time, "perf_counter", lambda: now)
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    task: Any = SimpleNamespace(encode=list, predict=predict)
    model: Any = SimpleNamespace(num_parameters=7)
    found = distill.measure_model(model, task, [Example(i, ("a",)) for i in range(64)], CPU, tmp_path)
    assert found["ms_per_example"] == pytest.approx(1)
    assert found["ms_per_example_in_batches"] == pytest.approx(1)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_loss_by_hand(family: str, name: str) -> None:
    """The soft loss of every head, from the student's own logits; and that of rows that are split or padded."""
    config, tokenizer = parts(family)
    kind, examples = EXAMPLES[name]
    task = make_task(kind, examples, tokenizer, config, firth.tasks.FinetuneRecipe(max_seq_length=32))
    assert isinstance(task, HeadTask)
    model = model_for(task, config).eval()
    model.tokenizer = task.tokenizer
    items = list(task.encode(examples))
    student = task.compute_logits(model, items, CPU, 4)
    rng = np.random.default_rng(0)
    teacher = [rng.normal(size=x.shape).astype(np.float32) for x in student]
    items = [replace(item, soft_label=x) for item, x in zip(items, teacher, strict=True)]
    expected, count = 0.0, 0
    for item, x, y in zip(items, teacher, student, strict=True):
        if kind == "regress":
            expected, count = expected + float((x - y)[0] ** 2), count + 1
        elif kind == "choice":
            expected, count = expected + kl_by_hand(x, y), count + 1
        elif kind == "span-qa":
            window, sequence = item.windows[0], item.sequences[0]
            allowed = [
                *sequence.target_positions,
                *range(window.sequence_start, window.sequence_start + window.num_tokens),
            ]
            expected += sum(kl_by_hand(x[allowed, i], y[allowed, i]) for i in (0, 1)) / 2
            count += 1
        else:
            expected, count = expected + sum(map(kl_by_hand, x, y)), count + len(x)
    batch = task.collate(items)
    plain = model.losses(batch.to(CPU.device))
    assert batch.loss_counts["soft_targets"] == count
    model.distillation = TaskDistillation(0.25, T)
    found = model.losses(batch.to(CPU.device))
    assert found["soft_targets"].item() == pytest.approx(0.25 * expected, rel=1e-5, abs=1e-6)
    assert found["targets"].item() == pytest.approx(0.75 * plain["targets"].item(), rel=1e-6)
    assert found["soft_loss/soft_targets"].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # padded to another shape, as for a CUDA graph
    rows, width, decoder_width, slots = batch_shape(batch)
    padded = pad_batch(batch, BatchShape(rows + 1, width + 3, decoder_width, slots * 2), tokenizer.vocab.pad)
    assert padded.loss_counts["soft_targets"] == count
    assert model.losses(padded.to(CPU.device))["soft_targets"].item() == pytest.approx(
        0.25 * expected, rel=1e-4, abs=1e-6
    )


RUN: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 8, "seeds": 1, "device": "cpu", "save_steps": 2}
RUN |= {"max_seq_length": 32, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def teacher(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A teacher with another tokenizer than the student's."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    options = RUN | {"max_steps": 40, "learning_rate": 3e-3}
    firth.finetune(checkpoint_of("roberta"), "classify", toy["train"], toy["dev"], out, **options)
    return out / "final"


@pytest.fixture(scope="module")
def unlabeled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"text": f"We saw the {word} at noon"} for word in ("cat", "fox", "river")]
    return write_jsonl(tmp_path_factory.mktemp("unlabeled") / "more.jsonl", rows)


def run_student(toy: dict[str, Path], checkpoint: Path, out: Path, **options: Any) -> dict[str, Any]:
    return firth.finetune(checkpoint, "classify", toy["train"], toy["dev"], out, **RUN | options)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run / "final").state_dict()


def test_alpha_0_is_plain_fine_tuning_bit_for_bit(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], teacher: Path, tmp_path: Path
) -> None:
    student, before = checkpoint_of("bert"), weights(teacher.parent)
    result = run_student(toy, student, tmp_path / "zero", teacher=str(teacher), distill_alpha=0.0, against="alone")
    half = run_student(toy, student, tmp_path / "half", teacher=str(teacher), distill_alpha=0.5)
    alone, zero = (weights(tmp_path / "zero" / arm) for arm in ("alone", "finetuned"))
    taught = weights(tmp_path / "half")
    assert all(torch.equal(alone[name], zero[name]) for name in alone)
    assert any(not torch.equal(alone[name], taught[name]) for name in alone)
    after = weights(teacher.parent)
    assert all(torch.equal(before[name], after[name]) for name in before), "the teacher does not change"
    # the table: teacher, student alone (the baseline), student distilled
    table = result["distillation"]
    assert list(table) == ["teacher", "student alone", "student distilled"]
    assert table["student alone"]["mean"] == table["student distilled"]["mean"]
    for row in table.values():
        assert row["ms_per_example"] > 0
        assert row["parameters"] * 4 <= row["bytes"]
    scored = firth.api.evaluate(teacher, None, toy["dev"], tmp_path / "scored")
    assert table["teacher"]["mean"] == scored["metrics"]["accuracy"]
    assert list(half["distillation"]) == ["teacher", "student distilled"]
    assert "Distillation" in Path(result["report"]).read_text(encoding="utf-8")


def test_the_teacher_labels_with_its_own_tokenizer(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], teacher: Path, tmp_path: Path
) -> None:
    config, tokenizer = read_config(checkpoint_of("bert")), load_tokenizer(checkpoint_of("bert"))
    examples = [Example(0, ("I saw the cat today",), "animal"), Example(1, ("We like the river",), "place")]
    recipe = firth.tasks.FinetuneRecipe(checkpoint=str(checkpoint_of("bert")), teacher=str(teacher), max_seq_length=32)
    task = make_task("classify", examples, tokenizer, config, recipe)
    assert isinstance(task, HeadTask)
    items = with_soft_labels(recipe, task, examples, task.encode(examples), CPU, tmp_path)
    expected = firth.predict(teacher, [e.texts[0] for e in examples])
    for item, record in zip(items, expected, strict=True):
        assert item.soft_label is not None
        probability = torch.tensor(item.soft_label[0]).softmax(-1).tolist()
        assert dict(zip(task.labels, probability, strict=True)) == pytest.approx(record["probabilities"], abs=1e-4)
    model = load_teacher(str(teacher), task, CPU).model
    assert not any(p.requires_grad for p in model.parameters())
    # stored, and read again
    (tmp_path / "teacher.npy").chmod(0o600)
    stored = np.load(tmp_path / "teacher.npy")
    again = with_soft_labels(recipe, task, examples, task.encode(examples), CPU, tmp_path)
    assert np.array_equal(np.concatenate([item.soft_label for item in again]), stored)


def test_unlabelled_text_and_copies_and_exact_resume(
    toy: dict[str, Path],
    checkpoint_of: Callable[[str], Path],
    teacher: Path,
    unlabeled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    student = checkpoint_of("bert")
    options = {"teacher": str(teacher), "unlabeled": str(unlabeled), "augment": 2, "distill_alpha": 0.8, "shots": 12}
    run_student(toy, student, tmp_path / "whole", **options)
    copies = [json.loads(line) for line in (tmp_path / "whole" / "augmented.jsonl").read_text().splitlines()]
    assert 12 <= len(copies) <= 24
    assert len(np.load(tmp_path / "whole" / "teacher.npy")) == 12 + 3 + len(copies)
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run_student(toy, student, tmp_path / "cut", **options)
    monkeypatch.undo()
    made = (tmp_path / "cut" / "augmented.jsonl").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run_student(toy, student, tmp_path / "cut", resume=True, **options)
    assert (tmp_path / "cut" / "augmented.jsonl").stat().st_mtime_ns == made, "copies are not made again"
    for name in ("augmented.jsonl", "teacher.npy"):
        data = (tmp_path / "cut" / name).read_bytes()
        (tmp_path / "cut" / name).write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    run_student(toy, student, tmp_path / "cut", resume=True, **options)
    said = " ".join(capsys.readouterr().err.split())
    for name in ("augmented.jsonl", "teacher.npy"):
        assert f"{name} is missing or does not match its checksum. It is made again." in said
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    check_run_folder(tmp_path / "cut", resume=False, overwrite=True, inputs=())  # all its files are a run's
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(a[name], b[name]) for name in a)
    unlabeled_text = unlabeled.read_text()
    unlabeled.write_text(unlabeled_text.replace("cat", "dog"))
    with pytest.raises(UserError, match="has changed since"):
        run_student(toy, student, tmp_path / "cut", resume=True, **options)
    unlabeled.write_text(unlabeled_text)


def test_copies_have_other_words_and_are_a_function_of_the_seed(checkpoint_of: Callable[[str], Path]) -> None:
    model = load_model(checkpoint_of("bert"))
    assert model.tokenizer is not None
    words = set(whole_words(model.tokenizer).values())
    assert {"cat", "river", "the"} <= words
    examples = [Example("x", ("We like the river", "I saw the cat, again")), Example("y", ("Anna",))]
    copies = augment_examples(examples, "pair", model, CPU, 4, 0.5, seed=1)
    assert copies == augment_examples(examples, "pair", model, CPU, 4, 0.5, seed=1)
    assert copies != augment_examples(examples, "pair", model, CPU, 4, 0.5, seed=2)
    own = [c.example for c in copies if c.source == 0]
    assert len({e.texts for e in own}) == len(own) > 1
    for example in own:
        assert example.target is None
        assert example.texts != examples[0].texts
        assert ", " in example.texts[1], "only words change"
        changed = [
            (a, b)
            for a, b in zip(" ".join(examples[0].texts).split(), " ".join(example.texts).split(), strict=True)
            if a != b
        ]
        assert all(b.strip(",") in words and a.strip(",").lower() != b.strip(",").lower() for a, b in changed)
    tagged = [Example(0, ("We", "like", "the", "river"), ("O", "O", "O", "N"))]
    copies = augment_examples(tagged, "tag", model, CPU, 3, 0.9, seed=1)
    assert all(len(c.example.texts) == 4 for c in copies)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"augment": 2}, "augment needs a teacher"),
    "alpha": ({"teacher": "T", "distill_alpha": 1.5}, "distill_alpha is 1.5"),
    "temperature": ({"teacher": "T", "distill_temperature": 0.0}, "distill_temperature is 0"),
    "labels alone": ({"teacher": "T", "distill_alpha": 0.0, "augment": 1}, "labels alone"),
    "not fine-tuned": ({"teacher": "bert"}, "is not fine-tuned for a task"),
    "another task": ({"teacher": "T", "task": "regress"}, "fine-tuned for classify, and cannot teach regress"),
    "no masked language model": ({"teacher": "T", "augment": 1, "augment_model": "gpt2"}, "--augment-model"),
    "nothing to be alone of": ({"against": "alone"}, "add --teacher FINETUNED"),
    "no such file": ({"teacher": "T", "unlabeled": "none.jsonl"}, "none.jsonl"),
    "a bad row": ({"teacher": "T", "unlabeled": "BAD"}, r"bad.jsonl:2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(
    name: str, toy: dict[str, Path], checkpoint_of: Callable[[str], Path], teacher: Path, tmp_path: Path
) -> None:
    changes, message = MISTAKES[name]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": "b"}\n')
    places = {
        "T": str(teacher),
        "bert": str(checkpoint_of("bert")),
        "gpt2": str(checkpoint_of("gpt2")),
        "BAD": str(bad),
    }
    options = {k: places.get(v, v) if isinstance(v, str) else v for k, v in changes.items()}
    task = options.pop("task", "classify")
    with pytest.raises(UserError, match=message):
        firth.finetune(checkpoint_of("bert"), task, toy["train"], toy["dev"], tmp_path / "run", **RUN | options)
    assert not (tmp_path / "run").exists()


def test_other_labels_are_refused(
    toy: dict[str, Path], checkpoint_of: Callable[[str], Path], teacher: Path, tmp_path: Path
) -> None:
    rows = [{"text": f"a {w}", "label": w} for w in ("cat", "dog")] * 4
    file = write_jsonl(tmp_path / "other.jsonl", rows)
    with pytest.raises(UserError, match=r"knows the labels animal, place, and train has cat, dog"):
        firth.finetune(checkpoint_of("bert"), "classify", file, file, tmp_path / "run", **RUN, teacher=str(teacher))
    assert not (tmp_path / "run").exists()


def test_trials_of_rates_hold_out_labelled_examples_and_their_copies(
    toy: dict[str, Path],
    checkpoint_of: Callable[[str], Path],
    teacher: Path,
    unlabeled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from firth.tasks import rate_trial, trial_runs

    monkeypatch.setattr(rate_trial, "MIN_HELD_OUT_EXAMPLES", 8)
    monkeypatch.setattr(rate_trial, "MIN_TRIAL_STEPS", 1)
    made: list[trial_runs.TrialRuns] = []
    original = trial_runs.TrialRuns.__init__

    def init(self: trial_runs.TrialRuns, job: Any) -> None:
        original(self, job)
        made.append(self)

    monkeypatch.setattr(trial_runs.TrialRuns, "__init__", init)
    options = {"teacher": str(teacher), "unlabeled": str(unlabeled), "augment": 1, "learning_rate": "auto"}
    result = run_student(toy, checkpoint_of("bert"), tmp_path / "run", **options | {"max_steps": 10})
    assert not result["learning_rate_trial"]["skipped"]
    (trial,) = made
    indices, data = trial.job.train_indices[0], trial.job.data
    labelled = len(data.train)
    held_out = {indices[i] for i in trial.held_out}
    assert all(i < labelled for i in held_out)
    seen = [indices[i] for i in trial.train]
    assert not held_out & set(seen)
    copied = [data.extra[i - labelled].source for i in seen if i >= labelled]
    assert copied.count(None) == 3
    assert not held_out & set(copied)
    assert len(seen) + len(held_out) < len(indices), "copies of held-out examples are in neither part"
