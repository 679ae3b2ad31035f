"""Load of this machine, from the counters of Linux."""

from __future__ import annotations

import time
from pathlib import Path

#: Seconds between two measurements.
_EVERY = 0.5
_COUNTERS = Path("/proc/stat")


class HostLoad:
    """Comparison of the share of this machine's processors that is in use with a limit.

    Args:
        limit: share from which on the load is high, 0 to 1.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._at = 0.0
        self._counted = (0, 0)
        self._share = 0.0

    def is_high(self) -> bool:
        """Return whether the share is above the limit; False on systems without counters."""
        now = time.monotonic()
        if now - self._at >= _EVERY:
            self._at = now
            before, self._counted = self._counted, _busy_and_all()
            busy, total = (later - earlier for later, earlier in zip(self._counted, before, strict=True))
            self._share = busy / total if before != (0, 0) and total else 0.0
        return self._share > self._limit


def _busy_and_all() -> tuple[int, int]:
    """Return the ticks in which processors were busy, and all ticks."""
    try:
        _, *ticks = _COUNTERS.read_text().split("\n", 1)[0].split()
    except OSError:
        return 0, 0
    numbers = [int(tick) for tick in ticks[:8]]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)
