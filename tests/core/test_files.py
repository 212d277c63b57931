"""Files are there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from firth.core import files
from firth.core.errors import UserError
from firth.core.files import (
    atomic_folder,
    check_output_folder,
    copy_file,
    file_sha256,
    find_corruption,
    open_in_place,
    read_json,
    write_bytes,
    write_npy,
)


def make(folder: Path, text: str = "one") -> None:
    with atomic_folder(folder, step=7) as new:
        (new / "training").mkdir()
        (new / "model.bin").write_text(text)
        (new / "training" / "state.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_whole_folder_has_a_manifest_of_every_file(tmp_path: Path) -> None:
    make(tmp_path / "deep" / "run")
    manifest = json.loads((tmp_path / "deep" / "run" / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert sorted(manifest["files"]) == ["model.bin", "training/state.json"]
    # sha256 of the three letters "one"
    assert manifest["files"]["model.bin"] == {
        "bytes": 3,
        "sha256": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
    }
    assert find_corruption(tmp_path / "deep" / "run") is None
    assert names(tmp_path / "deep") == ["run"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    make(tmp_path / "run", "one")
    with atomic_folder(tmp_path / "run") as new:
        (new / "other.bin").write_text("two")
        assert (tmp_path / "run" / "model.bin").read_text() == "one"
    assert names(tmp_path / "run") == ["manifest.json", "other.bin"]
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_inside_leaves_the_old_folder_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    make(tmp_path / "run", "one")
    with pytest.raises(error), atomic_folder(tmp_path / "run") as new:
        (new / "model.bin").write_text("half")
        raise error
    assert (tmp_path / "run" / "model.bin").read_text() == "one"
    assert find_corruption(tmp_path / "run") is None
    assert names(tmp_path) == ["run"]


def test_an_error_inside_makes_no_first_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError), atomic_folder(tmp_path / "run"):  # noqa: PT011
        raise ValueError
    assert names(tmp_path) == []


def test_what_a_killed_writer_left_is_not_taken_over(tmp_path: Path) -> None:
    leftover = tmp_path / ".run.tmp"
    leftover.mkdir()
    (leftover / "half.bin").write_text("half")
    make(tmp_path / "run")
    assert names(tmp_path / "run") == ["manifest.json", "model.bin", "training"]
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("name", [".manifest.json.tmp", ".mode.tmp", "train/.offsets.npy.tmp"])
def test_what_a_killed_writer_left_in_a_partial_folder_is_removed(tmp_path: Path, name: str) -> None:
    """The manifest listed it, and the finished folder was told to be damaged."""
    partial, folder = tmp_path / ".s.part", tmp_path / "s"
    (partial / "train").mkdir(parents=True)
    (partial / name).write_text("half")
    with files.atomic_folder(folder, partial_folder=partial) as inside:
        (inside / "a").write_text("1")
    assert files.find_corruption(folder) is None
    assert not (folder / name).exists()


def test_damage_names_what_is_wrong(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "run" / "model.bin"
    make(run, "hello")

    model.write_text("hell")
    assert find_corruption(run) == "model.bin has 4 bytes, not 5"

    model.write_bytes(bytes([ord("h") ^ 1]) + b"ello")
    assert find_corruption(run) == "model.bin does not match its checksum"

    model.unlink()
    assert find_corruption(run) == "model.bin is missing"

    model.write_text("hello")
    assert find_corruption(run) is None

    (run / "training" / "state.json").write_text("[]")
    assert find_corruption(run) == "training/state.json does not match its checksum"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 7}', "\xff"])
def test_damage_of_the_manifest_itself(tmp_path: Path, text: str) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").write_bytes(text.encode("latin-1"))
    assert find_corruption(tmp_path / "run") == "manifest.json cannot be read"
    (tmp_path / "run" / "manifest.json").unlink()
    assert find_corruption(tmp_path / "run") == "manifest.json is missing"


def test_write_bytes_replaces_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.json"
    write_bytes(path, b"old")

    def power_cut(source: object, target: object) -> None:
        # The last moment before the rename: everything new is on disk under another name, the old file is whole.
        assert path.read_bytes() == b"old"
        assert Path(str(source)).read_bytes() == b"new and longer"
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", power_cut)
        with pytest.raises(OSError, match="power cut"):
            write_bytes(path, b"new and longer")
    assert path.read_bytes() == b"old"

    write_bytes(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert names(tmp_path) == ["log.json"]


def test_a_broken_disk_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.json"
    write_bytes(path, b"old")

    def full_disk(fd: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    """A symbolic or hard link under a temporary name must not lead a writer to another file."""
    mine, run = tmp_path / "thesis.txt", tmp_path / "run"
    mine.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "book.txt").write_text("mine")
    (tmp_path / ".a.json.tmp").symlink_to(mine)
    (tmp_path / ".b.json.tmp").hardlink_to(mine)
    (tmp_path / "c.json").symlink_to(mine)
    (tmp_path / ".run.tmp").symlink_to(tmp_path / "folder")
    (tmp_path / ".run.old").symlink_to(tmp_path / "folder")
    for name in ("a.json", "b.json", "c.json"):
        write_bytes(tmp_path / name, b"new")
        assert (tmp_path / name).read_bytes() == b"new"
        assert not (tmp_path / name).is_symlink()
    for _ in range(2):
        make(run)
    assert find_corruption(run) is None
    assert mine.read_text() == "mine"
    assert names(tmp_path / "folder") == ["book.txt"]


def test_open_in_place_keeps_the_content_and_refuses_links(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("content")
    open_in_place(tmp_path / "lock").close()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(UserError, match=f"{name} is a symbolic link"):
            open_in_place(tmp_path / name)
    (tmp_path / "second").hardlink_to(tmp_path / "lock")
    open_in_place(tmp_path / "second", allow_hard_links=True).close()
    with pytest.raises(UserError, match="second is a hard link"):
        open_in_place(tmp_path / "second")
    assert (tmp_path / "lock").read_text() == "content"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.empty((0, 4))])
def test_write_npy_equals_np_save(tmp_path: Path, array: np.ndarray) -> None:
    write_npy(tmp_path / "a.npy", array)
    found = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_read_json_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"bad\.json:1:\d+: not JSON"):
        read_json(tmp_path / "bad.json")


def test_fresh_folder_refuses_what_holds_something(tmp_path: Path) -> None:
    check_output_folder(tmp_path / "new", "output folder")
    (tmp_path / "empty").mkdir()
    check_output_folder(tmp_path / "empty", "output folder")
    (tmp_path / "empty" / "a").write_text("")
    with pytest.raises(UserError, match="--overwrite"):
        check_output_folder(tmp_path / "empty", "output folder")
    with pytest.raises(UserError, match="exists already"):
        check_output_folder(tmp_path / "empty" / "a", "output folder")


FOREIGN = {
    "of another program": '{"manifest_version": 3, "files": ["thesis.txt"]}',
    "with names alone": '{"files": {"thesis.txt": {}}}',
    "without a kind": '{"files": {"thesis.txt": {"bytes": 4, "sha256": "SHA"}}}',
    "of another kind of folder": '{"kind": "photos", "files": {"thesis.txt": {"bytes": 4, "sha256": "SHA"}}}',
    "with another checksum": '{"kind": "model", "files": {"thesis.txt": {"bytes": 4, "sha256": "0"}}}',
    "not JSON": "thesis.txt",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_overwrite_does_not_believe_a_foreign_manifest(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    manifest = FOREIGN[name].replace("SHA", file_sha256(folder / "thesis.txt"))
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=r"thesis\.txt.*not replaced"):
        check_output_folder(folder, "--output-dir", overwrite=True)
    assert (folder / "thesis.txt").read_text() == "mine"


def test_half_a_note_that_shards_were_verified_is_no_users_file(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "..verified.json.tmp").write_text("{")
    check_output_folder(tmp_path / "run", "--output-dir", overwrite=True)


def test_overwrite_keeps_what_a_user_added_or_changed(tmp_path: Path) -> None:
    def check(kind: str = "model") -> None:
        check_output_folder(tmp_path / "run", "--output-dir", overwrite=True, kind=kind)

    make(tmp_path / "run")
    with atomic_folder(tmp_path / "run" / "rows", "rows") as new:  # computed later, beside the files
        (new / "rows.bin").write_text("rows")
    (tmp_path / "run" / "README.md").write_text("a card")
    check()
    with pytest.raises(UserError, match="of kind model, not shards"):
        check("shards")
    added = tmp_path / "run" / "training" / "notes.txt"
    added.write_text("mine")
    for attempt in (check, lambda: make(tmp_path / "run")):
        with pytest.raises(UserError, match=r"\(training/notes\.txt\)"):
            attempt()
    added.unlink()
    added.symlink_to(tmp_path / "run" / "model.bin")
    with pytest.raises(UserError, match=r"\(training/notes\.txt\)"):
        check()
    added.unlink()
    (tmp_path / "run" / "rows" / "rows.bin").write_text("ROWS")
    (tmp_path / "run" / "model.bin").write_text("two")
    with pytest.raises(UserError, match=r"\(rows/rows\.bin, model\.bin\)"):
        check()
    check_output_folder(tmp_path / "run", "--output-dir", resume=True)  # writes damaged files again
    make(tmp_path / "run", "two")
    assert names(tmp_path / "run") == ["README.md", "manifest.json", "model.bin", "training"]


@pytest.mark.parametrize("files", ["[]", '{"a": 1}', '{"../a": {"bytes": 0, "sha256": ""}}', '{"a": {"bytes": "0"}}'])
def test_a_manifest_of_another_form_is_damage(files: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").write_text(f'{{"kind": "model", "files": {files}}}')
    assert find_corruption(tmp_path / "run") == "manifest.json cannot be read"


def test_checksum_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert file_sha256(tmp_path / "empty") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_link_out_of_a_folder_is_not_copied(tmp_path: Path) -> None:
    """Its target may be a person's file, and the copy may be published. Links of the Hub's cache stay inside of it."""
    model, secret = tmp_path / "snapshots" / "abc", tmp_path / "blobs" / "123"
    for folder in (model, secret.parent, tmp_path / "copy"):
        folder.mkdir(parents=True)
    secret.write_text("x")
    (model / "card").symlink_to(secret)
    copy_file(model / "card", tmp_path / "copy" / "a" / "b" / "card", model)
    assert (tmp_path / "copy" / "a" / "b" / "card").read_text() == "x"
    other = tmp_path / "model"
    (model / "folder").symlink_to(secret.parent)
    model.rename(other)
    for name in ("card", "folder/123"):
        with pytest.raises(UserError, match="is a link to a file outside of"):
            copy_file(other / name, tmp_path / "copy" / "card", other)
    assert not (tmp_path / "copy" / "card").exists()


def test_a_card_that_is_a_link_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("years of work")
    with atomic_folder(tmp_path / "model") as new:
        (new / "file").write_text("x")
    (tmp_path / "model" / "README.md").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(UserError, match=r"did not write.*README\.md"), atomic_folder(tmp_path / "model"):
        pass
