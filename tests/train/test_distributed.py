"""Several processes train like one: the same rows, losses and weights, for any number of processes, DDP or FSDP."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from train import processes
from train.conftest import small_model

from firth.core.errors import UserError
from firth.core.files import find_corruption
from firth.models import get_preset, load_model
from firth.recipes import pretraining_recipe
from firth.text import Document
from firth.tokens import ShardSet, open_shards, prepare
from firth.train import Recipe, load_recipe, pretrain, read_log, save_recipe
from firth.train.dataloader import make_pretrain_batch_fn, make_row_dataset
from firth.train.distributed import SINGLE_PROCESS, DistContext, bucket_tensors, should_report_error
from firth.train.launch import init_distributed
from firth.train.prefetch import hash_rows
from firth.train.ramp import Stage, check_even_split, micro_batches_per_process
from firth.train.recipe import EngineConfig
from firth.train.resume import merge_recipe

Make = Callable[[str], ShardSet]
CLOSE = 1e-5


class Runs:
    """Recipes with a folder each, run in this process or by several in one launch."""

    def __init__(self, folder: Path, shards: ShardSet, family: str = "bert") -> None:
        self.folder, self.shards, self.family = folder, shards, family
        self.said: list[str] = []

    def recipe(self, name: str, dropout: float = 0.0, model: Any = None, **fields: Any) -> Recipe:
        tokenizer = self.shards.tokenizer
        plain: dict[str, Any] = dict(data=str(self.shards.folder), tokenizer=tokenizer.fingerprint, compile=False)
        plain |= dict(
            output_dir=str(self.folder / name), max_steps=6, max_seq_length=32, learning_rate=1e-2, bf16=False
        )
        plain |= dict(eval_steps=3, save_steps=2, eval_rows=20, optim="adamw")
        model = model or small_model(self.family, tokenizer.vocab.size, dropout)
        return pretraining_recipe(model, **plain | fields)

    def job(self, name: str, how: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """A job for `processes.run`; `how` are arguments of `pretrain`."""
        file = self.folder / f"{name}-{len(list(self.folder.glob('*.yaml')))}.yaml"
        save_recipe(self.recipe(name, **fields), file)
        return {"recipe": str(file), **(how or {})}

    def alone(self, name: str, resume: bool = False, **fields: Any) -> None:
        pretrain(self.recipe(name, **fields), resume)

    def log(self, name: str) -> list[dict[str, Any]]:
        return read_log(self.folder / name / "log.jsonl")

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "final" / "model.safetensors")

    def assert_same(self, one: str, other: str) -> None:
        """Assert that two runs are equal bit for bit."""
        files = ["log.jsonl", "final/model.safetensors", "final/config.json"]
        for file in files:
            assert (self.folder / one / file).read_bytes() == (self.folder / other / file).read_bytes(), (
                one,
                other,
                file,
            )

    def assert_close(self, one: str, other: str, but: str = "nothing") -> None:
        """Assert that two runs read the same text and differ by rounding only."""
        for a, b in zip(self.log(one), self.log(other), strict=True):
            assert a.keys() == b.keys()
            for key, value in a.items():
                exact = key in ("step", "data", "tokens", "skipped")
                assert b[key] == value if exact else b[key] == pytest.approx(value, abs=CLOSE, rel=CLOSE), (key, other)
        mine, theirs = self.weights(one), self.weights(other)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if name.endswith(but):
                continue
            torch.testing.assert_close(theirs[name], value, rtol=0, atol=CLOSE, msg=lambda m, n=name: f"{n}: {m}")


MEMORY = {"harm": {"kind": "memory", "rank": 1, "rows": 2}}
NAN = {"harm": {"kind": "nan", "rank": 1, "step": 2}}
HALF: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # 8 rows in two processes
# A tail average, weight decay by its own schedule, and several passes of different packings.
LATE: dict[str, Any] = {"tail_average": 0.5, "num_packings": 2, "weight_decay": 0.3, "cautious_weight_decay": True}
LATE |= {"weight_decay_schedule": "to-zero"}
MUCH: dict[str, Any] = {"ema_decay": 0.9, "spike_factor": 4.0, "batch_ramp": 0.5, "batch_doublings": 1}


@pytest.fixture(scope="module")
def two(shards_of: Make, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The results of two processes, in one launch."""
    runs = Runs(tmp_path_factory.mktemp("two"), shards_of("bert"))
    jobs = []
    for way in ("ddp", "fsdp"):
        jobs.append(runs.job(way, parallel=way, **HALF, **MUCH))
        jobs.append(runs.job(f"{way} straight", parallel=way, dropout=0.2, **HALF, **MUCH))
        stopped = dict(parallel=way, dropout=0.2, **HALF, **MUCH)
        jobs.append(runs.job(f"{way} stopped", {"harm": {"kind": "stop", "step": 3}}, **stopped))
        jobs.append(runs.job(f"{way} stopped", {"resume": True}, **stopped))
        jobs.append(runs.job(f"{way} late", parallel=way, per_device_train_batch_size=64, **LATE))
        jobs.append(runs.job(f"{way} nan", NAN, parallel=way, max_bad_steps=2, **HALF))
    jobs.append(runs.job("halved", MEMORY, parallel="ddp", per_device_train_batch_size=4))
    jobs.append(runs.job("muon", parallel="ddp", optim="muon", **HALF))
    jobs.append(runs.job("adafactor", parallel="ddp", optim="adafactor", **HALF))
    jobs.append(runs.job("offload", parallel="fsdp", cpu_offload=True, gradient_checkpointing=True, **HALF))
    jobs.append(runs.job("bf16", parallel="fsdp", **HALF | {"bf16": True}))
    jobs.append(runs.job("signal", {"harm": {"kind": "signal", "rank": 1, "step": 2}}, parallel="ddp", **HALF))
    jobs.append({"words": words(runs, "fail"), "harm": {"kind": "fail", "rank": 1, "step": 2}})
    runs.said = processes.run(2, jobs, runs.folder, codes=(1, 2))
    return runs


@pytest.fixture(scope="module")
def four(two: Runs) -> Runs:
    """The same for four, which also resume runs of two."""
    stopped = [(way, size) for way in ("ddp", "fsdp") for size in ("four", "one")]
    stop = {"harm": {"kind": "stop", "step": 4}}
    processes.run(2, [two.job(f"{way} for {size}", stop, parallel=way, **HALF) for way, size in stopped], two.folder)
    jobs = [two.job(f"{way} by four", parallel=way, per_device_train_batch_size=2, **MUCH) for way in ("ddp", "fsdp")]
    jobs += [two.job(f"{way} for four", parallel=way, **HALF) for way in ("ddp", "fsdp")]
    processes.run(4, jobs, two.folder, TORCHELASTIC_RESTART_COUNT="1")
    return two


@pytest.fixture(scope="module")
def one(two: Runs) -> str:
    """The run of one process that all are compared with."""
    two.alone("one", per_device_train_batch_size=8, **MUCH)
    return "one"


@pytest.fixture(scope="module")
def plain(two: Runs) -> str:
    """The same without a ramp and EMA."""
    two.alone("plain", per_device_train_batch_size=8)
    return "plain"


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_like_one(way: str, one: str, two: Runs) -> None:
    two.assert_close(one, way)
    model = load_model(two.folder / way / "final")
    assert model.tokenizer is not None
    names = {p.name for p in (two.folder / one / "final").iterdir()}
    assert {p.name for p in (two.folder / way / "final").iterdir()} == names


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_four_processes_train_like_one(way: str, one: str, four: Runs) -> None:
    four.assert_close(one, f"{way} by four")


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_stopped_run_resumes_exactly(way: str, two: Runs) -> None:
    two.assert_same(f"{way} straight", f"{way} stopped")


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_average_decay_and_pack_like_one(way: str, two: Runs) -> None:
    if not (two.folder / "late").is_dir():
        two.alone("late", per_device_train_batch_size=128, **LATE)
    assert two.log("late")[-2]["passes"] > 1.5, "both packings are read"
    two.assert_close("late", f"{way} late")


def test_dropout_differs_between_ranks(two: Runs) -> None:
    """DDP and FSDP agree up to rounding without dropout and with it: each rank draws the same in both."""
    two.assert_close("ddp straight", "fsdp straight")
    assert two.log("ddp straight")[0]["loss"] != pytest.approx(two.log("ddp")[0]["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_resume_with_another_number_of_processes(way: str, plain: str, four: Runs) -> None:
    four.assert_close(plain, f"{way} for four")
    four.alone(f"{way} for one", resume=True, per_device_train_batch_size=8)
    four.assert_close(plain, f"{way} for one")
    assert load_recipe(four.folder / f"{way} for one" / "recipe.yaml", Recipe).global_batch_size == 8


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_nan_loss_of_one_rank_is_skipped_by_all(way: str, plain: str, two: Runs) -> None:
    log = [line for line in two.log(f"{way} nan") if "data" in line]
    assert [line["step"] for line in log if "skipped" in line] == [3, 4]
    whole = [line for line in two.log(plain) if "data" in line]
    for a, b in zip(log[:2], whole[:2], strict=True):
        assert a["data"] == b["data"]
        assert a["loss"] == pytest.approx(b["loss"], rel=CLOSE)
    for rank in (0, 1):
        said = (two.folder / f"{way} nan-{rank}.txt").read_text()
        assert said.startswith("2: 2 steps in a row were skipped, from step 3 on: the loss is nan")
        assert "checkpoint-2 is intact" in said


def test_out_of_memory_of_one_rank_halves_micro_batches_of_all(plain: str, two: Runs) -> None:
    two.assert_close(plain, "halved")
    assert json.loads((two.folder / "halved/checkpoint-6/training/state.json").read_text())["halvings"] == 1


@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_muon_and_adafactor_with_sharded_matrices(optim: str, two: Runs) -> None:
    two.alone(f"{optim} alone", optim=optim, per_device_train_batch_size=8)
    two.assert_close(f"{optim} alone", optim, but="key.bias")  # whose true gradient is 0, which Adafactor makes much of


def test_cpu_offload_and_activation_checkpointing(plain: str, two: Runs) -> None:
    two.assert_close(plain, "offload")


def test_blocks_are_all_gathered_in_bfloat16(plain: str, two: Runs) -> None:
    exact, rounded = ([line["loss"] for line in two.log(name) if "loss" in line] for name in (plain, "bf16"))
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != pytest.approx(exact, rel=1e-5)


def test_a_sharded_checkpoint_equals_an_unsharded_one(plain: str, two: Runs) -> None:
    """Each rank wrote its file; the checksums match, there is no pickle, and the tensors equal those of one process."""
    folder = two.folder / "fsdp stopped" / "checkpoint-6"
    assert find_corruption(folder) is None
    parts = {p.name for p in folder.rglob("*.safetensors")}
    assert {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)} < parts
    assert {f"optimizer-0000{i}-of-00002.safetensors" for i in (1, 2)} < parts
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    whole = load_file(two.folder / plain / "checkpoint-6" / "model.safetensors")
    assert index.keys() == whole.keys()
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} == {".json", ".safetensors"}
    assert load_model(folder).num_parameters == load_model(two.folder / plain / "final").num_parameters


@pytest.mark.slow
def test_transformers_opens_a_sharded_checkpoint(two: Runs) -> None:
    from transformers import AutoModelForMaskedLM

    folder = two.folder / "fsdp straight" / "checkpoint-6"
    theirs, ours = AutoModelForMaskedLM.from_pretrained(folder).eval(), load_model(folder)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_only_rank_0_prints(two: Runs) -> None:
    first, other = two.said
    assert "2 processes (ddp)" in first
    assert "2 processes (fsdp)" in first
    assert other == "error: step 2 went wrong in process 1.\n"  # and nothing before
    assert "error" not in first
    assert "Traceback" not in first


def test_a_signal_to_one_rank_stops_all_after_the_same_step(two: Runs) -> None:
    assert read_log(two.folder / "signal" / "log.jsonl")[-1]["step"] == 3
    assert find_corruption(two.folder / "signal" / "checkpoint-3") is None
    for rank in (0, 1):
        assert (two.folder / f"signal-{rank}.txt").read_text() == "143: stopped at step 3 of 6"


def words(runs: Runs, name: str) -> list[str]:
    """The same on the command line."""
    small = ["--max-seq-length=32", "--per-device-train-batch-size=4", "--max-steps=6", "--no-compile", "--no-bf16"]
    small += ["--parallel=ddp", "model.num_layers=1", "model.dim=32", "model.mlp.dim=64"]
    return ["pretrain", "bert-tiny", "--data", str(runs.shards.folder), "--output-dir", str(runs.folder / name), *small]


# --- what each reads, by hand -----------------------------------------------------------------------------------------


class Pretended(DistContext):
    """A rank of a process group that does not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.world_size = rank, size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_reads_its_share_of_the_rows(size: int, shards_of: Make, tmp_path: Path) -> None:
    shards = shards_of("bert")
    recipe = Runs(tmp_path, shards).recipe("run", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    rows = make_row_dataset(recipe, shards, held_out=False)
    whole = make_pretrain_batch_fn(recipe, rows, shards.tokenizer)(3)
    parts = [
        make_pretrain_batch_fn(recipe, rows, shards.tokenizer, dist_context=Pretended(r, size))(3) for r in range(size)
    ]
    assert [len(part) for part in parts] == [4 // size] * size
    read = [batch for part in parts for batch in part]
    for mine, theirs in zip(read, whole, strict=True):
        np.testing.assert_array_equal(mine.input_ids, theirs.input_ids)
        np.testing.assert_array_equal(mine.labels, theirs.labels)
    assert sum(map(hash_rows, read)) == sum(map(hash_rows, whole))


def test_micro_batches_are_as_few_as_possible() -> None:
    step = Stage(0, 32, micro_batch_rows=4, num_micro_batches=3, rows_before=0)  # 12 rows
    assert [micro_batches_per_process(step, size) for size in (1, 2, 3, 4, 6, 12)] == [3, 2, 1, 1, 1, 1]


def test_indivisible_number_of_processes_raises(shards_of: Make, tmp_path: Path) -> None:
    runs = Runs(tmp_path, shards_of("bert"))
    with pytest.raises(UserError, match=r"5 processes cannot share 12 rows .* These can: 1, 2, 3, 4, 6, 12\."):
        check_even_split(runs.recipe("run", per_device_train_batch_size=12), 5)
    with pytest.raises(UserError, match=r"4 processes cannot share 6 rows .* These can: 1, 2, 3, 6\."):
        check_even_split(runs.recipe("run", per_device_train_batch_size=12, batch_ramp=0.5, batch_doublings=1), 4)


def test_a_resumed_run_keeps_its_global_batch(
    shards_of: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path, shards_of("bert"))
    then = replace(runs.recipe("run", **HALF, parallel="fsdp"), processes=4)
    assert then.global_batch_size == 16
    same = merge_recipe(then, replace(then, processes=2, parallel="none"))
    assert (same.processes, same.global_batch_size, same.parallel) == (4, 16, "none")
    assert "started with 4 processes and resumes with 2: the global batch stays 16 rows" in capsys.readouterr().err
    adapted = merge_recipe(then, replace(then, processes=2, gradient_accumulation_steps=4))
    assert adapted == then
    with pytest.raises(UserError, match="gradient_accumulation_steps: 2 -> 3"):
        merge_recipe(then, replace(then, processes=2, gradient_accumulation_steps=3))
    other = merge_recipe(then, replace(then, processes=2, gradient_accumulation_steps=3), allow_change=True)
    assert other.global_batch_size == 12


def test_gradient_buckets() -> None:
    tensors = [torch.zeros(n) for n in (2**22, 2**22, 1, 2**24, 5)]
    assert [[t.numel() for t in some] for some in bucket_tensors(tensors)] == [[2**22, 2**22], [1], [2**24], [5]]
    assert len(list(bucket_tensors([torch.zeros(1), torch.zeros(1, dtype=torch.float64)]))) == 2


# --- what is refused --------------------------------------------------------------------------------------------------


def test_parallel_without_torchrun_raises(shards_of: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"torchrun --nproc-per-node 2 -m firth pretrain .* --parallel ddp"):
        pretrain(Runs(tmp_path, shards_of("bert")).recipe("run", parallel="ddp"))
    assert not (tmp_path / "run").exists()


def test_parallel_none_with_several_processes_raises(
    shards_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Runs(tmp_path, shards_of("bert")).recipe("run", parallel="none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert init_distributed(recipe) is SINGLE_PROCESS
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 processes were started, .* Leave --parallel none out"):
        pretrain(recipe)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match="RANK=first"):
        pretrain(recipe)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": EngineConfig(weights="bf16")}, "leave engine.weights=bf16 out"),
        ({"model": get_preset("ulmfit-tiny")}, "LSTMs"),
        ({"parallel": "hsdp", "fp8": True}, "--parallel hsdp shards matrices"),
        ({"parallel": "ddp", "cpu_offload": True}, "--cpu-offload needs"),
        ({"shard_size": 2}, "--shard-size needs --parallel hsdp"),
    ],
)
def test_settings_that_fsdp_does_not_support_raise(
    fields: dict[str, Any], message: str, shards_of: Make, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        Runs(tmp_path, shards_of("bert")).recipe("run", **{"parallel": "fsdp", **fields}).check()


def test_errors_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = UserError("wrong in all of them")
    assert should_report_error(wrong)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert should_report_error(wrong)
    monkeypatch.setenv("RANK", "1")
    assert not should_report_error(wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_process_with_nccl_equals_a_plain_run(shards_of: Make, tmp_path: Path) -> None:
    runs = Runs(tmp_path, shards_of("bert"))
    runs.alone("plain", per_device_train_batch_size=8)
    jobs = [runs.job(way, parallel=way, per_device_train_batch_size=8) for way in ("ddp", "fsdp")]
    jobs += [runs.job("offload", parallel="fsdp", cpu_offload=True, per_device_train_batch_size=8)]
    jobs += [
        runs.job(f"{way} compiled", parallel=way, per_device_train_batch_size=8, compile=True, bf16=True)
        for way in ("ddp", "fsdp")
    ]
    processes.run(1, jobs, tmp_path)
    for way in ("ddp", "fsdp"):
        runs.assert_close("plain", way, but="key.bias")
    for way in ("offload", "ddp compiled", "fsdp compiled"):
        losses = [[line["loss"] for line in runs.log(name) if "loss" in line] for name in ("plain", way)]
        assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_sharded_weights_of_the_best_evaluation(shards_of: Make, corpus_file: Path, tmp_path: Path) -> None:
    """A run that overfits ends with its best weights, also where each process has only a part of them."""
    words, rng = corpus_file.read_text(encoding="utf-8").split(), np.random.default_rng(0)
    documents = (Document(" ".join(rng.choice(words, 60)), "") for _ in range(12))
    prepare(documents, shards_of("gpt2").tokenizer, tmp_path / "few", held_out_share=0.5)
    runs = Runs(tmp_path, open_shards(tmp_path / "few"), "gpt2")
    fields: dict[str, Any] = dict(max_steps=16, eval_steps=4, save_steps=8, learning_rate=2e-2)
    runs.alone("one", per_device_train_batch_size=8, **fields)
    stopped = dict(parallel="fsdp", per_device_train_batch_size=4, **fields)
    jobs = [
        runs.job("fsdp", parallel="fsdp", per_device_train_batch_size=4, **fields),
        runs.job("stopped", {"harm": {"kind": "stop", "step": 10}}, **stopped),
        runs.job("stopped", {"resume": True}, **stopped),
    ]
    processes.run(2, jobs, tmp_path)
    one, fsdp = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "fsdp"))
    assert 0 < one["best_step"] == fsdp["best_step"] < 16
    assert fsdp["eval_loss"] == pytest.approx(one["eval_loss"], abs=CLOSE)
    assert fsdp["eval_loss"] == min(line["eval_loss"] for line in runs.log("fsdp") if "eval_loss" in line)
    for name, value in runs.weights("one").items():
        torch.testing.assert_close(runs.weights("fsdp")[name], value, rtol=0, atol=10 * CLOSE)  # the rate is high
    runs.assert_same("fsdp", "stopped")
