"""Loops around the loops of a data set: limited, repeated, cut into epochs, for batches without numbers.

If hooks or tokens decide how many batches a pass has, the number is only known after the pass. So this is an iterator
around the data set's iterator. It counts steps and loops; its state has these counts in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from energon_lite.errors import FatalSampleError, TopologyError
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.iterator import DatasetIterator
from energon_lite.loading.iterators.state import State, damaged, is_count
from energon_lite.loading.makers.outcomes import Address, Result
from energon_lite.loading.makers.report import Report

#: Upper bound of the counts in a state, exclusive; above it the state is damaged.
_MOST = 1 << 60


@dataclass(frozen=True)
class Loop:
    """A loop around the loops inside it.

    Args:
        kind: ``limit``: the first steps of the first loop, always the same ones; ``repeat``: several loops, one after
            the other; ``epoch``: a number of steps that continue after those of the loop before.
        count: steps of each rank, or repetitions; 0: endless.
    """

    kind: Literal["limit", "repeat", "epoch"]
    count: int

    @property
    def by_steps(self) -> bool:
        """True if the loop counts steps, and not repetitions."""
        return self.kind != "repeat"


@dataclass(frozen=True)
class Loops:
    """Loops around the loops of a data set, from the inside out: its field ``loops``."""

    of: tuple[Loop, ...]

    def __call__(self, kind: type[DatasetIterator]) -> Callable[..., DatasetIterator]:
        """Return a function that makes the iterators of a loader, given the class of those of the data set inside."""
        return partial(LoopedIterator, kind)


def loops_of(dataset: SavableDataset) -> tuple[Loop, ...]:
    """Return the loops around those of a data set, from the inside out."""
    return dataset.loops.of if isinstance(dataset.loops, Loops) else ()


class _LoopsCursor(NamedTuple):
    """A position in loops.

    Attributes:
        inner: the cursor of the data set inside.
        counts: one count for each loop, from the inside out: micro-batches of all ranks, or finished repetitions.
        ranks: the world size with which an outermost limit began.
    """

    inner: Any
    counts: tuple[int, ...]
    ranks: int


class LoopedIterator(DatasetIterator):
    """Iterator of a rank over nested loops. *Depth* 0 is the data set inside, depth n the n-th wrapper around it.

    Args:
        inner: makes the iterator of the data set inside. The other arguments are those of every iterator.
    """

    _is_over = False  # the outermost loop
    _may_be_over = False  # the loop was left or restored, and no step has been taken since
    _barren = 0  # passes in a row inside that ended without a step

    def __init__(
        self,
        inner: Callable[..., DatasetIterator],
        dataset: Any,
        workers: ExecutorHandle,
        prefetch_factor: int,
        report: Report,
        skip: Collection[tuple[int, int]] = (),
    ):
        self._inner = inner(dataset, workers, prefetch_factor, report)
        self._loops = loops_of(dataset)
        self._inner.tells_ends = True
        super().__init__(dataset, workers, prefetch_factor, report, skip)

    @property
    def knows_end(self) -> bool:
        return self._inner.knows_end

    @property
    def step(self) -> tuple[int, int]:
        return self._inner.step

    # -- the loop -------------------------------------------------------------------------------------------------

    def start_loop(self) -> None:
        # A loop that was left or restored after its last step is over, so the next loop begins.
        self._may_be_over = self._is_begun and not self._is_over
        self._barren = 0
        if self._is_over:
            self._is_over = False
            self._begin(len(self._loops))

    def is_over(self) -> bool:
        while not self._has_ended():
            if self._inner.is_over():
                self._end(0)
            elif self._is_skipped(*self.step):
                self._skip_result(self._take() or Result(None))
            else:
                return False
        return True

    def _take(self) -> Result | None:
        while not self._has_ended():
            if (result := self._inner.take()) is not None:
                self._may_be_over = False
                self._barren = 0
                return result
            self._end(0)
        return None

    def follow(self, step: tuple[int, int] | None) -> None:
        self._is_over = step is None
        if step is not None:
            self._inner.follow(step)

    def advance(self) -> None:
        self._inner.advance()
        for depth, loop in enumerate(self._loops):
            self._counts[depth] += self._world if loop.by_steps else 0
        self._is_begun = True
        self._keep_place()

    def _has_ended(self) -> bool:
        """Return whether the outermost loop is over, after ending and restarting the inner loops that are complete."""
        while not self._is_over and (full := next(filter(self._is_full, range(1, len(self._loops) + 1)), 0)):
            self._end(full)
        return self._is_over

    def _is_full(self, depth: int) -> bool:
        loop = self._loops[depth - 1]
        ranks = self._ranks if loop.kind == "limit" else self._world
        return loop.by_steps and self._counts[depth - 1] >= loop.count * ranks

    def _end(self, depth: int) -> None:
        """End the loop at a depth: the loop around it ends, too, or starts its next inner loop."""
        if not depth:
            if self._barren:
                raise FatalSampleError(
                    "a whole pass of the data set inside has no batch for any rank", fix="look at the hooks"
                )
            self._barren = 1
        if depth == len(self._loops):
            self._is_over = not self._may_be_over
            if self._may_be_over:
                self._may_be_over = False
                self._begin(depth)
            self._keep_place()
            return
        loop = self._loops[depth]
        if loop.kind == "repeat":
            self._counts[depth] += 1
        if loop.kind == "limit" or (loop.kind == "repeat" and self._counts[depth] == loop.count):
            self._end(depth + 1)
        else:
            self._begin(depth)

    def _begin(self, depth: int) -> None:
        """Begin the next loop at a depth; the one before it is over."""
        if not depth:
            self._inner.start_loop()
            return
        kind = self._loops[depth - 1].kind
        self._counts[depth - 1] = 0
        if kind == "repeat":
            self._begin(depth - 1)
        elif kind == "limit":
            self._inner.rewind()
            self._counts[:depth] = [0] * depth
            self._ranks = self._world

    def rewind(self) -> None:
        self._inner.rewind()
        self._continue([0] * len(self._loops), self._world)

    # -- the state ------------------------------------------------------------------------------------------------

    def state(self, cursor: _LoopsCursor | None = None) -> State:
        inner, counts, ranks = cursor or self.cursor
        return {**self._inner.state(inner), "ranks": ranks, "loops": list(counts)}

    def restore(self, state: State | None) -> None:
        self._inner.restore(state)
        self.dataset = self._inner.dataset
        if state is None:
            self._continue([0] * len(self._loops), self._world)
            return
        counts = state.get("loops")
        ranks = state.get("ranks")
        if not isinstance(counts, Sequence) or len(counts) != len(self._loops):
            raise damaged("loops", counts)
        if not all(is_count(count, _MOST) for count in counts) or not is_count(ranks, _MOST) or not ranks:
            raise damaged("loops", [ranks, *counts])
        if self._loops[-1].kind == "limit" and (left := self._loops[-1].count * ranks - counts[-1]) % self._world:
            raise TopologyError(
                f"{left} micro-batches are left of a limit that began on {ranks} ranks: they cannot be divided among "
                f"{self._world}",
                fix=f"go on with {ranks} ranks, or start without the state",
            )
        self._continue(list(counts), ranks, is_begun=True)

    def _continue(self, counts: list[int], ranks: int, *, is_begun: bool = False) -> None:
        self._counts = counts
        self._ranks = ranks
        self._is_begun = is_begun
        self._is_over = self._may_be_over = False
        self._barren = 0
        self._keep_place()

    def _keep_place(self) -> None:
        self.cursor = _LoopsCursor(self._inner.cursor, tuple(self._counts), self._ranks)

    # -- as the iterator inside -----------------------------------------------------------------------------------

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        return self._inner.addresses_at(pass_number, step, ranks)

    def planned_counts(self) -> dict[str, int] | None:
        return self._inner.planned_counts()

    def close(self) -> None:
        self._inner.close()


def is_endless(loops: Sequence[Loop], inside: bool) -> bool:
    """Return whether the steps never end, perhaps in several ``for`` loops.

    Args:
        inside: the steps of the data set never end.
    """
    for loop in loops:
        inside = loop.kind == "epoch" or (loop.kind == "repeat" and (inside or not loop.count))
    return inside


def length_of(loops: Sequence[Loop], inside: Callable[[int], int | None]) -> int | None:
    """Return the steps of the first ``for`` loop; None: it never ends.

    Args:
        inside: returns the steps of the given number of loops of the data set together.
    """
    if not loops:
        return inside(1)
    *others, last = loops
    if last.kind == "epoch":
        return last.count
    if last.kind == "limit":
        return last.count if (most := length_of(others, inside)) is None else min(last.count, most)
    if not last.count:
        return None
    if not others:
        return inside(last.count)
    once = length_of(others, inside)
    return None if once is None else last.count * once
