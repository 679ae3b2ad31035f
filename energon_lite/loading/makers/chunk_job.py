"""A chunk to be worked on, a place inside it, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from energon_lite.batching.digests import NO_SAMPLES
from energon_lite.loading.makers.outcomes import Address, Outcome
from energon_lite.order.orders import Addresses

__all__ = ["START", "Carried", "ChunkJob", "Item", "Made", "Origins", "Place", "Reading", "Tail"]

#: Addresses of samples, as far as they are known.
Origins = Sequence[Address | None]
#: What has been read of a chunk: the first four numbers of a :class:`Place`.
Reading = tuple[int, int, int, int]


class Place(NamedTuple):
    """Where in a chunk a batch begins: what has been read of it, and how many batches were made of that.

    Attributes:
        unit: positions of the chunk that are done with; with packing: position at which the current buffer begins. A
            buffer that begins with the last positions of the chunk before it in the same lane has a negative one.
        item: results of the next position that are done with (a generator yields several).
        pack: packs of the current buffer that are done with.
        part: results of the next pack that are done with.
        bundle: times that samples were put together to be batched.
        sub: batches made of the current bundle that are done with.
    """

    unit: int = 0
    item: int = 0
    pack: int = 0
    part: int = 0
    bundle: int = 0
    sub: int = 0

    @property
    def reading(self) -> Reading:
        """The part that tells what has been read."""
        return self[:4]

    def to_plain(self) -> list[int]:
        """A list of integers without the zeros at its end."""
        numbers = list(self)
        while numbers and not numbers[-1]:
            numbers.pop()
        return numbers


START = Place()


class Tail(NamedTuple):
    """The end of a chunk, whose items do not fill a batch: others of a chunk after it will.

    Attributes:
        chunk: its number.
        place: where in it the end begins.
    """

    chunk: int
    place: Place


@dataclass(frozen=True, slots=True)
class Item:
    """A sample on its way into a batch, or into a pack.

    Args:
        value: what the hooks made.
        start: its place in the chunk.
        after: that of the one that follows.
        origins: addresses of the samples that it stands for, and is counted for.
        result: number among the results of its sample; None: it is packed.
        more_of: addresses of samples that are counted with another item, and partly in this one.
    """

    value: Any
    start: Reading
    after: Reading
    origins: Origins
    result: int | None = None
    more_of: Origins = ()


@dataclass(frozen=True)
class Carried:
    """What one chunk hands over to another.

    Args:
        tail: from here on the items are made again; behind the last batch that there was. None: there are none.
        begin: here the batch begins that is to be filled: at the tail, or behind what failed after it.
        items: too few for a batch.
        outcomes: what happened to samples since the tail; told with the batch.
        samples: those that are in no pack yet, and with which the first buffer of the chunk begins that gets them.
            Their places are those in that chunk, so positions are negative.
    """

    tail: Tail | None
    begin: Tail | None
    items: list[Item]
    outcomes: list[Outcome]
    samples: list[Item] = field(default_factory=list)

    @property
    def begins_at(self) -> Place:
        """The place at which the chunk begins that gets it."""
        return Place(*self.samples[0].start) if self.samples else START


@dataclass(frozen=True)
class ChunkJob:
    """A chunk whose batches are to be made, from some place in it on.

    Args:
        pass_number: which pass over the data.
        number: which chunk of the pass.
        samples: addresses of its samples, from position ``offset`` of the chunk on. A negative one: before them are
            those of the last positions of the chunk before it in the same lane.
        offset: see above.
        first: the first batch wanted.
        empty: one batch without samples is wanted, in the likeness of the first one of this chunk.
        stride: what does not fill a batch goes to the chunk so many after this one; 0: nothing is handed over.
        is_last: there is no such chunk any more.
        carried: what this chunk was handed; or the job whose chunk hands it over, and which makes that again.
        pushback: samples that a selection for packing pushes back, because its buffer ends, are the beginning of the
            next buffer, also where that is one of a later chunk.
        fills_buffers: so are those of a buffer that is not full.
    """

    pass_number: int
    number: int
    samples: Addresses
    offset: int = 0
    first: Place = START
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
        """The items that it was handed."""
        return [*self.carried.items] if isinstance(self.carried, Carried) else []

    @property
    def carried_samples(self) -> list[Item]:
        """The samples that it was handed, and need not be made again."""
        return [*self.carried.samples] if isinstance(self.carried, Carried) and self.offset >= 0 else []

    @property
    def hands_over(self) -> bool:
        """Whether there is a chunk that gets what is left of this one."""
        return bool(self.stride) and not self.is_last

    @property
    def end(self) -> Reading:
        """Behind its last sample."""
        return self.offset + len(self.samples.index), 0, 0, 0


@dataclass(frozen=True)
class Made:
    """A batch of a chunk, or what was left over at its end.

    Args:
        batch: see ``is_batch``.
        outcomes: what happened to samples since the batch before, and to those in it.
        after: where the next batch begins; None: the chunk has no more of them.
        is_batch: False: there is no batch, only outcomes, or what is handed over.
        rows: samples or packs in it; of what is handed over, those that are this chunk's.
        trace: how it was made, if that was asked for.
        tail: the next batch, too, is one of what the chunk was handed, and begins here.
        carried: what is handed over.
        digest: of the samples that are in the batch; see :mod:`energon_lite.batching.digests`.
    """

    batch: Any
    outcomes: list[Outcome] = field(default_factory=list)
    after: Place | None = None
    is_batch: bool = True
    rows: int = 1
    trace: dict[str, Any] | None = None
    tail: Tail | None = None
    carried: Carried | None = None
    digest: int = NO_SAMPLES
