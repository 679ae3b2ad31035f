"""Data set whose items are those of other data sets, in an order of its own: each is made by the runner of its data
set, then by the functions around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from energon_lite.batching.collate import empty_like, rows_like
from energon_lite.batching.plan import FixedPlan, Place
from energon_lite.errors import FatalSampleError, SampleError, SkipSample, UnknownLengthError, UsageError
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.observers import Services
from energon_lite.loading.makers.outcomes import (
    Address,
    Failure,
    FailureStreak,
    Rejected,
    Result,
    of_each,
    set_restore_key,
)
from energon_lite.order.hashing import MASK64, HashDomain, hash_ints
from energon_lite.worker_config import ErrorHandler


@dataclass(frozen=True, eq=False, kw_only=True)
class ItemsDataset(PlannedDataset):
    """Planned data set that runs wrapped data sets, item by item.

    Args:
        plan: plan of items; its addresses are ``(branch, item in its pass, pass)``.
        branches: the inner data sets, with the functions applied to their items.
        batcher: makes one item of several; None: single items are returned.
        title: text of the wrappers, as they were written.
    """

    plan: FixedPlan
    branches: tuple[Branch, ...]
    batcher: ItemFunction | None = None
    title: str = ""

    @property
    def refills(self) -> bool:
        """True if lost items are replaced."""
        return all(branch.dataset.refills for branch in self.branches)

    def runner(self) -> ItemsRunner:
        return self.runner_among(self.leaves, 0)

    def runner_among(self, leaves: Sequence[Leaf], first: int) -> ItemsRunner:
        """Return the runner for jobs in which the leaves of this data set have numbers from ``first`` on."""
        return ItemsRunner(
            self.branches,
            leaves,
            self.batcher,
            seed=self.seed,
            first_leaf=first,
            error_handler=self.worker_config.global_error_handler,
        )

    def jobs(self, pass_number: int, places: Sequence[Place]) -> list[Job]:
        rows = self.plan.batches(places, pass_number)
        wanted: dict[tuple[int, int], set[int]] = {}
        for row in rows:
            for branch, item, epoch in row:
                wanted.setdefault((branch, epoch), set()).add(item)
        firsts = _first_leaves(self.branches)
        made: dict[tuple[int, int, int], Job] = {}
        for (branch, epoch), items in wanted.items():
            numbers = sorted(items)
            inner = self.branches[branch].dataset.jobs(epoch, [(number,) for number in numbers])
            for number, job in zip(numbers, inner, strict=True):
                made[branch, number, epoch] = shifted(job, firsts[branch])
        jobs = list[Job]()
        for place, row in zip(places, rows, strict=True):
            parts = tuple((branch, made[branch, item, epoch]) for branch, item, epoch in row)
            addresses = [address for _, part in parts for address in part.addresses]
            jobs.append(ItemsJob(pass_number, place[0], addresses, ("batch", pass_number, *place), parts))
        return jobs

    def _restored(self, key: tuple[Any, ...], runner: Any) -> list[Any]:
        items = super()._restored(key, runner)
        if items and items[0] is None:
            raise SampleError(f"there is no item at {key}: it was skipped, or failed", fix="see the loader's stats()")
        return items

    def __len__(self) -> int:
        """Return the number of items per rank in one ``for`` loop.

        Raises:
            UnknownLengthError: the loop never ends.
        """
        count = self.plan.count(0)
        world = self.worker_config.world_size
        if self.loop_length:
            return self.loop_length
        if self.limit is not None:
            return self.limit if count is None else min(self.limit, -(-count // world))
        if count is None:
            raise UnknownLengthError("it never ends", fix="wrap it in LimitDataset or EpochizeDataset")
        return count // world if self.drop_last else -(-count // world)

    def __str__(self) -> str:
        return self.describe(self.title)


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
        keeps: the function returns whether to keep the item.
        tolerance: number of items in a row that the function may lose; 0: no limit.
    """

    apply: Callable[[Any], Any]
    keeps: bool = False
    tolerance: int = 100

    @cached_property
    def name(self) -> str:
        """Name for messages, and for the identity of the data set."""
        return str(getattr(self.apply, "__qualname__", None) or type(self.apply).__name__)

    def __call__(self, item: Any) -> Any:
        made = self.apply(item)
        if made is None and not self.keeps:
            raise FatalSampleError(f"{self.name} returned None", fix="return the item, or raise SkipSample")
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


class ItemsRunner(JobRunner):
    """Runner of the jobs of an :class:`~energon_lite.extras.energon.wrappers.items_dataset.ItemsDataset`.

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
        self.branches = _for_workers(branches)
        self._batcher = batcher
        self.first_leaves = _first_leaves(branches, first_leaf)
        self._runners: list[JobRunner] = [
            branch.dataset.runner_among(leaves, first)
            if isinstance(branch.dataset, ItemsDataset)
            else replace(branch.dataset, leaves=leaves).runner()
            for branch, first in zip(branches, self.first_leaves, strict=True)
        ]
        first = self._runners[0]
        super().__init__(leaves, first.encoder, first.hooks, seed=seed, error_handler=error_handler)
        self.seeded_hooks = frozenset().union(*(runner.seeded_hooks for runner in self._runners))
        self.share(self.services)
        self._example: tuple[Any, int] | None = None

    def share(self, services: Services) -> None:
        """Use the services of another runner, also for the jobs of the innermost data sets."""
        self.services = services
        for runner in self._runners:
            if isinstance(runner, ItemsRunner):
                runner.share(services)
            else:
                runner.services = services

    def __copy__(self) -> ItemsRunner:
        raise UsageError("start_method='thread' with wrapped data sets", fix="use processes, or no wrappers")

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

    def results(self, address: Address, attempt: int = 0) -> tuple[list[Any], list[Failure]]:
        """Return the results of the sample hooks of the data set that an address belongs to."""
        number = max(n for n, first in enumerate(self.first_leaves) if first <= address[0])
        return self._runners[number].results(address, attempt)

    def _item(self, number: int, part: Job, job: Job) -> Result:
        """Make an item of a branch and apply its functions; in training, replace an item that they lose."""
        branch = self.branches[number]
        row = FailureStreak(branch.functions[0].tolerance if branch.functions else 0, {})
        attempt = 0
        lost = list[Any]()
        while True:
            result = self._runners[number].run(part)
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
        item = hash_ints(self.seed, _REPLACEMENT, part.pass_number, part.number, attempt) % count
        return shifted(dataset.jobs(part.pass_number, [(item,)])[0], self.first_leaves[number])

    def _apply(self, function: ItemFunction, item: Any, job: Job, place: int, attempt: int = 0) -> Any:
        """Return the result of a function for an item, or its failure."""
        origin = (self.seed, _FUNCTION, job.pass_number, job.number, place, attempt)
        with self.context(*origin, batch_index=job.number) as context:
            context.seed_globals()
            try:
                return self.guarded(function.name, "*", f"item {job.number}", item, function, item)
            except Rejected as rejected:
                return rejected.failure

    def _empty(self, job: Job) -> Any:
        """Return an item without samples, for a rank that has none left."""
        inside = self._runners[0].run(ItemsJob(job.pass_number, job.number, (), job.key)).batch
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
                made = self._item(0, shifted(part, self.first_leaves[0]), part).batch
                examples += [] if made is None else [made]
                if len(examples) == 2:
                    break
            made = self._apply(self._batcher, examples, job, 0) if examples else None
            if made is None or isinstance(made, Failure):
                raise SampleError("the form of an empty batch is unknown", fix="see what the batcher makes")
            fix = "return a batch of tensors or lists, with an entry for each item"
            self._example = made, rows_like(made, len(examples), self._batcher.name, fix)
        return empty_like(*self._example)


def _for_workers(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """Return copies without the parts that cannot be sent to another process: groups of ranks, the caches of plans."""
    copies = list[Branch]()
    for branch in branches:
        dataset: Any = branch.dataset
        config = replace(dataset.worker_config, data_parallel_group=None, replica=None)
        dataset = replace(dataset, plan=replace(dataset.plan), worker_config=config)
        if isinstance(dataset, ItemsDataset):
            dataset = replace(dataset, branches=_for_workers(dataset.branches))
        copies.append(replace(branch, dataset=dataset))
    return tuple(copies)


def _first_leaves(branches: Sequence[Branch], first: int = 0) -> list[int]:
    """Return the number of the first leaf of each branch, among the leaves of all of them."""
    return list(accumulate((len(branch.dataset.leaves) for branch in branches[:-1]), initial=first))


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
    stages = Counter[str]()
    for trace in traces:
        stages.update(trace["stages"])
    lists = {name: [entry for trace in traces for entry in trace[name]] for name in ("samples", "sources")}
    return {**traces[-1], "began": traces[0]["began"], "stages": dict(stages), **lists}
