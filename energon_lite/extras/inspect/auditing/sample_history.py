"""When a sample is trained on, and how often until now: by the inverse of the order, without going through the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from energon_lite.batching.plan import Place
from energon_lite.errors import UsageError
from energon_lite.extras.inspect.auditing.run_place import RunPlace, run_place
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.state import State
from energon_lite.order.occurrences import Occurrences
from energon_lite.order.permutation import MAX_LENGTH
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["Appearance", "SampleHistory", "find_samples", "sample_history"]

#: A sample that a plan leaves out so many times in a row is one that it always leaves out.
_PATIENCE = 8


@dataclass(frozen=True)
class Appearance:
    """A place of the run at which a sample comes, as planned.

    Args:
        pass_number: which pass over the data; an endless stream has pass 0 only.
        position: in the order of the samples.
        epoch: of the sample's data set.
        place: where that is in the plan: the number of the micro-batch, or those of the plan chunk and of the
            micro-batch in it, or of the lane's chunk; None: the plan leaves it out.
        micro_batch: the number of its micro-batch in the pass, over all ranks; None: it is not known without planning
            much else.
        delivered: it was, before the state.
    """

    pass_number: int
    position: int
    epoch: int
    place: Place | None
    micro_batch: int | None
    delivered: bool


@dataclass(frozen=True)
class SampleHistory:
    """When a sample was trained on, up to a state.

    Args:
        dataset: name of its data set.
        leaf, index, key: number of the data set, number of the sample in it, and its key.
        times: how often it was delivered, as planned; 0 if the plan leaves it out, say as too long.
        left_out: it is left out, as far as one has looked: that often.
        before_rebase: times of these that another blend showed it, before the run's blend was changed.
        appearances: the last of them, the oldest first.
        coming: the next one; None: there is none in this pass.
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
    """When a sample was trained on up to a state: nothing is read, and nothing gone through.

    A sample that failed when it was read was replaced; here is what was planned. Whether a step had just the samples
    that were planned is told by its digest.

    Args:
        dataset: what the loader of the run was made of.
        leaf: the number of the data set in the blend.
        index: of the sample in it.
        state: of the loader; None: the beginning.
        most: list so many appearances.

    Raises:
        UsageError: there is no such sample, or the data set is a wrapped one.
        StateError, StateMismatchError: the state is damaged, or of another run.

    Example:
        >>> history = sample_history(dataset, 0, 123_456_789, torch.load("loader.pt"))
        >>> history.times, [one.micro_batch for one in history.appearances]
        (2, [41522, 1230554])
    """
    dataset = dataset.runs_as.at(state)
    if not dataset.has(leaf, index):
        sizes = ", ".join(f"{number}: {len(one.source)}" for number, one in enumerate(dataset.leaves[:8]))
        raise UsageError(f"there is no sample {index} of data set {leaf}", fix=f"data sets have samples {sizes}")
    return _History(dataset, leaf, index, run_place(dataset, state), most).found()


def find_samples(dataset: SavableDataset, key: str) -> list[tuple[int, int]]:
    """Data set and number of each sample with this key."""
    found = list[tuple[int, int]]()
    for leaf, one in enumerate(dataset.runs_as.leaves):
        found += [(leaf, index) for index in _numbers(one.source, key)]
    return found


def _numbers(source: Any, key: str) -> list[int]:
    if isinstance(source, WebdatasetSource):
        return [place for place in map(source.choice.index_of, KeyIndex(source.index).find(key)) if place is not None]
    return [index for index in range(len(source)) if source.key(index) == key]


class _History:
    def __init__(self, dataset: SavableDataset, leaf: int, index: int, at: RunPlace, most: int):
        self._dataset = dataset
        self._leaf = leaf
        self._index = index
        self._at = at
        self._most = most
        self._order = dataset.plan.order
        self._occurrences = Occurrences(self._order, leaf, index)
        self._left_out = 0  # places that were looked at, at which the plan leaves it out

    def found(self) -> SampleHistory:
        source = self._dataset.leaves[self._leaf]
        shown = list(islice(self._newest_first(), max(1, self._most)))
        coming = self._coming()
        is_left_out = bool(self._left_out) and not shown and coming is None
        return SampleHistory(
            source.name,
            self._leaf,
            self._index,
            source.source.key(self._index),
            0 if is_left_out else self._times(),
            self._left_out if is_left_out else 0,
            self._occurrences.before_rebase,
            tuple(sorted(shown[: self._most], key=lambda one: (one.pass_number, one.place or (), one.position))),
            coming,
        )

    def _times(self) -> int:
        at = self._at
        if not self._dataset.is_endless:
            return sum(one.place is not None for one in self._newest_first())
        if at.high == at.low:
            return self._occurrences.count(at.low)
        begun = self._occurrences.between(at.low, at.high)
        return self._occurrences.count(at.low) + sum(one.delivered for p in begun for one in self._appearances(0, p))

    def _newest_first(self) -> Iterator[Appearance]:
        """All that were delivered."""
        for pass_number in range(self._at.pass_number, -1, -1):
            start, stop = self._order.bounds(pass_number) or (0, MAX_LENGTH)
            if pass_number == self._at.pass_number:
                stop = min(stop, self._at.high)
            missed = 0
            for position in self._occurrences.between(start, stop, newest=True):
                found = list(self._appearances(pass_number, position))
                yield from (one for one in found if one.delivered)
                missed = missed + 1 if all(one.place is None for one in found) else 0
                self._left_out += bool(missed)
                if missed >= _PATIENCE:
                    return

    def _coming(self) -> Appearance | None:
        start, stop = self._order.bounds(self._at.pass_number) or (0, MAX_LENGTH // 4)
        for position in islice(self._occurrences.between(max(start, self._at.low), stop), _PATIENCE):
            for one in self._appearances(self._at.pass_number, position):
                if not one.delivered and one.place is not None:
                    return one
        return None

    def _appearances(self, pass_number: int, position: int) -> Iterator[Appearance]:
        """What the plan makes of a position: one appearance, or several where the sample is split."""
        (address,) = self._address(position)
        for place, number, delivered in self._at.resolve(pass_number, position, address):
            yield Appearance(pass_number, position, address[2], place, number, delivered)

    def _address(self, position: int) -> list[tuple[int, int, int]]:
        return self._order.lookup(np.array([position], dtype=np.int64)).rows()
