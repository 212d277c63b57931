"""Every file is written by the functions of core/files.py: a file atomically, or inside a folder that is renamed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import firth

SOURCE = Path(firth.__file__).parent
WRITER = "core/files.py"
# Calls that write a file in its place. Outside of core/files.py they must stand inside `with atomic_folder(...)`.
FUNCTIONS = {
    *("create_file", "open_in_place", "save_file", "np.save", "np.savez", "np.savez_compressed", "torch.save"),
    *("os.open", "os.fdopen", "os.truncate", "json.dump", "pickle.dump", "yaml.dump", "sqlite3.connect"),
    *("copy_file", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move"),
    *("tempfile.mkstemp", "mkstemp", "NamedTemporaryFile", "tempfile.NamedTemporaryFile"),
}
METHODS = {"tofile", "touch", "write_text", "write_bytes", "symlink_to", "hardlink_to"}
# Functions that write into a folder that they are given; their callers must stand inside `with atomic_folder(...)`.
FOLDER_WRITERS = {"write_model", "write_adapter", "write_rank_files", "count_records", "write_phrase_shards"}
EXCEPTIONS = {
    ("static/ngram.py", "save"): "writes into a folder that train_ngram renames",
    ("train/fsdp.py", "write_tensors"): "writes the file of write_rank_files",
    ("train/fsdp.py", "write_sharded_checkpoint"): "atomic_folder is entered by an ExitStack",
    ("train/fsdp.py", "<lambda>"): "in write_sharded_checkpoint",
    ("train/folder.py", "run_folder"): "the lock, which stays empty",
    ("train/log.py", "__init__"): "the log, which only grows",
    ("tokens/shard_writer.py", "__init__"): "shards that only grow, checked by their journal",
    ("tokens/shard_writer.py", "open_locked"): "the journal, whose last line may be cut",
    ("text/exact_dedup.py", "__init__"): "a temporary table, removed at the end",
    ("text/corpus.py", "spool_stream"): "a file in a TemporaryDirectory",
    ("tokens/workers.py", "worker_main"): "a pipe",
    ("core/memory.py", "reset_peak_memory"): "a switch of the kernel in /proc",
    ("train/tracker_process.py", "silence_output"): "the null device",
    ("train/tracker_process.py", "folder_lock"): "a folder, to lock it",
    ("tokens/cluster/guard.py", "child_main"): "a pipe",
    ("tokens/cluster/prepare.py", "lock_output"): "the lock, which stays empty",
    ("tokens/cluster/tasks.py", "fetch_slice"): "a file in a TemporaryDirectory",
}


def call_name(node: ast.Call) -> str:
    """Name of a called function, with the name before its last dot if it is a plain one."""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        return f"{owner}.{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def opens_for_writing(node: ast.Call) -> bool:
    """Whether `open` or `Path.open` gets a mode that writes, or one that is not a constant."""
    owner, _, name = call_name(node).rpartition(".")
    if name != "open" or owner in ("gzip", "bz2", "lzma"):
        return False
    position = 1 if isinstance(node.func, ast.Name) else 0
    modes = [k.value for k in node.keywords if k.arg == "mode"] or node.args[position : position + 1]
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)


def is_write(node: ast.Call) -> bool:
    owner, _, name = call_name(node).rpartition(".")
    is_method = isinstance(node.func, ast.Attribute) and owner != "files"
    known = call_name(node) in FUNCTIONS or name in FOLDER_WRITERS
    return known or (is_method and name in METHODS) or opens_for_writing(node)


def writes_in_place(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Yield function, line and name of all writes outside of `with atomic_folder(...)` and of FOLDER_WRITERS."""

    def visit(node: ast.AST, function: str, atomic: bool) -> Iterator[tuple[str, int, str]]:
        if isinstance(node, ast.FunctionDef):
            function, atomic = node.name, atomic or node.name in FOLDER_WRITERS
        elif isinstance(node, ast.Lambda):
            function = "<lambda>"
        elif isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            atomic = atomic or any(call_name(call) == "atomic_folder" for call in calls)
        elif isinstance(node, ast.Call) and not atomic and is_write(node):
            yield function, node.lineno, call_name(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, atomic)

    yield from visit(tree, "<module>", False)


def test_every_file_is_written_atomically() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for function, line, call in writes_in_place(ast.parse(path.read_text(encoding="utf-8"))):
            if name != WRITER and (name, function) not in EXCEPTIONS:
                wrong.append(f"{name}:{line}: {call} in {function}")
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode=mode)",
        "path.open('ab')",
        "path.write_text('a')",
        "np.save(path, x)",
        "x.tofile(path)",
        "torch.save(x, path)",
        "save_file(x, path)",
        "write_model(model, folder)",
        "json.dump(x, file)",
        "shutil.copyfile(a, b)",
    ],
)
def test_other_writes_are_found(source: str) -> None:
    assert len(list(writes_in_place(ast.parse(source)))) == 1
    assert not list(writes_in_place(ast.parse(f"with atomic_folder(a) as b:\n    {source}")))


@pytest.mark.parametrize(
    "source", ["open(path)", "open(path, 'rb')", "files.write_text(a, b)", "write_text(a, b)", "x.copy()"]
)
def test_reading_is_not_found(source: str) -> None:
    assert not list(writes_in_place(ast.parse(source)))
