"""Names that are not UTF-8, name nothing or are too long, and disks that are full: one line and the right exit code."""

from __future__ import annotations

import io
import json
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from firth.cli.main import main
from firth.core.errors import UserError
from firth.core.files import read_json, write_json
from firth.models import make_model
from firth.models.hf.checkpoint import save_model
from firth.models.presets import bert
from firth.text.exact_dedup import DiskFingerprintSet
from firth.train.recipe import Recipe, load_recipe

NAME = b"caf\xe9\x1b[31m".decode("utf-8", "surrogateescape")
TINY = ["--max-steps", "1", "--max-seq-length", "16", "model.num_layers=1", "model.dim=32", "model.mlp.dim=64"]


class Done(NamedTuple):
    code: Any
    out: str
    err: str


@pytest.fixture
def firth(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run a command in this process, on streams of bytes as a shell has them."""

    def run(*words: object) -> Done:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors=how) for how in ("strict", "backslashreplace"))
        for name, value in {"argv": ["firth", *map(str, words)], "stdout": out, "stderr": err}.items():
            monkeypatch.setattr(sys, name, value)
        with pytest.raises(SystemExit) as caught:
            main()
        out.flush(), err.flush()
        return Done(caught.value.code, *(stream.buffer.getvalue().decode() for stream in (out, err)))

    return run


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_on_a_file_whose_name_is_not_utf8(
    firth: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, words = random.Random(0), ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "sea"]
    text = "\n\n".join(" ".join(rng.choices(words, k=12)) for _ in range(60))
    Path(f"{NAME}.txt").write_text(text)
    run = firth("pretrain", "bert-tiny", "--data", f"{NAME}.txt", "--output-dir", "run", "--vocab-size", 100, *TINY)
    assert run.code == 0, run.err
    assert r"caf\xe9\x1b[31m.txt" in run.err
    assert "\x1b[31m" not in run.out + run.err
    assert read_json(Path("run/source.json"))["data"] == [f"{NAME}.txt"], "as it was given"
    again = firth(
        "pretrain", "bert-tiny", "--data", f"{NAME}.txt", "--output-dir", "run", "--vocab-size", 100, *TINY, "--resume"
    )
    assert again.code == 0, "the same source"
    scored = firth("evaluate", "run/final", "--task", "perplexity", "--data", f"{NAME}.txt", "--json")
    assert scored.code == 0, scored.err
    assert json.loads(scored.out.splitlines()[-1])["data"] == f"{NAME}.txt"
    assert load_recipe(Path("run/recipe.yaml"), Recipe).data == "run/data"


def test_texts_and_folders_of_weights_are_utf8(firth: Callable[..., Done], tmp_path: Path) -> None:
    for words in (["fill", "x", f"The ___ {NAME}"], ["generate", "x", NAME], ["embed", "x", NAME]):
        assert (done := firth(*words)).code == 2
        assert "a text must be UTF-8" in done.err
    (tmp_path / "a.txt").write_text("a b c")
    done = firth("pretrain", "bert-tiny", "--data", tmp_path / "a.txt", "--output-dir", tmp_path / NAME)
    assert (done.code, "needs a name in UTF-8" in done.err) == (2, True)


def test_names_that_name_nothing(firth: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("a.txt").write_text("a b c d e f. " * 20)
    for name in ("loop", 300 * "a"):
        for words in (
            ["check", name],
            ["tokenizer", "a.txt", "--output-dir", name],
            ["prepare", "a.txt", "--tokenizer", name, "--output-dir", "o"],
            ["pretrain", "bert-tiny", "--data", name, "--output-dir", "o"],
            ["pretrain", "bert-tiny", "--data", "a.txt", "--output-dir", name],
            ["pretrain", name, "--data", "a.txt", "--output-dir", "o"],
            ["pretrain", "bert-tiny", "--config", name, "--data", "a.txt", "--output-dir", "o"],
            ["evaluate", name, "--data", "a.txt"],
            ["export", name, "--output-dir", "o"],
        ):
            done = firth(*words)
            assert done.code == 2, (words, done.err)
            assert done.err.count("error:") == 1


def test_json_keeps_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": NAME})
    assert b"caf\\udce9" in (tmp_path / "a.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {"name": NAME}


def test_no_disk_space_for_an_export(tmp_path: Path) -> None:
    model = make_model(bert(1, 32, 2, 100))
    with largest_file(2000), pytest.raises(OSError, match="File too large"):
        save_model(model, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_no_disk_space_for_the_table_of_duplicates(tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(OSError, match="No space left on device"):
        seen = DiskFingerprintSet(tmp_path / "seen", 2**12)
        for i in range(100_000):
            seen.is_new(i.to_bytes(8, "little"))
    with pytest.raises(OSError, match="unable to open database file"):
        DiskFingerprintSet(tmp_path / "none" / "seen", 2**12)


def test_a_checkpoint_in_a_folder_that_is_not_utf8(tmp_path: Path) -> None:
    from firth.models.hf.tensors import read_tensors

    save_model(make_model(bert(1, 32, 2, 100)), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / NAME)
    with pytest.raises(UserError, match="needs a name in UTF-8"):
        read_tensors(tmp_path / NAME)
