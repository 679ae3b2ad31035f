"""The way of a rank through the data, as a loader asks for it; what planned batches and lanes have in common of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor_handle import ExecutorHandle
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.pipeline import Address, Result
from energon_lite.loading.makers.report import Report

__all__ = ["DatasetIterator", "Loop", "OneThread", "checked_steps"]


@dataclass(slots=True)
class Loop:
    """A ``for`` loop over a loader. Over from a request for a batch until its delivery, so also after an error."""

    is_begun: bool = False
    is_over: bool = False


class OneThread:
    """Lets one thread at a time move a loader; one that comes in between gets an error, and changes nothing.

    Attributes:
        holder: the thread. Set to None when it is done: an assignment, for an interrupt may come after any call.
    """

    def __init__(self) -> None:
        self.holder: int | None = None
        self._lock = threading.Lock()

    def take(self) -> None:
        """Begin.

        Raises:
            UsageError: another thread has begun.
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


class DatasetIterator(ABC):
    """A place in the run, and what comes next.

    Args:
        dataset: what is gone through.
        workers: who does the work; started at the first batch.
        prefetch_factor: how far each worker is ahead.
        report: told what happened to samples that do not get into a batch.
        skip: ``(pass, step)`` of steps that are passed over.

    Attributes:
        dataset: the same, in the run that was restored.
        cursor: the place. It is never changed, but replaced.
    """

    cursor: Any
    #: A place behind the last step of a pass is told as its end also where a ``for`` loop begins there; else the next
    #: pass begins.
    tells_ends = False

    @property
    @abstractmethod
    def knows_end(self) -> bool:
        """Whether every rank can tell by itself when the loop is over; else only those that read."""

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
        """The pass, and the position at which the step begins, of what was taken last."""
        return self.cursor.pass_number, self.cursor.position

    @abstractmethod
    def start_loop(self) -> None:
        """A ``for`` loop begins: go on in the running pass (or virtual epoch), or begin the next one if it is over."""

    @abstractmethod
    def rewind(self) -> None:
        """Go to the beginning of the first pass of this run."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the loop is over; only where ``knows_end``."""

    @abstractmethod
    def take(self) -> Result | None:
        """What comes next for this rank; None: the loop is over. Taken again after an error, it is the same."""

    def follow(self, step: tuple[int, int] | None) -> None:
        """Take what a peer has taken at its ``step``; None: the peer's loop is over. Only where not ``knows_end``."""
        return  # where each rank knows for itself

    @abstractmethod
    def advance(self) -> None:
        """What was taken is delivered."""

    @abstractmethod
    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        """The addresses of the samples of a step, for each of some ranks. A step is one at which
        ``position // world_size`` is its number.

        Args:
            pass_number: None: the one that is running.

        Raises:
            UsageError: there is no such step, or nobody knows before it is made.
        """

    def loop_steps(self) -> int | None:
        """Batches of the ``for`` loop that is running, or comes next; None: as many as in every other one."""
        return None

    @abstractmethod
    def planned_counts(self) -> dict[str, int] | None:
        """What plans by tokens dropped, truncated and split; None: there are none."""

    def state(self, cursor: Any = None) -> State:
        """A place as plain data.

        Args:
            cursor: that ``cursor`` was at that place; None: where it is now.
        """
        state: State = self.dataset.state(cursor or self.cursor)
        return state

    @abstractmethod
    def restore(self, state: State | None) -> None:
        """Go to a place; None: to the beginning."""

    @abstractmethod
    def close(self) -> None:
        """The workers are stopped. ``take`` starts new ones."""

    def _is_skipped(self, pass_number: int, position: int) -> bool:
        return (pass_number, position // self._world) in self._skip


def checked_steps(steps: Iterable[int | tuple[int, int]]) -> set[tuple[int, int]]:
    """Steps as pairs of pass and number.

    Raises:
        UsageError: one of them is neither.
    """
    found = set()
    for step in steps:
        pair = (0, step) if isinstance(step, int) else tuple(step)
        if len(pair) != 2 or not all(isinstance(part, int) and part >= 0 for part in pair):
            raise UsageError(f"{step!r} among skip_steps", fix="give numbers of steps, or pairs (pass, number)")
        found.add((pair[0], pair[1]))
    return found
