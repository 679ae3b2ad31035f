"""Settings of a loader, and their measured speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Setting", "Speed"]


@dataclass(frozen=True, order=True)
class Setting:
    """Worker settings of a loader.

    Args:
        workers: number of workers of a rank; 0: the trainer's process does the work.
        prefetch: batches that each worker loads ahead.
        start_method: start method of the workers.
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
        """Kind of the workers: ``thread`` or ``process``."""
        return "thread" if self.start_method == "thread" else "process"


@dataclass(frozen=True)
class Speed:
    """Measured speed of a setting.

    Args:
        setting: the setting.
        samples: samples per second; 0 if it could not be run.
        batches: batches per second.
        memory: bytes of the process and its workers, with shared memory counted once; 0 if unknown.
        limit: the bottleneck of the loader, as in ``loader.stats()["bottleneck"]``.
        error: reason why it could not be run.
    """

    setting: Setting
    samples: float
    batches: float = 0.0
    memory: int = 0
    limit: dict[str, Any] | None = None
    error: str = ""
