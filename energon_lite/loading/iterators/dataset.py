"""A data set as a loader takes it: leaves, their order, the plan of batches, the hooks. Everything but the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from energon_lite.batching.plan import FixedPlan
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.cursor import Cursor
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.rebase_entry import read_rebase
from energon_lite.loading.makers.pipeline import Job, Leaf, Pipeline
from energon_lite.order.rebase import Rebase
from energon_lite.order.stages import Stage
from energon_lite.worker_config import WorkerConfig

__all__ = ["BaseDataset", "PlannedDataset"]


@dataclass(frozen=True, eq=False, kw_only=True)
class BaseDataset:
    """What all data sets have. Immutable; loaders of it do not share anything.

    Args:
        plan: which samples make up which batch, or chunk; each kind of data set has its own.
        leaves: the data sets it is made of.
        weights: their shares, or None: one after the other, or by repetitions.
        task_encoder: the hooks.
        worker_config: this process's place among the ranks.
        identity: what states of its loaders are checked against.
        seed: 64 bits, for the hooks' randomness.
        loop_length: micro-batches per rank in one ``for`` loop over an endless stream; 0: the loop never ends.
        repetitions: how often an epoch shows each leaf, or None.
        stages: how the weights change, if they do; then ``weights`` are those at the start.
        rebase: the blend begins in the middle of a run, that was one of another blend before.
        limit: steps of a pass at most, on the ranks on which it begins; None: all.
    """

    plan: Any
    leaves: tuple[Leaf, ...]
    weights: tuple[float, ...] | None
    task_encoder: TaskEncoder
    worker_config: WorkerConfig
    identity: Identity
    seed: int
    loop_length: int = 0
    repetitions: tuple[float, ...] | None = None
    stages: tuple[Stage, ...] = ()
    rebase: Rebase | None = None
    limit: int | None = None

    def limit_ranks(self, ranks: int | None) -> int | None:
        """The ranks that the limit of a pass counts, which began on ``ranks``; None: there is no limit."""
        return None if self.limit is None else ranks or self.worker_config.world_size

    def stop(self, ranks: int | None) -> int | None:
        """The position at which the limit ends a pass that began on so many ranks; None: there is no limit."""
        return None if self.limit is None else self.limit * (ranks or self.worker_config.world_size)

    def rebased(self, rebase: Rebase) -> Self:
        """The same data set, in a run whose blend was another one before; see
        :func:`~energon_lite.loading.states.rebase.rebase_state`."""
        return replace(
            self,
            plan=replace(self.plan, order=self.plan.order.rebased(rebase)),
            identity=self.identity.beginning_at(rebase.position),
            rebase=rebase,
        )

    def at(self, state: Any) -> Self:
        """The data set in the run that a state is of: whether its blend was changed on the way.

        Raises:
            StateError: it is damaged. What else may be wrong with it is not looked at.
        """
        rebase = read_rebase(state)
        return self if rebase is None else self.rebased(rebase)

    def has(self, leaf: int, index: int) -> bool:
        """Whether there is such a sample."""
        return 0 <= leaf < len(self.leaves) and 0 <= index < len(self.leaves[leaf].source)

    def describe(self, batches: str) -> str:
        """A title and a line for each leaf; ``batches`` is a part of the title."""
        kind = "one after the other" if self.weights is None else "by weight"
        kind = kind if self.repetitions is None else "by repetitions"
        if self.stages:
            kind += f" in {len(self.stages)} stages"
        config = self.worker_config
        lines = [
            f"{type(self).__name__}: {len(self.leaves)} data sets, {kind}; {batches}, "
            f"rank {config.rank} of {config.world_size}"
        ]
        for number, leaf in enumerate(self.leaves):
            share = "" if self.weights is None else f", weight {self.weights[number]:.6g}"
            share += " at the start" if self.stages else ""
            share = share if self.repetitions is None else f", {self.repetitions[number]:.6g} times an epoch"
            lines.append(f"  {leaf.name}: {len(leaf.source)} samples{share}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedDataset(BaseDataset):
    """What ``get_train_dataset`` and ``get_val_dataset`` return where batches can be planned ahead.

    Args:
        plan: which samples make up which micro-batch.
        refill: replace samples that fail.
    """

    plan: FixedPlan
    refill: bool

    def pipeline(self) -> Pipeline:
        """What runs this data set's jobs."""
        return Pipeline(
            self.leaves,
            self.task_encoder,
            seed=self.seed,
            refill=self.refill,
            batched=self.plan.batch_size is not None,
            error_handler=self.worker_config.global_error_handler,
        )

    @property
    def is_endless(self) -> bool:
        """Whether there is only one pass, which does not end."""
        return self.plan.count(0) is None

    def count(self, pass_number: int) -> int | None:
        """Micro-batches in a pass over all ranks; None: the stream is endless."""
        return self.end(Cursor(pass_number))

    def end(self, cursor: Cursor) -> int | None:
        """The position behind the last micro-batch of a cursor's pass, on these ranks; None: the stream is endless."""
        count, stop = self.plan.count(cursor.pass_number), self.stop(cursor.ranks)
        if count is None:
            return None
        count = count if stop is None else min(count, stop)
        if self.plan.drop_last:  # all ranks or none, also if other ranks came so far
            count -= (count - cursor.position) % self.worker_config.world_size
        return count

    def step(self, cursor: Cursor) -> Cursor:
        """The cursor after one more micro-batch on every rank."""
        return cursor.step(self.worker_config.world_size, self.end(cursor))

    def pass_is_over(self, cursor: Cursor) -> bool:
        """Whether no step of the cursor's pass is left."""
        end = self.end(cursor)
        return end is not None and cursor.position >= end

    def jobs(self, pass_number: int, numbers: Sequence[int], end: int | None = None) -> list[Job]:
        """The jobs that make micro-batches ``numbers`` of a pass. Numbers from ``end`` on (None: past the end of the
        plan) give empty batches."""
        end = self.plan.count(pass_number) if end is None else end
        inside = [number for number in numbers if end is None or number < end]
        beyond = [number for number in numbers if end is not None and number >= end]
        planned = self.plan.batches(inside, pass_number)
        addresses = [*planned, *[()] * len(beyond)]
        return [
            Job(pass_number, number, own, ("batch", pass_number, number))
            for number, own in zip([*inside, *beyond], addresses, strict=True)
        ]

    def __len__(self) -> int:
        """Micro-batches per rank in one ``for`` loop; for an endless stream, in as many samples as the leaves hold, or
        as an epoch of a blend by repetitions has."""
        world = self.worker_config.world_size
        if self.loop_length:
            return self.loop_length
        count = self.count(0)
        if count is not None:
            return -(-count // world)
        repetitions = self.repetitions or (1.0,) * len(self.leaves)
        samples = round(sum(len(leaf.source) * r for leaf, r in zip(self.leaves, repetitions, strict=True)))
        return -(-samples // (self.plan.rows * world))

    def __str__(self) -> str:
        return self.describe(f"batches of {self.plan.batch_size or 1}")
