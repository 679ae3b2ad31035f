"""Door for observers of a loader: receivers of an event for each delivered batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.entry_points import load, observers
from energon_lite.errors import UsageError
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Failure, Result

__all__ = ["BatchEvent", "BatchObserver", "ObservedRank", "Observers"]


@dataclass(frozen=True)
class BatchEvent:
    """Record of a delivered batch.

    Args:
        step: number of the pass, and position of the micro-batch in it, ``rank`` included.
        asked: time of the request, in seconds of the monotonic clock.
        delivered: time of the delivery, on the same clock.
        result: the batch with the outcomes of its samples, its digest, and its times if an observer asks for them.
    """

    step: tuple[int, int]
    asked: float
    delivered: float
    result: Result


class BatchObserver:
    """Base class of observers: ``get_savable_loader(dataset, observers=[...])``.

    Attributes:
        name: key of its entry in ``loader.stats()``.
        times_stages: have workers measure the seconds of each stage: ``event.result.trace``.

    Example:
        >>> class Digests(BatchObserver):
        ...     def on_batch(self, event):
        ...         print(event.step, event.result.digest)
    """

    name = ""
    times_stages = False

    def on_batch(self, event: BatchEvent) -> None:
        """Take note of a batch, before the user gets it. The training loop waits for this method."""

    def on_lost(self, lost: Sequence[Failure]) -> None:
        """Take note of samples that were skipped or failed, when the batch after them is counted, or a pass ends."""

    def stats(self) -> dict[str, Any] | None:
        """Return plain data for ``loader.stats()``; None: no entry."""
        return None


@dataclass(frozen=True)
class ObservedRank:
    """Data-parallel rank whose batches an observer sees.

    Args:
        rank, world_size: data-parallel rank and world size.
        leaves: the leaves, in the order's numbering.
        worker_files: files for the observer's lines about single workers; empty: none are wanted.
    """

    rank: int
    world_size: int
    leaves: Sequence[Leaf]
    worker_files: Sequence[str] = ()


class Observers(list[BatchObserver]):
    """Observers of one loader.

    Args:
        given: the user's own.
        observed: the rank; None: it writes no files.
        files: by the name under which a guest has an observer (``trace``, ``quarantine``): its file, or None.

    Raises:
        UsageError: no guest has an observer of this name.
    """

    def __init__(
        self,
        given: Iterable[BatchObserver],
        observed: ObservedRank | None,
        files: Mapping[str, str | os.PathLike[str] | None],
    ):
        super().__init__(given)
        for name, file in files.items() if observed is not None else ():
            if file is not None:
                self.append(load(_target(name, file))(file, observed))
        self.times_stages = any(observer.times_stages for observer in self)

    def on_lost(self, lost: Sequence[Failure]) -> None:
        """Pass lost samples to all observers."""
        for observer in self if lost else ():
            observer.on_lost(lost)

    def stats(self) -> dict[str, Any]:
        """Return the entries of all observers for ``loader.stats()``."""
        return {observer.name: entry for observer in self if (entry := observer.stats()) is not None}


def _target(name: str, file: str | os.PathLike[str]) -> str:
    target = observers().get(name)
    if target is None:
        raise UsageError(
            f"{name}={os.fspath(file)!r}: the observer {name!r} is not installed",
            fix="install energon_lite with its extra ``inspect``, or leave the argument out",
        )
    return target
