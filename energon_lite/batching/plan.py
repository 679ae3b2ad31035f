"""Plans: the function from a step to micro-batches of sample addresses. Integers only: no torch, no I/O.

A run is a sequence of *passes* (one ``for`` loop over the loader each), a pass is a sequence of micro-batches, and a
micro-batch is a list of sample addresses. The plan is the same on every rank; in each step every rank takes one of the
next ``world_size`` micro-batches, so all ranks together traverse one global sequence.

A plan is made chunk by chunk. With a fixed number of samples, a chunk is one micro-batch, and its contents follow from
its number; by tokens (:mod:`energon_lite.batching.token_plan`), a chunk has a variable number of micro-batches.

If batches are content-decided, a plan has only the chunks (:class:`ChunkPlan`). The batches of a chunk depend on
nothing outside of it, so each chunk can be processed alone, on any worker. Only the remainder, too small for a batch or
a pack at the chunk's end, moves to a later chunk of the same lane. Chunks are assigned to lanes in turn: chunk ``c``
belongs to lane ``c % lanes``. Micro-batch ``m`` of a pass is the next one of lane ``m % lanes``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from energon_lite.batching.digests import AddressList, address_hashes, sums_of_groups
from energon_lite.errors import UsageError, at_least_one, counted
from energon_lite.order.orders import Addresses, Order
from energon_lite.order.permutation import MAX_LENGTH

#: Bound of positions, half of those that are numbered: sums of two stay in 64 bits.
_BEYOND = MAX_LENGTH // 2
#: Position of a micro-batch in its pass: the number of its chunk and, if chunks have several, its number in the chunk.
Place = tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """Numbers of samples that planning dropped, truncated or split. Every omission is counted here.

    Args:
        dropped_samples: samples that are in no micro-batch.
        dropped_tokens: tokens of these.
        truncated_samples: samples that lost their end.
        truncated_tokens: tokens that they lost.
        split_samples: samples that were cut into several pieces.
        own_batches: micro-batches above the capacity, of one sample each.
    """

    dropped_samples: int = 0
    dropped_tokens: int = 0
    truncated_samples: int = 0
    truncated_tokens: int = 0
    split_samples: int = 0
    own_batches: int = 0

    def words(self) -> list[str]:
        """List the counts above 0, in words.

        Example:
            >>> Counts(dropped_samples=1, dropped_tokens=1200, split_samples=3).words()
            ['1 sample dropped, with 1,200 tokens', '3 samples split']
        """
        pairs = (
            (self.dropped_samples, f"dropped, with {counted(self.dropped_tokens, 'token')}"),
            (self.truncated_samples, f"truncated, by {counted(self.truncated_tokens, 'token')}"),
            (self.split_samples, "split"),
            (self.own_batches, "in batches of their own, above the capacity"),
        )
        return [f"{counted(samples, 'sample')} {what}" for samples, what in pairs if samples]

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))


#: Largest number of batches whose addresses are looked up at once.
_TOGETHER = 64
#: Largest number of samples in them.
_SAMPLES_TOGETHER = 1 << 14


class ChunkedOrder:
    """Base class of frozen dataclasses that cut an order into chunks of equal length.

    Attributes:
        order: the order of the samples. If it is finite, so is each pass.
        chunk: positions in a chunk; the last one of a pass may have fewer.
    """

    order: Order
    chunk: int

    @cached_property
    def count(self) -> Callable[[int], int | None]:
        """Function ``count(pass_number)``: chunks in a pass, over all ranks together; None: it is endless."""
        return lru_cache(self._count)  # called at every step

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "count"}  # it cannot be pickled

    def _count(self, pass_number: int) -> int | None:
        bounds = self.order.bounds(pass_number)
        return None if bounds is None else -(-(bounds[1] - bounds[0]) // self.chunk)

    def positions(self, pass_number: int, number: int) -> tuple[int, int]:
        """First position of a chunk in the order, and the end of the chunk, exclusive."""
        bounds = self.order.bounds(pass_number) or (0, MAX_LENGTH)
        first = bounds[0] + number * self.chunk
        return first, min(first + self.chunk, bounds[1])

    def reaches(self, pass_number: int, number: int) -> bool:
        """True if a chunk's first position is within the range of positions."""
        bounds = self.order.bounds(pass_number) or (0, 0)
        return max(bounds[1], number * self.chunk) < _BEYOND


class Plan(ChunkedOrder, ABC):
    """The micro-batches of a run, chunk by chunk."""

    #: The place of the first micro-batch of each pass.
    start: ClassVar[Place] = (0,)

    @property
    def rows(self) -> int | None:
        """Samples in a full micro-batch; None: micro-batches vary, and their number is known only after planning."""
        return None

    @property
    def together(self) -> int:
        """Recommended number of micro-batches for one look-up."""
        return 1

    def end(self, pass_number: int) -> Place:
        """The place after the last micro-batch of a finite pass."""
        return (self.count(pass_number) or 0, *self.start[1:])

    @abstractmethod
    def has(self, pass_number: int, place: Place) -> bool:
        """True if a pass has this place; its end counts."""

    @abstractmethod
    def ahead(self, pass_number: int, place: Place, batches: int) -> tuple[Place, int]:
        """Move a place by a number of micro-batches, backwards if it is negative.

        Returns:
            The new place, and the actual number of micro-batches, which is smaller at an end of the pass.
        """

    @abstractmethod
    def batches(self, places: Sequence[Place], pass_number: int = 0) -> list[Sequence[tuple[int, ...]]]:
        """Look up the addresses of micro-batches.

        Returns:
            For each place, the addresses ``(leaf, index, epoch)`` of its micro-batch, followed by ``(first token,
            tokens, 1 for a part or 0 for a whole sample)`` if tokens are planned; an empty list at the end of the pass.
        """

    def batches_in(self, pass_number: int, chunks: int) -> int:
        """Number of micro-batches in the first ``chunks`` chunks of a pass."""
        return chunks

    def rank_slot(self, place: Place, rank: int, world_size: int) -> int:
        """Index, among the next ``world_size`` micro-batches from a place on, of the one that a rank takes."""
        return rank

    def undelivered(self, pass_number: int, place: Place) -> int:
        """Number of samples in the micro-batches of a place's chunk, from the place on, if it is not the first."""
        return 0

    @abstractmethod
    def describe(self) -> str:
        """Description of the batches in a few words."""


@dataclass(frozen=True)
class FixedPlan(Plan):
    """Plan of micro-batches with a fixed number of samples.

    Args:
        order: the order of the samples. If it is finite, so is each pass.
        batch_size: samples in a micro-batch; None: single samples, not batched.
        drop_last: leave out a last partial micro-batch.

    Example:
        >>> plan = FixedPlan(ConcatOrder([5]), batch_size=2)
        >>> plan.count(0), plan.batches([(0,), (2,)])
        (3, [[(0, 0, 0), (0, 1, 0)], [(0, 4, 0)]])
    """

    order: Order
    batch_size: int | None
    drop_last: bool = False

    def __post_init__(self) -> None:
        at_least_one("give at least 1, or None for single samples", batch_size=self.batch_size)

    @property
    def chunk(self) -> int:  # type: ignore[override]
        """Positions in a chunk, which is one micro-batch."""
        return self.batch_size or 1

    @property
    def rows(self) -> int:
        return self.chunk

    @property
    def together(self) -> int:
        return max(1, min(_TOGETHER, _SAMPLES_TOGETHER // self.chunk))

    def _count(self, pass_number: int) -> int | None:
        bounds = self.order.bounds(pass_number)
        if bounds is None or not self.drop_last:
            return super()._count(pass_number)
        return (bounds[1] - bounds[0]) // self.chunk

    def has(self, pass_number: int, place: Place) -> bool:
        count = self.count(pass_number)
        inside = len(place) == 1 and (count is None or place[0] <= count)
        return inside and self.reaches(pass_number, place[0])

    def ahead(self, pass_number: int, place: Place, batches: int) -> tuple[Place, int]:
        count = self.count(pass_number)
        if count is not None:
            batches = min(batches, count - place[0])
        return (place[0] + batches,), batches

    def batches(self, places: Sequence[Place], pass_number: int = 0) -> list[Sequence[tuple[int, ...]]]:
        """See :class:`Plan`; one look-up serves all places."""
        if not len(places):
            return []
        bounds, count = self.order.bounds(pass_number), self.count(pass_number)
        first = 0 if bounds is None else bounds[0]
        starts = np.array(places, dtype=np.int64)[:, 0] * self.chunk + first
        sizes = np.full(len(starts), self.chunk)
        if bounds is not None and count is not None:
            sizes = np.clip(min(bounds[1], first + count * self.chunk) - starts, 0, self.chunk)
        edges = np.r_[0, np.cumsum(sizes)]
        inside = np.arange(edges[-1]) - np.repeat(edges[:-1], sizes)
        addresses = self.order.lookup(np.repeat(starts, sizes) + inside)
        rows = addresses.rows()
        digests = sums_of_groups(address_hashes(*addresses.columns()), edges)
        ends = pairwise(edges.tolist())
        return [AddressList(rows[begin:end], digest) for (begin, end), digest in zip(ends, digests, strict=True)]

    def describe(self) -> str:
        return f"batches of {self.chunk}"


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
