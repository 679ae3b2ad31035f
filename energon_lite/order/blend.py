"""The weighted blend: which leaf, and which sample of it, stands at a position. Closed form, exact, no index array.

Positions are cut into blocks of 4,096. How many samples of each leaf come *before* a block follows from the weights
alone, by halving: the whole range of 2**62 positions holds each leaf in its exact share (weights are turned into
integers that sum to 2**62); the first half of a range gets half of each leaf's samples, rounded so that the leaf is as
near to its share at the middle as the others allow (largest remainder). Fifty halvings lead to any block; neighbours
share most of the way, which is kept. It is all integers and dyadic fractions, so there is nothing to round differently
on another machine, and no count that drifts: at every block's end each leaf is within one sample of weight * position.

Inside a block each leaf's samples are spread evenly with a random offset each (stratified), and in their own order: the
n-th sample of a leaf never comes before the (n-1)-th, so a small leaf finishes each of its epochs before the next.

The greedy builder of Megatron-Core, which picks the leaf that lags most, gives about the same proportions; it needs one
pass over all positions and stores 10 bytes for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.hashing import hash_ints, mix64_array

__all__ = ["BLOCK", "Blend"]

#: Positions in a block.
BLOCK = 1 << 12
#: Halvings from the whole range of 2**62 positions to a block.
_LEVELS = 50

Ints = NDArray[np.int64]


class _Range(NamedTuple):
    """A dyadic range of positions."""

    before: Ints  # samples of each leaf before the range
    inside: Ints  # samples of each leaf inside it
    error_start: NDArray[np.float64]  # before - weight * position, at the range's start
    error_stop: NDArray[np.float64]  # the same at its end


class _Block(NamedTuple):
    leaf: Ints  # [BLOCK]
    position: Ints  # [BLOCK] position inside the leaf's own stream


class Blend:
    """Positions -> (leaf, position in the leaf's own stream), in proportion to ``weights``.

    Args:
        weights: one positive finite number a leaf; only their ratios count.
        key: 64 bits; decides the places inside the blocks.

    Raises:
        UsageError: no weight, or one that is not a positive finite number.

    Example:
        >>> leaf, position = Blend([3, 1], key=0).lookup(np.arange(4096))
        >>> np.bincount(leaf).tolist()
        [3072, 1024]
    """

    def __init__(self, weights: Sequence[float], key: int):
        self.shares = integer_shares(weights)
        self.key = key
        zeros = np.zeros(len(self.shares))
        self._path: list[_Range] = [_Range(np.zeros_like(self.shares), self.shares, zeros, zeros)]
        self._path_block = 0  # the block whose ranges, outermost first, stand in _path
        self._blocks: dict[int, _Block] = {}

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Leaf and position in the leaf's stream of each of ``positions`` (``[k]`` int64, any order)."""
        block_of = positions >> 12
        slot = positions & (BLOCK - 1)
        first = int(block_of[0]) if len(block_of) else 0
        if np.all(block_of == first):
            block = self._block(first)
            return block.leaf[slot], block.position[slot]
        leaf, position = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(block_of):
            here = block_of == number
            block = self._block(int(number))
            leaf[here] = block.leaf[slot[here]]
            position[here] = block.position[slot[here]]
        return leaf, position

    def counts_before(self, block: int) -> Ints:
        """How many samples of each leaf stand before block number ``block`` (``[leaves]`` int64)."""
        return self._descend(block).before

    def _block(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            while len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)), None)
            block = self._blocks[number] = self._lay_out(number)
        return block

    def _lay_out(self, number: int) -> _Block:
        range_ = self._descend(number)
        present = np.flatnonzero(range_.inside)
        counts = range_.inside[present]
        leaf = np.repeat(present, counts)
        rank = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
        entropy = np.uint64(hash_ints(self.key, number)) + np.arange(BLOCK, dtype=np.uint64)
        offset = mix64_array(entropy) >> np.uint64(32)
        # The rank-th of n samples falls into the rank-th of n equal parts of the block, at a random place of it.
        time = ((rank.astype(np.uint64) << np.uint64(32)) | offset) // np.repeat(counts, counts).astype(np.uint64)
        sorted_ = np.sort((time << np.uint64(12)) | np.arange(BLOCK, dtype=np.uint64))
        slots = (sorted_ & np.uint64(BLOCK - 1)).astype(np.int64)
        position = np.repeat(range_.before[present], counts) + rank
        return _Block(leaf[slots], position[slots])

    def _descend(self, block: int) -> _Range:
        """The range of one block. Ranges that it shares with the block asked for last are not computed again."""
        if block >> _LEVELS:
            raise UsageError(
                f"block {block} of a blend: positions end at 2**62", fix="look at where the position comes from"
            )
        shared = _LEVELS - (block ^ self._path_block).bit_length()
        path = self._path[: shared + 1]
        for level in range(len(path), _LEVELS + 1):
            path.append(_half(path[-1], (block >> (_LEVELS - level)) & 1))
        self._path, self._path_block = path, block
        return path[-1]


def integer_shares(weights: Sequence[float]) -> Ints:
    """Integers in the proportion of ``weights`` that sum to exactly 2**62 (largest remainder)."""
    for place, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise UsageError(
                f"weight {place} of a blend is {weight!r}", fix="give positive finite numbers; leave out what has none"
            )
    if not weights:
        raise UsageError("a blend of nothing", fix="give at least one weight")
    exact = [Fraction(weight) for weight in weights]
    unit = Fraction(1 << 62) / sum(exact)
    ideal = [weight * unit for weight in exact]
    shares = [int(share) for share in ideal]
    missing = (1 << 62) - sum(shares)
    for place in sorted(range(len(shares)), key=lambda i: shares[i] - ideal[i])[:missing]:
        shares[place] += 1
    return np.array(shares, dtype=np.int64)


def _half(range_: _Range, right: int) -> _Range:
    """The left or the right half of a range.

    Half of a leaf's samples, less half of the errors at both ends, is where the leaf should be at the middle; that is
    ``whole + rest`` with an integer ``whole`` and a dyadic ``rest``. Everyone gets the floor, and those with the
    largest fractions get one more until the half is full. Counts never run backwards, which is what the clipping is
    for.
    """
    n = range_.inside
    whole = n >> 1
    rest = (n & 1) * 0.5 - (range_.error_start + range_.error_stop) * 0.5
    left = np.clip(whole + np.floor(rest).astype(np.int64), 0, n)
    lag = (whole - left) + rest
    missing = (int(n.sum()) >> 1) - int(left.sum())
    if missing:
        step = 1 if missing > 0 else -1
        able = np.flatnonzero(left < n if missing > 0 else left > 0)
        chosen = able[np.argsort(-step * lag[able], kind="stable")[: abs(missing)]]
        left[chosen] += step
        lag[chosen] -= step
    if right:
        return _Range(range_.before + left, n - left, -lag, range_.error_stop)
    return _Range(range_.before, left, range_.error_start, -lag)
