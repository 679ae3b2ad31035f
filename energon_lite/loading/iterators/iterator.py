"""Base class of the iterators of a rank: the interface to the loader, and the common part of plans and lanes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.outcomes import Address, Failure, Mark, Result
from energon_lite.loading.makers.report import Report


@dataclass(slots=True)
class ForLoop:
    """State of a ``for`` loop over a loader. It is over from a request until its delivery, so also after an error."""

    is_begun: bool = False
    is_over: bool = False


class OneThread:
    """A lock that lets one thread at a time advance a loader; a second thread gets an error and changes nothing.

    Attributes:
        holder: the thread. It is released by assigning None, because an interrupt may come after any call.
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
        self._reads = config.reads
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
        """Return the next result of this rank; None: the loop is over. After an error, it is the same result again."""
        while (result := self._take()) is not None and self._is_skipped(*self.step):
            # The samples of the step are not delivered, but failures of other samples in its jobs are counted.
            self._report.add(
                [outcome for outcome in result.outcomes if isinstance(outcome, (Failure, Mark))], batches=0
            )
            self.advance()
        return result

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
        state: State = self.dataset.state(cursor or self.cursor)
        return state

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


def checked_steps(steps: Iterable[int | tuple[int, int]]) -> set[tuple[int, int]]:
    """Return steps as pairs of pass and number.

    Raises:
        UsageError: an entry is neither a number nor such a pair.
    """
    pairs = set()
    for step in steps:
        pair = (0, step) if isinstance(step, int) else tuple(step)
        if len(pair) != 2 or not all(isinstance(part, int) and part >= 0 for part in pair):
            raise UsageError(f"{step!r} among skip_steps", fix="give numbers of steps, or pairs (pass, number)")
        pairs.add((pair[0], pair[1]))
    return pairs
