"""The built-in corpus "pydocs": the docstrings of the Python standard library and of Firth's dependencies.

It needs no download, and its labels are natural: the package of a docstring, and its summary line.
"""

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

from firth.core.console import format_count, progress, say, warn
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import write_text
from firth.text import filters
from firth.text.documents import Example

PYDOCS_NAME = "pydocs"
STDLIB_PACKAGE = "python"  # name of the standard library among the packages
DIRECT_DEPENDENCIES = [
    *("torch", "numpy", "tokenizers", "safetensors", "typer", "rich", "PyYAML", "cattrs", "scikit-learn", "scipy"),
    *("sacrebleu", "rouge-score", "matplotlib", "sentencex"),
]
CACHE_FORMAT_VERSION = 1  # increase it when the same packages give other records

TEST_FOLDERS = {"test", "tests", "testing", "idle_test"}
THIRD_PARTY_FOLDERS = {"site-packages", "dist-packages"}  # inside the folder of the standard library
MAX_PARSE_WORKERS = 8
MIN_DOCSTRING_WORDS = 8  # words; a shorter one says little more than the name ("Return the size.")

PYDOCS_TASKS = ("classify", "pair", "text-to-text")
PYDOCS_SPLITS = ("train", "dev", "test")
PYDOCS_TEST_NAME = f"{PYDOCS_NAME}:test"  # a path of labelled examples: the test split
TEST_FRACTION = 0.025  # of the documents, beside the held-out ones; no corpus has them
MAX_PACKAGE_CLASSES = 10
MIN_DOCS_PER_CLASS = 200  # documents of a package that is a class
MAX_CLASSIFY_WORDS, MAX_BODY_WORDS = 60, 100
SUMMARY_WORDS_RANGE = range(3, 31)

DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# A heading without text before the end or the next heading of the same level.
EMPTY_HEADING = re.compile(r"^[^\n]+\n([-=~^])\1{2,}\n*(?=\Z|[^\n]+\n\1{3,}$)", re.MULTILINE)
HEADING_RULE = re.compile(r"[-=~^*_]{3,}")
SIGNATURE_LINE = re.compile(r"[\w.]+\(.*\)")


class DocstringRecord(NamedTuple):
    """A docstring, its top-level package, and the name and parameters of the documented object."""

    package: str
    name: str
    text: str
    parameters: tuple[str, ...]


class SourceModule(NamedTuple):
    """A source file, its module name and its package."""

    package: str
    name: str
    path: str


# The corpus


@cache
def load_pydocs() -> list[DocstringRecord]:
    """Return the whole built-in corpus, read once per process."""
    return read_docstrings([STDLIB_PACKAGE, *find_dependencies()])


def read_docstrings(packages: Sequence[str], workers: int | None = None) -> list[DocstringRecord]:
    """Return the docstrings of installed packages, from the cache if these versions were read before.

    A document is a docstring of at least 8 words, dedented, without doctests: they are code, and their imports would
    reveal the package. Signature lines, parameter lists and markup stay. Exact duplicates are dropped. The order is
    that of the packages and files, for any number of processes. The fingerprint identifies the corpus.
    """
    path = pydocs_cache_path(packages)
    records = read_pydocs_cache(path)
    if records is None:
        records = drop_duplicate_docstrings(parse_modules(find_source_modules(packages), workers))
        write_pydocs_cache(path, records)
    num_packages = len({r.package for r in records})
    megabytes = sum(len(r.text.encode()) for r in records) / 1e6
    say(
        f"{PYDOCS_NAME}: {format_count(len(records), 'document')} ({megabytes:.1f} MB of text) from "
        f"{format_count(num_packages, 'package')} with Python {platform.python_version()}, "
        f"fingerprint {pydocs_fingerprint(records)}"
    )
    return records


def pydocs_fingerprint(records: Iterable[DocstringRecord]) -> str:
    """Return 12 hexadecimal digits that depend on the texts and their order."""
    digest = blake2b(digest_size=6)
    for record in records:
        digest.update(filters.text_fingerprint(record.text))
    return digest.hexdigest()


def drop_duplicate_docstrings(records: Iterable[DocstringRecord]) -> list[DocstringRecord]:
    unique = filters.ExactDedup()
    return [record for record in records if unique.is_new(record.text)]


# Which packages and files


def find_dependencies() -> list[str]:
    """Return the installed direct and indirect dependencies of Firth, without extras.

    So the corpus does not depend on optional packages.
    """
    from packaging.utils import canonicalize_name

    dependencies: set[str] = set()
    waiting = find_requirements("firth") or list(DIRECT_DEPENDENCIES)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in dependencies and installed_version(name) is not None:
            dependencies.add(name)
            waiting += find_requirements(name)
    return sorted(dependencies)


def find_requirements(package: str) -> list[str]:
    """Return the requirements of a package on this machine; none if it is not installed."""
    from packaging.requirements import Requirement  # 40 ms, at every start of the command line

    try:
        requirements = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    return [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def installed_version(package: str) -> str | None:
    if package == STDLIB_PACKAGE:
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_source_modules(packages: Iterable[str]) -> list[SourceModule]:
    """Return the source files of packages, without tests, in a fixed order."""
    return [
        m
        for package in packages
        for m in (find_stdlib_modules() if package == STDLIB_PACKAGE else find_package_modules(package))
    ]


def find_package_modules(package: str) -> list[SourceModule]:
    """Return the source files of a distribution, without tests."""
    distribution = metadata.distribution(package)
    if distribution.files is None:
        warn(f"{PYDOCS_NAME}: {package} is left out, since it does not list its files.")
    files = (f for f in distribution.files or [] if f.suffix == ".py" and ".." not in f.parts)
    kept = sorted((f for f in files if not TEST_FOLDERS.intersection(f.parts)), key=str)
    return [SourceModule(f.parts[0].removesuffix(".py"), dotted_module_name(f.parts), str(f.locate())) for f in kept]


def find_stdlib_modules() -> list[SourceModule]:
    """Return the source files of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in TEST_FOLDERS | THIRD_PARTY_FOLDERS]
        files += [Path(parent, name).relative_to(root) for name in names if name.endswith(".py")]
    return [SourceModule(STDLIB_PACKAGE, dotted_module_name(f.parts), str(root / f)) for f in sorted(files)]


def dotted_module_name(parts: Sequence[str]) -> str:
    """Return the module name of a path.

    >>> dotted_module_name(("numpy", "linalg", "__init__.py"))
    'numpy.linalg'
    """
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


# Files to records


def parse_modules(files: Sequence[SourceModule], workers: int | None = None) -> Iterator[DocstringRecord]:
    """Yield the docstrings of all files in order, parsed in several processes on Linux.

    A spawned process would run the caller's script again; a forked one does not, but only Linux forks safely.
    """
    workers = workers or (min(len(os.sched_getaffinity(0)), MAX_PARSE_WORKERS) if sys.platform == "linux" else 1)
    broken = 0
    with (
        progress("reading the documentation of installed packages", "files", len(files)) as p,
        process_map(workers) as run,
    ):
        for records in run(parse_docstrings, files):
            broken += records is None
            yield from records or []
            p.advance()
    if broken:
        say(f"{PYDOCS_NAME}: {format_count(broken, 'file')} left out that this Python cannot parse")


@contextmanager
def process_map(workers: int) -> Iterator[Any]:
    """Yield a `map` over several processes or in this one, without garbage collection: syntax trees have no cycles."""
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
            # Python warns of forks beside threads; these workers only parse and take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            with ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=init_parse_worker) as pool:
                yield partial(pool.map, chunksize=16)


def init_parse_worker() -> None:
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C


def parse_docstrings(module: SourceModule) -> list[DocstringRecord] | None:
    """Return the docstrings of one file from its syntax tree, without importing it; None if it does not parse."""
    source = Path(module.path).read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []  # avoids parsing a fifth of the files
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes = [(module.name, tree), *iter_definitions(tree, module.name)]
    texts = [(name, node, strip_doctests(ast.get_docstring(node) or "")) for name, node in nodes]
    return [
        DocstringRecord(module.package, name, text, get_parameter_names(node))
        for name, node, text in texts
        if len(text.split()) >= MIN_DOCSTRING_WORDS
    ]


def iter_definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, DefinitionNode]]:
    """Yield every class and function under a node with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DefinitionNode):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from iter_definitions(child, name)
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from iter_definitions(child, prefix)


def get_parameter_names(node: ast.AST) -> tuple[str, ...]:
    """Return the parameter names of a function, or of a class's `__init__`, without self and cls."""
    if isinstance(node, ast.ClassDef):
        inits = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        return get_parameter_names(inits[0]) if inits else ()
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    a = node.args
    every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return tuple(arg.arg for arg in every if arg is not None and arg.arg not in ("self", "cls"))


def strip_doctests(docstring: str) -> str:
    """Remove doctests, and headings without text under them.

    >>> strip_doctests("Add.\\n\\nExamples\\n--------\\n>>> add(1, 2)\\n3")
    'Add.'
    """
    kept, inside = [], False
    for line in docstring.split("\n"):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if not inside:
            kept.append(line.rstrip())
    text = EMPTY_HEADING.sub("", "\n".join(kept))
    return filters.replace_lone_surrogates(re.sub(r"\n{3,}", "\n\n", text)).strip()


# The cache


def cache_folder() -> Path:
    """Return the cache folder: $FIRTH_CACHE, or `firth` in the user's cache folder."""
    if own := os.environ.get("FIRTH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firth"


def pydocs_cache_path(packages: Iterable[str]) -> Path:
    """Return a path that is unique for the packages, their versions and the format."""
    facts = json.dumps(
        [CACHE_FORMAT_VERSION, platform.python_version(), [(name, installed_version(name)) for name in packages]]
    )
    return cache_folder() / f"{PYDOCS_NAME}-{blake2b(facts.encode(), digest_size=8).hexdigest()}.jsonl"


def write_pydocs_cache(path: Path, records: Sequence[DocstringRecord]) -> None:
    """Write a line with the fingerprint, then a line per record; warn if the cache cannot be written."""
    rows = [{"fingerprint": pydocs_fingerprint(records)}, *records]
    own = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may write at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(own, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        os.replace(own, path)
    except OSError as e:
        warn(f"{PYDOCS_NAME}: not cached, since {path.parent} cannot be written ({e.strerror}).")


def read_pydocs_cache(path: Path) -> list[DocstringRecord] | None:
    """Return the cached records, or None if the cache is missing or damaged."""
    if not path.is_file():
        return None
    try:
        head, *rows = (json.loads(line) for line in path.read_bytes().splitlines())
        records = [DocstringRecord(package, name, text, tuple(names)) for package, name, text, names in rows]
        if head["fingerprint"] == pydocs_fingerprint(records):
            return records
    except (ValueError, TypeError, KeyError):
        pass
    warn(f"{path}: damaged. Reading the documentation again.")
    return None


# Natural labels


def make_pydocs_examples(task: str, split: str, records: Sequence[DocstringRecord] | None = None) -> list[Example]:
    """Return examples with natural labels; `split` "dev" has the documents that pretraining holds out.

    "test" has documents that are in no corpus. Settings were chosen on "dev", so figures are reported on "test".
    "classify": the package of a docstring's first 60 words. "pair": whether a summary line belongs to a body.
    "text-to-text": the summary line of a body. The order is a fixed shuffle, so that the first k examples of a class
    are a uniform sample.
    """
    if task not in PYDOCS_TASKS:
        raise UserError(f"{PYDOCS_NAME} has no task {quote(task)}. {did_you_mean(task, PYDOCS_TASKS)}")
    records = load_pydocs() if records is None else records
    chosen = select_split(records, split)
    if task == "classify":
        examples = make_classify_examples(chosen, select_package_classes(records))
        if split == "test":  # two long docstrings may begin with the same words
            known = {first_words_on_one_line(r.text, MAX_CLASSIFY_WORDS) for r in records if split_of(r.text) != split}
            examples = [e for e in examples if e.texts[0] not in known]
        return examples
    return make_pair_examples(chosen) if task == "pair" else make_summary_examples(chosen)


def select_split(records: Iterable[DocstringRecord], split: str) -> list[DocstringRecord]:
    """Return the records of a split, shuffled by the hash of their text."""
    if split not in PYDOCS_SPLITS:
        raise UserError(f"{PYDOCS_NAME} has no split {quote(split)}. {did_you_mean(split, PYDOCS_SPLITS)}")
    chosen = [r for r in records if split_of(r.text) == split]
    return sorted(chosen, key=lambda record: filters.text_fingerprint(record.text))


def split_of(text: str) -> str:
    """Return the split of a document, which depends on its text alone."""
    if filters.is_held_out(text, filters.HELD_OUT_FRACTION):
        return "dev"
    return "test" if filters.is_held_out(text, filters.HELD_OUT_FRACTION + TEST_FRACTION) else "train"


def select_package_classes(records: Iterable[DocstringRecord]) -> list[str]:
    """Return the largest packages, at most ten, with enough documents each."""
    sizes = Counter(record.package for record in records)
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_PACKAGE_CLASSES]
    return sorted(name for name in largest if sizes[name] >= MIN_DOCS_PER_CLASS)


def make_classify_examples(records: Sequence[DocstringRecord], labels: Sequence[str]) -> list[Example]:
    """Classify the package. No class has more than twice the examples of the smallest, which keeps classes balanced."""
    sizes = Counter(record.package for record in records)
    remaining = dict.fromkeys(labels, 2 * min((sizes[label] for label in labels), default=0))
    examples = []
    for record in records:
        if remaining.get(record.package):
            remaining[record.package] -= 1
            text = first_words_on_one_line(record.text, MAX_CLASSIFY_WORDS)
            examples.append(Example(record.name, (text,), record.package))
    return examples


def make_pair_examples(records: Sequence[DocstringRecord]) -> list[Example]:
    """Pair summaries with bodies: every second example has the body of the one before it, from the same package.

    So each body occurs once with its own summary and once with another, and alone does not reveal the label. Bodies
    are unique, so that another summary is always wrong.
    """
    by_package: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for record in records:
        if parts := split_summary_and_body(record):
            summary, body = parts
            by_package[record.package].setdefault(body, (record.name, summary))
    examples = []
    for by_body in by_package.values():
        rows = [(name, summary, body) for body, (name, summary) in by_body.items()]
        for (name, summary, body), (other_name, other_summary, _) in zip(rows[::2], rows[1::2], strict=False):
            examples.append(Example(name, (summary, body), "yes"))
            examples.append(Example(other_name, (other_summary, body), "no"))
    return sorted(examples, key=lambda example: filters.text_fingerprint("\n".join(example.texts)))


def make_summary_examples(records: Sequence[DocstringRecord]) -> list[Example]:
    parts = [(record.name, split_summary_and_body(record)) for record in records]
    return [Example(name, (summary_body[1],), summary_body[0]) for name, summary_body in parts if summary_body]


def split_summary_and_body(record: DocstringRecord) -> tuple[str, str] | None:
    """Return the first paragraph and the rest, if the first is a line of prose and the rest is long enough."""
    first, _, rest = record.text.partition("\n\n")
    summary, body = first_words_on_one_line(first, len(first)), first_words_on_one_line(rest, MAX_BODY_WORDS)
    usable = len(summary.split()) in SUMMARY_WORDS_RANGE and len(body.split()) >= MIN_DOCSTRING_WORDS
    return (summary, body) if usable and not SIGNATURE_LINE.match(summary) else None


def first_words_on_one_line(text: str, max_words: int) -> str:
    """Return the first words on one line, without the rules under headings."""
    return " ".join([word for word in text.split() if not HEADING_RULE.fullmatch(word)][:max_words])
