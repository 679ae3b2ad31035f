"""Memory in use by processes, and memory available."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_memory", "memory_of"]

#: Files with a container's memory limit and usage, for both versions of control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def memory_of(process: int, *, quickly: bool = False) -> int:
    """Return the bytes of a process and its children, with shared memory counted once; 0 if unknown.

    Args:
        process: number of the process.
        quickly: True for an estimate in microseconds, in which shared memory counts for each process.
    """
    return sum(_quick(number) if quickly else _exact(number) for number in _tree(process))


def available_memory() -> int | None:
    """Return the bytes that this machine, or container, has left; None if unknown."""
    limits = []
    with suppress(OSError, TypeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        limits.append(1024 * int(re.search(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)[1]))  # type: ignore[index]
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(limits, default=None)


def _tree(process: int) -> Iterator[int]:
    yield process
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):
                for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                    yield from _tree(int(child))


def _exact(process: int) -> int:
    with suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii", errors="replace")
        return 1024 * sum(int(size) for size in re.findall(r"^Pss:\s*(\d+)", text, re.MULTILINE))
    return 0


def _quick(process: int) -> int:
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return 0
