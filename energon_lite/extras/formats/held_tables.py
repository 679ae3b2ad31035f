"""Decoded pieces of files that a process keeps: those that were used last, up to a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from energon_lite.errors import ShardFormatError

__all__ = ["HELD_BYTES", "HeldTables", "held_tables"]

#: Bytes that a process keeps decoded at most; but always one piece. ``ENERGON_LITE_HELD_BYTES`` says another number.
HELD_BYTES = 1 << 29


class HeldTables:
    """Keeps what was made last.

    Args:
        limit: bytes at most; but the last piece is kept whatever its size.

    Attributes:
        size: bytes that are kept.
        made: pieces that were made so far.

    Example:
        >>> held = HeldTables(1 << 20)
        >>> table = held.get(("a.parquet", 3), lambda: read_row_group(3))
    """

    def __init__(self, limit: int):
        self.limit, self.size, self.made = limit, 0, 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made for a key, or is made now. That a piece is damaged is kept, too, and raised again."""
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
        if found is None:
            try:
                made = make()
            except ShardFormatError as error:
                made = error.with_traceback(None)  # each sample of a damaged piece would read all of it again
            found = (made, int(getattr(made, "nbytes", 0)))
            self._keep(key, found)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _keep(self, key: Hashable, piece: tuple[Any, int]) -> None:
        with self._lock:
            self.made += 1
            if key not in self._kept:
                self._kept[key] = piece
                self.size += piece[1]
            while len(self._kept) > 1 and self.size > self.limit:
                self.size -= self._kept.popitem(last=False)[1][1]


_shared: dict[int, HeldTables] = {}


def held_tables() -> HeldTables:
    """That of this process. A child of a fork begins with none: its parent's would be counted twice."""
    process = os.getpid()
    if process not in _shared:
        _shared.clear()
        _shared[process] = HeldTables(int(os.environ.get("ENERGON_LITE_HELD_BYTES", HELD_BYTES)))
    return _shared[process]
