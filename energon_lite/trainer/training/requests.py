"""What a run is asked for while it trains: to save and stop, by a signal or a time limit, or only to save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

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
        self._tried = False  # to find out how long a checkpoint takes
        # A GPU would answer when all it has to do before is done.
        apart = mesh.world_size > 1 and mesh.device.type == "cuda"
        self._group = dist.new_group(backend="gloo", timeout=mesh.timeout) if apart else None

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

    def agreed(self, *bad: bool, seconds_to_save: float = 0.0) -> tuple[str, bool, list[bool]]:
        """What is asked for, on any rank, after a step was launched. Every rank must call it.

        The time limit counts as reached when what is left is less than two of the slowest steps so far, the running one
        and the next, and two of the slowest checkpoints: the one that may be being written, and the last. While nobody
        knows how long one takes, one is asked for when half of the time is gone.

        Args:
            bad: something else to agree on: whether steps were bad.
            seconds_to_save: how long a checkpoint takes, as far as this rank knows; 0: it does not.

        Returns:
            Why the run is to stop, or nothing; whether to save; whether each of the steps was bad on any rank.
        """
        now = time.monotonic()
        self._slowest, self._asked = max(self._slowest, now - self._asked), now
        if self.time_limit is not None:
            left = self.time_limit - (now - self._began)
            if left < 2 * (self._slowest + seconds_to_save):
                self._came.add(_STOPS[-1])
            elif not (seconds_to_save or self._tried) and left < self.time_limit / 2:
                self._came.add(_SAVE)
        flags = [*(name in self._came for name in (*_STOPS, _SAVE)), *bad]
        if self.mesh.world_size > 1:
            told = torch.tensor(flags, dtype=torch.int64)
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
            flags = [bool(flag) for flag in told.tolist()]
        self._came.discard(_SAVE)
        self._tried = self._tried or flags[len(_STOPS)]  # on all ranks, whose clocks are not one
        stop = next((name for name, came in zip(_STOPS, flags, strict=False) if came), "")
        return stop, flags[len(_STOPS)], flags[len(_STOPS) + 1 :]
