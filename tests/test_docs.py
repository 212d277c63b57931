"""The docs name only files, commands, options, recipe fields and code that exist."""

from __future__ import annotations

import io
import re
import shlex
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer

import firth
from firth.cli.main import app
from firth.objectives import OBJECTIVES
from firth.tokens import TOKENIZER_KINDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = "history.md"  # speaks of names and options of earlier versions
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED_CODE = re.compile(r"^ {4}.*\n", re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE_NAME = re.compile(r"[\w./-]*\w\.(?:py|md|svg|png|toml)")
FIRTH = re.compile(r"(?:python3 go\.py|python3? -m firth|-m firth|firth) +(?P<command>[a-z][a-z-]*)\b(?P<rest>.*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*(?:\(\))?")
# Options of other programs that the docs show.
FOREIGN_OPTIONS = {
    "--nproc-per-node",
    "--max-restarts",
    "--shutdown-timeout",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--standalone",
    "--master-port",
    "--logdir",
    "--project",
    "--backend-store-uri",
    "--strict",
    "--local-dir",
    "--to",
    "--execute",
    "--inplace",
}
FOREIGN_NAMES = {"numpy", "pytest", "torchrun"}


@cache
def options_by_command() -> dict[str, set[str]]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        for name, command in commands.items()
    }


@cache
def known_options() -> set[str]:
    paths = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests/faults/fuzz").glob("*.py")]
    scripts = "".join(path.read_text(encoding="utf-8") for path in paths)
    return set().union(*options_by_command().values(), OPTION.findall(scripts), FOREIGN_OPTIONS)


@cache
def known_words() -> set[str]:
    """Every identifier of the code, and every word in its strings (recipe keys, JSON keys, option values)."""
    words: set[str] = set()
    for folder in ("src", "tests", "benchmarks", "go.py"):
        for path in [ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
                if token.type == tokenize.NAME:
                    words.add(token.string)
                elif token.type == tokenize.STRING:
                    words.update(re.findall(r"\w+", token.string))
    return words


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def inline_code(page: Path) -> list[str]:
    return INLINE_CODE.findall(CODE_BLOCK.sub("", text_of(page)))


def commands_in(page: Path) -> list[str]:
    text = text_of(page)
    blocks = "\n".join(CODE_BLOCK.findall(text) + INDENTED_CODE.findall(CODE_BLOCK.sub("", text))).replace("\\\n", " ")
    return [*blocks.splitlines(), *inline_code(page)]


def wrong_commands(lines: list[str]) -> list[str]:
    wrong = []
    for line in lines:
        match = FIRTH.search(line.split("  #")[0])
        if match is None or match["command"] == "test":
            continue
        options = options_by_command().get(match["command"])
        if options is None:
            wrong.append(f"no command {match['command']}: {line}")
            continue
        try:
            words = shlex.split(match["rest"], comments=True)
        except ValueError:  # a line that a comment or an ellipsis breaks off
            words = match["rest"].split()
        given = {word.split("=")[0] for word in words if OPTION.match(word)}
        wrong += [f"{match['command']} has no {option}: {line}" for option in sorted(given - options)]
    return wrong


def wrong_options(codes: list[str]) -> list[str]:
    return [option for code in codes for option in OPTION.findall(code) if option not in known_options()]


def wrong_files(names: list[str]) -> list[str]:
    homes = [ROOT, ROOT / "src/firth", ROOT / "docs", ROOT / "benchmarks", ROOT / "tests"]
    homes += [home for home in (ROOT / "src/firth").rglob("*") if home.is_dir()]
    return [name for name in names if not any((home / name).exists() for home in homes)]


def wrong_names(codes: list[str]) -> list[str]:
    """Identifiers in backticks: CamelCase, snake_case or calls whose words the code does not have."""
    wrong = []
    for code in codes:
        if not IDENTIFIER.fullmatch(code) or FILE_NAME.fullmatch(code):
            continue
        name = code.removesuffix("()")
        is_code = "_" in name or code.endswith("()") or re.search(r"[a-z][A-Z]", name) or "." in name
        parts = [part for part in name.split(".") if part not in FOREIGN_NAMES]
        if is_code and any(part not in known_words() for part in parts):
            wrong.append(code)
    return wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != HISTORY], ids=lambda page: page.name)
def test_names_in_docs_exist(page: Path) -> None:
    codes = inline_code(page)
    files = [name for code in codes for name in FILE_NAME.findall(code) if "*" not in code and "run/" not in code]
    assert wrong_commands(commands_in(page)) == []
    assert wrong_options(codes) == []
    assert wrong_files([name for name in files if name.endswith(".py")]) == []
    assert wrong_names(codes) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_docs_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(text_of(page)):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}"


def test_wrong_names_are_caught() -> None:
    assert wrong_commands(["firth pretrian bert-tiny", "firth pretrain bert-tiny --no-such-option 3"]) == [
        "no command pretrian: firth pretrian bert-tiny",
        "pretrain has no --no-such-option: firth pretrain bert-tiny --no-such-option 3",
    ]
    assert wrong_options(["--no-such-option", "--seed"]) == ["--no-such-option"]
    assert wrong_files(["train/no_such_file.py", "train/loop.py", "fp8/quantize.py"]) == ["train/no_such_file.py"]
    assert wrong_names(["NoSuchClass", "Batch.input_ids", "no_such_function()", "word"]) == [
        "NoSuchClass",
        "no_such_function()",
    ]


def test_go_installs_what_the_commands_of_the_readme_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = re.search(r'^COMMAND_EXTRAS = "\[([\w,]+)\]"', (ROOT / "go.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert names is not None
    installed = {re.split(r"\W", package)[0] for name in names[1].split(",") for package in extras[name]}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    needed = {"--check": "transformers", ".parquet": "pyarrow", "hf:": "datasets", "--language": "py3langid"}
    needed["go.py serve"] = "fastapi"
    assert {package for feature, package in needed.items() if feature in readme} <= installed


def test_the_index_leads_to_every_page() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall(text_of(ROOT / "docs" / "README.md"))}
    assert {page.name for page in PAGES if page.parent == ROOT / "docs"} - {"README.md"} <= linked


def test_the_readme_counts_what_there_is() -> None:
    readme, objectives = text_of(ROOT / "README.md"), text_of(ROOT / "docs" / "objectives.md")
    assert f"| {len(OBJECTIVES)} objectives from" in readme
    assert f" {len(TOKENIZER_KINDS)} kinds of tokenizers" in readme
    rows = re.findall(r"^\| `([a-z-]+)` \| (?:encoder|decoder|ULMFiT)", objectives, re.MULTILINE)
    assert set(rows) == set(OBJECTIVES)


def test_the_api_page_has_every_function() -> None:
    named = {
        match[1] for code in inline_code(ROOT / "docs" / "python.md") if (match := re.match(r"firth\.(\w+)", code))
    }
    assert set(firth.__all__) - named == set()
