"""Data set with content-decided batches, which is worked on in chunks; its cursor is in ``lane_cursor``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from energon_lite.batching.plan import ChunkPlan, default_lanes
from energon_lite.batching.strategy import describe
from energon_lite.errors import (
    SampleError,
    StateMismatchError,
    UnknownLengthError,
    counted,
    field_of,
    listed,
)
from energon_lite.hooks import HOOK_ORDER, Hooks, hooks_of
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.lane_cursor import LaneCursor, check_topology, lanes_of, read_lanes
from energon_lite.loading.iterators.state import (
    BATCH_SIZE,
    State,
    checked,
    damaged,
    saved_batch_size,
)
from energon_lite.loading.makers.chunk_bundles import BundlesByTokens
from energon_lite.loading.makers.chunk_job import START, Carried, ChunkJob, ChunkPlace
from energon_lite.loading.makers.chunk_runner import ChunkRunner
from energon_lite.loading.makers.job_runner import unmade
from energon_lite.loading.makers.outcomes import Failure


@dataclass(frozen=True, eq=False, kw_only=True)
class LaneDataset(SavableDataset):
    """Data set of ``get_train_dataset`` and ``get_val_dataset`` if hooks decide how many samples there are.

    Args:
        plan: assignment of samples to chunks.
        lanes: number of lanes that the chunks are dealt to; None: the number given by
            :func:`~energon_lite.batching.plan.default_lanes` for the world size at the beginning of the run.
        bundler: rule for batches by the lengths of encoded samples; None: batches are not made by length.
    """

    plan: ChunkPlan
    lanes: int | None = None
    bundler: BundlesByTokens | None = None

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
            bundler=self.bundler,
        )

    @cached_property
    def hooks(self) -> Hooks:
        """The hooks that are in use."""
        packing = self.plan.packing_buffer_size is not None
        batched = self.plan.batch_size is not None
        return hooks_of(self.task_encoder, packing=packing, batched=batched, by_tokens=self.bundler is not None)

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

    def start(self) -> LaneCursor:
        """Return the cursor of this rank at the beginning of the run.

        Raises:
            TopologyError: the lanes cannot be divided among the ranks.
        """
        config = self.worker_config
        lanes = self.lanes or default_lanes(config.world_size)
        check_topology(lanes, config.world_size)
        return LaneCursor.at_start(lanes, config.rank, config.world_size)

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
                raise damaged("cursors", f"chunk {at.chunk} has tails, and this run has none")
            for number, place in ((at.chunk, at.place), *at.tails, *at.begins):
                if not self.plan.is_behind(number, place.unit, stride):
                    raise damaged("cursors", f"chunk {number} begins at position {place.unit}")

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
        key = ("chunk", pass_number, number, *numbers)
        count = self.plan.count(pass_number)
        chunk = number
        first = place
        carried = None
        failures = list[Failure]()
        while count is None or chunk < count:
            job = self.job(pass_number, chunk, first, stride=stride, carried=carried)
            for made in runner.batches(job):
                failures += [outcome for outcome in made.outcomes if isinstance(outcome, Failure)]
                if made.is_batch or made.carried:
                    break
            else:
                break
            if made.is_batch:
                found = field_of(made.batch, "__restore_key__")
                if isinstance(found, tuple) and found[:1] == key[:1] and found != key:
                    break  # the batch is lost, and this is the one behind it
                return made.batch
            chunk = chunk + stride
            first = START
            carried = made.carried
        if failures:
            last = max(failures, key=lambda one: one.stage in HOOK_ORDER and HOOK_ORDER.index(one.stage))
            raise unmade("the batch", last)
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
        by = "" if self.bundler is None else f"batches by {describe(self.bundler.strategy)}, "
        return self.describe(f"{by}chunks of {counted(self.plan.chunk, 'sample')}, {lanes} lanes")
