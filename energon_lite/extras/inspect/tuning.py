"""Settings of a loader, their measured speeds, and the search for the one to propose."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from energon_lite.errors import UsageError, counted


@dataclass(frozen=True, order=True)
class Setting:
    """Worker settings of a loader.

    Args:
        workers: number of workers of a rank; 0: the trainer's process does the work.
        prefetch: batches that each worker loads ahead.
        start_method: start method of the workers.
    """

    workers: int
    prefetch: int = 2
    start_method: str = "fork"

    def __str__(self) -> str:
        if not self.workers:
            return "no workers"
        ahead = f", {self.prefetch} ahead" if self.prefetch != 2 else ""
        return counted(self.workers, "thread" if self.kind == "thread" else "worker") + ahead

    @property
    def kind(self) -> str:
        """Kind of the workers: ``thread`` or ``process``."""
        return "thread" if self.start_method == "thread" else "process"


@dataclass(frozen=True)
class Speed:
    """Measured speed of a setting.

    Args:
        setting: the setting.
        samples: samples per second; 0 if it could not be run.
        batches: batches per second.
        memory: bytes of the process and its workers, with shared memory counted once; 0 if unknown.
        limit: the bottleneck of the loader, as in ``loader.stats()["bottleneck"]``.
        error: reason why it could not be run.
    """

    setting: Setting
    samples: float
    batches: float = 0.0
    memory: int = 0
    limit: dict[str, Any] | None = None
    error: str = ""


#: Relative gain in speed that justifies more workers, or another kind of workers.
_WORTH = 0.04
#: Relative gain that a doubling of workers must reach; after two failures, doubling stops.
_GAIN = 0.1
#: Share of the fastest speed below which a setting's neighbours are not tried.
_NEAR = 0.7
#: Values of ``prefetch`` that are tried.
_PREFETCH = (4, 8)
#: Most of the best settings that are measured again, if time permits.
_FINALISTS = 3
#: Most measurements of each of them.
_TIMES = 3


@dataclass(frozen=True)
class Bounds:
    """Limits of a search.

    Args:
        workers: the most workers.
        seconds: the most seconds of the whole search.
        memory: the most bytes of the process and its workers; None for no limit.
        batches: batches per second that suffice for the trainer; None for as many as possible.
        threads: True to try threads, too.
    """

    workers: int
    seconds: float = 60.0
    memory: int | None = None
    batches: float | None = None
    threads: bool = True


@dataclass
class Tuning:
    """Result of a search.

    Attributes:
        speeds: all measurements, in order.
        left_out: settings that were not tried, with reasons.
        best: the proposed setting.
    """

    speeds: list[Speed] = field(default_factory=list)
    left_out: dict[Setting, str] = field(default_factory=dict)
    best: Speed | None = None

    def of(self, setting: Setting) -> Speed | None:
        """Return the speed of a setting, or None: the best of several, since other load can only lower it."""
        same = [speed for speed in self.speeds if speed.setting == setting]
        if not same:
            return None
        memory = max(speed.memory for speed in same)
        return replace(max(same, key=lambda speed: speed.samples), memory=memory)

    @property
    def spread(self) -> float:
        """The largest relative difference between measurements of one setting, such as 0.2 for a fifth."""
        speeds: dict[Setting, list[float]] = {}
        for speed in self.speeds:
            if speed.samples > 0:
                speeds.setdefault(speed.setting, []).append(speed.samples)
        return max((1 - min(each) / max(each) for each in speeds.values()), default=0.0)

    def all(self) -> list[Speed]:
        """Return the speed of each setting that was tried."""
        speeds = [self.of(setting) for setting in dict.fromkeys(speed.setting for speed in self.speeds)]
        return [speed for speed in speeds if speed is not None]


def tune(
    measure: Callable[[Setting], Speed],
    bounds: Bounds,
    *,
    tell: Callable[[Speed], None] = lambda speed: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Find a good setting.

    The number of workers is doubled as long as that helps, then refined; then threads are tried, and more batches
    ahead.
    Of settings with similar speeds, the one with the fewest workers is proposed.

    Args:
        measure: function that measures a setting.
        bounds: limits of the search.
        tell: function called with each result.
        clock: clock in seconds.

    Raises:
        UsageError: the loader without workers exceeds the memory limit, or no setting could be run.
    """
    search = _Search(measure, bounds, tell, clock, clock())
    search.run()
    search.tuning.best = _proposal(search.tuning, bounds)
    return search.tuning


@dataclass
class _Search:
    measure: Callable[[Setting], Speed]
    bounds: Bounds
    tell: Callable[[Speed], None]
    clock: Callable[[], float]
    began: float
    took: list[float] = field(default_factory=list)  # seconds of each measurement
    tuning: Tuning = field(default_factory=Tuning)

    def run(self) -> None:
        self._try(Setting(0))
        best = self._most_workers("fork", 1)
        if self.bounds.threads and not self._is_enough():
            number = min(max(2, best), self.bounds.workers)
            self._try(Setting(number, start_method="thread"))
            if self._is_near("thread"):
                self._most_workers("thread", number)
        for kind in ("process", "thread"):
            if self._is_near(kind) and not self._is_enough():
                fastest = max(self._of_kind(kind), key=lambda speed: speed.samples)
                for prefetch in _PREFETCH:
                    self._try(replace(fastest.setting, prefetch=prefetch))
        # The best settings are measured again, because one measurement on a shared machine may be too good.
        for _ in range(_TIMES - 1):
            for finalist in sorted(_fitting(self.tuning, self.bounds), key=lambda speed: -speed.samples)[:_FINALISTS]:
                self._try(finalist.setting, again=True)

    def _most_workers(self, start_method: str, number: int) -> int:
        """Double the workers, from a number on, as long as it helps; then refine. Return the best number."""
        kind = Setting(number, start_method=start_method).kind
        tried = {speed.setting.workers: speed.samples for speed in self.tuning.all() if speed.setting.kind == kind}
        first, in_vain = number, 0
        while in_vain < 2 and not self._is_enough():
            before = max(tried.values(), default=0.0)
            speed = self._try(Setting(number, start_method=start_method))
            if speed is None and (most := self._most_that_fit(start_method, number)) > max(tried, default=0):
                number = most
                speed = self._try(Setting(number, start_method=start_method))
            if speed is None or not speed.samples:
                break
            tried[number] = speed.samples
            in_vain = in_vain + 1 if number > first and speed.samples < (1 + _GAIN) * before else 0
            if number == self.bounds.workers:
                break
            number = min(2 * number, self.bounds.workers)
        for _ in range(4):
            best = max(tried, key=tried.__getitem__, default=0)
            between = self._between(tried, best)
            if between is None:
                break
            speed = self._try(Setting(between, start_method=start_method))
            if speed is None:
                break
            tried[between] = speed.samples
        return max(tried, key=tried.__getitem__, default=0)

    def _between(self, tried: dict[int, float], best: int) -> int | None:
        """Return a number of workers to try: near the best one, or below the smallest of similar speed."""
        numbers = sorted(tried)
        place = numbers.index(best) if best in tried else 0
        above = numbers[place + 1] if place + 1 < len(numbers) else best
        if above - best > 1 and tried[above] > _NEAR * tried[best]:
            return (best + above) // 2
        enough = (1 - _WORTH) * tried.get(best, 0.0)
        if self.bounds.batches is not None and (leader := self._leader()).batches:
            enough = min(enough, self.bounds.batches * leader.samples / leader.batches)
        good = min((number for number in numbers if tried[number] >= enough), default=best)
        below = max((number for number in numbers if number < good), default=good)
        return (good + below) // 2 if good - below > 1 else None

    def _try(self, setting: Setting, *, again: bool = False) -> Speed | None:
        """Measure a setting; None if time or memory does not suffice."""
        known = self.tuning.of(setting)
        if known is not None and not again:
            return known
        used = self.clock() - self.began
        if self.took and used + statistics.median(self.took) > self.bounds.seconds:
            if not again:
                self.tuning.left_out[setting] = "no time was left"
            return None
        needed, limit = self._memory_of(setting), self.bounds.memory
        if limit is not None and needed is not None and needed > limit:
            self.tuning.left_out[setting] = f"would take {needed / (1 << 30):.2f} GiB"
            return None
        began = self.clock()
        speed = self.measure(setting)
        self.took.append(self.clock() - began)
        self.tuning.speeds.append(speed)
        self.tell(speed)
        return speed

    def _most_that_fit(self, start_method: str, workers: int) -> int:
        """Return the most workers, below a number, that fit into memory."""
        if self.bounds.memory is None:
            return 0
        fewer = (Setting(number, start_method=start_method) for number in range(workers - 1, 0, -1))
        return next((one.workers for one in fewer if (self._memory_of(one) or 0) <= self.bounds.memory), 0)

    def _memory_of(self, setting: Setting) -> int | None:
        """Estimate the bytes that a setting would take from others of its kind; None if unknown."""
        alone = self.tuning.of(Setting(0))
        if alone is None or not alone.memory:
            return None
        alike = [speed for speed in self.tuning.all() if speed.memory and speed.setting.kind == setting.kind]
        with_workers = [speed for speed in alike if speed.setting.workers]
        each = [(speed.memory - alone.memory) / speed.setting.workers for speed in with_workers]
        ahead = max([1.0, *(setting.prefetch / speed.setting.prefetch for speed in with_workers)])
        return int(alone.memory + setting.workers * max([0.0, *each]) * ahead)

    def _leader(self) -> Speed:
        return max(_fitting(self.tuning, self.bounds), key=lambda speed: speed.samples, default=self.tuning.speeds[0])

    def _of_kind(self, kind: str) -> list[Speed]:
        fitting = _fitting(self.tuning, self.bounds)
        return [speed for speed in fitting if speed.setting.workers and speed.setting.kind == kind]

    def _is_near(self, kind: str) -> bool:
        """Return whether workers of a kind are nearly as fast as the fastest, so that refining them may pay off."""
        fastest = max((speed.samples for speed in self._of_kind(kind)), default=0.0)
        return fastest > 0 and fastest >= _NEAR * self._leader().samples

    def _is_enough(self) -> bool:
        return self.bounds.batches is not None and self._leader().batches >= self.bounds.batches


def _fitting(tuning: Tuning, bounds: Bounds) -> list[Speed]:
    """Return the settings that could be run within the memory limit."""
    limit = bounds.memory
    return [speed for speed in tuning.all() if speed.samples > 0 and (limit is None or speed.memory <= limit)]


def _proposal(tuning: Tuning, bounds: Bounds) -> Speed:
    """Return the cheapest setting that is about as fast as the fastest, or fast enough.

    Raises:
        UsageError: no setting could be run within the limits.
    """
    fitting = _fitting(tuning, bounds)
    if not fitting:
        failed = next((speed.error for speed in tuning.speeds if speed.error), "")
        raise UsageError(
            f"no setting could be run: {failed}" if failed else "not even the loader without workers fits into memory",
            fix="mend it first" if failed else "give more memory, or use smaller batches",
        )
    enough = (1 - _WORTH) * max(speed.samples for speed in fitting)
    good = [speed for speed in fitting if speed.samples >= enough]
    if bounds.batches is not None:
        good = [speed for speed in fitting if speed.batches >= bounds.batches] or good
    return min(good, key=lambda speed: (speed.setting.workers, speed.setting.kind == "thread", speed.setting.prefetch))
