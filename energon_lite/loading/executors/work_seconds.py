"""Sums of the workers' time by stage, and of their reads, added up in the process that gets the batches; and the
bottleneck of a run that these sums show: storage, decoding, hooks, transport, or the trainer.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from energon_lite.loading.makers.observers import Times
from energon_lite.storage.files.shard_store import Reads

__all__ = [
    "LEAST_BATCHES",
    "STAGES",
    "LoaderSetup",
    "Stretch",
    "WorkSeconds",
    "WorkSum",
    "bottleneck",
    "bottleneck_text",
    "usable_cores",
]

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


#: Share of the time spent waiting below which the loader is not the bottleneck.
_WAITED = 0.1
#: Smallest number of batches in a stretch for a decision.
LEAST_BATCHES = 5
#: Share of CPU time in the work from which on it needs more cores, not only more workers.
_ON_CPU = 0.5
#: Safety factor for the variation between batches.
_ROOM = 1.1


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LoaderSetup:
    """Properties of a loader that the advice depends on.

    Args:
        workers: number of processes, or of threads; 0: the trainer process does the work.
        start_method: start method of the workers.
        cores: number of cores that this process may use.
        reads_ahead: samples are read through :class:`~energon_lite.ReadAhead`.
        can_read_ahead: samples could be read that way.
        own_batch: the user's code makes batches.
        seeded: hooks use the global random generators: threads run such hooks one at a time.
    """

    workers: int
    start_method: str = "fork"
    cores: int = 1
    reads_ahead: bool = False
    can_read_ahead: bool = False
    own_batch: bool = False
    seeded: bool = False

    @property
    def has_processes(self) -> bool:
        """True if batches come from other processes."""
        return self.workers > 0 and self.start_method != "thread"


@dataclass(frozen=True)
class Stretch:
    """Measurements of a stretch of a run.

    Args:
        batches: number of batches delivered.
        seconds: duration.
        waited: the part of ``seconds`` that was spent in ``next()``.
        work: work of the workers in that time.
    """

    batches: int
    seconds: float
    waited: float
    work: WorkSum


def bottleneck(stretch: Stretch, setup: LoaderSetup) -> dict[str, object] | None:
    """Return the bottleneck of a run, as plain data; None: too little is known yet.

    ``limit``: ``storage``, ``decoding``, ``hooks``, ``transport`` (batches are put together, pickled, and copied), or
    ``trainer``; ``waited``: the share of the time that was spent in ``next()``; ``shares``: the share of each of these
    in the loader's work; ``advice``: the setting to change.

    Example:
        >>> bottleneck(stretch, LoaderSetup(workers=2, cores=8))["limit"]
        'decoding'
    """
    if stretch.batches < LEAST_BATCHES or stretch.seconds <= 0.0:
        return None
    waited = min(1.0, stretch.waited / stretch.seconds)
    costs = _costs(stretch, setup)
    total = sum(costs.values())
    shares = {name: round(seconds / total, 4) if total > 0 else 0.0 for name, seconds in costs.items()}
    limits: dict[str, object] = {"limit": "trainer", "waited": round(waited, 4), "shares": shares}
    if waited < _WAITED:
        return limits | {"advice": "nothing: the trainer is the limit"}
    del costs["other"]
    if sum(costs.values()) <= 0:
        return None  # no worker has reported yet
    limit = max(costs, key=lambda name: costs[name])
    return limits | {"limit": limit, "advice": _advice(limit, stretch, setup)}


def bottleneck_text(found: Mapping[str, object]) -> str:
    """Return the bottleneck as one line of text, without the share of waiting."""
    limit = str(found["limit"])
    shares = found["shares"]
    if limit == "trainer":
        return str(found["advice"])
    assert isinstance(shares, dict)
    return f"the limit is {limit} ({100 * shares[limit]:.0f} % of the loader's work): {found['advice']}"


def _costs(stretch: Stretch, setup: LoaderSetup) -> dict[str, float]:
    """Return worker seconds by limit; seconds of the trainer process count for each worker, because all wait for it."""
    work = stretch.work
    stages = stretch.work.by_stage()
    moved = work.sent + work.received * max(1, setup.workers)
    costs = {"storage": stages["read"], "decoding": stages["decode"], "hooks": stages["hooks"], "transport": moved}
    costs["hooks" if setup.own_batch else "transport"] += stages["batch"]
    return costs | {"other": stages["other"]}


def _advice(limit: str, stretch: Stretch, setup: LoaderSetup) -> str:
    more = _more_workers(stretch, setup)
    if limit == "transport":
        return _transport_advice(setup)
    if limit == "storage":
        choices = [more]
        if setup.reads_ahead:
            choices = ["a folder on a local disk for what is read, read_ahead=ReadAhead(folder=...)", more]
        elif setup.can_read_ahead and setup.start_method != "thread":
            choices = [more, "read_ahead=ReadAhead() if the files are on a network"]
        return ", or ".join(filter(None, choices)) or "quicker storage"
    if setup.workers and setup.start_method == "thread":
        if limit == "hooks" and setup.seeded:
            return (
                "start_method='fork', or @stateless(restore_seeds=False) at the hooks: threads run those that use "
                "the global generators one at a time"
            )
        if _on_cpu(stretch) and limit == "hooks":
            return "start_method='fork': Python code in hooks runs in one thread at a time"
    if more:
        return more
    cheaper = "smaller pictures, fewer parts" if limit == "decoding" else "`energon-lite trace` names the slow samples"
    return f"less work ({cheaper}), or more cores: all {setup.cores} are busy"


def _transport_advice(setup: LoaderSetup) -> str:
    smaller = "smaller batches, or smaller types in them (bytes for pixels)"
    if not setup.workers:
        return f"num_workers: 0 -> 1, which makes batches while the trainer computes, or {smaller}"
    if setup.has_processes:
        return f"{smaller}, or start_method='thread', which shares memory"
    return smaller


def _more_workers(stretch: Stretch, setup: LoaderSetup) -> str:
    """Return the advice for the number of workers that keeps up with the trainer; "" if there are no cores for more."""
    now = setup.workers
    trainer = stretch.seconds - stretch.waited
    work = stretch.work.busy + stretch.work.sent
    most = max(2, 2 * now)  # in steps: with more workers, the bottleneck may be another one
    wanted = most if trainer * most < work else min(most, max(now + 1, math.ceil(_ROOM * work / trainer)))
    if _on_cpu(stretch):
        wanted = min(wanted, max(1, setup.cores))
    if wanted <= now:
        return ""
    return f"num_workers: 0 -> {wanted}" if not now else f"more workers: {now} -> {wanted}"


def _on_cpu(stretch: Stretch) -> bool:
    return stretch.work.cpu >= _ON_CPU * stretch.work.timed
