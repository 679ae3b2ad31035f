"""The order of a whole run: global position -> address of a sample.

An :class:`Order` is a :class:`BlendOrder` (leaves by weight, for ever, or one leaf through all of its epochs), an
:class:`EpochBlendOrder` (each leaf so many times an epoch) or a :class:`ConcatOrder` (validation: one leaf after the
other, once). All are pure functions of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.blend import Blend, EpochBlend, blocks_of
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.hashing import hash_ints
from energon_lite.order.rebase import Rebase, stages_from
from energon_lite.order.shuffle import LeafOrder, Leaves
from energon_lite.order.stages import StagedBlend, WeightStage, check_stages

__all__ = ["Addresses", "BlendOrder", "ConcatOrder", "EpochBlendOrder", "Order"]

Ints = NDArray[np.int64]

#: Positions asked for in each of the blocks they lie in, so that all of these blocks' addresses are computed.
_ENOUGH = BLOCK // 8
#: Larger requests are worked on in pieces.
_AT_ONCE = 2 * BLOCK
#: Keeps the hashes for different purposes apart.
_REBASE = 2


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of ``k`` samples, three int64 arrays of length ``k``."""

    leaf: Ints
    index: Ints
    epoch: Ints

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Leaf, index and epoch."""
        return self.leaf, self.index, self.epoch

    def rows(self) -> list[tuple[int, int, int]]:
        """The same as a list of ``(leaf, index, epoch)``."""
        return list(zip(*(column.tolist() for column in self.columns()), strict=True))


class _WholeBlocks:
    """Computes addresses in whole blocks where most of a block is asked for anyway, and keeps the last few.

    A numpy call on 1,000 elements takes half as long as one on 4,000. So a request for an eighth of its blocks pays
    for the rest of them, which the next requests then find. Smaller requests compute what they ask for and no more: a
    rank among a thousand is not interested in its neighbours' samples.
    """

    def __init__(self, compute: Callable[[Ints], Addresses]):
        self._compute = compute
        self._blocks: dict[int, Addresses] = {}

    def lookup(self, positions: Ints) -> Addresses:
        if len(positions) > _AT_ONCE:
            return self._large(positions)
        if not (len(positions) >= _ENOUGH or self._blocks):
            return self._compute(positions)
        parts = list(blocks_of(positions))
        whole = len(positions) >= _ENOUGH * len(parts)
        if not (whole or any(number in self._blocks for number, _, _ in parts)):
            return self._compute(positions)
        found = Addresses(*(np.empty(len(positions), dtype=np.int64) for _ in range(3)))
        for number, here, slots in parts:
            block = self._block(number, whole)
            if block is None:
                block, slots = self._compute(positions[here]), slice(None)
            for column, values in zip(found.columns(), block.columns(), strict=True):
                column[here] = values[slots]
        return found

    def _large(self, positions: Ints) -> Addresses:
        """In pieces whose intermediate arrays stay in the processor's cache."""
        if (positions[1:] < positions[:-1]).any():  # pieces would come back to the same blocks again and again
            return self._compute(positions)
        found = Addresses(*(np.empty(len(positions), dtype=np.int64) for _ in range(3)))
        for start in range(0, len(positions), _AT_ONCE):
            piece = slice(start, start + _AT_ONCE)
            for column, values in zip(found.columns(), self._compute(positions[piece]).columns(), strict=True):
                column[piece] = values
        return found

    def _block(self, number: int, whole: bool) -> Addresses | None:
        """All addresses of a block; None if they are not there, and should not be made."""
        block = self._blocks.get(number)
        if block is None and whole:
            while len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)), None)
            block = self._blocks[number] = self._compute(number * BLOCK + np.arange(BLOCK))
        return block


class Order(Protocol):
    """A sequence of sample addresses, by position."""

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        """The positions of a pass, as start and stop; None: the order never ends, and there is only one pass."""

    def lookup(self, positions: Ints) -> Addresses:
        """Addresses at ``positions`` (``[k]`` int64, any order)."""

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        """The positions between ``start`` and ``stop``, without both, at which an epoch of everything begins: one of
        the only leaf, or of the blend. Leaves that are mixed by weight end their epochs at positions of their own."""

    def cycles(self, addresses: Addresses) -> Ints:
        """In which turn of its leaf each sample is: its epoch, or as many epochs as are mixed on purpose."""

    def rebased(self, rebase: Rebase) -> Order:
        """The same order, beginning in the middle of a run; one whose passes begin anew stays as it is."""


class _MixedOrder:
    """What orders of blends have in common.

    Args:
        blend: ``(leaf, position in the leaf's stream)`` at positions; None for a single leaf, which needs no mixing.
        leaves: the leaves' streams.
        rebase: the blend begins in the middle of a run.
    """

    def __init__(self, blend: Blend | StagedBlend | EpochBlend | None, leaves: Leaves, rebase: Rebase | None):
        self.blend, self.leaves, self.rebase = blend, leaves, rebase
        self._first = 0 if rebase is None else rebase.position
        self._starts = None if rebase is None else np.array(rebase.starts, dtype=np.int64)
        self._blocks = _WholeBlocks(self._compute)

    def lookup(self, positions: Ints) -> Addresses:
        if self._first:
            if len(positions) and (least := int(positions.min())) < self._first:
                raise UsageError(
                    f"position {least} is before the blend was changed, which was at position {self._first}",
                    fix="ask a loader of the blend as it was before the rebase",
                )
            positions = positions - self._first
        return self._blocks.lookup(positions)

    def counts_before(self, position: int) -> Ints:
        """How many samples of each leaf's stream were shown before ``position`` (``[leaves]`` int64), those that were
        shown before a rebase included."""
        within = position - self._first
        if self.blend is None:
            counts = np.array([within], dtype=np.int64)
        else:
            counts = self.blend.counts_before(within)
        return counts if self._starts is None else counts + self._starts

    def cycles(self, addresses: Addresses) -> Ints:
        return self.leaves.cycles(addresses.leaf, addresses.epoch)

    def _compute(self, positions: Ints) -> Addresses:
        if self.blend is None:
            leaf, position = np.zeros_like(positions), positions
        else:
            leaf, position = self.blend.lookup(positions)
        if self._starts is not None:
            position = position + self._starts[leaf]
        return Addresses(leaf, *self.leaves.lookup(leaf, position))


class BlendOrder(_MixedOrder):
    """Leaves mixed by weight, each repeated for as long as asked for; passes go on where the one before ended.

    Args:
        leaves: the leaves' own orders.
        weights: one a leaf; only ratios count. Or stages, where they change along the run.
        key: 64 bits for the mixing.
        run, window: see :class:`~energon_lite.order.shuffle.Leaves`.
        length: positions of a pass; None: it never ends.
        rebase: see :meth:`rebased`.

    Example:
        >>> order = BlendOrder([LeafOrder(length=3, key=1)], [1.0], key=0)
        >>> sorted(order.lookup(np.arange(3)).index.tolist())
        [0, 1, 2]
    """

    def __init__(
        self,
        leaves: Sequence[LeafOrder],
        weights: Sequence[float] | Sequence[WeightStage],
        key: int,
        *,
        run: int | None = None,
        window: int | None = None,
        length: int | None = None,
        rebase: Rebase | None = None,
    ):
        super().__init__(
            _blend(weights, len(leaves), hash_ints(key, 0)), Leaves(leaves, run=run, window=window), rebase
        )
        self._weights, self._key, self._length = weights, key, length

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        return None if self._length is None else (pass_number * self._length, (pass_number + 1) * self._length)

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        length = self.leaves.cycle_length(0)
        if self.blend is not None or length is None:
            return []
        shift = self._first - (0 if self.rebase is None else self.rebase.starts[0])
        return list(range(shift + ((start - shift) // length + 1) * length, stop, length))

    def rebased(self, rebase: Rebase) -> BlendOrder:
        """This blend, beginning in the middle of a run whose blend was another one before. Stages stay where they are
        in the run; those before have no part in it."""
        stages = [stage for stage in self._weights if isinstance(stage, WeightStage)]
        return BlendOrder(
            self.leaves.leaves,
            stages_from(stages, rebase.position) if stages else self._weights,
            hash_ints(self._key, _REBASE, rebase.position),
            run=self.leaves.run,
            window=self.leaves.window,
            length=self._length,
            rebase=rebase,
        )


def _blend(weights: Sequence[float] | Sequence[WeightStage], leaves: int, key: int) -> Blend | StagedBlend | None:
    """None for a single leaf, which needs no mixing."""
    stages = [stage for stage in weights if isinstance(stage, WeightStage)]
    numbers = [weight for weight in weights if not isinstance(weight, WeightStage)]
    if stages and numbers:
        raise UsageError("stages and numbers among the weights of a blend", fix="give stages only, or numbers only")
    if stages:
        check_stages(stages, leaves)
        return StagedBlend(stages, key) if leaves > 1 else None
    if leaves != len(numbers):
        raise UsageError(f"{leaves} leaves, but {len(numbers)} weights", fix="give one weight for each leaf")
    return Blend(numbers, key) if leaves > 1 else None


class EpochBlendOrder(_MixedOrder):
    """Leaves mixed so that each is shown so many times an epoch.

    Args:
        leaves: the leaves' own orders.
        repetitions: of each leaf in an epoch.
        key: 64 bits for the mixing.
        run, window: see :class:`~energon_lite.order.shuffle.Leaves`.
        repeat: go on for ever; else each pass is one epoch.
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
        super().__init__(blend, Leaves(leaves, run=run, window=window), rebase)
        self._repetitions, self._key, self._repeat = repetitions, key, repeat

    def bounds(self, pass_number: int) -> tuple[int, int] | None:
        return None if self._repeat else self.blend.bounds(pass_number)

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        ends = self.blend.ends(start - self._first, stop - self._first)
        return [self._first + end for end in ends]

    def rebased(self, rebase: Rebase) -> EpochBlendOrder:
        """This blend, its first epoch beginning in the middle of a run whose blend was another one before."""
        return EpochBlendOrder(
            self.leaves.leaves,
            self._repetitions,
            hash_ints(self._key, _REBASE, rebase.position),
            run=self.leaves.run,
            window=self.leaves.window,
            repeat=self._repeat,
            rebase=rebase,
        )


class ConcatOrder:
    """Leaves one after the other, unshuffled, once; all passes are the same.

    Args:
        lengths: samples of each leaf.
        length: end after so many positions, if that is earlier.
    """

    def __init__(self, lengths: Sequence[int], *, length: int | None = None):
        self._stops = np.cumsum(np.array(lengths, dtype=np.int64))
        total = int(self._stops[-1]) if len(lengths) else 0
        self._length = total if length is None else min(total, length)

    def bounds(self, pass_number: int) -> tuple[int, int]:
        return 0, self._length

    def epoch_ends(self, start: int, stop: int) -> list[int]:
        return []

    def cycles(self, addresses: Addresses) -> Ints:
        return addresses.epoch

    def rebased(self, rebase: Rebase) -> ConcatOrder:
        return self

    def position(self, leaf: int, index: int) -> int:
        """Where a sample of a leaf stands."""
        return index + (int(self._stops[leaf - 1]) if leaf else 0)

    def lookup(self, positions: Ints) -> Addresses:
        leaf = np.searchsorted(self._stops, positions, side="right")
        starts = np.r_[0, self._stops[:-1]]
        return Addresses(leaf.astype(np.int64), positions - starts[leaf], np.zeros_like(positions))
