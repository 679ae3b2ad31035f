"""Measurement of a loader's speed with a setting, without any other work."""

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

#: Share of a measurement's seconds that is spent on warming up.
_START = 0.25
#: The fewest batches per worker in a measurement, and the factor of its seconds that it may take to get them.
_BATCHES = 6
_LONGER = 2.5


class LoaderSpeed:
    """Measures settings one after the other. Each continues in the data where the previous one stopped.

    Args:
        make_dataset: function from a number of workers to a data set.
        seconds: seconds per setting; longer if batches are slow.
        most_batches: the most batches per setting.

    Example:
        >>> measure = LoaderSpeed(lambda workers: get_train_dataset(path, worker_config=config_of(workers), ...), 2.0)
        >>> measure(Setting(workers=4)).samples
        1204.3
    """

    def __init__(self, make_dataset: Callable[[int], SavableDataset], seconds: float, most_batches: int = 1 << 30):
        self._make = make_dataset
        self._seconds = seconds
        self._most = most_batches
        self._state: Any = None

    def __call__(self, setting: Setting) -> Speed:
        """Measure a setting. One that the data set or its hooks do not support has no speed, but an error.

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
            # Batches that are ready already arrive faster than they are made.
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
        """Return the arrival times of batches, and the number of samples in all but the first."""
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
    """Return batches per second: the slope of their number, because batches of several workers arrive in bursts.

    With ``least`` batches in each third, the median of the thirds excludes a temporary load of the machine.
    """
    parts = np.array_split(np.array(times), 3 if len(times) >= 3 * max(4, least) else 1)
    return float(np.median([np.polyfit(part, np.arange(len(part)), 1)[0] for part in parts]))
