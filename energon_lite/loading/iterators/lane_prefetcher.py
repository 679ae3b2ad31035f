"""Prefetching of the chunks of a rank's lanes: they are submitted ahead of their turn and taken batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from energon_lite.errors import FatalSampleError
from energon_lite.loading.executors.executor import Executor
from energon_lite.loading.iterators.lane_cursor import LaneCursor, LanePlace, begin_of_chunk
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.makers.chunk_job import START, Carried, ChunkJob, Made, Tail
from energon_lite.loading.makers.outcomes import Failure, Outcome, Reasons


@dataclass
class _Stream:
    """State of one lane's chunks."""

    at: LanePlace  # after the batch that was popped last
    begun: int  # the chunk at which the lane was started; chunks before it are run again for their remainder
    next_chunk: int  # the first chunk that has not been submitted
    known: int = -1  # the last chunk whose remainder is known
    handed_over: dict[int, Carried] = field(default_factory=dict)  # by the number of the receiving chunk
    tickets: deque[Any] = field(default_factory=deque)  # of chunks submitted and not opened
    batches: Iterator[Made] | None = None  # of the open chunk, which is that of `at`
    had_batches: bool = False  # the open chunk has had a batch
    next: Made | None = None  # the next batch of the lane, if it was peeked at
    lost: list[Outcome] = field(default_factory=list)  # outcomes in chunks that ended before that batch


class LanePrefetcher:
    """The batches of a rank's lanes.

    An exception may leave it in any state: :meth:`start` restarts it at a cursor.

    Args:
        executor: executor of the jobs.
        ahead: chunks that are submitted before their turn, at least one for each lane; 0: none.
        check: called with the outcomes of samples at a chunk's end that got into no batch; it may raise.
    """

    def __init__(self, executor: Executor, *, ahead: int, check: Callable[[Sequence[Outcome]], None]):
        self._executor = executor
        self._ahead = ahead
        self._check = check

    def start(self, dataset: LaneDataset, cursor: LaneCursor) -> None:
        """Start, or restart, at a cursor. Nothing else works before."""
        self._executor.cancel()
        self._dataset = dataset
        self._patience = dataset.task_encoder.failure_tolerance
        self._lanes = cursor.lanes
        self._pass = cursor.pass_number
        self._stride = dataset.stride(cursor.lanes)
        self._count = dataset.plan.count(cursor.pass_number)
        self._streams = {lane: _Stream(at, at.chunk, at.chunk) for lane, at in cursor.at.items()}
        self._barren = 0
        self._reasons = Reasons()  # reasons for the failures in chunks without batches

    def peek(self, lane: int) -> Made | None:
        """Return the next batch of a lane; None: the lane is exhausted in this pass.

        Raises:
            FatalSampleError: a hook asked to end the run, or too many chunks in a row had no batch.
        """
        stream = self._streams[lane]
        while stream.next is None:
            if stream.batches is None and not self._open(lane):
                return None
            assert stream.batches is not None
            made = next(stream.batches)
            if made.is_batch:
                stream.next = made
                stream.had_batches = True
                self._barren = 0
            else:
                self._end_chunk(stream, made)
        return stream.next

    def pop(self, lane: int) -> tuple[LanePlace, list[Outcome]]:
        """Move the lane past the batch that was peeked at, if any. Return the lane's new position, and the outcomes in
        chunks that have ended since the last call."""
        stream = self._streams[lane]
        at = stream.at
        made = stream.next
        if made is not None and made.tail is not None:
            at = at._replace(tails=(*self._other_tails(at), made.tail))
        elif made is not None and made.after is not None:
            at = LanePlace(at.chunk, made.after, self._other_tails(at), at.begins)
        elif made is not None:
            at = at.next(self._lanes, self._other_tails(at), at.begins)
            stream.batches = None
        stream.at = at
        stream.next = None
        lost = stream.lost
        stream.lost = []
        return at, lost

    def is_over(self, lane: int) -> bool:
        """Return whether the lane is known to be exhausted in this pass."""
        stream = self._streams[lane]
        chunk_is_open = stream.batches is not None or stream.next is not None
        return not chunk_is_open and self._count is not None and stream.at.chunk >= self._count

    def empty(self) -> Any:
        """Return a batch without samples.

        Raises:
            FatalSampleError: no chunk of the pass has a batch that could serve as a template.
        """
        for number in range(self._count or 1):
            job = self._dataset.job(self._pass, number, empty=True)
            for made in self._executor.result(self._executor.submit(job)).batch:
                return made.batch
        raise FatalSampleError("none of the samples gets into a batch", fix="look at the hooks")

    def _other_tails(self, at: LanePlace) -> tuple[Tail, ...]:
        """Return the tails that the chunk at ``at`` does not take."""
        return tuple(tail for tail in at.tails if (at.chunk - tail.chunk) % self._stride)

    def _open(self, lane: int) -> bool:
        """Open the lane's next chunk; return False if there is none."""
        stream = self._streams[lane]
        if not stream.tickets and not self._submit(stream):
            return False
        self._look_ahead(lane)
        stream.batches = self._executor.batches(stream.tickets.popleft())
        stream.had_batches = False
        if self._stride and self._executor.makes_all_batches:
            made = deque(stream.batches)
            self._know(stream, made[-1].carried if made else None)
            stream.batches = (made.popleft() for _ in range(len(made)))
        self._look_ahead(lane)
        return True

    def _end_chunk(self, stream: _Stream, made: Made) -> None:
        chunk = stream.at.chunk
        tails = self._other_tails(stream.at)
        begins = stream.at.begins
        if made.carried is not None:
            later = chunk + self._stride
            tails = (*tails, *filter(None, [made.carried.tail]))
            begins = (*begins, *([Tail(later, made.carried.begins_at)] if made.carried.samples else []))
        self._know(stream, made.carried)
        stream.batches = None
        stream.at = stream.at.next(self._lanes, tails, begins)
        stream.lost += made.outcomes
        self._check(made.outcomes)
        if stream.had_batches or made.rows:
            return
        self._reasons = Reasons() if not self._barren else self._reasons
        self._barren += 1
        for failure in (outcome for outcome in made.outcomes if isinstance(outcome, Failure)):
            self._reasons.add(failure.key, failure.stage, failure.reason, failure.skipped)
        if self._patience and self._barren >= self._patience:
            most = self._reasons.most_common(3)
            reasons = [f"{why[0]}: {self._reasons.text(*why)} ({count:,} x)" for why, count in most]
            raise FatalSampleError(
                f"{self._barren} chunks in a row did not give a single batch"
                + "".join(f"; {text}" for text in reasons),
                where=f"chunk {chunk} of pass {self._pass}",
                fix="look at what the hooks yield and select; to allow more, raise failure_tolerance of the task "
                "encoder (0: any number)",
            )

    def _know(self, stream: _Stream, carried: Carried | None) -> None:
        """Store the remainder of the open chunk, perhaps before its batches are taken."""
        chunk = stream.at.chunk
        if chunk > stream.known and carried is not None:
            stream.handed_over[chunk + self._stride] = carried
        stream.known = max(stream.known, chunk)

    def _submit(self, stream: _Stream) -> bool:
        """Submit the lane's next chunk; return False if there is none, or if its carried samples are not known yet."""
        number = stream.next_chunk
        before = number - self._stride
        if self._count is not None and number >= self._count:
            return False
        if self._stride and stream.begun <= before and before > stream.known:
            return False
        first = START
        carried: Carried | ChunkJob | None = stream.handed_over.pop(number, None)
        if before < stream.begun or not self._stride:  # the carried samples are made again
            is_open = number == stream.at.chunk
            first = stream.at.place if is_open else begin_of_chunk(number, stream.at.begins)
            carried = self._handing_over(number, stream.at.tails)
        job = self._dataset.job(self._pass, number, first, stride=self._stride, carried=carried)
        stream.tickets.append(self._executor.submit(job))
        stream.next_chunk = number + self._lanes
        return True

    def _handing_over(self, number: int, tails: Sequence[Tail]) -> ChunkJob | None:
        """Return the job that makes the samples carried into a chunk again."""
        job = None
        for chunk, first in tails:
            if (number - chunk) % self._stride == 0:
                while chunk < number:
                    job = self._dataset.job(self._pass, chunk, first, stride=self._stride, carried=job)
                    chunk = chunk + self._stride
                    first = START
        return job

    def _look_ahead(self, lane: int) -> None:
        """Submit chunks before their turn, first for the lanes that have the fewest, beginning with ``lane``."""
        waiting = sum(len(stream.tickets) for stream in self._streams.values())
        lanes = list(self._streams)
        # The chunks of all lanes may end at the same time. At least one chunk for each lane must then be ready, or
        # workers are idle before.
        ahead = self._ahead + self._executor.more_ahead
        wanted = max(ahead, len(lanes)) if ahead else 0
        place = lanes.index(lane)
        streams = [self._streams[number] for number in lanes[place:] + lanes[:place]]
        while waiting < wanted and streams:
            stream = min(streams, key=lambda stream: len(stream.tickets) + (stream.batches is not None))
            if self._submit(stream):
                waiting += 1
            else:
                streams.remove(stream)
