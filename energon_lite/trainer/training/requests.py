"""What a run is asked for from outside while it trains: to save and stop, by a signal or a time limit, or only to save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from energon_lite.trainer.parallel.mesh import ParallelMesh

#: Why a run stops: signals, and ``train.time_limit``. Slurm sends the second one ahead (``--signal=USR1@300``).
_STOPS = ("SIGTERM", "SIGUSR1", "train.time_limit")
_SAVE = "SIGUSR2"


class Requests:
    """Signals that came, and the time that is left. They reach ranks at different times; :meth:`agreed` is for all.

    Args:
        time_limit: seconds from now at which the run is to be over, its last checkpoint included; None for no limit.
        mesh: the ranks.
    """

    def __init__(self, time_limit: float | None, mesh: ParallelMesh):
        self.time_limit, self.mesh = time_limit, mesh
        self._came: set[str] = set()
        self._began = self._asked = time.monotonic()
        self._slowest = 0.0  # seconds from one step to the next

    @contextmanager
    def listening(self) -> Iterator[set[str]]:
        """Meanwhile, SIGTERM does not end the process on the spot; nor do SIGUSR1 and 2, if nobody else wants them.

        Gives the names of those that came and were not asked for yet.
        """
        self._came.clear()
        before = {}
        if threading.current_thread() is threading.main_thread():  # only that one may have signal handlers
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
                    before[number] = signal.signal(number, lambda came, _: self._came.add(signal.Signals(came).name))
        self._asked = time.monotonic()
        try:
            yield self._came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, bad: bool, *, seconds_to_save: float = 0.0) -> tuple[str | None, bool, bool]:
        """What is asked for, on any rank, after a step. Every rank must call it.

        The time limit counts as reached when what is left is less than the slowest step and two of the slowest
        checkpoints so far: the one that is being written, and the last.

        Args:
            bad: something else to agree on: whether the step was bad.
            seconds_to_save: how long a checkpoint takes, as far as this rank knows.

        Returns:
            Why the run is to stop, or None; whether to save; whether the step was bad on any rank.
        """
        now = time.monotonic()
        self._slowest, self._asked = max(self._slowest, now - self._asked), now
        if self.time_limit is not None:
            left = self.time_limit - (now - self._began)
            if left < self._slowest + 2 * seconds_to_save:
                self._came.add(_STOPS[-1])
        *told, save, bad = self.mesh.any_rank_each(*(name in self._came for name in (*_STOPS, _SAVE)), bad)
        self._came.discard(_SAVE)
        return next((name for name, came in zip(_STOPS, told, strict=True) if came), None), save, bad
