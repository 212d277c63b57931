"""List the licences of all packages that Firth installs, from their metadata.

python tools/licences.py            write docs/licences.md
python tools/licences.py --check    compare it with the installed packages, and write nothing

An extra that is not installed keeps its rows, also those of the packages that its packages install in turn.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, metadata, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
CONSTRAINTS = ROOT / "constraints.txt"
TOOL_EXTRAS = ("dev", "integrations", "docs", "browser")  # of people who work on Firth
CORE = "firth"
# Packages that a platform adds; their rows would come and go with the machine that writes the page.
PLATFORM_PACKAGES = re.compile(r"nvidia-.*|cuda-.*|triton|colorama|tzdata|pywin32|setuptools|hf-xet|uvloop")
MAX_LICENCE_CHARS = 60
# Metadata that is no name of a licence: a whole text, or a classifier without a version.
SHORT_NAMES = (
    (re.compile(r"apache", re.I), "Apache-2.0"),
    (re.compile(r"3-clause|new bsd|BSD-3", re.I), "BSD-3-Clause"),
    (re.compile(r"^BSD 2|BSD-2|2-clause", re.I), "BSD-2-Clause"),
    (re.compile(r"^MIT\b|MIT License|Expat", re.I), "MIT"),
    (re.compile(r"Python Software Foundation|^PSF", re.I), "PSF-2.0"),
    (re.compile(r"Mozilla Public License 2|^MPL", re.I), "MPL-2.0"),
    (re.compile(r"^BSD", re.I), "BSD"),
)
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
HEAD = """\
# Licences

Firth is under the MIT licence. The tables list the packages that `pip install firth` and its extras install, with the
licence that each package states. `python tools/licences.py` writes it, and keeps the rows of an extra that is not
installed.

A GPU build of PyTorch adds NVIDIA's CUDA libraries, which are under NVIDIA's own terms, and `triton` (MIT).

| package | licence | needed by |
| --- | --- | --- |
"""


def read_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of Firth itself and of each extra that users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {CORE: project["dependencies"], **project["optional-dependencies"]}
    return {group: [Requirement(line) for line in lines] for group, lines in groups.items() if group not in TOOL_EXTRAS}


def iter_closure(requirements: list[Requirement]) -> Iterator[str]:
    """Yield the names of all packages that these requirements install, where they are installed."""
    waiting, seen = [(r, extra) for r in requirements for extra in ("", *r.extras)], set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen or PLATFORM_PACKAGES.fullmatch(name):
            continue
        seen.add((name, extra))
        yield name
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for line in lines:
            child = Requirement(line)
            if child.marker is None or child.marker.evaluate({"extra": extra}):
                waiting += [(child, inner) for inner in ("", *child.extras)]


def find_licence(name: str) -> str | None:
    """Return the licence that a package states, as an SPDX name where its metadata allows; None if not installed."""
    try:
        facts = metadata(name)
    except PackageNotFoundError:
        return None
    if expression := facts.get("License-Expression"):
        return " ".join(expression.split())
    classifiers = [
        value.rpartition(" :: ")[2] for value in facts.get_all("Classifier", []) if value.startswith("License :: OSI")
    ]
    stated = " and ".join(classifiers) if classifiers else (facts.get("License") or "").strip().split("\n")[0]
    known = [short for pattern, short in SHORT_NAMES if pattern.search(stated)]
    if known and len(classifiers) < 2 and not re.search(r" (AND|OR) ", stated):
        return known[0]
    return stated[:MAX_LICENCE_CHARS].strip() or "not stated: see its files"


def find_missing(requirements: list[Requirement]) -> list[str]:
    """Return the packages of these requirements that are not installed, of those that can be known."""
    return sorted(name for name in set(iter_closure(requirements)) if find_licence(name) is None)


def collect_rows(page: str) -> dict[str, tuple[str, str]]:
    """Return licence and group of each package.

    What a package that is not installed would install in turn stands on `page` alone: the rows of its group are kept.
    """
    written = {name: (licence, needed_by.split(", ")) for name, licence, needed_by in ROW.findall(page)}
    groups: dict[str, list[str]] = {}
    for group, requirements in read_requirements().items():
        label, names = name_group(group), set(iter_closure(requirements))
        if find_missing(requirements):
            names |= {name for name, (_, needed_by) in written.items() if label in needed_by}
        for name in names:
            groups.setdefault(name, []).append(label)
    rows = {}
    for name, labels in sorted(groups.items()):
        licence = find_licence(name) or (written[name][0] if name in written else None)
        if licence is not None:
            rows[name] = (licence, CORE if CORE in labels else ", ".join(labels))
    return rows


def name_group(group: str) -> str:
    return group if group == CORE else f"firth[{group}]"


def is_other_version(name: str) -> bool:
    """Whether another version is installed than that of constraints.txt: it may state another licence."""
    line = rf"^{name.replace('-', '[-_.]')}==(\S+)"
    pinned = re.search(line, CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE)
    try:
        return pinned is not None and Version(version(name)).public != pinned[1]
    except PackageNotFoundError:
        return False


def find_differences(page: str) -> list[str]:
    """Return a sentence for each package whose row is missing or states another licence."""
    written = {name: licence for name, licence, _ in ROW.findall(page)}
    told = [
        f"{name}: {licence}, and the page has {written.get(name, 'no row')}"
        for name, (licence, _) in collect_rows(page).items()
        if written.get(name) != licence and not (name in written and is_other_version(name))
    ]
    required = {canonicalize_name(r.name) for lines in read_requirements().values() for r in lines}
    return told + [f"{name}: required, not installed and without a row" for name in sorted(required - written.keys())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/licences.md: the licences of all packages of Firth.")
    parser.add_argument("--check", action="store_true", help="compare the page with the installed packages instead")
    args = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if args.check:
        differences = find_differences(page)
        print("\n".join(differences) or f"{PAGE.name}: as installed")
        return int(bool(differences))
    lines = [f"| `{name}` | {licence} | {group} |" for name, (licence, group) in collect_rows(page).items()]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{PAGE}: {len(lines)} packages")
    for group, requirements in read_requirements().items():
        if missing := find_missing(requirements):
            print(f"{name_group(group)} keeps its rows; not installed: {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
