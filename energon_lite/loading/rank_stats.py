"""What happened on all data-parallel ranks together. Nobody asks the others unless the user says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.iterators.collectives import check_group, gather_plain, is_running
from energon_lite.worker_config import WorkerConfig

__all__ = ["gathered_stats"]

#: Counts that are added up.
_SUMS = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "bytes_read", "worker_deaths")


def gathered_stats(own: Mapping[str, Any], config: WorkerConfig) -> dict[str, Any]:
    """The statistics of all ranks, on each. A collective.

    Args:
        own: of this rank.
        config: its place among the others.

    Raises:
        UsageError: there is no process group.
        TopologyError: it has another number of ranks.
    """
    if config.world_size == 1:
        ranks = [dict(own)]
    else:
        if not is_running():
            raise UsageError(
                f"gather_stats on {config.world_size} ranks without a process group to ask the others over",
                fix="call torch.distributed.init_process_group before, or stats(), which is about this rank",
            )
        check_group(world_size=config.world_size, group=config.data_parallel_group)
        ranks = gather_plain(own, group=config.data_parallel_group)
    waits = [one["wait_seconds"] for one in ranks]
    slowest = max(range(len(waits)), key=waits.__getitem__)
    return {
        **{name: sum(one[name] for one in ranks) for name in _SUMS},
        "wait_seconds": waits[slowest],
        "wait_seconds_mean": sum(waits) / len(waits),
        "wait_rank": slowest,
        "bottleneck": ranks[slowest]["bottleneck"],
        "ranks": ranks,
    }
