"""Settings of a loader, and how fast it was with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Setting", "Speed"]


@dataclass(frozen=True, order=True)
class Setting:
    """What is tried.

    Args:
        workers: of a rank; 0: the trainer's process does the work.
        prefetch: batches that each worker is ahead.
        start_method: of the workers.
    """

    workers: int
    prefetch: int = 2
    start_method: str = "fork"

    def __str__(self) -> str:
        if not self.workers:
            return "no workers"
        kind = "thread" if self.start_method == "thread" else "worker"
        return f"{self.workers} {kind}{'s' * (self.workers > 1)}" + (
            f", {self.prefetch} ahead" if self.prefetch != 2 else ""
        )

    @property
    def kind(self) -> str:
        """Of the workers: ``thread`` or ``process``."""
        return "thread" if self.start_method == "thread" else "process"


@dataclass(frozen=True)
class Speed:
    """What came of it.

    Args:
        setting: what was tried.
        samples: in a second; 0: it could not be run.
        batches: in a second.
        memory: bytes of the process and its workers together, what they share counted once; 0: nobody knows.
        limit: what the loader was limited by, as in ``loader.stats()["bottleneck"]``.
        error: why it could not be run.
    """

    setting: Setting
    samples: float
    batches: float = 0.0
    memory: int = 0
    limit: dict[str, Any] | None = None
    error: str = ""
