"""Services of a loader for its runner: observers of steps, two of which are timers (of every batch by stage and sample,
on request; of some jobs, always); and the door for stores of encoded samples, which other ranks, runs and epochs use.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from energon_lite.hooks import HookContext, Hooks, TaskEncoder
from energon_lite.loading.makers.columns import Rows
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, FailureLog, Result
from energon_lite.order.orders import Order
from energon_lite.storage.files.shard_store import COUNTS, Reads
from energon_lite.storage.stores import CachePool
from energon_lite.worker_config import WorkerConfig

#: Stage of each step that is not a hook.
_STAGES = {"read": "read", "decode": "decode", "decode_columns": "decode", "batch": "batch", "encode_batch": "batch"}
#: Steps that process many samples of a leaf at once.
_OF_SEVERAL = frozenset({"read", "decode_columns"})


def stage_of(step: str) -> str:
    """Return the stage that a step belongs to: ``read``, ``decode``, ``hooks`` or ``batch``."""
    return _STAGES.get(step, "hooks")


class _StepTimer:
    """Observer in one thread that adds up the seconds of steps."""

    sees_samples = False

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str, str], float] = defaultdict(float)  # by stage, leaf and key
        self.steps = 0
        self._at: tuple[str, str, str] | None = None  # the running step
        self._since = 0.0

    def step(self, stage: str, leaf: str, key: str) -> None:
        now = time.monotonic()
        self.close(now)
        self._at = (stage, leaf, key)
        self._since = now
        self.steps += 1

    def close(self, now: float) -> None:
        """End the step that was begun last."""
        if self._at is not None:
            self.seconds[self._at] += now - self._since
            self._at = None


class StageTimer(_StepTimer):
    """Observer in one thread that records the time of each stage, as plain data, in seconds of the monotonic clock.

    A record has ``worker`` (process and thread), ``worker_number``, ``began``, ``ended``, ``stages`` (seconds by
    stage), ``samples`` (key and seconds of each sample that was made by itself) and ``sources`` (leaf number and key of
    each sample in the batch, before packing).

    Args:
        leaves: the leaves, in the order's numbering.
        number: number of the worker among those of its rank.
    """

    def __init__(self, leaves: Sequence[Leaf], number: int = 0) -> None:
        super().__init__()
        self._leaves = leaves
        self._number = number
        self._began = 0.0

    def begin(self) -> None:
        self._at = None
        self.seconds.clear()
        self._began = time.monotonic()

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any]:
        now = time.monotonic()
        self.close(now)
        stages: dict[str, float] = defaultdict(float)
        samples: dict[tuple[str, str], float] = defaultdict(float)
        for (stage, leaf, key), seconds in self.seconds.items():
            stages[stage_of(stage)] += seconds
            if leaf != "*" and stage not in _OF_SEVERAL:
                samples[leaf, key] += seconds
        return {
            "worker": [os.getpid(), threading.current_thread().name],
            "worker_number": self._number,
            "began": self._began,
            "ended": now,
            "stages": dict(stages),
            "samples": [[key, seconds] for (_, key), seconds in samples.items()],
            "sources": [
                [address[0], self._leaves[address[0]].source.key(address[1])]
                for address in addresses
                if address is not None
            ],
        }


def note_transfer(result: Result, began: float, ended: float) -> None:
    """Store the time in which a result was received in its trace."""
    from energon_lite.loading.makers.chunk_job import Made  # a run without chunks needs none of it

    made = result.batch if isinstance(result.batch, list) else []
    traces = [result.trace, *(batch.trace for batch in made if isinstance(batch, Made))]
    for trace in traces:
        if trace is not None:
            trace["received"] = ended
            trace["stages"]["transfer"] = ended - began
            return


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


class _StageCounter(_StepTimer):
    """An observer in one thread that adds up seconds by stage and data set, of all batches of a job."""

    def begin(self) -> None:
        pass  # a chunk has several batches

    def step(self, stage: str, leaf: str, key: str) -> None:
        super().step(stage, leaf, "")

    def end(self, addresses: Sequence[Address | None]) -> None:
        self.close(time.monotonic())


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
        >>> result = timer.run(runner.services, lambda: runner.run(job)) if now >= timer.due else runner.run(job)
    """

    def __init__(self, tell: Callable[[Times], Any]):
        self._tell = tell
        self.due = 0.0
        self.sent = 0.0

    def run(self, services: Services, make: Callable[[], T]) -> T:
        """Return the result of ``make``, and report its times."""
        counter = _StageCounter()
        before = services.observers
        services.observers = (*before, counter)
        began = time.monotonic()
        cpu = time.thread_time()
        try:
            return make()
        finally:
            cpu = time.thread_time() - cpu
            ended = time.monotonic()
            counter.close(ended)
            services.observers = before
            self.due = began + (counter.steps + _EVERY_JOB) * _STEP / _SHARE
            steps = dict[tuple[str, str], float]()
            for (step, leaf, _), seconds in counter.seconds.items():
                stage = stage_of(step), leaf
                steps[stage] = steps.get(stage, 0.0) + seconds
            sent = self.sent
            self.sent = 0.0
            self._tell(
                Times(ended - began, [(*of, seconds) for of, seconds in steps.items()], cpu, sent, COUNTS.take())
            )


class Observer(Protocol):
    """Receiver of a notification before each step.

    Attributes:
        sees_samples: make samples one by one, also if they could be collated field by field.
    """

    sees_samples: bool

    def begin(self) -> None:
        """Note that a batch is begun."""

    def step(self, stage: str, leaf: str, key: str) -> None:
        """Note that a step is about to begin.

        Args:
            stage: ``read``, ``decode``, ``decode_columns`` (of several samples), or the name of a hook.
            leaf: the name of the data set; ``"*"``: several samples.
            key: the name of the sample, or the number of samples.
        """

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any] | None:
        """Note that the batch of these samples is made; return the ``trace`` of its result."""


@dataclass(eq=False)
class Services:
    """Objects that a loader gives to its runner of jobs. Runners that work together share one object.

    Args:
        observers: observers of each step. Without observers, notifications cost nothing.
        failures: log that each failure is reported to at once; None: no log.
        cache_pool: the ``self.cache`` of hooks; None: a pool that keeps nothing.
        worker_config: configuration of the loader; None: there is none.
        store: store of samples; None: each sample is made.
    """

    observers: tuple[Observer, ...] = ()
    failures: FailureLog | None = None
    cache_pool: CachePool | None = None
    worker_config: WorkerConfig | None = None
    store: OpenedSampleStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        config = self.worker_config
        return vars(self) | {"worker_config": None if config is None else config.for_workers()}


class StoredSample(NamedTuple):
    """A sample that a store had; its restore key has no meaning."""

    value: Any


#: Address of a sample, the rows that contain it, and its index in these; of a stored sample, its index in the leaf.
ReadSample = tuple[Address, Rows | StoredSample, int]


class OpenedSampleStore(Protocol):
    """Store of samples after the hooks of single samples, by address, of one data set.

    Its methods raise nothing if the store cannot be used; the samples are then made.
    """

    def missing(self, addresses: Sequence[Address]) -> Sequence[Address]:
        """Return the addresses whose samples must be made."""

    def read(
        self,
        rows: Callable[[Sequence[Address], Sequence[Address]], Iterable[ReadSample]],
        addresses: Sequence[Address],
        wanted: Sequence[Address],
    ) -> Iterable[ReadSample]:
        """Yield the stored sample, or the rows, for each address.

        Args:
            rows: returns the rows for addresses.
            addresses: addresses of samples.
            wanted: addresses of the samples that take their places.
        """

    def add(self, address: Address, sample: Any, key: tuple[Any, ...], context: HookContext) -> None:
        """Store a sample that was made.

        Args:
            address: its address.
            sample: the sample.
            key: its restore key.
            context: context of its hooks: whether they have drawn random numbers, or asked for numbers.

        Raises:
            FatalSampleError: the store has another sample under this address.
        """


class SampleStore(Protocol):
    """Store of samples, the argument ``sample_store`` of a loader. It never changes a batch.

    Example:
        >>> class Everything:
        ...     def opened(self, leaves, encoder, hooks, seed, order): return MyStore(leaves)
        >>> loader = get_savable_loader(dataset, sample_store=Everything())
    """

    def opened(
        self, leaves: Sequence[Leaf], encoder: TaskEncoder, hooks: Hooks, seed: int, order: Order
    ) -> OpenedSampleStore | None:
        """Return the store of a data set; None: its samples take no work, or cannot be stored.

        Args:
            leaves: the leaves, in the order's numbering.
            encoder: the user's hooks.
            hooks: the hooks that are in use.
            seed: seed of all random numbers of the hooks.
            order: order of the run.
        """
