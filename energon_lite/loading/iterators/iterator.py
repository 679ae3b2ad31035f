"""What a loader asks of the way of its rank through the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from energon_lite.errors import UsageError
from energon_lite.loading.executors.executor import Executor
from energon_lite.loading.iterators.prefetcher import Prefetcher
from energon_lite.loading.makers.pipeline import Address, Job, Result
from energon_lite.worker_config import WorkerConfig

__all__ = ["PlanIterator", "State", "Walk", "no_such_step"]

#: Plain data: dicts, lists, strings and integers.
State = dict[str, Any]


class Walk(Protocol):
    """A place in the run, and what comes next.

    Attributes:
        cursor: the place. It is never changed, but replaced.
    """

    cursor: Any

    @property
    def knows_end(self) -> bool:
        """Whether every rank can tell by itself when the loop is over; else only those that read."""

    @property
    def step(self) -> tuple[int, int]:
        """The pass, and the position at which the step begins, of what was taken last."""

    def start_loop(self) -> None:
        """A ``for`` loop begins: go on in the running pass (or virtual epoch), or begin the next one if it is over."""

    def is_over(self) -> bool:
        """Whether the loop is over; only where ``knows_end``."""

    def take(self) -> Result | None:
        """What comes next for this rank; None: the loop is over. Taken again without ``advance``, it is the same."""

    def follow(self, step: tuple[int, int] | None) -> None:
        """Take what a peer has taken at its ``step``; None: the peer's loop is over. Only where not ``knows_end``."""

    def advance(self) -> None:
        """What was taken is delivered."""

    def state(self, cursor: Any = None) -> State:
        """A place as plain data.

        Args:
            cursor: that ``cursor`` was at that place; None: where it is now.
        """

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        """The addresses of the samples of a step, for each of some ranks. A step is one at which
        ``position // world_size`` is its number.

        Args:
            pass_number: None: the one that is running.

        Raises:
            UsageError: there is no such step, or nobody knows before it is made.
        """

    def restore(self, state: State | None) -> None:
        """Go to a place; None: to the beginning."""

    def close(self) -> None:
        """Stop the workers. ``take`` starts new ones."""


class _Cursor(Protocol):
    """A frozen dataclass whose default is where a run begins."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def pass_number(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def loop_start(self) -> int: ...

    @property
    def ranks(self) -> int | None: ...


C = TypeVar("C", bound=_Cursor)


class _Plan(Protocol[C]):
    """What is walked through."""

    @property
    def is_endless(self) -> bool: ...

    @property
    def loop_length(self) -> int: ...

    def step(self, cursor: C) -> C:
        """The cursor after one more micro-batch on every rank."""

    def pass_is_over(self, cursor: C) -> bool:
        """Whether no step of the cursor's pass is left."""


class PlanIterator(Generic[C]):
    """What those walks have in common in which every rank knows the whole plan, so that ranks need not talk.

    Args:
        cursor: where it begins.
        config: which rank this is.
        executor: makes the executor, at the first batch.
        ahead: jobs submitted before their turn.
        skip: ``(pass, step)`` of steps that are passed over.

    Attributes:
        dataset: what is planned.
        cursor: where this rank is.
    """

    dataset: _Plan[C]

    def __init__(
        self,
        cursor: C,
        config: WorkerConfig,
        executor: Callable[[], Executor],
        *,
        ahead: int,
        skip: Collection[tuple[int, int]] = (),
    ):
        self.cursor = cursor
        self._reads, self._world, self._skip = config.reads, config.world_size, frozenset(skip)
        self._executor, self._ahead = executor, ahead
        self._prefetcher: Prefetcher | None = None
        self._stepped = cursor, cursor

    @property
    def knows_end(self) -> bool:
        return True

    @property
    def step(self) -> tuple[int, int]:
        return self.cursor.pass_number, self.cursor.position

    def start_loop(self) -> None:
        if self._loop_is_over():
            at_end = self.cursor
            self.cursor = (
                replace(at_end, loop_start=at_end.position)
                if self.dataset.is_endless
                else type(at_end)(pass_number=at_end.pass_number + 1)  # type: ignore[call-arg]  # a dataclass
            )

    def is_over(self) -> bool:
        self.cursor = self._behind_skipped(self.cursor)
        return self._loop_is_over()

    def take(self) -> Result | None:
        if self._reads and self._prefetcher is None:
            # Before anything is planned: workers that are forked should not inherit a thread at work.
            self._prefetcher = Prefetcher(self._executor(), self._ahead)
        if self.is_over():
            return None
        cursor = self.cursor
        self._begin_step()
        if self._prefetcher is None:
            return Result(None)
        following = self._behind_skipped(self._after(cursor))
        return self._prefetcher.take(_place(cursor), _place(following), lambda: self._jobs_from(cursor))

    def _jobs_from(self, cursor: C) -> Iterator[Job]:
        """The jobs of this rank from a cursor to the end of its pass."""
        raise NotImplementedError

    def _begin_step(self) -> None:
        """What else is done at the beginning of a step."""

    def follow(self, step: tuple[int, int] | None) -> None:
        pass  # each rank knows for itself

    def advance(self) -> None:
        self.cursor = self._after(self.cursor)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _go_to(self, dataset: _Plan[C], cursor: C) -> None:
        """Go on at a cursor; perhaps with other jobs."""
        if self._prefetcher is not None and (dataset is not self.dataset or cursor.ranks != self.cursor.ranks):
            self._prefetcher.forget()
        self.dataset, self.cursor = dataset, cursor

    def _after(self, cursor: C) -> C:
        """The cursor behind one; of the last one it is known."""
        before, after = self._stepped
        if before is not cursor or after is cursor:
            after = self.dataset.step(cursor)
            self._stepped = cursor, after
        return after

    def _loop_is_over(self) -> bool:
        """Whether the ``for`` loop that is running ends here."""
        if not self.dataset.is_endless:
            return self.dataset.pass_is_over(self.cursor)
        length = self.dataset.loop_length
        return bool(length) and self.cursor.position - self.cursor.loop_start >= length * self._world

    def _is_skipped(self, pass_number: int, position: int) -> bool:
        return (pass_number, position // self._world) in self._skip

    def _behind_skipped(self, cursor: C) -> C:
        """The first place from ``cursor`` on that is not to be passed over."""
        while self._skip and self._is_skipped(cursor.pass_number, cursor.position):
            if self.dataset.pass_is_over(cursor):
                break
            cursor = self.dataset.step(cursor)
        return cursor


def _place(cursor: _Cursor) -> tuple[int, int]:
    """What of a cursor decides which jobs come next."""
    return cursor.pass_number, cursor.position


def no_such_step(pass_number: int, step: int) -> UsageError:
    """The error where a step is asked for that a run does not have."""
    return UsageError(
        f"there is no step {step} in pass {pass_number}",
        fix="steps are counted from 0 in each pass; an endless stream has pass 0 only",
    )
