"""Reward models: the loss by its equation and beside TRL, the reward in `transformers`, resume, best-of-n."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tasks.conftest import write_jsonl
from tasks.small import CPU, assert_equal_gradients, model_for, parts, tokenizer_of
from tasks.test_resume import stop_in_seed

from firth.core.errors import UserError
from firth.evaluate import evaluate
from firth.evaluate.predict import Predictor
from firth.models import Model, load_model, make_model
from firth.models.presets import distilbert
from firth.tasks import FinetuneRecipe, finetune, make_task
from firth.tasks.best_of import RewardModel, best_of_settings, check_reward_model, rank_by_reward
from firth.tasks.finetune_data import FinetuneData
from firth.tasks.finetune_job import encode_file, encode_finetune_data
from firth.tasks.reward import RewardLoss, RewardTask
from firth.tasks.seed_model import build_seed_model
from firth.text import Example, read_labelled

PAIRS = [
    Example(0, ("user", "the cat lives"), 0.0, references=("near the river", "not near the blue garden and the fox")),
    Example(1, ("system", "big", "user", "a dog"), 0.5, references=("is small and red", "is")),
    Example(2, ("user", "fox", "assistant", "red", "user", "and the horse"), 2.0, references=("is blue", "lives near")),
]


def made(family: str, **fields: Any) -> tuple[RewardTask, Model]:
    config, tokenizer = parts(family)
    recipe = FinetuneRecipe(task="reward", **{"max_seq_length": 64} | fields)
    task = make_task("reward", PAIRS, tokenizer, config, recipe)
    assert isinstance(task, RewardTask)
    model = model_for(task, config).eval()
    model.tokenizer = task.templated_tokenizer()
    for p in model.head.parameters():  # a head that starts near 0 would hide a wrong position
        torch.nn.init.normal_(p, std=0.5)
    return task, model


@pytest.mark.parametrize(("given", "used"), [(None, 0.0), (0.3, 0.3)])
def test_a_head_with_dropout_of_its_own_trains_without(given: float | None, used: float, tmp_path: Path) -> None:
    """DistilBERT's head has 0.2. What is set is used; the checkpoint keeps the published number."""
    tokenizer = tokenizer_of("wordpiece")
    model = make_model(distilbert(1, 16, 2, tokenizer.vocab.size))
    model.tokenizer = tokenizer
    model.save(tmp_path / "distilbert")
    recipe = FinetuneRecipe(
        task="reward", checkpoint=str(tmp_path / "distilbert"), max_seq_length=64, head_dropout=given
    )
    task = make_task("reward", PAIRS, tokenizer, model.config, recipe)
    job = encode_finetune_data(recipe, task, FinetuneData(PAIRS, PAIRS), CPU, tmp_path)
    built = build_seed_model(job, 0)
    assert max(module.p for module in built.modules() if isinstance(module, torch.nn.Dropout)) == used
    assert built.config.head.dropout == (given or 0.2)


def their_rewards(folder: Path) -> list[list[float]]:
    """Rewards by `transformers` alone: its tokenizer, its chat template, its model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    found = []
    for e in PAIRS:
        found.append([])
        for answer in e.references:
            turns = [*zip(e.texts[::2], e.texts[1::2], strict=True), ("assistant", answer)]
            messages = [{"role": role, "content": text} for role, text in turns]
            ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                found[-1].append(model(input_ids=ids).logits[0, 0].item())
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_transformers_gives_the_same_reward(family: str, tmp_path: Path) -> None:
    task, model = made(family, max_seq_length=32 if family == "bert" else 64)
    model.save(tmp_path / family)
    rewards = [p.prediction for p in task.predict(model, task.encode(PAIRS), CPU, 2)]
    for ours, theirs in zip(rewards, their_rewards(tmp_path / family), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    again = make_task("reward", task.metadata(), task.tokenizer, model.config)
    assert [p.prediction for p in again.predict(model, again.encode(PAIRS), CPU, 8)] == [
        pytest.approx(pair, abs=1e-6) for pair in rewards
    ]


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_follows_its_equation(center: float) -> None:
    task, model = made("llama")
    items = task.encode(PAIRS)
    rewards = torch.tensor([p.prediction for p in task.predict(model, items, CPU, 1)])
    chosen, rejected = rewards.T
    margin = torch.tensor([e.target for e in PAIRS])
    expected = (-F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2).mean()
    batch = task.collate(items)
    parts_ = RewardLoss(model, center)(batch.to(CPU.device))
    assert parts_["targets"].item() / batch.num_targets == pytest.approx(expected.item(), abs=1e-5)
    figures = {name: parts_[f"{name}/targets"].item() / batch.num_targets for name in ("accuracy", "margin")}
    scores = task.score(PAIRS, task.predict(model, items, CPU, 2))
    assert figures == pytest.approx({name: scores[name] for name in figures}, abs=1e-5)


def test_micro_batches_of_any_size_give_the_same_gradient() -> None:
    task, model = made("gpt2", max_seq_length=32)
    items, loss = task.encode(PAIRS), RewardLoss(model, 0.1)

    def gradient(groups: list[list[Any]]) -> torch.Tensor:
        model.zero_grad()
        batches = [task.collate(group) for group in groups]
        count = sum(batch.num_targets for batch in batches)
        for batch in batches:
            (loss(batch.to(CPU.device))["targets"] / count).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert torch.allclose(gradient([items]), gradient([[item] for item in items]), atol=1e-6)


def test_long_dialogues_lose_their_beginning_and_keep_the_answer() -> None:
    task, _ = made("bert", max_seq_length=10)
    (item,) = encode_file(task, [PAIRS[2]._replace(id=9)], "pairs.jsonl")
    whole, _ = made("bert", max_seq_length=32)
    (other,) = whole.encode([PAIRS[2]])
    short, long = item.sequences[0].ids, other.sequences[0].ids
    assert len(long) > 10
    assert short == [long[0], *long[-9:]]
    assert item.sequences[0].target_positions == (0,)
    assert task.notices == ["2 dialogues were longer than 10 tokens, and lost the beginning (pairs.jsonl: example 9)."]


ROWS = [
    {"prompt": f"the {animal}", "chosen": f"is red and {size}", "rejected": f"is blue and {size}", "margin": 0.5}
    for animal in ("cat", "dog", "fox", "horse")
    for size in ("big", "small")
] * 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinetuneRecipe, dict[str, Any]]:
    """A decoder without a chat template, and a reward model of it."""
    folder = tmp_path_factory.mktemp("reward")
    config, tokenizer = parts("llama")
    torch.manual_seed(0)
    from firth.models import make_model

    model = make_model(config)
    model.tokenizer = tokenizer
    model.save(folder / "llama")
    data = write_jsonl(folder / "pairs.jsonl", ROWS)
    recipe = FinetuneRecipe(
        checkpoint=str(folder / "llama"),
        task="reward",
        train=str(data),
        dev=str(data),
        output_dir=str(folder / "run"),
        max_seq_length=32,
        seeds=1,
        max_steps=16,
        save_steps=4,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        device="cpu",
    )
    return recipe, finetune(recipe)


def test_a_run_learns_the_pairs_and_resumes_exactly(
    run: tuple[FinetuneRecipe, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, found = run
    assert found["mean"] == 1.0
    assert found["margin"] > 0.5
    folder = Path(recipe.output_dir)
    log = [json.loads(line) for line in (folder / "seed-0" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in log if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(-math.log(1 / (1 + math.exp(0.5))), abs=0.2)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["accuracy"] == 1.0
    stopped = replace(recipe, output_dir=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        stop_in_seed(patch, "seed-0", 9)
        with pytest.raises(KeyboardInterrupt):
            finetune(stopped)
    finetune(stopped, resume=True)
    ours, theirs = (load_model(at / "final") for at in (folder, tmp_path / "stopped"))
    for (name, p), q in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def test_evaluate_and_predict(run: tuple[FinetuneRecipe, dict[str, Any]], tmp_path: Path) -> None:
    recipe, found = run
    final = Path(recipe.output_dir) / "final"
    again = evaluate(final, "reward", recipe.dev, tmp_path / "scores")
    assert again["metrics"] == pytest.approx({name: found[name] for name in again["metrics"]}, abs=1e-5)
    predictor = Predictor(final)
    pair, single, texts, messages = predictor.predict(
        [
            ROWS[0],
            {"prompt": ROWS[0]["prompt"], "response": ROWS[0]["chosen"]},
            [ROWS[0]["prompt"], ROWS[0]["rejected"]],
            {
                "messages": [
                    {"role": "user", "content": ROWS[0]["prompt"]},
                    {"role": "assistant", "content": ROWS[0]["chosen"]},
                ]
            },
        ]
    )
    assert pair["preferred"] == "chosen"
    assert pair["margin"] == pytest.approx(pair["reward_chosen"] - pair["reward_rejected"], abs=1e-5)
    assert single["reward"] == messages["reward"] == pytest.approx(pair["reward_chosen"], abs=1e-5)
    assert texts["reward"] == pytest.approx(pair["reward_rejected"], abs=1e-5)
    only = write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "the cat", "completion": "is red"}])
    assert not evaluate(final, "reward", only, tmp_path / "unlabelled")["metrics"]


def test_rates_are_tried_by_the_loss_of_pairs(run: tuple[FinetuneRecipe, dict[str, Any]], tmp_path: Path) -> None:
    from firth.tasks.finetune_loss import make_loss_fn
    from firth.tasks.trial_runs import measure_batch_losses

    recipe, _ = run
    task, model = made("llama")
    batch = task.collate(task.encode(PAIRS))
    job: Any = type("Job", (), {"task": task, "recipe": recipe, "compute": CPU})
    loss_fn, _ = make_loss_fn(job, model, [])
    assert loss_fn is not None
    expected = loss_fn(batch.to(CPU.device))["targets"].item() / batch.num_targets
    assert measure_batch_losses(model, [batch], CPU, loss_fn) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equals the chosen answer"),
        ({"prompt": "a", "rejected": "b"}, "no column 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "column 'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"}, "column 'margin' holds \"wide\""),
        (
            {"prompt": [{"role": "user", "content": "x"}] * 2, "chosen": "b", "rejected": "c"},
            "1 and 2 both of the user",
        ),
        ({"prompt": [{"role": "user", "content": " "}], "chosen": "b", "rejected": "c"}, "has an empty message 1"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "pairs.jsonl", [ROWS[0], row])
    with pytest.raises(UserError) as e:
        read_labelled(file, "reward")
    assert message in str(e.value)
    assert "pairs.jsonl:2" in str(e.value)


def test_models_and_options_that_do_not_fit_are_refused(run: tuple[FinetuneRecipe, dict[str, Any]]) -> None:
    recipe, _ = run
    config, tokenizer = parts("t5")
    with pytest.raises(UserError, match="needs a transformer that is an encoder or a decoder"):
        make_task("reward", PAIRS, tokenizer, config, FinetuneRecipe(task="reward"))
    for fields, message in [
        ({"task": "classify", "center_rewards_coefficient": 0.1}, "is for the task reward, not for classify"),
        ({"center_rewards_coefficient": -1.0}, "must be at least 0"),
        ({"lm_loss_weight": 0.5}, None),
    ]:
        changed = replace(recipe, **fields)  # type: ignore[arg-type]
        if message is None:
            with pytest.raises(UserError, match=r"lm_loss_weight=0\.5 needs"):
                changed.apply_head_options(made("llama")[0].configure_model(parts("llama")[0]))
            continue
        with pytest.raises(UserError, match=message):
            changed.check()


# --- best-of-n


def test_the_best_sample_of_each_prompt_comes_first(run: tuple[FinetuneRecipe, dict[str, Any]]) -> None:
    recipe, _ = run
    reward = RewardModel(Path(recipe.output_dir) / "final")
    prompts = ["the cat", "the fox"]
    results = [
        {"prompt": i // 2, "text": "", "new": f" is {colour} and big"}
        for i, colour in enumerate(("blue", "red", "red", "blue"))
    ]
    ranked = rank_by_reward(results, prompts, reward.score)
    assert [(r["prompt"], r["new"].split()[1], r["best"]) for r in ranked] == [
        *((0, "red", True), (0, "blue", False)),
        *((1, "red", True), (1, "blue", False)),
    ]
    pair = Predictor(Path(recipe.output_dir) / "final").predict([["the cat", "is red and big"]])[0]
    assert ranked[0]["reward"] == pytest.approx(pair["reward"], abs=1e-5)
    assert reward.score(["a"] * 40, ["b"] * 40) == pytest.approx(reward.score(["a"], ["b"]) * 40, abs=1e-5)


def test_a_published_reward_model_has_no_task_file(run: tuple[FinetuneRecipe, dict[str, Any]], tmp_path: Path) -> None:
    """One label and a chat template are enough, as of a model that TRL has saved."""
    recipe, _ = run
    copytree(Path(recipe.output_dir) / "final", tmp_path / "published")
    for name in ("task.json", "manifest.json"):
        (tmp_path / "published" / name).unlink()
    ours, theirs = (RewardModel(at) for at in (Path(recipe.output_dir) / "final", tmp_path / "published"))
    assert theirs.score(["the cat"], ["is red"]) == pytest.approx(ours.score(["the cat"], ["is red"]), abs=1e-6)
    settings = json.loads((tmp_path / "published" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "published" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="has no chat template"):
        RewardModel(tmp_path / "published").score(["the cat"], ["is red"])


def test_settings_of_best_of(run: tuple[FinetuneRecipe, dict[str, Any]]) -> None:
    recipe, _ = run
    assert best_of_settings(4, {"top_p": 0.9}, {"num_beams": 4, "max_new_tokens": 7}) == {
        "temperature": 1.0,
        "top_p": 0.9,
        "max_new_tokens": 7,
        "num_return_sequences": 4,
    }
    for n, given, message in [
        (1, {}, "--best-of is 1: it chooses among several samples"),
        (4, {"temperature": 0}, "needs samples that differ"),
        (4, {"temperature": 1e-320}, "needs samples that differ"),
        (4, {"num_beams": 2}, "leave out --num-beams"),
        (4, {"num_return_sequences": 2}, "leave out --num-return-sequences"),
    ]:
        with pytest.raises(UserError, match=message):
            best_of_settings(n, given, {})
    with pytest.raises(UserError, match="has no head for a reward"):
        check_reward_model(recipe.checkpoint)
    assert check_reward_model(Path(recipe.output_dir) / "final")["task"] == "reward"


@pytest.mark.slow
@pytest.mark.parametrize("center", [None, 0.05])
def test_the_loss_beside_trl(center: float | None, tmp_path: Path) -> None:
    """Loss and gradients of TRL's trainer on the same pairs."""
    trl, transformers, datasets = (pytest.importorskip(name) for name in ("trl", "transformers", "datasets"))
    task, model = made("llama")
    model.save(tmp_path / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    rows = [
        {
            **{
                name: [
                    {"role": role, "content": text}
                    for role, text in [*zip(e.texts[::2], e.texts[1::2], strict=True), ("assistant", answer)]
                ]
                for name, answer in zip(("chosen", "rejected"), e.references, strict=True)
            },
            "margin": e.target,
        }
        for e in PAIRS
    ]
    trainer = trl.RewardTrainer(
        model=theirs,
        args=trl.RewardConfig(
            output_dir=str(tmp_path / "trl"),
            center_rewards_coefficient=center,
            per_device_train_batch_size=len(rows),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    items = task.encode(PAIRS)
    mask = batch["attention_mask"].bool()
    ids = sorted(tuple(sequence.ids) for item in items for sequence in item.sequences)
    assert ids == sorted(tuple(row[m].tolist()) for row, m in zip(batch["input_ids"], mask, strict=True))
    expected = trainer.compute_loss(trainer.model, batch)
    packed = task.collate(items)
    found = RewardLoss(model, center or 0.0)(packed.to(CPU.device))["targets"] / packed.num_targets
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    found.backward()
    expected.backward()
    assert_equal_gradients(model, trainer.model)
