"""Copy of batches to the accelerator while it computes the step before, the hook for batches there, and prefetching.

A copy overlaps with computation under three conditions: it starts from page-locked memory, it runs on a stream of its
own, and it is started before the batch is needed. So a copy has two parts, :meth:`DeviceCopy.start` and
:meth:`DeviceCopy.finish`, and the loader does other work between them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from energon_lite.errors import UsageError
from energon_lite.extras.device.pinned import SEGMENTS, Arrival, CudaEngine, PinnedSegments
from energon_lite.hooks import HookContext, LendingScope, is_overridden
from energon_lite.hooks.global_generators import restores_seeds
from energon_lite.hooks.hooks import hook_of
from energon_lite.loading.batch_path import BatchPath, PathRequest
from energon_lite.loading.executors.executor import WorkSeconds
from energon_lite.loading.makers.hook_errors import check_result, note_where
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.outcomes import Result
from energon_lite.order.hashing import HashDomain
from energon_lite.tensors import map_tensors

logger = logging.getLogger(__name__)

#: Entry of states with the name of the decoder of ``encode_on_device``.
_DECODER = "device_decoder"
#: Name of the hook for batches on a device.
_HOOK = "encode_on_device"
_DEVICE = HashDomain.DEVICE_HOOK.value


class Underway(NamedTuple):
    """A batch whose copy was started, with the mark at the end of the copy (None: it is complete)."""

    batch: Any
    arrived: Arrival | None


class DeviceCopy:
    """Copier of batches, with tensors at any depth, to a device. For the CPU, nothing is copied.

    A batch that a worker process has made is copied from the worker's memory, which is page-locked at the first copy;
    other tensors through page-locked memory of torch.

    Args:
        device: device as torch names it; ``cuda`` is the current one.
        engine: stream of the device; None: a new one for ``cuda``, none for others.
        segments: registry of page-locked segments.

    Raises:
        UsageError: there is no such device.

    Example:
        >>> copy = DeviceCopy("cuda")
        >>> underway = copy.start(batch)  # returns at once
        >>> ...  # the step before
        >>> batch = copy.finish(underway)  # the current stream waits for the copy, the process does not
    """

    def __init__(
        self,
        device: torch.device | str,
        engine: CudaEngine | None = None,
        segments: PinnedSegments = SEGMENTS,
    ):
        try:
            self.device = torch.device(device)
            if self.device.type == "cuda" and self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self.engine = CudaEngine(self.device) if engine is None and self.device.type == "cuda" else engine
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"batches cannot go to the device {str(device)!r}: {str(error).splitlines()[0]}",
                fix="give a device of this machine, such as 'cpu' or 'cuda:0'",
            ) from None
        self.segments = segments

    @property
    def overlaps(self) -> bool:
        """True if a copy continues while this process does other work."""
        return self.engine is not None

    def start(self, batch: Any, then: Callable[[Any], Any] | None = None) -> Underway:
        """Start the copy of a batch.

        Args:
            batch: the batch, in memory of this process.
            then: work on the copied batch, on the same stream; its result takes the place of the batch.
        """
        then = then or (lambda moved: moved)
        engine = self.engine
        if engine is None:
            on_cpu = self.device.type == "cpu"
            return Underway(then(batch if on_cpu else map_tensors(lambda one: one.to(self.device), batch)), None)
        places = set[int]()

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor.to(self.device, non_blocking=True)
            place = self.segments.place_of(tensor, engine)
            if place is not None:
                places.add(place)
            elif not tensor.is_pinned():
                tensor = tensor.pin_memory()  # torch keeps this memory until copies from it are done
            return engine.copy(tensor)

        with engine.stream():
            try:
                moved = then(map_tensors(copied, batch))
            finally:  # also after an error or an interrupt, since copies may have begun
                arrived = engine.record()
                self.segments.hold(arrived, batch, frozenset(places))
        return Underway(moved, arrived)

    def finish(self, underway: Underway) -> Any:
        """Return the batch, for use on the current stream."""
        if underway.arrived is None or self.engine is None:
            return underway.batch
        return self.engine.hand_over(underway.batch, underway.arrived)


class DeviceHook:
    """Caller of the hook ``encode_on_device``, with the randomness of its batch, whoever has loaded it.

    Args:
        runner: runner of the jobs, with the encoder and the seed of the run.
        generator: global generator of the device; None: it has none of its own.
    """

    def __init__(self, runner: JobRunner, generator: torch.Generator | None):
        self._runner = runner
        self._generator = generator
        self._seeds = restores_seeds(hook_of(runner.encoder, _HOOK))

    def guarded(self, batch: Any, digest: int) -> Any:
        """Return the result of the hook for a batch.

        Args:
            batch: the batch, on the device.
            digest: digest of its samples, from which its randomness follows.

        Raises:
            FatalSampleError: the hook returned what no hook may return.
        """
        hook = getattr(self._runner.encoder, _HOOK)
        whose = "a batch on the device"
        services = self._runner.services
        context = HookContext(
            *(self._runner.seed, _DEVICE, digest), cache=services.cache_pool, worker_config=services.worker_config
        )
        with LendingScope(), context, self._seeded(context):
            try:
                made = hook(batch)
            except Exception as error:
                note_where(error, _HOOK, whose)
                raise
        check_result(made, _HOOK, hook, whose)
        return made

    @contextmanager
    def _seeded(self, context: HookContext) -> Iterator[None]:
        """Seed the global generators, those of the processor and of the device; restore the latter at the end."""
        if self._seeds:
            context.seed_globals()
        if self._generator is None or not self._seeds:
            yield
            return
        before = self._generator.get_state()
        self._generator.manual_seed(context.seed >> 1)
        try:
            yield
        finally:
            self._generator.set_state(before)


def device_hook(runner: JobRunner, generator: torch.Generator | None) -> DeviceHook | None:
    """Return the caller of the hook; None: the task encoder has none."""
    return DeviceHook(runner, generator) if is_overridden(runner.encoder, _HOOK) else None


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
        hook: caller of the hook ``encode_on_device``; None: there is none.
        decoder: name of the decoder that the hook uses; "": none.
    """

    def __init__(
        self,
        copy: DeviceCopy,
        before: BatchPath,
        work: WorkSeconds | None = None,
        *,
        hook: DeviceHook | None = None,
        decoder: str = "",
    ):
        self.copy = copy
        self._before = before
        self._work = work or WorkSeconds()
        self._hook = hook
        self._decoder = decoder
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

    def stats(self) -> dict[str, Any]:
        return {"unpinned_segments": self.copy.segments.refused}

    def notes(self) -> dict[str, str]:
        return {_DECODER: self._decoder} if self._decoder else {}

    def restored(self, state: Mapping[str, Any]) -> None:
        before = state.get(_DECODER, self._decoder)
        if before != self._decoder:
            logger.warning(
                "images were decoded by %s when the state was saved, and are now by %s: pixels differ a little",
                before,
                self._decoder or "the hooks",
            )

    def _taken(self) -> _Taken | None:
        result = self._before.take()
        if result is None:
            return None
        began = time.monotonic()
        hook = self._hook
        then = None
        if hook is not None and result.batch is not None:
            then = partial(hook.guarded, digest=self._before.digest(result))
        taken = _Taken(result, self.copy.start(result.batch, then))
        self._work.received += time.monotonic() - began
        return taken


def copies_ahead(request: PathRequest) -> BatchPath:
    """Return the path to the device of a request."""
    assert request.device is not None
    copy = DeviceCopy(request.device)
    hook = device_hook(request.runner, None if copy.engine is None else copy.engine.generator)
    decoder = None if hook is None else request.runner.encoder.device_decoder
    name = "" if decoder is None else decoder.opened(copy.device)
    return DevicePrefetcher(copy, request.before, request.work, hook=hook, decoder=name)
