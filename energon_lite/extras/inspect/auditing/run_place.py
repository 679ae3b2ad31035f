"""Position of a run in its order, and the place of a position in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.batching.chunks import ChunkPlan
from energon_lite.batching.plan import FixedPlan, Place
from energon_lite.batching.token_plan import TokenPlan
from energon_lite.errors import UsageError
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_cursor import LaneCursor
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import Cursor, PlannedDataset
from energon_lite.loading.iterators.state import State

__all__ = ["Resolved", "RunPlace", "run_place"]

#: Largest number of plan chunks that are planned to find the number of a micro-batch.
_WALKED = 8


class Resolved(NamedTuple):
    """A place of the plan, the number of its micro-batch (None: not known), and whether it was delivered."""

    place: Place | None
    micro_batch: int | None
    delivered: bool


class RunPlace(Protocol):
    """Progress of a run.

    Attributes:
        pass_number: the running pass.
        low, high: all its positions before ``low`` were delivered, and none from ``high`` on.
    """

    pass_number: int
    low: int
    high: int

    def resolve(self, pass_number: int, position: int, address: Sequence[int]) -> list[Resolved]:
        """Return the place of a position in the plan; several places if its sample is split."""


def run_place(dataset: SavableDataset, state: State | None) -> RunPlace:
    """Return the progress of a run in a state; None: the beginning.

    Raises:
        UsageError: a data set of other data sets, whose plan is not supported here.
    """
    plan = dataset.plan
    title = type(dataset).__name__
    if dataset.loops or type(dataset) not in (PlannedDataset, LaneDataset):
        raise UsageError(f"where samples are in a wrapped {title} is not known", fix="audit the one inside")
    if isinstance(dataset, LaneDataset) and type(plan) is ChunkPlan:
        return _InLanes(dataset, None if state is None else dataset.cursor(state, whole=True))
    if isinstance(dataset, PlannedDataset) and (isinstance(plan, TokenPlan) or type(plan) is FixedPlan):
        cursor = Cursor(plan.start) if state is None else dataset.cursor(state)
        return _ByTokens(plan, cursor) if isinstance(plan, TokenPlan) else _Fixed(plan, cursor)
    raise UsageError(f"where samples are in a {type(plan).__name__} is not known", fix="look at its batches")


class _Fixed:
    def __init__(self, plan: FixedPlan, cursor: Cursor):
        self._plan = plan
        self._cursor = cursor
        self.pass_number = cursor.pass_number
        self.low = self.high = plan.positions(cursor.pass_number, cursor.place[0])[0]

    def resolve(self, pass_number: int, position: int, address: Sequence[int]) -> list[Resolved]:
        number = (position - self._plan.positions(pass_number, 0)[0]) // self._plan.chunk
        count = self._plan.count(pass_number)
        if count is not None and number >= count:
            return [Resolved(None, None, False)]
        delivered = (pass_number, number) < (self.pass_number, self._cursor.place[0])
        return [Resolved((number,), number, delivered)]


class _ByTokens:
    def __init__(self, plan: TokenPlan, cursor: Cursor):
        self._plan = plan
        self._cursor = cursor
        self.pass_number = cursor.pass_number
        self.low, behind = plan.positions(cursor.pass_number, cursor.place[0])
        self.high = behind if cursor.place[1] else self.low

    def resolve(self, pass_number: int, position: int, address: Sequence[int]) -> list[Resolved]:
        plan = self._plan
        chunk, offset = divmod(position - plan.positions(pass_number, 0)[0], plan.chunk)
        batches = plan.chunks.get(pass_number, chunk).batches
        entries = np.flatnonzero(batches.sample == offset)
        numbers = sorted(set((np.searchsorted(batches.offsets, entries, side="right") - 1).tolist()))
        if plan.step is not None:  # within a step, samples are exchanged between micro-batches
            steps = {number // plan.step for number in numbers}
            every = [(chunk, step * plan.step + inside) for step in sorted(steps) for inside in range(plan.step)]
            there = zip(every, plan.batches(every, pass_number), strict=True)
            numbers = [place[1] for place, spans in there if any(tuple(address) == span[:3] for span in spans)]
        if not numbers:
            return [Resolved(None, None, False)]
        here = pass_number, self._cursor.place
        return [
            Resolved((chunk, number), self._number(pass_number, chunk, number), (pass_number, (chunk, number)) < here)
            if pass_number == self.pass_number
            else Resolved((chunk, number), self._number(pass_number, chunk, number), pass_number < self.pass_number)
            for number in numbers
        ]

    def _number(self, pass_number: int, chunk: int, inside: int) -> int | None:
        """Return the number of a micro-batch, counted from the start of the pass, or from the state; None: too far."""
        known = [(0, 0, 0)]
        if pass_number == self.pass_number:
            known.append((*self._cursor.place, self._cursor.position))  # type: ignore[arg-type]
        at, batch, count = min(known, key=lambda entry: abs(entry[0] - chunk))
        if abs(at - chunk) > _WALKED:
            return None
        between = range(min(at, chunk), max(at, chunk))
        sizes = [len(self._plan.chunks.get(pass_number, number)) for number in between]
        return count - batch + (sum(sizes) if chunk > at else -sum(sizes)) + inside


class _InLanes:
    def __init__(self, dataset: LaneDataset, cursor: LaneCursor | None):
        self._plan = dataset.plan
        self._at = {} if cursor is None else cursor.at
        self.pass_number = 0 if cursor is None else cursor.pass_number
        self._lanes = 1 if cursor is None else cursor.lanes
        chunks = [at.chunk for at in self._at.values()] or [0]
        tails = [tail.chunk for at in self._at.values() for tail in at.tails]
        self.low = self._plan.positions(self.pass_number, min(chunks + tails))[0]
        self.high = self._plan.positions(self.pass_number, max(chunks))[1] if self._at else self.low

    def resolve(self, pass_number: int, position: int, address: Sequence[int]) -> list[Resolved]:
        chunk, offset = divmod(position - self._plan.positions(pass_number, 0)[0], self._plan.chunk)
        return [Resolved((chunk,), None, pass_number < self.pass_number or self._delivered(chunk, offset))]

    def _delivered(self, chunk: int, offset: int) -> bool:
        at: Any = self._at.get(chunk % self._lanes)
        if at is None:
            return False
        for tail in at.tails:
            if tail.chunk == chunk:
                return bool(offset < tail.place.unit)
        return bool(chunk < at.chunk or (chunk == at.chunk and offset < at.place.unit))
