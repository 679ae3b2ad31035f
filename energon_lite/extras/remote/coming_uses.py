"""Next uses of samples in a run, by its order, for a store that keeps what comes next.

The order is a function of positions, so the coming positions are looked up, as many as four passes over the data have,
and sorted by sample. The position of a sample that is used now is found by the inverse permutation of its epoch, and,
in a blend, by search: the number of samples of a leaf before a position is known, and grows with the position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order, position_of

Ints = NDArray[np.int64]

#: Most positions that are looked up at once.
_SPAN = 1 << 22
#: Most positions before the current one that other workers may not have reached, and their part of the data.
_BEHIND, _PART = 1 << 12, 64


class _Window(NamedTuple):
    """Uses of samples at consecutive positions.

    Attributes:
        first: the first position.
        uses: number of the sample times the span, plus the place of its use in the window; sorted.
        epochs: epoch at each place.
    """

    first: int
    uses: Ints
    epochs: Ints


class ComingUses:
    """Distances, in positions of an order, to the next uses of samples.

    Args:
        order: the order of the run.
        lengths: samples of each leaf.

    Attributes:
        now: position of the last sample that was asked for with :meth:`after`.

    Example:
        >>> uses = ComingUses(BlendOrder([LeafOrder(3, key=1, copies=None)], [1.0], key=0), [3])
        >>> uses.after(0, 2, 5), uses.of(np.zeros(3, int), np.arange(3), np.full(3, -1)).tolist()
        (3.0, [1.0, 2.0, 0.0])
    """

    def __init__(self, order: Order, lengths: Sequence[int]):
        self._order = order
        self._starts = np.cumsum([0, *lengths])
        total = int(self._starts[-1])
        self._behind = min(_BEHIND, total // _PART)
        self._span = min(_SPAN, 4 * total + 2 * self._behind)
        self._window: _Window | None = None
        self.now = 0

    def after(self, leaf: int, index: int, epoch: int) -> float:
        """Return the distance from a use of a sample to its next one; infinity: it is further away than is known."""
        start = (int(self._starts[leaf]) + index) * self._span
        for is_new in (False, True):
            if is_new and not self._look(leaf, index, epoch):
                break
            if self._window is None:
                continue
            first, uses, epochs = self._window
            places = uses[slice(*np.searchsorted(uses, [start, start + self._span]))] - start
            same = np.flatnonzero(epochs[places] == epoch)
            if len(same) and (is_new or places[same[0]] <= self._span // 2):
                here, *coming = places[same[0] :].tolist()
                self.now = first + here
                return float(coming[0] - here) if coming else math.inf
        return math.inf

    def of(self, leaf: Ints, index: Ints, epoch: Ints) -> NDArray[np.float64]:
        """Return the distances from the current position to the next uses of samples, ``[k]``.

        Args:
            leaf, index: the samples, ``[k]``.
            epoch: ``[k]``; -1: in any epoch.
        """
        if self._window is None:
            return np.full(len(leaf), math.inf)
        first, uses, epochs = self._window
        now = self.now - first
        start = (self._starts[leaf] + index) * self._span
        at = np.searchsorted(uses, start + max(0, now - self._behind)).clip(max=len(uses) - 1)
        place = uses[at] - start
        is_used = (place >= 0) & (place < self._span)
        is_used &= (epoch < 0) | (epochs[place.clip(0, self._span - 1)] == epoch)
        return np.where(is_used, place - now, math.inf)

    def _look(self, leaf: int, index: int, epoch: int) -> bool:
        """Look up the positions around a use of a sample; return False if it has none that is known."""
        order = self._order
        if isinstance(order, ConcatOrder):  # the next pass is the same one
            first = order.position(leaf, index)
            positions = np.arange(first, first + self._span) % order.bounds(0)[1]
        elif isinstance(order, (BlendOrder, EpochBlendOrder)):
            first = max(_position(order, leaf, index, epoch) - self._behind, _first(order))
            positions = np.arange(first, first + self._span)
        else:
            return False
        found = order.lookup(positions)
        uses = (self._starts[found.leaf] + found.index) * self._span + np.arange(self._span)
        uses.sort()
        self._window = _Window(first, uses, found.epoch)
        return True


def _first(order: BlendOrder | EpochBlendOrder) -> int:
    return 0 if order.rebase is None else order.rebase.position


def _position(order: BlendOrder | EpochBlendOrder, leaf: int, index: int, epoch: int) -> int:
    """Return the position of a sample in an epoch of its leaf; if it is drawn, that of the epoch's begin."""
    leaves = order.leaves
    copies = leaves.leaves[leaf].copies
    if copies == -1:
        place = epoch * leaves.leaves[leaf].length
    else:
        places = leaves.places(leaf, index, np.array([epoch // (copies or 1)])).ravel()
        _, epochs = leaves.lookup(np.full(len(places), leaf), places)
        place = int(places[epochs == epoch][0])
    begun = 0 if order.rebase is None else order.rebase.starts[leaf]
    place = max(0, place - begun)
    return _first(order) + (place if order.blend is None else position_of(order.blend, leaf, place))
