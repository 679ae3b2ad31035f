"""Running the jobs of wrapped data sets: each item by the pipeline of its data set, then the functions around it."""

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
from energon_lite.loading.makers.observer import Observer
from energon_lite.loading.makers.outcomes import Address, Failure, InARow, Result, of_each
from energon_lite.loading.makers.pipeline import Job, Pipeline
from energon_lite.loading.makers.sample_maker import set_restore_key
from energon_lite.order.hashing import MASK64, hash_ints
from energon_lite.storage.stores.cache_pool import CachePool
from energon_lite.worker_config import ErrorHandler, WorkerConfig

__all__ = ["Branch", "ItemFunction", "ItemsJob", "ItemsPipeline"]

#: Keep the hashes for different purposes apart.
_FUNCTION, _REPLACEMENT = 31, 32
#: A replacement for an item of a stream that never ends is drawn among so many.
_MANY = 1 << 40


@dataclass(frozen=True)
class ItemFunction:
    """What a wrapper does with each item of the data set inside.

    Args:
        apply: the user's function.
        name: for messages, and for the identity of the data set.
        keeps: the function only says whether the item is kept.
        tolerance: so many items in a row that it loses are too many; 0: no limit.
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
    """A data set at the bottom of wrapped ones, and what is done with its items."""

    dataset: PlannedDataset
    functions: tuple[ItemFunction, ...] = ()


@dataclass(frozen=True)
class ItemsJob(Job):
    """An item to be made of others.

    Args:
        parts: number of the branch, and the job of its data set that makes the item.
    """

    parts: tuple[tuple[int, Job], ...] = ()


class _Samples:
    """What executors ask the sample maker of a pipeline, of several of them."""

    def __init__(self, pipelines: Sequence[Any], leaves: Sequence[Leaf]):
        self._all = [pipeline.samples for pipeline in pipelines]
        self.leaves, self.encoder = leaves, self._all[0].encoder
        self.seeded_hooks = frozenset().union(*(one.seeded_hooks for one in self._all))

    @property
    def reads_ahead(self) -> bool:
        """True if slow storage wants to know what comes."""
        return any(one.reads_ahead for one in self._all)

    def foresee(self, addresses: Sequence[Address]) -> None:
        """Tell slow storage what comes; each sample maker knows the leaves of all."""
        self._all[0].foresee(addresses)

    @property
    def cache_pool(self) -> CachePool | None:
        """What hooks find as ``self.cache``."""
        found: CachePool | None = self._all[0].cache_pool
        return found

    @cache_pool.setter
    def cache_pool(self, pool: CachePool | None) -> None:
        for one in self._all:
            one.cache_pool = pool

    @property
    def worker_config(self) -> WorkerConfig | None:
        """The loader's."""
        found: WorkerConfig | None = self._all[0].worker_config
        return found

    @worker_config.setter
    def worker_config(self, config: WorkerConfig | None) -> None:
        for one in self._all:
            one.worker_config = config

    @property
    def failures(self) -> FailureLog | None:
        """Who is told of each failure at once."""
        found: FailureLog | None = self._all[0].failures
        return found

    @failures.setter
    def failures(self, log: FailureLog | None) -> None:
        for one in self._all:
            one.failures = log

    def context(self, *origin: int, batch_index: int | None = None) -> HookContext:
        """A context for functions of the user's."""
        made: HookContext = self._all[0].context(*origin, batch_index=batch_index)
        return made

    @property
    def observers(self) -> tuple[Observer, ...]:
        return tuple(self._all[0].observers)

    @observers.setter
    def observers(self, observers: tuple[Observer, ...]) -> None:
        for one in self._all:
            one.observers = observers


class ItemsPipeline:
    """Runs the jobs of an :class:`~energon_lite.extras.energon.wrappers.items_dataset.ItemsDataset`.

    Args:
        branches: the data sets inside.
        leaves: those of all of them; a branch's are numbered behind those of the branches before it.
        batcher: makes one item of several; None: each is handed on as it is.
        seed: 64 bits, for the functions' randomness.
        first_leaf: the number of the first leaf of the first branch.
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
        self.first_leaves, self._pipelines = list[int](), list[Any]()
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
            FatalSampleError: a hook asked for the end, or too much failed in a row.
        """
        if not job.parts:
            return Result(self._empty(job))
        results = [self._item(branch, part, job) for branch, part in job.parts]
        together = Result(None, [outcome for one in results for outcome in one.outcomes])
        together.tokens = sum(one.tokens for one in results)
        together.trace = _joined_trace([one.trace for one in results if one.trace is not None])
        items = [one.batch for one in results if one.batch is not None]
        together.batch = items[0] if items and self._batcher is None else None
        if items and self._batcher is not None:
            made = self._apply(self._batcher, items, job, 0)
            if isinstance(made, Failure):
                together.outcomes = list(of_each(made, job.addresses))
            else:
                together.batch = made
        if together.batch is not None:
            together.digest = sum(one.digest for one in results if one.batch is not None) & MASK64
        set_restore_key(together.batch, job.key)
        return together

    def restore(self, address: Address, attempt: int) -> Any:
        """The encoded sample at an address; see :class:`~energon_lite.loading.makers.pipeline.Pipeline`."""
        number = max(n for n, first in enumerate(self.first_leaves) if first <= address[0])
        return self._pipelines[number].restore(address, attempt)

    def _item(self, number: int, part: Job, job: Job) -> Result:
        """An item of a branch, behind its functions; in training one that they lose is replaced."""
        branch = self.branches[number]
        row = InARow(0, {})
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
                row = InARow(branch.functions[0].tolerance, {})
            if not branch.dataset.refills:
                return replace(result, batch=None, outcomes=lost, tokens=0)
            attempt += 1
            if (end := row.add(failure)) is not None:
                raise end
            part = self._replacement(number, part, attempt)

    def _replacement(self, number: int, part: Job, attempt: int) -> Job:
        """Another item of the same data set, drawn by a rule."""
        dataset = self.branches[number].dataset
        count = dataset.plan.count(part.pass_number) or _MANY
        item = hash_ints(self._seed, _REPLACEMENT, part.pass_number, part.number, attempt) % count
        return shifted(dataset.jobs(part.pass_number, [(item,)])[0], self.first_leaves[number])

    def _apply(self, function: ItemFunction, item: Any, job: Job, place: int, attempt: int = 0) -> Any:
        """What a function makes of an item, or the failure that says why nothing."""
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
        """An item without samples, for a rank that has none left."""
        inside = self._pipelines[0].run(ItemsJob(job.pass_number, job.number, (), job.key)).batch
        for place, function in enumerate(self.branches[0].functions):
            if inside is not None and not function.keeps:
                made = self._apply(function, inside, job, place)
                inside = inside if isinstance(made, Failure) else made
        if self._batcher is None:
            return inside
        if inside is not None:  # of a batch without rows, a batch without rows is made
            made = self._apply(self._batcher, [inside], job, 0)
            if not isinstance(made, Failure):
                return made
        if self._example is None:
            found = list[Any]()
            for item in range(self.branches[0].dataset.plan.count(0) or _MANY):
                part = self.branches[0].dataset.jobs(0, [(item,)])[0]
                found += [
                    one for one in [self._item(0, shifted(part, self.first_leaves[0]), part).batch] if one is not None
                ]
                if len(found) == 2:
                    break
            made = self._apply(self._batcher, found, job, 0) if found else None
            if made is None or isinstance(made, Failure):
                raise SampleError("what an empty batch looks like is not clear", fix="see what the batcher makes")
            self._example = made, len(found)
        return empty_like(*self._example)


def shifted(job: Any, first_leaf: int) -> Any:
    """A job of a data set among whose leaves there are others before."""
    if not first_leaf:
        return job
    moved = [(address[0] + first_leaf, *address[1:]) for address in job.addresses]
    if isinstance(job, ItemsJob):
        return replace(job, addresses=moved, parts=tuple((n, shifted(part, first_leaf)) for n, part in job.parts))
    return replace(job, addresses=moved)


def _joined_trace(traces: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """One trace of several, made one after the other."""
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
