"""Plans by their number: kept while they are in use, and made ahead in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PlansAhead"]

T = TypeVar("T")

#: What is kept: the plan that batches are delivered from, and those that jobs are made of already.
_KEPT = 4


class PlansAhead(Generic[T]):
    """Makes plans, one at a time, each once while it is in use.

    Args:
        make: what makes a plan of its numbers: pass and chunk, for example.
    """

    def __init__(self, make: Callable[..., T]):
        self._make = make
        self._made: dict[tuple[int, ...], T] = {}
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, *numbers: int) -> T:
        """A plan. If it is being made, this waits for it."""
        # Reading needs no lock, and must not wait while another plan is made.
        found = self._made.get(numbers)
        if found is not None:
            return found
        with self._making:
            found = self._made.get(numbers)
            if found is None:
                found = self._make(*numbers)
                self._made[numbers] = found
                while len(self._made) > _KEPT:
                    self._made.pop(next(iter(self._made)))
        return found

    def prepare(self, *numbers: int) -> None:
        """Begin to make a plan in the background, unless one is being made already."""
        if numbers in self._made or (self._thread is not None and self._thread.is_alive()):
            return
        # A thread for each plan: between them, a process that starts workers by fork has none.
        self._thread = threading.Thread(target=self._make_quietly, args=numbers, daemon=True)
        self._thread.start()

    def _make_quietly(self, *numbers: int) -> None:
        # What goes wrong does so again, in the right place, when the plan is wanted.
        with contextlib.suppress(Exception):
            self.get(*numbers)
