"""Cache of plans by number, with background planning of the next one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PlansAhead"]

T = TypeVar("T")

#: Cached plans: the one from which batches are delivered, and those whose jobs are already submitted.
_KEPT = 4


class PlansAhead(Generic[T]):
    """Thread-safe cache of plans, which are made one at a time.

    Args:
        make: function that makes a plan from its numbers, such as pass and chunk.
    """

    def __init__(self, make: Callable[..., T]):
        self._make = make
        self._made: dict[tuple[int, ...], T] = {}
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, *numbers: int) -> T:
        """Return a plan; make it first, or wait for it, if necessary."""
        # Reads need no lock, and must not wait while another plan is made.
        plan = self._made.get(numbers)
        if plan is not None:
            return plan
        with self._making:
            plan = self._made.get(numbers)
            if plan is None:
                plan = self._make(*numbers)
                self._made[numbers] = plan
                while len(self._made) > _KEPT:
                    self._made.pop(next(iter(self._made)))
        return plan

    def prepare(self, *numbers: int) -> None:
        """Start to make a plan in the background, unless one is being made already."""
        if numbers in self._made or (self._thread is not None and self._thread.is_alive()):
            return
        # One thread for each plan: between plans, a process that forks workers has no such thread.
        self._thread = threading.Thread(target=self._make_quietly, args=numbers, daemon=True)
        self._thread.start()

    def _make_quietly(self, *numbers: int) -> None:
        # An error is suppressed here; it occurs again when the plan is requested.
        with contextlib.suppress(Exception):
            self.get(*numbers)
