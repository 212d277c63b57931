"""Every page that a command writes: one design, nothing unescaped, nothing from elsewhere, charts with axes.

`PAGES` has a builder for each function that makes a page; a function that is not in it fails the first test.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.test_report import Reader
from lab.test_show import evil_shown

import firth
from firth.core.files import write_json, write_text
from firth.core.html import SHARED_STYLES, read_template
from firth.evaluate.neighbours import write_vector_report
from firth.evaluate.pretraining_report import write_pretraining_report_and_card
from firth.evaluate.report import write_evaluation_report, write_run_report
from firth.evaluate.search_page import write_search_page
from firth.evaluate.suite import write_suite_page
from firth.lab.adapt_page import write_adaptation_report
from firth.lab.against import write_comparison_report
from firth.lab.plan import write_fit_page
from firth.lab.quickstart import write_quickstart_report
from firth.lab.scaling_law import ScalingFit, ScalingLaw, ScalingRun
from firth.lab.show_page import make_show_page
from firth.models import get_preset
from firth.recipes import pretraining_recipe
from firth.serve.app import describe_api
from firth.tasks import FinetuneRecipe, Prediction
from firth.text import Example
from firth.train.findings import Finding

SOURCE = Path(firth.__file__).parent
NAME = '<script>alert("x")'  # a name of a file may be markup too
TEXT = f"{NAME}.txt"
EVIL = f"</style></title>{NAME}</script> & 'y'"
TINY = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES: dict[str, Any] = {"max_steps": 3, "max_seq_length": 32, "per_device_train_batch_size": 4, "logging_steps": 1}
LOG = [
    {"step": i, "loss": 9.0 / i + 3, "tokens": 100 * i} | ({"eval_loss": 8.0 / i + 3} if i % 5 == 0 else {})
    for i in range(1, 21)
]
NOTEBOOK_METHODS = {"make_page", "_repr_html_"}  # they show an object in a notebook, and write no file


# --- one page of each kind ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text whose name is markup, a BERT and an n-gram model of it."""
    folder = tmp_path_factory.mktemp("pages")
    text = corpus_file.read_text(encoding="utf-8").replace("the river", f"the {EVIL}", 40)
    (folder / TEXT).write_text(text, encoding="utf-8")
    firth.pretrain("bert-tiny", folder / TEXT, folder / "run", objective="nsp", vocab_size=300, overrides=TINY, **SIZES)
    firth.pretrain("ngram", folder / TEXT, folder / f"ngrams {NAME}", vocab_size=300, overrides={"order": 3})
    return folder


def pretraining_page(home: Path, _: Path) -> Path:
    results = json.loads((home / "run" / "results.json").read_text())
    finding = Finding("plateau", "warning", EVIL, {EVIL: 7.62, "steps": 3}, EVIL, EVIL)
    (home / "run" / "report.html").unlink()
    write_pretraining_report_and_card(home / "run", results, [finding])
    return home / "run" / "report.html"


def ngram_page(home: Path, _: Path) -> Path:
    return home / f"ngrams {NAME}" / "report.html"


def adaptation_page(home: Path, _: Path) -> Path:
    figures = dict(bits_per_byte=2.0, byte_perplexity=4.0, tokens_per_word=1.5, words_split=0.3, unknown=0.01)
    measure = {"method": "hidden words", "texts": 12, **figures}
    stages = {"before": measure, "with_new_tokens": measure, "after": measure, "change": -0.1, "interval": 0.02}
    token = {"token": EVIL, "count": 12, "saved_per_mb": 300.0, "old_pieces": [EVIL, "b"]}
    run = json.loads((home / "run" / "results.json").read_text())
    results = run | {
        "checkpoint": f"{NAME}/final",
        "data": EVIL,
        "summary": f"the text {EVIL} is predicted better",
        "domain": stages,
        "general": stages,
        "replay": {"share": 0.25, "source": EVIL},
        "new_tokens": {"decision": f"new tokens pay for {EVIL}", "added": 1, "best": [token]},
        "worst_words": [{"word": EVIL, "count": 3, "split": EVIL, "pieces": 4.0}],
    }
    write_adaptation_report(home / "run", results)
    return home / "run" / "report.html"


def vector_page(_: Path, folder: Path) -> Path:
    write_log(folder)
    write_text(folder / "recipe.yaml", f"data: {EVIL}\n")
    results = {"words": 3, "steps": 20, "loss": 0.5, "similar": {EVIL: [EVIL, "b"], "c": ["d"]}}
    return write_vector_report(folder, EVIL, results)


def write_log(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in LOG))


def examples() -> tuple[list[Example], list[Prediction]]:
    made = [Example(EVIL, (f"{EVIL} {i}",), EVIL if i % 2 else "b") for i in range(12)]
    return made, [Prediction(EVIL if i % 3 else "b", {EVIL: 0.75, "b": 0.25}) for i in range(12)]


def evaluation_page(_: Path, folder: Path) -> Path:
    write_log(folder / "run")
    result = {
        "task": "classify",
        "data": NAME,
        "checkpoint": str(folder / "run" / "final"),
        "metrics": {"accuracy": 0.5},
        "by_group": {EVIL: 0.5},
        "repeated_loss_by_position": [5.0, 3.0, 1.0],
        "unrepeated_loss_by_position": [5.0, 5.1, 5.0],
        "uniform_loss": 5.7,
    }
    write_evaluation_report(folder / "report.html", result, *examples())
    return folder / "report.html"


def finetuning_result() -> dict[str, Any]:
    rows = [{"accuracy": 0.8 + 0.01 * i, "macro_f1": 0.7} for i in range(3)]
    trial = {"skipped": False, "rates": [1e-4, 1e-3], "losses": [0.5, 0.3], "chosen": 1e-3, "reason": EVIL}
    speeds = {"ms_per_example": 1.0, "ms_per_example_in_batches": 0.5}
    model = {"mean": 0.8, "std": 0.01, "parameters": 10**6, "bytes": 10**6, "device": EVIL, **speeds}
    compared = dict(
        metric="accuracy", baseline=EVIL, difference=0.1, p_value=0.01, num_seeds=(3, 3), low=0.05, high=0.15
    )
    return {
        "task": "classify",
        "metric": "accuracy",
        "from_scratch": False,
        "steps": [100, 100, 100],
        "scores": rows,
        "seeds": [row["accuracy"] for row in rows],
        "mean": 0.81,
        "std": 0.01,
        "best_seed": 2,
        "chance": 0.5,
        "failed": [1],
        "failure_causes": {"1": EVIL},
        "learning_rate": 1e-3,
        "learning_rate_trial": trial | {"train_examples": 80, "held_out_examples": 20, "factor": 2.0, "steps": 30},
        "distillation": {"teacher": model, EVIL: model},
        "comparison": compared | {"examples": 12, "over": "seeds", "degrees_of_freedom": 4.0, "paired_seeds": True},
        "search": search_result(),
        "report": f"{NAME}/report.html",
    }


def search_result() -> dict[str, Any]:
    settings = [
        {
            "learning_rate": 1e-4 * 2**i,
            "epochs": 1 + i % 3,
            "batch_size": 8 * 2 ** (i % 2),
            "layer_decay": 0.9,
            "warmup_share": 0.1,
        }
        for i in range(9)
    ]
    kept = [range(9), range(3, 6), range(3, 5)]
    errors = {"loss_error": 0.02, "score_error": 0.01}
    trials = [
        {"rung": rung, "setting": i, "loss": 0.9 - 0.1 * rung + 0.02 * abs(i - 4), "score": 0.8 + 0.01 * i, **errors}
        for rung, own in enumerate(kept)
        for i in own
    ]
    rungs = [
        {"settings": len(own), "share": 3.0 ** (rung - 2), "examples": 800, "cost": 0.5, "seconds": 12.0}
        for rung, own in enumerate(kept)
    ]
    fields = ["learning_rate", "num_train_epochs", "per_device_train_batch_size"]
    facts = {"chosen": 4, "reason": EVIL, "cost": 1.5, "train_examples": 80, "held_out_examples": 20}
    return {"settings": settings, "trials": trials, "rungs": rungs, "fields": fields, **facts}


def run_page(_: Path, folder: Path) -> Path:
    made, predictions = examples()
    for seed in range(2):
        write_log(folder / f"seed-{seed}")
    settings = json.dumps({"checkpoint": EVIL, "train": EVIL, "dev": NAME})
    write_text(folder / "recipe.yaml", f"{settings}\n")
    lines = [
        {"id": e.id, "prediction": p.prediction, "reference": e.target, "scores": p.scores}
        for e, p in zip(made, predictions, strict=True)
    ]
    write_text(folder / "predictions.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return write_run_report(folder, finetuning_result(), made)


def search_page(_: Path, folder: Path) -> Path:
    return write_search_page(folder, finetuning_result() | {"metric": "accuracy"})


def comparison_page(_: Path, folder: Path) -> Path:
    results = {"finetuned": finetuning_result(), "scratch": finetuning_result() | {"from_scratch": True}}
    return write_comparison_report(folder, FinetuneRecipe(checkpoint=EVIL, dev=NAME), results)


def suite_page(_: Path, folder: Path) -> Path:
    task = {"metrics": {EVIL: {"accuracy": 0.5}}, "how": EVIL, "score": 0.5, "std": 0.01, "seeds": [0.5]}
    facts = {"average": 0.5, "complete": False, "missing": [EVIL], "left_out": [], "off_scale": []}
    write_suite_page(folder / "report.html", {"suite": EVIL, "checkpoint": EVIL, "tasks": {EVIL: task}, **facts})
    return folder / "report.html"


def law_page(_: Path, folder: Path) -> Path:
    law = ScalingLaw(1.7, 400.0, 410.0, 0.34, 0.28, 15.0)
    fit = ScalingFit(law, dict.fromkeys(law.__dataclass_fields__, (0.1, 0.5)), (1e6, 8e6), (1e6, 1e8), (1, 4), 0.02)
    runs = [ScalingRun(n, d, 1e7, law.loss(n, d, 1e7) + 0.02) for n in (1e6, 4e6) for d in (1e6, 4e6, 2e7)]
    folders = [Path(f"{NAME} {i}") for i in range(len(runs))]
    write_fit_page(folder / "plan.html", folders, runs, fit, {"flops": 1e15, "optimal_parameters": 2e6})
    return folder / "plan.html"


def check_page(home: Path, folder: Path) -> Path:
    found = firth.check(home / TEXT, kinds=["byte-bpe", "wordpiece"], vocab_sizes=[300, 500], output_dir=folder)
    return Path(found["page"])


def show_page(_: Path, folder: Path) -> Path:
    make_show_page(evil_shown()).save(folder / "show.html")
    return folder / "show.html"


def quickstart_page(_: Path, folder: Path) -> Path:
    from firth.core.html import ClozeSample

    recipe = replace(pretraining_recipe(get_preset("bert-tiny")), data=EVIL)
    arms = {
        name: {"mean": mean, "std": 0.02, "seeds": [mean - 0.03, mean, mean + 0.03]}
        for name, mean in (("scratch", 0.16), ("counted", 0.3), ("pretrained", 0.44))
    }
    gains = {"gain": 0.28, "gain_from_counting": 0.14, "gain_from_pretraining": 0.14}
    row = {"model": EVIL, "labels": 64, "chance": 0.11, **arms, **gains}
    counts = {"parameters": 10**6, "tokens": 10**6, "tokens_per_second": 900.0}
    trained = {"steps": 20, "eval_loss": 5.0, "unigram_entropy": 6.5, **counts}
    run = {
        "table": [row, row | {"labels": 256}],
        "finetune_steps": 100,
        "pretraining": trained,
        "recipe": recipe,
        "epochs": 0.5,
        "log": LOG,
        "samples": [ClozeSample(EVIL, " sat.", EVIL, [(EVIL, 0.5), ("cat", 0.25)])],
    }
    columns = ["model", "labels", "from scratch", "counted embeddings", "pretrained", "gain"]
    write_quickstart_report(folder / "report.html", {"encoder": run}, columns)
    return folder / "report.html"


def api_page(_: Path, folder: Path) -> Path:
    body = {
        "content": {"application/json": {"schema": {"properties": {EVIL: {"type": "string", "description": EVIL}}}}}
    }
    write_text(
        folder / "docs.html", describe_api({"paths": {"/x": {"post": {"description": EVIL, "requestBody": body}}}})
    )
    return folder / "docs.html"


PAGES: dict[str, Callable[[Path, Path], Path]] = {
    "evaluate/neighbours.py:write_vector_report": vector_page,
    "evaluate/pretraining_report.py:write_ngram_report": ngram_page,
    "evaluate/pretraining_report.py:write_pretraining_report": pretraining_page,
    "evaluate/report.py:write_evaluation_report": evaluation_page,
    "evaluate/report.py:write_run_report": run_page,
    "evaluate/search_page.py:write_search_page": search_page,
    "evaluate/suite.py:write_suite_page": suite_page,
    "lab/adapt_page.py:write_adaptation_report": adaptation_page,
    "lab/against.py:write_comparison_report": comparison_page,
    "lab/check_page.py:make_check_page": check_page,
    "lab/plan.py:write_fit_page": law_page,
    "lab/quickstart.py:write_quickstart_report": quickstart_page,
    "lab/show_page.py:make_show_page": show_page,
    "serve/app.py:describe_api": api_page,
}
NO_CHARTS = {"comparison_page", "suite_page", "api_page", "ngram_page"}


def make_page(name: str, home: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return PAGES[name](home, folder)


# --- the tests ------------------------------------------------------------------------------------------------------


def page_makers() -> Iterator[str]:
    """Yield the functions that construct an `HtmlPage` which becomes a file."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "HtmlPage(" in text else ():
            if isinstance(function, ast.FunctionDef) and function.name not in NOTEBOOK_METHODS:
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(isinstance(call, ast.Name) and call.id == "HtmlPage" for call in calls):
                    yield f"{file.relative_to(SOURCE).as_posix()}:{function.name}"


def test_every_function_that_makes_a_page_is_tested_here() -> None:
    assert sorted(page_makers()) == sorted(PAGES)


def test_no_page_is_written_by_other_means() -> None:
    for file in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.j2")]:
        text = file.read_text(encoding="utf-8").lower()
        is_template = file.name == "page.html.j2"
        assert is_template or "<!doctype" not in text, file
        assert file.name == "html.py" or "matplotlib.figure" not in text, file


@pytest.mark.parametrize("name", PAGES)
def test_a_page(name: str, home: Path, tmp_path: Path) -> None:
    html = make_page(name, home, tmp_path).read_text(encoding="utf-8")
    page = Reader(html)
    assert page.open == []
    check_head(html, page)
    check_escapes(page)
    check_requests(html, page)
    check_tables(page)
    charts = re.findall(r'<svg class="chart.*?</figure>', html, re.DOTALL)
    assert bool(charts) == (PAGES[name].__name__ not in NO_CHARTS)
    for chart in charts:
        check_chart(chart)


def check_head(html: str, page: Reader) -> None:
    """Language, viewport, title, both colour schemes, the shared style, and a policy with the hashes of the page."""
    attributes = {name: value for _, values in page.tags for name, value in values.items()}
    assert attributes["lang"] == "en"
    named = [values for tag, values in page.tags if tag == "meta"]
    metas = {values.get("name") or values.get("http-equiv"): values.get("content") for values in named}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    assert html.count("<title>") >= 1
    assert sum(tag == "h1" for tag, _ in page.tags) == 1
    assert all(read_template(style) in html for style in SHARED_STYLES)
    policy = str(metas["Content-Security-Policy"])
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    for text in re.findall(r"<style>(.*?)</style>|<script[^>]*>(.*?)</script>", html, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256("".join(text).encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def check_escapes(page: Reader) -> None:
    """The page has the hostile text as text, and no element or attribute of it."""
    assert any(NAME in text for _, text in page.texts), "the page must show it, or nothing is tested"
    assert sum(tag == "script" for tag, _ in page.tags) <= 1
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    assert not any("alert" in text for tag, text in page.texts if tag in ("script", "style"))
    assert not [name for _, values in page.tags for name in values if "alert" in name or name.startswith("on")]


def check_requests(html: str, page: Reader) -> None:
    assert {"link", "img", "iframe", "object", "base", "image", "use"}.isdisjoint(tag for tag, _ in page.tags)
    assert not [
        name for _, values in page.tags for name in values if name in ("src", "srcset", "href", "xlink:href", "action")
    ]
    assert not re.search(r"@import|@font-face|url\(|\bfetch\(|XMLHttpRequest|https?://", html)
    assert not [values for _, values in page.tags if "style" in values], "the policy forbids it"


def check_tables(page: Reader) -> None:
    """Every column of a table has a name, except the one of the names of rows."""
    headers = [values for tag, values in page.tags if tag == "th"]
    assert all(values.get("scope") in ("col", "row") for values in headers)


def check_chart(chart: str) -> None:
    """A name, axes with numbers and with names, numbers on hover, and all of them as a table."""
    assert re.search(r'role="img" aria-label="[^"]+"', chart)
    ticks = [text for text in re.findall(r'<text class="tick"[^>]*>([^<]*)<', chart) if re.search(r"\d", text)]
    assert len(ticks) >= 2, "an axis with two numbers"
    assert all(re.findall(r'<text class="name"[^>]*>([^<]+)<', chart)), "named axes"
    marks = re.findall(r'<g class="mark"><title>([^<]+)</title>', chart)
    assert marks
    assert chart.count('<g class="mark">') == len(marks)
    assert all(re.search(r"\d|none", mark) for mark in marks)
    table = chart[chart.index("<tbody>") :]
    assert table.count("<tr>") == len(marks)


def test_a_log_without_a_number_is_drawn(tmp_path: Path) -> None:
    write_log(tmp_path)
    lines = [*LOG, {"step": 21, "loss": math.nan, "tokens": 1}, {"step": 22, "loss": None, "tokens": 2}]
    write_text(tmp_path / "log.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_text(tmp_path / "recipe.yaml", "a: 1\n")
    write_json(tmp_path / "results.json", {})
    page = write_vector_report(tmp_path, "glove", {"words": 1, "similar": {"a": ["b"]}})
    assert "nan" not in page.read_text(encoding="utf-8").split("<figure", 1)[1].split("</svg>")[0]
