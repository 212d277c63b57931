"""The free memory of this machine, read before something large is allocated, and the memory of this process.

Sizes in a file are not believed: Linux grants almost any allocation and kills the process when the pages are touched.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from firth.core.errors import UserError
from firth.core.files import format_bytes

MEMINFO_FILE = Path("/proc/meminfo")
STATUS_FILE, CLEAR_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CGROUP_LIMIT_FILES = tuple(Path("/sys/fs/cgroup") / f for f in ("memory.max", "memory/memory.limit_in_bytes"))  # v2, v1


def free_memory() -> int:
    """Return the free memory in bytes, within the limits of the container and of the process; 0 if unknown."""
    limits = [soft for soft, _ in [resource.getrlimit(resource.RLIMIT_AS)] if soft != resource.RLIM_INFINITY]
    with suppress(OSError, ValueError):
        lines = MEMINFO_FILE.read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for file in CGROUP_LIMIT_FILES:
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits, default=0)


def check_memory(needed_bytes: int, purpose: str, fix: str) -> None:
    """Raise a UserError if something takes more memory than is free; `purpose` and `fix` are parts of its message."""
    free = free_memory()
    if free and needed_bytes > free:
        raise UserError(
            f"{purpose} takes {format_bytes(needed_bytes)}, and this machine has {format_bytes(free)} free. {fix}"
        )


def process_memory_bytes() -> int:
    """Resident memory of this process."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory() -> bool:
    """Let `peak_memory_bytes` count from here on; return whether this system can (Linux)."""
    try:
        CLEAR_FILE.write_text("5", encoding="ascii")  # the kernel's documentation, proc.rst
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """Return the most resident memory of this process since `reset_peak_memory`, or its start (Linux)."""
    lines = STATUS_FILE.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def return_freed_memory() -> None:
    """Return freed memory to the system, between the parts of a run: else the next part takes its own beside it.

    glibc keeps freed blocks between live ones; with another C library nothing is done.
    """
    gc.collect()
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
