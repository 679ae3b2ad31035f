"""Pipeline of wrapped data sets: each item is made by the pipeline of its data set, then by the functions around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon_lite.batching.collate import empty_like
from energon_lite.errors import FatalSampleError, SampleError, SkipSample, UsageError
from energon_lite.hooks import HookContext
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.makers.failure_log import FailureLog
from energon_lite.loading.makers.hook_errors import FATAL, failure_of
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.observers import Observer
from energon_lite.loading.makers.outcomes import Address, Failure, FailureStreak, Result, of_each
from energon_lite.loading.makers.pipeline import Job, Pipeline
from energon_lite.loading.makers.sample_maker import set_restore_key
from energon_lite.order.hashing import MASK64, HashDomain, hash_ints
from energon_lite.storage.stores.cache_pool import CachePool
from energon_lite.worker_config import ErrorHandler, WorkerConfig

__all__ = ["Branch", "ItemFunction", "ItemsJob", "ItemsPipeline"]

#: Randomness of the users' functions.
_FUNCTION = HashDomain.WRAPPED_FUNCTION.value
#: Choice of replacements.
_REPLACEMENT = HashDomain.WRAPPED_REPLACEMENT.value
#: Number of items of an endless stream that replacements are drawn from.
_MANY = 1 << 40


@dataclass(frozen=True)
class ItemFunction:
    """A function that a wrapper applies to each item of the inner data set.

    Args:
        apply: the user's function.
        name: name for messages, and for the identity of the data set.
        keeps: the function returns whether to keep the item.
        tolerance: number of items in a row that the function may lose; 0: no limit.
    """

    apply: Callable[[Any], Any]
    name: str
    keeps: bool = False
    tolerance: int = 100

    def __call__(self, item: Any) -> Any:
        made = self.apply(item)
        if not self.keeps:
            return made
        if not made:
            raise SkipSample(f"{self.name} leaves it out")
        return item


@dataclass(frozen=True)
class Branch:
    """An innermost data set, with the functions applied to its items."""

    dataset: PlannedDataset
    functions: tuple[ItemFunction, ...] = ()


@dataclass(frozen=True)
class ItemsJob(Job):
    """Job that makes an item of others.

    Args:
        parts: for each part, the number of the branch, and the job of its data set.
    """

    parts: tuple[tuple[int, Job], ...] = ()


class _Samples:
    """Sample makers of several pipelines, with the interface of one for executors."""

    def __init__(self, pipelines: Sequence[Any], leaves: Sequence[Leaf]):
        self._all = [pipeline.samples for pipeline in pipelines]
        self.leaves = leaves
        self.encoder = self._all[0].encoder
        self.seeded_hooks = frozenset().union(*(maker.seeded_hooks for maker in self._all))

    @property
    def reads_ahead(self) -> bool:
        """True if slow storage is asked to fetch samples ahead."""
        return any(maker.reads_ahead for maker in self._all)

    def prefetch(self, addresses: Sequence[Address]) -> None:
        """Start to fetch samples from slow storage; each sample maker knows the leaves of all."""
        self._all[0].prefetch(addresses)

    @property
    def cache_pool(self) -> CachePool | None:
        """The ``self.cache`` of hooks."""
        pool: CachePool | None = self._all[0].cache_pool
        return pool

    @cache_pool.setter
    def cache_pool(self, pool: CachePool | None) -> None:
        for maker in self._all:
            maker.cache_pool = pool

    @property
    def worker_config(self) -> WorkerConfig | None:
        """Configuration of the loader."""
        config: WorkerConfig | None = self._all[0].worker_config
        return config

    @worker_config.setter
    def worker_config(self, config: WorkerConfig | None) -> None:
        for maker in self._all:
            maker.worker_config = config

    @property
    def failures(self) -> FailureLog | None:
        """Log that each failure is reported to at once."""
        log: FailureLog | None = self._all[0].failures
        return log

    @failures.setter
    def failures(self, log: FailureLog | None) -> None:
        for maker in self._all:
            maker.failures = log

    def context(self, *origin: int, batch_index: int | None = None) -> HookContext:
        """Return a context for the user's functions."""
        made: HookContext = self._all[0].context(*origin, batch_index=batch_index)
        return made

    @property
    def observers(self) -> tuple[Observer, ...]:
        return tuple(self._all[0].observers)

    @observers.setter
    def observers(self, observers: tuple[Observer, ...]) -> None:
        for maker in self._all:
            maker.observers = observers


class ItemsPipeline:
    """Runner of the jobs of an :class:`~energon_lite.extras.energon.wrappers.wrapper.ItemsDataset`.

    Args:
        branches: the innermost data sets.
        leaves: the leaves of all of them; those of a branch are numbered after those of the branches before it.
        batcher: makes one item of several; None: single items are returned.
        seed: 64-bit seed of the functions' random numbers.
        first_leaf: number of the first leaf of the first branch.
        error_handler: see :class:`~energon_lite.WorkerConfig`.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        leaves: Sequence[Leaf],
        batcher: ItemFunction | None,
        *,
        seed: int,
        first_leaf: int = 0,
        error_handler: ErrorHandler | None = None,
    ):
        self.branches = [replace(branch, dataset=branch.dataset.for_workers()) for branch in branches]
        self._batcher = batcher
        self._seed = seed
        self._error_handler = error_handler
        self.first_leaves = list[int]()
        self._pipelines = list[Any]()
        for branch in branches:
            self.first_leaves.append(first_leaf)
            self._pipelines.append(branch.dataset.pipeline_among(leaves, first_leaf))
            first_leaf += len(branch.dataset.leaves)
        self.samples = _Samples(self._pipelines, leaves)
        self._example: tuple[Any, int] | None = None

    def __copy__(self) -> ItemsPipeline:
        raise UsageError("start_method='thread' with wrapped data sets", fix="use processes, or wrap nothing")

    def run(self, job: Any) -> Result:
        """Make the item of a job.

        Raises:
            FatalSampleError: a hook asked to end the run, or too many failures came in a row.
        """
        if not job.parts:
            return Result(self._empty(job))
        results = [self._item(branch, part, job) for branch, part in job.parts]
        together = Result(None, [outcome for result in results for outcome in result.outcomes])
        together.tokens = sum(result.tokens for result in results)
        together.trace = _joined_trace([result.trace for result in results if result.trace is not None])
        items = [result.batch for result in results if result.batch is not None]
        together.batch = items[0] if items and self._batcher is None else None
        if items and self._batcher is not None:
            made = self._apply(self._batcher, items, job, 0)
            if isinstance(made, Failure):
                together.outcomes = list(of_each(made, job.addresses))
            else:
                together.batch = made
        if together.batch is not None:
            together.digest = sum(result.digest for result in results if result.batch is not None) & MASK64
        set_restore_key(together.batch, job.key)
        return together

    def restore(self, address: Address, attempt: int) -> Any:
        """Return the encoded sample at an address; see :class:`~energon_lite.loading.makers.pipeline.Pipeline`."""
        number = max(n for n, first in enumerate(self.first_leaves) if first <= address[0])
        return self._pipelines[number].restore(address, attempt)

    def _item(self, number: int, part: Job, job: Job) -> Result:
        """Make an item of a branch and apply its functions; in training, replace an item that they lose."""
        branch = self.branches[number]
        row = FailureStreak(0, {})
        attempt = 0
        lost = list[Any]()
        while True:
            result = self._pipelines[number].run(part)
            failure: Failure | None = None
            for place, function in enumerate(branch.functions if result.batch is not None else ()):
                made = self._apply(function, result.batch, part, place, attempt)
                if isinstance(made, Failure):
                    failure = made
                    break
                result.batch = made
            if failure is None:
                result.outcomes = lost + result.outcomes
                return result
            lost += of_each(failure, part.addresses)
            if attempt == 0:
                row = FailureStreak(branch.functions[0].tolerance, {})
            if not branch.dataset.refills:
                return replace(result, batch=None, outcomes=lost, tokens=0)
            attempt += 1
            if (end := row.add(failure)) is not None:
                raise end
            part = self._replacement(number, part, attempt)

    def _replacement(self, number: int, part: Job, attempt: int) -> Job:
        """Return the job of a replacement from the same data set, drawn by a hash."""
        dataset = self.branches[number].dataset
        count = dataset.plan.count(part.pass_number) or _MANY
        item = hash_ints(self._seed, _REPLACEMENT, part.pass_number, part.number, attempt) % count
        return shifted(dataset.jobs(part.pass_number, [(item,)])[0], self.first_leaves[number])

    def _apply(self, function: ItemFunction, item: Any, job: Job, place: int, attempt: int = 0) -> Any:
        """Return the result of a function for an item, or its failure."""
        origin = (self._seed, _FUNCTION, job.pass_number, job.number, place, attempt)
        with self.samples.context(*origin, batch_index=job.number) as context:
            context.seed_globals()
            try:
                made = function(item)
                if made is None:
                    raise FatalSampleError(f"{function.name} returned None", fix="return the item, or raise SkipSample")
                return made
            except SkipSample as skip:
                return Failure("*", f"item {job.number}", function.name, str(skip) or "SkipSample", skipped=True)
            except FATAL:
                raise
            except Exception as error:
                if self._error_handler is not None:
                    self._error_handler(error, item, getattr(item, "__sources__", None))
                failure = failure_of(error, function.name, "*", f"item {job.number}")
                if self.samples.failures is not None:
                    self.samples.failures.tell(failure)
                return failure

    def _empty(self, job: Job) -> Any:
        """Return an item without samples, for a rank that has none left."""
        inside = self._pipelines[0].run(ItemsJob(job.pass_number, job.number, (), job.key)).batch
        for place, function in enumerate(self.branches[0].functions):
            if inside is not None and not function.keeps:
                made = self._apply(function, inside, job, place)
                inside = inside if isinstance(made, Failure) else made
        if self._batcher is None:
            return inside
        if inside is not None:  # the batcher makes a batch without rows of a batch without rows
            made = self._apply(self._batcher, [inside], job, 0)
            if not isinstance(made, Failure):
                return made
        if self._example is None:
            examples = list[Any]()
            for item in range(self.branches[0].dataset.plan.count(0) or _MANY):
                part = self.branches[0].dataset.jobs(0, [(item,)])[0]
                examples += [
                    item_of_branch
                    for item_of_branch in [self._item(0, shifted(part, self.first_leaves[0]), part).batch]
                    if item_of_branch is not None
                ]
                if len(examples) == 2:
                    break
            made = self._apply(self._batcher, examples, job, 0) if examples else None
            if made is None or isinstance(made, Failure):
                raise SampleError("what an empty batch looks like is not clear", fix="see what the batcher makes")
            self._example = made, len(examples)
        return empty_like(*self._example)


def shifted(job: Any, first_leaf: int) -> Any:
    """Return the job of a data set whose leaves have numbers from ``first_leaf`` on."""
    if not first_leaf:
        return job
    moved = [(address[0] + first_leaf, *address[1:]) for address in job.addresses]
    if isinstance(job, ItemsJob):
        return replace(job, addresses=moved, parts=tuple((n, shifted(part, first_leaf)) for n, part in job.parts))
    return replace(job, addresses=moved)


def _joined_trace(traces: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return one trace of several jobs that ran one after the other."""
    if not traces:
        return None
    stages: dict[str, float] = {}
    for trace in traces:
        for name, seconds in trace["stages"].items():
            stages[name] = stages.get(name, 0.0) + seconds
    lists = {name: [entry for trace in traces for entry in trace[name]] for name in ("samples", "sources")}
    return {**traces[-1], "began": traces[0]["began"], "stages": stages, **lists}


#: A pipeline of either kind.
AnyPipeline = Pipeline | ItemsPipeline
