r"""Open a text file, plain or compressed, and read its lines; say what is wrong with one that is no text.

Only \n ends a line. A form feed or U+2028, at which Python's own `splitlines` cuts, is text like any other.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from firth.core.errors import UserError

READ_CHUNK_BYTES = 2**16  # bytes that are read and decoded at a time
MAX_CONTROL_CHAR_SHARE = 0.1  # share of control characters at the start of a file from which it is no text
CONTROL_CHARS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)  # what reading a damaged file may raise

# The commonest characters outside of ASCII, by which an encoding is told from others that decode the same bytes.
COMMON_CHARS_BY_ENCODING = {
    "cp1252": "éèàâêëîïôùûçäöüßñóíáåøæœ’“”–«»",
    "cp1250": "ěščřžýůťďňłęąśżźćőű",
    "cp1251": "оеаинтсрвлкмдпуяыьгз",
    "koi8_r": "оеаинтсрвлкмдпуяыьгз",
    "cp1253": "αοιετσνηυρπκμλςόίά",
    "cp1254": "ığşüöçİ",
    "cp1255": "יוהלאמרתשבנםעח",
    "cp1256": "اليمنورتبةعدسف",
    "shift_jis": "のにはをたがでてとしれさいるこ、。",
    "euc_jp": "のにはをたがでてとしれさいるこ、。",
    "euc_kr": "이다의에는을가하고지은를인로도",
    "gb18030": "的一是不了在人有我这中国上个，。",
    "big5": "的一是不了在人有我這中國上個，。",
}
MULTIBYTE_ENCODINGS = {
    "shift_jis",
    "euc_jp",
    "euc_kr",
    "gb18030",
    "big5",
}  # for a character: seldom common ones by chance
LATIN_ENCODINGS = {"cp1252", "cp1250", "cp1254"}  # whose letters mix with those of ASCII
NON_ASCII_BYTE = re.compile(rb"[\x80-\xff]")
NON_ASCII_BYTE_BESIDE_LETTER = re.compile(rb"(?<=[A-Za-z])[\x80-\xff]|[\x80-\xff](?=[A-Za-z])")
ENCODING_BY_BOM = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
}


def open_zst(file: Path | IO[bytes], mode: str) -> Any:
    """A .zst file, decompressed as it is read."""
    assert mode == "rb", "written nowhere"
    name = getattr(file, "name", file)
    return import_optional("pyarrow", f"{name}: reading .zst files").input_stream(file, compression="zstd")


DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": open_zst}
COMPRESSED_EXTENSIONS_TEXT = ", ".join(DECOMPRESSORS)
PIP_EXTRAS = {"pyarrow": "data", "datasets": "hf", "py3langid": "language"}


def import_optional(library: str, feature: str) -> Any:
    """Import a library that only some people need; without it, say how to get it."""
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError:
        package = library.partition(".")[0]
        install = f"pip install 'firth[{PIP_EXTRAS[package]}]'"
        raise UserError(f"{feature} needs the package {package}, which is not installed: {install}.") from None


# Opening


class ReadProgress:
    """How many bytes of some files have been read, as they lie on the disk: compressed ones before decompression."""

    def __init__(self) -> None:
        self.finished_bytes = 0  # bytes of files that were read to their end
        self.current_position: Callable[[], int] | None = None  # how far the file is that is being read

    @property
    def bytes_read(self) -> int:
        return self.finished_bytes + (self.current_position() if self.current_position else 0)

    @contextmanager
    def track_file(self, size_bytes: int, current_position: Callable[[], int]) -> Iterator[None]:
        """Meanwhile a file of this size is read, and `current_position` tells how far."""
        self.current_position = current_position
        try:
            yield
        finally:
            self.current_position = None
            self.finished_bytes += size_bytes


@contextmanager
def open_decompressed(
    path: Path, name: str | None = None, read_progress: ReadProgress | None = None
) -> Iterator[IO[bytes]]:
    """The bytes of a file after decompression; whatever is wrong with it is a UserError, about `name` if given.

    `read_progress` is told how far it has been read.
    """
    name = name or str(path)
    packing = path.suffix.lower()
    try:
        with (
            open(path, "rb") as raw,
            (read_progress or ReadProgress()).track_file(os.fstat(raw.fileno()).st_size, raw.tell),
        ):
            if packing not in DECOMPRESSORS:
                yield raw
                return
            with DECOMPRESSORS[packing](raw, "rb") as file:
                yield cast(IO[bytes], file)
    except FileNotFoundError:
        raise UserError(f"{name}: no such file.") from None
    except READ_ERRORS as e:
        raise make_read_error(e, name, packing) from None


def make_read_error(error: Exception, name: str, compression: str) -> UserError:
    """Why no more of a file can be read."""
    if isinstance(error, OSError) and error.strerror is not None:
        return UserError(f"{name}: cannot be read ({error.strerror}).")
    if isinstance(error, EOFError) or "Truncated" in str(error):  # pyarrow's word for it
        return UserError(f"{name}: the compressed file was cut short. Fetch or compress it again.")
    return UserError(f"{name}: not a whole {compression} file ({error}). Fetch or compress it again.")


def raise_os_error(error: OSError) -> NoReturn:
    """Say in one line why the system did not let us read."""
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}).") from None


def check_encoding(name: str) -> str:
    """Refuse the name of an encoding that Python does not have, or that does not stand for text."""
    try:
        "".encode(name)
        codecs.getincrementaldecoder(name)
    except (LookupError, ValueError):
        raise UserError(f"--encoding {name}: no such encoding. Common ones: utf-8, utf-16, latin-1, cp1252.") from None
    return name


# Lines


def read_lines(
    path: Path,
    encoding: str = "utf-8",
    max_chars: int = -1,
    name: str | None = None,
    read_progress: ReadProgress | None = None,
) -> Iterator[str]:
    r"""The lines of a file, each ending in \n as only \n ends a line; one over `max_chars` characters comes in pieces."""
    held: list[str] = []  # the pieces of a line whose end has not been read
    size = 0
    for text in read_decoded(path, encoding, name, read_progress):
        head, newline, rest = text.rpartition("\n")
        if newline:
            ended = io.StringIO(("".join(held) + head + newline).replace("\r\n", "\n"), newline="\n")
            if max_chars < 0 or size + len(head) < max_chars:
                yield from ended
            else:
                yield from chain.from_iterable(split_long_line(line, max_chars) for line in ended)
            held, size = [], 0
        held.append(rest)
        size += len(rest)
        if 0 < max_chars < size:
            *pieces, last = split_long_line("".join(held), max_chars)
            if last == "\r":  # it may be half of a line end
                last = pieces.pop() + last
            yield from pieces
            held, size = [last], len(last)
    if size:
        yield from split_long_line("".join(held), max_chars)


def split_long_line(line: str, max_chars: int) -> Iterator[str]:
    r"""A line, cut where it is too long. Its \n stays with the last piece: alone it would be a blank line.

    >>> list(split_long_line("12345678\n", 4))
    ['1234', '5678\n']
    """
    if max_chars < 0 or len(line) <= max_chars:
        yield line
        return
    end = len(line) - line.endswith("\n")
    last = (end - 1) // max_chars * max_chars
    for start in range(0, last, max_chars):
        yield line[start : start + max_chars]
    yield line[last:]


def read_decoded(
    path: Path, encoding: str, name: str | None = None, read_progress: ReadProgress | None = None
) -> Iterator[str]:
    """The text of a file, some of it at a time, without its byte order mark."""
    name = name or str(path)
    decoder = codecs.getincrementaldecoder(encoding)()
    done = newlines = 0
    begun = False
    wide = False  # whether a character outside of ASCII has been decoded
    with open_decompressed(path, name, read_progress) as file:
        while True:
            try:
                piece = file.read(READ_CHUNK_BYTES)
            except READ_ERRORS as e:
                raise make_read_error(e, f"{name}:{newlines + 1}" if done else name, path.suffix.lower()) from None
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as e:
                before = e.object[: e.start]
                wide = wide or not before.isascii()
                line = newlines + before.count(b"\n") + 1
                wrong = truncated_file_message if not piece else decode_error_message
                message = wrong(name, encoding, done - pending + e.start, line, e.object, wide)
                damage = (
                    " Or the compressed file is damaged: fetch it again."
                    if path.suffix.lower() in DECOMPRESSORS
                    else ""
                )
                raise UserError(message + damage) from None
            except UnicodeError as e:  # UTF-16 without the mark that it must begin with
                raise UserError(f"{name}: not {encoding.upper()} ({e}). {encoding_hint(piece)}") from None
            if text and not begun:
                begun, text = True, text.removeprefix("\ufeff")
                check_is_text(text, piece, name)
            if text:
                yield text
            if not piece:
                return
            done += len(piece)
            newlines += text.count("\n")
            wide = wide or not text.isascii()


def decode_error_message(
    name: str, encoding: str, byte_offset: int, line: int, sample: bytes, has_non_ascii: bool
) -> str:
    """Where a text stops being what it should be, and what it may be instead."""
    what = f"{name}:{line}: not {encoding.upper()}, see byte {byte_offset:,} of its text."
    if has_non_ascii and encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        return (
            f"{what} All before it is, so the file mixes encodings or is damaged there: "
            "repair it, or bring its parts to UTF-8 one by one."
        )
    return f"{what} {encoding_hint(sample)}"


def truncated_file_message(
    name: str, encoding: str, byte_offset: int, line: int, sample: bytes, has_non_ascii: bool
) -> str:
    """The last character is not whole; where it is the only one outside of ASCII, it may be one of another encoding."""
    what = (
        f"{name}:{line}: ends in the middle of a character of {encoding.upper()}, see byte {byte_offset:,} of its text."
    )
    return f"{what} It was cut short: fetch it again{'' if has_non_ascii else ', or name its --encoding'}."


def encoding_hint(sample: bytes) -> str:
    """What to do about bytes that are not in the encoding that was expected."""
    if packing := next((packing for mark, packing in COMPRESSION_BY_MAGIC.items() if sample.startswith(mark)), None):
        return f"It looks like a {packing} file: decompress it, or give it that extension if it is one of {COMPRESSED_EXTENSIONS_TEXT}."
    if guess := guess_encoding(sample):
        return f"It looks like {guess}: --encoding {guess} reads every file so."
    if looks_binary(sample.decode("latin-1")):
        return "It does not look like text at all: leave it out."
    return "If it is in another encoding, name it: --encoding latin-1, for example, reads every file as Latin-1."


def guess_encoding(sample: bytes) -> str | None:
    """The encoding that some bytes are most likely in, or None where they look like none of those known here.

    >>> guess_encoding("déjà vu".encode("cp1252")), guess_encoding("Это пример".encode("koi8_r"))
    ('cp1252', 'koi8_r')
    """
    if marked := next((encoding for mark, encoding in ENCODING_BY_BOM.items() if sample.startswith(mark)), None):
        return marked
    for encoding, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[::2])):
        if zeros.count(0) > 0.4 * len(zeros):
            return encoding
    if looks_binary(sample.decode("latin-1")):
        return None
    alone = (
        LATIN_ENCODINGS
        if 2 * len(NON_ASCII_BYTE_BESIDE_LETTER.findall(sample)) > len(NON_ASCII_BYTE.findall(sample))
        else COMMON_CHARS_BY_ENCODING.keys() - LATIN_ENCODINGS
    )
    for encodings, enough in ((MULTIBYTE_ENCODINGS, 0.15), (alone - MULTIBYTE_ENCODINGS, 0.4)):
        scores = {
            encoding: common_char_share(sample, encoding)
            for encoding in COMMON_CHARS_BY_ENCODING
            if encoding in encodings
        }
        best = max(scores, key=scores.__getitem__)
        if scores[best] > enough:
            return best
    return None


def common_char_share(sample: bytes, encoding: str) -> float:
    """The share of common characters among those outside of ASCII, should some bytes be in an encoding."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return 0.0
    wide = [character for character in text if character > "\x7f"]
    return sum(character in COMMON_CHARS_BY_ENCODING[encoding] for character in wide) / max(len(wide), 1)


def looks_binary(text: str) -> bool:
    """Whether there are too many control characters for a text."""
    return len(CONTROL_CHARS.findall(text)) > MAX_CONTROL_CHAR_SHARE * len(text)


def check_is_text(text: str, chunk: bytes, name: str) -> None:
    """Refuse what decodes, as everything does in Latin-1, and still is no text."""
    if looks_binary(text):
        raise UserError(
            f"{name}: not text: control characters are more than {MAX_CONTROL_CHAR_SHARE:.0%} of its start. {encoding_hint(chunk)}"
        )
