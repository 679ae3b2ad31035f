"""Iterators of a rank: the interface to the loader, the common part of plans and lanes, and the iterator of a plan: the
next job of this rank, and its prefetching."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from energon_lite.batching.plan import Counts, Place
from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.iterators.planned_dataset import PlanCursor
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.outcomes import Address, Failure, Mark, Result
from energon_lite.loading.makers.report import Report

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ForLoop:
    """State of a ``for`` loop over a loader. A request for a batch sets ``is_over``, and its delivery resets it: a loop
    that an error ended stays over."""

    is_begun: bool = False
    is_over: bool = False


class OneThread:
    """A lock that lets one thread at a time advance a loader; a second thread gets an error and changes nothing.

    Attributes:
        holder: the thread; None: there is none. Assign None to release it: an interrupt could prevent a call.
    """

    def __init__(self) -> None:
        self.holder: int | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may call look() in the thread that holds it

    def take(self) -> None:
        """Claim the loader for the calling thread.

        Raises:
            UsageError: another thread has claimed it.
        """
        own = threading.get_ident()
        with self._lock:
            if self.holder not in (None, own):
                raise UsageError(
                    "another thread takes a batch from this loader, or restores it, at this moment",
                    fix="take batches in one thread, and hand them to others through a queue.Queue; or put one "
                    "threading.Lock around each next(); or make a loader for each thread, each with a rank of its own",
                )
            self.holder = own

    @contextmanager
    def look(self) -> Iterator[bool]:
        """Yield True if no other thread iterates over the loader now; until this ends, none begins to."""
        with self._lock:
            yield self.holder in (None, threading.get_ident())


class DatasetIterator(ABC):
    """The cursor of a rank, and the batches that follow it.

    Args:
        dataset: the data set to iterate over.
        workers: handle of the executor; it is started at the first batch.
        prefetch_factor: jobs that are submitted ahead, per worker.
        report: receiver of the outcomes of samples that do not get into a batch.
        skip: ``(pass, step)`` of steps that are skipped.

    Attributes:
        dataset: the data set in the restored run.
        cursor: the position. It is never changed, but replaced.
        reads: this rank makes batches itself.
    """

    cursor: Any
    #: If True, a ``for`` loop that begins after the last step of a pass reports the pass's end; if False, the next pass
    #: begins.
    tells_ends = False

    @property
    @abstractmethod
    def knows_end(self) -> bool:
        """True if every rank can determine the end of the loop by itself; False if only ranks that read data can."""

    def __init__(
        self,
        dataset: Any,
        workers: ExecutorHandle,
        prefetch_factor: int,
        report: Report,
        skip: Collection[tuple[int, int]] = (),
    ):
        self.dataset: Any = dataset
        self._unchanged = dataset
        self._workers = workers
        self._prefetch_factor = prefetch_factor
        self._report = report
        self._skip = skip
        self._config = config = dataset.worker_config
        self._world = config.world_size
        self.reads = config.reads
        self.restore(None)

    @property
    def step(self) -> tuple[int, int]:
        """Pass and position of the step that was taken last."""
        return self.cursor.pass_number, self.cursor.position

    @abstractmethod
    def start_loop(self) -> None:
        """Begin a ``for`` loop: continue the running pass (or virtual epoch), or begin the next one if it is over."""

    @abstractmethod
    def rewind(self) -> None:
        """Go to the beginning of the first pass of this run."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the loop is over; only valid if ``knows_end``."""

    def take(self) -> Result | None:
        """Return the next result of this rank; None: the loop is over. The call after an error repeats
        the call that failed."""
        while (result := self._take()) is not None and self._is_skipped(*self.step):
            self._skip_result(result)
        return result

    def _skip_result(self, result: Result) -> None:
        """Move past a step that is skipped. Its samples are not delivered, but failures of other samples in its jobs
        are counted."""
        self._report.add([outcome for outcome in result.outcomes if isinstance(outcome, (Failure, Mark))], batches=0)
        self.advance()

    def _take(self) -> Result | None:
        """Return the result of the next step, which may be one that is skipped; None: the loop is over."""
        raise NotImplementedError

    def follow(self, step: tuple[int, int] | None) -> None:
        """Move to the ``step`` that a peer has taken; None: the peer's loop is over. Only used if not ``knows_end``."""
        return  # nothing to do if each rank knows the step itself

    @abstractmethod
    def advance(self) -> None:
        """Move the cursor past the result that was taken; call it when that result is delivered."""

    @abstractmethod
    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        """Return the addresses of the samples of a step, for each of the given ranks.

        The number of a step is ``position // world_size``.

        Args:
            pass_number: None: the running pass.

        Raises:
            UsageError: there is no such step, or its samples are not known before it is made.
        """

    def loop_steps(self) -> int | None:
        """Return the steps of the running or next ``for`` loop; None: as many as every other loop has."""
        return None

    @abstractmethod
    def planned_counts(self) -> dict[str, int] | None:
        """Return the numbers of samples that the plan by tokens dropped, truncated and split; None for other plans."""

    def state(self, cursor: Any = None) -> State:
        """Return the state of a cursor, as plain data.

        Args:
            cursor: an earlier value of ``cursor``; None: the current one.
        """
        return self.dataset.state(cursor or self.cursor)

    def restore(self, state: State | None) -> None:
        """Go to the position of a state; None: to the beginning."""
        dataset = self._unchanged.at(state)
        cursor = dataset.start() if state is None else dataset.cursor(state)
        self.dataset = dataset
        self._go_to(cursor)

    def _go_to(self, cursor: Any) -> None:
        """Go to a cursor; only used if :meth:`restore` is not overridden."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Note that the workers have been stopped. The next ``take`` starts new ones."""

    def _is_skipped(self, pass_number: int, position: int) -> bool:
        return (pass_number, position // self._world) in self._skip


class PlannedIterator(DatasetIterator):
    """Iterator of one rank over the plan. Every rank knows the whole plan, so ranks need not communicate."""

    knows_end = True
    cursor: PlanCursor
    counts = Counts()  # of what the plan has left out so far
    _results: Iterator[Result] = iter(())
    _results_at: PlanCursor | None = None  # the cursor that the next of them belongs to; None: start them again
    _stepped: tuple[PlanCursor, PlanCursor | None] | None = None  # a cursor, and what _following() returns for it

    @cached_property
    def _by_tokens(self) -> bool:
        return self.dataset.plan.rows is None

    def start_loop(self) -> None:
        if self._following() is not None or self.dataset.once:
            return
        at_end = self.cursor
        if self.dataset.is_endless:
            self._move(replace(at_end, loop_start=at_end.position))
        else:
            self.cursor = PlanCursor(self.dataset.plan.start, pass_number=at_end.pass_number + 1)

    def rewind(self) -> None:
        self._go_to(self.dataset.start())

    def is_over(self) -> bool:
        if self._skip:  # most runs have none
            self._pass_over()
        return self._following() is None

    def take(self) -> Result | None:
        while (result := self._take()) is not None and self.dataset.once and self.reads and not _has_samples(result):
            self._report.add(result.outcomes, batches=0)
            self.advance()
        return result

    def _take(self) -> Result | None:
        if self._results_at is None and self.reads:
            self._workers.executor()  # before any planning: a forked worker should not inherit a busy thread
        if self._skip:  # most runs have none
            self._pass_over()
        cursor = self.cursor
        after = self._following()
        if after is None:
            return None
        if self._by_tokens:
            self._count_left_out(after)
        if not self.reads:
            return Result(None)
        results_at = self._results_at
        self._results_at = None  # if anything raises from here on, the next call restarts at the cursor
        if results_at is not cursor:
            executor = self._workers.executor()
            executor.cancel()
            self._results = executor.results(self._jobs_from(cursor), self._prefetch_factor * self._config.num_workers)
        result = next(self._results)
        self._results_at = after
        return result

    def advance(self) -> None:
        assert self._stepped is not None  # take() has called _following()
        before, after = self._stepped
        assert before is self.cursor and after is not None
        self.cursor = after

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        near = self.cursor
        dataset = self.dataset
        number = near.pass_number if pass_number is None else pass_number
        if number != near.pass_number:
            near = PlanCursor(dataset.plan.start, pass_number=number)
        # After a restore from another world size, steps may begin between the multiples of this one.
        between = 0 if dataset.step(self.cursor) is None else near.position % self._world
        if min(number, step) >= 0 and not (dataset.is_endless and number):
            wanted = step * self._world + between - near.position
            place, moved = dataset.plan.ahead(number, near.place, wanted)
            at = replace(near, place=place, position=near.position + moved)
            if moved == wanted and dataset.step(at) is not None:
                places = [dataset.place(at, rank) for rank in ranks]
                return [job.addresses for job in dataset.jobs(number, places)]
        raise UsageError(
            f"there is no step {step} in pass {number}",
            fix="steps are counted from 0 in each pass; an endless stream has pass 0 only",
        )

    def loop_steps(self) -> int | None:
        dataset = self.dataset
        cursor = self.cursor
        if not self._by_tokens or dataset.is_endless:
            return None
        return int(dataset.loop_steps(cursor.pass_number + (dataset.step(cursor) is None)))

    def planned_counts(self) -> dict[str, int] | None:
        return asdict(self.counts) if self._by_tokens else None

    def _go_to(self, cursor: PlanCursor) -> None:
        self.cursor = cursor
        self._counted = cursor.pass_number, cursor.place[0]  # pass, and its first chunk that is not in `counts`

    def close(self) -> None:
        self._results_at = None

    def _jobs_from(self, cursor: PlanCursor) -> Iterator[Job]:
        """The jobs of this rank from a cursor to the end of its pass."""
        dataset = self.dataset
        following = self.dataset.step(cursor)
        while following is not None:
            places: list[Place] = []
            while following is not None and len(places) < dataset.plan.together:
                skipped = bool(self._skip) and self._is_skipped(cursor.pass_number, cursor.position)
                if not skipped and dataset.takes(cursor, following, self._config.rank):
                    places.append(dataset.place(cursor, self._config.rank))
                cursor = following
                following = dataset.step(following)
            yield from dataset.jobs(cursor.pass_number, places)

    def _pass_over(self) -> None:
        """Go to the next step that is not skipped, or to the end of a pass."""
        cursor: PlanCursor | None = self.cursor
        while cursor is not None and self._is_skipped(cursor.pass_number, cursor.position):
            if (cursor := self.dataset.step(cursor)) is not None:
                self._move(cursor)

    def _following(self) -> PlanCursor | None:
        """Return the cursor after the next step, which is kept for :meth:`advance`; None: the loop is over."""
        length = self.dataset.loop_length
        cursor = self.cursor
        if length and cursor.position - cursor.loop_start >= length * self._world:
            return None
        if self._stepped is None or self._stepped[0] is not cursor:
            after = self.dataset.step(cursor)
            if after is not None and not self.dataset.takes(cursor, after, self._config.rank):
                self._move(after)  # the last samples belong to other ranks
                cursor = after
                after = None
            self._stepped = cursor, after
        return self._stepped[1]

    def _move(self, cursor: PlanCursor) -> None:
        """Go to a cursor; the next result, if it belonged to the old cursor, now belongs to this one."""
        is_at_cursor = self._results_at is self.cursor
        self.cursor = cursor
        self._results_at = cursor if is_at_cursor else None

    def _count_left_out(self, after: PlanCursor) -> None:
        """Count the samples that the plan left out in the chunks up to a step, each chunk once; plan the next chunk.

        Args:
            after: the cursor after the step.
        """
        pass_number = after.pass_number
        chunk, *inside = after.place
        first = self._counted[1] if self._counted[0] == pass_number else 0
        stop = chunk + any(inside)
        if stop > first:
            left_out = self.dataset.plan.left_out(pass_number, first, stop)
            if left_out.words() and not self.counts.words():
                logger.warning(
                    "some samples do not fit into a batch: %s (logged once, all counted)", "; ".join(left_out.words())
                )
            self.counts += left_out
            self._counted = (pass_number, stop)


def _has_samples(result: Result) -> bool:
    return any(isinstance(outcome, int) for outcome in result.outcomes)


def checked_steps(steps: Iterable[int | tuple[int, int]]) -> set[tuple[int, int]]:
    """Return steps as pairs of pass and number.

    Raises:
        UsageError: an entry is neither a number nor such a pair.
    """
    pairs = set()
    for step in steps:
        pair = tuple(step) if isinstance(step, Iterable) else (0, step)
        if len(pair) != 2 or not all(hasattr(part, "__index__") and part >= 0 for part in pair):
            raise UsageError(f"{step!r} among skip_steps", fix="give numbers of steps, or pairs (pass, number)")
        pairs.add((int(pair[0]), int(pair[1])))
    return pairs
