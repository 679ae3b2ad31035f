"""Timing of a sample of the jobs, stage by stage, at negligible cost. The timed jobs represent the others."""

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

# The two costs are measured by ``tools/bench/stage_times.py``, and rounded up.
#: Seconds that the timing of one step costs.
_STEP = 1.5e-6
#: Fixed cost of a timed job, in steps.
_EVERY_JOB = 24
#: Largest share of a worker's time that is spent on timing.
_SHARE = 1 / 250


class Times(NamedTuple):
    """Times reported by a worker.

    Attributes:
        seconds: duration of a timed job.
        steps: stage, data set (``"*"``: several) and seconds, for each stage of the job.
        cpu_seconds: the part of ``seconds`` in which the thread used the CPU.
        sent: seconds spent on packing and sending results since the last report.
        reads: what was read since the last report.
    """

    seconds: float
    steps: Sequence[tuple[str, str, float]]
    cpu_seconds: float = 0.0
    sent: float = 0.0
    reads: Reads = Reads()


class _Watched(Protocol):
    """Maker of samples that notifies observers."""

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
        """End the step that was begun last."""
        at = self._at
        if at is not None:
            self.seconds[at] = self.seconds.get(at, 0.0) + now - self._since
            self._at = None


class JobTimer:
    """Timer of the jobs of one worker. Timing costs about a microsecond for each step of each sample, which is much for
    samples that take ten. So after a timed job, some time passes before the next one, in proportion to its number of
    steps: timing takes a 250th of all time. Slow jobs, which last longer than this pause, are all timed.

    Args:
        tell: called with the times of each timed job.

    Attributes:
        due: time of the next timed job, by the monotonic clock.
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
        """Return the result of ``make``, and report its times."""
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
