"""Exact deduplication in bounded memory: a set of text hashes in SQLite."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path


class DiskFingerprintSet:
    """A set of 64-bit hashes on disk, of which at most `max_cache_bytes` are cached in memory.

    The file is temporary: `close` removes it, and a leftover of a crashed process is replaced.
    """

    def __init__(self, file: Path, max_cache_bytes: int) -> None:
        self.file = file
        file.unlink(missing_ok=True)
        self.connection = sqlite3.connect(file)
        for setting in ("journal_mode = off", "synchronous = off", f"cache_size = -{max_cache_bytes // 1024}"):
            self.connection.execute(f"pragma {setting}")
        self.connection.execute("create table seen (mark integer primary key)")

    def is_new(self, fingerprint: bytes) -> bool:
        """Whether the first 8 bytes of a fingerprint were not passed before."""
        number = int.from_bytes(fingerprint[:8], "little", signed=True)
        try:
            return self.connection.execute("insert or ignore into seen values (?)", (number,)).rowcount == 1
        except sqlite3.Error as e:
            if e.sqlite_errorcode not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file)) from None

    def close(self) -> None:
        self.connection.close()
        self.file.unlink(missing_ok=True)
