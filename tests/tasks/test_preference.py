"""Preference tuning: the losses by their equations and beside TRL, labels, resume, bad input."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tasks.small import CPU, WORDS, assert_equal_gradients, model_for, parts
from tasks.test_resume import stop_in_seed

import firth
from firth.core.errors import UserError
from firth.evaluate.report import write_run_report
from firth.models import Model, load_model, make_model
from firth.tasks import FinetuneRecipe, finetune, make_task
from firth.tasks.preference import (
    BAD,
    GOOD,
    LossName,
    PreferenceConfig,
    PreferenceLoss,
    PreferenceTask,
    is_preferred,
    list_answers,
    with_references,
)
from firth.text import Example, read_labelled
from firth.tokens import Tokenizer
from firth.train.folder import check_run_folder
from firth.train.step_runner import metric_means

PAIRS = [
    Example(0, ("user", "the cat lives"), references=("near the river", "not near the blue garden and the fox")),
    Example(1, ("system", "big", "user", "a dog"), references=("is small and red", "is")),
    Example(2, ("user", "fox", "assistant", "red", "user", "and the horse"), references=("is blue", "lives near")),
]
LABELLED = [
    Example(0, ("user", "the cat lives"), True, references=("near the river",)),
    Example(1, ("user", "a dog"), False, references=("is",)),
    Example(2, ("user", "a fox"), True, references=("is red and small",)),
    Example(3, ("user", "horse"), True, references=("lives",)),
]
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}),
    ("ipo", {}),
    ("hinge", {"beta": 0.5}),
    ("simpo", {"simpo_gamma": 0.5}),
    ("orpo", {}),
    ("orpo", {"orpo_sft": "all", "beta": 0.3}),
]


def made(
    loss: str, examples: list[Example] = PAIRS, family: str = "llama", **fields: Any
) -> tuple[PreferenceTask, Model]:
    config, tokenizer = parts(family)
    recipe = FinetuneRecipe(task="preference", max_seq_length=64, preference_loss=loss or None, **fields)  # type: ignore[arg-type]
    task = make_task("preference", examples, tokenizer, config, recipe)
    assert isinstance(task, PreferenceTask)
    model = model_for(task, config)
    model.tokenizer = task.tokenizer
    return task, model


def other(model: Model) -> Model:
    """A model with other weights: a reference that differs from the policy."""
    moved = model.clone()
    torch.manual_seed(1)
    for p in moved.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    return moved


def referenced(task: PreferenceTask, reference: Model, examples: list[Example]) -> list[Any]:
    items = task.encode(examples)
    return with_references(items, task.answer_logps(reference, list_answers(items), CPU, 2).tolist())


def answer_logp(model: Model, task: PreferenceTask, example: Example, text: str) -> tuple[torch.Tensor, int]:
    """The log-likelihood of an answer and its end by a plain forward pass, without packing; its tokens."""
    messages = [*task.parse_prompt(example), ("assistant", text)]
    prompt = task.chat_template.render(messages[:-1], True)
    whole = task.chat_template.render(messages)
    ids = task.tokenizer.backend.encode(whole, add_special_tokens=False).ids
    begin = len(task.tokenizer.backend.encode(prompt, add_special_tokens=False).ids)
    logits = model(torch.tensor([ids]))
    logits = getattr(logits, "logits", logits)
    logp = F.log_softmax(logits[0, begin - 1 : -1].float(), -1)
    return logp.gather(1, torch.tensor(ids[begin:])[:, None]).sum(), len(ids) - begin


def mean_dialogue_logp(model: Model, task: PreferenceTask, example: Example) -> torch.Tensor:
    """The mean log-likelihood of all tokens of the prompt and the chosen answer but the first."""
    text = task.chat_template.render([*task.parse_prompt(example), ("assistant", example.references[0])])
    ids = torch.tensor([task.tokenizer.backend.encode(text, add_special_tokens=False).ids])
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return -F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])


def mean_loss(loss: PreferenceLoss, batch: Any) -> torch.Tensor:
    return loss(batch.to(CPU.device))["targets"] / batch.num_targets


@pytest.mark.parametrize(("name", "fields"), LOSSES)
def test_the_losses_follow_their_equations(name: str, fields: dict[str, Any]) -> None:
    task, model = made(name, **fields)
    reference = other(model)
    items = referenced(task, reference, PAIRS)
    found = mean_loss(PreferenceLoss(model, task.preference, CPU.device), task.collate(items))
    beta, expected = task.preference.beta, []
    for e in PAIRS:
        (p_c, n_c), (p_r, n_r) = (answer_logp(model, task, e, text) for text in e.references)
        (q_c, _), (q_r, _) = (answer_logp(reference, task, e, text) for text in e.references)
        d = (p_c - q_c) - (p_r - q_r)
        if name == "dpo":
            s = fields.get("label_smoothing", 0.0)
            expected.append(-(1 - s) * F.logsigmoid(beta * d) - s * F.logsigmoid(-beta * d))
        elif name == "ipo":
            expected.append(((p_c - q_c) / n_c - (p_r - q_r) / n_r - 1 / (2 * beta)) ** 2)
        elif name == "hinge":
            expected.append((1 - beta * d).clamp(min=0))
        elif name == "simpo":
            expected.append(-F.logsigmoid(beta * (p_c / n_c - p_r / n_r) - 0.5))
        else:
            odds = [torch.exp(p / n) / (1 - torch.exp(p / n)) for p, n in ((p_c, n_c), (p_r, n_r))]
            sft = mean_dialogue_logp(model, task, e) if fields else p_c / n_c
            expected.append(-sft - beta * F.logsigmoid(torch.log(odds[0] / odds[1])))
    assert found.item() == pytest.approx(torch.stack(expected).mean().item(), abs=2e-5)


def test_the_first_loss_of_dpo_is_ln_2_and_only_the_last_answer_is_learned() -> None:
    task, model = made("dpo")
    items = referenced(task, model, PAIRS)
    assert mean_loss(PreferenceLoss(model, task.preference, CPU.device), task.collate(items)).item() == pytest.approx(
        math.log(2), abs=1e-5
    )
    (chosen, _) = items[2].answers  # two answers of the assistant; the first belongs to the prompt
    ids, positions = chosen.sequence
    learned = task.tokenizer.backend.decode([ids[t + 1] for t in positions], skip_special_tokens=True)
    assert learned.strip() == "is blue"
    assert ids[positions[-1] + 1] == task.template.eos_id, "the end of the answer is learned too"


@pytest.mark.parametrize(
    ("name", "fields", "examples"),
    [
        *((name, {}, PAIRS) for name in get_args(LossName)),
        ("orpo", {"orpo_sft": "all"}, PAIRS),
        ("kto", {"beta": 1.0}, [*LABELLED, *PAIRS]),
    ],
)
def test_micro_batches_of_any_size_give_the_same_gradient(
    name: str, fields: dict[str, Any], examples: list[Example]
) -> None:
    task, model = made(name, examples, **fields)
    items = referenced(task, other(model), examples)
    loss = PreferenceLoss(model, task.preference, CPU.device)
    if name == "kto":
        loss.update_kl([task.collate_mismatched(items)], CPU)
        whole = loss.kl.item()
        loss.update_kl([task.collate_mismatched([item]) for item in items], CPU)
        assert loss.kl.item() == pytest.approx(whole, abs=1e-5)

    def gradient(groups: list[list[Any]]) -> torch.Tensor:
        model.zero_grad()
        batches = [task.collate(group) for group in groups]
        count = sum(batch.num_targets for batch in batches)
        for batch in batches:
            (loss(batch.to(CPU.device))["targets"] / count).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradient([items])
    assert expected.abs().max() > 1e-3
    for size in (1, 2):
        groups = [items[i : i + size] for i in range(0, len(items), size)]
        assert torch.allclose(expected, gradient(groups), atol=1e-6)


@pytest.mark.parametrize("examples", [PAIRS, LABELLED])
def test_kto_by_its_equation(examples: list[Example]) -> None:
    task, model = made("kto", examples)
    reference = other(model)
    items = referenced(task, reference, examples)
    loss = PreferenceLoss(model, task.preference, CPU.device)
    loss.update_kl([task.collate_mismatched([item]) for item in items], CPU)
    with torch.no_grad():
        changes, values = [], []
        for i, e in enumerate(examples):
            text = examples[(i + 1) % len(examples)].references[0]
            changes.append(answer_logp(model, task, e, text)[0] - answer_logp(reference, task, e, text)[0])
        z = torch.stack(changes).mean().clamp(min=0)
        assert loss.kl.item() == pytest.approx(z.item(), abs=1e-4)
        for e in examples:
            sides = (GOOD, BAD) if len(e.references) == 2 else (GOOD if e.target else BAD,)
            for side, text in zip(sides, e.references, strict=True):
                r = answer_logp(model, task, e, text)[0] - answer_logp(reference, task, e, text)[0]
                values.append(1 - torch.sigmoid(0.1 * ((r - z) if side == GOOD else (z - r))))
    assert mean_loss(loss, task.collate(items)).item() == pytest.approx(torch.stack(values).mean().item(), abs=1e-5)


def test_z_of_kto_takes_the_answer_of_another_prompt() -> None:
    """The next row often has the other answer to the same prompt: its likelihood is no measure of the drift."""
    first, second = LABELLED[0].texts, LABELLED[1].texts
    rows = [(first, True, "near the river"), (first, False, "is"), (second, True, "red"), (second, False, "blue")]
    examples = [Example(i, prompt, good, references=(text,)) for i, (prompt, good, text) in enumerate(rows)]
    task, _ = made("kto", examples)
    found = []
    for item in task.encode(examples):
        assert item.mismatched is not None
        sequence = item.mismatched.sequence
        found.append(task.tokenizer.decode([sequence.ids[t + 1] for t in sequence.target_positions]).strip())
    assert found == ["red", "red", "near the river", "near the river"]


GOOD_GOOD_BAD_BAD = [e._replace(target=good) for e, good in zip(LABELLED, (True, True, False, False), strict=True)]


@pytest.mark.parametrize("examples", [LABELLED, GOOD_GOOD_BAD_BAD, [*LABELLED, *PAIRS], LABELLED[2:], PAIRS])
def test_the_figures_of_kto_are_those_of_the_same_answers_on_dev(examples: list[Example]) -> None:
    """A good answer that is followed by another example's bad one is no pair."""
    task, model = made("kto", examples)
    items = referenced(task, other(model), examples)
    loss = PreferenceLoss(model, task.preference, CPU.device)
    parts, counts = Counter[str](), Counter[str]()
    for some in (items[:3], items[3:]):
        if some:
            batch = task.collate(some)
            parts.update({name: value.item() for name, value in loss(batch.to(CPU.device)).items()})
            counts.update(batch.loss_counts)
    assert counts["answer_pairs"] == sum(len(e.references) == 2 for e in examples)
    divisors = {name: torch.tensor(float(count)) for name, count in counts.items()}
    found = {name: float(value) for name, value in metric_means(parts, divisors).items()}
    scores = task.score(examples, task.predict(model, items, CPU, 8))
    for name in ("reward_chosen", "reward_rejected"):
        assert found[name] == pytest.approx(scores[name], abs=1e-5, nan_ok=True)
    hits = [is_preferred(p.prediction) for p in task.predict(model, items, CPU, 8)]
    answers = [hit for hit, e in zip(hits, examples, strict=True) for _ in e.references]
    assert found["accuracy"] == pytest.approx(np.mean(answers))
    if examples is PAIRS:
        assert found["margin"] == pytest.approx(scores["margin"], abs=1e-5)
    assert scores["margin"] == pytest.approx(scores["reward_chosen"] - scores["reward_rejected"], nan_ok=True)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "hinge", "kto"])
def test_dev_has_the_kl_of_kto_for_every_loss_with_a_reference(loss: str) -> None:
    task, model = made(loss)
    reference = other(model)
    items = task.with_mismatched(task.encode(PAIRS), PAIRS)
    items = with_references(items, task.answer_logps(reference, list_answers(items), CPU, 2).tolist())
    policy, changes = other(reference), []
    with torch.no_grad():
        for i, e in enumerate(PAIRS):
            text = PAIRS[(i + 1) % len(PAIRS)].references[0]
            p, q = (answer_logp(m, task, e, text)[0].item() for m in (policy, reference))
            changes.append(p - q)
    for sign in (1, -1):
        scores = task.score(PAIRS, task.predict(policy, items, CPU, 2))
        assert scores["kl"] == pytest.approx(max(0.0, sign * np.mean(changes)), abs=1e-4)
        items = with_references(items, task.answer_logps(policy, list_answers(items), CPU, 2).tolist())
        policy = reference


def test_scores_and_predictions() -> None:
    task, model = made("dpo")
    reference = other(model)
    items = referenced(task, reference, PAIRS)
    predictions = task.predict(model, items, CPU, 2)
    scores = task.score(PAIRS, predictions)
    rewards = []
    for e, p in zip(PAIRS, predictions, strict=True):
        for side, text in enumerate(e.references):
            with torch.no_grad():
                r = answer_logp(model, task, e, text)[0] - answer_logp(reference, task, e, text)[0]
            assert p.prediction[side]["reward"] == pytest.approx(0.1 * r.item(), abs=1e-4)
            rewards.append(0.1 * r.item())
    margins = np.array(rewards[::2]) - np.array(rewards[1::2])
    assert scores["accuracy"] == pytest.approx((margins > 0).mean())
    assert scores["margin"] == pytest.approx(margins.mean(), abs=1e-4)
    assert is_preferred([{"side": BAD, "reward": -1.0}])
    assert not is_preferred([{"side": GOOD, "reward": -1.0}])


ROWS = [
    {"prompt": f"the {animal}", "chosen": "is red and small", "rejected": "is blue"} for animal in ("cat", "dog", "fox")
] * 8
SINGLE_ROWS = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in ROWS
    for name in ("chosen", "rejected")
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, tokenizer = parts("llama")
    task = make_task("lm", [PAIRS[0]], tokenizer, config, FinetuneRecipe(max_seq_length=32))
    model = model_for(task, config)
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("preference") / "llama"
    model.save(folder)
    return folder


@pytest.mark.parametrize(("loss", "rows"), [("dpo", "pairs"), ("kto", "pairs"), ("kto", "single")])
def test_tuning_prefers_the_chosen_answers_and_resumes_exactly(
    loss: str, rows: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", ROWS if rows == "pairs" else SINGLE_ROWS)
    recipe = FinetuneRecipe(
        checkpoint=str(checkpoint),
        task="preference",
        train=str(data),
        dev=str(data),
        output_dir=str(tmp_path / "run"),
        preference_loss=loss,  # type: ignore[arg-type]
        max_seq_length=32,
        seeds=1,
        max_steps=16,
        save_steps=4,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        device="cpu",
    )
    found = finetune(recipe)
    assert json.loads((tmp_path / "run" / "seed-0" / "results.json").read_text())["scores"]["kl"] >= 0
    assert firth.doctor(tmp_path / "run")["not_examined"] == []
    assert found["mean"] == 1.0 if rows == "pairs" else found["mean"] > 0.6
    log = [json.loads(line) for line in (tmp_path / "run" / "seed-0" / "log.jsonl").read_text().splitlines()]
    check_run_folder(tmp_path / "run", resume=False, overwrite=True, inputs=())  # all its files are a run's
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2) if loss == "dpo" else 0.5, abs=0.02)
    assert losses[-1] < losses[0]
    figures = {"accuracy", "reward_chosen", "reward_rejected"} | ({"margin"} if rows == "pairs" else set())
    assert all(figures <= set(line) for line in log if "loss" in line)
    assert json.loads((tmp_path / "run" / "final" / "task.json").read_text())["task"] == "lm", "it stays a chat model"
    stopped = replace(recipe, output_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        stop_in_seed(patch, "seed-0", 9)
        with pytest.raises(KeyboardInterrupt):
            finetune(stopped)
    finetune(stopped, resume=True)
    ours, theirs = (load_model(tmp_path / name / "final") for name in ("run", "stopped"))
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_answers_are_compared_without_the_dropout_of_the_checkpoint(task: str, tmp_path: Path) -> None:
    """The first loss of a run is ln 2, and its figures are those on dev. The config keeps its dropout."""
    config, tokenizer = parts("gpt2")
    config = replace(config, dropout=0.5, attention_dropout=0.5, mlp=replace(config.mlp, dropout=0.5))
    torch.manual_seed(0)
    model = make_model(config)
    model.tokenizer = tokenizer
    model.save(tmp_path / "base")
    recipe = small_recipe(tmp_path / "base", tmp_path, ROWS[:4], max_steps=2, learning_rate=1e-9)
    finetune(replace(recipe, task=task))
    log = [json.loads(line) for line in (tmp_path / "run" / "seed-0" / "log.jsonl").read_text().splitlines()]
    dev = json.loads((tmp_path / "run" / "seed-0" / "results.json").read_text())["scores"]
    assert log[0]["margin"] == pytest.approx(dev["margin"], abs=1e-5)
    if task == "preference":
        assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    tuned = load_model(tmp_path / "run" / "final")
    assert (tuned.config.dropout, tuned.config.attention_dropout, tuned.config.mlp_dropout) == (0.5, 0.5, 0.5)


def test_after_a_rewind_kto_estimates_z_from_the_examples_of_the_step(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[list[Any]]] = {"collate": [], "collate_mismatched": []}

    def record(name: str, original: Any) -> None:
        def collate(task: PreferenceTask, items: Any) -> Any:
            read[name].append([item.answers[0].sequence.ids for item in items])
            return original(task, items)

        monkeypatch.setattr(PreferenceTask, name, collate)

    for name in read:
        record(name, getattr(PreferenceTask, name))
    rows = [{"prompt": word, "completion": "is red", "label": True} for word in WORDS]
    fields: dict[str, Any] = {"per_device_train_batch_size": 3, "max_steps": 3}
    finetune(small_recipe(checkpoint, tmp_path, rows, skips={"seed-0": ((1, 2),)}, **fields))
    assert len(read["collate_mismatched"]) == 3
    assert read["collate_mismatched"] == read["collate"][:3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equals the chosen answer"),
        ({"prompt": "a", "chosen": "b"}, "rejected"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"chosen": "b", "rejected": "c"}, "there is no column .prompt."),
        ({"prompt": "a", "completion": "b", "label": "maybe"}, "must be true"),
        ({"prompt": "a", "completion": None, "label": True}, "column 'completion' holds null"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "column 'chosen' holds null"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "chosen": "b", "rejected": "c"}, "ends with a message of"),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "x"}], "rejected": "c"},
            "must end with one of the assistant",
        ),
        ({"prompt": [{"role": "system", "content": "x"}], "chosen": "b", "rejected": "c"}, "no message of the user"),
        (
            {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")},
            "column 'chosen' has no message of the user before the answer",
        ),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", [ROWS[0], row])
    with pytest.raises(UserError, match=message) as e:
        read_labelled(file, "preference")
    assert "pairs.jsonl:2" in str(e.value)


def test_a_text_in_brackets_is_a_text(tmp_path: Path) -> None:
    """An answer of code is no list of messages."""
    row = {"prompt": "[1, 2]", "chosen": "[2, 1]", "rejected": "[]"}
    (example,) = read_labelled(write_rows(tmp_path / "pairs.jsonl", [row]), "preference")
    assert (example.texts, example.references) == (("user", "[1, 2]"), ("[2, 1]", "[]"))


@pytest.mark.parametrize("name", ["preference", "reward"])
def test_answers_that_the_template_makes_equal_are_refused(name: str) -> None:
    config, tokenizer = parts("llama")
    template = "{% for m in messages %}{{ m.content | trim }} {% endfor %}"
    trimming = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.config | {"chat_template": template})
    pair = Example(7, ("user", "the cat"), references=("is red", "is red "))
    task = make_task(name, [pair], trimming, config, FinetuneRecipe(task=name, max_seq_length=64))
    with pytest.raises(UserError, match="Example 7: the chosen and the rejected answer are the same tokens"):
        task.encode([pair])
    own = make_task(name, [pair], tokenizer, config, FinetuneRecipe(task=name, max_seq_length=64))
    assert len(own.encode([pair])) == 1, "the template that Firth adds keeps white space"
    long = Example(8, ("user", "the cat"), references=("red" + " is" * 20, "blue" + " is" * 20))
    short = make_task(name, [long], tokenizer, config, FinetuneRecipe(task=name, max_seq_length=16))
    with pytest.raises(UserError, match=r"Example 8: the last 16 tokens .* are equal, .*raise --max-seq-length"):
        short.encode([long])


def test_messages_in_both_answers_are_read(tmp_path: Path) -> None:
    shared = [{"role": "user", "content": "the cat"}]
    row = {
        name: [*shared, {"role": "assistant", "content": text}] for name, text in (("chosen", "x"), ("rejected", "y"))
    }
    (example,) = read_labelled(write_rows(tmp_path / "a.jsonl", [row]), "preference")
    assert (example.texts, example.references) == (("user", "the cat"), ("x", "y"))
    (single,) = read_labelled(
        write_rows(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b", "label": False}]), "preference"
    )
    assert (single.references, single.target) == (("b",), False)


def test_models_and_options_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    config, tokenizer = parts("t5")
    with pytest.raises(UserError, match="needs a causal decoder"):
        make_task("preference", PAIRS, tokenizer, config, FinetuneRecipe(task="preference"))
    for fields, message in [
        ({"task": "preference", "beta": 0.0}, "beta is 0.0"),
        ({"task": "preference", "label_smoothing": 0.6}, "below 0.5"),
        ({"task": "preference", "preference_loss": "ipo", "label_smoothing": 0.1}, "for dpo and simpo"),
        ({"task": "preference", "orpo_sft": "all"}, "add --preference-loss orpo"),
        ({"task": "preference", "from_scratch": True}, "remove from_scratch"),
        ({"task": "classify", "beta": 0.1}, "beta is for the task preference"),
    ]:
        with pytest.raises(UserError, match=message):
            FinetuneRecipe(checkpoint=str(checkpoint), train="a", dev="b", **fields).check()  # type: ignore[arg-type]


def small_recipe(checkpoint: Path, folder: Path, rows: list[dict[str, Any]], **fields: Any) -> FinetuneRecipe:
    data = write_rows(folder / "answers.jsonl", rows)
    small: dict[str, Any] = dict(max_seq_length=32, seeds=1, max_steps=1, learning_rate=3e-3, device="cpu")
    files: dict[str, Any] = dict(checkpoint=str(checkpoint), train=str(data), dev=str(data))
    return FinetuneRecipe(task="preference", output_dir=str(folder / "run"), **files, **small | fields)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "hinge", "simpo", "orpo"])
def test_a_loss_of_pairs_refuses_a_single_answer(loss: str, checkpoint: Path, tmp_path: Path) -> None:
    """Even where the file has a good and a bad answer of one prompt: nobody has compared them."""
    recipe = small_recipe(checkpoint, tmp_path, [*ROWS[:2], *SINGLE_ROWS[:2]], preference_loss=loss)
    with pytest.raises(UserError, match=r"answers\.jsonl: Example 3 has one answer.*--preference-loss kto"):
        finetune(recipe)


def test_single_answers_have_the_loss_kto_by_default(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(small_recipe(checkpoint, tmp_path, [ROWS[0], *SINGLE_ROWS[:2]]))
    assert "some rows have one answer and its label: the loss is kto" in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "run" / "final" / "task.json").read_text())["preference"]["loss"] == "kto"
    assert "preference_loss: null" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert made("", PAIRS)[0].preference.loss == "dpo"
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    examples = read_labelled(tmp_path / "answers.jsonl", "preference")
    page = write_run_report(tmp_path / "run", results, examples).read_text()
    for text in ("Share of the pairs of each batch", "or good, answers of each batch", "as KTO estimates it"):
        assert text in page
    with pytest.raises(UserError, match="label_smoothing is for dpo and simpo, not for kto"):
        made("", LABELLED, label_smoothing=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_dpo_beside_trl(loss: str, tmp_path: Path) -> None:
    """Loss and gradients of TRL's trainer on the same files."""
    trl, transformers, datasets = (pytest.importorskip(name) for name in ("trl", "transformers", "datasets"))
    task, model = made({"sigmoid": "dpo"}.get(loss, loss))
    reference = other(model)
    for name, one in (("policy", model), ("reference", reference)):
        one.save(tmp_path / name)
    theirs, their_reference = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("policy", "reference")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "policy")
    rows = [
        {
            "prompt": [{"role": role, "content": text} for role, text in task.parse_prompt(e)],
            **{
                name: [{"role": "assistant", "content": text}]
                for name, text in zip(("chosen", "rejected"), e.references, strict=True)
            },
        }
        for e in PAIRS
    ]
    trainer = trl.DPOTrainer(
        model=theirs,
        ref_model=their_reference,
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"),
            beta=0.1,
            loss_type=[loss],
            per_device_train_batch_size=len(rows),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, batch)
    items = referenced(task, reference, PAIRS)
    ids = sorted(tuple(answer.sequence.ids) for item in items for answer in item.answers)
    mask = batch["attention_mask"].bool()
    assert ids == sorted(tuple(row[m].tolist()) for row, m in zip(batch["input_ids"], mask, strict=True))
    found = mean_loss(PreferenceLoss(model, task.preference, CPU.device), task.collate(items))
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    found.backward()
    expected.backward()
    assert_equal_gradients(model, trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_orpo_and_simpo_beside_the_trainers_of_trl(loss: str, tmp_path: Path) -> None:
    """Losses and gradients of TRL's trainers on the same files, each pair a batch; and the token ids."""
    transformers, datasets = (pytest.importorskip(name) for name in ("transformers", "datasets"))
    shared: dict[str, Any] = {"output_dir": str(tmp_path / "trl"), "per_device_train_batch_size": 1, "use_cpu": True}
    shared |= {"bf16": False, "gradient_checkpointing": False, "report_to": "none", "beta": 0.7}
    if loss == "orpo":
        module = pytest.importorskip("trl.experimental.orpo")
        trainer_type, args, fields = module.ORPOTrainer, module.ORPOConfig(**shared), {"orpo_sft": "all"}
    else:
        module = pytest.importorskip("trl.experimental.cpo")
        args = module.CPOConfig(**shared, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.5)
        trainer_type, fields = module.CPOTrainer, {"simpo_gamma": 0.5}
    task, model = made(loss, beta=0.7, **fields)
    model.save(tmp_path / "policy")
    rows = [
        {
            "prompt": [{"role": role, "content": text} for role, text in task.parse_prompt(e)],
            **{
                name: [{"role": "assistant", "content": text}]
                for name, text in zip(("chosen", "rejected"), e.references, strict=True)
            },
        }
        for e in PAIRS
    ]
    trainer = trainer_type(
        model=transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy"),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(tmp_path / "policy"),
    )
    items = task.encode(PAIRS)
    theirs, their_ids = [], []
    for batch in trainer.get_train_dataloader():
        theirs.append(trainer.get_batch_loss_metrics(trainer.model, batch)[0])
        their_ids += [batch[f"{side}_input_ids"][0].tolist() for side in ("chosen", "rejected")]
    assert sorted(their_ids) == sorted(list(answer.sequence.ids) for item in items for answer in item.answers)
    expected = torch.stack(theirs).mean()
    found = mean_loss(PreferenceLoss(model, task.preference, CPU.device), task.collate(items))
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    found.backward()
    expected.backward()
    assert_equal_gradients(model, trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_orpo_and_simpo_beside_trl(smoothing: float) -> None:
    """Losses and gradients of TRL's functions on the same mean log-likelihoods."""
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    torch.manual_seed(0)
    score = -2 * torch.rand(8, 2) - 0.05
    shared = {"beta": 0.7, "accelerator": SimpleNamespace(device="cpu")}
    simpo = SimpleNamespace(alpha=0.0, loss_type="simpo", simpo_gamma=0.5, label_smoothing=smoothing, **shared)

    def gradient(loss_fn: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = score.clone().requires_grad_()
        losses = loss_fn(own)
        losses.mean().backward()
        assert own.grad is not None
        return losses.detach(), own.grad

    for config, theirs in [
        (PreferenceConfig("simpo", 0.7, smoothing, 0.5), lambda s: cpo.cpo_loss(simpo, s[:, 0], s[:, 1])[0]),
        (
            PreferenceConfig("orpo", 0.7),  # TRL returns the odds ratio's part, which is subtracted from the SFT loss
            lambda s: -s[:, 0] - orpo.odds_ratio_loss(SimpleNamespace(**shared), s[:, 0], s[:, 1])[0],
        ),
    ]:
        loss = PreferenceLoss(None, config, CPU.device)  # type: ignore[arg-type]
        for ours, expected in zip(
            gradient(lambda s, loss=loss: loss.pair_losses(s, s[:, GOOD])), gradient(theirs), strict=True
        ):
            assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.slow
def test_kto_beside_trl(tmp_path: Path) -> None:
    """TRL's mismatched answer is that of the example before, and ours of the one after: so ours are turned round."""
    trl, transformers, datasets = (pytest.importorskip(name) for name in ("trl", "transformers", "datasets"))
    examples = LABELLED
    task, model = made("kto", examples)
    reference = other(model)
    for name, one in (("policy", model), ("reference", reference)):
        one.save(tmp_path / name)
    theirs, their_reference = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("policy", "reference")
    )
    rows = [
        {
            "prompt": [{"role": role, "content": text} for role, text in task.parse_prompt(e)],
            "completion": [{"role": "assistant", "content": e.references[0]}],
            "label": e.target,
        }
        for e in examples
    ]
    trainer = trl.KTOTrainer(
        model=theirs,
        ref_model=their_reference,
        args=trl.KTOConfig(
            output_dir=str(tmp_path / "trl"),
            beta=0.1,
            per_device_train_batch_size=len(examples),
            train_sampling_strategy="sequential",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(tmp_path / "policy"),
    )
    expected = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    items = referenced(task, reference, examples[::-1])
    loss = PreferenceLoss(model, task.preference, CPU.device)
    loss.update_kl([task.collate_mismatched(items)], CPU)
    found = mean_loss(loss, task.collate(items))
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    found.backward()
    expected.backward()
    assert_equal_gradients(model, trainer.model)
