"""Sums of the workers' time by stage, and of their reads, added up in the process that gets the batches."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from energon_lite.loading.makers.observers import Times
from energon_lite.storage.files.read_counts import Reads

__all__ = ["STAGES", "WorkSeconds", "WorkSum"]

#: Stages of a job, see :func:`~energon_lite.loading.makers.observers.stage_of`; "other" is time outside of them.
STAGES = ("read", "decode", "hooks", "batch", "other")


class WorkSum(NamedTuple):
    """Sums up to some moment.

    Attributes:
        busy: seconds in which workers made batches.
        timed: the part of ``busy`` that is covered by timed jobs: all jobs but the last ones.
        cpu: the part of ``timed`` in which the worker used the CPU.
        stages: seconds of ``timed``, by stage.
        sent: seconds in which workers packed and sent results.
        received: seconds in which the trainer process received results, and began to copy them to the device.
    """

    busy: float = 0.0
    timed: float = 0.0
    cpu: float = 0.0
    stages: tuple[float, ...] = (0.0,) * len(STAGES)
    sent: float = 0.0
    received: float = 0.0

    def since(self, before: WorkSum) -> WorkSum:
        """Return the difference from an earlier moment."""
        stages = tuple(now - then for now, then in zip(self.stages, before.stages, strict=True))
        return WorkSum(
            self.busy - before.busy,
            self.timed - before.timed,
            self.cpu - before.cpu,
            stages,
            self.sent - before.sent,
            self.received - before.received,
        )

    def by_stage(self) -> dict[str, float]:
        """Return the seconds of all jobs by stage, extrapolated from the timed jobs."""
        scale = self.busy / self.timed if self.timed > 0 else 0.0
        return {stage: seconds * scale for stage, seconds in zip(STAGES, self.stages, strict=True)}


class WorkSeconds:
    """Accumulator of the workers' time.

    Attributes:
        busy: seconds in which workers made batches; the time of a job is added after its report to :meth:`add`.
        received: seconds in which this process received results from workers, and began to copy them to the device.
        reads: what was read.
    """

    def __init__(self) -> None:
        self.busy = self.received = 0.0
        self.reads = Reads()
        self._timed = self._cpu = self._sent = 0.0
        self._steps: Counter[tuple[str, str]] = Counter()  # seconds, by stage and leaf

    def add(self, times: Times) -> None:
        """Add the times of a job. They also stand for the jobs before it that were not timed, but for no later ones: a
        first job that opens files for seconds is not representative of a million others."""
        scale = 1.0 + max(0.0, self.busy - self._timed) / max(1e-9, times.seconds)
        self._timed += times.seconds * scale
        self._cpu += times.cpu_seconds * scale
        self._sent += times.sent
        self.reads += times.reads
        for stage, leaf, seconds in times.steps:
            self._steps[stage, leaf] += seconds * scale  # type: ignore[assignment]

    def sum(self) -> WorkSum:
        """Return the sums up to now."""
        stages = dict.fromkeys(STAGES, 0.0)
        for (stage, _), seconds in list(self._steps.items()):  # another thread may add some meanwhile
            stages[stage] += seconds
        stages["other"] = max(0.0, self._timed - sum(stages.values()))
        return WorkSum(self.busy, self._timed, self._cpu, tuple(stages.values()), self._sent, self.received)

    def by_leaf(self) -> list[dict[str, float | str]]:
        """Return the seconds of each leaf with timed jobs: ``read``, ``decode`` and ``hooks`` (of single samples)."""
        scale = self.busy / self._timed if self._timed > 0 else 0.0
        leaves: dict[str, dict[str, float | str]] = {}
        for (stage, leaf), seconds in sorted(self._steps.items()):
            if leaf != "*":
                own = leaves.setdefault(leaf, {"dataset": leaf, "read": 0.0, "decode": 0.0, "hooks": 0.0})
                own[stage] = seconds * scale
        return list(leaves.values())
