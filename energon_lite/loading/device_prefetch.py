"""Prefetching to a device: the copy of the next batch starts before the current batch is returned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from energon_lite.loading.device import DeviceCopy, Underway
from energon_lite.loading.executors.work_seconds import WorkSeconds
from energon_lite.loading.makers.pipeline import Result

__all__ = ["DevicePrefetcher"]


class _Taken(NamedTuple):
    """A result, and the running copy of its batch."""

    result: Result
    underway: Underway


class DevicePrefetcher:
    """Results on their way to a device, one ahead.

    A result that was taken ahead is not delivered, and is not counted in states: the caller advances its cursor, and
    counts, when it delivers a batch. If the copy does not overlap, nothing is taken ahead.

    Args:
        copy: copier to the device.
        load: returns the next result, None at the end; after :meth:`forget`, or after it raised, it starts over.
        work: record of the time that it takes to start the copies.
    """

    def __init__(self, copy: DeviceCopy, load: Callable[[], Result | None], work: WorkSeconds | None = None):
        self.copy = copy
        self._load = load
        self._work = work or WorkSeconds()
        self._now: _Taken | None = None
        self._next: _Taken | BaseException | None = None

    def take(self) -> Result | None:
        """Return the next result (its batch is not for use); None at the end. Errors of the prefetch are raised now."""
        following = self._next
        self._next = None
        if isinstance(following, BaseException):
            raise following
        self._now = following or self._taken()
        return None if self._now is None else self._now.result

    def finish(self) -> Any:
        """Return the batch of the result taken last, on the device. The caller has advanced its cursor past it."""
        now = self._now
        self._now = None
        assert now is not None
        if self.copy.overlaps:
            try:
                self._next = self._taken()
            except BaseException as error:
                # Also an interrupt: the current batch counts as delivered, so it has to be returned.
                self._next = error
        return self.copy.finish(now.underway)

    def forget(self) -> None:
        """Drop the result that was taken ahead."""
        self._now = self._next = None

    def _taken(self) -> _Taken | None:
        result = self._load()
        if result is None:
            return None
        began = time.monotonic()
        taken = _Taken(result, self.copy.start(result.batch))
        self._work.received += time.monotonic() - began
        return taken
