"""How fast a loader is with some setting, while nobody but it needs time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.tuning.memory import memory_of
from energon_lite.extras.inspect.tuning.setting import Setting, Speed
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.recipes import get_savable_loader

__all__ = ["LoaderSpeed"]

#: Of the seconds that a setting is measured for, those in which it gets going.
_START = 0.25
#: Batches that are seen at least, for each worker, if they come within so many times the seconds.
_BATCHES, _LONGER = 6, 2.5


class LoaderSpeed:
    """Measures settings, one after the other. Each goes on in the data where the one before it stopped.

    Args:
        make_dataset: a data set for a number of workers.
        seconds: that each setting is measured for; longer if batches come slowly.
        most_batches: the same, in batches, if that is less.

    Example:
        >>> measure = LoaderSpeed(lambda workers: get_train_dataset(path, worker_config=config_of(workers), ...), 2.0)
        >>> measure(Setting(workers=4)).samples
        1204.3
    """

    def __init__(self, make_dataset: Callable[[int], SavableDataset], seconds: float, most_batches: int = 1 << 30):
        self._make, self._seconds, self._most = make_dataset, seconds, most_batches
        self._state: Any = None

    def __call__(self, setting: Setting) -> Speed:
        """How fast it is. A setting that the data set, or its hooks, cannot be loaded with has no speed, but a reason.

        Raises:
            EnergonLiteError: the data set cannot be loaded at all.
        """
        dataset = self._make(setting.workers)
        try:
            loader = get_savable_loader(dataset, prefetch_factor=setting.prefetch, start_method=setting.start_method)
        except UsageError as error:
            if not setting.workers:
                raise
            return Speed(setting, 0.0, error=error.what)
        with loader:
            if self._state is not None:
                loader.restore_state_rank(self._state)
            batches = self._endless(loader)
            next(batches)
            began, count = time.monotonic(), 0
            # What is ready already comes faster than it is made.
            ready = min(self._most, setting.workers * (setting.prefetch + 1))
            while count < ready or (time.monotonic() - began < _START * self._seconds and count < self._most):
                next(batches)
                count += 1
            times, samples = self._times(loader, batches, setting)
            stats, memory = loader.stats(), memory_of(os.getpid())
            self._state = loader.save_state_rank()
        slope = _slope(times, 3 * max(1, setting.workers))
        return Speed(setting, slope * samples / (len(times) - 1), slope, memory, stats["bottleneck"])

    def _times(self, loader: Any, batches: Iterator[Any], setting: Setting) -> tuple[list[float], int]:
        """When batches came, and samples in all of them but the first."""
        before, began = loader.stats()["samples"], time.monotonic()
        times, wanted = [began], max(4, _BATCHES * setting.workers)
        while (seconds := times[-1] - began) < self._seconds * _LONGER and len(times) <= self._most:
            if seconds >= self._seconds and len(times) > wanted:
                break
            next(batches)
            times.append(time.monotonic())
        while len(times) < 3:
            next(batches)
            times.append(time.monotonic())
        return times, loader.stats()["samples"] - before

    @staticmethod
    def _endless(loader: Any) -> Iterator[Any]:
        while True:
            before = loader.stats()["batches"]
            yield from loader
            if loader.stats()["batches"] == before:
                raise UsageError("the data set has no batch", fix="use smaller batches, or more data")


def _slope(times: Sequence[float], least: int) -> float:
    """Batches a second: the slope of their number, since batches of several workers come in bursts. With so many in
    each third, the median of the thirds: somebody else may have had the machine for a while."""
    parts = np.array_split(np.array(times), 3 if len(times) >= 3 * max(4, least) else 1)
    return float(np.median([np.polyfit(part, np.arange(len(part)), 1)[0] for part in parts]))
