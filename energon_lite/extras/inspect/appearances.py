"""Past and next appearances of a sample in a run, by the inverse of the order, without a walk through the run.

They are compared with the position of the run, and have a place in its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from energon_lite.batching.plan import ChunkPlan, FixedPlan, Place
from energon_lite.batching.token_plan import TokenPlan
from energon_lite.errors import UsageError
from energon_lite.extras.inspect.occurrences import Occurrences
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_cursor import LaneCursor
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlanCursor, PlannedDataset
from energon_lite.loading.iterators.state import State
from energon_lite.order.permutation import MAX_LENGTH
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.read.webdataset import WebdatasetSource

#: Largest number of plan chunks that are planned to find the number of a micro-batch.
_WALKED = 8


#: A place of the plan, the number of its micro-batch (None: not known), and whether it was delivered.
Resolved = tuple[Place | None, int | None, bool]


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
    if dataset.loops is not None or type(dataset) not in (PlannedDataset, LaneDataset):
        raise UsageError(f"where samples are in a wrapped {title} is not known", fix="audit the one inside")
    if isinstance(dataset, LaneDataset) and type(plan) is ChunkPlan:
        return _InLanes(dataset, None if state is None else dataset.cursor(state, whole=True))
    if isinstance(dataset, PlannedDataset) and (isinstance(plan, TokenPlan) or type(plan) is FixedPlan):
        cursor = PlanCursor(plan.start) if state is None else dataset.cursor(state)
        return _ByTokens(plan, cursor) if isinstance(plan, TokenPlan) else _Fixed(plan, cursor)
    raise UsageError(f"where samples are in a {type(plan).__name__} is not known", fix="look at its batches")


class _Fixed:
    def __init__(self, plan: FixedPlan, cursor: PlanCursor):
        self._plan = plan
        self._cursor = cursor
        self.pass_number = cursor.pass_number
        self.low = self.high = plan.positions(cursor.pass_number, cursor.place[0])[0]

    def resolve(self, pass_number: int, position: int, address: Sequence[int]) -> list[Resolved]:
        number = (position - self._plan.positions(pass_number, 0)[0]) // self._plan.chunk
        count = self._plan.count(pass_number)
        if count is not None and number >= count:
            return [(None, None, False)]
        delivered = (pass_number, number) < (self.pass_number, self._cursor.place[0])
        return [((number,), number, delivered)]


class _ByTokens:
    def __init__(self, plan: TokenPlan, cursor: PlanCursor):
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
        here = self.pass_number, self._cursor.place
        return [
            ((chunk, number), self._number(pass_number, chunk, number), (pass_number, (chunk, number)) < here)
            for number in numbers
        ] or [(None, None, False)]

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
        return [((chunk,), None, pass_number < self.pass_number or self._delivered(chunk, offset))]

    def _delivered(self, chunk: int, offset: int) -> bool:
        at: Any = self._at.get(chunk % self._lanes)
        if at is None:
            return False
        for tail in at.tails:
            if tail.chunk == chunk:
                return bool(offset < tail.place.unit)
        return bool(chunk < at.chunk or (chunk == at.chunk and offset < at.place.unit))


#: Fewest appearances in a row that a plan leaves out, for the sample to count as always left out.
_PATIENCE = 8


@dataclass(frozen=True)
class Appearance:
    """A planned appearance of a sample in a run.

    Args:
        pass_number: pass over the data; an endless stream has pass 0 only.
        position: position in the order of the samples.
        epoch: epoch of the sample's data set.
        place: place in the plan: the number of the micro-batch; or those of the plan chunk and of the micro-batch in
            it; or that of the lane's chunk; None: the plan leaves the sample out.
        micro_batch: number of its micro-batch in the pass, over all ranks; None: not known without planning many
            chunks.
        delivered: it was delivered before the state.
    """

    pass_number: int
    position: int
    epoch: int
    place: Place | None
    micro_batch: int | None
    delivered: bool


@dataclass(frozen=True)
class SampleHistory:
    """Appearances of a sample in the training of a run, up to a state.

    Args:
        dataset: name of its data set.
        leaf, index, key: number of the data set, number of the sample in it, and its key.
        times: planned number of deliveries; 0 if the plan leaves it out, for example because it is too long.
        left_out: number of appearances checked at which the plan leaves it out.
        before_rebase: number of these deliveries under another blend, before the run's blend was changed.
        appearances: the last deliveries, the oldest first.
        coming: the next appearance; None: there is none in this pass.
    """

    dataset: str
    leaf: int
    index: int
    key: str
    times: int
    left_out: int
    before_rebase: int
    appearances: tuple[Appearance, ...]
    coming: Appearance | None


def sample_history(
    dataset: SavableDataset, leaf: int, index: int, state: State | None = None, *, most: int = 20
) -> SampleHistory:
    """Return the appearances of a sample up to a state, computed without reads and without a walk through the run.

    A sample that failed when it was read was replaced; this is the plan. The digest of a step shows whether it had
    exactly the planned samples.

    Args:
        dataset: data set of the run's loader.
        leaf: number of the data set in the blend.
        index: number of the sample in it.
        state: state of the loader; None: the beginning.
        most: largest number of appearances to list.

    Raises:
        UsageError: there is no such sample, or the data set is a wrapped one.
        StateError, StateMismatchError: the state is damaged, or of another run.

    Example:
        >>> history = sample_history(dataset, 0, 123_456_789, torch.load("loader.pt"))
        >>> history.times, [one.micro_batch for one in history.appearances]
        (2, [41522, 1230554])
    """
    dataset = dataset.resolved.at(state)
    if not dataset.has(leaf, index):
        sizes = ", ".join(f"{number}: {len(shown_leaf.source)}" for number, shown_leaf in enumerate(dataset.leaves[:8]))
        raise UsageError(f"there is no sample {index} of data set {leaf}", fix=f"data sets have samples {sizes}")
    source, seen = dataset.leaves[leaf], _Appearances(dataset, leaf, index, run_place(dataset, state))
    shown, coming = list(islice(seen.newest_first(), max(1, most))), seen.coming()
    is_left_out = bool(seen.left_out) and not shown and coming is None
    return SampleHistory(
        dataset=source.name,
        leaf=leaf,
        index=index,
        key=source.source.key(index),
        times=0 if is_left_out else seen.times(),
        left_out=seen.left_out if is_left_out else 0,
        before_rebase=seen.occurrences.before_rebase,
        appearances=tuple(sorted(shown[:most], key=lambda one: (one.pass_number, one.place or (), one.position))),
        coming=coming,
    )


def find_samples(dataset: SavableDataset, key: str) -> list[tuple[int, int]]:
    """Return the data set number and the sample number of each sample with this key."""
    leaves = enumerate(dataset.resolved.leaves)
    return [(number, index) for number, leaf in leaves for index in indices_of(leaf.source, key)]


def indices_of(source: Any, key: str) -> list[int]:
    """Return the numbers of the samples of a source with this key."""
    if isinstance(source, WebdatasetSource):
        return [place for place in map(source.choice.index_of, KeyIndex(source.index).find(key)) if place is not None]
    return [index for index in range(len(source)) if source.key(index) == key]


class _Appearances:
    """The appearances of a sample, before and after the place of a run."""

    def __init__(self, dataset: SavableDataset, leaf: int, index: int, at: RunPlace):
        self._is_endless = dataset.is_endless
        self._order = dataset.plan.order
        self._at = at
        self.occurrences = Occurrences(self._order, leaf, index)
        self.left_out = 0  # appearances checked at which the plan leaves it out

    def times(self) -> int:
        """Return the number of deliveries."""
        low, high = self._at.low, self._at.high
        if not self._is_endless:
            return sum(appearance.place is not None for appearance in self.newest_first())
        begun = self.occurrences.between(low, high) if high > low else ()
        delivered = sum(appearance.delivered for place in begun for appearance in self._appearances(0, place))
        return self.occurrences.count(low) + delivered

    def newest_first(self) -> Iterator[Appearance]:
        """Yield all appearances that were delivered, the newest first."""
        for pass_number in range(self._at.pass_number, -1, -1):
            start, stop = self._order.bounds(pass_number) or (0, MAX_LENGTH)
            if pass_number == self._at.pass_number:
                stop = min(stop, self._at.high)
            missed = 0
            for position in self.occurrences.between(start, stop, newest=True):
                appearances = list(self._appearances(pass_number, position))
                yield from (appearance for appearance in appearances if appearance.delivered)
                missed = missed + 1 if all(appearance.place is None for appearance in appearances) else 0
                self.left_out += bool(missed)
                if missed >= _PATIENCE:
                    return

    def coming(self) -> Appearance | None:
        """Return the next appearance; None: there is none in this pass."""
        start, stop = self._order.bounds(self._at.pass_number) or (0, MAX_LENGTH // 4)
        for position in islice(self.occurrences.between(max(start, self._at.low), stop), _PATIENCE):
            for appearance in self._appearances(self._at.pass_number, position):
                if not appearance.delivered and appearance.place is not None:
                    return appearance
        return None

    def _appearances(self, pass_number: int, position: int) -> Iterator[Appearance]:
        """Yield the appearances at a position: one, or several if the sample is split."""
        (address,) = self._order.lookup(np.array([position], dtype=np.int64)).rows()
        for place, number, delivered in self._at.resolve(pass_number, position, address):
            yield Appearance(pass_number, position, address[2], place, number, delivered)
