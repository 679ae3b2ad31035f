"""Job of a chunk, places inside the chunk, and the results of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from energon_lite.loading.makers.outcomes import Address, Outcome, Result
from energon_lite.order.orders import Addresses

#: Addresses of samples, as far as they are known.
Origins = Sequence[Address | None]
#: Progress of reading a chunk: the first four numbers of a :class:`ChunkPlace`.
Reading = tuple[int, int, int, int]


class ChunkPlace(NamedTuple):
    """Place in a chunk at which a batch begins: the progress of reading, and the batches made of what was read.

    Attributes:
        unit: finished positions of the chunk; with packing: the position at which the current buffer begins. A buffer
            that begins with the last positions of the chunk before it in the same lane has a negative one.
        item: finished results of the next position (a generator yields several).
        pack: finished packs of the current buffer.
        part: finished results of the next pack.
        bundle: finished bundles.
        sub: finished batches of the current bundle.
    """

    unit: int = 0
    item: int = 0
    pack: int = 0
    part: int = 0
    bundle: int = 0
    sub: int = 0

    @property
    def reading(self) -> Reading:
        """Progress of reading: the first four numbers."""
        return self[:4]

    def to_plain(self) -> list[int]:
        """Return the numbers as a list of integers without trailing zeros."""
        numbers = list(self)
        while numbers and not numbers[-1]:
            numbers.pop()
        return numbers


START = ChunkPlace()


class Tail(NamedTuple):
    """End of a chunk whose items do not fill a batch; the batch is filled in a later chunk.

    Attributes:
        chunk: number of the chunk.
        place: place in the chunk at which its end begins.
    """

    chunk: int
    place: ChunkPlace


@dataclass(frozen=True, slots=True)
class Item:
    """A sample on its way into a batch, or into a pack.

    Args:
        value: the result of the hooks.
        start: its place in the chunk.
        after: place of the next item.
        origins: addresses of the samples that the item consists of, and that are counted with it.
        result: number among the results of its sample; None: it is a pack.
        more_of: addresses of samples that are partly in this item, but are counted with another one.
    """

    value: Any
    start: Reading
    after: Reading
    origins: Origins
    result: int | None = None
    more_of: Origins = ()


@dataclass(frozen=True)
class Carried:
    """Items and samples that one chunk hands over to another.

    Args:
        tail: the place, after the last batch, from which the items can be made again; None: there are no items.
        begin: the place at which the unfilled batch begins: at the tail, or after failed samples that follow it.
        items: the items; too few for a batch.
        outcomes: outcomes of samples since the tail; they are reported with the batch.
        samples: samples that are in no pack yet; the first buffer of the receiving chunk begins with them. Their places
            are relative to that chunk, so positions are negative.
    """

    tail: Tail | None
    begin: Tail | None
    items: list[Item]
    outcomes: list[Outcome]
    samples: list[Item] = field(default_factory=list)

    @property
    def begins_at(self) -> ChunkPlace:
        """The place at which the receiving chunk begins."""
        return ChunkPlace(*self.samples[0].start) if self.samples else START


@dataclass(frozen=True)
class ChunkJob:
    """A chunk whose batches are to be made, from a place in it on.

    Args:
        pass_number: number of the pass over the data.
        number: number of the chunk in the pass.
        samples: addresses of its samples, from position ``offset`` of the chunk on. If that is negative, they begin
            with the last positions of the chunk before it in the same lane.
        offset: first position in ``samples``.
        first: place of the first batch that is wanted.
        empty: make one batch without samples, with the structure of the first batch of this chunk.
        stride: distance, in chunks, to the chunk that gets the remainder; 0: nothing is handed over.
        is_last: there is no such chunk.
        carried: the remainder that this chunk was handed; or the job of the chunk that hands it over, to be run again.
        pushback: samples that a selection for packing pushes back because its buffer ends begin the next buffer, also
            if that is in a later chunk.
        fills_buffers: the samples of a buffer that is not full do the same.
    """

    pass_number: int
    number: int
    samples: Addresses
    offset: int = 0
    first: ChunkPlace = START
    empty: bool = False
    stride: int = 0
    is_last: bool = False
    carried: Carried | ChunkJob | None = None
    pushback: bool = False
    fills_buffers: bool = False

    @property
    def addresses(self) -> Sequence[Address]:
        """``(leaf, index, epoch)`` of the samples."""
        return self.samples.rows()

    @property
    def carried_items(self) -> list[Item]:
        """Items that were handed over to this chunk."""
        return [*self.carried.items] if isinstance(self.carried, Carried) else []

    @property
    def carried_samples(self) -> list[Item]:
        """Samples that were handed over to this chunk and need not be made again."""
        return [*self.carried.samples] if isinstance(self.carried, Carried) and self.offset >= 0 else []

    @property
    def hands_over(self) -> bool:
        """True if there is a chunk that gets the remainder of this one."""
        return bool(self.stride) and not self.is_last

    @property
    def end(self) -> Reading:
        """Place after its last sample."""
        return self.offset + len(self.samples.index), 0, 0, 0


@dataclass
class Made(Result):
    """A batch of a chunk, or the remainder at its end. Its outcomes include those of samples since the previous batch.

    Args:
        after: place of the next batch; None: the chunk has no more batches.
        is_batch: False: there is no batch, only outcomes and a remainder.
        rows: samples or packs in the batch; in a remainder, those of this chunk.
        tail: place of the next batch, if that one, too, is made of items that were handed over.
        carried: the remainder that is handed over.
    """

    after: ChunkPlace | None = None
    is_batch: bool = True
    rows: int = 1
    tail: Tail | None = None
    carried: Carried | None = None
