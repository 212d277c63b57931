"""The command line: a mistake costs one message and nothing else; JSON keys are as documented."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from firth.cli import command, options
from firth.cli import main as cli
from firth.cli.main import app, main
from firth.core.errors import UserError
from firth.core.files import VERIFIED_FILE, find_corruption
from firth.generate import Blank, Guess
from firth.tasks import FinetuneRecipe
from firth.tokens import load_tokenizer
from firth.train import Recipe

SMALL = ["--max-seq-length=32", "--per-device-train-batch-size=4", "--no-compile", "--no-bf16"]
TINY = ["model.num_layers=1", "model.dim=32", "model.mlp.dim=64"]
REPEATABLE = ("data", "ensemble", "with", "among", "stop", "target-text", "fit")
REPEATABLE_ELSEWHERE = {"predict": {"data"}, "export": {"data"}}  # names of options that this command takes once
REPEATABLE_BY_NAME = ("task", "train", "dev", "prefix")  # of finetune: NAME=VALUE
WITHOUT_JSON = ("chat", "serve")
COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)

RUN_OPTIONS = (  # the promised ones
    *("--output-dir", "--max-steps", "--num-train-epochs", "--learning-rate", "--per-device-train-batch-size"),
    *("--gradient-accumulation-steps", "--warmup-steps", "--save-steps", "--save-total-limit", "--eval-steps"),
    *("--logging-steps", "--seed", "--bf16", "--resume-from-checkpoint", "--resume", "--overwrite"),
    *("--max-seq-length", "--minutes", "--config"),
)


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out.splitlines()[-1]))


Firth = Callable[..., Done]


@pytest.fixture
def firth(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Firth:
    """Run a command in this process; return its exit code and output."""

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["firth", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as e:
            code = e.code or 0
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture(scope="session")
def paths(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers, shards and small checkpoints, made once by the API, and labelled files."""
    import firth

    folder = tmp_path_factory.mktemp("files")
    paths = {"text": corpus_file}
    for kind, model in (("wordpiece", "bert"), ("byte-bpe", "gpt2"), ("unigram", "t5")):
        firth.tokenizer([corpus_file], folder / f"{model}-tokenizer", kind, 400)
        firth.prepare([corpus_file], folder / f"{model}-tokenizer", folder / f"{model}-shards")
        firth.pretrain(
            f"{model}-tiny",
            folder / f"{model}-shards",
            folder / f"{model}-run",
            overrides={"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64},
            max_steps=2,
            max_seq_length=32,
            per_device_train_batch_size=4,
        )
        for name in ("tokenizer", "shards"):
            paths[f"{model}-{name}"] = folder / f"{model}-{name}"
        paths[model] = folder / f"{model}-run" / "final"
    rows = [(f"the {w} by the {p}", w) for w in ("cat", "dog") for p in ("river", "mill", "bridge", "garden")]
    for name in ("train", "dev"):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps({"text": t, "label": w}) + "\n" for t, w in rows))
    paths["pairs"] = folder / "pairs.jsonl"
    paths["pairs"].write_text("".join(json.dumps({"source": t, "target": w}) + "\n" for t, w in rows))
    firth.finetune(paths["bert"], "classify", paths["train"], paths["dev"], folder / "tuned", max_steps=2, seeds=1)
    paths["tuned"] = folder / "tuned" / "final"
    return paths


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder and what is in it, but for the times at which shards were verified."""
    paths = (p for p in sorted(folder.rglob("*")) if p.name != VERIFIED_FILE)
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


# --- what works


def test_a_dry_run_counts_and_writes_nothing(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    """The same parameters and steps as the run itself has."""
    out = ["--output-dir", tmp_path / "out"]
    text = ["tokenizer", paths["text"], *out], ["prepare", paths["text"], "--tokenizer", paths["bert-tokenizer"], *out]
    small = ["--max-seq-length=32", "--num-train-epochs=1", "--no-compile", "model.num_layers=1", "model.dim=32"]
    pretraining = ["pretrain", "bert-tiny", "--data", paths["bert-shards"], *small, "--per-device-train-batch-size=64"]
    files = ["--task", "classify", "--train", paths["train"], "--dev", paths["dev"]]
    tuning = ["finetune", paths["bert"], *files, "--seeds=2", "--against", "scratch", *out]
    before, found = tree(paths["text"].parent), {}
    for words in (*text, [*pretraining, *out], tuning):
        done = firth(*words, "--dry-run", "--json")
        assert done.code == 0, done.err
        found[words[0]] = done.json
        assert (done.json["dry_run"], done.json["writes"]) == (True, str(tmp_path / "out"))
        assert not list(tmp_path.iterdir())
    assert tree(paths["text"].parent) == before
    assert found["tokenizer"]["text_bytes"] == found["prepare"]["text_bytes"] == paths["text"].stat().st_size
    assert (found["finetune"]["runs"], found["finetune"]["steps"], found["finetune"]["dev_examples"]) == (4, 200, 8)
    assert "memory, without activations" in firth(*pretraining, *out, "--dry-run").out
    run = firth(*pretraining, *out, "--json").json
    assert run["parameters"] == found["pretrain"]["parameters"]
    assert abs(run["steps"] - found["pretrain"]["steps"]) <= 1  # packed rows have some padding
    assert firth(*pretraining, *out, "--dry-run").code == 2  # the folder exists already


def test_tokenizer_and_prepare(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = ["--kind", "wordpiece", "--vocab-size", 200, "--output-dir", tmp_path / "t", "--json"]
    done = firth("tokenizer", paths["text"], *words)
    assert done.code == 0
    assert done.json["vocab_size"] == 200
    done = firth("prepare", paths["text"], "--tokenizer", tmp_path / "t", "--output-dir", tmp_path / "s", "--json")
    assert done.code == 0
    assert done.json["documents"] == 300
    assert done.json["tokens"] > 1000
    assert done.json["duplicates"] == 0
    again = firth(
        "prepare", paths["text"], "--tokenizer", tmp_path / "t", "--output-dir", tmp_path / "s", "--json", "--resume"
    )
    assert again.json == done.json
    words = ["prepare", paths["text"], paths["text"], "--tokenizer", tmp_path / "t", "--output-dir", tmp_path / "u"]
    twice = firth(*words, "--dedup=none", "--workers=2", "--max-memory=8GB", "--json")
    assert twice.json["documents"] == 600
    assert "not a size" in firth(*words, "--max-memory=lots", "--overwrite").err


def test_how_text_is_read(firth: Firth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Two words\n\n" + "The \ufb01ne HERON stands in shallow water\n\n" * 20
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-16"))))
    cleaning = ["--encoding=utf-16", "--normalize=nfkc,lower", "--min-words=3", "--max-words=100", "--min-characters=5"]
    done = firth(
        "tokenizer", "-", "--output-dir", tmp_path / "t", "--kind=word", "--vocab-size=50", *cleaning, "--json"
    )
    assert done.code == 0, done.err
    assert "20 documents: stdin split on blank lines; 1 left out, under 3 words;" in done.err.replace("\n", " ")
    assert "21 changed by --normalize nfkc,lower" in done.err.replace("\n", " ")
    words = (tmp_path / "t" / "tokenizer.json").read_text()
    assert '"fine"' in words
    assert '"HERON"' not in words


def test_pretrain_from_text(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = ["--data", paths["text"], "--output-dir", tmp_path / "run", "--vocab-size", 400, "--max-steps", 2, *SMALL]
    done = firth("pretrain", "bert-tiny", *words, "--json", *TINY)
    assert done.code == 0, done.err
    assert {"output_dir", "steps", "loss", "eval_loss", "tokens_per_second"} <= done.json.keys()
    assert done.json["steps"] == 2
    assert find_corruption(tmp_path / "run" / "final") is None
    table = firth("pretrain", "bert-tiny", *words, "--resume", *TINY)
    assert table.code == 0
    assert "eval_loss" in table.out
    assert re.search("word frequencies.*; next: .*firth finetune .*/run/final", table.err.splitlines()[-1])
    # the text may not change under a run
    other = tmp_path / "other.txt"
    other.write_text("Something else.\n")
    changed = [other if word == paths["text"] else word for word in words]
    done = firth("pretrain", "bert-tiny", *changed, "--resume", *TINY)
    assert done.code == 2
    assert "differ: data:" in done.err


def test_show(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = ["show", "t5-tiny", "--data", paths["t5-shards"], "--rows=2", "--output-dir", tmp_path, *SMALL]
    done = firth(*words, "--json", "objective.rate=0.3")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    assert {"rows", "objective", "counts", "expected_rates", "shapes", "page"} == done.json.keys()
    assert done.json["expected_rates"]["targets"] == pytest.approx(0.3, rel=0.02)
    fields = {"source", "index", "input_ids", "labels", "decoder_input_ids", "pair_labels"}
    assert all(fields <= row.keys() and row["pair_labels"] is None for row in done.json["rows"])
    assert Path(done.json["page"]) == tmp_path / "show.html"
    table = firth(*words)
    assert table.code == 0
    assert "<extra_id_0>‹" in table.out
    assert "decoder labels" in table.out
    assert "expected" in table.out
    assert "show.html" in table.err


def test_check(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = ["check", paths["text"], "--kinds=byte-bpe", "--vocab-sizes=300", "--output-dir", tmp_path]
    done = firth(*words, "--tokenizer", paths["bert-tokenizer"], "--json")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    assert done.json["text"]["documents"] == 300
    assert [t["kind"] for t in done.json["tokenizers"]] == ["wordpiece", "byte-bpe"]
    assert any(a["about"].endswith(": keep") for a in done.json["advice"])
    assert Path(done.json["page"]) == tmp_path / "check.html"
    table = firth("check", paths["text"], "--kinds=none", "--output-dir", tmp_path)
    assert table.code == 0, table.err
    assert "near duplicates" in table.out
    assert "Tokenizers" not in table.out
    assert "check.html" in table.err


def test_finetune_evaluate_export(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    files = ["--task", "classify", "--train", paths["train"], "--dev", paths["dev"]]
    done = firth(
        "finetune", paths["gpt2"], *files, "--output-dir", tmp_path / "run", "--max-steps", 2, "--seeds", 2, "--json"
    )
    assert done.code == 0, done.err
    assert {"metric", "mean", "std", "seeds", "accuracy", "macro_f1", "mcc"} <= done.json.keys()
    assert len(done.json["seeds"]) == 2
    final = tmp_path / "run" / "final"
    assert Path(done.json["report"]) == tmp_path / "run" / "report.html"
    assert "accuracy" in (tmp_path / "run" / "report.html").read_text()
    assert "text-classification" in (final / "README.md").read_text(), "the model card"
    done = firth("evaluate", final, "--task", "classify", "--data", paths["dev"], "--json")
    assert done.code == 0, done.err
    assert "accuracy" in done.json["metrics"]
    assert Path(done.json["predictions"]).is_file()
    again = firth("evaluate", final, "--data", paths["dev"])  # the task is the checkpoint's own
    assert again.code == 0, again.err
    assert "accuracy" in again.out
    done = firth("export", final, "--output-dir", tmp_path / "out", "--check", "--json")
    assert done.code == 0, done.err
    assert done.json["max_difference"] < 1e-4
    before = tree(tmp_path)
    done = firth("export", final, "--check", "--json")
    assert (done.code, [*done.json], tree(tmp_path) == before) == (
        0,
        ["max_difference", "compared_with", "differing_texts"],
        True,
    ), done.err


def test_a_resumed_run_keeps_its_card(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = finetune(paths, tmp_path, "--seeds=2", "--lora-rank=2")
    table = firth(*words)
    assert table.code == 0, table.err
    assert all(word in table.out for word in ("accuracy", "deviation", "seed 1"))
    card = tmp_path / "run" / "final" / "README.md"
    card.write_text("mine")
    done = firth(*words, "--resume", "--json")
    assert done.code == 0, done.err
    assert card.read_text() == "mine"
    assert find_corruption(tmp_path / "run" / "final") is None


def test_evaluate_a_model_as_it_is(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    lines = {"good": "the cat slept", "bad": "the slept cat", "uid": "order"}
    pairs = write(tmp_path / "m.jsonl", json.dumps(lines) + "\n")
    done = firth("evaluate", paths["gpt2"], "--task=minimal-pairs", "--data", pairs, "--output-dir", tmp_path / "m")
    assert done.code == 0, done.err
    assert "order" in done.out
    texts = [write(tmp_path / f"{name}.txt", "The cat slept.") for name in "ab"]
    words = ["--task=perplexity", "--data", texts[0], "--data", texts[1], "--stride=4", "--output-dir", tmp_path / "p"]
    done = firth("evaluate", paths["gpt2"], *words, "--json")
    assert done.code == 0, done.err
    assert {"perplexity", "bits_per_byte"} <= done.json["metrics"].keys()
    assert done.json["stride"] == 4
    assert len(Path(done.json["predictions"]).read_text().splitlines()) == 2


def test_evaluate_a_suite(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    tasks = "tasks:\n" + "".join(
        f"  - {{name: {name}, task: classify, train: {paths['train']}, dev: {paths['dev']}}}\n" for name in "ab"
    )
    words = ["evaluate", paths["bert"], "--suite", write(tmp_path / "s.yaml", tasks), "--output-dir", tmp_path / "s"]
    done = firth(*words, "--seeds=1", "--json", "max_steps=1")
    assert done.code == 0, done.err
    assert done.json["metrics"].keys() == {"a", "b", "average"}
    assert Path(done.json["predictions"]) == tmp_path / "s"
    assert firth(*words, "--seeds=1", "max_steps=1").code == 2, "it is not overwritten"
    table = firth(*words, "--seeds=1", "--resume", "max_steps=1")
    assert table.code == 0, table.err
    assert "average" in table.out
    assert table.err.count("done already") == 2


def test_generate_from_arguments_files_and_stdin(
    firth: Firth, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--max-new-tokens=3", "--json"]
    done = firth("generate", paths["gpt2"], "The cat", "A dog", "--temperature=1", "--num-return-sequences=2", *few)
    assert done.code == 0, done.err
    assert [result["prompt"] for result in done.json["results"]] == [0, 0, 1, 1]
    assert done.json["text"] == done.json["results"][0]["text"]
    lines = write(tmp_path / "p.txt", "The cat\n\nA dog\n")
    rows = write(tmp_path / "p.jsonl", '{"prompt": "The cat"}\n{"prompt": "A dog"}\n')
    wide = write(tmp_path / "wide.txt", "The cat\nA dog\n".encode("utf-16"))
    given = [(lines,), (rows,), (wide, "--encoding=utf-16")]
    found = [firth("generate", paths["gpt2"], "--prompts", *words, *few).json["results"] for words in given]
    assert found[0] == found[1] == found[2]
    assert [result["text"][:5] for result in found[0]] == ["The c", "A dog"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("The cat\nslept\n"))
    done = firth("generate", paths["gpt2"], *few)
    assert done.json["text"].startswith("The cat\nslept"), "all of it is one prompt"


def test_a_stream_is_what_is_written(firth: Firth, paths: dict[str, Path]) -> None:
    for model in ("gpt2", "t5"):
        words = ["generate", paths[model], "The cat", "--max-new-tokens=5"]
        assert firth(*words, "--stream").out == firth(*words).out


def test_embed(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = ["embed", paths["bert"], "The cat slept.", "A dog.", "The cat slept."]
    done = firth(*words, "--similar", "--json")
    assert done.code == 0, done.err
    assert np.array(done.json["vectors"]).shape == (3, 32)
    assert done.json["similarity"][0][2] == pytest.approx(1)
    assert done.json["similarity"][0][1] < 0.9999
    assert "Cosines" in firth(*words, "--similar").out
    assert "The cat slept." in firth(*words).out
    assert firth(*words, "--normalize", "--output-dir", tmp_path / "v.npy").code == 0
    assert np.linalg.norm(np.load(tmp_path / "v.npy"), axis=1) == pytest.approx(1)
    again = firth(*words, "--output-dir", tmp_path / "v.npy")
    assert again.code == 2
    assert "--overwrite" in again.err
    before = (tmp_path / "v.npy").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # as on a full disk: 128 bytes of header, 384 of data
    try:
        full = firth(*words, "--output-dir", tmp_path / "v.npy", "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.code == 1, full.err
    assert "v.npy: File too large" in full.err
    assert (tmp_path / "v.npy").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["v.npy"]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("models", "doctor")])  # flags alone
def test_an_option_with_one_value_cannot_be_given_twice(firth: Firth, command: str) -> None:
    shown = firth(command, "--help-all").out
    valued = re.findall(r"^  --([a-z-]+) [A-Za-z0-9]", shown, re.M)
    repeatable = {*REPEATABLE, *(REPEATABLE_BY_NAME if command == "finetune" else ())} - REPEATABLE_ELSEWHERE.get(
        command, set()
    )
    once, often = ([name for name in valued if (name in repeatable) == repeated] for repeated in (False, True))
    for name in (once[0], once[-1]):
        done = firth(command, f"--{name}", 1, f"--{name}", 2)
        assert done.code == 2
        assert f"--{name} is given 2 times" in done.err
    if often:
        assert "is given" not in firth(command, *(word for name in often for word in (f"--{name}", "a") * 2)).err


def test_several_tasks_at_once(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words = [f"--{side}={name}={paths[side]}" for side in ("train", "dev") for name in ("first", "second")]
    prefix = ["--prefix", "second=what is it? "]
    done = firth(
        "finetune", paths["t5"], *words, *prefix, "--output-dir", tmp_path / "run", "--max-steps=1", "--seeds=1"
    )
    assert done.code == 0, done.err
    assert "multi-task on first, second" in done.out
    assert "second.accuracy" in done.out
    facts = json.loads((tmp_path / "run" / "final" / "task.json").read_text())["tasks"]
    assert [facts[name]["prefix"] for name in ("first", "second")] == ["first: ", "what is it? "]


def test_two_contrary_flags(firth: Firth) -> None:
    assert "--bf16 is given 2 times" in firth("pretrain", "bert-tiny", "--bf16", "--no-bf16").err
    assert "is given" not in firth("pretrain", "bert-tiny", "--overwrite", "--overwrite").err


def test_fill_shows_line_ends(firth: Firth, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = (Guess("\n", 0.5), Guess("a cat\n\tsaid", 0.25))
    monkeypatch.setattr("firth.api.fill", lambda *_: [Blank(guesses)])
    done = firth("fill", paths["bert"], "The ___ slept.")
    assert [line.split()[3] for line in done.out.splitlines() if "%" in line] == ["⏎", "a"]
    assert "a cat⏎⇥said" in done.out


def test_generate_fill_models(firth: Firth, paths: dict[str, Path]) -> None:
    done = firth("generate", paths["gpt2"], "The cat", "--max-new-tokens", 3, "--json")
    assert done.code == 0
    assert done.json["text"].startswith("The cat")
    done = firth("fill", paths["bert"], "The ___ slept.", "--top", 2, "--json")
    assert done.code == 0
    assert len(done.json["blanks"][0]["guesses"]) == 2
    assert "guess" in firth("fill", paths["bert"], "The ___ slept.").out
    done = firth("models", "--json")
    assert done.code == 0
    assert len(done.out.splitlines()) == 1, "JSON is all of stdout"
    assert all({"name", "family", "parameters", "objective"} <= m.keys() for m in done.json["models"])
    counted = {m["name"]: m for m in done.json["models"] if m["parameters"] is None}
    assert {name: m["size"] for name, m in counted.items()} == {
        "word2vec": "2 x 100 for each word",
        "glove": "100 for each word",
        "ngram": "2 for each n-gram",
    }
    table = firth("models").out
    assert all(name in table for name in ("bert-tiny", "word2vec", "2 for each n-gram"))
    llamas = firth("models", "llama", "--json").json["models"]
    assert {m["family"] for m in llamas} == {"llama"}
    assert {m["architecture"] for m in firth("models", "encoder-decoder", "--json").json["models"]} == {
        "encoder-decoder"
    }
    assert "Did you mean 'bert-tiny'" in firth("models", "bert-tinny").err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_on_two_screens(command: str, firth: Firth) -> None:
    done = firth(command, "--help")
    assert done.code == 0
    lines = done.out.splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 80
    assert ("--json" in done.out) == (command not in WITHOUT_JSON)
    assert "Examples:" in done.out
    titles = [line for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert titles[1:2] == ["Required:"] or command in ("quickstart", "models")
    assert firth(command, "--help-all").out.count("--json") >= (command not in WITHOUT_JSON)


@pytest.mark.parametrize(
    ("command", "there", "absent"),
    [
        ("chat", "--temperature", "--length-penalty"),  # it has no --num-beams
        ("predict", "Print a JSON object for each input.", "Print one JSON object"),
        ("finetune", "[default: adafactor for T5s without LoRA, else adamw]", "for new Transformers"),
        ("adapt", "[default: that of the checkpoint's run, else 128]", "[default: 128]"),
        ("pretrain", "One of targets, all. [default: targets]", "[default: None]"),
    ],
)
def test_help_tells_what_the_command_does(command: str, there: str, absent: str, firth: Firth) -> None:
    text = " ".join(firth(command, "--help-all").out.split())
    assert there in text
    assert absent not in text


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_help_all_has_every_option_of_a_run(command: str, firth: Firth) -> None:
    text = firth(command, "--help-all").out.replace("[no-]", "")
    assert all(option in text for option in RUN_OPTIONS)
    recipe, hidden = (Recipe, ()) if command == "pretrain" else (FinetuneRecipe, cli.DISTRIBUTED_FIELDS)
    names = [f.name for f in fields(recipe) if f.metadata.get("help") and f.name not in ("checkpoint", *hidden)]
    assert all(f"--{name.replace('_', '-')}" in text for name in names if name != "engine")
    if command == "pretrain":
        assert "permutation-lm" in text


def test_options_come_from_fields() -> None:
    """Types, defaults and bounds; a nested dataclass is no option, its fields are set by KEY=VALUE."""

    @dataclass
    class Engine:
        weights: Literal["float32", "bf16"] = field(default="float32", metadata={"help": "Keep the weights so."})
        fused: bool = field(default=True, metadata={"help": "Fuse."})

    @dataclass
    class Config:
        rate: float = field(default=0.1, metadata={"help": "Set the rate; 0 stops. Default: by the width."})
        optim: Literal["adamw", "muon"] = field(default="adamw", metadata={"help": "Optimize."})
        engine: Engine = field(default_factory=Engine, metadata={"help": "Engine."})
        steps: int = 3

    globals().update(Engine=Engine)  # where annotations are looked up
    found = {o.name: o for o in command.list_options(options.FillOptions, Config, "rate")}
    assert [*found] == ["json", "checkpoint", "text", "top", "bf16", "rate", "optim"]
    assert (found["rate"].label, found["rate"].shown_default, found["rate"].common) == (
        "--rate X",
        "by the width",
        True,
    )
    assert (found["rate"].convert("1e-3"), found["rate"].resolve(None), found["top"].resolve(None)) == (1e-3, None, 5)
    assert found["json"].label == "--json"
    assert [(name, text.replace("\xa0", " ")) for name, text in command.nested_fields(Config)] == [
        ("engine.weights=...", "Keep the weights so. One of float32, bf16. [default: float32]"),
        ("engine.fused=...", "Fuse. [default: on]"),
    ]
    for name, text, message in (
        ("rate", "fast", "--rate: 'fast' is not a number."),
        ("top", "2.5", "--top: '2.5' is not a whole number."),
        ("top", "0", "--top: 0 is out of bounds, it must be at least 1."),
        ("optim", "muoon", "--optim: 'muoon' is not one of adamw, muon."),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            found[name].convert(text)


def test_every_setting_of_an_option_is_read() -> None:
    """A misspelt key such as `minimum` would be ignored, and --rewind -1 accepted."""
    known = {"help", "metavar", "argument", "parse", "parse_all", "bounds", "flag", "topic", "required", "common"}
    types = [kind for name, kind in vars(options).items() if name.endswith("Options") and is_dataclass(kind)]
    for kind in types:
        for one in fields(kind):
            assert one.metadata.keys() <= known, f"{kind.__name__}.{one.name}"
    (rewind,) = (o for o in command.list_options(options.ResumeOptions) if o.name == "rewind")
    with pytest.raises(UserError, match="--rewind: -1 is out of bounds, it must be at least 0"):
        rewind.convert("-1")


def test_no_command_and_the_list_of_commands(firth: Firth) -> None:
    assert firth("--help").code == 0
    assert all(command in firth("--help").out for command in COMMANDS)
    assert firth().code == 2
    assert firth().out == firth("--help").out


# --- mistakes

Words = Callable[[dict[str, Path], Path], Sequence[object]]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def pretrain(model: object, data: object, out: Path, *more: object) -> list[object]:
    return ["pretrain", model, "--data", data, "--output-dir", out / "run", "--max-steps=1", *SMALL, *more]


def show(paths: dict[str, Path], out: Path, *more: object) -> list[object]:
    return ["show", "bert-tiny", "--data", paths["bert-shards"], "--output-dir", out, *SMALL, *more]


def check(text: object, *more: object) -> list[object]:
    return ["check", text, *more]


def finetune(paths: dict[str, Path], out: Path, *more: object, **files: object) -> list[object]:
    named = {"task": "classify", "train": paths["train"], "dev": paths["dev"], "output-dir": out / "run", **files}
    checkpoint = named.pop("checkpoint", paths["bert"])
    options = [word for name, value in named.items() for word in (f"--{name}", value)]
    return ["finetune", checkpoint, *options, "--max-steps=1", *more]


MISTAKES: dict[str, tuple[Words, list[str]]] = {
    "no file": (lambda h, t: pretrain("bert-tiny", t / "no.txt", t), ["no.txt: no such file"]),
    "no text": (lambda h, t: pretrain("bert-tiny", write(t / "e.txt", " \n\n"), t), ["e.txt", "empty"]),
    "no text for a tokenizer": (
        lambda h, t: ["tokenizer", write(t / "e.txt", ""), "--output-dir", t / "run"],
        ["e.txt", "empty"],
    ),
    "less than a row": (
        lambda h, t: pretrain(
            "bert-tiny", write(t / "s.txt", "The cat."), t, "--tokenizer", h["bert-tokenizer"], "--held-out=0"
        ),
        ["less than one row", "--max-seq-length"],
    ),
    "not utf-8": (
        lambda h, t: pretrain("bert-tiny", write(t / "l.txt", b"Caf\xe9 au lait, s'il vous pla\xeet"), t),
        ["l.txt:1: not UTF-8", "byte 3 ", "--encoding"],
    ),
    "labels not utf-8": (
        lambda h, t: finetune(h, t, dev=write(t / "l.jsonl", b'{"text": "caf\xe9", "label": "cat"}')),
        ["l.jsonl:1: not UTF-8", "--encoding"],
    ),
    "not json": (
        lambda h, t: pretrain("bert-tiny", write(t / "b.jsonl", '{"text": "a"}\n{"text": oops}\n'), t),
        ["b.jsonl:2: not JSON"],
    ),
    "no such column": (
        lambda h, t: finetune(h, t, dev=write(t / "c.jsonl", '{"sentence": "a cat", "label": "cat"}\n')),
        ["c.jsonl:1", "no column 'text'", "sentence, label", "--columns text="],
    ),
    "a new label in dev": (
        lambda h, t: finetune(h, t, dev=write(t / "n.jsonl", '{"text": "a cow", "label": "cow"}\n')),
        ["n.jsonl, example 1", "'cow'", "train.jsonl"],
    ),
    "an unknown preset": (lambda h, t: pretrain("bert-tinny", h["text"], t), ["'bert-tinny'", "'bert-tiny'"]),
    "a path that is not there": (lambda h, t: pretrain(t / "run" / "final", h["text"], t), ["no such file or folder"]),
    "an unknown key": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "model.num_layer=2"),
        ["'model.num_layer'", "'model.num_layers'"],
    ),
    "a wrong type": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "model.num_layers=two"),
        ["model.num_layers", "'two' is not a whole number"],
    ),
    "a wrong type of an option": (
        lambda h, t: ["pretrain", "bert-tiny", "--data", h["text"], "--output-dir", t / "run", "--max-steps", "many"],
        ["--max-steps: 'many' is not a whole number."],
    ),
    "a rate that is not a number": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "--learning-rate=fast"),
        ["--learning-rate: 'fast' is not a number."],
    ),
    "an unknown optimizer": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "--optim=muoon"),
        ["--optim: 'muoon' is not one of adamw, muon, adafactor, lamb."],
    ),
    "export without a folder": (lambda h, t: ["export", h["bert"]], ["--output-dir is missing", "--check"]),
    "a setting of one file for a suite": (
        lambda h, t: ["evaluate", h["bert"], "--suite=glue", "--data", t, "--stride=3"],
        ["--stride is for a single file"],
    ),
    "no such config": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "--config", t / "no.yaml"),
        ["no.yaml: no such file"],
    ),
    "an unknown key in a config": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "--config", write(t / "c.yaml", "lerning_rate: 1")),
        ["'lerning_rate'", "'learning_rate'"],
    ),
    "shards of another tokenizer": (
        lambda h, t: pretrain(h["bert"], h["gpt2-shards"], t),
        ["another tokenizer", "firth prepare --tokenizer"],
    ),
    "another tokenizer than the checkpoint's": (
        lambda h, t: pretrain(h["bert"], h["text"], t, "--tokenizer", h["gpt2-tokenizer"]),
        ["is not the tokenizer that", "--tokenizer"],
    ),
    "a tokenizer that does not suit": (
        lambda h, t: pretrain("t5-tiny", h["bert-shards"], t),
        ["needs sentinel tokens", "--kind unigram"],
    ),
    "rows longer than the model allows": (
        lambda h, t: ["pretrain", "bert-tiny", "--data", h["bert-shards"], "--output-dir", t, "--max-seq-length=600"],
        ["--max-seq-length 600", "512 positions"],
    ),
    "an objective of another shape": (
        lambda h, t: pretrain("bert-tiny", h["bert-shards"], t, "--objective=clm"),
        ["CLM", "decoder", "encoder"],
    ),
    "no rows to show": (lambda h, t: show(h, t, "--rows=0"), ["--rows is 0", "from 1 to 10,000"]),
    "a page of someone else": (
        lambda h, t: show(h, write(t / "show.html", "mine").parent),
        ["show.html was not written by", "--overwrite"],
    ),
    "showing an objective of another shape": (lambda h, t: show(h, t, "--objective=clm"), ["CLM", "decoder"]),
    "showing an unknown objective": (lambda h, t: show(h, t, "--objective=bartt"), ["'bartt'", "'bart'"]),
    "showing text that is not there": (lambda h, t: show({"bert-shards": t / "no.txt"}, t), ["no.txt: no such file"]),
    "showing nothing": (lambda h, t: ["show", "bert-tiny", "--output-dir", t], ["--data is missing", "show --help"]),
    "an unknown objective": (
        lambda h, t: pretrain("bert-tiny", h["bert-shards"], t, "--objective=mlmm"),
        ["'mlmm'", "'mlm'"],
    ),
    "text-to-text on an encoder": (
        lambda h, t: finetune(h, t, task="text-to-text", train=h["pairs"], dev=h["pairs"]),
        ["text-to-text", "encoder-decoder"],
    ),
    "no checkpoint": (lambda h, t: finetune(h, t, checkpoint=t), ["is not a checkpoint", "config.json"]),
    "the run, not what is in it": (
        lambda h, t: finetune(h, t, checkpoint=h["bert"].parent),
        ["is not a checkpoint", "Did you mean", "final"],
    ),
    "a preset is no checkpoint": (lambda h, t: finetune(h, t, checkpoint="bert-tiny"), ["firth pretrain"]),
    "a classifier is not pretrained": (lambda h, t: pretrain(h["tuned"], h["bert-shards"], t), ["has a task head"]),
    "the output is a file": (
        lambda h, t: ["pretrain", "bert-tiny", "--data", h["text"], "--output-dir", write(t / "f", "x")],
        ["f is a file"],
    ),
    "the output is under a file": (
        lambda h, t: ["tokenizer", h["text"], "--output-dir", write(t / "f", "x") / "deeper"],
        ["cannot be made", "is a file"],
    ),
    "checking an empty folder": (lambda h, t: check(t), ["nothing to read"]),
    "checking what is not text": (
        lambda h, t: check(write(t / "a.png", b"\x89PNG")),
        ["a.png", "not UTF-8"],
    ),
    "checking a binary .txt": (lambda h, t: check(write(t / "a.txt", b"\x89PNG\xff\x00")), ["a.txt", "not UTF-8"]),
    "checking with no tokenizer": (lambda h, t: check(h["text"], "--tokenizer", t), ["holds no tokenizer"]),
    "checking with no folder": (lambda h, t: check(h["text"], "--tokenizer", t / "no"), ["no such folder"]),
    "checking an unknown kind": (lambda h, t: check(h["text"], "--kinds=wordpeice"), ["'wordpeice'", "'wordpiece'"]),
    "checking no size": (lambda h, t: check(h["text"], "--vocab-sizes=many"), ["'many'", "4096,8192"]),
    "checking size 0": (lambda h, t: check(h["text"], "--vocab-sizes=0"), ["0 is not a size"]),
    "checking no sample": (lambda h, t: check(h["text"], "--sample=3"), ["--sample is 3"]),
    "a check.html of somebody else": (
        lambda h, t: ["check", h["text"], "--output-dir", write(t / "check.html", "mine").parent],
        ["was not written by `firth check`"],
    ),
    "an unknown task": (lambda h, t: finetune(h, t, task="clasify"), ["'clasify'", "'classify'"]),
    "an encoder does not write": (lambda h, t: ["generate", h["bert"], "The"], ["firth fill"]),
    "a decoder does not fill": (lambda h, t: ["fill", h["gpt2"], "The ___"], ["firth generate"]),
    "no blank": (lambda h, t: ["fill", h["bert"], "The cat"], ["no blank"]),
    "two files without names": (
        lambda h, t: finetune(h, t, "--train", h["dev"], checkpoint=h["t5"]),
        ["--train is given 2 times", "--train a="],
    ),
    "a name twice": (
        lambda h, t: finetune(h, t, "--train", "a=x.csv", checkpoint=h["t5"], train="a=y.csv"),
        ["Two --train have the same name"],
    ),
    "a setting twice": (
        lambda h, t: [*pretrain("bert-tiny", h["text"], t), "model.dim=32", "model.dim=64"],
        ["model.dim is given twice", "model.dim=64"],
    ),
    "an unknown option": (lambda h, t: ["models", "--jsn"], ["--jsn"]),
    "an unknown command": (lambda h, t: ["pretrian"], ["pretrian"]),
    "columns that are no pairs": (lambda h, t: finetune(h, t, "--columns", "text"), ["--columns", "text=sentence"]),
    "two texts after one --data": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, h["text"]),
        ["is not key=value", "--data"],
    ),
    "a field that has its own option": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "output_dir=x"),
        ["output_dir=x"],
    ),
    "a share that is none": (lambda h, t: pretrain("bert-tiny", h["text"], t, "--held-out=1.5"), ["--held-out is 1.5"]),
    "resume from a path": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "--resume-from-checkpoint", "x"),
        ["--resume-from-checkpoint", "auto"],
    ),
    "evaluating another task": (
        lambda h, t: [
            "evaluate",
            h["tuned"],
            "--task",
            "text-to-text",
            "--data",
            h["pairs"],
            "--output-dir",
            t / "run",
        ],
        ["was fine-tuned for classify"],
    ),
    "evaluating without a task": (lambda h, t: ["evaluate", h["bert"], "--data", h["dev"]], ["--task"]),
    "evaluating on nothing": (lambda h, t: ["evaluate", h["tuned"]], ["--data"]),
    "evaluating what was not learned": (
        lambda h, t: ["evaluate", h["bert"], "--task=classify", "--data", h["dev"]],
        ["was not fine-tuned for the task classify", "firth finetune"],
    ),
    "a setting of another evaluation": (
        lambda h, t: ["evaluate", h["gpt2"], "--task=perplexity", "--data", h["text"], "--pool=mean"],
        ["pool is not a setting of the task perplexity"],
    ),
    "a setting of suites": (
        lambda h, t: ["evaluate", h["tuned"], "--data", h["dev"], "--resume"],
        ["--resume is for --suite"],
    ),
    "two files after one --data": (
        lambda h, t: ["evaluate", h["gpt2"], "--task=perplexity", "--data", h["text"], h["dev"]],
        ["is not key=value", "--data"],
    ),
    "a suite and a task": (
        lambda h, t: ["evaluate", h["bert"], "--suite=glue", "--task=pair", "--data", t],
        ["--tasks"],
    ),
    "an unknown suite": (lambda h, t: ["evaluate", h["bert"], "--suite=gleu", "--data", t], ["'gleu'", "'glue'"]),
    "a suite that is not there": (lambda h, t: ["evaluate", h["bert"], "--suite=glue"], ["--data"]),
    "prompts twice": (
        lambda h, t: ["generate", h["gpt2"], "The", "--prompts", write(t / "p.txt", "The")],
        ["--prompts", "choose one"],
    ),
    "prompts without a text": (
        lambda h, t: ["generate", h["gpt2"], "--prompts", write(t / "p.jsonl", '{"body": "x"}')],
        ["p.jsonl:1", "prompt, source, text"],
    ),
    "a classifier does not write": (lambda h, t: ["generate", h["tuned"], "The"], ["has a task head"]),
    "a tokenizer for a checkpoint": (
        lambda h, t: pretrain(h["bert"], h["text"], t, "--vocab-size=300"),
        ["keeps its tokenizer", "--vocab-size"],
    ),
    "semicolons": (
        lambda h, t: finetune(h, t, dev=write(t / "c.tsv", "text;label\na cat;cat\n")),
        ["no column 'text'", "semicolons"],
    ),
    "prompts not utf-8": (
        lambda h, t: ["generate", h["gpt2"], "--prompts", write(t / "l.txt", b"Caf\xe9 au lait, s'il vous pla\xeet")],
        ["l.txt:1: not UTF-8", "--encoding"],
    ),
    "a stream of JSON": (lambda h, t: ["generate", h["gpt2"], "The", "--stream", "--json"], ["--stream", "--json"]),
    "a stream of two": (lambda h, t: ["generate", h["gpt2"], "The", "A", "--stream"], ["2 prompts"]),
    "drawing without a temperature": (lambda h, t: ["generate", h["gpt2"], "The", "--top-k=3"], ["temperature"]),
    "a file of an analogy": (
        lambda h, t: ["embed", h["gpt2"], "a", "b", "c", "--analogy", "--output-dir", t / "v", "--layer=0"],
        ["--analogy compares the vectors of words", "--output-dir, --layer"],
    ),
    "a pool of a comparison": (
        lambda h, t: ["embed", h["bert"], "a cat", "the cat", "--compare", "cat", "--pool=mean"],
        ["--compare prints its own tables", "--pool"],
    ),
    "a batch size without fine-tuning": (
        lambda h, t: ["evaluate", h["gpt2"], "--task=perplexity", "--data", h["text"], "--batch-size=4"],
        ["batch_size is for fine-tuned models"],
    ),
    "documents of examples": (
        lambda h, t: ["evaluate", h["gpt2"], "--task=minimal-pairs", "--data", h["text"], "--documents=file"],
        ["documents is for plain text"],
    ),
    "an unknown pool": (lambda h, t: ["embed", h["bert"], "The", "--pool=avg"], ["'avg'", "mean"]),
    "LoRA and freezing": (lambda h, t: finetune(h, t, "--lora-rank=2", "--freeze=backbone"), ["LoRA", "freeze"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str, firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    words, expected = MISTAKES[name]
    arguments = words(paths, tmp_path)
    before = tree(tmp_path)
    done = firth(*arguments)
    assert done.code == 2, done.err
    said = " ".join(done.err.split())
    for part in expected:
        assert part in said
    assert "Traceback" not in done.err
    assert done.err.count("error:") == 1
    assert tree(tmp_path).keys() - before.keys() <= made(name)
    assert {k: v for k, v in tree(tmp_path).items() if k in before} == before


def made(name: str) -> set[str]:
    """What is made before the mistake can be seen, and stays for the next try."""
    if name != "less than a row":
        return set()
    files = ["offsets.npy", "sentences.bin", "tokens.bin", "words.bin"]
    names = ["data", "data/manifest.json", "data/tokenizer", "data/train", "data/held_out"]
    names += ["data/tokenizer/tokenizer.json", "data/tokenizer/tokenizer_config.json"]
    return {"run"} | {
        f"run/{n}"
        for n in [".lock", "source.json", *names]
        + [f"data/{part}/{f}" for part in ("train", "held_out") for f in files]
    }


@pytest.mark.parametrize("command", ["pretrain", "finetune", "tokenizer", "prepare", "export", "evaluate"])
@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_an_existing_folder_is_refused_and_foreign_files_always(
    command: str, more: list[str], firth: Firth, paths: dict[str, Path], tmp_path: Path
) -> None:
    mine = tmp_path / "run" / ("predictions.txt" if command == "evaluate" else "thesis.txt")
    mine.parent.mkdir()
    mine.write_text("mine")
    words: dict[str, list[object]] = {
        "pretrain": pretrain("bert-tiny", paths["bert-shards"], tmp_path),
        "finetune": finetune(paths, tmp_path),
        "tokenizer": ["tokenizer", paths["text"], "--output-dir", tmp_path / "run", "--vocab-size=300"],
        "prepare": ["prepare", paths["text"], "--tokenizer", paths["bert-tokenizer"], "--output-dir", tmp_path / "run"],
        "export": ["export", paths["bert"], "--output-dir", tmp_path / "run"],
        "evaluate": [
            "evaluate",
            paths["tuned"],
            "--task=classify",
            "--data",
            paths["dev"],
            "--output-dir",
            tmp_path / "run",
        ],
    }
    done = firth(*words[command], *more)
    if command == "evaluate" and more:  # adds two files, removes none
        assert done.code == 0, done.err
    else:
        assert done.code == 2
        assert "--overwrite" in done.err or "thesis.txt" in done.err
    assert mine.read_text() == "mine"


def test_overwrite_replaces_what_the_command_wrote(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    for name in ("bert", "gpt2"):
        shutil.copytree(paths[f"{name}-tokenizer"], tmp_path / name)
    words = ["tokenizer", paths["text"], "--output-dir", tmp_path / "bert", "--kind=byte-bpe", "--vocab-size=400"]
    assert firth(*words).code == 2
    assert tree(tmp_path / "bert") == tree(paths["bert-tokenizer"])
    assert firth(*words, "--overwrite").code == 0
    assert tree(tmp_path / "bert") == tree(tmp_path / "gpt2")


def test_overwrite_does_not_remove_what_is_read(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(paths["bert"].parent, tmp_path / "run")
    before = tree(tmp_path / "run")
    done = firth(*pretrain(tmp_path / "run" / "final", paths["bert-shards"], tmp_path), "--overwrite")
    assert done.code == 2
    assert "--overwrite would remove" in done.err
    done = firth(*finetune(paths, tmp_path, "--overwrite", checkpoint=tmp_path / "run" / "final"))
    assert done.code == 2
    done = firth("export", tmp_path / "run" / "final", "--output-dir", tmp_path / "run" / "final", "--overwrite")
    assert done.code == 2
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize("command", ["pretrain", "prove-resume"])
def test_overwrite_does_not_remove_what_is_mixed_or_taught(
    command: str, firth: Firth, paths: dict[str, Path], tmp_path: Path
) -> None:
    """Shards with a name, a teacher, and a checkpoint beside its own tokenizer."""
    run = tmp_path / "run"
    shutil.copytree(paths["bert"].parent, run)
    shutil.copytree(paths["bert-shards"], run / "data")
    before, shards = tree(run), paths["bert-shards"]
    for words in (
        ["bert-tiny", "--data", f"a={run / 'data'}", "--data", f"b={shards}", "--mix-temperature=0.5"],
        ["bert-tiny", "--data", shards, "--teacher", run / "final"],
        [run / "final", "--data", shards, "--tokenizer", paths["bert-tokenizer"]],
    ):
        done = firth(command, *words, "--output-dir", run, "--overwrite", "--max-steps=1")
        assert done.code == 2
        assert "--overwrite would remove" in done.err
        assert tree(run) == before


def test_a_slip_after_overwrite_costs_no_run(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(paths["bert"].parent, tmp_path / "run")
    before = tree(tmp_path / "run")
    for words in (
        pretrain("bert-tiny", tmp_path / "no.txt", tmp_path),
        pretrain("bert-tiny", paths["bert-shards"], tmp_path, "--objective=clm"),
        pretrain("bert-tiny", paths["text"], tmp_path, "--tokenizer", tmp_path),
        pretrain("bert-tiny", paths["bert-shards"], tmp_path, "--learning-rate=-1"),
        finetune(paths, tmp_path, dev=tmp_path / "no.jsonl"),
    ):
        assert firth(*words, "--overwrite").code == 2
        assert tree(tmp_path / "run") == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_may_not_be_written(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        for words in (
            pretrain("bert-tiny", paths["bert-shards"], tmp_path),
            ["tokenizer", paths["text"], "--output-dir", tmp_path / "run"],
            ["export", paths["bert"], "--output-dir", tmp_path / "run"],
        ):
            done = firth(*words)
            assert done.code == 2
            assert "no permission" in done.err
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_path_where_no_folder_can_be(firth: Firth, paths: dict[str, Path]) -> None:
    for words in (
        ["pretrain", "bert-tiny", "--data", paths["bert-shards"], "--output-dir", "/proc/firth"],
        ["tokenizer", paths["text"], "--output-dir", "/proc/firth", "--vocab-size=300"],
    ):
        done = firth(*words)
        assert done.code == 2
        assert "/proc" in done.err
        assert "Traceback" not in done.err


def test_a_mistake_of_ours_shows_itself(firth: Firth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firth.api.models", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        firth("models")


def test_debug_shows_the_traceback(firth: Firth) -> None:
    with pytest.raises(UserError):
        firth("--debug", "generate", "nowhere", "x")


def test_ctrl_c(firth: Firth, monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firth.api.models", press)
    done = firth("models")
    assert done.code == 130
    assert "Traceback" not in done.err


@pytest.mark.parametrize("kind", ["bpe", "char", "elmo-characters", "word"])
def test_tokenizers_of_every_kind(firth: Firth, corpus_file: Path, tmp_path: Path, kind: str) -> None:
    done = firth("tokenizer", corpus_file, "--kind", kind, "--vocab-size=300", "--output-dir", tmp_path / "t", "--json")
    assert (done.code, done.json["kind"], done.json["vocab_size"] <= 300) == (0, kind, True)


def test_a_tokenizer_like_another(firth: Firth, paths: dict[str, Path], corpus_file: Path, tmp_path: Path) -> None:
    like = (
        "tokenizer",
        corpus_file,
        "--from",
        paths["t5-tokenizer"],
        "--vocab-size=350",
        "--output-dir",
        tmp_path / "t",
    )
    done = firth(*like, "--json")
    assert (done.code, done.json["kind"], 200 < done.json["vocab_size"] <= 350) == (0, "unigram", True)
    done = firth(*like, "--kind", "unigram", "--overwrite")
    assert done.code == 2
    assert "leave out --kind" in done.err
    done = firth("tokenizer", corpus_file, "--from", tmp_path, "--output-dir", tmp_path / "u")
    assert done.code == 2
    assert "holds no tokenizer" in done.err


def test_a_tokenizer_within_little_memory(firth: Firth, corpus_file: Path, tmp_path: Path) -> None:
    small = ("--kind", "byte-bpe", "--vocab-size=300", "--max-memory=80KB", "--output-dir", tmp_path / "t")
    done = firth("tokenizer", corpus_file, *small)
    assert done.code == 0
    assert "Training on a sample" in done.err


# --- Ctrl-C


def test_interrupted_while_the_libraries_load() -> None:
    program = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Pressed(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "firth.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
from firth.__main__ import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupted_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", app)
    usual = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as e:
            cli.main()
        assert e.value.code == 130
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "a third one does not disturb the end"
        assert capsys.readouterr().err == "stopped\n"
    finally:
        signal.signal(signal.SIGINT, usual)


def test_check_looks_for_labelled_examples(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    document = paths["text"].read_text(encoding="utf-8").split("\n\n")[3]
    (tmp_path / "a.csv").write_text('body,label\n"' + document.replace('"', "") + '",x\n"nothing of this is there",y\n')
    words = ["check", paths["text"], "--kinds=none", "--output-dir", tmp_path, "--labelled", tmp_path / "a.csv"]
    wrong = firth(*words, "--task", "classify")
    assert wrong.code == 2
    assert "Name the right one: --labelled-columns text=" in wrong.err
    done = firth(*words, "--labelled-columns", "text=body", "--json")
    assert done.code == 0, done.err
    leaks = done.json["leaks"]
    assert (leaks["examples"], leaks["exact"], leaks["near"], leaks["task"]) == (2, 1, 0, "classify")
    assert firth("check", paths["text"], "--task", "pair").code == 2


def test_an_extended_tokenizer(firth: Firth, paths: dict[str, Path], tmp_path: Path) -> None:
    domain = tmp_path / "domain.txt"
    domain.write_text("\n\n".join(f"soma kitabu cha {i} watoto" for i in range(40)), encoding="utf-8")
    words = "tokenizer", "--extend", paths["bert"], domain, "--output-dir", tmp_path / "t"
    done = firth(*words, "--dry-run", "--json")
    assert (done.code, done.json["dry_run"], (tmp_path / "t").exists()) == (0, True, False)
    done = firth(*words, "--max-new-tokens", 3)
    assert done.code == 0
    assert "kitabu" in done.out
    assert "tokens per MB" in done.out
    assert "held-out document" in done.out
    assert "`firth adapt CHECKPOINT`" in done.err
    assert firth(*words).code == 2, "the folder is not replaced"
    done = firth(*words, "--json", "--overwrite", "--max-new-tokens", 3)
    old, new = load_tokenizer(paths["bert"]), load_tokenizer(tmp_path / "t")
    assert done.json["vocab_size"] == new.vocab.size == old.vocab.size + 3
    assert {token["text"] for token in done.json["new_tokens"]} == {"kitabu", "watoto", "soma"}
    assert done.json["after"]["tokens_per_mb"] < done.json["before"]["tokens_per_mb"]
    saved = json.loads((tmp_path / "t" / "extension.json").read_text(encoding="utf-8"))
    assert saved.items() <= done.json.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--extend", "TOK", "--kind=bpe", "--vocab-size=9"], "leave out --kind, --vocab-size"),
        (["--extend", "TOK", "--from", "TOK"], "leave out --from"),
        (["--max-new-tokens=9"], "Only --extend adds tokens to a tokenizer: leave out --max-new-tokens"),
        (["--extend", "TOK", "--min-count=0"], "--min-count"),
        (["--extend", "TOK", "--max-new-tokens=0"], "--max-new-tokens"),
        (["--extend", "TOK", "--min-count=100000"], "No token is worth adding"),
        (["--extend", "nowhere"], "no such folder"),
    ],
)
def test_mistakes_in_an_extension(
    firth: Firth, paths: dict[str, Path], tmp_path: Path, words: list[str], said: str
) -> None:
    given = [paths["bert-tokenizer"] if word == "TOK" else word for word in words]
    done = firth("tokenizer", paths["text"], "--output-dir", tmp_path / "t", *given)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "t").exists()
