"""Keeps the chunks of a rank's lanes coming: they are worked on ahead of their turn, and taken batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from energon_lite.errors import FatalSampleError
from energon_lite.loading.jobs.chunk_job import START, ChunkJob, Made, Place
from energon_lite.loading.jobs.chunk_pipeline import ChunkPipeline
from energon_lite.loading.jobs.pipeline import Outcome
from energon_lite.loading.walks.lane_cursor import LaneCursor
from energon_lite.loading.workers.executor import Executor
from energon_lite.task_encoder import lending

__all__ = ["InlineChunks", "LaneFeed", "PooledChunks"]


class Chunks(Protocol):
    """Who works on chunks."""

    def submit(self, job: ChunkJob) -> Any:
        """Take a job; returns a ticket."""

    def open(self, ticket: Any) -> Iterator[Made]:
        """Its batches. Each ticket is opened once."""

    def cancel(self) -> None:
        """Forget all tickets that were not opened."""

    def close(self) -> None:
        """Let go of everything; may be called twice."""


class InlineChunks:
    """Works in this process, a batch at a time."""

    def __init__(self, pipeline: ChunkPipeline):
        self._pipeline = pipeline

    def submit(self, job: ChunkJob) -> ChunkJob:
        return job

    def open(self, ticket: ChunkJob) -> Iterator[Made]:
        return iter(self._pipeline.run(ticket).batch) if ticket.empty else lending(self._pipeline.batches(ticket))

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


class PooledChunks:
    """Has an executor work on whole chunks."""

    def __init__(self, executor: Executor):
        self.executor = executor

    def submit(self, job: ChunkJob) -> int:
        return self.executor.submit(job)  # type: ignore[arg-type]  # it goes to a pipeline that takes it

    def open(self, ticket: int) -> Iterator[Made]:
        return iter(self.executor.result(ticket).batch)

    def cancel(self) -> None:
        self.executor.cancel()

    def close(self) -> None:
        self.executor.close()


@dataclass
class _Stream:
    """The chunks of one lane."""

    lane: int
    next_chunk: int  # the first one that was not submitted yet
    first: Place  # where to begin in it
    tickets: deque[tuple[int, Any]] = field(default_factory=deque)  # chunks submitted and not opened
    chunk: int = 0  # the one that is open
    batches: Iterator[Made] | None = None  # of the open chunk
    had_batches: bool = False  # the open chunk
    next: Made | None = None  # the batch whose turn is next, if it was looked at


class LaneFeed:
    """The batches of a rank's lanes.

    Args:
        chunks: who works on them.
        job: ``(pass, chunk, first place) -> job``.
        count: ``pass -> its number of chunks``, or None.
        ahead: chunks that are submitted before their turn.
        lost: told what happened to samples of a chunk that did not get into a batch any more.
        patience: so many chunks in a row without a batch are an error; 0: any number.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        job: Callable[[int, int, Place], ChunkJob],
        count: Callable[[int], int | None],
        ahead: int,
        lost: Callable[[Sequence[Outcome]], None],
        patience: int,
    ):
        self.chunks = chunks
        self._job, self._count, self._ahead, self._lost, self._patience = job, count, ahead, lost, patience
        self._cursor = LaneCursor(1)
        self._streams: dict[int, _Stream] = {}
        self._barren = 0

    def start(self, cursor: LaneCursor) -> None:
        """Go on at a cursor; its lanes are kept up to date where they come to the end of a chunk."""
        self.chunks.cancel()
        self._cursor = cursor
        self._streams = {lane: _Stream(lane, chunk, place) for lane, (chunk, place) in cursor.at.items()}
        self._barren = 0

    def peek(self, lane: int) -> Made | None:
        """The next batch of a lane; None: it has no more in this pass.

        Raises:
            FatalSampleError: a hook asked for the end, or there have been no batches for too long.
        """
        stream = self._streams[lane]
        while stream.next is None:
            if stream.batches is None and not self._open(stream):
                return None
            assert stream.batches is not None
            made = next(stream.batches)
            if made.is_batch:
                stream.next, stream.had_batches, self._barren = made, True, 0
            else:
                self._end_chunk(stream)
                self._lost(made.outcomes)
        return stream.next

    def pop(self, lane: int) -> None:
        """The batch that was peeked at is delivered: the lane's cursor moves on."""
        stream = self._streams[lane]
        assert stream.next is not None
        made, stream.next = stream.next, None
        if made.after is None:
            self._end_chunk(stream)
        else:
            self._cursor.at[lane] = (stream.chunk, made.after)

    def empty(self) -> Any:
        """A batch without samples.

        Raises:
            FatalSampleError: no chunk of the pass has a batch to show what one looks like.
        """
        pass_number = self._cursor.pass_number
        for number in range(self._count(pass_number) or 1):
            job = replace(self._job(pass_number, number, START), empty=True)
            for made in self.chunks.open(self.chunks.submit(job)):
                return made.batch
        raise FatalSampleError("none of the samples gets into a batch", fix="look at the hooks")

    def _open(self, stream: _Stream) -> bool:
        """Open the lane's next chunk. False: there is none."""
        if not stream.tickets and not self._submit(stream):
            return False
        self._look_ahead(stream.lane)
        stream.chunk, ticket = stream.tickets.popleft()
        stream.batches, stream.had_batches = self.chunks.open(ticket), False
        self._look_ahead(stream.lane)
        return True

    def _end_chunk(self, stream: _Stream) -> None:
        stream.batches = None
        self._cursor.at[stream.lane] = (stream.chunk + self._cursor.lanes, START)
        if stream.had_batches:
            return
        self._barren += 1
        if self._patience and self._barren >= self._patience:
            raise FatalSampleError(
                f"{self._barren} chunks in a row did not give a single batch",
                where=f"chunk {stream.chunk} of pass {self._cursor.pass_number}",
                fix="look at what the hooks yield and select; to allow more, raise failure_tolerance of the task "
                "encoder (0: any number)",
            )

    def _submit(self, stream: _Stream) -> bool:
        """Submit the lane's next chunk. False: there is none."""
        count = self._count(self._cursor.pass_number)
        if count is not None and stream.next_chunk >= count:
            return False
        job = self._job(self._cursor.pass_number, stream.next_chunk, stream.first)
        stream.tickets.append((stream.next_chunk, self.chunks.submit(job)))
        stream.next_chunk, stream.first = stream.next_chunk + self._cursor.lanes, START
        return True

    def _look_ahead(self, lane: int) -> None:
        """Submit chunks before their turn: those of the lanes that have the fewest, beginning with ``lane``."""
        waiting = sum(len(stream.tickets) for stream in self._streams.values())
        lanes = list(self._streams)
        place = lanes.index(lane)
        streams = [self._streams[one] for one in lanes[place:] + lanes[:place]]
        while waiting < self._ahead and streams:
            stream = min(streams, key=lambda one: len(one.tickets) + (one.batches is not None))
            if self._submit(stream):
                waiting += 1
            else:
                streams.remove(stream)
