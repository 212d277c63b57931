"""The run folder: what is refused, what is removed, what never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.core.files import atomic_folder
from firth.train import run_folder
from firth.train.log import RunLog, read_log


def leave_a_run(folder: Path) -> None:
    """What a run that was killed while it wrote leaves behind."""
    for name in ("recipe.yaml", "log.jsonl", "results.json", ".recipe.yaml.tmp"):
        (folder / name).write_text("x")
    for name in ("final", "checkpoint-2", "data", "seed-0/final", "seed-0/checkpoint-1"):
        with atomic_folder(folder / name) as new:
            (new / "file").write_text("x")
    (folder / "seed-0" / "log.jsonl").touch()
    (folder / "evaluate-dev.jsonl").mkdir()
    (folder / "evaluate-dev.jsonl" / "predictions.jsonl").touch()
    (folder / ".checkpoint-4.tmp").mkdir()
    (folder / ".checkpoint-1.old").mkdir()


def test_a_new_folder_and_an_empty_one_are_taken(tmp_path: Path) -> None:
    for _ in range(2):  # the lock of the first time is no obstacle
        with run_folder(tmp_path / "deep" / "run") as folder:
            assert folder.is_dir()


def test_a_folder_in_which_nothing_came_to_be_is_removed(tmp_path: Path) -> None:
    with pytest.raises(UserError), run_folder(tmp_path / "run"):
        raise UserError("wrong")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError), run_folder(tmp_path / "run") as folder:
        (folder / "data").mkdir()
        raise UserError("wrong")
    assert (tmp_path / "run" / "data").exists()


def test_an_existing_run_needs_a_word(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with pytest.raises(UserError, match=r"--resume continues .*--overwrite"), run_folder(tmp_path):
        pass
    assert (tmp_path / "final" / "file").exists()


def test_prepared_text_of_a_run_that_never_began_is_taken(tmp_path: Path) -> None:
    """A run that was refused after its text was prepared does not stand in the way of the next try."""
    for name in ("data", "tokenizer"):
        with atomic_folder(tmp_path / name) as new:
            (new / "file").write_text("x")
    with pytest.raises(UserError, match="exists already"), run_folder(tmp_path):
        pass  # without source.json a person may have made these
    (tmp_path / "source.json").write_text("{}")
    (tmp_path / ".data.tmp").mkdir()
    with run_folder(tmp_path):
        assert (tmp_path / "data" / "file").exists()
        assert not (tmp_path / ".data.tmp").exists()
    with run_folder(tmp_path, overwrite=True):
        assert not (tmp_path / "data").exists()
    for name in ("recipe.yaml", "thesis.txt"):
        (tmp_path / "source.json").write_text("{}")
        (tmp_path / name).touch()
        with pytest.raises(UserError, match="exists already"), run_folder(tmp_path):
            pass
        (tmp_path / name).unlink()


def test_resume_keeps_everything_but_what_a_killed_writer_left(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with run_folder(tmp_path, resume=True):
        assert (tmp_path / "checkpoint-2" / "file").exists()
        assert not list(tmp_path.glob(".checkpoint-*"))


def test_overwrite_removes_what_a_run_wrote(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with run_folder(tmp_path, overwrite=True):
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["thesis.txt", "data/book.txt", "final/plan.txt", "runs/recipe.yaml"])
@pytest.mark.parametrize("word", ["resume", "overwrite"])
def test_what_no_run_wrote_is_never_touched(name: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with (
        pytest.raises(UserError, match=rf"\({Path(name).parts[0]}\).*another --output-dir"),
        run_folder(tmp_path, **{word: True}),
    ):
        pass
    assert file.read_text() == "mine"


def test_notes_beside_a_run_do_not_stop_a_resume(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with run_folder(tmp_path, resume=True):
        pass
    with pytest.raises(UserError, match=r"notes.txt"), run_folder(tmp_path, overwrite=True):
        pass
    assert (tmp_path / "final" / "file").exists()


def test_a_run_does_not_remove_what_it_reads(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with (
        pytest.raises(UserError, match="--overwrite would remove"),
        run_folder(tmp_path, overwrite=True, inputs=["", "pydocs", tmp_path / "final"]),
    ):
        pass
    assert (tmp_path / "final" / "file").exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run"):
        with pytest.raises(UserError, match="in use"), run_folder(tmp_path / "run", resume=True):
            pass
        assert (tmp_path / "run").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(UserError, match="file"), run_folder(path, overwrite=True):
            pass
    assert (tmp_path / "run").read_text() == "mine"


def test_the_log_is_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path, 0) as log:
        for step in (1, 2, 3):
            log.write(step=step, loss=0.1 + step / 3)
            log.write(step=step, eval_loss=1e-300)
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole) + '\n{"step": 4, "lo')  # cut short by a crash
    assert [line["step"] for line in read_log(path)] == [1, 1, 2, 2, 3, 3]
    with RunLog(path, 2) as log:
        log.write(step=3, loss=5.0)
    assert path.read_text().splitlines() == [*whole[:4], '{"step": 3, "loss": 5.0}']
