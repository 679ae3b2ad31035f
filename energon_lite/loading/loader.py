"""The loader: walks the plan, keeps workers busy ahead of it, hands out batches in order."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from typing_extensions import Self

from energon_lite.errors import UsageError
from energon_lite.loading.cursor import Cursor
from energon_lite.loading.dataset import PlannedDataset
from energon_lite.loading.pipeline import Job, Result
from energon_lite.loading.report import Report
from energon_lite.loading.sharing import check_peers, select_fields, share_batch
from energon_lite.loading.workers import Executor, InlineExecutor, WorkerPool

__all__ = ["DataLoader"]

logger = logging.getLogger(__name__)

#: Batches whose addresses are looked up at once, and samples in them at most.
_LOOK_AHEAD_BATCHES, _LOOK_AHEAD_SAMPLES = 64, 1 << 14


class DataLoader:
    """Yields the batches of one data-parallel rank.

    A ``for`` loop over an endless stream goes on where the loop before it stopped. A ``for`` loop over a finite one
    finishes the pass it is in, or begins the next one.

    Args:
        dataset: from ``get_train_dataset`` or ``get_val_dataset``.
        prefetch_factor: batches that each worker is ahead.
        start_method: how worker processes are started: ``fork``, ``forkserver`` or ``spawn``.
        watchdog_timeout_seconds: warn when a batch takes longer than this; None: never.
        fail_on_timeout: raise then.
        check_peers: compare a checksum of each batch with those of the tensor- and context-parallel peers (see
            ``WorkerConfig.from_mesh``), which costs a small collective per batch and axis.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        *,
        prefetch_factor: int = 2,
        start_method: str = "fork",
        watchdog_timeout_seconds: float | None = 60.0,
        fail_on_timeout: bool = False,
        check_peers: bool = False,
    ):
        if not isinstance(dataset, PlannedDataset):
            raise UsageError(
                f"a loader of a {type(dataset).__name__}", fix="give what get_train_dataset or get_val_dataset returned"
            )
        if prefetch_factor < 1:
            raise UsageError(f"prefetch_factor is {prefetch_factor}", fix="give at least 1")
        self.dataset = dataset
        self.worker_config = dataset.worker_config
        self._prefetch_factor = prefetch_factor
        self._start_method = start_method
        self._watchdog = (watchdog_timeout_seconds, fail_on_timeout)
        self._check_peers = check_peers
        self._report = Report(dataset.task_encoder.failure_tolerance)
        self._cursor = Cursor()
        self._feed: _Feed | None = None
        self._pipeline = dataset.pipeline()
        dataset.identity.to_plain()  # its digests are made now, so that saving is quick from the first time on

    # -- iteration ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._loop_is_over():
            self._cursor = self._next_loop()
        while not self._loop_is_over():
            batch = self._take()
            # The cursor moves before the batch is handed out: a state saved in the loop's body counts this batch.
            self._cursor = self.dataset.step(self._cursor)
            yield batch

    def __len__(self) -> int:
        """Batches in one ``for`` loop; for an endless stream, in as many samples as its data sets hold."""
        return len(self.dataset)

    def _take(self) -> Any:
        """This rank's batch at the cursor: its own, or its peer's."""
        if not self.worker_config.loads_data:
            return None
        replica = self.worker_config.replica
        if replica is None:
            return self._load()
        if replica.share == "broadcast":
            batch = share_batch(self._load, replica)
        else:
            batch = self._load()
            if replica.is_last_stage:
                batch = select_fields(batch, replica.last_stage_fields)
        if self._check_peers:
            check_peers(batch, replica)
        return batch

    def _load(self) -> Any:
        if self._feed is None:
            self._feed = self._start_feed()
        result = self._feed.take(self._cursor)
        self._report.add(result.outcomes)
        return result.batch

    def _loop_is_over(self) -> bool:
        count, length = self.dataset.count(self._cursor.pass_number), self.dataset.loop_length
        if count is not None:
            return self._cursor.position >= count
        return (
            bool(length) and self._cursor.position - self._cursor.loop_start >= length * self.worker_config.world_size
        )

    def _next_loop(self) -> Cursor:
        if self.dataset.count(self._cursor.pass_number) is not None:
            return Cursor(pass_number=self._cursor.pass_number + 1)
        return replace(self._cursor, loop_start=self._cursor.position)

    def _start_feed(self) -> _Feed:
        workers = self.worker_config.num_workers
        if not workers:
            return _Feed(self.dataset, InlineExecutor(self._pipeline), ahead=0)
        seconds, fail = self._watchdog
        pool = WorkerPool(
            self._pipeline,
            workers,
            start_method=self._start_method,
            watchdog_seconds=seconds,
            fail_on_timeout=fail,
        )
        weakref.finalize(self, pool.close)
        return _Feed(self.dataset, pool, ahead=self._prefetch_factor * workers)

    # -- a single sample ------------------------------------------------------------------------------------------

    def can_restore_sample(self) -> bool:
        """Whether :meth:`restore_sample` works: always, since every batch is a function of its key."""
        return True

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Make a batch, or an encoded sample, again, in this process, from its ``__restore_key__``.

        The position of the loader does not change.

        Args:
            restore_key: of a batch or of a sample that this loader, or one built the same way, delivered. Lists (as
                after JSON) are fine too.

        Raises:
            UsageError: not such a key.
            SampleError: the sample is skipped or fails (as it did when it was delivered in its place's stead).

        Example:
            >>> again = loader.restore_sample(batch.__restore_key__)
        """
        match tuple(restore_key):
            case ("batch", int(pass_number), int(number)) if pass_number >= 0 and number >= 0:
                (job,) = self.dataset.jobs(pass_number, [number])
                return self._pipeline.run(job).batch
            case ("sample", int(leaf), int(index), int(epoch), int(attempt)) if self.dataset.has(leaf, index):
                return self._pipeline.restore((leaf, index, epoch), attempt)
        raise UsageError(
            f"{restore_key!r} is not a restore key of this loader",
            fix="give the __restore_key__ of a batch or of a sample as it was delivered",
        )

    # -- what happened --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Batches and samples delivered to this rank, samples skipped and failed with their reasons, worker deaths."""
        return self._report.stats() | {"worker_deaths": 0 if self._feed is None else self._feed.worker_deaths}

    def config(self) -> dict[str, Any]:
        """The settings and the data that decide the order, as plain data."""
        return self.dataset.identity.to_plain()

    def close(self) -> None:
        """Stop the workers and log a summary of what was skipped. The loader can be used again; it starts new ones."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
            self._report.log_summary()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{type(self).__name__} at {self._cursor}\n{self.dataset}"


class _Feed:
    """Keeps an executor supplied with the jobs that come next for this rank.

    Args:
        dataset: where jobs come from.
        executor: who runs them.
        ahead: jobs submitted before their turn.
    """

    def __init__(self, dataset: PlannedDataset, executor: Executor, *, ahead: int):
        self._dataset = dataset
        self._executor = executor
        self._ahead = ahead
        self._at: Cursor | None = None  # the cursor at which the first of _tickets will be asked for
        self._tickets: deque[int] = deque()
        self._planned: deque[Job] = deque()
        self._next_number = 0  # the first micro-batch of this rank that is not planned yet

    @property
    def worker_deaths(self) -> int:
        return int(getattr(self._executor, "total_deaths", 0))

    def take(self, cursor: Cursor) -> Result:
        """The result for this rank at ``cursor``. Quick if that follows the one taken last; else starts over there."""
        if self._at is None or (self._at.pass_number, self._at.position) != (cursor.pass_number, cursor.position):
            self._restart(cursor)
        while len(self._tickets) <= self._ahead and (job := self._next_job(cursor)) is not None:
            self._tickets.append(self._executor.submit(job))
        self._at = None  # until the result is there: after an error the next call starts over
        result = self._executor.result(self._tickets.popleft())
        self._at = self._dataset.step(cursor)
        return result

    def close(self) -> None:
        self._executor.close()

    def _restart(self, cursor: Cursor) -> None:
        self._executor.cancel()
        self._tickets.clear()
        self._planned.clear()
        self._next_number = cursor.position + self._dataset.worker_config.rank

    def _next_job(self, cursor: Cursor) -> Job | None:
        if not self._planned:
            self._plan(cursor)
        return self._planned.popleft() if self._planned else None

    def _plan(self, cursor: Cursor) -> None:
        """Look up the addresses of the next few micro-batches of this rank in one go."""
        world, rank = self._dataset.worker_config.world_size, self._dataset.worker_config.rank
        number_of_jobs = max(1, min(_LOOK_AHEAD_BATCHES, _LOOK_AHEAD_SAMPLES // self._dataset.plan.rows))
        stop = self._next_number + number_of_jobs * world
        count = self._dataset.count(cursor.pass_number)
        if count is not None:
            # The last step begins below count; ranks that find nothing left there get an empty batch.
            last_step = cursor.position + -(-(count - cursor.position) // world) * world
            stop = min(stop, last_step + rank)
        numbers = range(self._next_number, stop, world)
        self._planned.extend(self._dataset.jobs(cursor.pass_number, numbers))
        self._next_number = numbers[-1] + world if len(numbers) else self._next_number
