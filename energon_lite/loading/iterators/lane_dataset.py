"""Data set with content-decided batches, which is worked on in chunks, and the cursor of a rank: a place in each lane.

Chunk ``c`` of a pass belongs to lane ``c % lanes``, and micro-batch ``m`` is the next one of lane ``m % lanes``. So a
rank that takes every ``world_size``-th micro-batch has lanes of its own, if ``world_size`` divides ``lanes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from typing_extensions import Self

from energon_lite.batching.plan import ChunkPlan, default_lanes, worlds_for
from energon_lite.batching.strategy import describe
from energon_lite.errors import (
    SampleError,
    StateError,
    StateMismatchError,
    TopologyError,
    UnknownLengthError,
    counted,
    listed,
)
from energon_lite.hooks import Hooks, hooks_of
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.state import (
    BATCH_SIZE,
    MAX_LANES,
    CursorFields,
    State,
    checked,
    damaged,
    is_count,
    saved_batch_size,
    saved_settings,
)
from energon_lite.loading.makers.chunk_bundles import BundlesByTokens, TokenBundling
from energon_lite.loading.makers.chunk_job import START, Carried, ChunkJob, ChunkPlace, Tail
from energon_lite.loading.makers.chunk_runner import ChunkRunner

__all__ = [
    "PUSHBACK",
    "LaneCursor",
    "LaneDataset",
    "LanePlace",
    "begin_of_chunk",
    "check_topology",
    "ends_of",
    "lanes_of",
    "read_lanes",
]

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


def ends_of(numbers: Sequence[int]) -> str:
    """Return numbers as text; of more than 16, the first 15 and the last one."""
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
            fix=f"use {ends_of(worlds_for(lanes))} ranks; a run that is begun with more lanes (`lanes=`) goes on on "
            "more numbers of ranks",
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
    if not (is_count(lane, lanes) and is_count(chunk, MAX_CHUNK) and chunk % lanes == lane):
        raise damaged("a lane", row)
    if not _is_place(place) or not all(isinstance(tail, (list, tuple)) and _is_place(tail[1:]) for tail in tails):
        raise damaged("a lane", row)
    if not all(tail and _is_whole(tail[0]) and tail[0] for tail in tails):
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


def _is_whole(value: Any) -> bool:
    return is_count(value, MAX_BATCH) or (isinstance(value, int) and is_count(-value, MAX_BATCH))


#: Setting of a run in which samples that are pushed back at a chunk's end are handed over to a later chunk.
PUSHBACK = "pushback"


@dataclass(frozen=True, eq=False, kw_only=True)
class LaneDataset(SavableDataset):
    """Data set of ``get_train_dataset`` and ``get_val_dataset`` if hooks decide how many samples there are.

    Args:
        plan: assignment of samples to chunks.
        lanes: number of lanes that the chunks are dealt to; None: the number given by
            :func:`~energon_lite.batching.plan.default_lanes` for the world size at the beginning of the run.
        bundling: settings for making batches by the lengths of encoded samples; None: batches are not made by length.
    """

    plan: ChunkPlan
    lanes: int | None = None
    bundling: TokenBundling | None = None

    def runner(self) -> ChunkRunner:
        """Return the runner that runs this data set's jobs."""
        return ChunkRunner(
            self.leaves,
            self.task_encoder,
            seed=self.seed,
            batch_size=self.plan.batch_size,
            packing_buffer_size=self.plan.packing_buffer_size,
            keep_remainder=self.plan.keep_remainder,
            error_handler=self.worker_config.global_error_handler,
            bundler=None if self.bundling is None else BundlesByTokens(self.bundling, self.task_encoder),
        )

    @cached_property
    def hooks(self) -> Hooks:
        """The hooks that are in use."""
        packing = self.plan.packing_buffer_size is not None
        batched = self.plan.batch_size is not None
        return hooks_of(self.task_encoder, packing=packing, batched=batched, by_tokens=self.bundling is not None)

    def stride(self, lanes: int) -> int:
        """Return the distance in chunks to the chunk that gets a chunk's remainder; 0: nothing is handed over."""
        return self.plan.stride(lanes, is_endless=self.is_endless)

    def job(
        self,
        pass_number: int,
        number: int,
        first: ChunkPlace = START,
        *,
        empty: bool = False,
        stride: int = 0,
        carried: Carried | ChunkJob | None = None,
    ) -> ChunkJob:
        """Return the job that makes the batches of a chunk from ``first`` on, or an empty batch like its first one.

        Args:
            stride, carried: see :class:`~energon_lite.loading.makers.chunk_job.ChunkJob`.
        """
        offset = 0 if self.hooks.whole_chunks else first.unit
        count = self.plan.count(pass_number)
        samples = self.plan.addresses(number, pass_number, offset, stride)
        is_last = count is not None and number + stride >= count
        rules = self.plan.pushback, self.plan.fills_buffers
        return ChunkJob(pass_number, number, samples, offset, first, empty, stride, is_last, carried, *rules)

    def cursor(self, state: State, *, whole: bool = False) -> LaneCursor:
        """Return the cursor of this rank from a state that contains (at least) its lanes.

        Args:
            whole: return the cursor of a single rank with all lanes instead.

        Raises:
            StateError: not a state, or a damaged one.
            StateMismatchError: a state of another run, or without the lanes of this rank.
            TopologyError: the lanes cannot be divided among the ranks; the message names the possible world sizes.
        """
        config = self.worker_config
        rank, world, reads = (0, 1, True) if whole else (config.rank, config.world_size, config.reads)
        numbers = checked(state, "lanes")
        self._check_batch_size(state)
        self.identity.check(state.get("identity"))
        lanes, lane_places = read_lanes(state)
        if not whole and self.lanes not in (None, lanes):
            raise StateMismatchError(
                f"lanes: {lanes} in the state, {self.lanes} here",
                fix=f"leave out lanes=, or give {lanes}; it cannot change",
            )
        check_topology(lanes, world)
        own = lanes_of(lanes, numbers.position, rank, world)
        missing = [lane for lane in own if lane not in lane_places]
        if missing and reads:
            raise StateMismatchError(
                f"the state has {len(lane_places)} of {counted(lanes, 'lane')}, and not those of rank {rank} of "
                f"{world}: {listed(missing)}",
                fix="on other ranks than those that saved, give the states of all of them: "
                "restore_state_global([...]), or `energon-lite checkpoint merge`",
            )
        cursor = LaneCursor(lanes, {lane: lane_places[lane] for lane in own if lane in lane_places}, **vars(numbers))
        self._check_places(cursor)
        chunks = [at.chunk for at in cursor.at.values()]
        if not self.plan.reaches(cursor.pass_number, max(chunks, default=0)):
            raise damaged("cursors", f"in chunk {max(chunks)} of pass {cursor.pass_number}")
        if reads:
            self.check_rebase(min(chunks, default=0) * self.plan.chunk)
        return cursor

    def _check_places(self, cursor: LaneCursor) -> None:
        """Refuse lane positions of a state that this data set cannot have."""
        stride = self.stride(cursor.lanes)
        for at in cursor.at.values():
            if at.tails and not self.plan.carries:
                raise StateError("the state is damaged: chunks without carry have tails", fix="use another")
            for number, place in ((at.chunk, at.place), *at.tails, *at.begins):
                if not self.plan.is_behind(number, place.unit, stride):
                    raise damaged("cursors", f"chunk {number} begins at position {place.unit}")

    def at(self, state: Any) -> Self:
        """See :class:`~energon_lite.loading.iterators.dataset.SavableDataset`. A state without the pushback setting was
        saved by a release that dropped samples pushed back at a chunk's end: its run continues to drop them."""
        dataset = super().at(state)
        settings = saved_settings(state)
        if not dataset.plan.pushback or settings is None or PUSHBACK in settings:
            return dataset
        own = {name: value for name, value in dataset.identity.settings.items() if name != PUSHBACK}
        identity = replace(dataset.identity, settings=own)
        return replace(dataset, plan=replace(dataset.plan, pushback=False), identity=identity)

    def _check_batch_size(self, state: State) -> None:
        """Refuse a state that differs in nothing but the batch size, with a message that says how to proceed."""
        size = saved_batch_size(state)
        here = self.plan.batch_size
        if None in (size, here) or size == here:
            return
        other = replace(self.identity, settings={**self.identity.settings, BATCH_SIZE: size})
        if other.fingerprint == state["identity"].get("fingerprint"):
            raise StateMismatchError(
                f"batch_size: {size} in the state, {here} here; hooks make the batches, so the place of a batch of "
                f"{here} is unknown",
                fix=f"go on with batch_size={size}; or begin behind the chunks that were begun, with "
                f"`energon-lite checkpoint rebase --batch-size {here} --give-up`, which says what is passed over",
            )

    def state(self, cursor: LaneCursor) -> State:
        """Return the state of a cursor, as plain data."""
        return self._make_state("lanes", cursor, cursor.to_plain(), self.identity)

    def _restored(self, key: tuple[Any, ...], runner: ChunkRunner) -> list[Any]:
        match key:
            case ("chunk", pass_number, number, *place) if 0 <= len(place) - len(ChunkPlace._fields) <= 1:
                if self.plan.is_behind(number, place[0], sum(place[len(ChunkPlace._fields) :])):
                    return [self._batch_at(pass_number, number, place, runner)]
            case ("sample", leaf, index, epoch, 0, *sub) if len(sub) <= 1 and self.has(leaf, index):
                return [runner.restore((leaf, index, epoch), 0, *sub)]
            case ("empty",):
                for number in range(self.plan.count(0) or 1):
                    for made in runner.run(self.job(0, number, empty=True)).batch:
                        return [made.batch]
        return []

    def _batch_at(self, pass_number: int, number: int, numbers: list[int], runner: ChunkRunner) -> Any:
        """Make the batch that begins at a place of a chunk. The key of a batch that ends in another chunk also has the
        stride to that chunk."""
        place = ChunkPlace(*numbers[: len(ChunkPlace._fields)])
        stride = sum(numbers[len(ChunkPlace._fields) :])
        count = self.plan.count(pass_number)
        chunk = number
        first = place
        carried = None
        while count is None or chunk < count:
            job = self.job(pass_number, chunk, first, stride=stride, carried=carried)
            made = next((batch for batch in runner.batches(job) if batch.is_batch or batch.carried), None)
            if made is None:
                break
            if made.is_batch:
                return made.batch
            chunk = chunk + stride
            first = START
            carried = made.carried
        raise SampleError(
            f"there is no batch at {tuple(place)} of chunk {number} in pass {pass_number}",
            fix="give the __restore_key__ of a batch as it was delivered, with the hooks that it was made with",
        )

    def __len__(self) -> int:
        """Return the number of micro-batches per rank in one ``for`` loop.

        Raises:
            UnknownLengthError: there is no ``virtual_epoch_length``, so the number is not known.
        """
        if self.loop_length:
            return self.loop_length
        raise UnknownLengthError(
            "the number of batches is unknown until the hooks have run",
            fix="give virtual_epoch_length; or count while you iterate",
        )

    def __str__(self) -> str:
        lanes = self.lanes or default_lanes(self.worker_config.world_size)
        by = "" if self.bundling is None else f"batches by {describe(self.bundling.strategy)}, "
        return self.describe(f"{by}chunks of {counted(self.plan.chunk, 'sample')}, {lanes} lanes")
