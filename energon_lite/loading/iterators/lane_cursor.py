"""Cursor of a rank in a run with content-decided batches: a place in each lane.

Chunk ``c`` of a pass belongs to lane ``c % lanes``, and micro-batch ``m`` is the next one of lane ``m % lanes``. So a
rank that takes every ``world_size``-th micro-batch has lanes of its own, if ``world_size`` divides ``lanes``.

The cursor is apart from its data set, so that a command that reads states imports no runners, which takes 0.2 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from energon_lite.batching.plan import worlds_for
from energon_lite.errors import TopologyError
from energon_lite.loading.iterators.state import MAX_LANES, CursorFields, damaged, is_count
from energon_lite.loading.makers.chunk_job import START, ChunkPlace, Tail

#: Exclusive upper bound of chunk numbers in a state; above it the state is damaged.
MAX_CHUNK = 1 << 45
#: Exclusive upper bound of all counts within a chunk in a state; above it the state is damaged.
MAX_BATCH = 1 << 40


class LanePlace(NamedTuple):
    """The position of a lane.

    Attributes:
        chunk: the chunk of its next batch.
        place: the position in the chunk at which that batch begins.
        tails: samples that earlier chunks handed over and that no batch has used yet.
        begins: places of later chunks that begin before their own first position, with samples handed over by an
            earlier chunk.
    """

    chunk: int
    place: ChunkPlace = START
    tails: tuple[Tail, ...] = ()
    begins: tuple[Tail, ...] = ()

    def next(self, lanes: int, tails: tuple[Tail, ...], begins: tuple[Tail, ...]) -> LanePlace:
        """Return the beginning of the lane's next chunk."""
        chunk = self.chunk + lanes
        later = tuple(begin for begin in begins if begin.chunk > chunk)
        return LanePlace(chunk, begin_of_chunk(chunk, begins), tails, later)


def begin_of_chunk(chunk: int, begins: Sequence[Tail]) -> ChunkPlace:
    """Return the place at which a chunk begins, given the chunks that do not begin at their first position."""
    return next((begin.place for begin in begins if begin.chunk == chunk), START)


@dataclass(frozen=True)
class LaneCursor(CursorFields):
    """A position in the run. It is replaced as a whole, so an interrupted loader has the old position or the next one.

    Args:
        lanes: number of lanes of the run.
        pass_number, position, loop_start, ranks: see :class:`~energon_lite.loading.iterators.state.CursorFields`; also,
            ``position`` counts the micro-batches that exhausted lanes did not have.
        at: the position of each lane of this rank.
    """

    lanes: int
    at: Mapping[int, LanePlace] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return the lanes as entries of a state. Trailing zeros of a place are left out."""
        return {"lanes": self.lanes, "cursors": [_row(lane, at, self.lanes) for lane, at in sorted(self.at.items())]}

    @classmethod
    def at_start(cls, lanes: int, rank: int, world_size: int, pass_number: int = 0) -> LaneCursor:
        """Return the cursor at the beginning of a pass."""
        own = lanes_of(lanes, 0, rank, world_size)
        return cls(lanes, pass_number=pass_number, at={lane: LanePlace(lane) for lane in own})


def lanes_of(lanes: int, position: int, rank: int, world_size: int) -> list[int]:
    """Return the lanes of a rank that takes micro-batches ``position + rank``, ``position + rank + world_size``, ...

    Example:
        >>> lanes_of(6, 0, 1, 2)
        [1, 3, 5]
    """
    return [(position + rank + step * world_size) % lanes for step in range(lanes // world_size)]


def shortened(numbers: Sequence[int]) -> str:
    """Format numbers as text: all of them, or, of more than 16, the first 15 and the last one."""
    shown = numbers if len(numbers) <= 16 else [*numbers[:15], "...", numbers[-1]]
    return ", ".join(map(str, shown))


def check_topology(lanes: int, world_size: int) -> None:
    """Refuse a world size that does not divide the number of lanes.

    Raises:
        TopologyError: names the world sizes that do.
    """
    if lanes % world_size:
        raise TopologyError(
            f"{lanes} lanes cannot be divided among {world_size} data-parallel ranks",
            fix=f"use {shortened(worlds_for(lanes))} ranks; a run that was begun with more lanes (`lanes=`) can be "
            "resumed on more numbers of ranks",
        )


def _row(lane: int, at: LanePlace, lanes: int) -> list[Any]:
    """Return a lane as plain data: its number, its chunk and the place in it; then, for each tail, its distance in
    chunks of the lane and its place. Chunks with another beginning come later in the lane: their distance is negative.
    """
    ends = [[(at.chunk - chunk) // lanes, *place.to_plain()] for chunk, place in (*at.tails, *at.begins)]
    return [lane, at.chunk, at.place.to_plain(), *ends]


def read_lanes(state: Mapping[str, Any]) -> tuple[int, dict[int, LanePlace]]:
    """Read the number of lanes of the run, and the positions of the lanes in a state.

    Raises:
        StateError: the entries are damaged.
    """
    lanes = state.get("lanes")
    rows = state.get("cursors")
    if not is_count(lanes, MAX_LANES + 1) or not lanes:
        raise damaged("lanes", lanes)
    if not isinstance(rows, (list, tuple)):
        raise damaged("cursors", rows)
    places: dict[int, LanePlace] = {}
    for row in rows:
        lane, place = _read_row(row, lanes)
        if lane in places:
            raise damaged("a lane", row)
        places[lane] = place
    return lanes, places


def _read_row(row: Any, lanes: int) -> tuple[int, LanePlace]:
    """Read a lane that :func:`_row` wrote."""
    if not isinstance(row, (list, tuple)) or len(row) < 3:
        raise damaged("a lane", row)
    lane, chunk, place, *tails = row
    is_chunk = is_count(lane, lanes) and is_count(chunk, MAX_CHUNK) and chunk % lanes == lane
    if not (is_chunk and _is_place(place) and all(map(_is_tail, tails))):
        raise damaged("a lane", row)
    ends = [Tail(chunk - before * lanes, ChunkPlace(*numbers)) for before, *numbers in tails]
    tails_and_begins = tuple(end for end in ends if end.chunk < chunk), tuple(end for end in ends if end.chunk > chunk)
    if any(end.chunk < 0 for end in ends) or any(begin.place.unit >= 0 for begin in tails_and_begins[1]):
        raise damaged("a lane", row)
    return lane, LanePlace(chunk, ChunkPlace(*place), *tails_and_begins)


def _is_place(value: Any) -> bool:
    """Return whether a value is a list of a place's numbers. Only the first one may be negative."""
    if not isinstance(value, (list, tuple)) or len(value) > len(START):
        return False
    return all(map(_is_whole, value[:1])) and all(is_count(number, MAX_BATCH) for number in value[1:])


def _is_tail(value: Any) -> bool:
    """Return whether a value is a list of a distance, which is not 0, and a place's numbers."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return _is_whole(value[0]) and value[0] != 0 and _is_place(value[1:])


def _is_whole(value: Any) -> bool:
    return is_count(value, MAX_BATCH) or (isinstance(value, int) and is_count(-value, MAX_BATCH))
