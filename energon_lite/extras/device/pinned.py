"""Segments of workers that are page-locked where they are, so that a batch is copied from there to a GPU at once.

A worker writes its batches into a few segments of shared memory, again and again. Each is registered with the device
at the first copy from it, and unregistered when it is mapped anew (it has grown) or closed. The trainer's tensors refer
to the segment, so it is written again only after they are deleted; torch knows nothing of this, so a batch is held here
until the copy from it has ended.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import torch

from energon_lite.loading.executors.segments import MappedSegment, mapped_at
from energon_lite.tensors import map_tensors

logger = logging.getLogger(__name__)

#: Flag of ``cudaHostRegister``: the memory is page-locked for all devices.
_PORTABLE = 1


class Arrival(Protocol):
    """Mark on a stream, by the names of :class:`torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if all work before the mark is done."""

    def synchronize(self) -> None:
        """Wait, in this process, for the work before the mark."""


class CudaEngine:
    """Stream of an NVIDIA GPU, and the memory that it copies from: all that copies need of CUDA.

    Args:
        device: the GPU, with its index.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def generator(self) -> torch.Generator | None:
        """Global generator of the device."""
        return torch.cuda.default_generators[self._device.index]

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work goes to the stream."""
        return torch.cuda.stream(self._stream)

    def register(self, address: int, size: int) -> None:
        """Page-lock memory of this process.

        Raises:
            RuntimeError: the system refuses it.
        """
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        except RuntimeError:
            with suppress(RuntimeError):  # CUDA keeps the error for the next launch, which must not be the user's
                torch.empty(1, device=self._device).fill_(1)
            raise

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor in page-locked memory; inside of :meth:`stream`."""
        return tensor.to(self._device, non_blocking=True)

    def record(self) -> Arrival:
        """Return a mark after all work that was begun."""
        return self._stream.record_event()

    def hand_over(self, batch: Any, arrival: Arrival) -> Any:
        """Return a batch for use by the caller's work on the device, which waits for the mark; the process does not."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrival)  # type: ignore[arg-type]  # it is one of record()

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            # Its memory belongs to the copying stream and must not be reused while the current stream reads it.
            if tensor.is_cuda:
                tensor.record_stream(stream)
            return tensor

        map_tensors(used_here, batch)
        return batch


class _Held(NamedTuple):
    """A batch in this process's memory, with the addresses of its segments, until a mark is reached."""

    arrival: Arrival
    batch: Any
    segments: frozenset[int]


class PinnedSegments:
    """Registry of the segments that are page-locked, and of the batches that are being copied from them.

    Attributes:
        pinned: whether the registration succeeded, by the address of each segment that was copied from and still
            exists.
        refused: number of segments that could not be registered; they are copied through page-locked memory of torch.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, bool] = {}
        self.refused = 0
        self._held: list[_Held] = []
        self._lock = threading.RLock()  # loaders may be in several threads

    def place_of(self, tensor: torch.Tensor, engine: CudaEngine) -> int | None:
        """Return the address of the page-locked segment that has a tensor, registered now if it is new; None: the
        tensor is in other memory."""
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return None
        segment = mapped_at(tensor.data_ptr())
        if segment is None:
            return None
        with self._lock:
            pinned = self.pinned.get(segment.address)
            return segment.address if (self._pin(segment, engine) if pinned is None else pinned) else None

    def hold(self, arrival: Arrival, batch: Any, segments: frozenset[int]) -> None:
        """Keep a batch, which is in these segments, until its copy has ended; let go of those whose copies have."""
        with self._lock:
            self._held = [held for held in self._held if not held.arrival.query()]
            if segments:
                self._held.append(_Held(arrival, batch, segments))

    def _pin(self, segment: MappedSegment, engine: CudaEngine) -> bool:
        address = segment.address
        try:
            engine.register(address, segment.size)
        except RuntimeError as error:
            if not self.refused:
                logger.warning(
                    "workers' memory cannot be page-locked, so batches are copied once more (logged once, counted in "
                    "loader.stats()): %s",
                    error,
                )
            self.refused += 1
            self.pinned[address] = False
        else:
            self.pinned[address] = True
        weakref.finalize(segment, self._end, engine, address, os.getpid()).atexit = False
        return self.pinned[address]

    def _end(self, engine: CudaEngine, address: int, owner: int) -> None:
        """Forget a segment that is about to be unmapped."""
        if os.getpid() != owner:  # a forked worker drops the trainer's maps, and must not call CUDA
            self.pinned.pop(address, None)
            return
        with self._lock:
            for held in self._held:
                if address in held.segments:
                    held.arrival.synchronize()
            self._held = [held for held in self._held if address not in held.segments]
            if self.pinned.pop(address, False):
                with suppress(RuntimeError):
                    engine.unregister(address)


#: Segments of all loaders of this process.
SEGMENTS = PinnedSegments()
