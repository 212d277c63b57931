"""What a user installs: wheel and sdist, a clean environment, start-up time, licences, the documentation site."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from conftest import document

import firth

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
TINY = [
    *("--max-steps=2", "--vocab-size=200", "model.num_layers=1", "model.dim=16", "model.mlp.dim=32", "--no-compile"),
    *("--no-bf16", "--max-seq-length=32", "--per-device-train-batch-size=2"),
]


def load_script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*words: object, cwd: Path, **environment: str) -> str:
    """Run a program outside of the tree: nothing of it can be imported by accident."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, env=clean | environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(source: Path, out: Path, kind: str) -> Path:
    """Build a wheel or an sdist with the setuptools of this environment."""
    name = run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=source).split()[-1]
    return out / name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of the files that git knows."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    return build(source, folder, "wheel"), build(source, folder, "sdist")


# Metadata


def test_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == firth.__version__
    versions = {c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert versions == {"3.11"}, "a version is claimed when the tests run with it"
    assert {"data", "hf", "language", "web"} <= project["optional-dependencies"].keys()


def test_licences_are_as_installed() -> None:
    licences = load_script("tools/licences.py")
    assert licences.find_differences(licences.PAGE.read_text()) == [], "python tools/licences.py writes the page"


def test_licences_notice_a_change() -> None:
    licences = load_script("tools/licences.py")
    page = licences.PAGE.read_text()
    rows = licences.ROW.findall(page)
    name, licence, _ = next(row for row in rows if row[0] == "safetensors")
    told = licences.find_differences(page.replace(f"| `{name}` | {licence} |", f"| `{name}` | Secret |"))
    assert told == [f"safetensors: {licence}, and the page has Secret"]
    assert {"torch", "numpy", "tokenizers"} <= {row[0] for row in rows}


def test_the_site_has_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    missing = [
        page.name for page in (ROOT / "docs").glob("*.md") if not re.search(rf": {page.name}$", menu, re.MULTILINE)
    ]
    assert missing == [], "add them to `nav` in mkdocs.yml"


# Built and installed


@pytest.mark.slow
def test_the_wheel_has_every_file(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "src/firth"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        facts = Parser().parsestr(archive.read(next(n for n in packed if n.endswith("METADATA"))).decode())
    ours = {name.removeprefix("src/") for name in tracked.stdout.split() if (ROOT / name).is_file()}
    assert ours - packed == set()
    assert any(name.endswith("LICENSE") for name in packed)
    assert facts["License-Expression"] == "MIT"
    assert "Firth takes your own text" in str(facts.get_payload())
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(next(tmp_path.iterdir()), tmp_path, "wheel")
    with zipfile.ZipFile(again) as archive:
        assert set(archive.namelist()) == packed


@pytest.mark.slow
def test_a_clean_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """pip installs the wheel and its dependencies, a tiny model is trained, and a missing extra is told."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    program, python = environment / "bin" / "firth", environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--no-input", "--no-compile", "-c", ROOT / "constraints.txt"]
    run(*pip, built[0], cwd=tmp_path)
    assert "No broken requirements" in run(python, "-m", "pip", "check", cwd=tmp_path)
    assert run(program, "--version", cwd=tmp_path).startswith(f"firth {firth.__version__} (Python ")
    assert "pretrain" in run(program, "--help", cwd=tmp_path)
    assert "_firth_completion" in run(program, cwd=tmp_path, _FIRTH_COMPLETE="source_bash")
    rng = random.Random(0)
    (tmp_path / "text.txt").write_text("\n\n".join(document(rng) for _ in range(40)))
    run(
        program,
        "pretrain",
        "bert-tiny",
        "--data=text.txt",
        "--output-dir=run",
        *TINY,
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
    shown = run(program, "fill", "run/final", "the ___ slept", "--json", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert shown.startswith("{")
    told = subprocess.run(
        [program, "check", "run/report.html"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    assert "pip install 'firth[data]'" in " ".join(told.stderr.split())
    modules = run(python, "-c", "import firth, sys; print('torch' in sys.modules, firth.__file__)", cwd=tmp_path)
    assert modules.startswith(f"False {environment}")


@pytest.mark.slow
def test_start_up_time() -> None:
    """A busy core takes up to 1.6 times the CPU seconds of an idle one: then `import torch` is the measure."""
    startup = load_script("benchmarks/startup.py")
    environment = startup.bytecode_environment(str(ROOT / "build" / "bytecode")) | {"PYTHONPATH": str(ROOT / "src")}
    found = startup.measure(3, [*startup.MAX_SECONDS, "import torch"], environment)
    assert found["firth --help"][1] < 0.4 * found["import torch"][1]
    if os.getloadavg()[0] < (os.cpu_count() or 1):
        assert {name: found[name] for name, limit in startup.MAX_SECONDS.items() if found[name][1] > limit} == {}


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """Links, anchors, names in docstrings: a warning is an error. Nothing is loaded from elsewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pages = {path.name: path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "text.html", "api.html", "readme.html", "licences.html"} <= pages.keys()
    assert 'id="firth.commands.pretrain.pretrain"' in pages["api.html"]
    assert "output_dir" in pages["api.html"]
    loaded = re.findall(
        r'(?:<script[^>]+src|<link[^>]+rel="stylesheet"[^>]+href)="(https?://[^"]+)"', "".join(pages.values())
    )
    assert loaded == []
