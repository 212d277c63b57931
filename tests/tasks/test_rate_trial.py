"""`learning_rate: auto`: trials on a split of train, their choice, what they cost, and resume."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import firth
from firth.core.errors import Interrupted, UserError
from firth.models import get_preset
from firth.recipes import finetuning_defaults, with_rate_candidates
from firth.tasks import FinetuneRecipe, finetune, finetune_data, finetune_schedule, train_seed, trial_runs, try_rates
from firth.tasks.rate_trial import RateTrial, choose_rate, find_trial_obstacle, load_trial, split_for_trial
from firth.train import Diverged, load_recipe, save_recipe
from firth.train.recipe import parse_learning_rate

finetuning = importlib.import_module("firth.tasks.finetune")  # the name in firth.tasks is the function
Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]
RATES = (1e-4, 1e-3, 1e-2)
SAME_FILES = ("final/model.safetensors", "predictions.jsonl", "seed-0/log.jsonl", "learning_rate.json")


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trials of two steps and nine held-out examples count, so that the tests are quick."""
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_TRIAL_STEPS", 2)
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_HELD_OUT_EXAMPLES", 9)


Plan = Callable[..., FinetuneRecipe]


@pytest.fixture
def plan(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, small_trials: None) -> Plan:
    def make(**fields: Any) -> FinetuneRecipe:
        small: dict[str, Any] = dict(
            checkpoint=str(checkpoint_of("bert")),
            train=str(toy["train"]),
            dev=str(toy["dev"]),
            output_dir=str(tmp_path / "run"),
            max_steps=20,
            max_seq_length=32,
            seeds=1,
            learning_rate=1e-3,
            rate_candidates=RATES,
            compile=False,
            bf16=False,
        )
        return FinetuneRecipe(**small | fields)

    return make


def trial_of(recipe: FinetuneRecipe) -> RateTrial:
    trial = load_trial(Path(recipe.output_dir) / "learning_rate.json")
    assert trial is not None
    return trial


def stored(recipe: FinetuneRecipe) -> FinetuneRecipe:
    return load_recipe(Path(recipe.output_dir) / "recipe.yaml", FinetuneRecipe)


def drop_seconds(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if '"seconds"' not in line and '"content_sha256"' not in line)


def assert_same_run(a: str, b: str) -> None:
    for name in SAME_FILES:
        x, y = (Path(folder) / name for folder in (a, b))
        if name.endswith(".json"):
            assert drop_seconds(x.read_text()) == drop_seconds(y.read_text()), name
        else:
            assert x.read_bytes() == y.read_bytes(), name


# --- the choice


@pytest.mark.parametrize(
    ("losses", "chosen", "words"),
    [
        (((3.0, 3.0), (2.0, 2.0), (1.0, 1.0)), 1e-2, "the lowest held-out loss"),
        (((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)), 1e-4, "the lowest held-out loss"),
        (((2.0, 2.0), (1.0, 1.0), (3.0, 3.0)), 1e-3, "the lowest held-out loss"),
        (((9.0, 9.0), (1.0, 2.0), (0.5, 2.4)), 1e-3, "by chance at most"),  # 0.05 better, standard error 0.45
        (((9.0, 9.0), (), (5.0, 5.0)), 1e-2, "0.001: diverged"),
        (((), (), ()), 1e-4, "diverged at every rate"),
    ],
)
def test_the_lowest_loss_decides_unless_it_may_be_chance(losses: Any, chosen: float, words: str) -> None:
    rate, reason = choose_rate(RateTrial(RATES, 1e-3, batch_losses=losses))
    assert rate == chosen
    assert words in reason


def test_the_split_is_of_train_alone_and_fixed_by_the_seed() -> None:
    train, held_out = split_for_trial(1000, seed=3)
    assert sorted(train + held_out) == list(range(1000))
    assert len(held_out) == 200
    assert split_for_trial(1000, seed=3) == (train, held_out)
    assert split_for_trial(1000, seed=4)[1] != held_out
    assert len(split_for_trial(10**5, seed=0)[1]) == 512


@pytest.mark.parametrize(
    ("fields", "examples", "steps", "words"),
    [
        ({}, 400, 1000, None),
        ({}, 319, 1000, "train has 319 examples, and a trial needs 320"),
        ({}, 400, 199, "the run has 199 steps, and a trial needs 200"),
        ({"unfreeze_every": -1}, 400, 1000, "unfrozen"),
    ],
)
def test_obstacles(fields: dict[str, Any], examples: int, steps: int, words: str | None) -> None:
    found = find_trial_obstacle(FinetuneRecipe(**fields), examples, steps)
    assert found is None if words is None else words in str(found)


# --- the option


def test_auto_is_the_default_and_a_number_tries_nothing() -> None:
    defaults = finetuning_defaults(get_preset("bert-base"))
    for changes in ({}, {"learning_rate": "auto"}):
        fields, others = with_rate_candidates(defaults, {**changes, "seed": 3})
        assert fields == {"learning_rate": 5e-5, "rate_candidates": (2e-5, 5e-5, 1.3e-4)}
        assert others == {"seed": 3}
    assert "rate_candidates" not in with_rate_candidates(defaults, {"learning_rate": 5e-5})[0]
    lora = with_rate_candidates(defaults, {"lora_rank": 8})[0]
    assert lora["rate_candidates"] == (5e-5, 2e-4, 5e-4)


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "inf", ""])
def test_invalid_rates_raise(text: str) -> None:
    with pytest.raises(UserError, match="neither a number of at least 0 nor auto"):
        parse_learning_rate(text, "--learning-rate")


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [2.4e-3, 5.9e-3, 1.5e-2]),
        ({"learning_rate": "auto"}, [2.4e-3, 5.9e-3, 1.5e-2]),
        ({"learning_rate": 1e-3}, [1e-3]),
        ({"recipe": "dai-le"}, [1e-3]),
        ({"max_steps": 19}, [5.9e-3]),
    ],
)
def test_a_dry_run_shows_the_rates(
    options: dict[str, Any], rates: list[float], checkpoint_of: Checkpoints, toy: Toy, small_trials: None
) -> None:
    files = (toy["train"], toy["dev"], toy["train"].parent / "new")
    found = firth.finetune(checkpoint_of("bert"), "classify", *files, dry_run=True, **{"max_steps": 20} | options)
    assert found["learning_rates"] == rates


# --- a run


class Untouchable:
    """Raises on whatever is done to it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"dev was read: {name}")

    __iter__ = __len__ = __getitem__ = __bool__ = lambda *a: (_ for _ in ()).throw(AssertionError("dev was read"))


def test_the_choice_never_reads_dev(plan: Plan, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, blind = finetuning.choose_learning_rate, Untouchable()

    def choose_blindly(job: Any) -> FinetuneRecipe:
        with monkeypatch.context() as patch:
            patch.setattr(finetune_data, "read_labelled", blind)
            return choose(replace(job, dev_items=blind, data=replace(job.data, dev=blind)))

    monkeypatch.setattr(finetuning, "choose_learning_rate", choose_blindly)
    finetune(plan())
    other = tmp_path / "dev.jsonl"
    rows = [json.loads(line) for line in toy["dev"].read_text().splitlines()]
    flipped = [row | {"label": {"animal": "place", "place": "animal"}[row["label"]]} for row in rows]
    other.write_text("".join(json.dumps(row) + "\n" for row in flipped))
    finetune(second := plan(dev=str(other), output_dir=str(tmp_path / "other")))
    assert trial_of(plan()) == trial_of(second)


def test_a_chosen_rate_scores_as_the_same_number_given(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rates are tried once for two seeds; the seeds are then those of an explicit rate, bit for bit."""
    result = finetune(plan(seeds=2))
    said, trial = " ".join(capsys.readouterr().err.split()), result["learning_rate_trial"]
    assert "learning rate: trying 0.0001, 0.001, 0.01 (times 3.2, as a trial is short) for 2 steps each, on 92" in said
    assert f"learning rate {trial['chosen']:g}: {trial['reason']}" in said
    assert result["learning_rate"] == trial["chosen"] == stored(plan()).learning_rate
    assert (trial["rates"], trial["steps"], trial["held_out_examples"]) == (RATES, 2, 23)
    assert len(set(trial["losses"])) == 3
    saved = json.loads((tmp_path / "run" / "results.json").read_text())
    assert saved["learning_rate_trial"]["losses"] == trial["losses"]
    given = plan(
        seeds=2, learning_rate=trial["chosen"], rate_candidates=(), output_dir=str(tmp_path / "given")
    )  # fmt: skip
    explicit = finetune(given)
    assert explicit["scores"] == result["scores"]
    assert explicit["learning_rate_trial"] is None
    for name in ("seed-0/final/model.safetensors", "seed-1/final/model.safetensors", "seed-1/log.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "given" / name).read_bytes(), name
    assert replace(stored(given), output_dir="") == replace(stored(plan()), output_dir="")


def test_trials_share_a_model_and_do_not_influence_each_other(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def count(name: str, *modules: Any) -> None:
        plain = getattr(modules[0], name)

        def counted(*given: Any) -> Any:
            built.append(name)
            return plain(*given)

        for module in modules:
            monkeypatch.setattr(module, name, counted)

    count("build_seed_model", trial_runs, train_seed)
    count("build_step_runner", trial_runs)
    finetune(plan())
    assert built == ["build_seed_model", "build_step_runner", "build_seed_model"]  # of the trials; of the seed
    reverse = plan(rate_candidates=RATES[::-1], output_dir=str(tmp_path / "reverse"))
    finetune(reverse)
    assert trial_of(reverse).batch_losses == trial_of(plan()).batch_losses[::-1]


@pytest.mark.parametrize("finished", [0, 1])
def test_a_run_stopped_in_a_trial_resumes_exactly(
    finished: int, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends the trial after its step. Finished rates are not tried again."""
    finetune(plan(output_dir=str(tmp_path / "straight")))
    real, tried = trial_runs.fit, list[float]()

    def press(run: Any, resume: bool = False) -> Any:
        tried.append(run.training.learning_rate)
        if len(tried) == finished + 1:
            run.hooks.append((1, lambda step, model: os.kill(os.getpid(), signal.SIGTERM)))
        return real(run, resume)

    monkeypatch.setattr(trial_runs, "fit", press)
    monkeypatch.setattr(train_seed, "fit", press)
    with pytest.raises(Interrupted, match="step 1 of 2") as stopped:
        finetune(plan())
    assert stopped.value.code == 128 + signal.SIGTERM
    assert stored(plan()).rate_candidates == RATES
    assert not (tmp_path / "run" / "seed-0").exists()
    tried.clear()
    tried += [math.nan] * 9
    finetune(plan(), resume=True)
    assert tried[9:-1] == [math.sqrt(10) * rate for rate in RATES[finished:]]
    assert_same_run(str(tmp_path / "run"), str(tmp_path / "straight"))


KILLED = """
import os, signal, sys
from pathlib import Path
from firth.tasks import FinetuneRecipe, finetune
from firth.train import load_recipe
from firth.tasks import rate_trial, trial_runs
rate_trial.MIN_TRIAL_STEPS, rate_trial.MIN_HELD_OUT_EXAMPLES = 2, 9
real = trial_runs.fit
def kill(run, resume=False):
    if run.folder is None and 1e-3 < run.training.learning_rate < 1e-2:
        run.hooks.append((1, lambda step, model: os.kill(os.getpid(), signal.SIGKILL)))
    return real(run, resume)
trial_runs.fit = kill
finetune(load_recipe(Path(sys.argv[1]), FinetuneRecipe))
"""


@pytest.mark.slow
def test_a_run_killed_in_a_trial_resumes_exactly(plan: Plan, tmp_path: Path) -> None:
    finetune(plan(output_dir=str(tmp_path / "straight")))
    save_recipe(plan(), tmp_path / "plan.yaml")
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "plan.yaml")], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(trial_of(plan()).batch_losses) == 1
    finetune(plan(), resume=True)
    assert_same_run(str(tmp_path / "run"), str(tmp_path / "straight"))


def test_a_resume_keeps_the_rate_of_the_run(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` on resume is the rate that the run has, chosen or given; another number is refused."""
    finetune(plan())
    chosen = stored(plan()).learning_rate
    monkeypatch.setattr(try_rates, "try_rates", None)
    assert finetune(plan(), resume=True)["learning_rate"] == chosen
    assert finetune(plan(learning_rate=chosen, rate_candidates=()), resume=True)["learning_rate"] == chosen
    with pytest.raises(UserError, match=r"learning_rate: .* -> 0\.5"):
        finetune(plan(learning_rate=0.5, rate_candidates=()), resume=True)


def test_a_damaged_trial_is_made_again(plan: Plan, tmp_path: Path) -> None:
    finetune(plan(output_dir=str(tmp_path / "straight")))
    finetune(plan())
    save_recipe(replace(stored(plan()), rate_candidates=RATES, learning_rate=1e-3), tmp_path / "run/recipe.yaml")
    (tmp_path / "run" / "learning_rate.json").write_text('{"rates": 3')
    finetune(plan(), resume=True)
    assert_same_run(str(tmp_path / "run"), str(tmp_path / "straight"))


def test_a_skipped_trial_says_why(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = finetune(plan(max_steps=4))
    assert "learning rate 0.001, the default; no others are tried: the run has 4 steps" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (result["learning_rate"], result["learning_rate_trial"]["skipped"]) == (1e-3, True)


def test_a_rate_that_diverges_is_not_taken(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trial_runs.fit

    def explode(run: Any, resume: bool = False) -> Any:
        if run.training.learning_rate > 1e-2 and run.folder is None:
            raise Diverged("5 steps in a row were skipped.", 1)
        return real(run, resume)

    monkeypatch.setattr(trial_runs, "fit", explode)
    result = finetune(plan())
    assert result["learning_rate_trial"]["losses"][2] is None
    assert result["learning_rate"] != 1e-2


@pytest.mark.parametrize("candidates", [(), RATES])
def test_minutes_cover_the_trials(candidates: tuple[float, ...], plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 0.1 s and an evaluation of 1 s, two seeds: two runs, three tenths of a run, and held-out batches."""
    monkeypatch.setattr(finetune_schedule, "time_steps", lambda *a, **k: (0.1, 1.0))
    planned = finetuning.plan_finetuning(plan(minutes=1.0, max_steps=0, seeds=2, rate_candidates=candidates))
    trials = 0.3 * planned.max_steps * 0.1 + 23 / 16 * 0.1 if candidates else 0.0
    assert 57 <= 2 * (0.1 * planned.max_steps + 1.0) + trials <= 60


def test_every_task_and_family_has_a_held_out_loss(plan: Plan, toy: Toy, checkpoint_of: Checkpoints) -> None:
    """Also a decoder with text answers and an encoder-decoder, whose loss is that over tokens."""
    for family, files, task in (("gpt2", "", "classify"), ("t5", "_pairs", "text-to-text")):
        fields = {"train": str(toy[f"train{files}"]), "dev": str(toy[f"dev{files}"]), "task": task}
        folder = str(Path(plan().output_dir).with_name(family))
        recipe = plan(checkpoint=str(checkpoint_of(family)), output_dir=folder, max_target_length=3, **fields)
        losses = finetune(recipe)["learning_rate_trial"]["losses"]
        assert all(map(math.isfinite, losses))


def test_both_arms_of_a_comparison_choose_among_the_same_rates(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, small_trials: None
) -> None:
    files = (toy["train"], toy["dev"], tmp_path / "run")
    found = firth.finetune(
        checkpoint_of("bert"), "classify", *files, against="scratch", max_steps=20, seeds=1, max_seq_length=32
    )
    trials = [load_trial(tmp_path / "run" / arm / "learning_rate.json") for arm in ("finetuned", "scratch")]
    assert trials[0] is not None
    assert trials[1] is not None
    assert trials[0].rates == trials[1].rates
    assert trials[0].batch_losses != trials[1].batch_losses
    page = (tmp_path / "run" / "finetuned" / "report.html").read_text(encoding="utf-8")
    assert "Dev was not read" in page
    assert f"{found['learning_rate']:g} was taken" in page
    recipe = yaml.safe_load((tmp_path / "run" / "finetuned" / "recipe.yaml").read_text())
    assert (recipe["learning_rate"], recipe["rate_candidates"]) == (found["learning_rate"], [])
