"""The doctor: for each rule a run made sick on purpose, and healthy runs on which it is silent.

`benchmarks/doctor_runs.py` makes the runs. Those that train are recorded: `doctor_logs.json.xz` holds their logs, and
the slow tests train them again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import firth
from firth.cli.main import app
from firth.core.console import quiet, runnable
from firth.core.html import HtmlPage
from firth.evaluate.pretraining_report import add_doctor_section
from firth.lab.batch_rules import BATCH_RULES, BatchFacts, count_labels
from firth.lab.doctor import (
    ALL_RULES,
    REFERENCE_RULES,
    diagnose_run,
    try_diagnosis,
)
from firth.lab.text_rules import RepeatedLines, TextFacts, check_domain_shift, divergence, random_divergences
from firth.objectives import IGNORE_INDEX, MLM, OBJECTIVES, Batch
from firth.tasks import FinetuneRecipe
from firth.train import Recipe, pretrain, read_log
from firth.train.findings import Evidence, Finding, Rule, examine, sort_findings
from firth.train.live_doctor import FINDINGS_FILE, LiveDoctor
from firth.train.log_rules import FINETUNING_RULES, LOG_RULES, LogFacts, References, Series
from firth.train.loop import progress_line
from firth.train.speed import SpeedMeter
from firth.train.timings import TIMINGS_FILE, sum_timings

ROOT = Path(__file__).parents[2]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("doctor_runs", ROOT / "benchmarks" / "doctor_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["doctor_runs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNS = load_script()
RECORDED: dict[str, Any] = RUNS.read_recorded()
RECORDED_SICK = [name for name in RECORDED if name in RUNS.SICK]
RECORDED_HEALTHY = [name for name in RECORDED if name.startswith("healthy-")]
CASES = {**RUNS.SICK, **{f"healthy-{name}": case for name, case in RUNS.HEALTHY.items()}}
UNTRAINED = [name for name, case in CASES.items() if not case.needs_training]
BY_FACTS = {"padding-labels", "input-bound", "small-batch", "behind-forecast", "behind-trigram"}  # tested below


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return RUNS.Workshop(tmp_path_factory.mktemp("doctor"))


def rules_of(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings}


def check_case(name: str, findings: list[Finding]) -> None:
    found, case = rules_of(findings), CASES[name]
    assert case.expected <= found, findings
    assert found <= case.expected | case.allowed, findings


# --- every rule -----------------------------------------------------------------------------------------------------


def test_each_rule_has_a_sick_run() -> None:
    ids = [rule.id for rule in ALL_RULES]
    assert len(ids) == len(set(ids)) >= 18
    expected = set().union(*(case.expected for case in RUNS.SICK.values()))
    assert set(ids) == expected | BY_FACTS
    assert not expected & BY_FACTS
    assert len(RUNS.HEALTHY) >= 30


@pytest.mark.parametrize("name", RECORDED_SICK)
def test_recorded_sick_runs(name: str) -> None:
    facts = RUNS.recorded_facts(RECORDED[name])
    found, of_log = examine(LOG_RULES, facts), {rule.id for rule in LOG_RULES}
    assert rules_of(found) >= CASES[name].expected & of_log
    assert rules_of(found) <= CASES[name].expected | CASES[name].allowed


@pytest.mark.parametrize("name", RECORDED_HEALTHY)
def test_recorded_healthy_runs(name: str) -> None:
    assert examine((*LOG_RULES, *REFERENCE_RULES), RUNS.recorded_facts(RECORDED[name])) == []


def test_enough_runs_are_recorded() -> None:
    trained = {name for name, case in RUNS.SICK.items() if case.needs_training and name != "failed-seeds"}
    assert set(RECORDED_SICK) == trained
    assert len(RECORDED_HEALTHY) >= 30


@pytest.mark.parametrize("name", UNTRAINED)
def test_sick_texts_and_labels(name: str, shop: Any) -> None:
    check_case(name, diagnose_run(CASES[name].make(shop, name)).findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.needs_training])
def test_trained_runs(name: str, shop: Any) -> None:
    with quiet():
        folder = CASES[name].make(shop, name)
    check_case(name, diagnose_run(folder).findings)


# --- rules on facts that no small run has ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(shop: Any) -> Recipe:
    return shop.recipe("facts", preset="bert-tiny", objective=MLM())


def facts_of(recipe: Recipe, loss: float = 3.0, steps: int = 2500, **fields: Any) -> LogFacts:
    lines = [{"step": i, "loss": loss, "passes": i / 100} for i in range(1, steps + 1)]
    return LogFacts(recipe, lines, **fields)


def test_a_run_behind_a_trigram_model_and_behind_its_forecast(recipe: Recipe) -> None:
    references = References(unigram=6.0, bigram=3.5, trigram=2.9, forecast=2.3)
    found = examine(REFERENCE_RULES, facts_of(recipe, references=references))
    assert [finding.rule for finding in found] == ["behind-forecast", "behind-trigram"]
    assert found[1].evidence == {"loss": 3.0, "trigram model": 2.9, "bigram model": 3.5}
    better = replace(references, trigram=3.1, forecast=2.9)
    assert examine(REFERENCE_RULES, facts_of(recipe, references=better)) == []
    assert examine(REFERENCE_RULES, facts_of(recipe, steps=500, references=replace(references, forecast=None))) == []


def test_steps_that_wait_for_data(recipe: Recipe) -> None:
    slow = {"seconds": 60.0, "data_wait": 30.0, "steps": 100, "tokens": 10_000, "device": "cpu"}
    (finding,) = examine(LOG_RULES, facts_of(recipe, timings=slow))
    assert (finding.rule, finding.evidence["share of the time"]) == ("input-bound", 0.5)
    for healthy in ({"data_wait": 10.0}, {"seconds": 6.0, "data_wait": 3.0}):
        assert examine(LOG_RULES, facts_of(recipe, timings=slow | healthy)) == []


def test_a_batch_that_is_too_small_for_a_gpu(recipe: Recipe) -> None:
    timings = {"seconds": 60.0, "data_wait": 0.0, "steps": 100, "tokens": 25_600, "device": "cuda"}
    timings |= {"device_flops": 4e14, "memory_share": 0.02}
    facts = facts_of(recipe, timings=timings, flops_per_token=6e8)
    (finding,) = examine(LOG_RULES, facts)
    assert finding.rule == "small-batch"
    assert finding.evidence["use of the device"] == pytest.approx(6e8 * 25_600 / 60 / 4e14)
    large = replace(recipe, per_device_train_batch_size=512)
    for healthy in (
        replace(facts, training=large),
        replace(facts, timings=timings | {"memory_share": 0.9}),
        replace(facts, timings=timings | {"device": "cpu"}),
        replace(facts, flops_per_token=6e14),
    ):
        assert examine(LOG_RULES, healthy) == []


@pytest.mark.parametrize(("held_out", "found"), [([6.5, 6.3, 6.2, 6.1], False), ([6.5, 6.1, 6.09, 6.08], True)])
def test_repeated_text_is_no_fault_while_the_held_out_loss_falls(
    recipe: Recipe, held_out: list[float], found: bool
) -> None:
    lines: list[dict[str, float]] = [{"step": i, "loss": 6.0 - i / 100, "passes": i / 10} for i in range(1, 121)]
    lines += [{"step": 30 * (i + 1), "eval_loss": loss} for i, loss in enumerate(held_out)]
    findings = {finding.rule: finding for finding in examine(LOG_RULES, LogFacts(recipe, lines))}
    assert ("repeated-data" in findings) == found
    if found:
        assert findings["repeated-data"].evidence["held-out loss no lower since pass"] == 6
        assert "--num-train-epochs 6" in findings["repeated-data"].command


def test_the_kept_weights_are_judged_and_not_the_last_ones(recipe: Recipe) -> None:
    """A run that goes back to its best evaluation is no worse for what came after it."""
    lines: list[dict[str, float]] = [{"step": i, "loss": 6.0 - i / 500, "passes": i / 100} for i in range(1, 2501)]
    losses = {50: 3.0, 500: 4.0, 1500: 5.5, 2500: 7.0}  # the first one within the first pass, where nothing is kept
    lines += [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
    references = References(unigram=6.5, bigram=5.0, trigram=4.6, forecast=4.3)
    kept = LogFacts(replace(recipe, load_best=True), lines, references)
    last = LogFacts(replace(recipe, load_best=False), lines, references)
    assert (kept.kept_loss, last.kept_loss) == (4.0, 7.0)
    names = [{finding.rule for finding in examine((*LOG_RULES, *REFERENCE_RULES), facts)} for facts in (kept, last)]
    assert names[0] == {"overfitting"}
    assert names[1] == {"overfitting", "behind-forecast"}


def test_an_early_jump_is_told_beside_a_rate_that_is_too_high(recipe: Recipe) -> None:
    """The loss recovers from the jump, and stays at word frequencies: the warm-up and the rate are both wrong."""
    training = replace(recipe, max_steps=400, warmup_steps=0, learning_rate=2e-2)
    early = [7.6, 6.9, 9.3, 7.2, 7.0]
    facts = [
        LogFacts(
            training,
            [
                {"step": i, "loss": loss}
                for i, loss in enumerate([*early, *[late + 0.01 * (i % 3) for i in range(395)]], 1)
            ],
            References(unigram=6.0),
            recommended_rate=1e-3,
        )
        for late in (6.0, 9.0)
    ]
    assert rules_of(examine(LOG_RULES, facts[0])) == {"plateau", "rate-too-high", "warmup-too-short"}
    assert "warmup-too-short" not in rules_of(examine(LOG_RULES, facts[1])), "a loss that stays high is no early jump"


@pytest.mark.parametrize(("jump", "found"), [(0.8, False), (1.6, True)])
def test_a_quiet_window_makes_no_spike(recipe: Recipe, jump: float, found: bool) -> None:
    """A jump of 16 deviations of the 32 lines before it, which are quiet by chance, is one of 6 elsewhere."""
    losses = 5.0 + np.random.default_rng(0).normal(0, 0.12, 400)
    losses[200:232] = 5.0 + np.random.default_rng(1).normal(0, 0.05, 32)
    losses[232] = 5.0 + jump
    lines = [{"step": i, "loss": float(loss)} for i, loss in enumerate(losses, 1)]
    assert ("loss-spikes" in rules_of(examine(LOG_RULES, LogFacts(recipe, lines)))) == found


def test_labels_on_padding(recipe: Recipe) -> None:
    ids = np.array([[5, 6, 7, 0], [5, 6, 0, 0]])
    documents = np.array([[0, 0, 0, -1], [0, 0, -1, -1]])
    positions, labels = np.array([[1, 2], [1, 3]]), np.array([[6, 7], [6, 0]])
    batch = Batch(ids, document_ids=documents, target_positions=positions, labels=labels)
    counts = count_labels(batch)
    assert counts == {
        "num_tokens": 5,
        "num_labels": 4,
        "num_rows": 2,
        "num_empty_rows": 0,
        "num_padding_labels": 1,
    }
    assert "padding-labels" in rules_of(examine(BATCH_RULES, BatchFacts(recipe, **counts)))
    sound = batch._replace(labels=np.array([[6, 7], [6, IGNORE_INDEX]]))
    assert examine(BATCH_RULES, BatchFacts(recipe, **count_labels(sound))) == []
    rewards = batch._replace(labels=None, task_labels=np.zeros((2, 2)), group_ids=np.array([[0, 1], [-1, -1]]))
    assert count_labels(rewards)["num_labels"] == 2, "a slot without a group is unused"
    assert count_labels(rewards)["num_padding_labels"] == 0
    causal = Batch(ids, document_ids=documents, labels=np.where(documents < 0, 0, ids))
    assert count_labels(causal)["num_padding_labels"] == 3
    decoder = Batch(ids, labels=ids, decoder_input_ids=ids, decoder_document_ids=documents)
    assert count_labels(decoder)["num_padding_labels"] == 3
    unused = np.array([[0, 0], [1, -1]])  # group -1: a slot without a text
    pairs = Batch(ids, document_ids=documents, target_positions=positions, task_labels=labels, group_ids=unused)
    assert (count_labels(pairs)["num_labels"], count_labels(pairs)["num_padding_labels"]) == (3, 0)


def test_rows_with_replaced_tokens_are_not_empty(recipe: Recipe) -> None:
    """Their tokens are classified; a row without any mask teaches nothing."""
    ids, none = np.full((4, 8), 9), np.full((4, 2), IGNORE_INDEX)
    generator_labels, labels = none.copy(), np.full((4, 8), IGNORE_INDEX)
    generator_labels[:2, 0], labels[3] = 9, 9
    batch = Batch(ids, labels=labels, generator_positions=np.zeros((4, 2)), generator_labels=generator_labels)
    assert count_labels(batch)["num_empty_rows"] == 1
    assert examine(BATCH_RULES, BatchFacts(recipe, **count_labels(batch))) == []


@pytest.mark.parametrize(
    ("objective", "option"), [("rtd", "objective.rate=0.25"), ("rtd-mlm-and-clm", "objective.mlm.rate=0.25")]
)
def test_a_strong_generator_leaves_little_to_detect(recipe: Recipe, objective: str, option: str) -> None:
    training = replace(recipe, objective=OBJECTIVES[objective], max_steps=2500)
    lines = [{"step": i, "loss": 3.0, "rtd_replaced": 0.05, "tokens": 10**4 * i} for i in range(1, 2501, 10)]
    findings = {finding.rule: finding for finding in examine(LOG_RULES, LogFacts(training, lines))}
    assert option in findings["strong-generator"].command
    fine = [line | {"rtd_replaced": 0.1} for line in lines]
    assert "strong-generator" not in rules_of(examine(LOG_RULES, LogFacts(training, fine)))


def test_a_broken_objective_is_found_in_a_run(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = MLM.__call__

    def broken(self: MLM, rows: Any, rng: Any, vocab: Any) -> Batch:
        batch = make(self, rows, rng, vocab)
        return batch._replace(document_ids=np.where(np.arange(batch.input_ids.shape[1]) < 8, batch.document_ids, -1))

    monkeypatch.setattr(MLM, "__call__", broken)
    folder = shop.untrained("broken", objective=MLM())
    assert "padding-labels" in rules_of(diagnose_run(folder).findings)


# --- the pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_other", [False, True])
def test_one_document_of_many_different_ones_is_no_other_domain(shop: Any, is_other: bool) -> None:
    """Books differ from each other: one that is held out differs from the rest as each of them does."""
    rng, size = np.random.default_rng(0), 400
    words = rng.dirichlet(np.full(size, 0.3), 25)  # each document has words of its own
    documents = np.stack([rng.multinomial(4000, p) for p in words])
    held_out = (
        rng.multinomial(4000, rng.dirichlet(np.full(size, 0.3))) if not is_other else np.eye(size, dtype=int)[7] * 4000
    )
    random = random_divergences(documents.sum(1), lambda chosen: np.repeat(np.arange(size), documents[chosen].sum(0)),
                                documents.sum(0), 4000)  # fmt: skip
    tokenizer = shop.make_shards(RUNS.tiny_text, "wordpiece").tokenizer
    repeated = RepeatedLines(0.0, 0.0, (), ())
    facts = TextFacts(tokenizer, documents.sum(0), held_out, random, repeated, {})
    assert (check_domain_shift(facts) is not None) == is_other
    assert divergence(held_out, documents.sum(0)) > random.mean() / 2


def test_series() -> None:
    series = Series(np.arange(1, 101), np.arange(100.0))
    assert series.smooth().values[0] == pytest.approx(np.arange(5.0).mean())
    assert series.smooth().steps[[0, -1]].tolist() == [5, 100]
    assert series.tail(0.1).tolist() == list(range(90, 100))
    rng = np.random.default_rng(0)
    assert Series(np.arange(5000), rng.normal(2.0, 0.3, 5000)).noise == pytest.approx(0.3, rel=0.05)


def test_findings_are_sorted_and_in_one_line() -> None:
    rules = [
        Rule(level, level, f"{level} title", "", lambda x: Evidence({"n": x}, "Why.")) for level in ("info", "error")
    ]
    found = sort_findings(examine(rules, 3))  # type: ignore[arg-type]
    assert [finding.level for finding in found] == ["error", "info"]
    assert found[0].line == "error title (n 3). Why."
    assert examine([Rule("none", "info", "", "", lambda x: None)], 3) == []


def test_commands_of_findings_exist() -> None:
    """Each command that a recorded run is told to try has a known name, and options that this command has."""
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = [f for name in RECORDED_SICK for f in examine(LOG_RULES, RUNS.recorded_facts(RECORDED[name]))]
    assert found
    for finding in found:
        _, name, *words = finding.command.split()
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, finding.command


# --- a run from beginning to end ------------------------------------------------------------------------------------


def test_a_run_that_ends_above_the_unigram_entropy(
    shop: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = CASES["above-unigrams"].make(shop, "above")
    said = capsys.readouterr().err
    assert said.count("the run ended no better than word frequencies (loss ") == 1
    assert f"firth doctor {folder}" in " ".join(said.split())
    log = read_log(folder / "log.jsonl")
    assert all(line["targets"] > 0 for line in log if "loss" in line)
    result = CliRunner().invoke(app, ["doctor", str(folder)])
    assert result.exit_code == 1
    assert re.search(r"above: loss \d\.\d\d \(ln V 6\.21, unigrams 5\.\d\d, bigrams ", result.stdout)
    assert "error: the run ended no better than word frequencies [above-unigrams]\n  evidence  loss " in result.stdout
    assert "\n  try       " + runnable("firth pretrain gpt2-tiny --data ") in result.stdout
    found = json.loads(CliRunner().invoke(app, ["doctor", str(folder), "--json"]).stdout)
    assert [finding["rule"] for finding in found["findings"]] == ["above-unigrams"]
    assert found == firth.doctor(folder)
    (tmp_path / "moved").mkdir()
    for name in ("recipe.yaml", "log.jsonl"):
        (tmp_path / "moved" / name).write_bytes((folder / name).read_bytes())
    recipe = (tmp_path / "moved" / "recipe.yaml").read_text().replace(str(shop.folder), str(tmp_path))
    (tmp_path / "moved" / "recipe.yaml").write_text(recipe)
    moved = CliRunner().invoke(app, ["doctor", str(tmp_path / "moved")])
    assert "not examined: the text and its labels: " in moved.stdout


def test_a_run_is_examined_from_any_folder(
    shop: Any, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths of a recipe are relative to the folder in which the run was started."""
    (tmp_path / "shards").symlink_to(Path(recipe.data).resolve())
    monkeypatch.chdir(tmp_path)
    pretrain(replace(recipe, data="shards", output_dir="runs/a", max_steps=2))
    assert diagnose_run("runs/a").not_examined == []
    monkeypatch.chdir(tmp_path / "runs")
    assert diagnose_run("a").not_examined == []
    (tmp_path / "shards").unlink()
    assert diagnose_run("a").not_examined == ["the text and its labels: shards: no such folder."]
    shown = CliRunner().invoke(app, ["doctor", "a"]).stdout
    assert "not examined: the text and its labels" in shown
    assert "healthy" not in shown
    Path("a/log.jsonl").write_text("damaged\n")
    found = diagnose_run("a")
    assert found.not_examined[0] == "the log: log.jsonl is missing, or has no line of a step"
    assert found.num_rules == 0
    shown = CliRunner().invoke(app, ["doctor", "a"]).stdout
    assert "no finding of 0 rules" in shown
    assert "healthy" not in shown


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(firth.UserError, match=r"has no recipe\.yaml"):
        firth.doctor(tmp_path)
    (tmp_path / "recipe.yaml").write_text("vector_size: 16\n")
    with pytest.raises(firth.UserError, match="word vectors"):
        firth.doctor(tmp_path)
    with pytest.raises(firth.UserError, match="Name its run"):
        firth.doctor(tmp_path / "final")


def test_a_failed_diagnosis_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("model: 3\nobjective: 4\n")
    assert try_diagnosis(tmp_path) is None
    assert "the doctor could not examine the run (UserError" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["loss", "nsp_accuracy", "rtd_loss", "weight_rms"])
def test_logs_with_few_lines_are_examined(name: str, recipe: Recipe) -> None:
    """A log whose first steps were all skipped, or that has a field in one line alone, makes no rule fail."""
    skipped = [{"step": i, "tokens": i, "skipped": "the gradient is inf"} for i in range(1, 30)]
    late = [{"step": i, "tokens": i, "loss": 3.0, name: 3.0} for i in range(30, 42)]
    training = replace(recipe, max_steps=41, warmup_steps=0, fp16=True)
    for lines in (skipped, late[:1], late, skipped + late):
        assert examine(LOG_RULES, LogFacts(training, lines, References(unigram=6.0))) == []


@pytest.mark.parametrize(("targets", "expected"), [(8, set()), (8_000, {"loss-spikes"})])
def test_a_few_hard_examples_are_no_spike(recipe: Recipe, targets: int, expected: set[str]) -> None:
    """In a step of eight labels, one that the model is sure of and gets wrong raises the loss by a nat."""
    rng = random.Random(0)
    losses = [rng.uniform(0.0, 0.2) + 1.5 * (step in (60, 90)) for step in range(120)]
    lines = [{"step": i + 1, "loss": loss, "targets": targets, "tokens": 1000} for i, loss in enumerate(losses)]
    assert {finding.rule for finding in examine(FINETUNING_RULES, LogFacts(recipe, lines))} == expected


def test_live_findings_are_said_once(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveDoctor(replace(recipe, max_steps=400), References(unigram=5.0), "run")
    for step in range(1, 401):
        live.observe({"step": step, "loss": 5.05 + 0.01 * (step % 3)})
    live.judge(is_finished=True)
    said = capsys.readouterr().err
    assert said.count("the loss is stuck at word frequencies") == 1
    assert list(live.reported) == ["plateau"]


def test_live_findings_are_written_and_stand_in_the_progress_line(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / FINDINGS_FILE
    live = LiveDoctor(replace(recipe, max_steps=400), References(unigram=5.0), "run", file=file)
    for step in range(1, 401):
        live.observe({"step": step, "loss": 5.05 + 0.01 * (step % 3)})
        if not live.reported:
            assert not live.last_title
            assert not file.exists()
    written = json.loads(file.read_text())
    assert written["findings"] == [live.reported["plateau"].to_dict()]
    assert 200 <= written["step"] < 400
    run = SimpleNamespace(
        training=live.training, name="pretraining", doctor=live, compute=SimpleNamespace(compile=False)
    )
    record: Any = SimpleNamespace(step=400, tokens=100, text_progress=None, learning_rate=0.1)
    line = progress_line(run, record, 5.05, {}, SpeedMeter(0, 0), None)  # type: ignore[arg-type]
    assert "  loss 5.050  doctor: the loss is stuck at word frequencies  rate" in line


def test_the_live_doctor_knows_the_recommended_rate(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    low = replace(recipe, max_steps=400, learning_rate=1e-6)
    for rate, found in ((None, False), (1e-3, True)):
        live = LiveDoctor(low, References(unigram=5.0), "run", recommended_rate=rate)
        for step in range(1, 401):
            live.observe({"step": step, "loss": 5.6 + 0.01 * (step % 3)})
        assert ("rate-too-low" in live.reported) == found
    assert "recommended rate 0.001" in capsys.readouterr().err


def test_seeds_of_a_fine_tuning_say_one_illness_once(capsys: pytest.CaptureFixture[str]) -> None:
    training = FinetuneRecipe(checkpoint="base", max_steps=200, learning_rate=0.1)
    reported: dict[str, Finding] = {}
    for _ in range(2):
        live = LiveDoctor(training, References(), "tuned", FINETUNING_RULES, reported)
        for step in range(1, 201):
            live.observe({"step": step, "loss": 0.4 if step < 100 else 1.4})
        live.judge(is_finished=True)
        assert not live.reads_timings
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the learning rate is too high") == 1
    assert "See `firth doctor tuned`" in said


def test_live_lines_are_bounded(recipe: Recipe) -> None:
    live = LiveDoctor(replace(recipe, max_steps=10**6), References(), "run")
    for step in range(1, 45_001):
        live.lines.append({"step": step, "loss": 1.0})
        if step % 9000 == 0:
            live.lines.append({"step": step, "eval_loss": 1.0})
        if len(live.lines) >= 20_000:
            live.observe({"step": step, "loss": 1.0})
    assert len(live.lines) <= 20_001
    assert [line["step"] for line in live.lines if "eval_loss" in line] == [9000, 18000, 27000, 36000, 45000]


def test_timings(shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firth.train import timings

    monkeypatch.setattr(timings, "LINE_SECONDS", 0.0)
    recipe = shop.recipe("timed", preset="gpt2-tiny", max_steps=8)
    pretrain(recipe)
    lines = read_log(Path(recipe.output_dir) / TIMINGS_FILE)
    assert [line["step"] for line in lines] == [4, 5, 6, 7, 8]
    total = sum_timings(lines)
    assert total["steps"] == 5
    assert total["device"] == "cpu"
    assert 0 <= total["data_wait"] < total["seconds"]
    weights = [line for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "weight_rms" in line]
    assert [line["step"] for line in weights] == [8]


@pytest.mark.parametrize(
    "damage",
    [
        {"seconds": [1]},
        {"tokens": None},
        {"device": 3},
        {"steps": float("inf")},
        {"memory_share": "x"},
        {"steps": 10**400},
    ],
)
def test_damaged_timings_are_left_out(damage: dict[str, Any]) -> None:
    line = {"step": 1, "steps": 1, "tokens": 8, "seconds": 0.5, "data_wait": 0.1, "device": "cpu"}
    assert sum_timings([line, line | damage, line]) == line | {
        "steps": 2,
        "tokens": 16,
        "seconds": 1.0,
        "data_wait": 0.2,
    }
    assert sum_timings([line | damage])["steps"] == 0


@pytest.mark.slow
def test_a_slow_dataloader_is_found(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    module = importlib.import_module("firth.train.pretrain")
    make = module.make_pretrain_batch_fn

    def slow(*arguments: Any, **options: Any) -> Any:
        batches = make(*arguments, **options)

        def get(step: int) -> Any:
            time.sleep(0.25)
            return batches(step)

        return get

    monkeypatch.setattr(module, "make_pretrain_batch_fn", slow)
    folder = shop.train("slow-data", preset="gpt2-tiny", max_steps=60)
    assert "input-bound" in rules_of(diagnose_run(folder).findings)


def test_the_section_of_the_report() -> None:
    page = HtmlPage("run", "pretrain")
    finding = Finding("loss-spikes", "warning", "the loss has spikes", {"text": "<script>x</script>"}, "<b>", "firth x")
    add_doctor_section(page, [finding])
    html = page.to_html()
    assert '<section class="finding warning">' in html
    assert "&lt;script&gt;x&lt;/script&gt;" in html
    assert "<script>x" not in html
    assert "<b>" not in html
    healthy = HtmlPage("run", "pretrain")
    add_doctor_section(healthy, [])
    assert "found nothing wrong" in healthy.to_html()


def test_the_docs_list_all_rules() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z-]+)` \| (error|warning|info) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted((rule.id, rule.level) for rule in ALL_RULES)
