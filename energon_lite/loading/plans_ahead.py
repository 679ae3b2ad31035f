"""Plan chunks by their number: kept while they are in use, and made ahead in the background."""

from __future__ import annotations

import contextlib
import threading

from energon_lite.batching.token_plan import PlannedChunk, TokenPlan

__all__ = ["PlansAhead"]

#: Chunks that are kept: the one that batches are delivered from, and those that jobs are made of already.
_KEPT = 4


class PlansAhead:
    """Makes plan chunks, one at a time, each once while it is in use.

    Args:
        plan: what makes them.
    """

    def __init__(self, plan: TokenPlan):
        self._plan = plan
        self._made: dict[tuple[int, int], PlannedChunk] = {}
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, pass_number: int, number: int) -> PlannedChunk:
        """A chunk. If it is being made, this waits for it."""
        # Reading needs no lock, and must not wait while another chunk is made.
        found = self._made.get((pass_number, number))
        if found is not None:
            return found
        with self._making:
            found = self._made.get((pass_number, number))
            if found is None:
                found = self._plan.make(pass_number, number)
                self._made[pass_number, number] = found
                while len(self._made) > _KEPT:
                    self._made.pop(next(iter(self._made)))
        return found

    def prepare(self, pass_number: int, number: int) -> None:
        """Begin to make a chunk in the background, unless one is being made already."""
        if (pass_number, number) in self._made or (self._thread is not None and self._thread.is_alive()):
            return
        # A thread for each chunk: between them, a process that starts workers by fork has none.
        self._thread = threading.Thread(target=self._make_quietly, args=(pass_number, number), daemon=True)
        self._thread.start()

    def _make_quietly(self, pass_number: int, number: int) -> None:
        # What goes wrong does so again, in the right place, when the chunk is wanted.
        with contextlib.suppress(Exception):
            self.get(pass_number, number)
