"""Data loader: follows the plan, keeps workers busy ahead of it, and yields batches in order."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from energon_lite.batching.collate import tokens_of
from energon_lite.batching.digests import NO_SAMPLES
from energon_lite.errors import SampleError, UsageError
from energon_lite.hooks import failure_tolerances, is_overridden
from energon_lite.loading.batch_observer import (
    BatchEvent,
    BatchObserver,
    MetricsReports,
    MetricsSink,
    ObservedRank,
    Observers,
)
from energon_lite.loading.batch_path import PathRequest, WorkerResults, open_path, path_of_rank
from energon_lite.loading.executors.executor import OnTimeout, PoolOptions, StartMethod, WorkSeconds
from energon_lite.loading.executors.executor_handle import ExecutorHandle, PoolRequest
from energon_lite.loading.iterators.collectives import check_place, gathered_stats
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.iterator import DatasetIterator, ForLoop, OneThread, PlannedIterator, checked_steps
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.makers.hook_errors import hide_own_frames
from energon_lite.loading.makers.observers import SampleStore
from energon_lite.loading.makers.outcomes import Result
from energon_lite.loading.makers.report import Report
from energon_lite.storage.stores import CachePool, checked_pool
from energon_lite.worker_config import WorkerConfig

if TYPE_CHECKING:
    from energon_lite.loading.makers.leaf import SampleAddress


class DataLoader:
    """Loader that yields the batches of one data-parallel rank.

    A ``for`` loop over an endless stream continues where the loop before it stopped. A ``for`` loop over a finite one
    finishes the running pass, or begins the next one.

    Args:
        dataset: data set from ``get_train_dataset`` or ``get_val_dataset``.
        prefetch_factor: batches that each worker is ahead, within ``max_bytes_in_flight``; more if they are tiny, or
            some take long.
        start_method: start method of worker processes: ``fork``, ``forkserver`` or ``spawn``; or ``thread``: threads of
            this process, for light work that does not hold Python's lock for long; or ``main``: no workers, this
            process does the work whatever ``num_workers`` is.
        watchdog_timeout_seconds: log the worker's stack when a batch takes longer than this; None: never.
        on_timeout: reaction then: ``warn`` and continue to wait; ``replace`` the worker that hangs, and run its job
            again; or ``raise`` a WorkerError, which without workers comes when the hook is done.
        max_bytes_in_flight: bytes of batches that may wait for their turn, or are expected soon; with very large
            batches, workers then prefetch less than ``prefetch_factor``.
        check_peers: compare a checksum of each batch with those of the tensor- and context-parallel peers (see
            ``WorkerConfig.from_mesh``), which costs a small collective per batch and axis.
        skip_steps: steps to be skipped on all ranks: their numbers, counted from 0 (state["position"] //
            world_size before the step), or pairs of pass and number. Against a spike of the loss, as in PaLM
            (https://arxiv.org/abs/2204.02311, section 5.1): go back to a checkpoint before it, and skip the batches
            that caused it. Other steps stay the same; planned steps are not read. Not part of the state.
        log_every: number of batches between log lines about speed, waiting, its reason, and losses; 0: never.
        metrics: sinks that get the numbers of :meth:`stats` every ``metrics_every`` batches; such as a
            :class:`~energon_lite.extras.inspect.PrometheusEndpoint`. The caller closes them.
        cache_pool: cache for cookers with ``need_cache=True``, and ``self.cache`` of other hooks; such as a
            :class:`~energon_lite.extras.media.FileStoreCachePool`. Its files are deleted when the loader is closed.
        sample_store: :class:`~energon_lite.extras.remote.SampleStore` of encoded samples, for other runs and epochs.
        trace: file that gets a line for each batch: times of request and delivery, worker, seconds by stage, samples.
            ``energon-lite trace`` shows them. Several ranks write several files.
        quarantine: file that gets a line of JSON for each sample that is skipped or fails. Ranks may share it.
        observers: further receivers of an event for each batch.

    Attributes:
        digest: digest of the last batch's samples: the sum, modulo 2**64, over the batches and ranks of a step is the
            same on any number of ranks. 0 on peers that got the batch of another rank.

    Example:
        >>> with get_savable_loader(dataset, log_every=100, quarantine="bad_samples.jsonl").to("cuda") as loader:
        ...     for batch in loader: ...
    """

    digest: int = NO_SAMPLES

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        prefetch_factor: int = 2,
        start_method: StartMethod = "fork",
        watchdog_timeout_seconds: float | None = 60.0,
        on_timeout: OnTimeout = "warn",
        max_bytes_in_flight: int = 1 << 30,
        check_peers: bool = False,
        skip_steps: Iterable[int | tuple[int, int]] = (),
        log_every: int = 0,
        metrics: Iterable[MetricsSink] = (),
        metrics_every: int = 100,
        quarantine: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
        cache_pool: CachePool | None = None,
        sample_store: SampleStore | None = None,
        observers: Iterable[BatchObserver] = (),
    ):
        if not isinstance(dataset, SavableDataset):
            fix = "give what get_train_dataset or get_val_dataset returned"
            raise UsageError(f"a loader of a {type(dataset).__name__}", fix=fix)
        runs = dataset.resolved
        config = dataset.worker_config
        encoder = dataset.task_encoder
        runner = runs.runner()
        work = WorkSeconds()
        num_workers = 0 if start_method == "main" else config.num_workers
        writes = config.reads and config.saves_state  # one of the peers that get the same batches
        trace = config.debug_file() if trace is None else trace
        files = config.debug_files_of_workers() if trace == config.debug_file() else ()
        rank = config.rank, config.world_size
        observed = ObservedRank(*rank, runs.leaves, runner, work, num_workers, start_method, files)
        reports = MetricsReports(tuple(metrics), metrics_every)
        files_given = {"quarantine": quarantine, "trace": trace} if writes else {"quarantine": None, "trace": None}
        arguments = files_given | {"log_every": log_every or None, "metrics": reports if reports.sinks else None}
        self.dataset = dataset
        self.worker_config = config
        self._observers = Observers(observers, observed, arguments)
        tolerances = failure_tolerances(encoder)
        self._report = Report(encoder.failure_tolerance, runs.leaves, hooks=tolerances, on_lost=self._observers.on_lost)
        self._runner = runner
        self._cache_pool = runner.services.cache_pool = checked_pool(cache_pool)
        runner.services.worker_config = config
        if sample_store is not None:
            order = runs.plan.order
            runner.services.store = sample_store.opened(runs.leaves, encoder, runner.hooks, runner.seed, order)
        runner.services.failures = self._report.log
        timed = self._observers.times_stages
        limits = watchdog_timeout_seconds, on_timeout, max_bytes_in_flight
        options = PoolOptions(start_method, *limits, timed, prefetch_factor)
        elsewhere = None if start_method == "main" else config.workers
        identity = runs.identity.to_plain()  # computes its digests now, so that saving is fast from the first time on
        self._workers = ExecutorHandle(PoolRequest(runner, num_workers, options, work, elsewhere, identity))
        weakref.finalize(self, self._workers.close)
        # Not `_iterator`: Lightning knows that name from torch, and sets it to None.
        self._dataset_iterator = _iterator_class(runs)(
            runs, self._workers, prefetch_factor, self._report, checked_steps(skip_steps)
        )
        self._delivered: Any = self._dataset_iterator.cursor  # cursor of states; the iterator may be one batch ahead
        results = WorkerResults(self._dataset_iterator, self._workers, self._report)
        request = PathRequest(results, self._dataset_iterator, runner, config, work, check_peers=check_peers)
        self._path = self._path_of_rank = path_of_rank(request)
        self._path_request = replace(request, before=self._path)
        self._batches, self._wait_seconds = 0, 0.0
        self._in_step = False  # between a request for a batch and its delivery
        self._turn = OneThread()

    # -- iteration ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        # An iterator without a frame, so that threads may call it concurrently.
        return map(self._next, repeat(ForLoop()))

    def _next(self, loop: ForLoop) -> Any:
        """Return the next batch of a loop."""
        self._turn.take()
        try:
            if loop.is_over:
                raise StopIteration
            if not loop.is_begun:
                self._begin_loop()
            loop.is_begun = loop.is_over = self._in_step = True
            WorkerConfig._asked = self.worker_config
            asked = time.monotonic()
            try:
                result = self._path.take()
            except Exception as error:
                hide_own_frames(error)
                raise
            if result is None:
                self._in_step = False
                self._delivered = self._dataset_iterator.cursor
                raise StopIteration
            batch = self._finished(result, asked)
            del result  # and what is on the device already
            # A state saved in the loop's body counts this batch; one saved after an interrupt does not. Python checks
            # for interrupts when a function begins or has been called, and when a loop repeats: not in these lines.
            loop.is_over = False
            self._in_step = False
            self._delivered = self._dataset_iterator.cursor
            return batch
        finally:
            self._turn.holder = None

    def _finished(self, result: Result, asked: float) -> Any:
        """Return the batch of a result, count and report it, and advance the iterator; ``asked``: request time."""
        reads = self._dataset_iterator.reads
        tokens = (tokens_of(result.batch) or result.tokens) if reads else 0
        self._report.count(result.outcomes, batches=int(reads), tokens=tokens)
        step = self._dataset_iterator.step
        self._dataset_iterator.advance()
        batch = self._path.finish(result)
        delivered = time.monotonic()
        self.digest = result.digest
        self._batches = batches = self._batches + 1
        self._wait_seconds = waited = self._wait_seconds + delivered - asked
        if self._observers:
            event = BatchEvent(step, asked, delivered, result, batches, waited)
            for observer in self._observers:
                observer.on_batch(event)
            for observer in self._observers.reporters:
                if batches % observer.stats_every == 0:
                    observer.on_stats(self.stats())
        return batch

    def _begin_loop(self) -> None:
        """Begin a loop. A batch that was begun and not delivered, because of an error or interrupt, is undone."""
        if self._in_step:
            self._path.forget()
            self._dataset_iterator.restore(self._dataset_iterator.state(self._delivered))
        check_place(self.worker_config)
        self._dataset_iterator.start_loop()

    def __len__(self) -> int:
        """Return the number of batches in one ``for`` loop; for an endless stream, in as many samples as its leaves
        hold. By tokens, a pass is planned to count them; the number for an endless stream is an estimate.

        Raises:
            UnknownLengthError: hooks decide how many batches there are, and there is no ``virtual_epoch_length``.
        """
        own = self._dataset_iterator.loop_steps()
        return len(self.dataset) if own is None else own

    # -- to a device ----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str, path: str = "copy") -> Self:
        """Copy batches to a device, each while the step on the batch before it runs. Return the loader.

        Tensors at any depth go from page-locked memory, on a separate stream, on which ``encode_on_device`` then runs;
        use them on the stream that is current when the batch is returned. States do not count a batch ahead. With
        ``"cpu"``, only the hook runs. Peers of a replica must all do the same: a batch ahead may need collectives.

        Args:
            device: device as torch names it; ``"cuda"`` is the current one.
            path: name of the path to the device, see :func:`~energon_lite.entry_points.batch_paths`.

        Raises:
            UsageError: there is no such device, or no such path.
        """
        hooked = is_overridden(self.dataset.task_encoder, "encode_on_device")
        on_cpu = str(device).partition(":")[0] == "cpu" and not hooked
        chosen = self._path_of_rank if on_cpu else open_path(path, replace(self._path_request, device=device))
        self._path.forget()
        self._path = chosen
        return self

    # -- a single sample ------------------------------------------------------------------------------------------

    def can_restore_sample(self) -> bool:
        """Return whether :meth:`restore_sample` works: always True, because every batch is a function of its key."""
        return True

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """Make a batch, or a sample, again in this process from its ``__restore_key__``. The loader does not move.

        Args:
            restore_key: key of a batch or of a sample that this loader, or one built the same way, delivered. It may be
                a list (as after JSON).

        Raises:
            UsageError: not such a key.
            SampleError: the sample is skipped or fails (as in training, where a replacement was delivered).

        Example:
            >>> again = loader.restore_sample(batch.__restore_key__)
        """
        try:
            return self._dataset_iterator.dataset.restore_sample(restore_key, self._runner)
        except SampleError as error:
            hide_own_frames(error)
            if self.worker_config.restore_error_handler is not None:
                self.worker_config.restore_error_handler(error, restore_key, None)
            raise

    def samples_at(self, step: int, *, all_ranks: bool = False, pass_number: int | None = None) -> list[SampleAddress]:
        """Return the samples of a step, from the plan alone: nothing is read, and the loader does not move.

        A sample that fails or is skipped is replaced when the batch is made; this is the sample that was planned.
        Micro-batches of a fixed size are looked up at any step without delay. Those planned by tokens need the plans of
        all chunks between the loader's position and the step.

        Args:
            step: counted from 0 over the whole pass, restores included: ``state["position"] // world_size`` before it.
            all_ranks: include the samples of all data-parallel ranks; if False, only those of this rank.
            pass_number: None: the running pass; an endless stream has one only.

        Raises:
            UsageError: there is no such step; it was before the blend was changed; or hooks decide its samples.

        Example:
            >>> for sample in loader.samples_at(1200, all_ranks=True):
            ...     print(sample.rank, sample.dataset, sample.shard, sample.key)
        """
        from energon_lite.loading.makers.leaf import sample_addresses

        ranks = range(self.worker_config.world_size) if all_ranks else [self.worker_config.rank]
        addresses = self._dataset_iterator.addresses_at(pass_number, step, ranks)
        return [
            sample
            for rank, own in zip(ranks, addresses, strict=True)
            for sample in sample_addresses(rank, own, self.dataset.leaves)
        ]

    # -- statistics -----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this rank since the loader was made, as plain data.

        ``batches``, ``samples`` and ``tokens`` (of batches that have ``num_tokens``, or that were planned by tokens)
        delivered; samples ``skipped``, ``failed`` and ``dropped``, all of these by data set in ``datasets``, and the
        ``reasons``; ``wait_seconds`` spent in ``next()``; ``queue``: results ``ready``, jobs ``pending``, and
        ``bytes_in_flight``; ``worker_deaths``; ``stage_seconds`` and ``dataset_seconds`` of work; ``bytes_read``;
        ``cache``; the ``bottleneck`` of the run; ``fallbacks`` from the fast route, by reason; with ``quarantine``,
        lines ``written`` and ``lost``; with ``batching``, under ``planned``, the samples that the plan dropped,
        truncated and split: over all ranks together, or, if lengths are those of encoded samples, on this rank.
        """
        with self._turn.look() as alone:
            stats = self._report.stats() | {"wait_seconds": self._wait_seconds} | self._workers.stats(alone)
            stats |= {"bottleneck": None} | self._observers.stats(taken=stats) | self._path.stats()
        planned = self._dataset_iterator.planned_counts()
        return stats if planned is None else stats | {"planned": planned}

    def gather_stats(self) -> dict[str, Any]:
        """Return the statistics of all data-parallel ranks, on each of them. A collective that all ranks must call.

        All ranks wait for the slowest one, so ``wait_seconds`` is the maximum, ``wait_rank`` is its rank, and
        ``bottleneck`` is that rank's; ``wait_seconds_mean`` is for comparison. ``batches``, ``samples``, ``tokens``,
        ``skipped``, ``failed``, ``dropped``, ``bytes_read`` and ``worker_deaths`` are sums; ``ranks`` has the
        statistics of each rank.

        Raises:
            UsageError: there are several ranks, and no process group for the collective.
            TopologyError: the group has another number of ranks.
        """
        return gathered_stats(self.stats(), self.worker_config)

    def config(self) -> dict[str, Any]:
        """Return the settings and the data that decide the order, as plain data."""
        return self.dataset.identity.to_plain()

    def close(self) -> None:
        """Stop the workers and log a summary of skipped samples. If the loader is used again, it starts new workers."""
        self._path.forget()
        self._dataset_iterator.close()
        if self._workers.close():
            self._observers.on_close()
            self._report.log_summary()
        if self._cache_pool is not None:
            self._cache_pool.release()

    shutdown = close  # Energon 8's name

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a loader cannot be copied or pickled: it has workers, and a position in the run",
            fix="make another loader of its data set, and restore the position: "
            "get_savable_loader(loader.dataset).with_restored_state_rank(loader.save_state_rank())",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        at = f"pass {self._delivered.pass_number}, micro-batch {self._delivered.position}"
        return f"{type(self).__name__} at {at}\n{self.dataset}"


def _iterator_class(dataset: SavableDataset) -> Callable[..., DatasetIterator]:
    """Return the class of the iterators of a data set; the modules of other kinds are not imported."""
    kind: type[DatasetIterator] = PlannedIterator
    if not isinstance(dataset, PlannedDataset):
        from energon_lite.loading.iterators.lane_iterator import LaneIterator

        kind = LaneIterator
    return kind if dataset.loops is None else dataset.loops(kind)
