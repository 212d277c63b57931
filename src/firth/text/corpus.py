"""Read files, folders, standard input and datasets as one stream of documents."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from firth.core.console import format_count, progress, warn
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import create_file
from firth.text import python_docs
from firth.text.documents import Document as Document
from firth.text.filters import TextCleaner, replace_lone_surrogates
from firth.text.formats.registry import DOCUMENT_FORMATS, FormatInput, foreign_kind, parse_mail_parts
from firth.text.hub import HUB_PREFIX, HubDataset
from firth.text.normalize import apply_normal_forms
from firth.text.open_text import (
    COMPRESSED_EXTENSIONS_TEXT,
    ReadProgress,
    check_encoding,
    check_not_special,
    estimate_text_bytes,
    is_special_file,
    raise_os_error,
    read_lines,
)
from firth.text.records import (
    RECORD_READERS,
    NumberedRecords,
    data_extension,
    get_column_text,
    get_column_value,
    preview_value,
    read_parquet_records,
    resolve_columns,
)

TEXT_EXTENSIONS = (".txt", ".text", ".md", ".rst")  # plain text; so is a named file that nothing below lists
READABLE_EXTENSIONS = (*TEXT_EXTENSIONS, *RECORD_READERS, ".parquet", *DOCUMENT_FORMATS)
UNREADABLE_EXTENSIONS = {
    **dict.fromkeys((".doc", ".docx", ".odt", ".rtf", ".epub"), "Save it as plain text, .txt."),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "Save it as .csv."),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "Unpack it, and name its folder."),
    **dict.fromkeys((".json", ".ipynb"), 'Write one object a line, {"text": "..."}, as .jsonl.'),
    **dict.fromkeys((".conll", ".conllu", ".bio", ".iob"), "It is labelled data: name a text."),
}
READABLE_EXTENSIONS_TEXT = ", ".join(READABLE_EXTENSIONS)
DOCUMENT_SPLIT_MODES = ("auto", "blank-line", "file")
STDIN_PATH = "-"
SKIPPED = "skipped: "  # prefix of the counts of texts that a format leaves out
CORPUS_OPTIONS = ("documents", "columns", "encoding", "keep_mail", *(f.name for f in fields(TextCleaner) if f.init))
TEXT_PAIR_COLUMNS = ("text_a", "text_b")
MAX_WHOLE_FILE_CHARS = 2**20  # characters; a shorter file in a folder is one document
MAX_DOCUMENT_CHARS = MAX_WHOLE_FILE_CHARS  # characters, about two novels; a longer document is split to bound memory
MAX_COUNTED_BYTES = 128_000_000  # of a text whose size is not published: up to half a minute of reading


class CorpusFile(NamedTuple):
    """A file, whether the user named it (or a folder above it), and its name in messages."""

    path: Path
    is_user_named: bool
    display_name: str


class TextCount(NamedTuple):
    """The documents of a text, counted by reading them."""

    documents: int
    text_bytes: int
    is_all: bool  # False: more follow


class Corpus:
    """The documents of files, folders and datasets. Each iteration reads them again and holds one in memory.

    A path may be a pattern ("notes/*"). A named file with an extension that says nothing is plain text.

    `documents` selects how a text file becomes documents. "blank-line" splits it on blank lines. "file" makes it one
    document. "auto" splits a file that the user named or that is over 1 Mi characters; a smaller one in a folder is
    one document. A .jsonl file has one document per line; .csv, .tsv and .parquet files have one per row. Web archives
    (.warc, .wet) have one per page, Wikipedia dumps (.xml) one per article, mailboxes (.mbox) one per message, .html,
    .pdf and .eml files one each. `keep_mail` lists parts of e-mails that are left out by default: "headers,quotes".

    The text is in the column `text`, or as named by `columns={"text": "body"}`. A column `words` may list the words,
    for languages written without spaces. Columns `text_a` and `text_b` make a text pair, if there is no `text` or
    `columns` names them. A document over 1 Mi characters is split.

    The text is unchanged, except for the byte order mark, Windows line ends, and the line ends after a document.
    Further arguments are those of `TextCleaner`: `normalize`, `min_words` and so on.

    The path "-" is standard input, which is spooled to a temporary file: .jsonl if it starts with "{", otherwise plain
    text. `hf:owner/name[:config][:split][#column]` is a dataset. "pydocs" is the built-in corpus ("./pydocs" is a
    folder of that name).
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        documents: str = "auto",
        columns: Mapping[str, str] | None = None,
        encoding: str = "utf-8",
        keep_mail: str = "",
        **cleaning: Any,
    ) -> None:
        if documents not in DOCUMENT_SPLIT_MODES:
            near = did_you_mean(documents, DOCUMENT_SPLIT_MODES)
            raise UserError(f"documents: unknown mode {quote(documents)}. {near}")
        self.paths = [paths] if isinstance(paths, str | Path) else list(paths)
        self.documents = documents
        self.columns = resolve_columns(columns, ["text", "words", *TEXT_PAIR_COLUMNS])
        self.user_columns = frozenset(columns or {})  # these columns are required
        if "text" in self.user_columns and self.user_columns.intersection(TEXT_PAIR_COLUMNS):
            raise UserError(
                "--columns names both text and text_a or text_b. Name the text, or the two texts of a pair."
            )
        self.encoding = check_encoding(encoding)
        self.keep_mail = parse_mail_parts(keep_mail)
        self.cleaner = TextCleaner(**cleaning)
        self.has_pydocs = python_docs.PYDOCS_NAME in self.paths
        self.datasets = [
            HubDataset(path) for path in self.paths if isinstance(path, str) and path.startswith(HUB_PREFIX)
        ]
        others = {python_docs.PYDOCS_NAME, *(dataset.path for dataset in self.datasets)}
        self.files = [source for path in self.paths if path not in others for source in self._find_files(path)]
        self.counts: Counter[str] = Counter()
        self.read_progress = ReadProgress()

    def _find_files(self, path: str | Path) -> list[CorpusFile]:
        if path != STDIN_PATH:
            return find_corpus_files(Path(path))
        if self.paths.count(STDIN_PATH) > 1:
            raise UserError("Standard input (-) can be read only once, and is named twice.")
        self.stdin_folder = TemporaryDirectory(prefix="firth-stdin-")  # removed with this corpus
        spooled = spool_stream(sys.stdin.buffer, Path(self.stdin_folder.name))
        return [CorpusFile(spooled, is_user_named=True, display_name="stdin")]

    @cached_property
    def total_bytes(self) -> int:
        """Size on disk, or of the text of the built-in corpus: the total of `bytes_read`."""
        built_in = sum(len(record.text.encode()) for record in python_docs.load_pydocs()) if self.has_pydocs else 0
        datasets = sum(dataset.size_bytes for dataset in self.datasets)
        return built_in + datasets + sum(source.path.stat().st_size for source in self.files)

    @cached_property
    def text_bytes(self) -> int:
        """Size of the text: `total_bytes`, with an estimate for compressed files."""
        on_disk = sum(source.path.stat().st_size for source in self.files)
        return self.total_bytes - on_disk + sum(estimate_file_text(source.path) for source in self.files)

    @property
    def bytes_read(self) -> int | None:
        """Bytes read so far, of `total_bytes`; None if a dataset does not report them."""
        return None if self.datasets else self.read_progress.bytes_read

    @property
    def share_read(self) -> float | None:
        """Share of the text read so far: of the bytes, or of the rows that a dataset publishes; None if unknown."""
        if not self.datasets:
            return self.read_progress.bytes_read / max(self.total_bytes, 1)
        dataset = self.datasets[0]
        return dataset.rows_read / dataset.num_rows if len(self.paths) == 1 and dataset.num_rows else None

    @property
    def is_size_known(self) -> bool:
        """Whether `text_bytes` is the size of all of the text: a dataset need not publish its own."""
        return all(dataset.size_bytes for dataset in self.datasets)

    @cached_property
    def counted(self) -> TextCount:
        """Size of the text by reading it, for datasets that do not publish theirs; a long text is not read whole."""
        documents = text_bytes = 0
        with progress("counting the text", "documents") as p:
            for document in self:
                documents, text_bytes = documents + 1, text_bytes + document.num_bytes
                p.advance()
                if text_bytes > MAX_COUNTED_BYTES:
                    return TextCount(documents, text_bytes, is_all=False)
        return TextCount(documents, text_bytes, is_all=True)

    def __iter__(self) -> Iterator[Document]:
        yield from self.iter_documents()
        self.check_has_documents()

    def iter_documents(self) -> Iterator[Document]:
        """Yield the documents, of which there may be none: a part of a corpus may hold only empty ones."""
        tally: Counter[str] = Counter()
        self.counts, self.read_progress = tally, ReadProgress()
        self.cleaner.reset_counts()
        files = (self._read_file(source, tally) for source in self.files)
        datasets = (self._read_dataset(dataset, tally) for dataset in self.datasets)
        for document in chain(self._read_pydocs(tally), chain.from_iterable(files), chain.from_iterable(datasets)):
            if not all(text.strip() for text in document.texts):
                tally["empty"] += 1
            elif self.cleaner.should_keep(document.texts):
                tally["documents"] += 1
                yield document

    def check_has_documents(self) -> None:
        """Raise a UserError if nothing was read."""
        if not self.counts["documents"]:
            named = ", ".join(map(str, self.paths)) or "no path given"
            dropped = "; ".join([*skipped_lines(self.counts), *self.cleaner.summary_lines()]) or "only empty text"
            raise UserError(f"{named}: no documents, {dropped}. Name files with text.")

    def texts(self) -> Iterator[str]:
        """Yield every text, including both texts of a pair."""
        return chain.from_iterable(document.texts for document in self)

    def describe(self) -> str:
        """Describe the documents read so far: their number, how files were split, and what was dropped."""
        tally = self.counts
        single = Path(self.files[0].display_name).name if len(self.files) == 1 else None
        modes = {
            "split": "split on blank lines",
            "whole": "whole",
            "lines": "with one document per line",
            "rows": "with one document per row",
            **{form.description: form.description for form in DOCUMENT_FORMATS.values()},
        }
        parts = [
            f"{single or format_count(tally[mode], 'file')} {phrase}" for mode, phrase in modes.items() if tally[mode]
        ]
        if tally["built-in"]:
            parts.append("the built-in pydocs")
        parts += [dataset.describe() for dataset in self.datasets if tally[dataset.path]]
        notes = {
            "pairs": f"with two texts ({self.columns['text_a']} and {self.columns['text_b']})",
            "words": "with listed words",
            "not words": f"with an ignored {quote(self.columns['words'])} that is not a list of words",
            "empty": "empty and skipped",
            "cut": f"cut because {'they are' if tally['cut'] > 1 else 'it is'} over {MAX_DOCUMENT_CHARS:,} characters",
            "repaired": "with lone surrogates replaced by U+FFFD",
        }
        sentence = f"{format_count(tally['documents'], 'document')}: " + (", ".join(parts) or "nothing read yet")
        counted = [f"{tally[key]:,} {note}" for key, note in notes.items() if tally[key]]
        return "; ".join([sentence, *counted, *skipped_lines(tally), *self.cleaner.summary_lines()])

    def _read_pydocs(self, counts: Counter[str]) -> Iterator[Document]:
        if self.has_pydocs:
            counts["built-in"] += 1
            for record in python_docs.load_pydocs():
                self.read_progress.finished_bytes += len(record.text.encode())
                if python_docs.split_of(record.text) != "test":
                    yield Document(self.cleaner.normalize_text(record.text), f"{python_docs.PYDOCS_NAME}:{record.name}")

    def _read_file(self, source: CorpusFile, counts: Counter[str]) -> Iterator[Document]:
        kind = data_extension(source.path)
        if kind in DOCUMENT_FORMATS:
            return self._read_format(source, kind, counts)
        if kind in TEXT_EXTENSIONS or kind not in READABLE_EXTENSIONS:
            return self._read_text_file(source, counts)
        counts["lines" if kind == ".jsonl" else "rows"] += 1
        if kind == ".parquet":
            records = read_parquet_records(source.path, self.columns.values(), self.read_progress)
            return self._read_records(records, f"{source.display_name}:row ", self.columns, counts)
        return self._read_records(
            RECORD_READERS[kind](source.path, self.encoding, source.display_name, self.read_progress),
            f"{source.display_name}:",
            self.columns,
            counts,
        )

    def _read_format(self, source: CorpusFile, kind: str, counts: Counter[str]) -> Iterator[Document]:
        """Read a file in a format of its own; texts that it leaves out are counted by reason."""
        form, skipped = DOCUMENT_FORMATS[kind], Counter[str]()
        counts[form.description] += 1
        given = FormatInput(
            source.path, source.display_name, self.encoding, self.keep_mail, self.read_progress, skipped
        )
        for place, text in form.read(given):
            repaired = replace_lone_surrogates(text)
            counts["repaired"] += repaired != text
            where = f"{source.display_name}:{place}" if place else source.display_name
            yield from self._split_long_document(Document(self.cleaner.normalize_text(repaired), where), counts)
        counts.update({SKIPPED + reason: n for reason, n in skipped.items()})

    def _read_dataset(self, dataset: HubDataset, counts: Counter[str]) -> Iterator[Document]:
        counts[dataset.path] += 1
        columns = self.columns if dataset.column is None else {**self.columns, "text": dataset.column}
        return self._read_records(dataset.records(), f"{dataset.path}:row ", columns, counts)

    def _read_text_file(self, source: CorpusFile, counts: Counter[str]) -> Iterator[Document]:
        stream = read_lines(source.path, self.encoding, MAX_DOCUMENT_CHARS, source.display_name, self.read_progress)
        split = self.documents == "blank-line" or (self.documents == "auto" and source.is_user_named)
        if self.documents == "auto" and not source.is_user_named:
            head = take_lines(stream, MAX_WHOLE_FILE_CHARS)
            split = sum(map(len, head)) > MAX_WHOLE_FILE_CHARS
            stream = chain(head, stream)
        counts["split" if split else "whole"] += 1
        for block in iter_text_blocks(stream, split, MAX_DOCUMENT_CHARS):
            counts["cut"] += block.is_truncated
            where = f"{source.display_name}:{block.first_line}" if split else source.display_name
            text = replace_lone_surrogates(block.text)  # of encodings such as UTF-7
            counts["repaired"] += text != block.text
            yield Document(self.cleaner.normalize_text(text.rstrip("\n")), where)

    def _read_records(
        self, records: NumberedRecords, source_prefix: str, columns: Mapping[str, str], counts: Counter[str]
    ) -> Iterator[Document]:
        for number, record in records:
            document = self._make_document(record, columns, f"{source_prefix}{number}", counts)
            counts["pairs"] += document.text_pair is not None
            counts["words"] += document.word_starts is not None
            yield from self._split_long_document(document, counts)

    def _split_long_document(self, document: Document, counts: Counter[str]) -> Iterator[Document]:
        """Split a document that is too long, unless it has listed words or is a text pair."""
        size = len(document.text)
        if size <= MAX_DOCUMENT_CHARS or document.word_starts is not None or document.text_pair is not None:
            yield document
            return
        starts = range(0, size, MAX_DOCUMENT_CHARS)
        pieces = (document.text[start : start + MAX_DOCUMENT_CHARS] for start in starts)
        for block in iter_text_blocks(pieces, False, MAX_DOCUMENT_CHARS):
            counts["cut"] += block.is_truncated
            yield Document(block.text, document.source)

    def _make_document(
        self, record: Mapping[str, Any], columns: Mapping[str, str], where: str, counts: Counter[str]
    ) -> Document:
        """Make a document of a record: a text, a text with listed words, or a text pair."""

        def clean(text: str) -> str:
            repaired = replace_lone_surrogates(text)
            counts["repaired"] += repaired != text
            return self.cleaner.normalize_text(repaired)

        def read(role: str) -> str:
            return clean(get_column_text(record, role, columns[role], where))

        def has(role: str) -> bool:
            return role in self.user_columns or columns[role] in record

        words = self._get_listed_words(record, where, counts)
        if self.user_columns.intersection(TEXT_PAIR_COLUMNS) or (
            any(map(has, TEXT_PAIR_COLUMNS)) and not has("text") and "words" not in self.user_columns
        ):
            if words is not None:
                raise UserError(f"{where}: words and a text pair. Listed words need a single text.")
            return Document(read("text_a"), where, text_pair=read("text_b"))
        if words is None:
            return Document(read("text"), where)
        text = read("text") if has("text") else clean(" ".join(words))
        starts = locate_words(
            [apply_normal_forms(replace_lone_surrogates(word), self.cleaner.forms) for word in words], text, where
        )
        return Document(text, where, starts)

    def _get_listed_words(self, record: Mapping[str, Any], where: str, counts: Counter[str]) -> list[str] | None:
        """Return the words that a record lists. Another value is an error only if the user named the column."""
        column, is_named = self.columns["words"], "words" in self.user_columns
        value = get_column_value(record, "words", column, where) if is_named else record.get(column)
        if not isinstance(value, list) and not is_named:
            counts["not words"] += value is not None
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            found = preview_value(value)
            raise UserError(f"{where}: column {quote(column)} holds {found}, which is not a list of words.")
        return value


def skipped_lines(counts: Counter[str]) -> list[str]:
    """Return one phrase for each reason for which texts were skipped."""
    return [
        f"{n:,} skipped: {key.removeprefix(SKIPPED)}" for key, n in sorted(counts.items()) if key.startswith(SKIPPED)
    ]


def locate_words(words: Sequence[str], text: str, where: str) -> tuple[int, ...]:
    """Return the offset of each word in a text, in which the words must occur in order.

    >>> locate_words(["我", "喜欢", "你"], "我喜欢你", "a.jsonl:1")
    (0, 1, 3)
    """
    starts, end = [], 0
    for word in filter(None, words):
        start = text.find(word, end)
        if start < 0:
            raise UserError(f"{where}: the word {quote(word)} does not occur in the text after its character {end:,}.")
        starts.append(start)
        end = start + len(word)
    return tuple(starts)


def corpus_bytes_read(documents: Iterable[Document]) -> int | None:
    """Bytes read so far if `documents` is a `Corpus` that reports them, otherwise None."""
    return documents.bytes_read if isinstance(documents, Corpus) else None


# Which files


def find_corpus_files(path: Path) -> list[CorpusFile]:
    """Return the file itself, the files that match a pattern, or every readable file of a folder, sorted by name."""
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except OSError as e:
        raise_os_error(e)
    if not exists and has_magic(str(path)):
        names = sorted(glob(str(path), recursive=True))  # noqa: PTH207, the pattern may begin with /
        matches = [match for name in names if not (match := Path(name)).is_dir()]
        if not matches:
            raise UserError(f"{path}: no file matches this pattern.")
        return [file for match in matches for file in find_corpus_files(match)]
    if not exists:
        raise UserError(f"{path}: no such file or folder.")
    check_not_special(path, str(path))
    if is_folder:
        return [CorpusFile(file, is_user_named=False, display_name=str(file)) for file in find_readable_files(path)]
    if remedy := UNREADABLE_EXTENSIONS.get(kind := data_extension(path)):
        raise UserError(f"{path}: {kind} files are not read. {remedy}")
    return [CorpusFile(path, is_user_named=True, display_name=str(path))]


def find_readable_files(folder: Path) -> list[Path]:
    """Return the readable files under a folder; hidden files are skipped silently, others with a warning."""
    files: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=raise_os_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(parent, name) for name in names if not name.startswith(".")):
            if data_extension(file) in READABLE_EXTENSIONS and is_special_file(file):
                others["pipe or device"] += 1
            elif kind := foreign_kind(file, data_extension(file)):
                others[kind] += 1
            elif data_extension(file) in READABLE_EXTENSIONS:
                files.append(file)
            else:
                others[data_extension(file) or "no extension"] += 1
        others["linked folder"] += sum(Path(parent, name).is_symlink() for name in folders)
    others += Counter()  # drops zero counts
    if others:
        kinds = ", ".join(sorted(others))
        count = format_count(others.total(), "left out that is", "left out that are")
        warn(f"{folder}: {count} not {READABLE_EXTENSIONS_TEXT} ({kinds}).")
    if not files:
        raise UserError(
            f"{folder}: nothing to read in this folder. Put {READABLE_EXTENSIONS_TEXT} files there, plain or "
            f"compressed as {COMPRESSED_EXTENSIONS_TEXT}. Plain text with other names needs a pattern: "
            f"'{folder.joinpath('*')}'."
        )
    return sorted(files)


def estimate_file_text(path: Path) -> int:
    """Return the size of a file's text, estimated if it is compressed or in a format of its own."""
    form = DOCUMENT_FORMATS.get(data_extension(path))
    return estimate_text_bytes(path) if form is None else max(1, round(form.text_share * estimate_text_bytes(path)))


def spool_stream(stream: IO[bytes], folder: Path) -> Path:
    """Copy a stream to a file, so that it can be read twice; the extension gives its format."""
    start = stream.read(2**16)
    kind = ".jsonl" if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else ".txt"
    path = folder / f"stdin{kind}"
    try:
        with create_file(path) as file, progress("reading standard input", "bytes") as p:
            while start:
                file.write(start)
                p.advance(len(start))
                start = stream.read(2**16)
    except OSError as e:
        raise UserError(
            f"Standard input cannot be written to {folder.parent} ({e.strerror}). Name another folder in TMPDIR, or "
            "give the text as a file."
        ) from None
    return path


# Lines to documents


class TextBlock(NamedTuple):
    """The lines of a document, the line number of the first, and whether the length limit ended it."""

    first_line: int
    text: str
    is_truncated: bool


def iter_text_blocks(stream: Iterable[str], split_on_blank_lines: bool, max_chars: int) -> Iterator[TextBlock]:
    """Join lines to blocks: one block, or one between blank lines; a block longer than `max_chars` is split."""
    held: list[str] = []
    size, line, start = 0, 1, 1
    for piece in stream:
        if split_on_blank_lines and piece.isspace():
            if held:
                yield TextBlock(start, "".join(held), is_truncated=False)
            held, size = [], 0
        else:
            start = start if held else line
            held.append(piece)
            size += len(piece)
        if size >= max_chars:
            text, rest = split_at_last_space("".join(held))
            yield TextBlock(start, text, is_truncated=True)
            held, size, start = [rest] if rest else [], len(rest), line
        line += piece.endswith("\n")
    if held:
        yield TextBlock(start, "".join(held), is_truncated=False)


def split_at_last_space(text: str) -> tuple[str, str]:
    """Split after the last space, so that no word is broken unless the text is a single word.

    >>> split_at_last_space("one two thr")
    ('one two ', 'thr')
    """
    last = "" if text[-1].isspace() else text.rsplit(maxsplit=1)[-1]
    end = len(text) - len(last) or len(text)
    return text[:end], text[end:]


def take_lines(stream: Iterator[str], max_chars: int) -> list[str]:
    """Return the first lines of a stream until their total exceeds `max_chars`."""
    taken: list[str] = []
    while max_chars >= 0 and (line := next(stream, None)) is not None:
        taken.append(line)
        max_chars -= len(line)
    return taken
