"""What a loader asks of the way of its rank through the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.pipeline import Address, Result

__all__ = ["DatasetIterator"]


class DatasetIterator(Protocol):
    """A place in the run, and what comes next.

    Attributes:
        dataset: what is iterated, in the run that was restored.
        cursor: the place. It is never changed, but replaced.
    """

    dataset: Any
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
        """What comes next for this rank; None: the loop is over. Taken again after an error, it is the same."""

    def follow(self, step: tuple[int, int] | None) -> None:
        """Take what a peer has taken at its ``step``; None: the peer's loop is over. Only where not ``knows_end``."""

    def advance(self) -> None:
        """What was taken is delivered."""

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        """The addresses of the samples of a step, for each of some ranks. A step is one at which
        ``position // world_size`` is its number.

        Args:
            pass_number: None: the one that is running.

        Raises:
            UsageError: there is no such step, or nobody knows before it is made.
        """

    def planned_counts(self) -> dict[str, int] | None:
        """What plans by tokens dropped, truncated and split; None: there are none."""

    def state(self, cursor: Any = None) -> State:
        """A place as plain data.

        Args:
            cursor: that ``cursor`` was at that place; None: where it is now.
        """

    def restore(self, state: State | None) -> None:
        """Go to a place; None: to the beginning."""

    def close(self) -> None:
        """The workers are stopped. ``take`` starts new ones."""
