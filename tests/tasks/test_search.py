"""`finetune --search`: successive halving on a split of train, its choice, its budget, and resume."""

from __future__ import annotations

import dataclasses
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

import firth
from firth.core.errors import Interrupted, UserError
from firth.models import get_preset
from firth.recipes import finetuning_defaults, with_rate_candidates
from firth.recipes.finetuning import FINETUNE_RECIPES, SEARCH_DIMENSIONS
from firth.tasks import FinetuneRecipe, finetune, trial_runs
from firth.tasks.rate_trial import FIELDS_OUTSIDE_TRIALS, checksum_trial_recipe
from firth.tasks.recipe import TaskData
from firth.tasks.search import Search, SearchTrial, find_search_obstacle, plan_search, run_halving
from firth.train import load_recipe, save_recipe
from firth.train.folder import check_run_folder
from firth.train.recipe import EngineConfig
from firth.train.resume import read_intermediate

finetuning = importlib.import_module("firth.tasks.finetune")  # the name in firth.tasks is the function
Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]
ALL = tuple(SEARCH_DIMENSIONS)


def recipe_of(search: int = 12, fields: tuple[str, ...] = ALL, **others: Any) -> FinetuneRecipe:
    steps = {"max_steps": 900, "warmup_steps": 90}
    return FinetuneRecipe(**steps | {"search": search, "search_fields": fields, "learning_rate": 1e-3} | others)


# --- the plan


def test_the_settings_cover_every_range_and_the_first_is_the_default() -> None:
    search = plan_search(recipe_of(36), 4800)
    assert (search.settings[0].learning_rate, search.settings[0].batch_size, search.settings[0].length) == (1e-3, 16, 1)
    assert len(set(search.settings)) == 36
    for length in (0.5, 1.0, 2.0):
        rates = sorted(s.learning_rate for s in search.settings[1:] if s.length == length)
        parts = [len(rates) * math.log(rate / 2e-4) / math.log(25) for rate in rates]
        middles = [k + 0.5 for k in range(len(rates))]
        assert parts == pytest.approx(middles, abs=0.6), "each has a part of the range of its own, up to rounding"
    assert {s.batch_size for s in search.settings} == {8, 16, 32}
    assert {s.layer_decay for s in search.settings} == {1.0, 0.95, 0.9, 0.8}
    assert {s.warmup_share for s in search.settings} == {0.05, 0.1, 0.2}


def test_the_seed_fixes_the_settings() -> None:
    assert plan_search(recipe_of(), 4800) == plan_search(recipe_of(), 4800)
    assert plan_search(recipe_of(seed=1), 4800).settings[1:] != plan_search(recipe_of(), 4800).settings[1:]


def test_a_held_option_has_one_value() -> None:
    search = plan_search(recipe_of(fields=("learning_rate",)), 4800)
    assert {(s.length, s.batch_size, s.layer_decay, s.warmup_share) for s in search.settings} == {(1.0, 16, 1.0, None)}
    assert search.settings[3].apply(recipe_of()).warmup_steps == 90


@pytest.mark.parametrize(
    ("settings", "fields", "shares", "sizes", "cost"),
    [
        # three lengths of four settings: 4 -> 2 -> 1 of each; their mean length is 7/6
        (12, ALL, (1 / 9, 1 / 3, 1), [12, 6, 3], (12 / 9 + 6 / 3 + 3) * 7 / 6),
        (12, ("learning_rate",), (1 / 9, 1 / 3, 1), [12, 4, 2], 12 / 9 + 4 / 3 + 2),
        (4, ALL, (1 / 3, 1), [4, 2], 4 / 3 + 2),
        (60, ("layer_decay",), (1 / 27, 1 / 9, 1 / 3, 1), [60, 20, 7, 2], 60 / 27 + 20 / 9 + 7 / 3 + 2),
    ],
)
def test_the_budget_of_each_rung(
    settings: int, fields: tuple[str, ...], shares: tuple[float, ...], sizes: list[int], cost: float
) -> None:
    search = plan_search(recipe_of(settings, fields), 4800)
    assert search.shares == pytest.approx(shares)
    assert [len(rung) for rung in search.planned_costs()] == sizes
    assert search.cost == pytest.approx(cost)


def test_a_short_run_has_fewer_rungs() -> None:
    assert len(plan_search(recipe_of(max_steps=180), 4800).shares) == 3
    assert len(plan_search(recipe_of(max_steps=179), 4800).shares) == 2  # 179 / 9 is less than 20 steps


@pytest.mark.parametrize(
    ("examples", "steps", "words"),
    [
        (400, 60, None),
        (319, 60, "train has 319 examples, and a trial needs 320: add examples, or leave --search out"),
        (400, 59, "the run has 59 steps, and a search needs 60: raise --num-train-epochs or --max-steps"),
    ],
)
def test_obstacles(examples: int, steps: int, words: str | None) -> None:
    assert find_search_obstacle(examples, steps) == words


# --- the halving, with a fake objective


def distance(search: Search, setting: int) -> float:
    """A loss that is lowest at rate 2e-3, batch size 32, layer decay 0.9."""
    s = search.settings[setting]
    return abs(math.log(s.learning_rate / 2e-3)) + 0.1 * abs(math.log2(s.batch_size / 32)) + abs(s.layer_decay - 0.9)


def fake_trial(search: Search, rung: int, setting: int) -> SearchTrial:
    """A short run has a higher loss, and a long one a better score, though a higher loss: it has overfitted."""
    length, loss = search.settings[setting].length, distance(search, setting) - 0.1 * rung
    recipe = search.settings[setting].apply(recipe_of(), search.shares[rung])
    is_last = rung == search.num_rungs - 1
    score = length - distance(search, setting) if is_last else None
    losses = (loss + length, loss + length + 0.1)
    return SearchTrial(rung, setting, recipe.max_steps, recipe.max_steps * recipe.global_batch_size, losses, score)


def test_halving_finds_the_best_setting_and_spends_the_planned_examples() -> None:
    search = run_halving(plan_search(recipe_of(36), 4800, "accuracy"), fake_trial)
    longest = [i for i, s in enumerate(search.settings) if s.length == 2]
    assert search.chosen == min(longest, key=lambda i: distance(search, i))
    assert search.reason == "the best accuracy of 3 finalists on the split"
    by_rung = [[t for t in search.trials if t.rung == rung] for rung in range(search.num_rungs)]
    assert [len(trials) for trials in by_rung] == [36, 12, 6, 3]
    for trials, share in zip(by_rung, search.shares, strict=True):
        for trial in trials:  # 900 steps of 16 examples, times the length of the setting, whatever its batch size
            examples = share * search.settings[trial.setting].length * 900 * 16
            assert trial.examples == pytest.approx(examples, abs=16)
    spent = sum(t.examples for t in search.trials)
    assert spent / (900 * 16) == pytest.approx(search.cost, rel=0.01)


def test_settings_of_other_lengths_do_not_compete_before_the_last_rung() -> None:
    """Long settings lose every early rung by their loss; the best one of them is a finalist."""
    search = run_halving(plan_search(recipe_of(12), 4800, "accuracy"), fake_trial)
    assert {search.settings[i].length for i in search.entrants(search.num_rungs - 1)} == {0.5, 1.0, 2.0}


def test_scores_that_are_lower_the_better_and_missing_ones() -> None:
    plan = plan_search(recipe_of(12, ("learning_rate",)), 4800, "perplexity", lower_is_better=True)
    search = run_halving(plan, fake_trial)
    finals = {t.setting: t for t in search.trials if t.rung == 2}
    assert search.chosen == min(finals, key=lambda i: finals[i].score or 0)
    without = run_halving(plan, lambda *a: replace(fake_trial(*a), score=None))
    assert without.chosen == min(finals, key=lambda i: finals[i].loss)
    assert "lowest loss" in without.reason


def test_a_diverged_setting_is_dropped_and_a_search_without_any_fails() -> None:
    plan = plan_search(recipe_of(), 4800, "accuracy")
    best = run_halving(plan, fake_trial).chosen

    def diverge(search: Search, rung: int, setting: int) -> SearchTrial:
        trial = fake_trial(search, rung, setting)
        return replace(trial, batch_losses=(), score=None) if setting == best else trial

    other = run_halving(plan, diverge)
    assert other.chosen not in (None, best)
    assert [t.rung for t in other.trials if t.setting == best] == [0]
    with pytest.raises(UserError, match="diverged with every setting"):
        run_halving(plan, lambda *a: replace(fake_trial(*a), batch_losses=(), score=None))


def test_a_stopped_search_makes_the_same_choice_from_any_trial(tmp_path: Path) -> None:
    plan, saved = plan_search(recipe_of(), 4800, "accuracy"), list[Search]()
    straight = run_halving(plan, fake_trial, saved.append)
    assert len(saved) == len(straight.trials) == 21
    for search in saved:
        search.save(tmp_path / "search.json")
        stored = read_intermediate(tmp_path / "search.json", Search)
        assert stored is not None
        assert plan.same_plan(stored)
        tried: list[tuple[int, int]] = []

        def try_setting(search: Search, rung: int, setting: int, tried: list[Any] = tried) -> SearchTrial:
            tried.append((rung, setting))
            return fake_trial(search, rung, setting)

        assert run_halving(replace(plan, trials=stored.trials), try_setting) == straight
        assert len(tried) == 21 - len(search.trials)
    assert not plan.same_plan(plan_search(recipe_of(seed=1), 4800, "accuracy"))


def another_value(name: str, value: Any) -> Any:
    special: dict[str, Any] = {
        "tasks": {"a": TaskData("classify", "x", "y", "z")},
        "skips": {"seed-0": ((1, 2),)},
        "engine": EngineConfig(recompute=True),
    }
    if name in special or isinstance(value, bool):
        return special.get(name, not value)
    kinds = (((int, float), 3), (str, "other"), (tuple, ("other",)), (dict, {"a": 1}), (type(None), 0.5))
    return next(other for kind, other in kinds if isinstance(value, kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(FinetuneRecipe)])
def test_trials_of_another_recipe_are_made_again(name: str) -> None:
    """Every field counts but those that no trial reads."""
    recipe = recipe_of()
    other = replace(recipe, **{name: another_value(name, getattr(recipe, name))})
    same = plan_search(recipe, 4800).recipe_checksum == plan_search(other, 4800).recipe_checksum
    assert same == (name in FIELDS_OUTSIDE_TRIALS)


def test_trials_do_not_depend_on_how_a_path_is_written() -> None:
    paths = ("base", f"{Path.cwd()}/base")
    assert len({checksum_trial_recipe(recipe_of(checkpoint=path)) for path in paths}) == 1


# --- the option


def test_an_option_that_is_set_is_held() -> None:
    defaults = finetuning_defaults(get_preset("bert-base"))

    def searched(published: dict[str, Any] | None = None, **changes: Any) -> tuple[str, ...]:
        fields, others = with_rate_candidates(defaults, {"search": 12, **changes}, published)
        assert "rate_candidates" not in fields
        assert others == {name: value for name, value in {"search": 12, **changes}.items() if value != "auto"}
        return fields["search_fields"]

    assert searched() == searched(learning_rate="auto") == ALL
    assert searched(learning_rate=1e-4) == ALL[1:]
    assert searched(max_steps=500) == ("learning_rate", "layer_decay", "warmup_steps")
    assert searched(minutes=5) == searched(num_train_epochs=4) == (ALL[0], *ALL[2:])
    assert searched(freeze="backbone") == (*ALL[:3], "warmup_steps")
    assert searched(FINETUNE_RECIPES["dai-le"]) == ("num_train_epochs", "per_device_train_batch_size", "warmup_steps")
    with pytest.raises(UserError, match="nothing to vary"):
        searched(learning_rate=1e-4, max_steps=500, layer_decay=0.9, warmup_steps=10)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"search": 3}, "search is 3; it must be at least 4"),
        ({"search": -1}, "search is -1; it must be at least 0"),
        ({"search": 8, "unfreeze_every": 1}, "search and unfreeze_every exclude each other"),
    ],
)
def test_wrong_values_raise(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FinetuneRecipe(**fields).check()


# --- a run


Plan = Callable[..., FinetuneRecipe]


@pytest.fixture
def plan(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Trials of two steps and nine held-out examples count, so that the tests are quick."""
    monkeypatch.setattr("firth.tasks.search.MIN_TRIAL_STEPS", 2)
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_HELD_OUT_EXAMPLES", 9)

    def make(**fields: Any) -> FinetuneRecipe:
        small: dict[str, Any] = dict(
            checkpoint=str(checkpoint_of("bert")),
            train=str(toy["train"]),
            dev=str(toy["dev"]),
            output_dir=str(tmp_path / "run"),
            max_steps=9,
            max_seq_length=32,
            seeds=2,
            search=6,
            search_fields=ALL,
            learning_rate=1e-3,
            compile=False,
            bf16=False,
        )
        return FinetuneRecipe(**small | fields)

    return make


SAME_FILES = ("final/model.safetensors", "predictions.jsonl", "seed-0/log.jsonl", "seed-1/log.jsonl")


def assert_same_run(a: Path, b: Path) -> None:
    for name in SAME_FILES:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert read_intermediate(a / "search.json", Search) == read_intermediate(b / "search.json", Search)
    stored = [load_recipe(folder / "recipe.yaml", FinetuneRecipe) for folder in (a, b)]
    assert replace(stored[0], output_dir="") == replace(stored[1], output_dir="")


@pytest.fixture
def straight(plan: Plan, tmp_path: Path) -> dict[str, Any]:
    return finetune(plan(output_dir=str(tmp_path / "straight")))


def test_a_dry_run_says_what_a_search_costs(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, plan: Plan) -> None:
    files = (toy["train"], toy["dev"], tmp_path / "run")
    found = firth.finetune(checkpoint_of("bert"), "classify", *files, search=4, max_steps=9, dry_run=True)
    varied = ["learning_rate", "layer_decay", "warmup_steps"]
    assert found["search"] == {"settings": 4, "varied": varied, "cost_in_seeds": pytest.approx(4 / 3 + 2)}
    assert not (tmp_path / "run").exists()


def test_a_run_end_to_end(
    checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the options to the page. The seeds are those of the chosen setting given as options, bit for bit."""
    files = (toy["train"], toy["dev"])
    fixed: dict[str, Any] = {"num_train_epochs": 1.5, "max_seq_length": 32, "seeds": 2, "bf16": False}
    result = firth.finetune(
        checkpoint_of("bert"), "classify", *files, tmp_path / "run", search=5, layer_decay=0.5, **fixed
    )  # fmt: skip
    said, search = " ".join(capsys.readouterr().err.split()), result["search"]
    assert "search: 5 settings in 2 rungs, about 1.8 times the time of the 2 seeds that follow" in said
    assert "varied: learning rate, batch size, warm-up" in said
    assert "held fixed: epochs, layer decay" in said
    assert "each setting trains on 92 examples of train and is measured on its other 23; dev is not read" in said
    assert "rung 1 of 2: 5 settings, 1/3 of their steps" in said
    assert "rung 2 of 2: the best 2 settings, all of their steps" in said
    assert f"setting {search['chosen'] + 1} is chosen" in said
    assert [rung["settings"] for rung in search["rungs"]] == [5, 2]
    saved = json.loads((tmp_path / "run" / "results.json").read_text())
    assert saved["search"] == json.loads(json.dumps(search))
    assert len(saved["search"]["trials"]) == 7
    assert all(trial["score"] is not None for trial in search["trials"] if trial["rung"] == 1)
    page = (tmp_path / "run" / "search.html").read_text(encoding="utf-8")
    assert page.count('<svg class="chart') == 4, "two rungs, the settings and the finalists"
    for words in ("search has never read dev", "and so too good on average", "learning rate", "rung reached", "on dev"):
        assert words in page
    check_run_folder(tmp_path / "run", resume=False, overwrite=True, inputs=())  # all its files are a run's
    assert "search.html shows what was tried" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", FinetuneRecipe)
    chosen = search["settings"][search["chosen"]]
    assert (recipe.learning_rate, recipe.layer_decay, recipe.search_fields) == (chosen["learning_rate"], 0.5, ())
    names = ("learning_rate", "per_device_train_batch_size", "layer_decay", "max_steps", "warmup_steps")
    given = {name: getattr(recipe, name) for name in names}
    firth.finetune(checkpoint_of("bert"), "classify", *files, tmp_path / "given", **fixed | given)
    for name in ("seed-0/log.jsonl", "seed-1/final/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "given" / name).read_bytes(), name


def test_a_run_stopped_in_a_trial_resumes_exactly(
    plan: Plan, straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends the run in the first rung, then in the second. Finished trials are not repeated."""
    real, tried = trial_runs.fit, list[str]()

    def stop_at(number: int) -> Callable[..., Any]:
        tried.clear()

        def press(run: Any, resume: bool = False) -> Any:
            tried.append(run.name)
            if len(tried) == number:
                run.hooks.append((1, lambda step, model: os.kill(os.getpid(), signal.SIGTERM)))
            return real(run, resume)

        return press

    for number, finished in ((2, 1), (7, 7)):  # the second stop is in the seventh trial after the first one
        monkeypatch.setattr(trial_runs, "fit", stop_at(number))
        with pytest.raises(Interrupted):
            finetune(plan(), resume=finished > 1)
        search = read_intermediate(tmp_path / "run" / "search.json", Search)
        assert search is not None
        assert len(search.trials) == finished
        assert not (tmp_path / "run" / "seed-0").exists()
    monkeypatch.setattr(trial_runs, "fit", stop_at(0))
    finetune(plan(), resume=True)
    assert len(tried) == 1
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    # a finished run keeps its choice, and refuses another search
    assert finetune(plan(), resume=True)["search"]["settings"] == straight["search"]["settings"]
    with pytest.raises(UserError, match="search: 6 -> 8"):
        finetune(plan(search=8), resume=True)


def test_a_search_that_continues_with_another_recipe_repeats_its_trials(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tried = trial_runs.fit, list[str]()

    def press(run: Any, resume: bool = False) -> Any:
        tried.append(run.name)
        if len(tried) in (3, 4):
            run.hooks.append((1, lambda step, model: os.kill(os.getpid(), signal.SIGTERM)))
        return real(run, resume)

    monkeypatch.setattr(trial_runs, "fit", press)
    for recipe, resume in ((plan(), False), (plan(weight_decay=0.5), True)):
        with pytest.raises(Interrupted):
            finetune(recipe, resume=resume, allow_change=resume)
    assert tried[3] == tried[0], "the first trial again"


KILLED = """
import os, signal, sys
from pathlib import Path
from firth.tasks import FinetuneRecipe, finetune, rate_trial, search, train_seed, trial_runs
from firth.train import load_recipe
search.MIN_TRIAL_STEPS, rate_trial.MIN_HELD_OUT_EXAMPLES = 2, 9
real, runs = trial_runs.fit, []
def kill(run, resume=False):
    runs.append(run)
    if len(runs) == int(sys.argv[2]):
        run.hooks.append((1, lambda step, model: os.kill(os.getpid(), signal.SIGKILL)))
    return real(run, resume)
trial_runs.fit = train_seed.fit = kill
finetune(load_recipe(Path(sys.argv[1]), FinetuneRecipe))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 8, 10])
def test_a_run_killed_in_a_trial_or_in_a_seed_resumes_exactly(
    kill_at: int, plan: Plan, straight: dict[str, Any], tmp_path: Path
) -> None:
    save_recipe(plan(), tmp_path / "plan.yaml")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "plan.yaml"), str(kill_at)]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    finetune(plan(), resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_too_few_examples_or_steps_are_refused_before_anything_is_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="search=6: the run has 5 steps, and a search needs 6"):
        finetune(plan(max_steps=5))
    monkeypatch.setattr("firth.tasks.rate_trial.MIN_HELD_OUT_EXAMPLES", 64)
    with pytest.raises(UserError, match="search=6: train has 115 examples, and a trial needs 320: add examples"):
        finetune(plan())
    assert not (tmp_path / "run").exists()


def test_the_search_never_reads_dev(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search_settings = finetuning.search_settings

    def search_blindly(job: Any) -> FinetuneRecipe:
        return search_settings(replace(job, dev_items=None, data=replace(job.data, dev=None)))

    monkeypatch.setattr(finetuning, "search_settings", search_blindly)
    assert finetune(plan(seeds=1, search=4))["search"]["chosen"] is not None


PREFERENCES = [
    {"prompt": f"I saw the {a} {b}", "chosen": "the river", "rejected": "the garden and the fox"}
    for a in ("cat", "dog", "horse", "fox", "river")
    for b in ("today", "again", "at noon", "I", "saw", "we", "like", "knows", "they", "found")
]
TEXTS = [{"text": row["prompt"] + " near the river"} for row in PREFERENCES]


@pytest.mark.parametrize(
    ("family", "task", "rows", "metric"),
    [
        ("t5", "text-to-text", None, "chrf"),
        ("gpt2", "lm", TEXTS, "perplexity"),
        ("llama", "preference", PREFERENCES, "accuracy"),
        pytest.param("llama", "kto", PREFERENCES, "accuracy", marks=pytest.mark.slow),
        pytest.param("bert", "embed", None, "mrr", marks=pytest.mark.slow),
    ],
)
def test_tasks_with_losses_of_their_own(
    family: str, task: str, rows: Any, metric: str, plan: Plan, toy: Toy, checkpoint_of: Checkpoints, tmp_path: Path
) -> None:
    files = {side: str(toy[f"{side}_pairs"]) for side in ("train", "dev")}
    if rows is not None:
        for side, part in (("train", rows), ("dev", rows[:5])):
            files[side] = str(tmp_path / f"{side}.jsonl")
            Path(files[side]).write_text("".join(json.dumps(row) + "\n" for row in part))
    options: dict[str, Any] = {"preference_loss": "kto"} if task == "kto" else {}
    if task == "embed":
        options["columns"] = {"text_a": "source", "text_b": "target"}
    task = "preference" if task == "kto" else task
    recipe = plan(checkpoint=str(checkpoint_of(family)), task=task, search=4, max_target_length=3, seeds=1, max_steps=6)
    result = finetune(replace(recipe, **files, **options))
    assert result["metric"] == metric
    finals = [trial for trial in result["search"]["trials"] if trial["rung"] == 1]
    assert len(finals) == 2
    assert all(math.isfinite(trial["score"]) and math.isfinite(trial["loss"]) for trial in finals)
