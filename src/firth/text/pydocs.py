"""The built-in corpus: the documentation inside the Python packages that Firth stands on."""

from __future__ import annotations

import ast
import gc
import json
import os
import platform
import re
import signal
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from hashlib import blake2b
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from firth.console import count, progress, say, warn
from firth.errors import UserError, nearest
from firth.files import write_text
from firth.text import clean
from firth.text.kinds import Example

NAME = "pydocs"
PYTHON = "python"  # the standard library, as a package among the others
DIRECT = [
    *("torch", "numpy", "tokenizers", "safetensors", "typer", "rich", "PyYAML", "cattrs", "scikit-learn", "scipy"),
    *("sacrebleu", "rouge-score", "matplotlib", "sentencex"),
]
FORMAT = 1  # of the cache; a new one whenever other records come out of the same packages

TEST_FOLDERS = {"test", "tests", "testing", "idle_test"}
OTHER_PEOPLES_FOLDERS = {"site-packages", "dist-packages"}  # inside the folder of the standard library
MOST_WORKERS = 8
SHORTEST = 8  # words: below it a docstring says little more than the name ("Return the size.")

TASKS = ("classify", "pair", "text-to-text")
PARTS = ("train", "dev")
MOST_CLASSES = 10
ENOUGH = 200  # documents that make a package a class
CLASSIFY_WORDS, BODY_WORDS, TAGGED_WORDS = 60, 100, 100
SUMMARY_WORDS = range(3, 31)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# A heading with nothing under it before the text ends or the next heading of the same level comes.
EMPTY_HEADING = re.compile(r"^[^\n]+\n([-=~^])\1{2,}\n*(?=\Z|[^\n]+\n\1{3,}$)", re.MULTILINE)
RULE = re.compile(r"[-=~^*_]{3,}")
SIGNATURE = re.compile(r"[\w.]+\(.*\)")
TOKEN = re.compile(r"\w+|[^\w\s]")


class Record(NamedTuple):
    """One docstring: its top-level package, the name of what it documents, and that one's parameters."""

    package: str
    name: str
    text: str
    parameters: tuple[str, ...]


class Module(NamedTuple):
    """A file to read, the name it would be imported by, and its package."""

    package: str
    name: str
    path: str


# The corpus


@cache
def everything() -> list[Record]:
    """The whole built-in corpus, read once per process."""
    return read([PYTHON, *dependencies()])


def read(packages: Sequence[str], workers: int | None = None) -> list[Record]:
    """The docstrings of some installed packages, from the cache if these versions were read before.

    One document is one docstring of at least 8 words, dedented, without its doctests: they are code and its
    output, not language, and their imports would give the package away. Signature lines, parameter lists and
    markup stay, as what people write. Exact duplicates go. The order is that of the packages, then of the files:
    the number of processes does not change it. The fingerprint tells two corpora apart.
    """
    path = cache_path(packages)
    records = read_cache(path)
    if records is None:
        records = without_duplicates(parse(modules(packages), workers))
        write_cache(path, records)
    names, megabytes = {r.package for r in records}, sum(len(r.text.encode()) for r in records) / 1e6
    say(
        f"{NAME}: {count(len(records), 'document')} ({megabytes:.1f} MB of text) from {count(len(names), 'package')} "
        f"with Python {platform.python_version()}, fingerprint {fingerprint(records)}"
    )
    return records


def fingerprint(records: Iterable[Record]) -> str:
    """Twelve digits that differ when any text or their order does."""
    digest = blake2b(digest_size=6)
    for record in records:
        digest.update(clean.fingerprint(record.text))
    return digest.hexdigest()


def without_duplicates(records: Iterable[Record]) -> list[Record]:
    unique = clean.Unique()
    return [record for record in records if unique.is_new(record.text)]


# Which packages and files


def dependencies() -> list[str]:
    """The packages that Firth needs and those that they need, installed ones only; extras are not followed.

    So the corpus is the same whether or not the optional packages are there.
    """
    found: set[str] = set()
    waiting = needs("firth") or list(DIRECT)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found and version(name) is not None:
            found.add(name)
            waiting += needs(name)
    return sorted(found)


def needs(package: str) -> list[str]:
    """What an installed package requires on this machine; of one that is not installed, nothing."""
    try:
        requirements = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    return [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def version(package: str) -> str | None:
    if package == PYTHON:
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def modules(packages: Iterable[str]) -> list[Module]:
    """The source files of packages, without tests, in a fixed order."""
    return [m for package in packages for m in (python_modules() if package == PYTHON else own_modules(package))]


def own_modules(package: str) -> list[Module]:
    """The files that a distribution lists as its own, outside test folders."""
    distribution = metadata.distribution(package)
    if distribution.files is None:
        warn(f"{NAME}: {package} is left out, as it does not list its files.")
    files = (f for f in distribution.files or [] if f.suffix == ".py" and ".." not in f.parts)
    kept = sorted((f for f in files if not TEST_FOLDERS.intersection(f.parts)), key=str)
    return [Module(f.parts[0].removesuffix(".py"), dotted(f.parts), str(f.locate())) for f in kept]


def python_modules() -> list[Module]:
    """The files of the standard library, outside test folders and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in TEST_FOLDERS | OTHER_PEOPLES_FOLDERS]
        found += [Path(parent, name).relative_to(root) for name in names if name.endswith(".py")]
    return [Module(PYTHON, dotted(f.parts), str(root / f)) for f in sorted(found)]


def dotted(parts: Sequence[str]) -> str:
    """
    >>> dotted(("numpy", "linalg", "__init__.py"))
    'numpy.linalg'
    """
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


# Files to records


def parse(files: Sequence[Module], workers: int | None = None) -> Iterator[Record]:
    """The docstrings of all files in order, read in several processes where that can be done safely.

    A forked process needs nothing from the caller's script; other ways of starting one would run that script
    again. Only Linux forks safely, so elsewhere one process reads everything.
    """
    workers = workers or (min(len(os.sched_getaffinity(0)), MOST_WORKERS) if sys.platform == "linux" else 1)
    broken = 0
    with progress("reading the documentation of installed packages", "files", len(files)) as p, mapped(workers) as run:
        for records in run(docstrings, files):
            broken += records is None
            yield from records or []
            p.advance()
    if broken:
        say(f"{NAME}: {count(broken, 'file')} left out that this Python does not parse")


@contextmanager
def mapped(workers: int) -> Iterator[Any]:
    """`map`, over several processes or in this one. Syntax trees have no cycles: without the collector it is faster."""
    if workers == 1:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield map
        finally:
            if collecting:
                gc.enable()
    else:
        with warnings.catch_warnings():
            # Python warns of forks beside threads; ours only parse, and take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=start_worker) as pool:
                yield partial(pool.map, chunksize=16)


def start_worker() -> None:
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits


def docstrings(module: Module) -> list[Record] | None:
    """The docstrings of one file, by its syntax alone: nothing is imported or run. None if it does not parse."""
    source = Path(module.path).read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []  # saves the parsing of a fifth of the files
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escape sequences
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes = [(module.name, tree), *definitions(tree, module.name)]
    texts = [(name, node, prose(ast.get_docstring(node) or "")) for name, node in nodes]
    return [
        Record(module.package, name, text, parameters(node))
        for name, node, text in texts
        if len(text.split()) >= SHORTEST
    ]


def definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Every class and function under a node, with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from definitions(child, name)
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from definitions(child, prefix)


def parameters(node: ast.AST) -> tuple[str, ...]:
    """The names of a function's parameters, or for a class those of its `__init__`, without self and cls."""
    if isinstance(node, ast.ClassDef):
        made_by = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        return parameters(made_by[0]) if made_by else ()
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    a = node.args
    every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return tuple(arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls"))


def prose(docstring: str) -> str:
    """A docstring without its doctests, and without the headings that are left with nothing under them.

    >>> prose("Add.\\n\\nExamples\\n--------\\n>>> add(1, 2)\\n3")
    'Add.'
    """
    kept, inside = [], False
    for line in docstring.split("\n"):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if not inside:
            kept.append(line.rstrip())
    text = EMPTY_HEADING.sub("", "\n".join(kept))
    return clean.repair(re.sub(r"\n{3,}", "\n\n", text)).strip()


# The cache


def cache_folder() -> Path:
    """Where things are kept that can be made again: $FIRTH_CACHE, or the user's cache folder."""
    if own := os.environ.get("FIRTH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firth"


def cache_path(packages: Iterable[str]) -> Path:
    """A name of its own for every set of packages, versions and format."""
    facts = json.dumps([FORMAT, platform.python_version(), [(name, version(name)) for name in packages]])
    return cache_folder() / f"{NAME}-{blake2b(facts.encode(), digest_size=8).hexdigest()}.jsonl"


def write_cache(path: Path, records: Sequence[Record]) -> None:
    """A line with the fingerprint, then a line per record. A cache that cannot be written is said, and done without."""
    rows = [{"fingerprint": fingerprint(records)}, *records]
    own = path.with_name(f"{path.name}.{os.getpid()}")  # two processes may come here at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(own, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        os.replace(own, path)
    except OSError as e:
        warn(f"{NAME}: not kept for the next time, as {path.parent} cannot be written ({e.strerror}).")


def read_cache(path: Path) -> list[Record] | None:
    """What `write_cache` wrote, or None if there is nothing or not that."""
    if not path.is_file():
        return None
    try:
        head, *rows = (json.loads(line) for line in path.read_bytes().splitlines())
        records = [Record(package, name, text, tuple(names)) for package, name, text, names in rows]
        if head["fingerprint"] == fingerprint(records):
            return records
    except (ValueError, TypeError, KeyError):
        pass
    warn(f"{path}: damaged, so the documentation is read again.")
    return None


# Natural labels


def examples(task: str, part: str, records: Sequence[Record] | None = None) -> list[Example]:
    """Examples whose labels came with the text; `part` "dev" has the documents that pretraining holds out.

    "classify": which package is this from (the first 60 words)? "pair": does this summary line belong to this
    body? "text-to-text": the body to its summary line. The order is a fixed shuffle, so that the first k examples
    of a class are a fair sample.
    """
    if task not in TASKS:
        raise UserError(f"{NAME} has no task {task!r}. {nearest(task, TASKS)}")
    records = everything() if records is None else records
    chosen = choose(records, part)
    if task == "classify":
        return classify(chosen, classes(records))
    return pair(chosen) if task == "pair" else summarise(chosen)


def choose(records: Iterable[Record], part: str) -> list[Record]:
    """The records of a part, shuffled by what they say."""
    if part not in PARTS:
        raise UserError(f"{NAME} has no part {part!r}. {nearest(part, PARTS)}")
    chosen = [r for r in records if clean.held_out(r.text, clean.HELD_OUT) == (part == "dev")]
    return sorted(chosen, key=lambda record: clean.fingerprint(record.text))


def classes(records: Iterable[Record]) -> list[str]:
    """The packages with most documents, at most ten of those that have enough."""
    sizes = Counter(record.package for record in records)
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:MOST_CLASSES]
    return sorted(name for name in largest if sizes[name] >= ENOUGH)


def classify(chosen: Sequence[Record], labels: Sequence[str]) -> list[Example]:
    """Which package: no class has more than twice the examples of the smallest, so that none is a good guess."""
    sizes = Counter(record.package for record in chosen)
    room = dict.fromkeys(labels, 2 * min((sizes[label] for label in labels), default=0))
    made = []
    for record in chosen:
        if room.get(record.package):
            room[record.package] -= 1
            made.append(Example(record.name, (flat(record.text, CLASSIFY_WORDS),), record.package))
    return made


def pair(chosen: Sequence[Record]) -> list[Example]:
    """Summary and body: every second example has the body of the one before it, from the same package.

    So each body that is used is used twice, once rightly and once wrongly, and alone gives nothing away. Of
    docstrings with the same body one is taken, so that a wrong body is wrong.
    """
    by_package: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for record in chosen:
        if parts := summary_and_body(record):
            summary, body = parts
            by_package[record.package].setdefault(body, (record.name, summary))
    made = []
    for by_body in by_package.values():
        rows = [(name, summary, body) for body, (name, summary) in by_body.items()]
        for (name, summary, body), (other_name, other_summary, _) in zip(rows[::2], rows[1::2], strict=False):
            made.append(Example(name, (summary, body), "yes"))
            made.append(Example(other_name, (other_summary, body), "no"))
    return sorted(made, key=lambda example: clean.fingerprint("\n".join(example.texts)))


def summarise(chosen: Sequence[Record]) -> list[Example]:
    parts = [(record.name, summary_and_body(record)) for record in chosen]
    return [Example(name, (found[1],), found[0]) for name, found in parts if found]


def tagging(part: str, records: Sequence[Record] | None = None) -> list[tuple[list[str], list[str]]]:
    """Words of docstrings, with B-PARAM for those that are parameters of what is documented and O for the rest."""
    made = []
    for record in choose(everything() if records is None else records, part):
        tokens = TOKEN.findall(flat(record.text, TAGGED_WORDS))
        tags = ["B-PARAM" if token in record.parameters else "O" for token in tokens]
        if "B-PARAM" in tags:
            made.append((tokens, tags))
    return made


def summary_and_body(record: Record) -> tuple[str, str] | None:
    """The first paragraph and the rest, if the former is a line of prose and the latter says something."""
    first, _, rest = record.text.partition("\n\n")
    summary, body = flat(first, len(first)), flat(rest, BODY_WORDS)
    usable = len(summary.split()) in SUMMARY_WORDS and len(body.split()) >= SHORTEST
    return (summary, body) if usable and not SIGNATURE.match(summary) else None


def flat(text: str, words: int) -> str:
    """The first words on one line, without the rules under headings."""
    return " ".join([word for word in text.split() if not RULE.fullmatch(word)][:words])
