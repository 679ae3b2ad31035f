"""What a run waits for, decided from sums of seconds: storage, decoding, hooks, transport, or the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from energon_lite.loading.executors.work_seconds import WorkSum

__all__ = ["LEAST_BATCHES", "LoaderSetup", "Stretch", "bottleneck", "bottleneck_text"]

#: A loader that is waited for less than this share of the time is not what holds a run up.
_WAITED = 0.1
#: Batches of a stretch that say something.
LEAST_BATCHES = 5
#: Work that is this share of its time on a processor needs cores, not only workers.
_ON_CPU = 0.5
#: Room for what differs from batch to batch.
_ROOM = 1.1


@dataclass(frozen=True)
class LoaderSetup:
    """What an advice depends on.

    Args:
        workers: processes, or threads; 0: the trainer's process does the work.
        start_method: of the workers.
        cores: that this process may use.
        reads_ahead: samples come through :class:`~energon_lite.ReadAhead`.
        can_read_ahead: they might.
        own_batch: the user's code makes batches.
        seeded: hooks that take the global generators: threads run them one at a time.
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
    """A stretch of a run.

    Args:
        batches: delivered.
        seconds: that it took.
        waited: of these, spent in ``next()``.
        work: what the workers did meanwhile.
    """

    batches: int
    seconds: float
    waited: float
    work: WorkSum


def bottleneck(stretch: Stretch, setup: LoaderSetup) -> dict[str, object] | None:
    """The limit of a run, as plain data; None: too little is known yet.

    ``limit``: ``storage``, ``decoding``, ``hooks``, ``transport`` (batches are put together, pickled, and copied), or
    ``trainer``; ``waited``: the share of the time that was spent in ``next()``; ``shares``: of the loader's work,
    what each of these takes; ``advice``: what to turn.

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
    found: dict[str, object] = {"limit": "trainer", "waited": round(waited, 4), "shares": shares}
    if waited < _WAITED:
        return found | {"advice": "nothing: the trainer is the limit"}
    del costs["other"]
    if sum(costs.values()) <= 0:
        return None  # no worker has said anything
    limit = max(costs, key=lambda name: costs[name])
    return found | {"limit": limit, "advice": _advice(limit, stretch, setup)}


def bottleneck_text(found: Mapping[str, object]) -> str:
    """The same in a line, without the share that was waited."""
    limit = str(found["limit"])
    shares = found["shares"]
    if limit == "trainer":
        return str(found["advice"])
    assert isinstance(shares, dict)
    return f"the limit is {limit} ({100 * shares[limit]:.0f} % of the loader's work): {found['advice']}"


def _costs(stretch: Stretch, setup: LoaderSetup) -> dict[str, float]:
    """Seconds of workers that each limit takes; those of the trainer's process count for all workers, who share it."""
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
    return f"less work ({cheaper}), or more cores: all {setup.cores} are at it"


def _transport_advice(setup: LoaderSetup) -> str:
    smaller = "smaller batches, or smaller types in them (bytes for pixels)"
    if not setup.workers:
        return f"num_workers: 0 -> 1, which puts batches together beside the trainer, or {smaller}"
    if setup.has_processes:
        return f"{smaller}, or start_method='thread', which shares memory"
    return smaller


def _more_workers(stretch: Stretch, setup: LoaderSetup) -> str:
    """How many it takes to keep up with the trainer; "": there are no cores for more."""
    now = setup.workers
    trainer = stretch.seconds - stretch.waited
    work = stretch.work.busy + stretch.work.sent
    most = max(2, 2 * now)  # one step at a time: more of them change what the limit is
    wanted = most if trainer * most < work else min(most, max(now + 1, math.ceil(_ROOM * work / trainer)))
    if _on_cpu(stretch):
        wanted = min(wanted, max(1, setup.cores))
    if wanted <= now:
        return ""
    return f"num_workers: 0 -> {wanted}" if not now else f"more workers: {now} -> {wanted}"


def _on_cpu(stretch: Stretch) -> bool:
    return stretch.work.cpu >= _ON_CPU * stretch.work.timed
