"""The command line: mistakes are told in one message and cost nothing, JSON has the promised names."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from firth.cli import app, main
from firth.files import damage

SMALL = ["--max-seq-length=32", "--per-device-train-batch-size=4", "--no-compile", "--no-bf16"]
TINY = ["model.num_layers=1", "model.dim=32", "model.mlp.dim=64"]
VERBS = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)

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
    """Run a verb in this process; the exit code and what it said."""

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
def house(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers, shards and small checkpoints, made once by the verbs themselves, and labelled files."""
    import firth as verbs

    folder = tmp_path_factory.mktemp("house")
    places = {"text": corpus_file}
    for kind, model in (("wordpiece", "bert"), ("byte-bpe", "gpt2"), ("unigram", "t5")):
        verbs.tokenizer([corpus_file], folder / f"{model}-tokenizer", kind, 400)
        verbs.prepare([corpus_file], folder / f"{model}-tokenizer", folder / f"{model}-shards")
        verbs.pretrain(
            f"{model}-tiny",
            folder / f"{model}-shards",
            folder / f"{model}-run",
            overrides={"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64},
            max_steps=2,
            max_seq_length=32,
            per_device_train_batch_size=4,
        )
        for name in ("tokenizer", "shards"):
            places[f"{model}-{name}"] = folder / f"{model}-{name}"
        places[model] = folder / f"{model}-run" / "final"
    rows = [(f"the {w} by the {p}", w) for w in ("cat", "dog") for p in ("river", "mill", "bridge", "garden")]
    for name in ("train", "dev"):
        places[name] = folder / f"{name}.jsonl"
        places[name].write_text("".join(json.dumps({"text": t, "label": w}) + "\n" for t, w in rows))
    places["pairs"] = folder / "pairs.jsonl"
    places["pairs"].write_text("".join(json.dumps({"source": t, "target": w}) + "\n" for t, w in rows))
    verbs.finetune(places["bert"], "classify", places["train"], places["dev"], folder / "tuned", max_steps=2, seeds=1)
    places["tuned"] = folder / "tuned" / "final"
    return places


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder and what is in it."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


# --- what works


def test_tokenizer_and_prepare(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    words = ["--kind", "wordpiece", "--vocab-size", 200, "--output-dir", tmp_path / "t", "--json"]
    done = firth("tokenizer", house["text"], *words)
    assert done.code == 0
    assert done.json["vocab_size"] == 200
    done = firth("prepare", house["text"], "--tokenizer", tmp_path / "t", "--output-dir", tmp_path / "s", "--json")
    assert done.code == 0
    assert done.json["documents"] == 300
    assert done.json["tokens"] > 1000
    assert done.json["duplicates"] == 0
    again = firth(
        "prepare", house["text"], "--tokenizer", tmp_path / "t", "--output-dir", tmp_path / "s", "--json", "--resume"
    )
    assert again.json == done.json


def test_pretrain_from_text(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    words = ["--data", house["text"], "--output-dir", tmp_path / "run", "--vocab-size", 400, "--max-steps", 2, *SMALL]
    done = firth("pretrain", "bert-tiny", *words, "--json", *TINY)
    assert done.code == 0, done.err
    assert {"output_dir", "steps", "loss", "eval_loss", "tokens_per_second"} <= done.json.keys()
    assert done.json["steps"] == 2
    assert damage(tmp_path / "run" / "final") is None
    table = firth("pretrain", "bert-tiny", *words, "--resume", *TINY)
    assert table.code == 0
    assert "eval_loss" in table.out
    # the text may not change under a run
    other = tmp_path / "other.txt"
    other.write_text("Something else.\n")
    changed = [other if word == house["text"] else word for word in words]
    done = firth("pretrain", "bert-tiny", *changed, "--resume", *TINY)
    assert done.code == 2
    assert "differs: data:" in done.err


def test_show(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    words = ["show", "t5-tiny", "--data", house["t5-shards"], "--rows=2", "--output-dir", tmp_path, *SMALL]
    done = firth(*words, "--json", "objective.rate=0.3")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    assert {"rows", "objective", "counts", "promises", "shapes", "page"} == done.json.keys()
    assert done.json["promises"]["asked"] == 0.3
    fields = {"source", "index", "tokens", "labels", "decoder_tokens", "pair"}
    assert all(fields <= row.keys() and row["pair"] is None for row in done.json["rows"])
    assert Path(done.json["page"]) == tmp_path / "show.html"
    table = firth(*words)
    assert table.code == 0
    assert "<extra_id_0>‹" in table.out
    assert "decoder writes" in table.out
    assert "promised" in table.out
    assert "show.html" in table.err


def test_finetune_evaluate_export(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    files = ["--task", "classify", "--train", house["train"], "--dev", house["dev"]]
    done = firth(
        "finetune", house["gpt2"], *files, "--output-dir", tmp_path / "run", "--max-steps", 2, "--seeds", 2, "--json"
    )
    assert done.code == 0, done.err
    assert {"metric", "mean", "std", "seeds", "accuracy", "macro_f1", "mcc"} <= done.json.keys()
    assert len(done.json["seeds"]) == 2
    final = tmp_path / "run" / "final"
    done = firth("evaluate", final, "--task", "classify", "--data", house["dev"], "--json")
    assert done.code == 0, done.err
    assert "accuracy" in done.json["metrics"]
    assert Path(done.json["predictions"]).is_file()
    done = firth("export", final, "--output-dir", tmp_path / "out", "--check", "--json")
    assert done.code == 0, done.err
    assert done.json["max_difference"] < 1e-4


def test_generate_fill_models(firth: Firth, house: dict[str, Path]) -> None:
    done = firth("generate", house["gpt2"], "The cat", "--max-new-tokens", 3, "--json")
    assert done.code == 0
    assert done.json["text"].startswith("The cat")
    done = firth("fill", house["bert"], "The ___ slept.", "--top", 2, "--json")
    assert done.code == 0
    assert len(done.json["blanks"][0]["guesses"]) == 2
    assert "guess" in firth("fill", house["bert"], "The ___ slept.").out
    done = firth("models", "--json")
    assert done.code == 0
    assert all({"name", "family", "parameters", "objective"} <= m.keys() for m in done.json["models"])
    assert "bert-tiny" in firth("models").out


def test_json_is_all_of_stdout(firth: Firth, house: dict[str, Path]) -> None:
    assert len(firth("models", "--json").out.splitlines()) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str, firth: Firth) -> None:
    done = firth(verb, "--help")
    assert done.code == 0
    assert "--json" in done.out
    if verb in ("pretrain", "finetune"):
        for option in RUN_OPTIONS:
            assert option in done.out, option
        assert "by the model's width" in " ".join(done.out.split())
    if verb in ("pretrain", "show"):
        assert "permutation-lm" in "".join(done.out.split()).replace("│", "")


def test_no_verb_and_the_whole_help(firth: Firth) -> None:
    assert firth("--help").code == 0
    assert all(verb in firth("--help").out for verb in VERBS)


# --- mistakes

Words = Callable[[dict[str, Path], Path], Sequence[object]]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def pretrain(model: object, data: object, out: Path, *more: object) -> list[object]:
    return ["pretrain", model, "--data", data, "--output-dir", out / "run", "--max-steps=1", *SMALL, *more]


def show(house: dict[str, Path], out: Path, *more: object) -> list[object]:
    return ["show", "bert-tiny", "--data", house["bert-shards"], "--output-dir", out, *SMALL, *more]


def finetune(house: dict[str, Path], out: Path, *more: object, **files: object) -> list[object]:
    named = {"task": "classify", "train": house["train"], "dev": house["dev"], "output-dir": out / "run", **files}
    checkpoint = named.pop("checkpoint", house["bert"])
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
        ["l.txt: not UTF-8", "byte 3 ", "--encoding"],
    ),
    "labels not utf-8": (
        lambda h, t: finetune(h, t, dev=write(t / "l.jsonl", b'{"text": "caf\xe9", "label": "cat"}')),
        ["l.jsonl: not UTF-8", "--encoding"],
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
        ["'model.num_layer'", "'num_layers'"],
    ),
    "a wrong type": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, "model.num_layers=two"),
        ["model.num_layers", "'two' is not a whole number"],
    ),
    "a wrong type of an option": (
        lambda h, t: ["pretrain", "bert-tiny", "--data", h["text"], "--output-dir", t / "run", "--max-steps", "many"],
        ["--max-steps", "integer"],
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
        ["needs sentinel tokens", "unigram tokenizer"],
    ),
    "rows longer than places": (
        lambda h, t: [*pretrain("bert-tiny", h["bert-shards"], t), "--max-seq-length=600"],
        ["--max-seq-length 600", "512 places"],
    ),
    "an objective of another shape": (
        lambda h, t: pretrain("bert-tiny", h["bert-shards"], t, "--objective=clm"),
        ["CLM", "decoder", "encoder"],
    ),
    "no rows to show": (lambda h, t: show(h, t, "--rows=0"), ["--rows is 0", "at least 1"]),
    "a page of someone else": (
        lambda h, t: show(h, write(t / "show.html", "mine").parent),
        ["show.html was not written by", "--overwrite"],
    ),
    "showing an objective of another shape": (lambda h, t: show(h, t, "--objective=clm"), ["CLM", "decoder"]),
    "showing an unknown objective": (lambda h, t: show(h, t, "--objective=bartt"), ["'bartt'", "'bart'"]),
    "showing text that is not there": (lambda h, t: show({"bert-shards": t / "no.txt"}, t), ["no.txt: no such file"]),
    "showing nothing": (lambda h, t: ["show", "bert-tiny", "--output-dir", t], ["--data"]),
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
    "a classifier is not pretrained": (lambda h, t: pretrain(h["tuned"], h["bert-shards"], t), ["classifier's head"]),
    "the output is a file": (
        lambda h, t: ["pretrain", "bert-tiny", "--data", h["text"], "--output-dir", write(t / "f", "x")],
        ["f is a file"],
    ),
    "the output is under a file": (
        lambda h, t: ["tokenizer", h["text"], "--output-dir", write(t / "f", "x") / "deeper"],
        ["cannot be made", "is a file"],
    ),
    "an unknown task": (lambda h, t: finetune(h, t, task="clasify"), ["'clasify'", "'classify'"]),
    "an encoder does not write": (lambda h, t: ["generate", h["bert"], "The"], ["firth fill"]),
    "a decoder does not fill": (lambda h, t: ["fill", h["gpt2"], "The ___"], ["firth generate"]),
    "no blank": (lambda h, t: ["fill", h["bert"], "The cat"], ["no blank"]),
    "an unknown option": (lambda h, t: ["models", "--jsn"], ["--jsn"]),
    "an unknown verb": (lambda h, t: ["pretrian"], ["pretrian"]),
    "columns that are no pairs": (lambda h, t: finetune(h, t, "--columns", "text"), ["--columns", "text=sentence"]),
    "two texts after one --data": (
        lambda h, t: pretrain("bert-tiny", h["text"], t, h["text"]),
        ["is not key=value", "--data"],
    ),
    "a field that the verb names": (lambda h, t: pretrain("bert-tiny", h["text"], t, "output_dir=x"), ["output_dir=x"]),
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
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str, firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    words, expected = MISTAKES[name]
    arguments = words(house, tmp_path)
    before = tree(tmp_path)
    done = firth(*arguments)
    assert done.code == 2, done.err
    said = " ".join(done.err.split())
    for part in expected:
        assert part in said
    assert "Traceback" not in done.err
    assert done.err.count("error:") + done.err.count("Error:") == 1
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


@pytest.mark.parametrize("verb", ["pretrain", "finetune", "tokenizer", "prepare", "export", "evaluate"])
@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_an_existing_folder_is_refused_and_foreign_files_always(
    verb: str, more: list[str], firth: Firth, house: dict[str, Path], tmp_path: Path
) -> None:
    mine = tmp_path / "run" / ("predictions.txt" if verb == "evaluate" else "thesis.txt")
    mine.parent.mkdir()
    mine.write_text("mine")
    words: dict[str, list[object]] = {
        "pretrain": pretrain("bert-tiny", house["bert-shards"], tmp_path),
        "finetune": finetune(house, tmp_path),
        "tokenizer": ["tokenizer", house["text"], "--output-dir", tmp_path / "run", "--vocab-size=300"],
        "prepare": ["prepare", house["text"], "--tokenizer", house["bert-tokenizer"], "--output-dir", tmp_path / "run"],
        "export": ["export", house["bert"], "--output-dir", tmp_path / "run"],
        "evaluate": [
            "evaluate",
            house["tuned"],
            "--task=classify",
            "--data",
            house["dev"],
            "--output-dir",
            tmp_path / "run",
        ],
    }
    done = firth(*words[verb], *more)
    if verb == "evaluate" and more:  # adds two files, removes none
        assert done.code == 0, done.err
    else:
        assert done.code == 2
        assert "--overwrite" in done.err or "thesis.txt" in done.err
    assert mine.read_text() == "mine"


def test_overwrite_replaces_what_the_verb_wrote(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    for name in ("bert", "gpt2"):
        shutil.copytree(house[f"{name}-tokenizer"], tmp_path / name)
    words = ["tokenizer", house["text"], "--output-dir", tmp_path / "bert", "--kind=byte-bpe", "--vocab-size=400"]
    assert firth(*words).code == 2
    assert tree(tmp_path / "bert") == tree(house["bert-tokenizer"])
    assert firth(*words, "--overwrite").code == 0
    assert tree(tmp_path / "bert") == tree(tmp_path / "gpt2")


def test_overwrite_does_not_remove_what_is_read(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(house["bert"].parent, tmp_path / "run")
    before = tree(tmp_path / "run")
    done = firth(*pretrain(tmp_path / "run" / "final", house["bert-shards"], tmp_path), "--overwrite")
    assert done.code == 2
    assert "--overwrite would remove" in done.err
    done = firth(*finetune(house, tmp_path, "--overwrite", checkpoint=tmp_path / "run" / "final"))
    assert done.code == 2
    done = firth("export", tmp_path / "run" / "final", "--output-dir", tmp_path / "run" / "final", "--overwrite")
    assert done.code == 2
    assert tree(tmp_path / "run") == before


def test_a_slip_after_overwrite_costs_no_run(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(house["bert"].parent, tmp_path / "run")
    before = tree(tmp_path / "run")
    for words in (
        pretrain("bert-tiny", tmp_path / "no.txt", tmp_path),
        pretrain("bert-tiny", house["bert-shards"], tmp_path, "--objective=clm"),
        pretrain("bert-tiny", house["text"], tmp_path, "--tokenizer", tmp_path),
        pretrain("bert-tiny", house["bert-shards"], tmp_path, "--learning-rate=-1"),
        finetune(house, tmp_path, dev=tmp_path / "no.jsonl"),
    ):
        assert firth(*words, "--overwrite").code == 2
        assert tree(tmp_path / "run") == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_may_not_be_written(firth: Firth, house: dict[str, Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        for words in (
            pretrain("bert-tiny", house["bert-shards"], tmp_path),
            ["tokenizer", house["text"], "--output-dir", tmp_path / "run"],
            ["export", house["bert"], "--output-dir", tmp_path / "run"],
        ):
            done = firth(*words)
            assert done.code == 2
            assert "no permission" in done.err
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_place_where_no_folder_can_be(firth: Firth, house: dict[str, Path]) -> None:
    for words in (
        ["pretrain", "bert-tiny", "--data", house["bert-shards"], "--output-dir", "/proc/firth"],
        ["tokenizer", house["text"], "--output-dir", "/proc/firth", "--vocab-size=300"],
    ):
        done = firth(*words)
        assert done.code == 2
        assert "/proc" in done.err
        assert "Traceback" not in done.err


def test_a_mistake_of_ours_shows_itself(firth: Firth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firth.verbs.models", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        firth("models")


def test_debug_shows_the_traceback(firth: Firth) -> None:
    from firth.errors import UserError

    with pytest.raises(UserError):
        firth("--debug", "generate", "nowhere", "x")


def test_ctrl_c(firth: Firth, monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firth.verbs.models", press)
    done = firth("models")
    assert done.code == 130
    assert "Traceback" not in done.err
