"""Statistics of all data-parallel ranks together. They are only gathered on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.loading.iterators.collectives import check_group, gather_plain, is_running
from energon_lite.worker_config import WorkerConfig

__all__ = ["gathered_stats"]

#: Counts that are added up.
_SUMS = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "bytes_read", "worker_deaths")


def gathered_stats(own: Mapping[str, Any], config: WorkerConfig) -> dict[str, Any]:
    """Return the statistics of all ranks, on each rank. A collective.

    Args:
        own: statistics of this rank.
        config: rank and world size of this process.

    Raises:
        UsageError: there is no process group.
        TopologyError: the group has another number of ranks.
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
    waits = [stats["wait_seconds"] for stats in ranks]
    slowest = max(range(len(waits)), key=waits.__getitem__)
    return {
        **{name: sum(stats[name] for stats in ranks) for name in _SUMS},
        "fallbacks": dict(sum((Counter(stats["fallbacks"]) for stats in ranks), Counter[str]())),
        "wait_seconds": waits[slowest],
        "wait_seconds_mean": sum(waits) / len(waits),
        "wait_rank": slowest,
        "bottleneck": ranks[slowest]["bottleneck"],
        "ranks": ranks,
    }
