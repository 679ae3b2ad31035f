"""Some jobs are timed, stage by stage: so many that it costs next to nothing. What they say stands for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from energon_lite.loading.makers.observer import Observer
from energon_lite.loading.makers.outcomes import Address
from energon_lite.loading.makers.stage_timer import stage_of
from energon_lite.storage.files.read_counts import COUNTS, Reads

__all__ = ["JobTimer", "Times"]

T = TypeVar("T")

#: Seconds that it takes to look at a step, with all that follows from it; and the steps that a timed job costs beside
#: its own. Measured by ``tools/bench/stage_times.py``, with room.
_STEP, _EVERY_JOB = 1.5e-6, 24
#: The share of its time that a worker gives for this, at most.
_SHARE = 1 / 250


class Times(NamedTuple):
    """What a worker has to say of its time.

    Attributes:
        seconds: of a job that was timed, from its beginning to its end.
        steps: stage, data set (``"*"``: of several) and seconds in it.
        cpu_seconds: of ``seconds``, those in which its thread did not wait.
        sent: seconds in which results were packed and sent, since the last time.
        reads: what was read since the last time.
    """

    seconds: float
    steps: Sequence[tuple[str, str, float]]
    cpu_seconds: float = 0.0
    sent: float = 0.0
    reads: Reads = Reads()


class _Watched(Protocol):
    """What makes samples, and has those who look on told."""

    observers: tuple[Observer, ...]


class _StageCounter:
    """An observer in one thread that adds up seconds by stage and data set, of all batches of a job."""

    sees_samples = times_samples = False

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}
        self.steps = 0
        self._at: tuple[str, str] | None = None
        self._since = 0.0

    def begin(self) -> None:
        pass  # a chunk has several batches

    def step(self, stage: str, leaf: str, key: str) -> None:
        now = time.monotonic()
        self.close(now)
        self._at = (stage, leaf)
        self._since = now
        self.steps += 1

    def end(self, addresses: Sequence[Address | None]) -> None:
        self.close(time.monotonic())

    def close(self, now: float) -> None:
        """The step that was begun last has ended."""
        at = self._at
        if at is not None:
            self.seconds[at] = self.seconds.get(at, 0.0) + now - self._since
            self._at = None


class JobTimer:
    """Times the jobs of one worker. To look costs about a microsecond for each step of each sample, which is much for
    samples that take ten. So from the beginning of a job of so many steps some time passes until the next one is timed:
    they cost a 250th of all time. Jobs of slow samples, which take longer than that, are timed one by one.

    Args:
        tell: gets what a job said.

    Attributes:
        due: when the next job is to be timed, by the monotonic clock.
        sent: seconds for :attr:`Times.sent`.

    Example:
        >>> timer = JobTimer(times.append)
        >>> result = timer.run(pipeline.samples, lambda: pipeline.run(job)) if now >= timer.due else pipeline.run(job)
    """

    def __init__(self, tell: Callable[[Times], Any]):
        self._tell = tell
        self.due = 0.0
        self.sent = 0.0

    def run(self, samples: _Watched, make: Callable[[], T]) -> T:
        """What ``make`` returns; it is timed."""
        counter = _StageCounter()
        before = samples.observers
        samples.observers = (*before, counter)
        began = time.monotonic()
        cpu = time.thread_time()
        try:
            return make()
        finally:
            cpu = time.thread_time() - cpu
            ended = time.monotonic()
            counter.close(ended)
            samples.observers = before
            self.due = began + (counter.steps + _EVERY_JOB) * _STEP / _SHARE
            steps = dict[tuple[str, str], float]()
            for (step, leaf), seconds in counter.seconds.items():
                stage = stage_of(step), leaf
                steps[stage] = steps.get(stage, 0.0) + seconds
            sent = self.sent
            self.sent = 0.0
            self._tell(
                Times(ended - began, [(*of, seconds) for of, seconds in steps.items()], cpu, sent, COUNTS.take())
            )
