"""Memory: what processes have, and what there is for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_memory", "memory_of"]

#: Where the limit of a container is, and what it has of it, for both versions of control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def memory_of(process: int, *, quickly: bool = False) -> int:
    """Bytes of a process and those that it started; what several of them share counts once. 0: nobody knows.

    Args:
        process: its number.
        quickly: in microseconds, and too much: what is shared counts for each.
    """
    return sum(_quick(one) if quickly else _exact(one) for one in _tree(process))


def available_memory() -> int | None:
    """Bytes that this machine, or container, has left; None: nobody knows."""
    found = []
    with suppress(OSError, TypeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        found.append(1024 * int(re.search(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)[1]))  # type: ignore[index]
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": there is none
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(found, default=None)


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
