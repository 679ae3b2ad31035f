"""What a loader says of itself, as numbers by name, for those who draw them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["LIMITS", "loader_metrics"]

#: What a run may be limited by.
LIMITS = ("storage", "decoding", "hooks", "transport", "trainer")
#: Entries of the statistics that are numbers already.
_PLAIN = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "wait_seconds", "bytes_read", "worker_deaths")


def loader_metrics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of ``loader.stats()``, for a :class:`~energon_lite.loading.MetricsSink`.

    Names begin with ``loader/``; behind a second slash is what it is about: a stage, a data set, a limit. ``step`` is
    the number of batches, ``time`` that of seconds since 1970.

    Args:
        stats: of the loader.

    Example:
        >>> loader_metrics(loader.stats())["loader/stage_seconds/decode"]
        12.25
    """
    values: dict[str, Any] = {"step": stats["batches"], "time": time.time()}
    values |= {f"loader/{name}": stats[name] for name in _PLAIN}
    values |= {f"loader/queue_{name}": value for name, value in stats["queue"].items()}
    values |= {f"loader/cache_{name}": value for name, value in stats["cache"].items()}
    values |= {f"loader/stage_seconds/{name}": seconds for name, seconds in stats["stage_seconds"].items()}
    for one in stats["dataset_seconds"]:
        values |= {f"loader/{stage}_seconds/{one['dataset']}": one[stage] for stage in ("read", "decode", "hooks")}
    for one in stats["datasets"]:
        name = f"loader/dataset_samples/{one['dataset']}"
        values[name] = values.get(name, 0) + one["samples"]
    found = stats["bottleneck"]
    if found is not None:
        values["loader/waited"] = found["waited"]
        values |= {f"loader/bottleneck/{name}": int(name == found["limit"]) for name in LIMITS}
    return values
