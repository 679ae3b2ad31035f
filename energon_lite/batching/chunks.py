"""Chunks of a pass for content-decided batches. Integers only: no torch, no I/O.

A pass is cut into chunks of equal length. The batches of a chunk depend on nothing outside of it, so each chunk can be
processed alone, on any worker. Only the remainder, too small for a batch or a pack at the chunk's end, moves to a later
chunk of the same lane. Chunks are assigned to lanes in turn: chunk ``c`` belongs to lane ``c % lanes``. Micro-batch
``m`` of a pass is the next one of lane ``m % lanes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from energon_lite.batching.capacity import at_least_one
from energon_lite.batching.plan import ChunkedOrder
from energon_lite.errors import UsageError
from energon_lite.order import Order
from energon_lite.order.orders import Addresses

__all__ = ["ChunkPlan", "default_chunk_size", "default_lanes", "worlds_for"]

#: Micro-batches' worth of samples in a chunk, rounded up to whole packing buffers, where the last batch of a chunk
#: stays partly filled.
_CHUNK_BATCHES = 32
#: The same, where the remainder of a chunk moves to a later one.
_CARRIED_BATCHES = 8
#: Distance, in chunks of the same lane, from a chunk to the one that receives its remainder. The chunks between the two
#: can be processed at the same time; each of them adds an entry to the state.
_HANDED_ON = 4
#: Largest distance, in positions, from a chunk's start back to the first sample of its packing buffer.
_FAR = 1 << 20
#: Assumed samples of a micro-batch if the batch size is unknown.
_TYPICAL_BATCH = 32


@dataclass(frozen=True)
class ChunkPlan(ChunkedOrder):
    """Chunks of a pass, and the rules by which their samples become batches.

    Args:
        order: the order of the samples. If it ends, so does each pass.
        batch_size: samples in a micro-batch; None: set by the groups, or single samples.
        chunk: positions in a chunk.
        packing_buffer_size: samples in a packing buffer; None: no packing.
        keep_remainder: the remainder at the end of a chunk, or of the pass, becomes smaller batches; else it is
            dropped.
        carries: the remainder of a chunk moves to a later chunk, where batches have ``batch_size`` samples.
        pushback: samples that the packing hook pushes back at the end of a chunk move to a later chunk.

    Example:
        >>> plan = ChunkPlan(ConcatOrder([5]), batch_size=2, chunk=3)
        >>> plan.count(0), [plan.addresses(number, 0).index.tolist() for number in (0, 1)]
        (2, [[0, 1, 2], [3, 4]])
    """

    order: Order
    batch_size: int | None
    chunk: int
    packing_buffer_size: int | None = None
    keep_remainder: bool = True
    carries: bool = False
    pushback: bool = False
    #: If true, a packing buffer that is not full at the end of a chunk moves on and is filled from a later chunk.
    fills_buffers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one("give at least 1, or None", batch_size=self.batch_size)
        at_least_one(chunk_size=self.chunk)
        if self.chunk < (self.packing_buffer_size or 1):
            raise UsageError(
                f"chunk_size is {self.chunk}, but packing_buffer_size {self.packing_buffer_size}: no buffer would "
                "ever be full",
                fix="give a multiple of packing_buffer_size, or leave out chunk_size",
            )

    def addresses(self, number: int, pass_number: int, first: int = 0, stride: int = 0) -> Addresses:
        """Addresses of a chunk's samples, from its ``first`` position on.

        If ``first`` is negative, the last positions of the chunk ``stride`` before it come first, preceded by those of
        still earlier chunks.

        Example:
            >>> ChunkPlan(ConcatOrder([9]), 1, chunk=3).addresses(2, 0, first=-1, stride=2).index.tolist()
            [2, 6, 7, 8]
        """
        parts = []
        for back in range(-(-max(0, -first) // self.chunk), -1, -1):
            own = self.order_positions(pass_number, number - back * stride)
            parts.append(own[max(0, first + back * self.chunk) :])
        return self.order.lookup(np.concatenate(parts))

    def order_positions(self, pass_number: int, number: int) -> NDArray[np.int64]:
        """The positions of a chunk in the order."""
        start, stop = self.positions(pass_number, number)
        return np.arange(start, max(start, stop), dtype=np.int64)

    def stride(self, lanes: int, *, is_endless: bool) -> int:
        """Distance in chunks to the chunk that receives the remainder of another; 0: the remainder is not moved."""
        if self.pushback and not is_endless:
            return lanes  # the next chunk of the lane, so that only the last chunks of a pass keep a remainder
        return lanes * _HANDED_ON if self.carries or self.pushback else 0

    def is_behind(self, number: int, first: int, stride: int) -> bool:
        """True if the pass has the earlier positions that a negative ``first`` refers to."""
        return first >= 0 or (self.pushback and first > -_FAR and number + (first // self.chunk) * stride >= 0)


def default_chunk_size(
    batch_size: int | None, packing_buffer_size: int | None, *, endless: bool, carries: bool = False
) -> int:
    """Default positions in a chunk, in whole packing buffers.

    One buffer is enough if packs are not batched, and for a pass that ends: there, chunks are few, and each rank should
    get some. If chunks hand over their remainder (``carries``), 8 micro-batches' worth. Else 32, so that batches that
    are not full, one at the end of each chunk, are few.

    Example:
        >>> [default_chunk_size(8, buffer, endless=True, carries=True) for buffer in (None, 1000, 10)]
        [64, 1000, 70]
        >>> [default_chunk_size(8, buffer, endless=True) for buffer in (None, 1000, 100)]
        [256, 1000, 300]
        >>> default_chunk_size(8, 100, endless=False), default_chunk_size(None, 100, endless=True)
        (100, 100)
    """
    batches = _CARRIED_BATCHES if carries else _CHUNK_BATCHES
    if packing_buffer_size is None:
        return batches * (batch_size or _TYPICAL_BATCH)
    wanted = batches * batch_size if batch_size is not None and endless else 0
    return max(1, -(-wanted // packing_buffer_size)) * packing_buffer_size


def default_lanes(world_size: int) -> int:
    """Default number of lanes for a run that starts on ``world_size`` ranks.

    It is the smallest number divisible by 1, 2, 3, 4, 6, 8, 12, 24 and by ``2 * world_size``. Each rank holds a chunk
    of each of its lanes in memory, so there are no more lanes than that.

    Example:
        >>> [default_lanes(world) for world in (1, 3, 4, 5, 8, 64)]
        [24, 24, 24, 120, 48, 384]
    """
    return math.lcm(24, 2 * world_size)


def worlds_for(lanes: int) -> list[int]:
    """World sizes that divide this number of lanes, ascending.

    Example:
        >>> worlds_for(6)
        [1, 2, 3, 6]
    """
    return [world for world in range(1, lanes + 1) if lanes % world == 0]
