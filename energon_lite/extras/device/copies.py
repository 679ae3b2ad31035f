"""Copy of batches to the accelerator while it computes the step before, and prefetching of the next batch.

A copy overlaps with computation under three conditions: it starts from page-locked memory, it runs on a stream of its
own, and it is started before the batch is needed. So a copy has two parts, :meth:`DeviceCopy.start` and
:meth:`DeviceCopy.finish`, and the loader does other work between them.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from energon_lite.errors import UsageError
from energon_lite.loading.batch_path import BatchPath, PathRequest
from energon_lite.loading.executors.executor import WorkSeconds
from energon_lite.loading.makers.outcomes import Result
from energon_lite.tensors import map_tensors

__all__ = ["DeviceCopy", "DevicePrefetcher", "Underway", "copies_ahead"]


class Underway(NamedTuple):
    """A batch whose copy was started, with the event that marks the end of the copy (None: it is complete)."""

    batch: Any
    arrived: torch.cuda.Event | None


class DeviceCopy:
    """Copier of batches, with tensors at any depth, to a device. For the CPU, nothing is copied.

    Args:
        device: device as torch names it; ``cuda`` is the current one.

    Raises:
        UsageError: there is no such device.

    Example:
        >>> copy = DeviceCopy("cuda")
        >>> underway = copy.start(batch)  # returns at once
        >>> ...  # the step before
        >>> batch = copy.finish(underway)  # the current stream waits for the copy, the process does not
    """

    def __init__(self, device: torch.device | str):
        try:
            self.device = torch.device(device)
            if self.device.type == "cuda" and self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"batches cannot go to the device {str(device)!r}: {str(error).splitlines()[0]}",
                fix="give a device of this machine, such as 'cpu' or 'cuda:0'",
            ) from None

    @property
    def overlaps(self) -> bool:
        """True if a copy continues while this process does other work."""
        return self._stream is not None

    def start(self, batch: Any) -> Underway:
        """Start the copy of a batch."""
        if self.device.type == "cpu":
            return Underway(batch, None)
        if self._stream is None:
            return Underway(map_tensors(lambda tensor: tensor.to(self.device), batch), None)
        # torch keeps the memory of a page-locked tensor until copies from it are done, so no reference is needed here.
        with torch.cuda.stream(self._stream):
            moved = map_tensors(self._copy, batch)
            arrived = self._stream.record_event()
        return Underway(moved, arrived)

    def finish(self, underway: Underway) -> Any:
        """Return the batch, for use on the current stream."""
        if underway.arrived is None:
            return underway.batch
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(underway.arrived)

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            # Its memory belongs to the copying stream and must not be reused while the current stream reads it.
            if tensor.is_cuda:
                tensor.record_stream(stream)
            return tensor

        map_tensors(used_here, underway.batch)
        return underway.batch

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(self.device, non_blocking=True)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)


class _Taken(NamedTuple):
    """A result, and the running copy of its batch."""

    result: Result
    underway: Underway


class DevicePrefetcher(BatchPath):
    """Path of results to a device, one ahead. If the copy does not overlap, nothing is taken ahead.

    Args:
        copy: copier to the device.
        before: path that returns the results.
        work: record of the time that it takes to start the copies.
    """

    def __init__(self, copy: DeviceCopy, before: BatchPath, work: WorkSeconds | None = None):
        self.copy = copy
        self._before = before
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

    def finish(self, result: Result) -> Any:
        now = self._now
        self._now = None
        assert now is not None and now.result is result
        if self.copy.overlaps:
            try:
                self._next = self._taken()
            except BaseException as error:
                # Also an interrupt: the current batch counts as delivered, so it has to be returned.
                self._next = error
        return self.copy.finish(now.underway)

    def forget(self) -> None:
        self._now = self._next = None
        self._before.forget()

    def _taken(self) -> _Taken | None:
        result = self._before.take()
        if result is None:
            return None
        began = time.monotonic()
        taken = _Taken(result, self.copy.start(result.batch))
        self._work.received += time.monotonic() - began
        return taken


def copies_ahead(request: PathRequest) -> BatchPath:
    """Return the path to the device of a request."""
    assert request.device is not None
    return DevicePrefetcher(DeviceCopy(request.device), request.before, request.work)
