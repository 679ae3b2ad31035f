"""Metrics of a loader: its statistics as numbers by name, for sinks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["LIMITS", "loader_metrics"]

#: Possible bottlenecks of a run.
LIMITS = ("storage", "decoding", "hooks", "transport", "trainer")
#: Entries of the statistics that are plain numbers.
_PLAIN = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "wait_seconds", "bytes_read", "worker_deaths")


def loader_metrics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of ``loader.stats()``, for a :class:`~energon_lite.loading.MetricsSink`.

    Names begin with ``loader/``; after a second slash comes a stage, a data set, or a bottleneck. ``step`` is the
    number of batches, ``time`` that of seconds since 1970.

    Args:
        stats: statistics of the loader.

    Example:
        >>> loader_metrics(loader.stats())["loader/stage_seconds/decode"]
        12.25
    """
    values: dict[str, Any] = {"step": stats["batches"], "time": time.time()}
    values |= {f"loader/{name}": stats[name] for name in _PLAIN}
    values["loader/fallbacks"] = sum(stats["fallbacks"].values())
    values |= {f"loader/queue_{name}": value for name, value in stats["queue"].items()}
    values |= {f"loader/cache_{name}": value for name, value in stats["cache"].items()}
    values |= {f"loader/stage_seconds/{name}": seconds for name, seconds in stats["stage_seconds"].items()}
    for entry in stats["dataset_seconds"]:
        values |= {f"loader/{stage}_seconds/{entry['dataset']}": entry[stage] for stage in ("read", "decode", "hooks")}
    for entry in stats["datasets"]:
        name = f"loader/dataset_samples/{entry['dataset']}"
        values[name] = values.get(name, 0) + entry["samples"]
    bottleneck = stats["bottleneck"]
    if bottleneck is not None:
        values["loader/waited"] = bottleneck["waited"]
        values |= {f"loader/bottleneck/{name}": int(name == bottleneck["limit"]) for name in LIMITS}
    return values
