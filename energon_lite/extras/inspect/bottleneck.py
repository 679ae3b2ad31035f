"""Bottleneck of a run: storage, decoding, hooks, transport, or the trainer, by the workers' time in each stage."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energon_lite.hooks import own_hooks
from energon_lite.loading.batch_observer import BatchEvent, BatchObserver, ObservedRank
from energon_lite.loading.executors.executor import WorkSum
from energon_lite.loading.makers.leaf import reads_ahead
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.topology import usable_cores

logger = logging.getLogger(__name__)

#: Possible bottlenecks of a run.
LIMITS = ("storage", "decoding", "hooks", "transport", "trainer")
#: Seconds between two marks; the bottleneck is that of the time since the mark before the last.
_WINDOW = 30.0
#: Share of the time spent waiting below which the loader is not the bottleneck.
_WAITED = 0.1
#: Smallest number of batches in a stretch for a decision.
_LEAST_BATCHES = 5
#: Share of CPU time in the work from which on it needs more cores, not only more workers.
_ON_CPU = 0.5
#: Safety factor for the variation between batches.
_ROOM = 1.1


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


@dataclass(frozen=True)
class Stretch:
    """Measurements of a stretch of a run; also those since the start of the loader, of which two give a stretch.

    Args:
        batches: number of batches delivered.
        seconds: duration, or time.
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
    if stretch.batches < _LEAST_BATCHES or stretch.seconds <= 0.0:
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
        smaller = "smaller batches, or smaller types in them (bytes for pixels)"
        if not setup.workers:
            return f"num_workers: 0 -> 1, which makes batches while the trainer computes, or {smaller}"
        is_thread = setup.start_method == "thread"
        return smaller if is_thread else f"{smaller}, or start_method='thread', which shares memory"
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
    cheaper = "`image_size`, fewer parts" if limit == "decoding" else "`energon-lite trace` names the slow samples"
    return f"less work ({cheaper}), or more cores: all {setup.cores} are busy"


def _more_workers(stretch: Stretch, setup: LoaderSetup) -> str:
    """Return the advice for the number of workers that keeps up with the trainer; "" if there are no cores for more."""
    now = setup.workers
    trainer = stretch.seconds - stretch.waited
    work = stretch.work.busy + stretch.work.sent
    most = max(2, 2 * now)  # in steps: with more workers, the bottleneck may be another one
    wanted = most if trainer * most < work else min(most, max(now + 1, math.ceil(_ROOM * work / trainer)))
    if _on_cpu(stretch):
        wanted = min(wanted, setup.cores)
    if wanted <= now:
        return ""
    return f"num_workers: 0 -> {wanted}" if not now else f"more workers: {now} -> {wanted}"


def _on_cpu(stretch: Stretch) -> bool:
    return stretch.work.cpu >= _ON_CPU * stretch.work.timed


def setup_of(observed: ObservedRank) -> LoaderSetup:
    """Return the properties of a loader that the advice depends on."""
    runner = observed.runner
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return LoaderSetup(
        observed.num_workers,
        observed.start_method,
        max(1, usable_cores() // max(1, ranks_here)),
        reads_ahead=reads_ahead(runner.leaves),
        can_read_ahead=any(isinstance(leaf.source, WebdatasetSource) for leaf in runner.leaves),
        own_batch=not own_hooks(runner.encoder).isdisjoint(("batch", "encode_batch")),
        seeded=bool(runner.seeded_hooks),
    )


class Bottleneck(BatchObserver):
    """Observer of every loader that finds its bottleneck in the last half minute or so.

    Args:
        argument: not used.
        observed: the rank, its workers and their time.
    """

    name = "bottleneck"

    def __init__(self, argument: object, observed: ObservedRank):
        self._work = observed.work
        self._setup = setup_of(observed)
        self._batches = 0
        self._wait_seconds = 0.0
        self._now = 0.0  # time of the last delivery
        self._older = self._newer = Stretch(0, -math.inf, 0.0, WorkSum())

    def on_batch(self, event: BatchEvent) -> None:
        self._now = now = event.delivered
        self._batches = batches = event.batches
        self._wait_seconds = event.wait_seconds
        if now - self._newer.seconds > _WINDOW and batches not in range(2, self._newer.batches + _LEAST_BATCHES):
            # The first batch includes the start of workers and the opening of files, so it is not representative.
            mark = self._mark()
            self._older = self._newer if batches > 1 else mark
            self._newer = mark

    def stats(self) -> dict[str, Any] | None:
        """Return the bottleneck as plain data, see :func:`bottleneck`; None: too little is known."""
        now = self._mark()
        older = self._older
        if not math.isfinite(older.seconds):
            return None
        work = now.work.since(older.work)
        if work.timed <= 0:  # no job was timed since, so the times of earlier jobs are used
            work = now.work._replace(busy=work.busy, sent=work.sent, received=work.received)
        waited, seconds = now.waited - older.waited, now.seconds - older.seconds
        return bottleneck(Stretch(now.batches - older.batches, seconds, waited, work), self._setup)

    def on_close(self) -> None:
        """Log a line about the bottleneck if the wait was long."""
        limits = self.stats()
        if limits is not None and limits["limit"] != "trainer":
            waited = 100 * limits["waited"]
            logger.info(
                "batch %s: waited %.1f %% of the time; %s", f"{self._batches:,}", waited, bottleneck_text(limits)
            )

    def _mark(self) -> Stretch:
        return Stretch(self._batches, self._now, self._wait_seconds, self._work.sum())
