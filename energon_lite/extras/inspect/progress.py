"""Progress of a loader: lines of speed, waiting time and its reason in the log; metrics, and sinks of them.

Sinks are a file with lines of JSON, TensorBoard, and Weights & Biases.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.bottleneck import LIMITS, bottleneck_text
from energon_lite.loading.batch_observer import BatchEvent, BatchObserver, MetricsReports, ObservedRank
from energon_lite.storage.files.atomic_file import write_bytes

logger = logging.getLogger(__name__)

#: Entries of the statistics that are plain numbers.
_PLAIN = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "wait_seconds", "bytes_read", "worker_deaths")
#: Counters of which reports show the growth.
_COUNTERS = ("time", "samples", "tokens", "wait_seconds")


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


class _Reporter(BatchObserver):
    """Base class of observers that report what was done since their last report."""

    _batches = 0
    _now = 0.0  # time of the last delivery
    _last: dict[str, float] | None = None  # counters at the last report

    def on_batch(self, event: BatchEvent) -> None:
        self._batches = event.batches
        self._now = event.delivered

    def _growth(self, stats: Mapping[str, Any]) -> dict[str, float] | None:
        """Return the growth of the time and of the counters since the last report; None: this is the first."""
        now = {name: self._now if name == "time" else stats[name] for name in _COUNTERS}
        last, self._last = self._last, now
        return None if last is None else {name: now[name] - last[name] for name in _COUNTERS}


class ProgressLog(_Reporter):
    """Observer that logs a line on the progress since the last one.

    Args:
        every: batches between two lines.
        observed: not used.

    Raises:
        UsageError: ``every`` is negative.
    """

    def __init__(self, every: int, observed: ObservedRank):
        if every < 0:
            raise UsageError(f"log_every is {every}", fix="give a number of batches, or 0 for no lines")
        self.stats_every = every

    def on_batch(self, event: BatchEvent) -> None:
        super().on_batch(event)
        if self._last is None:
            self._last = {**dict.fromkeys(_COUNTERS, 0), "time": event.asked}

    def on_stats(self, stats: dict[str, Any]) -> None:
        growth = self._growth(stats)
        assert growth is not None
        seconds = max(1e-9, growth["time"])
        limits = stats["bottleneck"]
        queue = stats["queue"]
        deaths = stats["worker_deaths"]
        parts = [
            f"batch {self._batches:,}: {growth['samples'] / seconds:,.1f} samples/s",
            f"{growth['tokens'] / seconds:,.0f} tokens/s" if stats["tokens"] else "",
            f"waited {100 * growth['wait_seconds'] / seconds:.1f} % of the time",
            bottleneck_text(limits) if limits is not None else "",
            f"{queue['ready']} ready, {queue['pending']} pending, {queue['bytes_in_flight'] / (1 << 20):.1f} MiB in "
            "flight",
            f"{stats['skipped']} skipped" if stats["skipped"] else "",
            f"{stats['failed']} failed" if stats["failed"] else "",
            f"{deaths} workers died" if deaths else "",
        ]
        logger.info("%s", "; ".join(part for part in parts if part))


class MetricsWriter(_Reporter):
    """Observer that writes metrics to sinks. A sink that fails is left out from then on.

    Args:
        reports: the sinks, and the batches between two writes.
        observed: not used.
    """

    def __init__(self, reports: MetricsReports, observed: ObservedRank):
        self.stats_every = reports.every
        self._sinks = [*reports.sinks]

    def on_stats(self, stats: dict[str, Any]) -> None:
        values, growth = loader_metrics(stats), self._growth(stats)
        if growth is not None and growth["time"] > 0:
            values["loader/samples_per_second"] = growth["samples"] / growth["time"]
        for sink in list(self._sinks):
            try:
                sink.write(values)
            except Exception as error:  # a run must not fail because of metrics
                self._sinks.remove(sink)
                logger.warning("%s cannot be written to, and is left out from now on: %s", type(sink).__name__, error)


# -- sinks -----------------------------------------------------------------------------------------------------------


class MetricsFile:
    """A file with a JSON object per line. A resumed run continues after the step it resumed from.

    Args:
        path: the file; created, with its folder, if missing.
        after: the last step that counts. Lines of later steps, which the run will repeat, and a line truncated by a
            crash are dropped. None: all lines are kept.

    Example:
        >>> with MetricsFile("output/metrics.jsonl", after=0) as metrics:
        ...     metrics.write({"step": 1, "loss": 5.5})
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if after is not None and path.exists():
            last = after or -1  # an evaluation before the first step is repeated, too
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= last]
            write_bytes(os.fspath(path), "".join(f"{line}\n" for line in kept).encode())
        self._stream = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line. Floats keep all their digits; NaN and infinity become null, as JSON has neither."""
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        self._stream.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _step_of(line: str) -> float:
    try:
        step: float = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step


class TensorBoardFolder:
    """Numbers for TensorBoard. A resumed run continues after the step it resumed from.

    Args:
        path: the folder; created if missing.
        after: the last step that counts; TensorBoard discards later ones. None: it keeps all.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            fix = "pip install tensorboard, or leave it out (of a trainer: train.tensorboard=false)"
            raise UsageError("tensorboard is not installed", fix=fix) from None
        self._writer = SummaryWriter(os.fspath(path), purge_step=None if after is None else after + 1 if after else 0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append numbers; other values are skipped."""
        for name, value in values.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """Numbers for Weights & Biases. A resumed run continues there; of a repeated step, the first numbers are kept.

    Args:
        folder: folder of wandb's files; the run's id, for resuming, is in ``wandb-id`` in it.
        settings: arguments of ``wandb.init``, for example ``{project: captions, mode: offline}``.
        config: configuration of the run, as shown there.

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: Mapping[str, Any], config: Mapping[str, Any] | None = None
    ):
        try:
            import wandb
        except ImportError:
            fix = "pip install 'energon-lite[wandb]', or leave it out (of a trainer: train.wandb)"
            raise UsageError("wandb is not installed", fix=fix) from None
        name = Path(folder, "wandb-id")
        if not name.exists():
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text(uuid.uuid4().hex[:8])
        given = {"id": name.read_text(), "resume": "allow", "dir": os.fspath(folder), **settings}
        self._run = wandb.init(config=dict(config or {}), **given)

    def write(self, values: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def close(self) -> None:
        self._run.finish()
