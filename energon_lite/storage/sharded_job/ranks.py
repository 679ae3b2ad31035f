"""Ranks: processes that do one job together, their shares, and how they wait for each other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from energon_lite.errors import DatasetError, UsageError
from energon_lite.topology import launched_place

T = TypeVar("T")

#: Seconds between two checks of the results of other ranks.
_LOOK = 0.2


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those that work together.

    Args:
        rank: 0 .. world_size - 1.
        world_size: number of processes; each does its share, and rank 0 combines the results.
        timeout: seconds that rank 0 waits without any progress of the others.
        elsewhere: option of a :class:`~energon_lite.entry_points.UnitRunner`, and its value, by which this rank's
            share is done elsewhere, not in processes here.

    Example:
        >>> Ranks(rank=1, world_size=3).share(["a", "b", "c", "d", "e"])
        ['b', 'e']
    """

    rank: int = 0
    world_size: int = 1
    timeout: float = 600.0
    elsewhere: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} does not exist", fix="ranks are 0 .. world size - 1"
            )

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read rank and world size from the variables of a launcher, such as ``torchrun``; by default one process."""
        place = launched_place()
        return cls() if place is None else cls(place.rank, place.world_size)

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this rank's share: every ``world_size``-th item."""
        return list(items[self.rank :: self.world_size])

    def seen(self, items: Sequence[T]) -> list[T]:
        """Return the items that this rank reports on: its share; on rank 0 all items."""
        return self.share(items) if self.rank else list(items)

    def workers(self, asked: int | None) -> int:
        """Return the processes of this rank: ``asked``; if None, an equal share of the machine's cores. It is 0, which
        stands for the process that runs a unit, if units are done elsewhere."""
        if self.elsewhere is not None:
            return 0
        if asked is not None:
            return asked
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.world_size > 1 else 1
        return max(1, (os.cpu_count() or 1) // here)

    def wait(self, is_done: Callable[[], bool], progress: Callable[[], object] = lambda: None) -> bool:
        """Wait for other ranks; return False if ``progress`` returns the same value for ``timeout`` seconds."""
        last, seen = time.monotonic(), progress()
        while not is_done():
            if progress() != seen:
                last, seen = time.monotonic(), progress()
            if time.monotonic() - last > self.timeout:
                return False
            time.sleep(_LOOK)
        return True

    @property
    def grouped(self) -> bool:
        """True if these ranks are a group of ``torch.distributed``, which detects finished and dead ranks."""
        # Without an imported torch there is no group, and importing it takes longer than most preparations.
        torch = sys.modules.get("torch")
        if self.world_size == 1 or torch is None or not torch.distributed.is_available():
            return False
        dist = torch.distributed
        return bool(dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world_size))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block as a common step of all ranks of a group: all wait for the last one, and if one fails, all
        fail. Without a group no rank waits.

        Raises:
            DatasetError: another rank failed.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            if self.grouped and (failure is None or isinstance(failure, Exception)):
                self._meet(failure)

    def _meet(self, failure: BaseException | None) -> None:
        words: list[str | None] = [None] * self.world_size
        sys.modules["torch"].distributed.all_gather_object(words, None if failure is None else str(failure))
        failed = {rank: text for rank, text in enumerate(words) if text is not None}
        if failed and failure is None:
            rank, text = min(failed.items())
            raise DatasetError(f"rank {rank} could not do its part: {text}")
