"""Data set whose items are those of other data sets, in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from energon_lite.batching.plan import FixedPlan, Place
from energon_lite.errors import SampleError, UnknownLengthError
from energon_lite.extras.energon.wrappers.items_runner import Branch, ItemFunction, ItemsJob, ItemsRunner, shifted
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.leaf import Leaf

__all__ = ["ItemsDataset"]


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

    def for_workers(self) -> Self:
        branches = tuple(replace(branch, dataset=branch.dataset.for_workers()) for branch in self.branches)
        return replace(super().for_workers(), branches=branches)

    def runner(self) -> ItemsRunner:
        return self.runner_among(self.leaves, 0)

    def runner_among(self, leaves: Sequence[Leaf], first: int) -> ItemsRunner:
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
        first = 0
        firsts = list[int]()
        for inner_branch in self.branches:
            firsts.append(first)
            first += len(inner_branch.dataset.leaves)
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
            raise SampleError(f"there is nothing at {key}: it was skipped, or failed", fix="see the loader's stats()")
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
