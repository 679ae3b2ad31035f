"""Where a run is whose content decides how many batches there are: a place in each lane.

Chunk ``c`` of a pass belongs to lane ``c % lanes``, and micro-batch ``m`` is the next one of lane ``m % lanes``. So a
rank that takes each ``world_size``-th micro-batch has lanes of its own, as long as ``world_size`` divides ``lanes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from energon_lite.batching.chunks import worlds_for
from energon_lite.errors import TopologyError
from energon_lite.loading.iterators.state import Numbers, damaged, is_count
from energon_lite.loading.makers.chunk_job import START, Place, Tail

__all__ = [
    "MAX_LANES",
    "LaneCursor",
    "LanePlace",
    "check_topology",
    "ends_of",
    "lanes_of",
    "read_lanes",
]


#: Lanes of a run at most. Each is some hundred bytes of a state, and every rank has at least one.
MAX_LANES = 1 << 20
#: Above these a state is damaged: chunks of a run, what a chunk has of anything.
MAX_CHUNK, MAX_BATCH = 1 << 45, 1 << 40


class LanePlace(NamedTuple):
    """Where a lane is.

    Attributes:
        chunk: the chunk of its next batch.
        place: where in it that batch begins.
        tails: what chunks before it handed over, and no batch has used yet.
    """

    chunk: int
    place: Place = START
    tails: tuple[Tail, ...] = ()


@dataclass(frozen=True)
class LaneCursor(Numbers):
    """A place in the run. It moves as a whole, so that whatever interrupts a loader finds one place or the next.

    Args:
        lanes: number of lanes of the run.
        pass_number, position, loop_start, ranks: see :class:`~energon_lite.loading.iterators.state.Numbers`; a position
            also counts micro-batches that lanes did not have any more.
        at: for each lane of this rank, where it is.
    """

    lanes: int
    at: Mapping[int, LanePlace] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The lanes as entries of a state. Zeros at the end of a place's numbers are left out."""
        return {"lanes": self.lanes, "cursors": [_row(lane, at, self.lanes) for lane, at in sorted(self.at.items())]}

    @classmethod
    def at_start(cls, lanes: int, rank: int, world_size: int, pass_number: int = 0) -> LaneCursor:
        """The beginning of a pass."""
        own = lanes_of(lanes, 0, rank, world_size)
        return cls(lanes, pass_number=pass_number, at={lane: LanePlace(lane) for lane in own})


def lanes_of(lanes: int, position: int, rank: int, world_size: int) -> list[int]:
    """The lanes of a rank that takes micro-batches ``position + rank``, ``position + rank + world_size``, ..., in turn.

    Example:
        >>> lanes_of(6, 0, 1, 2)
        [1, 3, 5]
    """
    return [(position + rank + step * world_size) % lanes for step in range(lanes // world_size)]


def ends_of(numbers: Sequence[int]) -> str:
    """Numbers in words; of many, the first ones and the last one."""
    shown = numbers if len(numbers) <= 16 else [*numbers[:15], "...", numbers[-1]]
    return ", ".join(map(str, shown))


def check_topology(lanes: int, world_size: int) -> None:
    """Refuse a world size that does not divide the lanes.

    Raises:
        TopologyError: names those that do.
    """
    if lanes % world_size:
        raise TopologyError(
            f"{lanes} lanes cannot be divided among {world_size} data-parallel ranks",
            fix=f"use {ends_of(worlds_for(lanes))} ranks; a run that is begun with more lanes (`lanes=`) goes on on "
            "more numbers of ranks",
        )


def _row(lane: int, at: LanePlace, lanes: int) -> list[Any]:
    """A lane as plain data: its number, its chunk, the place in it; for each tail, how many chunks of the lane before,
    and the place."""
    tails = [[(at.chunk - chunk) // lanes, *place.to_plain()] for chunk, place in at.tails]
    return [lane, at.chunk, at.place.to_plain(), *tails]


def read_lanes(state: Mapping[str, Any]) -> tuple[int, dict[int, LanePlace]]:
    """The number of lanes of the run, and those that a state has.

    Raises:
        StateError: they are damaged.
    """
    lanes, rows = state.get("lanes"), state.get("cursors")
    if not is_count(lanes, MAX_LANES + 1) or not lanes:
        raise damaged("lanes", lanes)
    if not isinstance(rows, (list, tuple)):
        raise damaged("cursors", rows)
    found: dict[int, LanePlace] = {}
    for row in rows:
        lane, place = _read_row(row, lanes)
        if lane in found:
            raise damaged("a lane", row)
        found[lane] = place
    return lanes, found


def _read_row(row: Any, lanes: int) -> tuple[int, LanePlace]:
    """What :func:`_row` wrote."""
    if not isinstance(row, (list, tuple)) or len(row) < 3:
        raise damaged("a lane", row)
    lane, chunk, place, *tails = row
    if not (is_count(lane, lanes) and is_count(chunk, MAX_CHUNK) and chunk % lanes == lane):
        raise damaged("a lane", row)
    if not _are_counts(place, len(START)) or not all(_are_counts(tail, 1 + len(START)) and tail for tail in tails):
        raise damaged("a lane", row)
    ends = tuple(Tail(chunk - before * lanes, Place(*numbers)) for before, *numbers in tails)
    if not all(0 <= end.chunk < chunk for end in ends):
        raise damaged("a lane", row)
    return lane, LanePlace(chunk, Place(*place), ends)


def _are_counts(value: Any, most: int) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) <= most
    return is_list and all(is_count(number, MAX_BATCH) for number in value)
