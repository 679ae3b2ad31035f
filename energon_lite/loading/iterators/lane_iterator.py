"""Iteration over content-decided micro-batches: lane by lane, in step with the other ranks.

In an endless stream a lane always has a next micro-batch, so ranks need not communicate. In a pass that ends, lanes end
at different steps, which are not known in advance. So the ranks agree before each step on the first step for which any
of them has a micro-batch; the others deliver a batch without samples. The micro-batches that have samples, and their
order, are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.loading.iterators.collectives import agree_on_step, check_group
from energon_lite.loading.iterators.iterator import DatasetIterator
from energon_lite.loading.iterators.lane_cursor import LaneCursor
from energon_lite.loading.iterators.lane_prefetcher import LanePrefetcher
from energon_lite.loading.makers.chunk_job import Made
from energon_lite.loading.makers.outcomes import Address, Outcome, Result

#: Sent in place of a step number: this rank has no micro-batch left.
_NONE = 1 << 62
#: Sent in place of a step number: this rank failed.
_FAILED = -1


class LaneIterator(DatasetIterator):
    """Iterator of one rank over its lanes.

    An interrupt at any point leaves the cursor at one position of the run or at the next, and the feed is restarted
    there. Skipped steps are made, but not delivered.
    """

    cursor: LaneCursor
    feed: LanePrefetcher | None = None
    _taken: Made | None = None  # this rank's micro-batch of the step that was taken last

    # -- the loop -------------------------------------------------------------------------------------------------

    def start_loop(self) -> None:
        self._delivered = False
        if self._ended and not self.dataset.once:
            self._begin_pass(self.cursor.pass_number + 1)
        elif self._loop_is_over():
            self.cursor = replace(self.cursor, loop_start=self.cursor.position)

    def rewind(self) -> None:
        self._begin_pass(0)

    @property
    def knows_end(self) -> bool:
        return self.dataset.is_endless

    @property
    def step(self) -> tuple[int, int]:
        return self.cursor.pass_number, self._step

    def is_over(self) -> bool:
        self._step = self.cursor.position
        while not self._loop_is_over() and self._is_skipped(*self.step):
            self._skip_result(self._made(self._step) or Result(None))
            self._step = self.cursor.position
        return self._loop_is_over()

    def follow(self, step: tuple[int, int] | None) -> None:
        if step is None:
            self._ended = True
        elif not self.reads:
            self._step = step[1]
            self.cursor = replace(self.cursor, pass_number=step[0])

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        raise UsageError(
            "the samples of a step are decided by the hooks when they run (they pack, group, or yield any number of "
            "samples)",
            fix="look at the batch itself: restore_sample(batch.__restore_key__); or measure the lengths, and have "
            "batches planned by tokens (batching=...)",
        )

    def advance(self) -> None:
        lane = (self._step + self._config.rank) % self.cursor.lanes
        self._move([lane] if self._taken is not None else [], self._step + self._world)
        self._taken = None
        self._delivered = True

    def _move(self, lanes: Sequence[int], position: int) -> None:
        """Go to a position; the batches that were peeked at in these lanes count as delivered."""
        feed = self.feed
        at = dict(self.cursor.at)
        lost = list[Outcome]()
        with self._feeding():
            for lane in lanes:
                assert feed is not None
                at[lane], outcomes = feed.pop(lane)
                lost += outcomes
            left_out = max(0, self._step - self.cursor.position)  # steps that were empty on all ranks
            start = self.cursor.loop_start + left_out
            self.cursor = replace(self.cursor, position=position, loop_start=start, at=at)
        self._report.count(lost, batches=0)

    def _take(self) -> Result | None:
        if self.dataset.is_endless:
            if self.is_over():
                return None
            step = self._step
        else:
            next_step = self._next_step()
            goes_on = self._delivered or self.tells_ends or self.dataset.once
            if next_step is None and not goes_on and self.cursor.position:
                # The restored cursor, or the one left by a `break`, was after the last batch of its pass.
                self._begin_pass(self.cursor.pass_number + 1)
                next_step = self._next_step()
            if next_step is None:
                self._end_pass()
                return None
            step = self._step = next_step
        return self._made(step) or Result(None if self.dataset.is_endless else self._empty())

    def _made(self, step: int) -> Made | None:
        """Take this rank's micro-batch of a step, or None."""
        self._taken = made = self._peek(step) if self.reads else None
        return made

    def _next_step(self) -> int | None:
        """Return the position of the first step that is not empty on all ranks; None: the pass is over."""
        world = self._world
        group = self._config.data_parallel_group
        if not self.reads:
            raise UsageError(
                "a rank that loads no data cannot know the number of batches of a content-decided pass",
                fix="iterate on the ranks of the first pipeline stage only, and send the number of steps to the others",
            )
        if not self._left:
            return None
        if world == 1 or self.dataset.once:
            step = self._own_next_step()
        else:
            check_group(world_size=world, group=group)
            with self._telling_others():
                own = self._own_next_step()
            step, most = agree_on_step(own, group=group)
            if step == _FAILED:
                raise FatalSampleError(
                    "another rank of the data-parallel group failed",
                    fix="look for the first error among the ranks' logs",
                )
            if self.dataset.drop_last and step != most:
                return None
        return None if step >= _NONE else step

    @property
    def _left(self) -> int:
        """Micro-batches up to the limit of the pass, over all ranks."""
        stop = self.dataset.stop(self.cursor.ranks)
        return _NONE if stop is None else max(0, stop - (self.cursor.position - self.cursor.loop_start))

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Send the failure code to the other ranks if the block raises: they wait for this rank's step number."""
        try:
            yield
        except BaseException:
            agree_on_step(_FAILED, group=self._config.data_parallel_group)
            raise

    def _own_next_step(self) -> int:
        """Return the position of the first step for which this rank has a micro-batch."""
        position = self.cursor.position
        lanes = self.cursor.lanes
        world = self._world
        steps = range(position, position + lanes, world)  # each lane of this rank once
        return next((step for step in steps if self._peek(step) is not None), _NONE)

    def _peek(self, step: int) -> Made | None:
        """Return this rank's micro-batch at a step, or None."""
        if self._config.rank >= self._left:
            return None
        feed = self._started_feed()
        with self._feeding():
            return feed.peek((step + self._config.rank) % self.cursor.lanes)

    def _empty(self) -> Any:
        """Return a batch without samples."""
        is_last = self._left <= self._world
        with nullcontext() if is_last else self._telling_others():
            return self._started_feed().empty()

    def _end_pass(self) -> None:
        """End the pass: count the outcomes of samples after the last batches, once."""
        if self.reads and self.feed is not None and self._is_fed:
            self._move([lane for lane in self.cursor.at if self.feed.is_over(lane)], self.cursor.position)
        self._ended = True

    @contextmanager
    def _feeding(self) -> Iterator[None]:
        """Mark the feed as invalid if the block raises: a job may be lost, or the feed ahead of the cursor."""
        self._is_fed = False
        yield
        self._is_fed = True

    def _started_feed(self) -> LanePrefetcher:
        if self.feed is None:
            self._is_fed = False
            executor = self._workers.executor()
            ahead = max(1, self._prefetch_factor - 1) * self._config.num_workers
            self.feed = LanePrefetcher(executor, ahead=ahead, check=self._report.check)
        if not self._is_fed:
            self.feed.start(self.dataset, self.cursor)
            self._is_fed = True
        return self.feed

    def _loop_is_over(self) -> bool:
        length = self.dataset.loop_length * self._world
        cursor = self.cursor
        return bool(length) and cursor.position - cursor.loop_start >= length

    def _begin_pass(self, pass_number: int) -> None:
        self._go_to(LaneCursor.at_start(self.cursor.lanes, self._config.rank, self._world, pass_number))

    def _go_to(self, cursor: LaneCursor) -> None:
        self._is_fed = self._ended = self._delivered = False
        self._step = cursor.position  # the position of the step that was taken last
        self._taken = None
        self.cursor = cursor if self.reads else replace(cursor, at={})  # only ranks that read have lane positions

    # -- the state ------------------------------------------------------------------------------------------------

    def planned_counts(self) -> dict[str, int] | None:
        if self.dataset.bundler is None:
            return None
        return {"truncated_samples": self._report.truncated, "split_samples": self._report.split}

    def close(self) -> None:
        self.feed = None
