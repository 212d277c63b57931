"""Plans of a pretraining: which size, which settings, what is predicted, and that the run does what the plan says."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from firth import api
from firth.cli.main import app
from firth.commands.data_source import DataOptions
from firth.commands.pretrain_plan import plan_pretraining, read_saved_fields
from firth.core.errors import UserError
from firth.core.files import format_bytes, read_object
from firth.lab import plan_text, planner
from firth.lab.expected_loss import (
    BYTES_PER_TOKEN,
    TABLE_FILE,
    UNIGRAM_ENTROPY,
    VOCABULARY_SIZES,
    RunSize,
    expect_run_loss,
    find_law,
    parse_entry,
    read_loss_table,
    vocabulary_effect,
)
from firth.lab.plan_text import TextFacts
from firth.lab.planner import CPU_START_SECONDS, Planner, StepCosts, describe_misfit
from firth.models import ModelConfig, flops_per_token, get_preset, shaped_model, with_vocabulary
from firth.recipes import (
    SHAPE_RECIPES,
    pretraining_recipe,
    shape_recipe_fields,
    tokenizer_kind,
    update_recipe,
    with_repeated_text,
)
from firth.text import Corpus
from firth.tokens import open_shards, prepare, train_tokenizer
from firth.train import Recipe, load_recipe
from firth.train.batch_size import MemoryTrial, fit_line, whole_batch_recipe
from firth.train.dataloader import make_row_dataset, make_text_progress_fn
from firth.train.recipe import save_recipe

GPU_FLOPS = 3.4e14  # of an H200 in training: `measure_flops` there
CPU_FLOPS = 4e10
WORDS_10M = TextFacts(tokens=14_000_000, documents=30_000, rows=110_000, unigram_entropy=7.05)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "select_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(planner, "available_memory", lambda device: 140e9)
    monkeypatch.setattr(planner, "measure_flops", lambda device: GPU_FLOPS)
    monkeypatch.setattr(planner, "name_device", lambda recipe: "a GPU")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "available_memory", lambda device: 16e9)
    monkeypatch.setattr(planner, "measure_flops", lambda device: CPU_FLOPS)


def make_planner(text: TextFacts = WORDS_10M, tokens: float = 0.0, vocab_size: int = 8192, **fields: Any) -> Planner:
    """A planner that times nothing."""

    def make_recipe(config: ModelConfig) -> Recipe:
        return pretraining_recipe(replace(config, vocab_size=vocab_size), per_device_train_batch_size=0, **fields)

    return Planner(make_recipe, shards_with("unigram"), text, tokens=tokens)


@cache
def shards_with(kind: str) -> Any:
    """Nothing but a tokenizer."""
    return SimpleNamespace(tokenizer=train_tokenizer(["the heron came back"], kind, 300))


def scaled_text(factor: float) -> TextFacts:
    text = WORDS_10M
    return text._replace(tokens=round(factor * text.tokens), rows=round(factor * text.rows))


# --- the choice


@pytest.mark.usefixtures("on_gpu")
def test_the_size_that_was_measured_to_be_best_is_chosen() -> None:
    """Four minutes of an H200 and 10M words: 8 layers of 512 learn more than modernbert-base (docs/results.md)."""
    plan = make_planner(minutes=4.0).plan("encoder", times_steps=False)
    assert plan.chosen.name == "encoder-8x512"
    assert (plan.smaller.name, plan.larger.name) == ("encoder-6x384", "encoder-12x768")
    assert plan.chosen.recipe.global_batch_tokens == 32768
    assert plan.chosen.tokens_per_second == pytest.approx(1.94e6, rel=0.3)
    assert plan.chosen.seconds == pytest.approx(240, rel=0.01)


@pytest.mark.usefixtures("on_gpu")
def test_more_time_never_gives_a_smaller_model() -> None:
    for architecture in ("encoder", "decoder", "encoder-decoder"):
        runs = [make_planner(minutes=m).plan(architecture, False).chosen for m in (0.6, 1, 4, 30, 240, 2000)]
        sizes, losses = [run.parameters for run in runs], [run.loss for run in runs]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) >= (2 if architecture == "encoder-decoder" else 3)
        assert losses == sorted(losses, reverse=True)


@pytest.mark.usefixtures("on_gpu")
def test_more_text_never_gives_a_smaller_model() -> None:
    """With as many passes. In a given time more text can mean a smaller model that reads more of it."""
    texts = [scaled_text(factor) for factor in (0.003, 0.03, 0.3, 3, 30)]
    for fields in ({"minutes": 20.0}, {"num_train_epochs": 4.0}):
        runs = [make_planner(text, **fields).plan("encoder", False).chosen for text in texts]
        losses, sizes = [run.loss for run in runs], [run.parameters for run in runs]
        assert losses == sorted(losses, reverse=True)
        assert sizes == sorted(sizes) or "minutes" in fields
        assert len(set(sizes)) >= 3


@pytest.mark.usefixtures("on_cpu")
def test_budgets_of_tokens_and_of_passes_agree() -> None:
    by_passes = make_planner(num_train_epochs=3.0).plan("encoder", False).chosen
    by_tokens = make_planner(tokens=3 * 110_000 * 128).plan("encoder", False).chosen
    assert by_tokens.name == by_passes.name
    assert by_tokens.steps == pytest.approx(by_passes.steps, rel=0.01)
    assert by_tokens.recipe.max_steps == by_tokens.steps
    assert by_passes.passes == pytest.approx(3, rel=0.01)


@pytest.mark.usefixtures("on_cpu")
def test_a_long_run_and_too_few_minutes_are_said() -> None:
    assert "--minutes limits" in make_planner(num_train_epochs=100.0).plan("encoder", False).notes[0]
    short = make_planner(minutes=0.1).plan("encoder", False)
    assert "expect little" in short.notes[0]
    assert short.chosen.seconds > CPU_START_SECONDS + 2, "the start takes longer than all minutes; half of them stay"
    assert make_planner(minutes=4.0).plan("encoder", False).notes == []


@pytest.mark.usefixtures("on_gpu")
def test_a_plan_says_when_most_of_the_time_is_not_training() -> None:
    slow = WORDS_10M._replace(prepare_seconds=200.0)
    found = make_planner(slow, minutes=4.0).plan("encoder", False)
    assert found.notes == [
        "tokenizing the text takes about 3m20s of the 4m00s: `firth prepare` does it once, for all runs"
    ]
    found = make_planner(minutes=0.01).plan("encoder", False)
    assert found.chosen.steps < 200
    assert "expect little" in found.notes[0]


@pytest.mark.usefixtures("on_cpu")
def test_too_little_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "available_memory", lambda device: 1e6)
    with pytest.raises(UserError, match=r"No size fits into memory: encoder-2x64 takes .* and 1\.0 MB are free"):
        make_planner(minutes=5.0).plan("encoder", False)


@pytest.mark.usefixtures("on_gpu")
def test_a_preset_that_does_not_suit_is_told() -> None:
    def misfit(name: str, minutes: float) -> str:
        config = replace(get_preset(name), vocab_size=8192)
        recipe = pretraining_recipe(config, minutes=minutes, per_device_train_batch_size=0)
        return describe_misfit(recipe, make_planner(minutes=minutes))

    message = misfit("bert-large", 4.0)
    assert message.startswith(
        "312M parameters for 14M tokens and 4 minutes: an encoder of 29.4M (encoder-8x512) is exp"
    )
    assert message.endswith("`firth plan` shows the choice")
    assert "an encoder of" in misfit("bert-tiny", 240.0)
    assert misfit("encoder-8x512", 4.0) == ""


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("tokens_per_second", [212_000, 475_000])
def test_modernbert_base_in_four_minutes_is_told(tokens_per_second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the speeds that an H200 had with two batches. In eight minutes it had 2.42, and 8x512 in four 2.23."""
    flops = tokens_per_second * 3 * flops_per_token(replace(get_preset("modernbert-base"), vocab_size=16384), 128)
    monkeypatch.setattr(planner, "measure_flops", lambda device: flops)
    plan = make_planner(minutes=4.0, vocab_size=16384)
    message = describe_misfit(plan.make_recipe(get_preset("modernbert-base")), plan)
    assert message.startswith("124M parameters for 14M tokens and 4 minutes: an encoder of ")


@pytest.mark.usefixtures("on_cpu")
def test_a_tiny_preset_on_a_cpu_is_not_told() -> None:
    for flops_share in (0.5, 1, 2):
        plan = make_planner(scaled_text(flops_share), minutes=10.0)
        assert describe_misfit(plan.make_recipe(get_preset("bert-tiny")), plan) == ""


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"num_train_epochs": 4.0}, "4 passes over them: an encoder of"),
        ({"max_steps": 2000}, "M tokens to read: an encoder of"),
    ],
)
def test_a_misfit_is_told_without_minutes_too(budget: dict[str, Any], said: str) -> None:
    plan = make_planner(**budget)
    assert said in describe_misfit(plan.make_recipe(get_preset("bert-large")), plan)
    assert said in describe_misfit(plan.make_recipe(get_preset("bert-tiny")), plan)
    best = plan.plan("encoder", False).chosen
    assert (
        describe_misfit(
            plan.make_recipe(shaped_model("encoder", best.recipe.model.num_layers, best.recipe.model.dim)), plan
        )
        == ""
    )


@pytest.mark.usefixtures("on_cpu")
def test_bart_is_not_compared_with_models_that_cannot_read_its_tokens() -> None:
    """The ladder's T5Gemma needs sentinels. `firth plan bart-base` ended in an error that names them."""
    found = make_planner(minutes=4.0)
    assert found.ladder_suits_tokens("encoder-decoder")
    found.shards = shards_with("byte-bpe")
    assert not found.ladder_suits_tokens("encoder-decoder")
    assert found.ladder_suits_tokens("decoder")
    assert describe_misfit(found.make_recipe(get_preset("bart-base")), found) == ""


@pytest.mark.usefixtures("on_cpu")
def test_a_larger_model_is_named_with_its_time() -> None:
    plan = make_planner(num_train_epochs=4.0)
    message = describe_misfit(plan.make_recipe(get_preset("bert-tiny")), plan)
    assert re.search(r"instead of \d\.\d\d in \d+x the time; `firth plan`", message)


@pytest.mark.usefixtures("on_cpu")
def test_what_the_user_has_set_is_kept() -> None:
    plan = make_planner(minutes=60.0)
    plan.keeps = ["batch", "rate", "save_steps"]
    plan.make_recipe = lambda config: pretraining_recipe(
        config, minutes=60.0, learning_rate=1e-4, per_device_train_batch_size=8, save_steps=7
    )
    recipe = plan.plan("encoder", False).chosen.recipe
    assert (recipe.learning_rate, recipe.per_device_train_batch_size, recipe.save_steps) == (1e-4, 8, 7)
    assert recipe.global_batch_tokens == 0


# --- the loss


def test_the_table_has_a_law_for_each_architecture() -> None:
    table = read_loss_table()
    assert set(table) == {
        *("encoder", "encoder (cpu)", "decoder", "decoder (cpu)", "encoder-decoder", "encoder, mlm"),
    }
    assert find_law(table, "encoder", "mlm").objective == "mlm"
    assert find_law(table, "encoder", "nsp").objective == find_law(table, "encoder", None).objective == "mlm-and-clm"
    for name, law in table.items():
        recipe = pretraining_recipe(shaped_model(re.split("[, ]", name)[0], 2, 64))
        measured = {"t5gemma": "firth-t5"}  # no T5Gemma is measured yet
        assert law.family == measured.get(recipe.model.family, recipe.model.family)
        assert "benchmarks/scaling_sweep.py" in law.command
        of_text = {"text_tokens": 1.4e7, "unigram_entropy": law.unigram_entropy, "vocab_size": law.vocab_size}
        long, short = (law.loss(RunSize(n, d, **of_text)) for n, d in ((3e7, 3e8), (3e6, 3e6)))
        assert 1 < long < short < 12


def test_each_law_orders_and_reproduces_its_own_runs() -> None:
    for name, entry in read_object(TABLE_FILE).items():
        law = parse_entry(entry).fit.law
        predicted = [law.loss(*run[:3]) for run in entry["runs"]]
        measured = [run[3] for run in entry["runs"]]
        # one level for A and B does not fit three sizes of text, nor tiny and large models (docs/results.md)
        limit = 0.07 if name in ("encoder", "encoder (cpu)", "decoder (cpu)") else 0.03
        assert predicted == pytest.approx(measured, rel=limit), name
        assert np.abs(np.log(predicted) - np.log(measured)).mean() < limit / 2, name
        runs = sorted(zip(measured, predicted, strict=True))
        assert all(low[1] < high[1] for low, high in combinations(runs, 2) if high[0] > low[0] * (1 + limit) ** 2), name


@pytest.mark.usefixtures("on_cpu")
def test_no_run_is_expected_to_be_worse_than_token_frequencies() -> None:
    plan = make_planner(minutes=1.0)
    large, small = (plan.plan_run(name, get_preset(name)) for name in ("bert-large", "bert-base"))
    assert large.expected_loss == small.expected_loss == large.to_dict()["expected_loss"] == WORDS_10M.unigram_entropy
    assert large.loss > small.loss, "sizes are told apart nevertheless"
    tiny = make_planner(minutes=60.0).plan_run("bert-tiny", get_preset("bert-tiny"))
    assert tiny.expected_loss == tiny.loss < 7


def test_a_law_that_was_measured_on_a_cpu_is_for_cpus() -> None:
    table = read_loss_table()
    tiny = replace(table["encoder"], unigram_entropy=6.0)
    table["encoder (cpu)"] = tiny
    assert find_law(table, "encoder", "mlm-and-clm", "cpu") is tiny
    assert find_law(table, "encoder", "mlm-and-clm", "cuda") is table["encoder"]
    assert find_law(table, "encoder", "mlm", "cpu") is table["encoder, mlm"], "the objective counts first"


def test_a_run_is_compared_with_the_law_of_its_device() -> None:
    """The encoder of the sweep on a CPU: half a million tokens, read four times, ended at 4.83 (docs/results.md)."""
    config = replace(get_preset("encoder-2x64"), vocab_size=4096)
    recipe = pretraining_recipe(config, **SHAPE_RECIPES["encoder"])
    facts = 4 * 680_000, 680_000, UNIGRAM_ENTROPY["wordpiece"][VOCABULARY_SIZES.index(4096)]
    assert expect_run_loss(recipe, *facts, "cpu") == pytest.approx(4.83, rel=0.02)
    assert expect_run_loss(recipe, *facts, "cuda") is None, "the runs of the GPU were larger"
    assert expect_run_loss(replace(recipe, checkpoint="run/final"), *facts, "cpu") is None


def test_extrapolation_is_said() -> None:
    law = read_loss_table()["encoder"]
    inside = [sum(bounds) / 2 for bounds in (law.fit.parameters_range, law.fit.tokens_range)]
    text = inside[1] / (sum(law.fit.passes_range) / 2)
    size = RunSize(*inside, text, law.unigram_entropy, law.vocab_size)
    assert set(law.extrapolations(size)) <= {"law"}
    found = law.extrapolations(size._replace(parameters=1e12, unigram_entropy=2 * law.unigram_entropy))
    assert found["parameters"].startswith("1000B where")
    assert "unigram entropy" in found["text"]


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
def test_a_larger_vocabulary_keeps_the_loss_per_byte(kind: str) -> None:
    """Of one text, with as many bytes read: longer tokens have a higher loss each, and the same per byte."""
    law = replace(read_loss_table()["decoder (cpu)"], tokenizer_kind=kind)
    per_byte, per_token = [], []
    for size, length, entropy in zip(VOCABULARY_SIZES, BYTES_PER_TOKEN[kind], UNIGRAM_ENTROPY[kind], strict=True):
        loss = law.loss(RunSize(1e6, 4e6 / length, 2e6 / length, entropy, size))
        per_byte.append(loss / length)
        per_token.append(loss)
    assert per_byte == pytest.approx([per_byte[0]] * 4)
    assert per_token == sorted(per_token)
    tiny, smallest = (vocabulary_effect(kind, size, 8192) for size in (300, 4096))
    assert tiny == smallest, "no size outside of the measured ones is guessed"


# --- predictions


@pytest.fixture(scope="module")
def shards(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus, folder = Corpus([corpus_file]), tmp_path_factory.mktemp("shards")
    prepare(corpus, train_tokenizer(corpus.texts(), "wordpiece", 300), folder / "shards")
    return folder / "shards"


@pytest.fixture
def small_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and steps that take milliseconds."""
    monkeypatch.setattr(planner, "SHAPE_LADDER", ((1, 64), (2, 64), (2, 128)))
    monkeypatch.setattr(planner, "TIMED_TOKENS", 256)
    monkeypatch.setattr(planner, "MAX_PARAMETERS_PER_TOKEN", 1000)


class FakeClock:
    """A clock that only steps advance, by a line over their rows."""

    def __init__(self, fixed: float, per_row: float) -> None:
        self.now, self.fixed, self.per_row = 0.0, fixed, per_row

    def monotonic(self) -> float:
        return self.now

    def step(self, run: Any, runner: Any, optimizer: Any, batches: Any, *_: Any) -> torch.Tensor:
        self.now += self.fixed + self.per_row * sum(len(batch.input_ids) for batch in batches)
        return torch.tensor(0.0)


@pytest.mark.usefixtures("small_ladder")
def test_the_predicted_time_is_that_of_the_run(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two timed steps of a few rows give the line, and so the seconds of a run with larger steps: within 5%."""
    clock = FakeClock(0.02, 0.003)
    monkeypatch.setattr(planner, "time", clock)
    monkeypatch.setattr(planner, "train_step", clock.step)
    result = api.plan("encoder", shards, passes=20, max_seq_length=32)
    chosen = result["chosen"]
    rows = chosen["global_batch_tokens"] // 32
    evaluations = 10 * 256 * 0.003 / 3
    expected = planner.CPU_START_SECONDS + chosen["steps"] * (0.02 + 0.003 * rows) + evaluations
    assert chosen["is_timed"]
    assert chosen["seconds"] == pytest.approx(expected, rel=0.05)
    assert chosen["passes"] == pytest.approx(20, rel=0.2)


def test_a_disturbed_timing_gives_a_line_nevertheless() -> None:
    costs = StepCosts(*planner.fit_time(8, 0.5, 0.4), 0, 0, True)
    assert costs.step_seconds(8 * planner.LARGER_STEP) == pytest.approx(0.4)


FAMILIES = ("encoder-2x64", "decoder-2x64", "encoder-decoder-2x64", "bert-tiny", "gpt2-tiny", "t5-tiny", "bart-tiny")


@pytest.mark.parametrize("name", FAMILIES[:2] + tuple(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES[2:]))
def test_predicted_memory_is_that_of_a_traced_step(name: str, corpus_file: Path, tmp_path: Path) -> None:
    """From steps of 8 and 16 rows to one of 32, whose memory torch's profiler measures: within 10%."""
    recipe, corpus = pretraining_recipe(get_preset(name), per_device_train_batch_size=1), Corpus([corpus_file])
    kind = tokenizer_kind(recipe.model, recipe.objective)
    prepare(corpus, train_tokenizer(corpus.texts(), kind, 500), tmp_path / "shards")
    part = open_shards(tmp_path / "shards")
    recipe = replace(recipe, model=with_vocabulary(recipe.model, part.tokenizer.vocab), data=str(part.folder))
    trial = MemoryTrial(recipe, part, torch.device("cpu"))
    fixed, per_row = fit_line(8, trial.traced_bytes(8), trial.traced_bytes(16))
    assert fixed + 32 * per_row == pytest.approx(profile_peak(trial, 32), rel=0.1)


def profile_peak(trial: MemoryTrial, rows: int) -> int:
    """The most that a step allocates beyond what is there, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    from firth.train.step import train_step

    batch = trial.make_batch(rows)
    trial.optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(trial.run, trial.runner, trial.optimizer, [batch], 0, 0.0)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


# --- the command, and the run


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(api, "pretrain", lambda **options: calls.append(options) or {})
    return calls


@pytest.mark.usefixtures("small_ladder")
@pytest.mark.parametrize("architecture", ["encoder", "decoder", "encoder-decoder"])
def test_the_pasted_command_is_the_plan(
    architecture: str,
    corpus_file: Path,
    captured: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(0.02, 0.003)  # on a busy machine a minute suits one size only
    monkeypatch.setattr(planner, "time", clock)
    monkeypatch.setattr(plan_text, "time", clock)
    monkeypatch.setattr(planner, "train_step", clock.step)
    words = ["plan", architecture, "--data", str(corpus_file), "--minutes", "1", "--max-seq-length", "32", "--json"]
    app([*words, "--min-words", "3"], standalone_mode=False)
    result = json.loads(capsys.readouterr().out)
    chosen, command = result["chosen"], shlex.split(result["command"])
    app(command[command.index("pretrain") :], standalone_mode=False)
    (options,) = captured
    assert options["model"] == chosen["model"]
    assert options["data"] == [str(corpus_file)]
    assert (options["minutes"], options["min_words"]) == (1.0, 3)
    names = ("vocab_size", "global_batch_tokens", "learning_rate", "save_steps")
    assert options["max_seq_length"] == chosen["row_length"] == 32
    assert {name: options[name] for name in names[1:]} == {name: chosen[name] for name in names[1:]}
    assert options["vocab_size"] == 4096
    assert result["text"]["documents"] > 200
    assert result["smaller"] or result["larger"]


@pytest.mark.usefixtures("small_ladder")
def test_the_run_does_what_the_plan_says(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pretrain encoder` writes the recipe of the plan, so does the pasted command, and a resumed run keeps it."""
    clock = FakeClock(0.02, 0.003)  # timed steps would differ from plan to plan
    monkeypatch.setattr(planner, "time", clock)
    monkeypatch.setattr(planner, "train_step", clock.step)
    options: dict[str, Any] = {"max_seq_length": 32}
    result = api.plan("encoder", shards, passes=1, **options)
    chosen = result["chosen"]
    run = tmp_path / "planned"
    api.pretrain("encoder", shards, run, num_train_epochs=1, warm_start="none", **options)
    said = capsys.readouterr().err
    assert f"plan: {chosen['model']} (modernbert)" in said
    recipe = load_recipe(run / "recipe.yaml", Recipe)
    assert (recipe.model.num_layers, recipe.model.dim) == (chosen["layers"], chosen["width"])
    for name in ("global_batch_tokens", "learning_rate", "save_steps", "optim", "lr_scheduler_type"):
        assert getattr(recipe, name) == chosen[name], name
    assert (recipe.max_seq_length, recipe.max_steps) == (chosen["row_length"], chosen["steps"])
    assert recipe.model.vocab_size == chosen["vocab_size"]
    words = shlex.split(result["command"])
    words = words[words.index("pretrain") :]
    words[words.index("--output-dir") + 1] = str(tmp_path / "pasted")
    app([*words, "--warm-start", "none"], standalone_mode=False)
    pasted = load_recipe(tmp_path / "pasted" / "recipe.yaml", Recipe)
    assert replace(pasted, output_dir="") == replace(recipe, output_dir="")
    resumed = api.pretrain(
        "encoder", shards, run, num_train_epochs=1, warm_start="none", resume=True, allow_change=False, **options
    )
    assert resumed["steps"] == chosen["steps"]


@pytest.mark.usefixtures("small_ladder")
def test_a_dry_run_plans_and_writes_nothing(corpus_file: Path, tmp_path: Path) -> None:
    result = api.pretrain("decoder", corpus_file, tmp_path / "run", minutes=1, max_seq_length=32, dry_run=True)
    assert result["model"].startswith("decoder-")
    assert result["seconds"] == pytest.approx(60, abs=3)
    assert result["peak_memory_bytes"] > result["memory_bytes"] / 2
    assert result["expected_loss"] > 1
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("small_ladder")
def test_without_a_budget_the_plan_is_that_of_pretrain(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 minutes where the size is planned, 3 passes of a preset; the help says so."""
    clock = FakeClock(0.02, 0.003)
    monkeypatch.setattr(planner, "time", clock)
    monkeypatch.setattr(planner, "train_step", clock.step)
    plan = api.plan("bert-tiny", shards, max_seq_length=32)
    assert plan["command"].endswith("--num-train-epochs 3")
    dry = api.pretrain("bert-tiny", shards, tmp_path / "run", max_seq_length=32, dry_run=True)
    assert dry["steps"] == plan["chosen"]["steps"]
    assert dry["passes"] == pytest.approx(plan["chosen"]["passes"])
    options = DataOptions(0, False, 0.05, {})
    assert plan_pretraining("encoder", shards, tmp_path, None, None, options, None, None, {}).recipe.minutes == 30
    app(["plan", "--help"], standalone_mode=False)
    assert "[default: 30, and for a preset 3 passes" in " ".join(capsys.readouterr().out.split())


def test_contiguous_rows_are_counted_before_a_batch_is_chosen(shards: Path, tmp_path: Path) -> None:
    result = api.pretrain("bert-tiny", shards, tmp_path / "run", order="stream", eval_rows=10**18, dry_run=True)
    assert result["steps"] > 0
    recipe = pretraining_recipe(get_preset("bert-tiny"), order="stream", per_device_train_batch_size=0)
    facts = plan_text.read_text_facts(recipe, open_shards(shards))
    num_tokens = facts.tokens + 2 * facts.documents  # [CLS] and [SEP]
    assert facts.rows == -(-num_tokens // recipe.max_seq_length)


def test_a_sample_stands_for_a_long_text(corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_text.sample_text(Corpus([corpus_file]), None, ("wordpiece", 300, False), 0.05, tmp_path / "whole")
    assert whole.scale == 1
    file = tmp_path / "long.txt"
    file.write_text("\n\n".join(f"{i} the heron and the otter" * 3 for i in range(40_000)), encoding="utf-8")
    monkeypatch.setattr(plan_text, "SAMPLE_CHARS", file.stat().st_size // 3)
    sample = plan_text.sample_text(Corpus([file]), whole.shards.tokenizer, ("", 0, False), 0.05, tmp_path / "sample")
    assert sample.scale == pytest.approx(3, rel=0.3)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A dataset of 9,000 short documents that does not publish its size."""
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    texts = [f"{i} the heron and the otter walked {i % 7} miles" for i in range(9000)]
    (tmp_path / "set" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "set" / "data" / "train-00000-of-00001.parquet"
    )
    return f"hf:{tmp_path}/set"


def publish_rows(dataset: str, num_rows: int) -> None:
    Path(dataset.removeprefix("hf:"), "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n"
        f"  splits:\n  - {{name: train, num_bytes: 10, num_examples: {num_rows}}}\n  dataset_size: 10\n---\n"
    )


def test_a_dataset_is_planned_for_its_own_size(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where it is not published, by its rows where they are: both give what the whole text has."""

    def facts(folder: str) -> TextFacts:
        args = ("wordpiece", 300, False)
        sample = plan_text.sample_text(Corpus([dataset]), None, args, 0.05, tmp_path / folder)
        recipe = pretraining_recipe(get_preset("bert-tiny"), per_device_train_batch_size=0)
        return plan_text.read_text_facts(recipe, sample.shards, sample.scale)

    whole = facts("whole")
    monkeypatch.setattr(plan_text, "SAMPLE_CHARS", 100_000)
    counted = facts("counted")
    publish_rows(dataset, 9000)
    monkeypatch.setattr("firth.text.corpus.MAX_COUNTED_BYTES", 0)
    published = facts("published")
    for found in (counted, published):
        assert found.is_estimated
        assert found[:3] == pytest.approx(whole[:3], rel=0.05)


def test_no_plan_is_made_for_an_unknown_size(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run says the least that there is, as long as the run reads no more than that."""
    monkeypatch.setattr(plan_text, "SAMPLE_CHARS", 100_000)
    monkeypatch.setattr("firth.text.corpus.MAX_COUNTED_BYTES", 200_000)
    message = r"size unknown\. It is not published, and more follow after the first [\d,]+ documents \(200\.0 kB\)"
    for plan in (
        lambda: api.plan("encoder", dataset, minutes=1),
        lambda: api.pretrain("encoder", dataset, tmp_path / "run", minutes=1, dry_run=True),
        lambda: api.pretrain("bert-tiny", dataset, tmp_path / "run", dry_run=True),
        lambda: api.pretrain("bert-tiny", dataset, tmp_path / "run", max_steps=100, dry_run=True),
        lambda: api.pretrain("word2vec", dataset, tmp_path / "run", dry_run=True),
    ):
        with pytest.raises(UserError, match=message):
            plan()
    dry = api.pretrain("bert-tiny", dataset, tmp_path / "run", max_steps=2, dry_run=True)
    assert dry["tokens_at_least"] == pytest.approx(50_000, rel=0.01)
    assert 0 < dry["passes_at_most"] <= 1
    assert not dry.keys() & {"passes", "estimated_tokens", "text_bytes"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no text to plan for"),
        (["--minutes", "5", "--passes", "2"], "two budgets"),
        (["--minutes", "0"], "--minutes is 0.0, and must be more than 0"),
        (["--tokens", "-5"], "must be more than 0"),
        (["encoder", "decoder"], "takes one MODEL"),
        (["encodr", "--minutes", "5"], "Did you mean 'encoder'?"),
        (["--fit", "run"], "leave one out"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, corpus_file: Path) -> None:
    data = [] if "no text" in message else ["--data", str(corpus_file)]
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        app(["plan", *data, *words], standalone_mode=False)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="no documents"):
        api.plan("encoder", tmp_path / "empty.txt", minutes=5)


def test_a_mix_needs_a_size(corpus_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="encoder-8x512"):
        api.pretrain("encoder", [f"a={corpus_file}", f"b={corpus_file}"], tmp_path / "run", minutes=1)


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from firth.cli.render import print_plan

    plan = make_planner(minutes=10_000.0)  # a larger model than was measured
    result = {**plan.plan("decoder", False).to_dict(), "notes": ["look out"], "command": "firth pretrain x"}
    print_plan(result)
    printed = capsys.readouterr()
    assert "expected held-out loss" in printed.out
    assert format_bytes(result["chosen"]["memory_bytes"]) in printed.out
    assert printed.out.rstrip().endswith("firth pretrain x")
    assert "extrapolated" in printed.err
    assert "look out" in printed.err


def test_shapes_are_models() -> None:
    config = get_preset("encoder-decoder-4x256")
    assert (config.family, config.num_layers, config.dim, config.num_heads, config.mlp.dim) == (
        "t5gemma",
        4,
        256,
        4,
        640,
    )
    with pytest.raises(UserError, match="multiple of 64"):
        get_preset("encoder-3x100")
    with pytest.raises(UserError, match="Unknown model 'decoder-x512'"):
        get_preset("decoder-x512")


def test_a_resumed_run_keeps_what_its_passes_gave_it(tmp_path: Path) -> None:
    """Also where the resumed command reads the text less often."""
    base = pretraining_recipe(get_preset("encoder-2x64"), **SHAPE_RECIPES["encoder"])
    recipe = with_repeated_text(base, 40, 14_000_000)
    save_recipe(replace(recipe, data="text", output_dir=str(tmp_path)), tmp_path / "recipe.yaml")
    saved = read_saved_fields(tmp_path)
    assert (saved["model.dropout"], saved["model.attention_dropout"], saved["objective.masked_share"]) == (
        0.1,
        0.1,
        0.8,
    )
    new = update_recipe(base, saved)
    assert (new.model, new.objective) == (recipe.model, recipe.objective) != (base.model, base.objective)


@pytest.mark.parametrize(("device", "other"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_keeps_its_objective_where_another_device_resumes_it(tmp_path: Path, device: str, other: str) -> None:
    """Also a run of a GPU that began before detection was the default there."""
    started, elsewhere = (
        pretraining_recipe(get_preset("encoder-2x64"), **shape_recipe_fields("encoder-2x64", name))
        for name in (device, other)
    )
    recipe = with_repeated_text(started, 40, 14_000_000)
    save_recipe(replace(recipe, data="text", output_dir=str(tmp_path)), tmp_path / "recipe.yaml")
    new = update_recipe(elsewhere, read_saved_fields(tmp_path))
    assert (new.model, new.objective) == (recipe.model, recipe.objective) != (elsewhere.model, elsewhere.objective)


def test_passes_choose_what_the_user_leaves_open(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of masked rows, for the default objective alone."""

    def masked_share(objective: str | None = None, **overrides: Any) -> float | None:
        plan = plan_pretraining(
            "encoder-2x64",
            shards,
            tmp_path / "run",
            None,
            objective,
            DataOptions(0, False, 0.05, {}),
            None,
            overrides,
            {"num_train_epochs": 40.0, "global_batch_tokens": 4096},
        )
        return getattr(plan.resolve_recipe({"": str(shards)}).objective, "masked_share", None)

    assert masked_share() == 0.938
    assert "masked rows: 94%, as the text is read 40 times" in capsys.readouterr().err
    assert masked_share("mlm-and-clm") == 0.5
    assert masked_share(**{"objective.masked_share": 0.3}) == 0.3
    assert masked_share("mlm") is None


def test_the_passes_of_a_plan_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Short documents: a fifth of each row are special tokens, which are steps and no text."""
    corpus = tmp_path / "short.txt"
    corpus.write_text("\n\n".join(f"the heron number {i} saw otter {7 * i}" for i in range(2000)), encoding="utf-8")
    tokenizer = train_tokenizer(Corpus([corpus]).texts(), "wordpiece", 300)
    prepare(Corpus([corpus]), tokenizer, tmp_path / "shards")
    shards = open_shards(tmp_path / "shards")
    options = {"max_steps": 400, "global_batch_tokens": 4096}
    plan = plan_pretraining(
        "encoder-2x64", shards.folder, tmp_path, None, None, DataOptions(0, False, 0.05, {}), None, None, options
    )
    recipe = whole_batch_recipe(plan.resolve_recipe({"": str(shards.folder)}))
    said = capsys.readouterr().err
    dataset = make_row_dataset(recipe, shards, held_out=False)
    passes = make_text_progress_fn(recipe, dataset)(400).passes
    by_tokens = 400 * 4096 / shards.num_tokens
    assert by_tokens > 1.15 * passes
    assert f"dropout: 0.1, as the text is read {passes:.0f} times" in said
    own = pretraining_recipe(recipe.model, **SHAPE_RECIPES["encoder"])
    assert recipe.objective == with_repeated_text(own, passes, shards.num_tokens).objective
    dry = api.pretrain("encoder-2x64", shards.folder, tmp_path / "run", dry_run=True, **options)
    assert dry["passes"] == pytest.approx(passes, abs=1e-3)
    dry = api.pretrain("encoder-2x64", shards.folder, tmp_path / "run", dry_run=True, num_train_epochs=3)
    assert dry["steps"] == math.ceil(3 * dataset.num_rows / dry["rows_per_step"])
