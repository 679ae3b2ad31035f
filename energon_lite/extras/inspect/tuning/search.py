"""Which settings are tried, and which of them is proposed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.tuning.setting import Setting, Speed

__all__ = ["Bounds", "Tuning", "tune"]

#: A setting that is not faster by this is not worth more workers, or another kind of them.
_WORTH = 0.04
#: Twice as many workers that gain less than this gain nothing; after two such doublings it is enough.
_GAIN = 0.1
#: What is slower than this share of the fastest is not worth a look at what is near it.
_NEAR = 0.7
#: Batches ahead that are tried.
_PREFETCH = (4, 8)
#: The best ones are measured again, as long as there is time.
_FINALISTS, _TIMES = 3, 3


@dataclass(frozen=True)
class Bounds:
    """Within which limits.

    Args:
        workers: at most.
        seconds: for all of it.
        memory: bytes of the process and its workers, at most; None: any.
        batches: a second that are enough, because the trainer takes no more; None: as many as can be had.
        threads: try them, too.
    """

    workers: int
    seconds: float = 60.0
    memory: int | None = None
    batches: float | None = None
    threads: bool = True


@dataclass
class Tuning:
    """What was found.

    Attributes:
        speeds: all that was measured, in its order.
        left_out: what was not tried, and why.
        best: what is proposed.
    """

    speeds: list[Speed] = field(default_factory=list)
    left_out: dict[Setting, str] = field(default_factory=dict)
    best: Speed | None = None

    def of(self, setting: Setting) -> Speed | None:
        """The speed of a setting: the best, if it was measured several times, since others can only take some away."""
        found = [one for one in self.speeds if one.setting == setting]
        if not found:
            return None
        memory = max(one.memory for one in found)
        return replace(max(found, key=lambda one: one.samples), memory=memory)

    @property
    def spread(self) -> float:
        """How far the same setting was from itself, at most: 0.2: a look was a fifth slower than another one."""
        least: dict[Setting, float] = {}
        for one in self.speeds:
            if one.samples > 0:
                least[one.setting] = min(one.samples, least.get(one.setting, one.samples))
        return max((1 - least[one.setting] / one.samples for one in self.all() if one.samples > 0), default=0.0)

    def all(self) -> list[Speed]:
        """The speed of each setting that was tried."""
        found = [self.of(setting) for setting in dict.fromkeys(one.setting for one in self.speeds)]
        return [one for one in found if one is not None]


def tune(
    measure: Callable[[Setting], Speed],
    bounds: Bounds,
    *,
    tell: Callable[[Speed], None] = lambda speed: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Find a good setting: the number of workers is doubled as long as that helps, then looked at more closely; then
    threads, and more batches ahead. Of settings that are about as fast, the one with the fewest workers is proposed.

    Args:
        measure: measures a setting.
        bounds: within which limits.
        tell: hears of each result.
        clock: of seconds.

    Raises:
        UsageError: not even the loader without workers is within the memory limit, or nothing could be run.
    """
    search = _Search(measure, bounds, tell, clock)
    search.run()
    found = search.tuning
    found.best = _proposal(found, bounds)
    return found


class _Search:
    def __init__(
        self,
        measure: Callable[[Setting], Speed],
        bounds: Bounds,
        tell: Callable[[Speed], None],
        clock: Callable[[], float],
    ):
        self._measure, self._bounds, self._tell, self._clock = measure, bounds, tell, clock
        self._began = clock()
        self._took: list[float] = []  # seconds, each
        self.tuning = Tuning()

    def run(self) -> None:
        self._try(Setting(0))
        best = self._most_workers("fork", 1)
        if self._bounds.threads and not self._is_enough():
            number = min(max(2, best), self._bounds.workers)
            self._try(Setting(number, start_method="thread"))
            if self._is_near("thread"):
                self._most_workers("thread", number)
        for kind in ("process", "thread"):
            if self._is_near(kind) and not self._is_enough():
                fastest = max(self._of_kind(kind), key=lambda one: one.samples)
                for prefetch in _PREFETCH:
                    self._try(replace(fastest.setting, prefetch=prefetch))
        self._again()

    def _most_workers(self, start_method: str, number: int) -> int:
        """Double the workers, from a number on, as long as it helps; then try what is between. The best number."""
        tried = {
            one.setting.workers: one.samples for one in self.tuning.all() if one.setting.kind == _kind(start_method)
        }
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
            if number == self._bounds.workers:
                break
            number = min(2 * number, self._bounds.workers)
        for _ in range(4):
            best = max(tried, key=lambda one: tried[one], default=0)
            between = self._between(tried, best)
            if between is None:
                break
            speed = self._try(Setting(between, start_method=start_method))
            if speed is None:
                break
            tried[between] = speed.samples
        return max(tried, key=lambda one: tried[one], default=0)

    def _between(self, tried: dict[int, float], best: int) -> int | None:
        """A number of workers that is worth a try: around the best one, or the smallest that is about as fast."""
        numbers = sorted(tried)
        place = numbers.index(best) if best in tried else 0
        above = numbers[place + 1] if place + 1 < len(numbers) else best
        if above - best > 1 and tried[above] > _NEAR * tried[best]:
            return (best + above) // 2
        enough = (1 - _WORTH) * tried.get(best, 0.0)
        if self._bounds.batches is not None and (leader := self._leader()).batches:
            enough = min(enough, self._bounds.batches * leader.samples / leader.batches)
        good = min((one for one in numbers if tried[one] >= enough), default=best)
        below = max((one for one in numbers if one < good), default=good)
        return (good + below) // 2 if good - below > 1 else None

    def _again(self) -> None:
        """Measure the best ones again: a single look at a machine on which others work, too, may be a lucky one."""
        for _ in range(_TIMES - 1):
            for one in sorted(self._fitting(), key=lambda speed: -speed.samples)[:_FINALISTS]:
                self._try(one.setting, again=True)

    def _try(self, setting: Setting, *, again: bool = False) -> Speed | None:
        """Measure a setting; None: there is no time, or no memory, for it."""
        known = self.tuning.of(setting)
        if known is not None and not again:
            return known
        used = self._clock() - self._began
        if self._took and used + statistics.median(self._took) > self._bounds.seconds:
            if not again:
                self.tuning.left_out[setting] = "no time was left"
            return None
        needed, limit = self._memory_of(setting), self._bounds.memory
        if limit is not None and needed is not None and needed > limit:
            self.tuning.left_out[setting] = f"would take {needed / (1 << 30):.2f} GiB"
            return None
        began = self._clock()
        speed = self._measure(setting)
        self._took.append(self._clock() - began)
        self.tuning.speeds.append(speed)
        self._tell(speed)
        return speed

    def _most_that_fit(self, start_method: str, workers: int) -> int:
        """The most workers, below a number, that fit into memory."""
        limit, number = self._bounds.memory, workers - 1
        while limit is not None and number > 0:
            needed = self._memory_of(Setting(number, start_method=start_method))
            if needed is None or needed <= limit:
                break
            number -= 1
        return 0 if limit is None else number

    def _memory_of(self, setting: Setting) -> int | None:
        """Bytes that a setting would take, as others of its kind did; None: nobody knows."""
        alone = self.tuning.of(Setting(0))
        if alone is None or not alone.memory:
            return None
        alike = [one for one in self.tuning.all() if one.memory and one.setting.kind == setting.kind]
        each = [(one.memory - alone.memory) / one.setting.workers for one in alike if one.setting.workers]
        ahead = max([1.0, *(setting.prefetch / one.setting.prefetch for one in alike if one.setting.workers)])
        return int(alone.memory + setting.workers * max([0.0, *each]) * ahead)

    def _fitting(self) -> list[Speed]:
        return _fitting(self.tuning, self._bounds)

    def _leader(self) -> Speed:
        return max(self._fitting(), key=lambda one: one.samples, default=self.tuning.speeds[0])

    def _of_kind(self, kind: str) -> list[Speed]:
        return [one for one in self._fitting() if one.setting.workers and one.setting.kind == kind]

    def _is_near(self, kind: str) -> bool:
        """Whether workers of a kind are nearly as fast as the fastest, so that more may be got out of them."""
        fastest = max((one.samples for one in self._of_kind(kind)), default=0.0)
        return fastest > 0 and fastest >= _NEAR * self._leader().samples

    def _is_enough(self) -> bool:
        return self._bounds.batches is not None and self._leader().batches >= self._bounds.batches


def _kind(start_method: str) -> str:
    return Setting(1, start_method=start_method).kind


def _fitting(tuning: Tuning, bounds: Bounds) -> list[Speed]:
    """What could be run, within the memory limit."""
    limit = bounds.memory
    return [one for one in tuning.all() if one.samples > 0 and (limit is None or one.memory <= limit)]


def _proposal(tuning: Tuning, bounds: Bounds) -> Speed:
    """The cheapest of those that are about as fast as the fastest, or fast enough.

    Raises:
        UsageError: there is none.
    """
    fitting = _fitting(tuning, bounds)
    if not fitting:
        failed = next((one.error for one in tuning.speeds if one.error), "")
        raise UsageError(
            f"no setting could be run: {failed}" if failed else "not even the loader without workers fits into memory",
            fix="mend it first" if failed else "give more memory, or use smaller batches",
        )
    enough = (1 - _WORTH) * max(one.samples for one in fitting)
    good = [one for one in fitting if one.samples >= enough]
    if bounds.batches is not None:
        good = [one for one in fitting if one.batches >= bounds.batches] or good
    return min(good, key=lambda one: (one.setting.workers, one.setting.kind == "thread", one.setting.prefetch))
