"""Data set whose micro-batches are planned ahead: by a number of samples, or by their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from energon_lite.batching.plan import FixedPlan, Place, Plan
from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.loading.iterators.dataset import Identity, SavableDataset
from energon_lite.loading.iterators.state import (
    BATCH_SIZE,
    CursorFields,
    State,
    checked,
    damaged,
    is_count,
    resized,
    saved_batch_size,
)
from energon_lite.loading.makers.batch_runner import BatchRunner, Job
from energon_lite.loading.makers.job_runner import JobRunner

#: Chunks of an endless stream that are planned to estimate the steps of an epoch.
_LOOKED_AT = 4
#: Exclusive upper bound of the numbers of a place in a state; above it the state is damaged.
_MOST = 1 << 60


@dataclass(frozen=True)
class PlanCursor(CursorFields):
    """A position in the run, the same on all ranks, so a state may be restored on any number of ranks. It is replaced
    as a whole, so an interrupted loader has the old position or the next one.

    Args:
        place: the place of the next micro-batch in the plan of its pass.
        pass_number, position, loop_start, ranks: see :class:`~energon_lite.loading.iterators.state.CursorFields`.
    """

    place: Place


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedDataset(SavableDataset):
    """Data set of ``get_train_dataset`` and ``get_val_dataset`` if batches can be planned ahead.

    Args:
        plan: assignment of samples to micro-batches.
        batched: call the batch hooks; if False, a micro-batch is a single sample.
        refill: replace samples that fail; if False, their places stay empty.
    """

    plan: Plan
    batched: bool = True
    refill: bool = False

    @property
    def refills(self) -> bool:
        """True if failed samples are replaced."""
        return self.refill

    def runner(self) -> JobRunner:
        """Return the runner that runs this data set's jobs."""
        return BatchRunner(
            self.leaves,
            self.task_encoder,
            seed=self.seed,
            refill=self.refill,
            batched=self.batched,
            error_handler=self.worker_config.global_error_handler,
            empty=not self.once,
        )

    def start(self) -> PlanCursor:
        """Return the cursor at the beginning of the run."""
        return PlanCursor(self.plan.start)

    def step(self, cursor: PlanCursor) -> PlanCursor | None:
        """Return the cursor after one more micro-batch on every rank; None: the pass has no step left."""
        world = wanted = self.worker_config.world_size
        if self.limit is not None:
            wanted = max(0, min(world, self.limit * (cursor.ranks or world) - cursor.position))
        place, moved = self.plan.ahead(cursor.pass_number, cursor.place, wanted)
        if moved < (world if self.drop_last else 1):  # all ranks or none
            return None
        passes = cursor.pass_number
        position = cursor.position + moved
        return PlanCursor(
            place, pass_number=passes, position=position, loop_start=cursor.loop_start, ranks=cursor.ranks
        )

    def takes(self, cursor: PlanCursor, after: PlanCursor, rank: int) -> bool:
        """Return whether a rank has a micro-batch, perhaps an empty one, in the step between two cursors."""
        if not self.once:
            return True
        return self.plan.rank_slot(cursor.place, rank, self.worker_config.world_size) < after.position - cursor.position

    def place(self, cursor: PlanCursor, rank: int) -> Place:
        """Return the place of a rank's micro-batch in the step at a cursor; the end of the pass if it has none."""
        slot = self.plan.rank_slot(cursor.place, rank, self.worker_config.world_size)
        stop = self.stop(cursor.ranks)
        if stop is not None and cursor.position + slot >= stop:
            return self.plan.end(cursor.pass_number)
        return self.plan.ahead(cursor.pass_number, cursor.place, slot)[0]

    def jobs(self, pass_number: int, places: Sequence[Place]) -> list[Job]:
        """Return the jobs that make the micro-batches at some places of a pass."""
        return [
            Job(pass_number, _number(place), addresses, ("batch", pass_number, *place))
            for place, addresses in zip(places, self.plan.batches(places, pass_number), strict=True)
        ]

    def state(self, cursor: PlanCursor) -> State:
        """Return the state of a cursor, as plain data."""
        # With micro-batches of a fixed size, the position determines the place.
        place = {"place": list(cursor.place)} if self.plan.rows is None else {}
        return self._make_state("planned", cursor, place, self._identity_at(cursor.place))

    def state_at(self, position: int) -> State:
        """See :class:`~energon_lite.loading.iterators.dataset.SavableDataset`."""
        if self.loops is not None:
            return super().state_at(position)
        if position < 0:
            raise UsageError(f"there is no micro-batch {position}", fix="count from 0")
        world = self.worker_config.world_size
        passes = 0
        while not self.is_endless and position >= (steps := self._steps(passes)) * world and steps:
            passes = passes + 1
            position = position - steps * world
        if not self.is_endless:
            position -= position % world  # a pass is counted in whole steps
        place, position = self.plan.ahead(passes, self.plan.start, position)
        loop = self.loop_length * world
        start = position - position % loop if loop else 0
        return self.state(PlanCursor(place, pass_number=passes, position=position, loop_start=start))

    def _steps(self, pass_number: int) -> int:
        """Return the steps of a pass that ends, without the loops around it."""
        world = self.worker_config.world_size
        most = _MOST if self.limit is None else self.limit * world
        count = self.plan.ahead(pass_number, self.plan.start, most)[1]
        steps = count // world if self.drop_last else -(-count // world)
        return steps if self.limit is None else min(steps, self.limit)

    def cursor(self, state: State) -> PlanCursor:
        """Return the cursor of a saved state, after checking that the state belongs to this run. The state may be of
        another fixed micro-batch size, if a micro-batch of this size begins at its position.

        Raises:
            StateError: not a state, a damaged one, or one of a format that this version does not know.
            StateMismatchError: a state of other data, another configuration or another order; says what differs.
        """
        size = saved_batch_size(state)
        if type(self.plan) is FixedPlan and size != self.plan.batch_size:
            identity = replace(self.identity, settings={**self.identity.settings, BATCH_SIZE: size})
            before = replace(self, plan=replace(self.plan, batch_size=size), identity=identity)
            try:
                saved = before._cursor(state)
            except StateMismatchError:
                pass  # more than the size differs; the check below reports all of it
            else:
                return self.resized(saved, before)
        return self._cursor(state)

    def resized(self, cursor: PlanCursor, before: PlannedDataset, *, give_up: bool = False) -> PlanCursor:
        """Convert a cursor of the same data set with another micro-batch size.

        Args:
            give_up: skip samples up to the next micro-batch of this size.

        Raises:
            StateMismatchError: no micro-batch of this size begins at the cursor.
        """
        old = before.plan.chunk
        new = self.plan.chunk
        number = cursor.pass_number
        if self.limit is not None and cursor.position and old != new:
            raise StateMismatchError(
                f"batch_size: {old} in the state, {new} here, in the middle of a pass with a limit of batches",
                fix=f"let the pass end with batch_size={old}, or validate from the beginning",
            )
        ends = before.plan.count(number), self.plan.count(number)
        moved = resized(cursor, old, new, ends, self.worker_config.world_size, give_up=give_up)
        return replace(moved, place=(moved.position,))

    def _cursor(self, state: State) -> PlanCursor:
        numbers = checked(state, "planned")
        given = state.get("place", [numbers.position])
        if not isinstance(given, (list, tuple)) or not given or not all(is_count(number, _MOST) for number in given):
            raise damaged("place", given)
        place = tuple(given)
        self._identity_at(place).check(state.get("identity"))
        if not self.plan.has(numbers.pass_number, place):
            raise damaged("place", given)
        if self.plan.rows is not None and numbers.position != place[0]:
            raise damaged("position", numbers.position)
        self.check_rebase(place[0] * self.plan.chunk)
        return PlanCursor(place, **vars(numbers))

    def _identity_at(self, place: Place) -> Identity:
        """Return the identity at a place: of its samples, and of those before it in their plan chunks."""
        return self.identity.at((place[0] + any(place[1:])) * self.plan.chunk)

    def _restored(self, key: tuple[Any, ...], runner: JobRunner) -> list[Any]:
        match key:
            case ("batch", pass_number, *place) if self.plan.has(pass_number, tuple(place)):
                return [runner.run(job).batch for job in self.jobs(pass_number, [tuple(place)])]
            case ("sample", leaf, index, epoch, attempt) if self.has(leaf, index) and (self.refill or not attempt):
                return [runner.restore((leaf, index, epoch), attempt)]
        return []

    def __len__(self) -> int:
        """Return the number of micro-batches per rank in the first ``for`` loop. For an endless stream, count as many
        samples as the leaves hold, or as an epoch of a blend by repetitions has.

        By tokens, a pass that ends is planned to its end to count them; for an endless stream the number is an estimate
        from the first chunks of the plan.
        """
        return self.loop_steps(0)

    def loop_steps(self, pass_number: int) -> int:
        """Return the steps of the loop over a given pass: by tokens, passes differ by a few micro-batches."""
        world = self.worker_config.world_size
        if self.loop_length:
            return self.loop_length
        count = self.plan.count(0)
        if count is None:
            repetitions = self.repetitions or (1.0,) * len(self.leaves)
            samples = round(sum(leaf.length * r for leaf, r in zip(self.leaves, repetitions, strict=True)))
            if self.plan.rows is None:
                return self._estimated_steps(samples)
            return -(-samples // (self.plan.rows * world))
        if self.plan.rows is not None and self.once:
            return -((self.worker_config.rank - count) // world)
        if pass_number not in self._planned_steps:
            self._planned_steps[pass_number] = self._steps(pass_number)
        return self._planned_steps[pass_number]

    @cached_property
    def _planned_steps(self) -> dict[int, int]:
        """Steps of the passes that were counted, by pass number."""
        return {}

    def _estimated_steps(self, samples: int) -> int:
        """Estimate the steps in which an endless stream planned by tokens shows ``samples`` samples, from the fill of
        its first chunks."""
        chunks = min(-(-samples // self.plan.chunk), _LOOKED_AT)
        batches = self._planned_steps.get(-1)
        if batches is None:
            batches = self._planned_steps[-1] = self.plan.batches_in(0, chunks)
        return max(1, -(-batches * samples // (chunks * self.plan.chunk * self.worker_config.world_size)))

    def __str__(self) -> str:
        return self.describe(self.plan.describe())


def _number(place: Place) -> int:
    """Return one number for a place in a pass. The numbers grow along the pass."""
    number = 0
    for part in place:
        number = (number << 40) + part
    return number
