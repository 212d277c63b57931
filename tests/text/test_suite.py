"""Suite files that people write."""

from __future__ import annotations

from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text import SuiteTask, read_suite

GOOD = """
tasks:
  - name: reviews
    task: classify
    train: a.csv
    dev: b.csv
    columns: {text: body}
    metric: macro_f1
  - {name: likeness, task: regress, dev: {easy: a.csv, hard: b.csv}, metric: [pearson, spearman]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("body,label\nx,y\n")
    return tmp_path


def refusal(folder: Path, text: str) -> str:
    (folder / "suite.yaml").write_text(text)
    with pytest.raises(UserError) as e:
        read_suite(folder / "suite.yaml")
    return str(e.value).removeprefix(f"{folder}/")


def test_files_stand_beside_the_suite(folder: Path) -> None:
    (folder / "suite.yaml").write_text(GOOD)
    a, b = folder / "a.csv", folder / "b.csv"
    assert read_suite(folder / "suite.yaml") == {
        "reviews": SuiteTask("reviews", "classify", a, {"dev": b}, {}, ("macro_f1",), {"text": "body"}),
        "likeness": SuiteTask("likeness", "regress", None, {"easy": a, "hard": b}, {}, ("pearson", "spearman")),
    }


def test_the_likelihood_of_plain_text_is_a_task_and_may_have_a_folder(folder: Path) -> None:
    (folder / "suite.yaml").write_text("tasks: [{name: x, task: perplexity, dev: .}]")
    assert read_suite(folder / "suite.yaml")["x"].dev == {"dev": folder}
    assert "no such file" in refusal(folder, "tasks: [{name: x, task: classify, dev: .}]")


def test_a_task_may_have_settings(folder: Path) -> None:
    text = "tasks: [{name: x, task: word-in-context, dev: a.csv, settings: {threshold: 0.5, train: b.csv}}]"
    (folder / "suite.yaml").write_text(text)
    settings = {"train": str(folder / "b.csv"), "threshold": 0.5}
    assert read_suite(folder / "suite.yaml")["x"].settings == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tasks: [{name: x, task: cloze, dev: a.csv, settings: {layr: 1}}]",
            "suite.yaml: task x: unknown key 'settings.layr'. Did you mean 'layer'?",
        ),
        (
            "tasks: [{name: x, task: cloze, dev: a.csv, settings: {threshold: high}}]",
            "suite.yaml: task x: settings.threshold: ",
        ),
        ("tasks: []", "suite.yaml: no tasks. Write `tasks:` and"),
        ("- a", "suite.yaml: no tasks."),
        ("task: []", "suite.yaml: unknown key 'task'. A suite file has `tasks`."),
        ("tasks: [", "suite.yaml:1:9: not valid YAML ("),
        ("tasks: [{name: x, task: clasify, dev: a.csv}]", "suite.yaml: task x: unknown task 'clasify'. Did you"),
        ("tasks: [{task: classify, dev: a.csv}]", "suite.yaml: task 1: name: 'name' is missing"),
        ("tasks: [{name: x, task: classify}]", "suite.yaml: task x: neither train nor dev file is named."),
        ("tasks: [{name: x, task: classify, dve: a}]", "suite.yaml: task x: unknown key 'dve'. Did you mean 'dev'?"),
        ("tasks: [3]", "suite.yaml: task 1: 3 is not a mapping of keys to values"),
    ],
)
def test_mistakes(folder: Path, text: str, message: str) -> None:
    assert refusal(folder, text).startswith(message)


def test_missing_files(folder: Path) -> None:
    message = refusal(folder, "tasks: [{name: x, task: classify, dev: none.csv}]")
    assert message == f"suite.yaml: task x: {folder / 'none.csv'}: no such file."
    with pytest.raises(UserError, match="no such file"):
        read_suite(folder / "none.yaml")


def test_names_are_unique(folder: Path) -> None:
    one = "{name: x, task: classify, dev: a.csv}"
    assert "two tasks are called 'x'" in refusal(folder, f"tasks: [{one}, {one}]")
