"""The copy of the next batch begins before the batch of now is handed out, so that it overlaps with the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from energon_lite.loading.device import DeviceCopy, Underway
from energon_lite.loading.executors.work_seconds import WorkSeconds
from energon_lite.loading.makers.pipeline import Result

__all__ = ["OneAhead"]


class _Taken(NamedTuple):
    """A result, and the copy of its batch."""

    result: Result
    underway: Underway


class OneAhead:
    """Results on their way to a device.

    A result that was taken ahead is not delivered, and no state knows of it: the caller moves its cursor, and counts,
    when it hands a batch out. Where the copy does not overlap, nothing is taken ahead.

    Args:
        copy: to the device.
        load: the next result, None at the end; called again after :meth:`forget`, or after it raised, it begins over.
        work: is told how long it takes to begin the copies.
    """

    def __init__(self, copy: DeviceCopy, load: Callable[[], Result | None], work: WorkSeconds | None = None):
        self.copy, self._load, self._work = copy, load, work or WorkSeconds()
        self._now: _Taken | None = None
        self._next: _Taken | BaseException | None = None

    def take(self) -> Result | None:
        """The next result (its batch is not for use); None at the end. What went wrong ahead is raised here."""
        following = self._next
        self._next = None
        if isinstance(following, BaseException):
            raise following
        self._now = following or self._taken()
        return None if self._now is None else self._now.result

    def finish(self) -> Any:
        """The batch of the result taken last, on the device. The caller's cursor stands behind it by now."""
        now = self._now
        self._now = None
        assert now is not None
        if self.copy.overlaps:
            try:
                self._next = self._taken()
            except BaseException as error:
                # Also an interrupt: the batch in hand counts as delivered, so it has to be handed out.
                self._next = error
        return self.copy.finish(now.underway)

    def forget(self) -> None:
        """What was taken ahead is not wanted any more."""
        self._now = self._next = None

    def _taken(self) -> _Taken | None:
        result = self._load()
        if result is None:
            return None
        began = time.monotonic()
        taken = _Taken(result, self.copy.start(result.batch))
        self._work.received += time.monotonic() - began
        return taken
