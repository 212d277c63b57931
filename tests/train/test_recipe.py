"""Recipes: overrides, files, invalid values, and what a resumed run may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.models import get_preset
from firth.models.config import ALiBi, LearnedPosition, Rotary, SinusoidalPosition
from firth.objectives import MLM, OBJECTIVES
from firth.objectives.noise_mask import SpanMasking
from firth.recipes import pretraining_recipe
from firth.tasks import FinetuneRecipe
from firth.train import (
    Recipe,
    TrainingConfig,
    apply_overrides,
    load_recipe,
    parse_overrides,
    read_yaml_mapping,
    save_recipe,
)
from firth.train.recipe import EngineConfig
from firth.train.resume import merge_recipe
from firth.train.schedule import resolve_schedule


def recipe(**fields: object) -> Recipe:
    return pretraining_recipe(get_preset("bert-tiny"), **fields)


def never() -> tuple[float, float]:
    raise AssertionError("nothing is timed without minutes")


def test_overrides_reach_any_depth() -> None:
    words = ["model.num_layers=6", "learning_rate=1e-4", "objective.rate=0.3", "model.position.length=64", "bf16=true"]
    new = apply_overrides(recipe(), parse_overrides(words))
    assert new.model.num_layers == 6
    assert new.learning_rate == 1e-4
    assert new.objective.rate == 0.3  # type: ignore[union-attr]
    assert new.model.max_length == 64
    assert new.bf16 is True
    assert replace(new.model, num_layers=2, position=recipe().model.position) == recipe().model


@pytest.mark.parametrize(
    ("words", "position"),
    [
        (["model.position.kind=Rotary"], Rotary()),
        (["model.position.theta=500.0", "model.position.kind=Rotary"], Rotary(theta=500.0)),
        (["model.position.kind=SinusoidalPosition"], SinusoidalPosition()),
        (["model.position.length=64", "model.position.kind=LearnedPosition"], LearnedPosition(64)),
        (["model.position.kind=ALiBi"], ALiBi()),
    ],
)
def test_a_kind_comes_with_its_own_fields(words: list[str], position: object) -> None:
    start = recipe()
    assert start.model.position == LearnedPosition(512)
    assert apply_overrides(start, parse_overrides(words)).model == replace(start.model, position=position)


def test_kinds_inside_a_new_kind() -> None:
    words = ["objective.masking.max_span_length=4", "objective.masking.kind=SpanMasking", "objective.kind=MLM"]
    new = apply_overrides(pretraining_recipe(get_preset("gpt2-tiny")), parse_overrides(words))
    assert new.objective == MLM(masking=SpanMasking(max_span_length=4))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.position.kind=Rotory", r"model.position: unknown kind 'Rotory'. Did you mean 'Rotary'"),
        ("model.head.kind=[red]", r"model.head: unknown kind \['red'\]"),
        ("lerning_rate=1", r"Unknown key 'lerning_rate'.*'learning_rate'"),
        ("model.num_layer=1", r"Unknown key 'model.num_layer'.*'model.num_layers'"),
        ("model.dim.x=1", r"Unknown key 'model.dim.x'"),
        ("max_steps=many", r"max_steps: 'many' is not a whole number"),
        ("max_steps=1.5", r"max_steps: 1.5 is not a whole number"),
        ("bf16=perhaps", r"bf16"),
        ("lr_scheduler_type=linar", r"lr_scheduler_type: 'linar' is not one of linear, cosine, constant"),
        ("objective=MLN", r"objective: unknown kind 'MLN'. Did you mean 'MLM'"),
        ("objective.rate=2", r"objective.rate is 2"),
    ],
)
def test_wrong_overrides_are_named(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_overrides(recipe(), parse_overrides([word]))


@pytest.mark.parametrize("word", ["lonely", "=3", "a=[1", "a={"])
def test_arguments_that_are_not_key_value_raise(word: str) -> None:
    with pytest.raises(UserError):
        parse_overrides([word])


def test_a_second_text_after_the_options_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "b.txt").touch()
    with pytest.raises(UserError, match=r"--data .*b.txt"):
        parse_overrides([str(tmp_path / "b.txt")])


def test_columns_accept_any_key() -> None:
    assert apply_overrides(FinetuneRecipe(), {"columns.text": "body"}).columns == {"text": "body"}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_seq_length": 3},
        {"per_device_train_batch_size": -1},
        {"global_batch_tokens": -1},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"minutes": float("inf")},
        {"num_train_epochs": 0.0},
        {"adam_beta2": 1.0},
        {"seed": -1},
        {"seed": 2**63},
        {"save_steps": 0},
        {"eval_rows": 0},
        {"max_seq_length": 513},
        {"max_seq_length": 65537},
    ],
)
def test_invalid_numbers_raise(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(fields)).replace("_", "[_-]")):
        recipe(**fields).check()


def test_an_objective_of_another_architecture_raises() -> None:
    with pytest.raises(UserError, match="CLM needs the architecture decoder; bert has the architecture encoder"):
        apply_overrides(recipe(), {"objective": "CLM"}).check()


@pytest.mark.parametrize("name", ["rtd", "nsp", "rtd-mlm-and-clm"])
def test_an_encoder_objective_with_modules_of_its_own_names_the_architecture(name: str) -> None:
    decoder = pretraining_recipe(get_preset("gpt2-tiny"), objective=OBJECTIVES[name], data="d", output_dir="o")
    with pytest.raises(UserError, match="needs the architecture encoder; gpt2 has the architecture decoder"):
        decoder.check()


def test_a_recipe_round_trips_through_yaml(tmp_path: Path) -> None:
    r = recipe(learning_rate=1e-5, output_dir="größe", seed=7)
    save_recipe(r, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml", Recipe) == r


def test_invalid_recipe_files_raise(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    for text in ("a: [1", "- 1", "just words"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"r\.yaml"):
            read_yaml_mapping(file)
    file.write_text("max_steps: 3\nsteps: 4\n")
    with pytest.raises(UserError, match=r"unknown key 'steps'"):
        load_recipe(file, TrainingConfig)
    with pytest.raises(UserError, match="no such file"):
        read_yaml_mapping(tmp_path / "nowhere.yaml")


# --- what is left open


def test_epochs_determine_the_steps() -> None:
    r = resolve_schedule(TrainingConfig(num_train_epochs=2, per_device_train_batch_size=4), 50, never, 0.0)
    assert (r.max_steps, r.warmup_steps, r.eval_steps) == (25, 2, 3)
    r = resolve_schedule(
        TrainingConfig(num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2), 50, never, 0
    )
    assert r.max_steps == 13  # half a batch more than the two epochs need


def test_explicit_values_are_kept() -> None:
    r = resolve_schedule(TrainingConfig(max_steps=7, warmup_steps=0, eval_steps=5), 50, never, 0.0)
    assert (r.max_steps, r.warmup_steps, r.eval_steps) == (7, 0, 5)


def test_too_few_steps_are_raised_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    r = resolve_schedule(
        TrainingConfig(num_train_epochs=1, per_device_train_batch_size=10), 50, never, 0.0, min_steps=200
    )
    assert r.max_steps == 200
    assert "num_train_epochs=1 makes 5 steps" in capsys.readouterr().err
    assert resolve_schedule(TrainingConfig(max_steps=3), 50, never, 0.0, min_steps=200).max_steps == 3


def test_minutes_are_divided_by_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 110.0)
    # 60 seconds, 10 of which are gone; a tenth of the rest, 5 x 1, goes to evaluations: 45 steps of one second
    r = resolve_schedule(TrainingConfig(minutes=1.0), 50, lambda: (1.0, 1.0), start_time=100.0)
    assert (r.max_steps, r.eval_steps) == (45, 9)
    assert (
        resolve_schedule(TrainingConfig(minutes=1.0, max_steps=9), 50, lambda: (1.0, 1.0), start_time=100.0).max_steps
        == 9
    )
    # 50 seconds, one for the evaluation at the end: 24 steps with one each, 40 with one after every fourth
    for every, steps in ((1, 24), (4, 39)):
        assert (
            resolve_schedule(
                TrainingConfig(minutes=1.0, eval_steps=every), 50, lambda: (1.0, 1.0), start_time=100.0
            ).max_steps
            == steps
        )


def test_minutes_over_before_the_first_step_raise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 110.0)
    assert resolve_schedule(TrainingConfig(minutes=0.1), 50, lambda: (1.0, 1.0), start_time=100.0).max_steps == 1
    assert "6s is too short for one step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"minutes": 1e300}, "minutes is 1e.300, and must be at most"),
        ({"num_train_epochs": 1e300}, "num_train_epochs is 1e.300, and must be at most"),
        ({"per_device_train_batch_size": 10**8}, "A step would read .* tokens"),
        ({"adam_epsilon": 0.0}, "adam_epsilon is 0, and must be more than 0"),
        ({"warmup_steps": -5}, "warmup_steps is -5"),
        ({"optim": "muon", "learning_rate": 0.0, "muon_learning_rate": 0.02}, "follows learning_rate's schedule"),
    ],
)
def test_out_of_range_numbers_raise(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(**fields).check()


def test_a_warm_up_longer_than_the_run_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    resolve_schedule(TrainingConfig(max_steps=7, warmup_steps=7), 50, never, 0.0)
    assert "warmup_steps is 7 of 7 steps" in capsys.readouterr().err
    resolve_schedule(TrainingConfig(max_steps=7, warmup_steps=6), 50, never, 0.0)
    assert not capsys.readouterr().err


# --- resume


def test_lengthening_a_run_planned_by_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    before = recipe(minutes=1.0, max_steps=162)
    for fields in ({"minutes": 2.0}, {"minutes": 1.0, "max_steps": 400}):
        assert merge_recipe(before, recipe(**fields), allow_change=True).max_steps == 162
        assert "the run keeps its 162 steps; --max-steps N without --minutes" in capsys.readouterr().err
    assert merge_recipe(before, recipe(minutes=1.0), allow_change=True).max_steps == 162
    assert not capsys.readouterr().err
    assert merge_recipe(before, recipe(max_steps=400), allow_change=True).max_steps == 400


def test_a_resumed_run_keeps_resolved_values() -> None:
    first = resolve_schedule(TrainingConfig(output_dir="run", num_train_epochs=2), 100, never, 0.0)
    assert merge_recipe(first, TrainingConfig(output_dir="run", num_train_epochs=2)) == first


@pytest.mark.parametrize("then", [None, False, True])
def test_a_resumed_run_keeps_its_compile_setting(then: bool | None) -> None:
    first = TrainingConfig(max_steps=5, engine=EngineConfig(compile_regions=then))
    assert merge_recipe(first, TrainingConfig(max_steps=5)) == first
    with pytest.raises(UserError, match=f"compile_regions: {then} -> {not then}"):
        merge_recipe(first, replace(first, engine=EngineConfig(compile_regions=not then)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": 8}, "max_steps: 10 -> 8"),
        ({"max_steps": 10, "learning_rate": 2.0}, "learning_rate: 0.001 -> 2.0"),
        ({"warmup_steps": 3}, "warmup_steps: 1 -> 3"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"minutes": 2.0, "warmup_steps": 3}, r"minutes: 0.0 -> 2.0; warmup_steps: 1 -> 3"),
    ],
)
def test_a_resumed_run_with_another_recipe_raises(fields: dict[str, float], message: str) -> None:
    first = resolve_schedule(TrainingConfig(max_steps=10), 100, never, 0.0)
    with pytest.raises(UserError, match=message):
        merge_recipe(first, TrainingConfig(**fields))  # type: ignore[arg-type]


def test_a_run_folder_may_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = recipe(output_dir="run", data="run/data", max_steps=5)
    now = replace(first, output_dir=str(tmp_path / "moved"), data=str(tmp_path / "moved" / "data"))
    assert merge_recipe(first, now) == now
    with pytest.raises(UserError, match=r"data: run/data -> elsewhere"):
        merge_recipe(first, replace(first, data="elsewhere"))
    other = replace(first, data="shards")
    assert merge_recipe(other, replace(other, data="./shards")).data == "./shards"
    with pytest.raises(UserError, match="checkpoint"):
        merge_recipe(first, replace(first, checkpoint="."))
