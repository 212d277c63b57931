"""Exact deduplication in bounded memory: a set of text hashes in SQLite."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

FAILED_WRITES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_TRUNCATE)


class DiskFingerprintSet:
    """A set of 64-bit hashes on disk, of which at most `max_cache_bytes` are cached in memory.

    The file is temporary: `close` removes it, and a leftover of a crashed process is replaced.
    """

    def __init__(self, file: Path, max_cache_bytes: int) -> None:
        self.file = file
        file.unlink(missing_ok=True)
        try:
            self.connection = sqlite3.connect(file)
            for setting in ("journal_mode = off", "synchronous = off", f"cache_size = -{max_cache_bytes // 1024}"):
                self.connection.execute(f"pragma {setting}")
            self.connection.execute("create table seen (mark integer primary key)")
        except sqlite3.Error as e:
            raise self.as_os_error(e) from None

    def is_new(self, fingerprint: bytes) -> bool:
        """Whether the first 8 bytes of a fingerprint were not passed before."""
        number = int.from_bytes(fingerprint[:8], "little", signed=True)
        try:
            return self.connection.execute("insert or ignore into seen values (?)", (number,)).rowcount == 1
        except sqlite3.Error as e:
            raise self.as_os_error(e) from None

    def as_os_error(self, error: sqlite3.Error) -> OSError:
        """SQLite names no errno: any failed write stands for a full disk, everything else for a failing one."""
        if getattr(error, "sqlite_errorcode", 0) in FAILED_WRITES:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))
        return OSError(errno.EIO, f"{os.strerror(errno.EIO)} ({error})", str(self.file))

    def close(self) -> None:
        with suppress(sqlite3.Error):  # a full disk: the file goes anyway
            self.connection.close()
        self.file.unlink(missing_ok=True)
