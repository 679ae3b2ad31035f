"""Which samples make up which chunk, where content decides what becomes of them. Integers only: no torch, no I/O.

A pass is cut into chunks of equal length. What a chunk's samples become depends on nothing outside of it, so any chunk
can be worked on by itself, anywhere; only the few that do not fill a batch, or a pack, at its end go on to a later
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

#: A chunk has so many micro-batches' worth of samples, rounded up to whole buffers of packing: many where the last one
#: is not full, few where it is filled from another chunk.
_CHUNK_BATCHES, _CARRIED_BATCHES = 32, 8
#: What is left of a chunk's items goes to the chunk so many after it in the same lane. So chunks between the two can be
#: worked on at the same time; each of them adds a place to the state.
_HANDED_ON = 4
#: So far before its first position no chunk begins: these are the samples of a buffer.
_FAR = 1 << 20
#: Samples of a micro-batch where nobody knows.
_TYPICAL_BATCH = 32


@dataclass(frozen=True)
class ChunkPlan(ChunkedOrder):
    """Chunks of a pass, and how their samples become batches.

    Args:
        order: the order of the samples. If it ends, so does each pass.
        batch_size: samples in a micro-batch; None: as the groups say, or single samples.
        chunk: positions in a chunk.
        packing_buffer_size: samples in a buffer of packing; None: no packing.
        keep_remainder: what is left at a chunk's end, or at that of the pass, becomes smaller batches; else it is
            dropped.
        carries: what is left at a chunk's end goes on to another chunk, where batches are of so many samples.
        pushback: samples that a selection for packing pushes back at a chunk's end go on to another chunk.

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
    #: A buffer of packing that is not full at a chunk's end goes on as it is, and is filled from the next one.
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
        """Addresses of a chunk's samples, from its ``first`` position on. If that is negative, those of the last
        positions of the chunk ``stride`` before it come first, and those of chunks before that.

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
        """How many chunks further on is used what is left at a chunk's end; 0: nowhere."""
        if self.pushback and not is_endless:
            return lanes  # so only the last chunks of a pass keep what they have left
        return lanes * _HANDED_ON if self.carries or self.pushback else 0

    def is_behind(self, number: int, first: int, stride: int) -> bool:
        """Whether there are positions as far back as a negative ``first`` of a chunk says."""
        return first >= 0 or (self.pushback and first > -_FAR and number + (first // self.chunk) * stride >= 0)


def default_chunk_size(
    batch_size: int | None, packing_buffer_size: int | None, *, endless: bool, carries: bool = False
) -> int:
    """Positions in a chunk if the user does not say, in whole buffers of packing.

    One buffer is enough if packs are not batched, and for a pass that ends: there, chunks are few, and each rank should
    get some. Where chunks hand over what does not fill a batch (``carries``), 8 micro-batches' worth. Else 32, so that
    batches that are not full, one at the end of each chunk, are few.

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
    """Lanes of a run that begins on so many ranks, if the user does not say: the smallest number that twice as many
    ranks divide, and 1, 2, 3, 4, 6, 8, 12 and 24.

    Each rank has a chunk of each of its lanes in memory, so there are no more than that.

    Example:
        >>> [default_lanes(world) for world in (1, 3, 4, 5, 8, 64)]
        [24, 24, 24, 120, 48, 384]
    """
    return math.lcm(24, 2 * world_size)


def worlds_for(lanes: int) -> list[int]:
    """The world sizes among which so many lanes can be divided evenly, ascending.

    Example:
        >>> worlds_for(6)
        [1, 2, 3, 6]
    """
    return [world for world in range(1, lanes + 1) if lanes % world == 0]
