"""Data flows down the page: a file imports only from its own folder and from folders above it."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "firth"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [file.relative_to(SOURCE).as_posix() for file in FILES]
LOADED = "import sys, firth.cli.main, firth.api; print(*sys.modules)"

# Top to bottom. Packages on the same line do not import each other.
ORDER: list[set[str]] = [
    {"core"},
    {"text"},
    {"tokens"},
    {"objectives", "models"},
    {"hf"},
    {"metrics"},
    {"train"},
    {"static"},
    {"recipes"},
    {"generate"},
    {"tasks"},
    {"evaluate"},
    {"lm_eval"},
    {"lab"},
    {"serve"},
    {"commands"},
    {"api"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}


def package_of(name: str) -> str:
    """The package that a file belongs to: 'text/corpus.py' -> 'text', 'hf.py' -> 'hf'."""
    return name.split("/")[0].removesuffix(".py")


def imported_modules(source: str, name: str) -> Iterator[str]:
    """Every module that a file imports, in full, those inside functions too."""
    package = ["firth", *name.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "firth":
                yield from (f"firth.{alias.name}" for alias in node.names)
            else:
                yield module


def imported_packages(source: str, name: str) -> set[str]:
    """The packages of Firth that a file imports from. A name of `firth` itself belongs to its '__init__'."""
    modules = (module.split(".") for module in imported_modules(source, name))
    parts = {(module[1] if len(module) > 1 else "__init__") for module in modules if module[0] == "firth"}
    return {part if part in LEVEL or is_package(part) else "__init__" for part in parts}


def is_package(part: str) -> bool:
    return (SOURCE / part).is_dir() or (SOURCE / f"{part}.py").is_file()


def wrong_arrows(source: str, name: str) -> list[str]:
    """The imports of a file that go against the order."""
    here = package_of(name)
    wrong = []
    for there in sorted(imported_packages(source, name) - {here}):
        if there not in LEVEL or here not in LEVEL:
            wrong.append(f"{name}: {here} -> {there} has no place in the order")
        elif LEVEL[there] >= LEVEL[here]:
            wrong.append(f"{name}: {here} must not import {there}")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_arrows_point_up(name: str) -> None:
    assert package_of(name) in LEVEL, f"{name} has no place in the order"
    assert wrong_arrows((SOURCE / name).read_text(encoding="utf-8"), name) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("text/corpus.py", "from firth.tokens.dataset import row"),
        ("text/corpus.py", "import firth.train.loop"),
        ("text/corpus.py", "from firth import tokens"),
        ("text/corpus.py", "from ..tokens import dataset"),
        ("text/corpus.py", "def f():\n    from firth.cli.main import main"),
        ("objectives/batch.py", "from firth.models import config"),
        ("models/model.py", "from firth.objectives.batch import Batch"),
        ("core/errors.py", "from firth.text import corpus"),
        ("metrics/text.py", "from firth import __version__"),
        ("metrics/text.py", "import firth"),
    ],
)
def test_a_wrong_arrow_is_caught(name: str, source: str) -> None:
    assert len(wrong_arrows(source, name)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("train/loop.py", "from firth.models import model\nfrom firth.objectives.batch import Batch"),
        ("text/corpus.py", "from firth.text.filters import held_out\nfrom .mix import mix\nfrom . import python_docs"),
        ("core/console.py", "from firth.core.errors import UserError"),
        ("metrics/text.py", "import numpy\nfrom tokens import something_else"),
        ("cli/main.py", "from firth import __version__, api"),
    ],
)
def test_a_right_arrow_is_let_through(name: str, source: str) -> None:
    assert wrong_arrows(source, name) == []


def imported_at_once(source: str, name: str) -> set[str]:
    """The modules that a file imports as soon as it is imported itself."""
    top = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return set(imported_modules("\n".join(map(ast.unparse, top)), name))


def test_only_hf_needs_transformers() -> None:
    found = {
        name
        for file, name in zip(FILES, NAMES, strict=True)
        for module in imported_at_once(file.read_text(encoding="utf-8"), name)
        if module.split(".")[0] == "transformers" or module == "firth.hf"
    }
    assert found == {"hf.py"}


def only_names(source: str) -> bool:
    """Whether a file holds imports, `__all__` and a docstring, and nothing else but `make_lazy`."""
    lazy = ast.unparse(ast.parse(source)).endswith("\nmake_lazy(__name__)")
    nodes = ast.parse(source).body[: -1 if lazy else None]
    for node in nodes:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        listing = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        at_first_use = lazy and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (docstring or listing or at_first_use or isinstance(node, ast.Import | ast.ImportFrom)):
            return False
    return True


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("/__init__.py")])
def test_init_files_hold_only_names(name: str) -> None:
    assert only_names((SOURCE / name).read_text(encoding="utf-8"))


def test_code_in_an_init_file_is_caught() -> None:
    assert only_names('"""Doc."""\nfrom a import b\n__all__ = ["b"]')
    assert not only_names("from a import b\nb()")
    assert not only_names("def f(): ...")
    assert only_names("if TYPE_CHECKING:\n    from a import b\nmake_lazy(__name__)")
    assert not only_names("if TYPE_CHECKING:\n    from a import b")


@pytest.mark.parametrize("name", ["models", "train", "tasks", "generate"])
def test_a_lazy_package_has_each_of_its_names(name: str) -> None:
    package = importlib.import_module(f"firth.{name}")
    assert sorted(package.__all__) == sorted(package._files)
    for exported in package.__all__:
        value = getattr(package, exported)
        assert not isinstance(value, ModuleType), "a function, and not the file of the same name"
        assert value is getattr(importlib.import_module(package._files[exported]), exported)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_every_library_we_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(
            line
            for extra in ("data", "hf", "language", "lm-eval", "ray", "web")
            for line in project["optional-dependencies"][extra]
        ),
    ]
    declared = {normal(re.match(r"[\w.-]+", line)[0]) for line in wanted}  # type: ignore[index]
    owners = packages_distributions()
    missing = set()
    for file, name in zip(FILES, NAMES, strict=True):
        for module in imported_modules(file.read_text(encoding="utf-8"), name):
            top = module.split(".")[0]
            known = top in ("firth", "triton") or top in sys.stdlib_module_names  # triton comes with torch's GPU builds
            if not known and declared.isdisjoint(normal(owner) for owner in owners.get(top, [top])):
                missing.add(f"{name} imports {top}")
    assert missing == set()


def normal(distribution: str) -> str:
    """One spelling for a package name, as pip compares them."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_a_command_does_not_load_what_few_of_them_need() -> None:
    found = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split())
    assert {"firth.api", "firth.recipes", "numpy"} < loaded
    assert not loaded & {"torch", "matplotlib", "transformers", "numba", "scipy", "sklearn", "pandas"}


# --- cycles between files -------------------------------------------------------------------------------------------

# Imports inside functions that may close a cycle: (importing file, imported file).
LAZY_IMPORTS = {
    ("models/model.py", "models/hf/checkpoint.py"),  # Model.save
    ("models/parameters.py", "models/model.py"),  # counts what has no formula
}


def file_of(module: str, names: dict[str, Path]) -> str | None:
    """The file that defines a module, unless that is a package."""
    return names[module].relative_to(SOURCE).as_posix() if module in names else None


def imported_files(file: Path, names: dict[str, Path]) -> set[str]:
    """Files that a file imports when it runs. A name from a package counts as the file that defines it."""
    found: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("firth"):
            continue
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            while module not in names:
                parent, _, name = module.rpartition(".")
                package = SOURCE.joinpath(*parent.split(".")[1:]) / "__init__.py"
                exports = package_exports(package) if package.is_file() else {}
                if name not in exports:
                    module = parent
                    break
                module = exports[name]
            if path := file_of(module, names):
                found.add(path)
    return found - {file.relative_to(SOURCE).as_posix()}


def package_exports(package: Path) -> dict[str, str]:
    """Names that an __init__.py imports, and the dotted path of each."""
    tree = ast.parse(package.read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A path of files that import each other in a circle; empty if there is none."""
    done: set[str] = set()

    def visit(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        for other in sorted(graph.get(file, ())):
            if cycle := visit(other, [*path, file]):
                return cycle
        done.add(file)
        return []

    return next((cycle for file in sorted(graph) if (cycle := visit(file, []))), [])


def test_no_file_imports_itself_in_a_circle() -> None:
    names = {
        ".".join(("firth", *file.relative_to(SOURCE).with_suffix("").parts)): file
        for file in FILES
        if file.name != "__init__.py"
    }
    graph = {file.relative_to(SOURCE).as_posix(): imported_files(file, names) for file in names.values()}
    for importing, imported in LAZY_IMPORTS:
        assert imported in graph[importing], "an exception that nothing needs any more"
        graph[importing].discard(imported)
    assert sum(map(len, graph.values())) > 500, "imports are found"
    assert find_cycle(graph) == []


def test_a_circle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == []
