"""Order of a whole run: global position -> address of a sample.

An :class:`Order` is a :class:`BlendOrder` (leaves by weight, endlessly, or one leaf through all of its epochs), an
:class:`EpochBlendOrder` (each leaf a given number of times an epoch) or a :class:`ConcatOrder` (validation: one leaf
after the other, once). All are pure functions of positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.blend import Blend, EpochBlend, blocks_of, recent
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.permutation import MAX_LENGTH
from energon_lite.order.shuffle import LeafOrder, Leaves

#: Version of the order, written into every saved state.
ORDER_VERSION = 1

Ints = NDArray[np.int64]

#: Least number of requested positions, for each block they lie in, from which whole blocks are computed, and kept for
#: the next request: a numpy call on 1,000 elements takes half as long as one on 4,000.
_ENOUGH = BLOCK // 4
#: Tag of the hashes for rebased blends, which keeps them apart from hashes for other purposes.
_REBASE = HashDomain.REBASE.value


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of ``k`` samples, three int64 arrays of length ``k``."""

    leaf: Ints
    index: Ints
    epoch: Ints

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """The arrays of leaf, index and epoch."""
        return self.leaf, self.index, self.epoch

    def rows(self) -> list[tuple[int, int, int]]:
        """The addresses as a list of ``(leaf, index, epoch)``."""
        return list(zip(*(column.tolist() for column in self.columns()), strict=True))


@dataclass(frozen=True)
class Rebase:
    """Start of a changed blend: each leaf's stream continues without a gap.

    The samples before the position were counted once, when the blend was changed. The new blend then starts there as if
    it were position 0, and each leaf's place in it is added to the leaf's earlier count. So a look-up takes no longer
    than before, and a leaf's stream equals that of an undisturbed run, for any blends.

    Args:
        position: its first position in the run.
        starts: for each of its leaves, the number of samples of the leaf's stream before that position.

    Example:
        >>> rebase = Rebase(1000, (600, 0))  # leaf 0 continues with its sample 600, leaf 1 is new
    """

    position: int
    starts: tuple[int, ...]


class LeafBlend(Protocol):
    """Blend of leaves: positions -> (leaf, position in the leaf's own stream)."""

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Leaf and position in the leaf's stream of each of ``positions`` (``[k]`` int64, any order)."""

    def counts_before(self, position: int) -> Ints:
        """Number of samples of each leaf before ``position`` (``[leaves]`` int64)."""


def position_of(blend: LeafBlend, leaf: int, place: int) -> int:
    """Return the position at which a blend has a place of a leaf's own stream; the inverse of ``blend.lookup``."""

    def before(block: int) -> int:
        return int(blend.counts_before(block * BLOCK)[leaf])

    # Counts are nearly linear, so two blocks around an interpolated one mostly leave a few between them.
    low, high = 0, place // BLOCK + 1
    while (count := before(high)) <= place:
        low, high = high, min(8 * high, high * (place + 2) // max(1, count) + high // 8 + 1)
    guess, apart = high * place // count, high // count + 1
    for block in (guess - apart, guess + apart):
        if low < block < high:
            low, high = (block, high) if before(block) <= place else (low, block)
    block = low + bisect_right(range(low, high), place, key=before) - 1
    positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
    leaves, places = blend.lookup(positions)
    return int(positions[(leaves == leaf) & (places == place)][0])


class ChangingWeights(Protocol):
    """Weights of a blend that change during the run; they come from a guest."""

    @property
    def leaves(self) -> int:
        """Number of leaves."""

    def blend(self, leaves: int, key: int, length: int = MAX_LENGTH) -> LeafBlend:
        """Blend of leaves; its counts are also exact at the end of ``length`` positions.

        Raises:
            UsageError: there are weights for another number of leaves, or they cannot be blended.
        """

    def rebased(self, position: int) -> ChangingWeights:
        """The weights from a position on, shifted such that it becomes position 0."""


class Order(Protocol):
    """Sequence of sample addresses, by position."""

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        """First position of a pass, and its end, exclusive; None: the order is endless, and has a single pass."""

    def lookup(self, positions: Ints) -> Addresses:
        """Addresses at ``positions`` (``[k]`` int64, any order)."""

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        """Positions between ``start`` and ``stop``, both excluded, at which an epoch of the whole order begins.

        That is an epoch of the only leaf, or of the blend. Leaves that are mixed by weight end their epochs at
        positions of their own, which do not count.
        """

    def cycles(self, addresses: Addresses) -> Ints:
        """Cycle of each sample in its leaf, ``[k]``: its epoch, or the group of epochs that are mixed on purpose."""

    def rebased(self, rebase: Rebase) -> Order:
        """Start the order in the middle of a run; an order whose passes all restart is returned unchanged."""


class _MixedOrder:
    """Base class of orders of blends.

    Args:
        blend: maps positions to ``(leaf, position in the leaf's stream)``; None for a single leaf.
        leaves: the leaves' streams.
        key: 64 bits for the mixing.
        rebase: start of the blend in the middle of a run; None: it starts at position 0.
    """

    def __init__(self, blend: LeafBlend | None, leaves: Leaves, key: int, rebase: Rebase | None):
        self.blend = blend
        self.leaves = leaves
        self._key = key
        self.rebase = rebase
        self._first = 0 if rebase is None else rebase.position
        self._blocks: dict[int, Addresses] = {}
        self._starts = None if rebase is None else np.array(rebase.starts, dtype=np.int64)

    def lookup(self, positions: Ints) -> Addresses:
        if self._first:
            if len(positions) and (least := int(positions.min())) < self._first:
                raise UsageError(
                    f"position {least} is before the blend was changed, which was at position {self._first}",
                    fix="ask a loader of the blend as it was before the rebase",
                )
            positions = positions - self._first
        if len(positions) < _ENOUGH or len(positions) < _ENOUGH * len(parts := list(blocks_of(positions))):
            return self._compute(positions)
        addresses = Addresses(*(np.empty(len(positions), dtype=np.int64) for _ in range(3)))
        for number, here, slots in parts:
            block = recent(self._blocks, number, partial(self._compute, number * BLOCK + np.arange(BLOCK)))
            for column, values in zip(addresses.columns(), block.columns(), strict=True):
                column[here] = values[slots]
        return addresses

    def counts_before(self, position: int) -> Ints:
        """Number of samples of each leaf's stream before ``position``, ``[leaves]`` int64.

        Samples before a rebase are included.
        """
        within = position - self._first
        if self.blend is None:
            counts = np.array([within], dtype=np.int64)
        else:
            counts = self.blend.counts_before(within)
        return counts if self._starts is None else counts + self._starts

    def cycles(self, addresses: Addresses) -> Ints:
        return self.leaves.cycles(addresses.leaf, addresses.epoch)

    def _after(self, rebase: Rebase) -> dict[str, Any]:
        """Arguments of an order of the same leaves that starts in the middle of a run."""
        key = hash_ints(self._key, _REBASE, rebase.position)
        return {"key": key, "run": self.leaves.run, "window": self.leaves.window, "rebase": rebase}

    def _compute(self, positions: Ints) -> Addresses:
        if self.blend is None:
            leaf, position = np.zeros_like(positions), positions
        else:
            leaf, position = self.blend.lookup(positions)
        if self._starts is not None:
            position = position + self._starts[leaf]
        return Addresses(leaf, *self.leaves.lookup(leaf, position))


class BlendOrder(_MixedOrder):
    """Order of leaves mixed by weight, each repeated without end; passes are consecutive.

    Args:
        leaves: the leaves' own orders.
        weights: one for each leaf; only ratios matter. Or weights that change during the run.
        key: 64 bits for the mixing.
        run, window: see :class:`~energon_lite.order.shuffle.Leaves`.
        length: positions of a pass; None: it is endless.
        rebase: see :meth:`rebased`.

    Example:
        >>> order = BlendOrder([LeafOrder(length=3, key=1)], [1.0], key=0)
        >>> sorted(order.lookup(np.arange(3)).index.tolist())
        [0, 1, 2]
    """

    def __init__(
        self,
        leaves: Sequence[LeafOrder],
        weights: Sequence[float] | ChangingWeights,
        key: int,
        *,
        run: int | None = None,
        window: int | None = None,
        length: int | None = None,
        rebase: Rebase | None = None,
    ):
        blend = _blend(weights, len(leaves), hash_ints(key, 0))
        super().__init__(blend, Leaves(leaves, run=run, window=window), key, rebase)
        self._weights = weights
        self._length = length

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        return None if self._length is None else (pass_number * self._length, (pass_number + 1) * self._length)

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        length = self.leaves.cycle_length(0)
        if self.blend is not None or length is None:
            return []
        shift = self._first - (0 if self.rebase is None else self.rebase.starts[0])
        return list(range(shift + ((start - shift) // length + 1) * length, stop, length))

    def rebased(self, rebase: Rebase) -> BlendOrder:
        """This blend, started in the middle of a run that had another blend before.

        Weights that change keep their positions in the run.
        """
        weights = self._weights
        weights = weights if isinstance(weights, Sequence) else weights.rebased(rebase.position)
        return BlendOrder(self.leaves.leaves, weights, length=self._length, **self._after(rebase))


def _blend(weights: Sequence[float] | ChangingWeights, leaves: int, key: int) -> LeafBlend | None:
    """The blend of some leaves; None for a single leaf, which needs no mixing."""
    if not isinstance(weights, Sequence):
        blend = weights.blend(leaves, key)
        return blend if leaves > 1 else None
    if leaves != len(weights):
        raise UsageError(f"{leaves} leaves, but {len(weights)} weights", fix="give one weight for each leaf")
    return Blend(weights, key) if leaves > 1 else None


class EpochBlendOrder(_MixedOrder):
    """Order of leaves with a number of repetitions of each in an epoch.

    Args:
        leaves: the leaves' own orders.
        repetitions: repetitions of each leaf in an epoch.
        key: 64 bits for the mixing.
        run, window: see :class:`~energon_lite.order.shuffle.Leaves`.
        repeat: True: endless; False: each pass is one epoch.
        rebase: see :meth:`rebased`.
    """

    blend: EpochBlend

    def __init__(
        self,
        leaves: Sequence[LeafOrder],
        repetitions: Sequence[float],
        key: int,
        *,
        run: int | None = None,
        window: int | None = None,
        repeat: bool = True,
        rebase: Rebase | None = None,
    ):
        blend = EpochBlend([leaf.length for leaf in leaves], repetitions, hash_ints(key, 1))
        super().__init__(blend, Leaves(leaves, run=run, window=window), key, rebase)
        self._repetitions = repetitions
        self._repeat = repeat

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        return None if self._repeat else self.blend.bounds(pass_number)

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        ends = self.blend.ends(start - self._first, stop - self._first)
        return [self._first + end for end in ends]

    def rebased(self, rebase: Rebase) -> EpochBlendOrder:
        """This blend, with its first epoch started in the middle of a run that had another blend before."""
        return EpochBlendOrder(self.leaves.leaves, self._repetitions, repeat=self._repeat, **self._after(rebase))


class ConcatOrder:
    """Order of leaves one after the other, unshuffled, once; all passes are equal.

    Args:
        lengths: samples of each leaf.
    """

    def __init__(self, lengths: Sequence[int]):
        self._stops = np.cumsum(np.array(lengths, dtype=np.int64))
        self._length = int(self._stops[-1]) if len(lengths) else 0

    def bounds(self, pass_number: int) -> tuple[int, int]:
        return 0, self._length

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        return []

    def cycles(self, addresses: Addresses) -> Ints:
        return addresses.epoch

    def rebased(self, rebase: Rebase) -> ConcatOrder:
        return self

    def position(self, leaf: int, index: int) -> int:
        """Position of a sample of a leaf."""
        return index + (int(self._stops[leaf - 1]) if leaf else 0)

    def lookup(self, positions: Ints) -> Addresses:
        leaf = np.searchsorted(self._stops, positions, side="right")
        starts = np.r_[0, self._stops[:-1]]
        return Addresses(leaf.astype(np.int64), positions - starts[leaf], np.zeros_like(positions))
