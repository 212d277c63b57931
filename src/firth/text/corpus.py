"""Read files, folders, standard input and datasets as one stream of documents."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from firth.console import count, progress, warn
from firth.errors import UserError, nearest
from firth.text import pydocs
from firth.text.clean import Cleaning, repair
from firth.text.hub import PREFIX, HubDataset
from firth.text.kinds import Document as Document
from firth.text.lines import PACKINGS, Meter, known_encoding, lines, refuse
from firth.text.normalise import normalise
from firth.text.records import READERS, Records, extension, parquet_records, rename, short, text_in, value_in

READABLE = (".txt", *READERS, ".parquet")
KINDS = ", ".join(READABLE)
DOCUMENTS = ("auto", "blank-line", "file")
STDIN = "-"
READING = ("documents", "columns", "encoding", *(f.name for f in fields(Cleaning) if f.init))  # arguments of Corpus
SIDES = ("text_a", "text_b")
WHOLE = 2**20  # characters: a file in a folder up to this long is one document
LONGEST = WHOLE  # characters, two novels: a longer document is cut, as what its tokens take must fit in memory


class Source(NamedTuple):
    """One file, whether the user named it or it was found in a folder, and what it is called."""

    path: Path
    named: bool
    name: str


class Corpus:
    """The documents of some files, folders and datasets. Every iteration reads them again, never holding more than one.

    `documents` says how a .txt file becomes documents. "blank-line": a blank line ends one. "file": the file is
    one. "auto": a file that was named, or that is over 1 MiB, is split on blank lines; a smaller one in a folder
    is one document. A .jsonl file has one document per line; .csv, .tsv and .parquet have one per row. Their text is
    in the column `text` or the one that `columns={"text": "body"}` names. Beside or instead of it a column `words` may
    list the words of the text, for languages written without spaces. Columns `text_a` and `text_b`, where there is no
    `text` or where `columns` names them, are the two sides of a document. A document over 1 Mi characters is cut.

    The text is kept as it is, but for the byte order mark, Windows line ends, and the line ends after a document.
    What `Cleaning` may change or leave out, on request, are the further arguments: `normalize`, `min_words` and so on.

    The path "-" is standard input, kept in a temporary file while it is needed: .jsonl if it begins with "{", or else
    plain text. "hf:owner/name[:config][:split][#column]" is a dataset. "pydocs" is the built-in corpus (write
    "./pydocs" for a folder of that name).
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        documents: str = "auto",
        columns: Mapping[str, str] | None = None,
        encoding: str = "utf-8",
        **cleaning: Any,
    ) -> None:
        if documents not in DOCUMENTS:
            raise UserError(f"documents: no way called {documents!r}. {nearest(documents, DOCUMENTS)}")
        self.paths = [paths] if isinstance(paths, str | Path) else list(paths)
        self.documents = documents
        self.columns = rename(columns, ["text", "words", *SIDES])
        self.named = frozenset(columns or {})  # what the user named must be there
        if "text" in self.named and self.named.intersection(SIDES):
            raise UserError("--columns names both text and text_a or text_b. Name the text, or its two sides.")
        self.encoding = known_encoding(encoding)
        self.cleaning = Cleaning(**cleaning)
        self.built_in = pydocs.NAME in self.paths
        self.datasets = [HubDataset(path) for path in self.paths if isinstance(path, str) and path.startswith(PREFIX)]
        others = {pydocs.NAME, *(dataset.path for dataset in self.datasets)}
        self.files = [source for path in self.paths if path not in others for source in self._find(path)]
        self.tally: Counter[str] = Counter()
        self.meter = Meter()

    def _find(self, path: str | Path) -> list[Source]:
        if path != STDIN:
            return find(Path(path))
        if self.paths.count(STDIN) > 1:
            raise UserError("Standard input (-) can be read once, and is named twice.")
        self.spool = TemporaryDirectory(prefix="firth-stdin-")  # removed with this corpus
        return [Source(spooled(sys.stdin.buffer, Path(self.spool.name)), named=True, name="stdin")]

    @cached_property
    def bytes(self) -> int:
        """Size on disk (of the built-in corpus, its text), to tell how far reading has come."""
        built_in = sum(len(record.text.encode()) for record in pydocs.everything()) if self.built_in else 0
        datasets = sum(dataset.bytes for dataset in self.datasets)
        return built_in + datasets + sum(source.path.stat().st_size for source in self.files)

    @property
    def position(self) -> int | None:
        """How many of `bytes` have been read so far; None where a dataset does not tell."""
        return None if self.datasets else self.meter.bytes

    def __iter__(self) -> Iterator[Document]:
        tally: Counter[str] = Counter()
        self.tally, self.meter = tally, Meter()
        self.cleaning.forget()
        files = (self._read(source, tally) for source in self.files)
        datasets = (self._read_dataset(dataset, tally) for dataset in self.datasets)
        for document in chain(self._built_in(tally), chain.from_iterable(files), chain.from_iterable(datasets)):
            if not all(text.strip() for text in document.sides):
                tally["empty"] += 1
            elif self.cleaning.stays(document.sides):
                tally["documents"] += 1
                yield document
        if not tally["documents"]:
            named = ", ".join(map(str, self.paths)) or "no path given"
            dropped = "; ".join(self.cleaning.notes()) or "nothing but empty text"
            raise UserError(f"{named}: no documents, {dropped}. Name files that have some.")

    def texts(self) -> Iterator[str]:
        """Every text: those of the documents, and of their second sides."""
        return chain.from_iterable(document.sides for document in self)

    def describe(self) -> str:
        """How many documents have been read so far, how the files became documents, and what was left out."""
        tally = self.tally
        single = Path(self.files[0].name).name if len(self.files) == 1 else None
        ways = {
            "split": "split on blank lines",
            "whole": "whole",
            "lines": "with one document per line",
            "rows": "with one document per row",
        }
        parts = [f"{single or count(tally[way], 'file')} {phrase}" for way, phrase in ways.items() if tally[way]]
        if tally["built-in"]:
            parts.append("the built-in pydocs")
        parts += [dataset.describe() for dataset in self.datasets if tally[dataset.path]]
        notes = {
            "sides": f"with two sides ({self.columns['text_a']} and {self.columns['text_b']})",
            "words": "with words of their own" if tally["words"] > 1 else "with words of its own",
            "not words": f"with {self.columns['words']!r} that is no list of words and is not read",
            "empty": "empty and skipped",
            "cut": f"cut because {'they are' if tally['cut'] > 1 else 'it is'} over {LONGEST:,} characters",
            "repaired": "with half characters (lone surrogates) replaced by U+FFFD",
        }
        sentence = f"{count(tally['documents'], 'document')}: " + (", ".join(parts) or "nothing read yet")
        said = [f"{tally[key]:,} {note}" for key, note in notes.items() if tally[key]]
        return "; ".join([sentence, *said, *self.cleaning.notes()])

    def _built_in(self, tally: Counter[str]) -> Iterator[Document]:
        if self.built_in:
            tally["built-in"] += 1
            for record in pydocs.everything():
                self.meter.through += len(record.text.encode())
                yield Document(self.cleaning.normal(record.text), f"{pydocs.NAME}:{record.name}")

    def _read(self, source: Source, tally: Counter[str]) -> Iterator[Document]:
        kind = extension(source.path)
        if kind == ".txt":
            return self._read_text(source, tally)
        tally["lines" if kind == ".jsonl" else "rows"] += 1
        if kind == ".parquet":
            records = parquet_records(source.path, self.columns.values(), self.meter)
            return self._read_records(records, f"{source.name}:row ", self.columns, tally)
        return self._read_records(
            READERS[kind](source.path, self.encoding, source.name, self.meter), f"{source.name}:", self.columns, tally
        )

    def _read_dataset(self, dataset: HubDataset, tally: Counter[str]) -> Iterator[Document]:
        tally[dataset.path] += 1
        columns = self.columns if dataset.column is None else {**self.columns, "text": dataset.column}
        return self._read_records(dataset.records(), f"{dataset.path}:row ", columns, tally)

    def _read_text(self, source: Source, tally: Counter[str]) -> Iterator[Document]:
        stream = lines(source.path, self.encoding, LONGEST, source.name, self.meter)
        split = self.documents == "blank-line" or (self.documents == "auto" and source.named)
        if self.documents == "auto" and not source.named:
            head = take(stream, WHOLE)
            split = sum(map(len, head)) > WHOLE
            stream = chain(head, stream)
        tally["split" if split else "whole"] += 1
        for block in blocks(stream, split, LONGEST):
            tally["cut"] += block.cut
            where = f"{source.name}:{block.line}" if split else source.name
            yield Document(self.cleaning.normal(block.text.rstrip("\n")), where)

    def _read_records(
        self, records: Records, place: str, columns: Mapping[str, str], tally: Counter[str]
    ) -> Iterator[Document]:
        for number, record in records:
            document = self._document(record, columns, f"{place}{number}", tally)
            tally["sides"] += document.second is not None
            tally["words"] += document.word_starts is not None
            yield from self._cut(document, tally)

    def _cut(self, document: Document, tally: Counter[str]) -> Iterator[Document]:
        """A document in pieces if it is too long; one that has words or sides to keep together stays whole."""
        if len(document.text) <= LONGEST or document.word_starts is not None or document.second is not None:
            yield document
            return
        pieces = (document.text[start : start + LONGEST] for start in range(0, len(document.text), LONGEST))
        for block in blocks(pieces, False, LONGEST):
            tally["cut"] += block.cut
            yield Document(block.text, document.source)

    def _document(
        self, record: Mapping[str, Any], columns: Mapping[str, str], where: str, tally: Counter[str]
    ) -> Document:
        """A record: a text, with or without its words, or two sides."""

        def whole(text: str) -> str:
            repaired = repair(text)
            tally["repaired"] += repaired != text
            return self.cleaning.normal(repaired)

        def read(role: str) -> str:
            return whole(text_in(record, role, columns[role], where))

        def has(role: str) -> bool:
            return role in self.named or columns[role] in record

        words = self._words(record, where, tally)
        if self.named.intersection(SIDES) or (any(map(has, SIDES)) and not has("text") and "words" not in self.named):
            if words is not None:
                raise UserError(f"{where}: words and two sides. Words are read beside a single text only.")
            return Document(read("text_a"), where, second=read("text_b"))
        if words is None:
            return Document(read("text"), where)
        text = read("text") if has("text") else whole(" ".join(words))
        starts = find_words([normalise(repair(word), self.cleaning.forms) for word in words], text, where)
        return Document(text, where, starts)

    def _words(self, record: Mapping[str, Any], where: str, tally: Counter[str]) -> list[str] | None:
        """The words that a record lists. What is no list, a count perhaps, is an error only if the user named it."""
        column, is_named = self.columns["words"], "words" in self.named
        value = value_in(record, "words", column, where) if is_named else record.get(column)
        if not isinstance(value, list) and not is_named:
            tally["not words"] += value is not None
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise UserError(f"{where}: column {column!r} holds {short(value)}, which is no list of words.")
        return value


def find_words(words: Sequence[str], text: str, where: str) -> tuple[int, ...]:
    """Where the words of a text begin; they must occur in it in order.

    >>> find_words(["我", "喜欢", "你"], "我喜欢你", "a.jsonl:1")
    (0, 1, 3)
    """
    starts, end = [], 0
    for word in filter(None, words):
        start = text.find(word, end)
        if start < 0:
            raise UserError(f"{where}: the word {word!r} does not occur in the text after its character {end:,}.")
        starts.append(start)
        end = start + len(word)
    return tuple(starts)


def position_of(documents: Iterable[Document]) -> int | None:
    """How many bytes of their source were read for the documents so far, where they are a corpus that can tell."""
    return documents.position if isinstance(documents, Corpus) else None


# Which files


def find(path: Path) -> list[Source]:
    """The files that a path stands for: itself, or every readable file under it, in order of name."""
    try:
        there, folder = path.exists(), path.is_dir()
    except OSError as e:
        refuse(e)
    if not there:
        raise UserError(f"{path}: no such file or folder.")
    if folder:
        return [Source(file, named=False, name=str(file)) for file in find_in(path)]
    if extension(path) not in READABLE:
        raise UserError(f"{path}: not a kind of file that is read. Give {KINDS}, plain or as {PACKINGS}.")
    return [Source(path, named=True, name=str(path))]


def find_in(folder: Path) -> list[Path]:
    """The readable files under a folder; hidden ones are passed over, others are counted and said."""
    files: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(parent, name) for name in names if not name.startswith(".")):
            if extension(file) in READABLE:
                files.append(file)
            else:
                others[extension(file) or "no extension"] += 1
        others["linked folder"] += sum(Path(parent, name).is_symlink() for name in folders)
    others += Counter()  # drops what was counted zero times
    if others:
        kinds = ", ".join(sorted(others))
        warn(f"{folder}: {count(others.total(), 'left out that is', 'left out that are')} not {KINDS} ({kinds}).")
    if not files:
        raise UserError(f"{folder}: nothing to read in this folder. Put {KINDS} files there, or {PACKINGS} of them.")
    return sorted(files)


def spooled(stream: IO[bytes], folder: Path) -> Path:
    """Keep what a stream gives in a file, so that it can be read twice; its name says how to read it."""
    start = stream.read(2**16)
    kind = ".jsonl" if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else ".txt"
    path = folder / f"stdin{kind}"
    try:
        with open(path, "wb") as file, progress("reading standard input", "bytes") as p:
            while start:
                file.write(start)
                p.advance(len(start))
                start = stream.read(2**16)
    except OSError as e:
        raise UserError(
            f"Standard input cannot be kept in {folder.parent} ({e.strerror}). Name another folder in TMPDIR, or give "
            "the text as a file."
        ) from None
    return path


# Lines to documents


class Block(NamedTuple):
    """Some lines that belong together, where the first one stands, and whether length alone ended it."""

    line: int
    text: str
    cut: bool


def blocks(stream: Iterable[str], split: bool, longest: int) -> Iterator[Block]:
    """Join lines to documents: all of them, or with `split` those between blank lines; `longest` bounds memory."""
    held: list[str] = []
    size, line, start = 0, 1, 1
    for piece in stream:
        if split and piece.isspace():
            if held:
                yield Block(start, "".join(held), cut=False)
            held, size = [], 0
        else:
            start = start if held else line
            held.append(piece)
            size += len(piece)
        if size >= longest:
            text, rest = cut_at_space("".join(held))
            yield Block(start, text, cut=True)
            held, size, start = [rest] if rest else [], len(rest), line
        line += piece.endswith("\n")
    if held:
        yield Block(start, "".join(held), cut=False)


def cut_at_space(text: str) -> tuple[str, str]:
    """Cut after the last space, so that no word is broken unless the text is a single one.

    >>> cut_at_space("one two thr")
    ('one two ', 'thr')
    """
    last = "" if text[-1].isspace() else text.rsplit(maxsplit=1)[-1]
    end = len(text) - len(last) or len(text)
    return text[:end], text[end:]


def take(stream: Iterator[str], size: int) -> list[str]:
    """The first lines of a stream, until they are over `size` characters together."""
    taken: list[str] = []
    while size >= 0 and (line := next(stream, None)) is not None:
        taken.append(line)
        size -= len(line)
    return taken
