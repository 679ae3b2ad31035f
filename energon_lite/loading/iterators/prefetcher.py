"""Keeps an executor supplied with the jobs that come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from energon_lite.loading.executors.executor import Executor
from energon_lite.loading.makers.pipeline import Job, Result

__all__ = ["Prefetcher"]

#: A pass, and a position in it.
Place = tuple[int, int]


class Prefetcher:
    """The results of jobs, in their order, some of which are submitted before their turn.

    Args:
        executor: who runs them.
        ahead: jobs submitted before their turn.
    """

    def __init__(self, executor: Executor, ahead: int):
        self._executor, self._ahead = executor, ahead
        self._tickets: deque[int] = deque()
        self._jobs: Iterator[Job] = iter(())
        self._next: Place | None = None  # where the first of _tickets belongs

    def take(self, at: Place, following: Place, jobs: Callable[[], Iterator[Job]]) -> Result:
        """The result of the job at a place.

        Quick if the place was ``following`` at the last call, and nothing was raised (an interrupt may come between any
        two steps) since that began; else it begins over.

        Args:
            at: the place.
            following: where the next result will be asked for, as far as one knows.
            jobs: makes the jobs from ``at`` on.
        """
        expected, self._next = self._next, None
        if at != expected:
            self._executor.cancel()
            self._tickets.clear()
            self._jobs = jobs()
        ahead = self._executor.ahead(self._ahead)
        while len(self._tickets) <= ahead and (job := next(self._jobs, None)) is not None:
            self._tickets.append(self._executor.submit(job))
        result = self._executor.result(self._tickets.popleft())
        self._next = following
        return result

    def forget(self) -> None:
        """What comes next are other jobs from now on, at the same place too."""
        self._next = None

    def close(self) -> None:
        """Let go of the executor."""
        self._executor.close()
