"""The notebooks of docs/notebooks are valid, use the public API alone, are stored with their outputs, and run."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import firth

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000
# A folder of the machine that made an output; a notebook works in a temporary folder, and names what is in it.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/(?:tmp|home|root|work|usr|var|opt|Users|private)\b")
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def output_texts(cell: dict[str, Any]) -> list[str]:
    texts = [joined(output["text"]) for output in cell["outputs"] if "text" in output]
    return texts + [joined(data) for output in cell["outputs"] for data in output.get("data", {}).values()]


def wrong_names(source: str) -> list[str]:
    """Names of `firth` that are not in its API, and imports from its packages."""
    tree = ast.parse(source)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "firth"
    }
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    inner = {name for name in modules if name.startswith("firth.")}
    foreign = {name for name in modules - inner if name.split(".")[0] not in {*sys.stdlib_module_names, "firth"}}
    return sorted({name for name in used if name not in firth.__all__} | inner | foreign)


def test_there_are_five() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"(notebooks/{path.name})" in index for path in NOTEBOOKS)


@by_name
def test_a_notebook_is_valid_and_small(path: Path) -> None:
    notebook = read(path)
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert path.stat().st_size < MAX_BYTES
    assert joined(notebook["cells"][0]["source"]).startswith(f"# {path.stem[0]}. ")
    validate = pytest.importorskip("nbformat", reason="nbformat is not installed").validate
    validate(notebook)


@by_name
def test_a_notebook_uses_the_public_api(path: Path) -> None:
    assert wrong_names("\n".join(joined(cell["source"]) for cell in code_cells(path))) == []


@by_name
def test_a_notebook_has_its_outputs(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run once, from top to bottom"
    for cell in cells:
        source = joined(cell["source"])
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert "error" not in kinds
        if isinstance(ast.parse(source).body[-1], ast.Expr) and "print" not in source.splitlines()[-1]:
            assert "execute_result" in kinds, source
        for text in output_texts(cell):
            assert ABSOLUTE_PATH.search(text) is None, text[:200]
            assert "\x1b[" not in text
    assert any("firth-out" in text for cell in cells for text in output_texts(cell)), "an object shows itself"


def test_wrong_names_are_caught() -> None:
    assert wrong_names("import numpy, json\nfrom firth.train import fit\nfirth.pretrian('x')\nfirth.load('y')") == [
        "firth.train",
        "numpy",
        "pretrian",
    ]
    assert ABSOLUTE_PATH.search("saved in /tmp/abc") is not None
    assert ABSOLUTE_PATH.search("see https://x.org/usr and docs/usr</p>") is None


@pytest.mark.slow
@by_name
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook, start = nbformat.read(path, as_version=4), time.monotonic()
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # an error in a cell raises
    print(f"{path.name}: {time.monotonic() - start:.0f} s")
    assert list(tmp_path.iterdir()) == [], "a notebook writes into a temporary folder of its own"
