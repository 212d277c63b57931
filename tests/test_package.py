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
import urllib.request
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
    assert versions == {"3.11", "3.12", "3.13", "3.14"}, "a version is claimed when the tests run with it"
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


def test_another_version_may_have_another_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is that of constraints.txt. Torch 2.11 states BSD-3-Clause, and 2.13 a list."""
    licences = load_script("tools/licences.py")
    page = licences.PAGE.read_text()
    find_version = licences.version
    monkeypatch.setattr(licences, "version", lambda name: "2.11.0+cu130" if name == "torch" else find_version(name))
    monkeypatch.setattr(licences, "find_licence", {"torch": "BSD-3-Clause"}.get)
    assert licences.find_differences(page) == []
    assert licences.find_differences(page.replace("| `torch` |", "| `torches` |")) == [
        "torch: BSD-3-Clause, and the page has no row",
        "torch: required, not installed and without a row",
    ]


def test_an_extra_that_is_not_installed_keeps_its_licences(monkeypatch: pytest.MonkeyPatch) -> None:
    licences = load_script("tools/licences.py")
    hide_package(licences, "lm-eval", monkeypatch)
    page = licences.HEAD + (
        "| `evaluate` | Apache-2.0 | firth[lm-eval] |\n"
        "| `lm-eval` | MIT | firth[lm-eval] |\n"
        "| `left-pad` | MIT | firth |\n"
        "| `requests` | Apache-2.0 | firth[lm-eval], firth[web] |\n"
    )
    rows = licences.collect_rows(page)
    assert rows["evaluate"] == ("Apache-2.0", "firth[lm-eval]"), "lm-eval installs it, and is not there to say so"
    assert rows["lm-eval"] == ("MIT", "firth[lm-eval]")
    assert "firth[lm-eval]" in rows["requests"][1].split(", ")
    assert "left-pad" not in rows, "what is installed no longer needs it"


def hide_package(licences: Any, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("distribution", "metadata"):
        find = getattr(licences, function)

        def find_others(name: str, find: Any = find) -> Any:
            if name == hidden:
                raise licences.PackageNotFoundError(name)
            return find(name)

        monkeypatch.setattr(licences, function, find_others)


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--chek"], 2), (["docs"], 2)])
def test_licences_are_written_only_by_the_plain_command(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    licences = load_script("tools/licences.py")
    monkeypatch.setattr(licences, "PAGE", tmp_path / "licences.md")
    with pytest.raises(SystemExit) as stopped:
        licences.main(arguments)
    assert stopped.value.code == code
    assert not licences.PAGE.exists()
    assert licences.main([]) == 0
    assert "`torch`" in licences.PAGE.read_text()


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


PIP_OPTIONS = ["-q", "--no-input", "--no-compile", "-c", str(ROOT / "constraints.txt")]


def pip_install(python: Path, *what: object, cwd: Path) -> None:
    """Install into an environment. Afterwards no package in it lacks another or has a version that another refuses."""
    run(python, "-m", "pip", "install", *PIP_OPTIONS, *what, cwd=cwd)
    assert "No broken requirements" in run(python, "-m", "pip", "check", cwd=cwd)


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment `venv`, which has the wheel and its dependencies, and with a tiny trained model."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=True)
    pip_install(folder / "venv" / "bin" / "python", built[0], cwd=folder)
    rng = random.Random(0)
    (folder / "text.txt").write_text("\n\n".join(document(rng) for _ in range(40)))
    command = ["pretrain", "bert-tiny", "--data=text.txt", "--output-dir=run", *TINY]
    run(folder / "venv" / "bin" / "firth", *command, cwd=folder, OMP_NUM_THREADS="1")
    return folder


@pytest.mark.slow
def test_a_clean_environment(clean: Path) -> None:
    """pip has installed the wheel and its dependencies, a tiny model is trained, and a missing extra is told."""
    program, python = clean / "venv" / "bin" / "firth", clean / "venv" / "bin" / "python"
    assert run(program, "--version", cwd=clean).startswith(f"firth {firth.__version__} (Python ")
    assert "pretrain" in run(program, "--help", cwd=clean)
    assert "_firth_completion" in run(program, cwd=clean, _FIRTH_COMPLETE="source_bash")
    assert (clean / "run" / "final" / "model.safetensors").is_file()
    assert "<html" in (clean / "run" / "report.html").read_text()
    shown = run(program, "fill", "run/final", "the ___ slept", "--json", cwd=clean, OMP_NUM_THREADS="1")
    assert shown.startswith("{")
    told = subprocess.run([program, "check", "run/report.html"], cwd=clean, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "pip install 'firth[data]'" in " ".join(told.stderr.split())
    modules = run(python, "-c", "import firth, sys; print('torch' in sys.modules, firth.__file__)", cwd=clean)
    assert modules.startswith(f"False {clean / 'venv'}")


# What each extra makes possible: arguments of `python -m firth`, and a file that the command writes.
USES_OF_EXTRAS: dict[str, tuple[list[str], str]] = {
    "data": (["tokenizer", "run/report.html", "--vocab-size=300", "--output-dir=out"], "out/tokenizer.json"),
    "hf": (["export", "run/final", "--output-dir=out", "--check"], "out/model.safetensors"),
    "language": (
        ["tokenizer", "text.txt", "--language=en", "--vocab-size=100", "--output-dir=out"],
        "out/tokenizer.json",
    ),
    "ray": (["prepare", "text.txt", "--tokenizer=run/final", "--output-dir=out", "--engine=ray"], "out"),
    "track": (
        ["pretrain", "bert-tiny", "--data=text.txt", "--report-to=tensorboard", "--output-dir=out", *TINY],
        "out/tensorboard",
    ),
    "export": (["export", "run/final", "--output-dir=out", "--format=onnx", "--check"], "out/model.onnx"),
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", [*USES_OF_EXTRAS, "web", "lm-eval"])
def test_an_extra_is_enough_for_its_commands(extra: str, clean: Path, built: tuple[Path, Path], tmp_path: Path) -> None:
    """Each extra has an environment of its own, on top of the clean one: no extra lives on another's packages."""
    (core,) = (clean / "venv" / "lib").glob("python3*/site-packages")
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (packages / "clean.pth").write_text(f"{core}\n")
    python = tmp_path / "venv" / "bin" / "python"
    pip_install(python, f"{built[0]}[{extra}]", cwd=tmp_path)
    assert any(packages.glob("*.dist-info")), "the extra has packages that Firth alone does not have"
    for name in ("run", "text.txt"):
        (tmp_path / name).symlink_to(clean / name)
    if extra == "web":
        check_that_it_serves(python, tmp_path)
    elif extra == "lm-eval":
        code = "from lm_eval.api.registry import get_model; print(get_model('firth').__module__)"
        assert run(python, "-c", code, cwd=tmp_path).split()[-1] == "firth.lm_eval"
    else:
        command, written = USES_OF_EXTRAS[extra]
        run(python, "-m", "firth", *command, cwd=tmp_path, OMP_NUM_THREADS="1")
        assert (tmp_path / written).exists()


def check_that_it_serves(python: Path, folder: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [python, "-m", "firth", "serve", "run/final", "--port=0"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=clean) as process:
        assert process.stderr is not None
        try:
            said = ""
            while not (found := re.search(r"Serving on (\S+)", said)):
                said += (line := process.stderr.readline())
                assert line, said
            with urllib.request.urlopen(f"{found[1]}/v1/models", timeout=60) as answer:
                assert "final" in answer.read().decode()
        finally:
            process.kill()


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
