"""Walking through micro-batches whose content decides how many there are: lane by lane, in step with the other ranks.

In an endless stream a lane always has a next micro-batch, so ranks need not talk. In a pass that ends, lanes end at
different steps, and nobody knows when. So the ranks agree before each step on the first one for which any of them has a
micro-batch; the others deliver a batch without samples. The micro-batches that do have samples, in their order, are the
same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.loading.jobs.chunk_job import Made
from energon_lite.loading.jobs.pipeline import Address, Result
from energon_lite.loading.jobs.report import Report
from energon_lite.loading.walks.chunked_dataset import ChunkedDataset
from energon_lite.loading.walks.collectives import agree_on_step, check_group
from energon_lite.loading.walks.cursor import check_reach
from energon_lite.loading.walks.lane_cursor import LaneCursor, check_topology, from_lane_state, to_lane_state
from energon_lite.loading.walks.lane_feed import Chunks, LaneFeed
from energon_lite.loading.walks.rebase_entry import check_rebase
from energon_lite.loading.walks.walk import State

__all__ = ["LaneWalk"]

#: In place of the number of a step: this rank has no micro-batch any more; it failed.
_NONE, _FAILED = 1 << 62, -1


class LaneWalk:
    """The way of one rank through its lanes.

    Args:
        dataset: what is cut into chunks.
        chunks: makes the one who works on them, at the first batch.
        ahead: chunks submitted before their turn.
        report: told what happened to samples that do not get into a batch.
        skip: ``(pass, step)`` of steps that are made, but passed over.
    """

    def __init__(
        self,
        dataset: ChunkedDataset,
        chunks: Callable[[], Chunks],
        *,
        ahead: int,
        report: Report,
        skip: Collection[tuple[int, int]] = (),
    ):
        self.dataset, self._unchanged, self._config = dataset, dataset, dataset.worker_config
        self._chunks, self._ahead, self._report, self._skip = chunks, ahead, report, frozenset(skip)
        self.feed: LaneFeed | None = None
        self._is_fed = self._ended = self._delivered = False
        self._step = 0  # the position at which the step begins that was taken last
        self._taken: Made | None = None  # this rank's micro-batch of that step
        self.restore(None)

    # -- the loop -------------------------------------------------------------------------------------------------

    def start_loop(self) -> None:
        self._delivered = False
        if self._ended:
            self._begin_pass(self.cursor.pass_number + 1)
        elif self._loop_is_over():
            self.cursor.loop_start = self.cursor.position

    @property
    def knows_end(self) -> bool:
        return self.dataset.is_endless

    @property
    def step(self) -> tuple[int, int]:
        return self.cursor.pass_number, self._step

    def is_over(self) -> bool:
        self._step = self.cursor.position
        return self._loop_is_over()

    def follow(self, step: tuple[int, int] | None) -> None:
        if step is None:
            self._ended = True
        elif not self._config.reads:
            self.cursor.pass_number, self._step = step

    def take(self) -> Result | None:
        while (result := self._take()) is not None and self._is_skipped():
            # Its samples are not delivered, but what went wrong with others on the way to them is counted.
            self._report.add([outcome for outcome in result.outcomes if outcome is not None], batches=0)
            self.advance()
        return result

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        raise UsageError(
            "which samples a step has is decided by the hooks when they run (they pack, group, or yield any number of "
            "samples)",
            fix="look at the batch itself: restore_sample(batch.__restore_key__); or measure the lengths, and have "
            "batches planned by tokens (batching=...)",
        )

    def advance(self) -> None:
        lane = (self._step + self._config.rank) % self.cursor.lanes
        if self._taken is not None and self.feed is not None:
            self.feed.pop(lane)
        self.cursor.position = self._step + self._config.world_size
        self._taken, self._delivered = None, True

    def _take(self) -> Result | None:
        if self.dataset.is_endless:
            if self.is_over():
                return None
            return self._made_at(self._step) if self._config.reads else Result(None)
        step = self._next_step()
        if step is None and not self._delivered and self.cursor.position:
            # The place that was restored, or left by a `break`, was behind the last batch of its pass.
            self._begin_pass(self.cursor.pass_number + 1)
            step = self._next_step()
        if step is None:
            self._ended = True
            return None
        self._step = step
        result = self._made_at(step)
        return result if self._taken is not None else Result(self._started_feed().empty())

    def _made_at(self, step: int) -> Result:
        """The micro-batch of this rank at a step, if its lane has one."""
        self._taken = self._peek(step)
        return (
            Result(None)
            if self._taken is None
            else Result(self._taken.batch, self._taken.outcomes, trace=self._taken.trace)
        )

    def _next_step(self) -> int | None:
        """The position at which the first step begins that is not empty on all ranks; None: the pass is over."""
        world = self._config.world_size
        if not self._config.reads:
            raise UsageError(
                "a rank that loads no data cannot know how many batches a pass has whose content decides",
                fix="iterate on the ranks of the first pipeline stage only, and send the number of steps to the others",
            )
        step = self._own_next_step() if world == 1 else self._agreed_step()
        limit = self.dataset.plan.limit
        return None if step >= _NONE or (limit is not None and step >= limit * world) else step

    def _agreed_step(self) -> int:
        world, group = self._config.world_size, self._config.data_parallel_group
        check_group(world_size=world, group=group)
        try:
            own = self._own_next_step()
        except BaseException:
            # The others are waiting for this rank's number: tell them, before this one goes down.
            agree_on_step(_FAILED, group=group)
            raise
        least, most = agree_on_step(own, group=group)
        if least == _FAILED:
            raise FatalSampleError(
                "another rank of the data-parallel group failed", fix="look for the first error among the ranks' logs"
            )
        return _NONE if self.dataset.drop_last and least != most else least

    def _own_next_step(self) -> int:
        """The position at which the first step begins for which this rank has a micro-batch."""
        world = self._config.world_size
        for turn in range(self.cursor.lanes // world):
            step = self.cursor.position + turn * world
            if self._peek(step) is not None:
                return step
        return _NONE

    def _peek(self, step: int) -> Made | None:
        feed = self._started_feed()
        try:
            return feed.peek((step + self._config.rank) % self.cursor.lanes)
        except BaseException:
            self._is_fed = False  # a job is lost: the next call starts over at the cursor
            raise

    def _started_feed(self) -> LaneFeed:
        if self.feed is None:
            self.feed = LaneFeed(
                self._chunks(),
                job=lambda *job: self.dataset.job(*job),
                count=lambda number: self.dataset.plan.count(number),
                ahead=self._ahead,
                lost=lambda outcomes: self._report.add(outcomes, batches=0),
                patience=self.dataset.task_encoder.failure_tolerance,
            )
            self._is_fed = False
        if not self._is_fed:
            self.feed.start(self.cursor)
            self._is_fed = True
        return self.feed

    def _loop_is_over(self) -> bool:
        steps = self.dataset.loop_length
        over = self.cursor.position - self.cursor.loop_start >= steps * self._config.world_size
        return bool(steps) and over

    def _is_skipped(self) -> bool:
        return (self.cursor.pass_number, self._step // self._config.world_size) in self._skip

    def _begin_pass(self, pass_number: int) -> None:
        config = self._config
        self._go_to(LaneCursor.at_start(self.cursor.lanes, config.rank, config.world_size, pass_number))

    def _go_to(self, cursor: LaneCursor) -> None:
        self.cursor = cursor
        if not self._config.reads:
            cursor.at.clear()  # others know where the lanes are
        self._is_fed = self._ended = self._delivered = False
        self._step, self._taken = cursor.position, None

    # -- the state ------------------------------------------------------------------------------------------------

    def state(self, cursor: LaneCursor | None = None) -> State:
        return to_lane_state(cursor or self.cursor, self.dataset.identity, self.dataset.rebase)

    def restore(self, state: State | None) -> None:
        config, dataset, lanes = self._config, self._unchanged.at(state), self._unchanged.lanes
        if state is None:
            self.dataset = dataset
            lanes = config.world_size if lanes is None else lanes
            check_topology(lanes, config.world_size)
            self._go_to(LaneCursor.at_start(lanes, config.rank, config.world_size))
            return
        cursor = from_lane_state(
            state,
            dataset.identity,
            rank=config.rank,
            world_size=config.world_size,
            lanes=lanes,
            reads=config.reads,
        )
        last = max((chunk for chunk, _ in cursor.at.values()), default=0)
        check_reach(dataset.plan.order, cursor.pass_number, last * dataset.plan.chunk_size)
        position = min((chunk for chunk, _ in cursor.at.values()), default=0) * dataset.plan.chunk_size
        if config.reads:
            check_rebase(dataset.rebase, leaves=len(dataset.leaves), position=position, ends=not dataset.is_endless)
        self.dataset = dataset
        self._go_to(cursor)

    def close(self) -> None:
        if self.feed is not None:
            self.feed.chunks.close()
            self.feed = None
            self._is_fed = False
