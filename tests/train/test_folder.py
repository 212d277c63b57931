"""The run folder: which folders are refused, what is removed, and what never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.core.files import atomic_folder, remove_path
from firth.train import run_folder
from firth.train.log import RunLog, read_log


def leave_a_run(folder: Path) -> None:
    """The files that a run leaves when it is killed while writing."""
    for name in (".lock", "recipe.yaml", "log.jsonl", "results.json", ".recipe.yaml.tmp"):
        (folder / name).write_text("x")
    for name in ("final", "checkpoint-2", "data", "seed-0/final", "seed-0/checkpoint-1"):
        with atomic_folder(folder / name) as new:
            (new / "file").write_text("x")
    (folder / "seed-0" / "log.jsonl").touch()
    (folder / "evaluate-dev.jsonl").mkdir()
    (folder / "evaluate-dev.jsonl" / "predictions.jsonl").touch()
    (folder / ".checkpoint-4.tmp").mkdir()
    (folder / ".checkpoint-1.old").mkdir()


def test_new_and_empty_folders_are_accepted(tmp_path: Path) -> None:
    for _ in range(2):  # the lock of the first time is no obstacle
        with run_folder(tmp_path / "deep" / "run") as folder:
            assert folder.is_dir()


def test_a_folder_without_results_is_removed(tmp_path: Path) -> None:
    with pytest.raises(UserError), run_folder(tmp_path / "run"):
        raise UserError("wrong")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError), run_folder(tmp_path / "run") as folder:
        (folder / "data").mkdir()
        raise UserError("wrong")
    assert (tmp_path / "run" / "data").exists()


def test_an_existing_run_needs_resume_or_overwrite(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with pytest.raises(UserError, match=r"--resume continues .*--overwrite"), run_folder(tmp_path):
        pass
    assert (tmp_path / "final" / "file").exists()


def test_a_folder_with_prepared_text_only_is_accepted(tmp_path: Path) -> None:
    """A run that failed after its text was prepared does not block the next attempt."""
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


def test_resume_removes_only_temporary_files(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with run_folder(tmp_path, resume=True):
        assert (tmp_path / "checkpoint-2" / "file").exists()
        assert not list(tmp_path.glob(".checkpoint-*"))


@pytest.mark.parametrize("name", [".lock", "log.jsonl", ".log.jsonl.tmp", ".checkpoint-4.tmp", ".final.old"])
def test_a_planted_link_leads_nowhere(name: str, tmp_path: Path) -> None:
    """A resume neither truncates nor writes the file behind a link in the run folder."""
    mine, run = tmp_path / "thesis.txt", tmp_path / "run"
    run.mkdir()
    leave_a_run(run)
    mine.write_text("mine\n")
    remove_path(run / name)
    (run / name).symlink_to(mine)
    try:
        with run_folder(run, resume=True), RunLog(run / "log.jsonl", 2) as log:
            log.write(step=3)
    except UserError as e:
        assert name == ".lock", e  # noqa: PT017
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["seed-0", "seed-0/final", "data", "final", "checkpoint-2", "tensorboard"])
def test_a_linked_folder_is_refused(name: str, tmp_path: Path) -> None:
    """A run would write its log and its models through the link."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    run.mkdir()
    (victim / "log.jsonl").write_text("mine\n")
    leave_a_run(run)
    remove_path(run / name)
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"{name} is a link to another folder"), run_folder(run, resume=True):
        pass
    assert (victim / "log.jsonl").read_text() == "mine\n"


def test_a_lock_is_never_truncated(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / ".lock").write_text("content")
    with run_folder(tmp_path, resume=True):
        pass
    assert (tmp_path / ".lock").read_text() == "content"


def test_temporary_files_of_a_user_stay(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / ".notes.tmp").mkdir()
    with run_folder(tmp_path, resume=True):
        pass
    assert (tmp_path / ".notes.tmp").exists()
    with pytest.raises(UserError, match=r"\.notes\.tmp"), run_folder(tmp_path, overwrite=True):
        pass


def test_overwrite_removes_the_files_of_a_run(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with run_folder(tmp_path, overwrite=True):
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["thesis.txt", "data/book.txt", "final/plan.txt", "runs/recipe.yaml"])
@pytest.mark.parametrize("word", ["resume", "overwrite"])
def test_foreign_files_are_never_touched(name: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with (
        pytest.raises(UserError, match=rf"\({Path(name).parts[0]}\).*another --output-dir"),
        run_folder(tmp_path, **{word: True}),
    ):
        pass
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["data/manifest.json", "checkpoint-1/book.txt", "results.json", ".notes.part"])
def test_names_of_a_run_do_not_make_files_ours(name: str, tmp_path: Path) -> None:
    """Neither a manifest of another program nor a file of the same name without a run is removed."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"files": {"manifest.json": {}}}')
    with pytest.raises(UserError, match="no run of Firth wrote"), run_folder(tmp_path, overwrite=True):
        pass
    assert (tmp_path / name).exists()


def test_changed_files_of_a_run_stay(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / "final" / "file").write_text("y")
    with pytest.raises(UserError, match=r"changed since \(final\)"), run_folder(tmp_path, overwrite=True):
        pass
    assert (tmp_path / "data" / "file").exists()


def test_overwrite_removes_a_mix(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run") as folder, atomic_folder(folder / "data" / "en", "shards") as new:
        (new / "file").write_text("x")
    with run_folder(tmp_path / "run", overwrite=True) as folder:
        assert [p.name for p in folder.iterdir()] == [".lock"]


def test_foreign_files_do_not_block_a_resume(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with run_folder(tmp_path, resume=True):
        pass
    with pytest.raises(UserError, match=r"notes.txt"), run_folder(tmp_path, overwrite=True):
        pass
    assert (tmp_path / "final" / "file").exists()


def test_overwrite_refuses_to_remove_inputs(tmp_path: Path) -> None:
    leave_a_run(tmp_path)
    with (
        pytest.raises(UserError, match="--overwrite would remove"),
        run_folder(tmp_path, overwrite=True, inputs=["", "pydocs", tmp_path / "final"]),
    ):
        pass
    assert (tmp_path / "final" / "file").exists()


def test_a_folder_is_locked(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run"):
        with pytest.raises(UserError, match="in use"), run_folder(tmp_path / "run", resume=True):
            pass
        assert (tmp_path / "run").exists()


def test_a_file_as_output_dir_raises(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(UserError, match="file"), run_folder(path, overwrite=True):
            pass
    assert (tmp_path / "run").read_text() == "mine"


def test_the_log_is_truncated_on_resume(tmp_path: Path) -> None:
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
