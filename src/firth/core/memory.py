"""The free memory of this machine, read before something large is allocated.

Sizes in a file are not believed: Linux grants almost any allocation and kills the process when the pages are touched.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from firth.core.errors import UserError
from firth.core.files import format_bytes

MEMINFO_FILE = Path("/proc/meminfo")
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
