"""Read .txt and .jsonl, plain or compressed, files or folders, as one stream of documents."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from firth.console import warn
from firth.errors import UserError, nearest
from firth.text import pydocs
from firth.text.clean import repair
from firth.text.kinds import Document as Document

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
READABLE = (".txt", ".jsonl")
DOCUMENTS = ("auto", "blank-line", "file")
SIDES = ("text_a", "text_b")
WHOLE = 2**20  # characters: a file in a folder up to this long is one document
LONGEST = 2**22  # characters, longer than most novels: what has no blank line for so long is cut, to stay in memory


class Source(NamedTuple):
    """One file, and whether the user named it or it was found in a folder."""

    path: Path
    named: bool


class Corpus:
    """The documents of some files and folders. Every iteration reads them again, never holding more than one.

    `documents` says how a .txt file becomes documents. "blank-line": a blank line ends one. "file": the file is
    one. "auto": a file that was named, or that is over 1 MiB, is split on blank lines; a smaller one in a folder
    is one document. A .jsonl file has one document per line, in the column `text` or the one that
    `columns={"text": "body"}` names. Beside or instead of it a column `words` may list the words of the text, for
    languages written without spaces. Columns `text_a` and `text_b`, where there is no `text` or where `columns`
    names them, are the two sides of a document.

    The text is kept as it is, but for the byte order mark, Windows line ends, and the line ends after a document.
    The path "pydocs" is the built-in corpus (write "./pydocs" for a folder of that name).
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        documents: str = "auto",
        columns: Mapping[str, str] | None = None,
        encoding: str = "utf-8",
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
        self.built_in = pydocs.NAME in self.paths
        self.files = [source for path in self.paths if path != pydocs.NAME for source in find(Path(path))]
        self.tally: Counter[str] = Counter()

    @cached_property
    def bytes(self) -> int:
        """Size on disk (of the built-in corpus, its text), to tell how far reading has come."""
        built_in = sum(len(record.text.encode()) for record in pydocs.everything()) if self.built_in else 0
        return built_in + sum(source.path.stat().st_size for source in self.files)

    def __iter__(self) -> Iterator[Document]:
        tally: Counter[str] = Counter()
        self.tally = tally
        files = (self._read(source, tally) for source in self.files)
        for document in chain(self._built_in(tally), chain.from_iterable(files)):
            if all(text.strip() for text in document.sides):
                tally["documents"] += 1
                yield document
            else:
                tally["empty"] += 1
        if not tally["documents"]:
            named = ", ".join(map(str, self.paths)) or "no path given"
            raise UserError(f"{named}: no documents, nothing but empty text. Name files that have some.")

    def texts(self) -> Iterator[str]:
        """Every text: those of the documents, and of their second sides."""
        return chain.from_iterable(document.sides for document in self)

    def describe(self) -> str:
        """How many documents have been read so far, and how the files became documents."""
        tally = self.tally
        single = self.files[0].path.name if len(self.files) == 1 else None
        ways = {"split": "split on blank lines", "whole": "whole", "lines": "with one document per line"}
        parts = [f"{single or count(tally[way], 'file')} {phrase}" for way, phrase in ways.items() if tally[way]]
        if tally["built-in"]:
            parts.append("the built-in pydocs")
        notes = {
            "sides": f"with two sides ({self.columns['text_a']} and {self.columns['text_b']})",
            "words": "with words of their own",
            "not words": f"with {self.columns['words']!r} that is no list of words and is not read",
            "empty": "empty and skipped",
            "cut": f"cut because they are over {LONGEST:,} characters",
            "repaired": "with half characters (lone surrogates) replaced by U+FFFD",
        }
        sentence = f"{count(tally['documents'], 'document')}: " + (", ".join(parts) or "nothing read yet")
        return "; ".join([sentence, *(f"{tally[key]:,} {note}" for key, note in notes.items() if tally[key])])

    def _built_in(self, tally: Counter[str]) -> Iterator[Document]:
        if self.built_in:
            tally["built-in"] += 1
            for record in pydocs.everything():
                yield Document(record.text, f"{pydocs.NAME}:{record.name}")

    def _read(self, source: Source, tally: Counter[str]) -> Iterator[Document]:
        read = self._read_text if extension(source.path) == ".txt" else self._read_jsonl
        return read(source, tally)

    def _read_text(self, source: Source, tally: Counter[str]) -> Iterator[Document]:
        stream = lines(source.path, self.encoding, LONGEST)
        split = self.documents == "blank-line" or (self.documents == "auto" and source.named)
        if self.documents == "auto" and not source.named:
            head = take(stream, WHOLE)
            split = sum(map(len, head)) > WHOLE
            stream = chain(head, stream)
        tally["split" if split else "whole"] += 1
        for block in blocks(stream, split, LONGEST):
            tally["cut"] += block.cut
            where = f"{source.path}:{block.line}" if split else str(source.path)
            yield Document(block.text.rstrip("\n"), where)

    def _read_jsonl(self, source: Source, tally: Counter[str]) -> Iterator[Document]:
        tally["lines"] += 1
        for number, record in json_records(source.path, self.encoding):
            document = self._document(record, f"{source.path}:{number}", tally)
            tally["sides"] += document.second is not None
            tally["words"] += document.word_starts is not None
            yield document

    def _document(self, record: Mapping[str, Any], where: str, tally: Counter[str]) -> Document:
        """A line of a .jsonl file: a text, with or without its words, or two sides."""

        def whole(text: str) -> str:
            repaired = repair(text)
            tally["repaired"] += repaired != text
            return repaired

        def read(role: str) -> str:
            return whole(text_in(record, role, self.columns[role], where))

        def has(role: str) -> bool:
            return role in self.named or self.columns[role] in record

        words = self._words(record, where, tally)
        if self.named.intersection(SIDES) or (any(map(has, SIDES)) and not has("text") and "words" not in self.named):
            if words is not None:
                raise UserError(f"{where}: words and two sides. Words are read beside a single text only.")
            return Document(read("text_a"), where, second=read("text_b"))
        if words is None:
            return Document(read("text"), where)
        text = read("text") if has("text") else whole(" ".join(words))
        return Document(text, where, find_words([repair(word) for word in words], text, where))

    def _words(self, record: Mapping[str, Any], where: str, tally: Counter[str]) -> list[str] | None:
        """The words that a record lists. What is no list, a count perhaps, is an error only if the user named it."""
        column, is_named = self.columns["words"], "words" in self.named
        value = value_in(record, "words", column, where) if is_named else record.get(column)
        if not isinstance(value, list) and not is_named:
            tally["not words"] += value is not None
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise UserError(f"{where}: column {column!r} holds {json.dumps(value)[:40]}, which is no list of words.")
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


def count(n: int, noun: str) -> str:
    """
    >>> count(1, "file"), count(1203, "document")
    ('1 file', '1,203 documents')
    """
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


# Which files


def extension(path: Path) -> str:
    """What says how to read a file, whether or not it is compressed.

    >>> extension(Path("a.jsonl.xz")), extension(Path("B.TXT"))
    ('.jsonl', '.txt')
    """
    inner = Path(path.stem) if path.suffix.lower() in OPENERS else path
    return inner.suffix.lower()


def find(path: Path) -> list[Source]:
    """The files that a path stands for: itself, or every readable file under it, in order of name."""
    try:
        there, folder = path.exists(), path.is_dir()
    except OSError as e:
        refuse(e)
    if not there:
        raise UserError(f"{path}: no such file or folder.")
    if folder:
        return [Source(file, named=False) for file in find_in(path)]
    if extension(path) not in READABLE:
        raise UserError(f"{path}: not a kind of file that is read. Give .txt or .jsonl, plain or as .gz or .xz.")
    return [Source(path, named=True)]


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
        warn(f"{folder}: {others.total():,} left out that are not .txt or .jsonl files ({kinds}).")
    if not files:
        raise UserError(
            f"{folder}: nothing to read in this folder. Put .txt or .jsonl files there, or .gz, .xz of them."
        )
    return sorted(files)


def refuse(error: OSError) -> NoReturn:
    """Say in one line why the system did not let us read."""
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}).") from None


# Lines


def lines(path: Path, encoding: str = "utf-8", longest: int = -1) -> Iterator[str]:
    r"""The lines of a file, each ending in \n as only \n ends a line; one over `longest` characters comes in pieces."""
    opener = OPENERS.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as raw, io.TextIOWrapper(raw, encoding, newline="\n") as stream:
            start = stream.readline(longest)
            if start:
                yield unix(start.removeprefix("\ufeff"))
            while line := stream.readline(longest):
                yield unix(line)
    except UnicodeDecodeError:
        raise UserError(
            f"{path}: not {encoding.upper()}, see byte {bad_byte(path, encoding):,} of its text. If it is in another "
            "encoding, name it: --encoding latin-1, for example, reads every file as Latin-1."
        ) from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except EOFError:
        raise UserError(f"{path}: the compressed file was cut short. Fetch or compress it again.") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as e:
        raise UserError(f"{path}: not a whole {path.suffix} file ({e}). Fetch or compress it again.") from None
    except OSError as e:
        refuse(e)


def unix(line: str) -> str:
    return line[:-2] + "\n" if line.endswith("\r\n") else line


def bad_byte(path: Path, encoding: str) -> int:
    """How many bytes of a file's text (after decompression) come before the first that cannot be decoded."""
    opener = OPENERS.get(path.suffix.lower(), open)
    decoder = codecs.getincrementaldecoder(encoding)()
    done = 0
    with opener(path, "rb") as raw:
        while True:
            piece: bytes = raw.read(2**20)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as e:
                return done - pending + e.start
            assert piece, "called for a file that decodes well"
            done += len(piece)


def known_encoding(name: str) -> str:
    try:
        codecs.lookup(name)
    except LookupError:
        raise UserError(f"--encoding {name}: no such encoding. Common ones: utf-8, utf-16, latin-1, cp1252.") from None
    return name


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


# Lines to records


def json_records(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl file with their line numbers; blank lines are passed over."""
    for number, line in enumerate(lines(path, encoding), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            reason = getattr(e, "msg", e)  # without JSON's own "line 1", which is not the file's
            raise UserError(f"{path}:{number}: not JSON ({reason}). Each line must be one object.") from None
        if not isinstance(record, dict):
            raise UserError(f'{path}:{number}: not an object. Each line must be like {{"text": "..."}}.')
        yield number, record


def rename(columns: Mapping[str, str] | None, roles: Iterable[str]) -> dict[str, str]:
    """The column of each role: of the same name, unless the user named another."""
    named = {role: role for role in roles}
    for role, column in (columns or {}).items():
        if role not in named:
            raise UserError(f"--columns {role}={column}: nothing is called {role!r} here. {nearest(role, named)}")
        named[role] = column
    return named


def value_in(record: Mapping[str, Any], role: str, column: str, where: str) -> Any:
    """What a record holds in a column; if there is none, the error says which there are."""
    if column not in record:
        there = ", ".join(str(name)[:40] for name in record) or "none"
        hint = f"Name the right one: --columns {role}=NAME."
        raise UserError(f"{where}: no column {column!r}; there are: {there}. {hint}")
    return record[column]


def text_in(record: Mapping[str, Any], role: str, column: str, where: str) -> str:
    """As `value_in`, for what must be text."""
    value = value_in(record, role, column, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {json.dumps(value)[:40]}, which is not text.")
    return value
