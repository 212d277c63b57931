r"""Open text files, plain or compressed, and read their lines; report binary, damaged and wrongly encoded files.

Only \n ends a line. `str.splitlines` would also split at a form feed or U+2028, which occur inside text.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import shlex
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from firth.core.errors import UserError, shorten

READ_CHUNK_BYTES = 2**16  # bytes per read and decode
# A file that is held in memory as a whole may not exceed both limits. Text expands 5 times, tables of labels 20 times,
# and a short row takes 50 times its bytes in memory.
MAX_EXPANSION, MAX_EXPANDED_BYTES = 100, 2**24  # decompressed bytes per stored byte, and decompressed bytes
MAX_CONTROL_CHAR_SHARE = 0.1  # of the first chunk; a file with more is binary
CONTROL_CHARS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)  # raised by reading a damaged file

# The most frequent non-ASCII characters of the languages that use an encoding. Several encodings decode the same bytes;
# the right one gives many of these. charset-normalizer 3.5 takes short French text in cp1252 for cp1250 or mac_latin2.
COMMON_CHARS_BY_ENCODING = {
    "cp1252": "éèàâêëîïôùûçäöüßñóíáåøæœ’“”–«»",
    "cp1250": "ěščřžýůťďňłęąśżźćőű",
    "cp1251": "оеаинтсрвлкмдпуяыьгз",
    "koi8_r": "оеаинтсрвлкмдпуяыьгз",
    "cp1253": "αοιετσνηυρπκμλςόίά",
    "cp1254": "ığşüöçİ",
    "cp1255": "יוהלאמרתשבנםעח",
    "cp1256": "اليمنورتبةعدسف",
    "cp932": "のにはをたがでてとしれさいるこ、。",
    "euc_jp": "のにはをたがでてとしれさいるこ、。",
    "cp949": "이다의에는을가하고지은를인로도",
    "gb18030": "的一是不了在人有我这中国上个，。",
    "big5": "的一是不了在人有我這中國上個，。",
}
# They decode other bytes to frequent characters only rarely, so a lower share is enough.
MULTIBYTE_ENCODINGS = {"cp932", "euc_jp", "cp949", "gb18030", "big5"}
LATIN_ENCODINGS = {"cp1252", "cp1250", "cp1254"}  # their non-ASCII letters stand beside ASCII letters
NON_ASCII_BYTE = re.compile(rb"[\x80-\xff]")
NON_ASCII_BYTE_BESIDE_LETTER = re.compile(rb"(?<=[A-Za-z])[\x80-\xff]|[\x80-\xff](?=[A-Za-z])")
ENCODING_BY_BOM = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
# Codecs from text to text that Python lists with the encodings: parts of domain names, and escapes in source code.
ESCAPE_CODECS = {"raw-unicode-escape", "unicode-escape", "idna", "punycode", "undefined"}
COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
}


def open_zst(file: Path | IO[bytes], mode: str) -> Any:
    """Open a .zst file for streaming decompression."""
    assert mode == "rb", "Firth writes no .zst files"
    name = getattr(file, "name", file)
    return import_optional("pyarrow", f"{name}: reading .zst files").input_stream(file, compression="zstd")


DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": open_zst}
EXTRA_OF_PACKAGE = {
    "pyarrow": "data",
    "trafilatura": "data",
    "pypdf": "data",
    "datasets": "hf",
    "py3langid": "language",
}
COMPRESSED_EXTENSIONS_TEXT = ", ".join(DECOMPRESSORS)
RATIO_SAMPLE_BYTES = 2**22  # of text, from which the size of a compressed file's text is estimated
MAX_SHORT_READ_BYTES = 2**13  # of a compressed file, while that size is estimated


class ShortReads(io.FileIO):
    """A file that returns at most 8 KB per read, so that its position is close to what a decompressor has used.

    gzip asks for 128 KB since Python 3.12, bz2 and lzma since 3.14: more than many small files have.
    """

    def read(self, size: int | None = -1, /) -> Any:
        return super().read(MAX_SHORT_READ_BYTES if size is None or size < 0 else min(size, MAX_SHORT_READ_BYTES))


def estimate_text_bytes(path: Path) -> int:
    """Return the size of a file's text. That of a compressed file is estimated from its beginning."""
    size, extension = path.stat().st_size, path.suffix.lower()
    if extension not in DECOMPRESSORS:
        return size
    try:
        with ShortReads(path) as raw, DECOMPRESSORS[extension](raw, "rb") as file:
            sample = len(file.read(RATIO_SAMPLE_BYTES))
            position = raw.tell()
    except READ_ERRORS:
        return size  # the damage is reported when the file is read
    return sample if sample < RATIO_SAMPLE_BYTES else round(sample * size / position)


def import_optional(library: str, feature: str) -> Any:
    """Import an optional dependency; if it is missing, the UserError gives the command that installs it.

    The command names this Python: an environment that go.py made has no `pip` on the user's path.
    """
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError:
        package = library.partition(".")[0]
        wanted = f"'firth[{EXTRA_OF_PACKAGE[package]}]'" if package in EXTRA_OF_PACKAGE else package
        install = f"{shlex.quote(sys.executable)} -m pip install {wanted}"
        raise UserError(f"{feature} needs the package {package}. Install it: {install}") from None


# Opening


class ReadProgress:
    """Bytes read from several files, as stored: compressed files count before decompression."""

    def __init__(self) -> None:
        self.finished_bytes = 0  # bytes of files that were read completely
        self.current_position: Callable[[], int] | None = None  # position in the current file

    @property
    def bytes_read(self) -> int:
        return self.finished_bytes + (self.current_position() if self.current_position else 0)

    @contextmanager
    def track_file(self, size_bytes: int, current_position: Callable[[], int]) -> Iterator[None]:
        """Track a file of this size inside the `with` block; `current_position` returns the position in it."""
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
    """Open a file for reading its decompressed bytes; errors become UserErrors that name the file as `name`.

    `read_progress` tracks the position.
    """
    name = name or str(path)
    extension = path.suffix.lower()
    try:
        check_not_special(path, name)
        with (
            open(path, "rb") as raw,
            (read_progress or ReadProgress()).track_file(size := os.fstat(raw.fileno()).st_size, raw.tell),
            DECOMPRESSORS[extension](raw, "rb") if extension in DECOMPRESSORS else nullcontext(raw) as file,
        ):
            yield cast(IO[bytes], file)
            if (now := os.fstat(raw.fileno()).st_size) < size:
                raise UserError(
                    f"{name}: cut from {size:,} to {now:,} bytes while it was read. Restore it, then try again."
                )
    except FileNotFoundError:
        raise UserError(f"{name}: no such file.") from None
    except READ_ERRORS as e:
        raise make_read_error(e, name, extension) from None


def check_not_special(path: Path, name: str) -> None:
    """Raise a UserError for a pipe, a socket or a device, before it is opened: opening or reading it may never end."""
    if is_special_file(path):
        raise UserError(
            f"{name}: a pipe, a socket or a device, not a file. Copy its text to a file, or give it as `-`."
        )


def is_special_file(path: Path) -> bool:
    """Whether a path exists and is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it gives the reason
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_expansion(num_bytes: int, stored_bytes: int, name: str) -> None:
    """Raise a UserError for a compressed file that is much larger than any text would be."""
    if num_bytes > max(MAX_EXPANDED_BYTES, MAX_EXPANSION * stored_bytes):
        raise UserError(
            f"{name}: {stored_bytes:,} bytes expand to {num_bytes:,} or more, and a text to at most {MAX_EXPANSION} "
            "times as many. If it is right, decompress it first."
        )


def make_read_error(error: Exception, name: str, compression: str) -> UserError:
    """Return the UserError for an exception of reading a file."""
    if isinstance(error, OSError) and error.strerror is not None:
        return UserError(f"{name}: cannot be read ({error.strerror}).")
    if isinstance(error, EOFError) or "Truncated" in str(error):  # pyarrow's message
        return UserError(f"{name}: the compressed file is truncated. Download or compress it again.")
    return UserError(f"{name}: not a complete {compression} file ({error}). Download or compress it again.")


def raise_os_error(error: OSError) -> NoReturn:
    """Raise a UserError with the operating system's reason."""
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}).") from None


def check_encoding(name: str) -> str:
    """Return `name`; raise a UserError if Python has no text encoding of this name."""
    try:
        "".encode(name)
        codecs.getincrementaldecoder(name)
        if codecs.lookup(name).name in ESCAPE_CODECS:
            raise LookupError
    except (LookupError, ValueError):
        raise UserError(
            f"--encoding {shorten(name)}: no such encoding. Common ones: utf-8, utf-16, latin-1, cp1252."
        ) from None
    return name


# Lines


def read_lines(
    path: Path,
    encoding: str = "utf-8",
    max_chars: int = -1,
    name: str | None = None,
    read_progress: ReadProgress | None = None,
    bound_size: bool = False,
) -> Iterator[str]:
    r"""Yield the lines of a file with their \n; a line longer than `max_chars` is yielded in pieces (-1: never).

    `bound_size` refuses a decompression bomb, for callers that hold the whole file in memory.
    """
    held: list[str] = []  # pieces of a line whose \n has not been read
    size = 0
    for text in read_decoded(path, encoding, name, read_progress, bound_size):
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
            if last == "\r":  # it may be the first half of \r\n
                last = pieces.pop() + last
            yield from pieces
            held, size = [last], len(last)
    if size:
        yield from split_long_line("".join(held), max_chars)


def split_long_line(line: str, max_chars: int) -> Iterator[str]:
    r"""Split a line into pieces of `max_chars`. Its \n stays with the last piece: alone it would be a blank line.

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
    path: Path,
    encoding: str,
    name: str | None = None,
    read_progress: ReadProgress | None = None,
    bound_size: bool = False,
) -> Iterator[str]:
    """Yield the decoded text of a file in chunks, without its byte order mark."""
    name = name or str(path)
    decoder = codecs.getincrementaldecoder(encoding)()
    num_bytes = num_newlines = 0  # decoded so far
    has_text = has_non_ascii = False
    with open_decompressed(path, name, read_progress) as file:
        while True:
            try:
                chunk = file.read(READ_CHUNK_BYTES)
            except READ_ERRORS as e:
                where = f"{name}:{num_newlines + 1}" if num_bytes else name
                raise make_read_error(e, where, path.suffix.lower()) from None
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as e:
                before = e.object[: e.start]
                has_non_ascii = has_non_ascii or not before.isascii()
                line = num_newlines + before.count(b"\n") + 1
                make_message = decode_error_message if chunk else truncated_file_message
                message = make_message(name, encoding, num_bytes - pending + e.start, line, e.object, has_non_ascii)
                if path.suffix.lower() in DECOMPRESSORS:
                    message += " Or the compressed file is damaged: download it again."
                raise UserError(message) from None
            except UnicodeError as e:  # UTF-16 without its byte order mark
                raise UserError(f"{name}: not {encoding.upper()} ({e}). {encoding_hint(chunk)}") from None
            if text and not has_text:
                has_text, text = True, text.removeprefix("\ufeff")
                check_is_text(text, chunk, name)
            if text:
                yield text
            if not chunk:
                return
            num_bytes += len(chunk)
            if bound_size and num_bytes > MAX_EXPANDED_BYTES:
                check_expansion(num_bytes, path.stat().st_size, name)
            num_newlines += text.count("\n")
            has_non_ascii = has_non_ascii or not text.isascii()


def decode_error_message(
    name: str, encoding: str, byte_offset: int, line: int, sample: bytes, has_non_ascii: bool
) -> str:
    """Return where decoding failed, and the likely encoding."""
    failure = f"{name}:{line}: not {encoding.upper()}, see byte {byte_offset:,} of its text."
    if has_non_ascii and encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        return (
            f"{failure} The text before it is UTF-8, so the file mixes encodings or is damaged there: repair it, or "
            "convert its parts to UTF-8 one by one."
        )
    return f"{failure} {encoding_hint(sample)}"


def truncated_file_message(
    name: str, encoding: str, byte_offset: int, line: int, sample: bytes, has_non_ascii: bool
) -> str:
    """Return that the last character is incomplete. If it is the only non-ASCII one, the encoding may be another."""
    fix = "" if has_non_ascii else ", or name its --encoding"
    return (
        f"{name}:{line}: ends in the middle of a character of {encoding.upper()}, see byte {byte_offset:,} of its "
        f"text. It is truncated: download it again{fix}."
    )


def encoding_hint(sample: bytes) -> str:
    """Return the fix for bytes that are not in the expected encoding."""
    if extension := next((ext for magic, ext in COMPRESSION_BY_MAGIC.items() if sample.startswith(magic)), None):
        return (
            f"It looks like a {extension} file: decompress it, or give it that extension if it is one of "
            f"{COMPRESSED_EXTENSIONS_TEXT}."
        )
    if guess := guess_encoding(sample):
        return f"It looks like {guess}: --encoding {guess} decodes every file with it."
    if looks_binary(sample.decode("latin-1")):
        return "It does not look like text: leave it out."
    return "If it is in another encoding, name it: --encoding latin-1, for example, decodes every file as Latin-1."


def guess_encoding(sample: bytes) -> str | None:
    """Return the most likely encoding of a sample, or None if no known encoding fits.

    A byte order mark or the zero bytes of UTF-16 decide at once. Otherwise each candidate decodes the sample, and the
    encoding with the largest share of frequent characters among the non-ASCII ones wins.

    >>> guess_encoding("déjà vu".encode("cp1252")), guess_encoding("Это пример".encode("koi8_r"))
    ('cp1252', 'koi8_r')
    """
    if by_bom := next((encoding for bom, encoding in ENCODING_BY_BOM.items() if sample.startswith(bom)), None):
        return by_bom
    for encoding, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[::2])):
        if zeros.count(0) > 0.4 * len(zeros):
            return encoding
    if looks_binary(sample.decode("latin-1")):
        return None
    is_latin = 2 * len(NON_ASCII_BYTE_BESIDE_LETTER.findall(sample)) > len(NON_ASCII_BYTE.findall(sample))
    single_byte = LATIN_ENCODINGS if is_latin else COMMON_CHARS_BY_ENCODING.keys() - LATIN_ENCODINGS
    for encodings, min_share in ((MULTIBYTE_ENCODINGS, 0.15), (single_byte - MULTIBYTE_ENCODINGS, 0.4)):
        scores = {
            encoding: common_char_share(sample, encoding)
            for encoding in COMMON_CHARS_BY_ENCODING
            if encoding in encodings
        }
        best = max(scores, key=scores.__getitem__)
        if scores[best] > min_share:
            return best
    return None


def common_char_share(sample: bytes, encoding: str) -> float:
    """Decode a sample and return the share of frequent characters among the non-ASCII ones; 0 on failure."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return 0.0
    non_ascii = [character for character in text if character > "\x7f"]
    return sum(character in COMMON_CHARS_BY_ENCODING[encoding] for character in non_ascii) / max(len(non_ascii), 1)


def looks_binary(text: str) -> bool:
    """Whether control characters are more than `MAX_CONTROL_CHAR_SHARE` of a text."""
    return len(CONTROL_CHARS.findall(text)) > MAX_CONTROL_CHAR_SHARE * len(text)


def check_is_text(text: str, chunk: bytes, name: str) -> None:
    """Raise a UserError for binary data that decodes, as any bytes do in Latin-1."""
    if looks_binary(text):
        raise UserError(
            f"{name}: not text: control characters are more than {MAX_CONTROL_CHAR_SHARE:.0%} of its start. "
            f"{encoding_hint(chunk)}"
        )
