"""``energon-lite tune``: find the number and kind of workers with which a data set is loaded fastest on a machine."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from energon_lite.cli import aligned, batching_argument, make_task_encoder, parse_bytes
from energon_lite.documents.paths import local_path
from energon_lite.errors import UsageError, counted
from energon_lite.extras.inspect.tuning import Bounds, Setting, Speed, Tuning, tune
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.options import Reading
from energon_lite.loading.recipes import get_savable_loader, get_train_dataset
from energon_lite.topology import usable_cores
from energon_lite.worker_config import WorkerConfig

_COUNT = click.IntRange(min=1)
#: Most settings to try in the given time.
_TRIES = 16
#: Share of the free memory that a loader may use.
_MEMORY = 0.8
#: Relative difference of measurements above which the machine is busy, or measurements are too short.
_QUIET = 0.15
#: Most workers for each core: if hooks wait for something, more workers than cores may pay.
_PER_CORE = 4


@click.command(name="tune", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path())
@click.option("--task-encoder", default="", metavar="MODULE:CLASS", help="Your hooks.  [default: none]")
@click.option("--batch-size", type=_COUNT, help="Samples in a batch.  [default: 8, without --batching]")
@click.option("--packing-buffer-size", type=_COUNT, help="As in get_train_dataset.")
@click.option("--batching", help="Batches by tokens: a YAML file, or a strategy such as best_fit:capacity=8192.")
@click.option("--shuffle-buffer-size", type=_COUNT, help="As in get_train_dataset.")
@click.option("--max-samples-per-sequence", type=_COUNT, help="As in get_train_dataset.")
@click.option("--trust-code", is_flag=True, help="Allow the files to name Python code that is run.")
@click.option(
    "--step-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of your training for a batch, to find the fewest workers that keep up.",
)
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Total time to measure.")
@click.option("--ranks", type=_COUNT, default=1, show_default=True, help="Ranks that share this machine.")
@click.option("--most-workers", type=_COUNT, help="Most workers of a rank.  [default: 4 for each of its cores]")
@click.option("--memory-limit", help="Memory of a rank with its workers, such as 6G.  [default: 80 % of what is free]")
@click.option("--threads/--no-threads", default=True, help="Try threads, too.")
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON.")
def command(path: str, as_json: bool, **asked: Any) -> None:
    """Measure how fast the data set or blend PATH is loaded on this machine, and propose workers for it.

    It is loaded with increasing numbers of workers, as processes and as threads, with more or fewer batches ahead, for
    a few seconds each, and a minute in total. No trainer runs meanwhile, so stop other programs on the machine.
    Settings above the memory limit are not proposed, and larger ones not tried. Of settings that are about equally
    fast, the one with the fewest workers is proposed.

    \b
    Examples:
      energon-lite tune data/coco --task-encoder train:Captions --batch-size 32
      energon-lite tune blend.yaml --task-encoder train:Captions --step-seconds 0.4
    """
    cores = max(1, usable_cores() // asked["ranks"])
    limit = _memory_limit(asked["memory_limit"], asked["ranks"])
    bounds = Bounds(
        workers=asked["most_workers"] or _PER_CORE * cores,
        seconds=asked["seconds"],
        memory=limit,
        batches=None if asked["step_seconds"] is None else 1 / asked["step_seconds"],
        threads=asked["threads"],
    )
    names = ("batch_size", "packing_buffer_size", "batching", "shuffle_buffer_size", "max_samples_per_sequence")
    options = {name: asked[name] for name in names if asked[name] is not None}
    if "batching" in options:
        options["batching"] = batching_argument(options["batching"])
    else:
        options.setdefault("batch_size", 8)

    def make(workers: int) -> SavableDataset:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        # Hooks may have state: each loader gets an encoder of its own.
        encoder = make_task_encoder(asked["task_encoder"]) if asked["task_encoder"] else None
        reading = Reading(trust_code=asked["trust_code"] or None)
        return get_train_dataset(
            local_path(path), task_encoder=encoder, worker_config=config, reading=reading, **options
        )

    def tell(text: object) -> None:
        if not as_json:
            click.echo(text)

    free = "an unknown amount of memory" if limit is None else f"{_gib(limit)} GiB of memory"
    tell(f"{path}: {counted(cores, 'core')} and {free} for a rank")
    measure = LoaderSpeed(make, bounds.seconds / _TRIES / 2)
    tuning = tune(measure, bounds, tell=lambda speed: tell(f"  {_line(speed)}"))
    click.echo(json.dumps(_plain(tuning), indent=1) if as_json else _report(tuning, bounds))


def _report(found: Tuning, bounds: Bounds) -> str:
    best, alone = found.best, found.speeds[0]
    assert best is not None
    rows = [[str(speed.setting), f"{speed.samples:,.1f}", _memory(speed), speed.error] for speed in found.all()]
    rows += [[str(setting), "", "", why] for setting, why in found.left_out.items()]
    setting, more, times = best.setting, "", ""
    if setting.workers:
        more = f", prefetch_factor={setting.prefetch}, start_method={setting.start_method!r}"
        times = f", {best.samples / alone.samples:.1f} times as fast as without workers"
    proposal = f"num_workers={setting.workers}{more}: {best.samples:,.1f} samples/s{times}; {_memory(best)}"
    text = ["", *aligned([["", "samples/s", "memory", ""], *rows]), "", proposal]
    if bounds.batches is not None and best.batches < bounds.batches:
        short = best.batches / bounds.batches
        text.append(f"That is {100 * short:.0f} % of what the training could take: the loader will be the limit.")
    if best.limit is not None and best.limit["limit"] != "trainer":
        text.append(f"The loader is then limited by {best.limit['limit']}.")
    if found.spread > _QUIET:
        text.append(
            f"Measurements of the same setting differed by {100 * found.spread:.0f} %: others use this machine, or "
            "a few samples take much longer than the rest. Stop other programs, or give more --seconds, and try again."
        )
    return "\n".join(text)


def _plain(found: Tuning) -> dict[str, Any]:
    return {
        "best": None if found.best is None else asdict(found.best),
        "measured": [asdict(speed) for speed in found.speeds],
        "left_out": [{"setting": asdict(setting), "why": why} for setting, why in found.left_out.items()],
    }


def _line(speed: Speed) -> str:
    if not speed.samples:
        return f"{speed.setting}: {speed.error}"
    return f"{speed.setting}: {speed.samples:,.1f} samples/s, {_memory(speed)}"


def _memory(speed: Speed) -> str:
    return f"{_gib(speed.memory)} GiB" if speed.memory else "?"


def _memory_limit(text: str | None, ranks: int) -> int | None:
    """Memory of a rank, in bytes; None: unknown.

    Raises:
        UsageError: the text is no amount of memory, or no memory is free.
    """
    if text is not None:
        return parse_bytes(text)
    free = available_memory()
    if free == 0:
        raise UsageError("no memory is free", fix="stop something, or give --memory-limit")
    return None if free is None else int(_MEMORY * free / ranks)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f}"


# -- measurements ---------------------------------------------------------------------------------------------------

#: Share of a measurement's seconds that is spent on warming up.
_START = 0.25
#: The fewest batches per worker in a measurement, and the factor of its seconds that it may take to get them.
_BATCHES = 6
_LONGER = 2.5


class LoaderSpeed:
    """Measures settings one after the other. Each continues in the data where the previous one stopped.

    Args:
        make_dataset: function from a number of workers to a data set.
        seconds: seconds per setting; longer if batches are slow.

    Example:
        >>> measure = LoaderSpeed(lambda workers: get_train_dataset(path, worker_config=config_of(workers), ...), 2.0)
        >>> measure(Setting(workers=4)).samples
        1204.3
    """

    def __init__(self, make_dataset: Callable[[int], SavableDataset], seconds: float):
        self._make = make_dataset
        self._seconds = seconds
        self._state: Any = None

    def __call__(self, setting: Setting) -> Speed:
        """Measure a setting. One that the data set or its hooks do not support has no speed, but an error.

        Raises:
            EnergonLiteError: the data set cannot be loaded at all.
        """
        dataset = self._make(setting.workers)
        try:
            loader = get_savable_loader(dataset, prefetch_factor=setting.prefetch, start_method=setting.start_method)
        except UsageError as error:
            if not setting.workers:
                raise
            return Speed(setting, 0.0, error=error.what)
        with loader:
            if self._state is not None:
                loader.restore_state_rank(self._state)
            batches = self._endless(loader)
            next(batches)
            began, count = time.monotonic(), 0
            # Batches that are ready already arrive faster than they are made.
            ready = setting.workers * (setting.prefetch + 1)
            while count < ready or time.monotonic() - began < _START * self._seconds:
                next(batches)
                count += 1
            times, samples = self._times(loader, batches, setting)
            stats, memory = loader.stats(), memory_of(os.getpid())
            self._state = loader.save_state_rank()
        slope = _slope(times, 3 * max(1, setting.workers))
        return Speed(setting, slope * samples / (len(times) - 1), slope, memory, stats["bottleneck"])

    def _times(self, loader: Any, batches: Iterator[Any], setting: Setting) -> tuple[list[float], int]:
        """Return the arrival times of batches, and the number of samples in all but the first."""
        before, began = loader.stats()["samples"], time.monotonic()
        times, wanted = [began], max(4, _BATCHES * setting.workers)
        while (seconds := times[-1] - began) < self._seconds * _LONGER:
            if seconds >= self._seconds and len(times) > wanted:
                break
            next(batches)
            times.append(time.monotonic())
        while len(times) < 3:
            next(batches)
            times.append(time.monotonic())
        return times, loader.stats()["samples"] - before

    @staticmethod
    def _endless(loader: Any) -> Iterator[Any]:
        while True:
            before = loader.stats()["batches"]
            yield from loader
            if loader.stats()["batches"] == before:
                raise UsageError("the data set has no batch", fix="use smaller batches, or more data")


def _slope(times: Sequence[float], least: int) -> float:
    """Return batches per second: the slope of their number, because batches of several workers arrive in bursts.

    With ``least`` batches in each third, the median of the thirds excludes a temporary load of the machine.
    """
    parts = np.array_split(np.array(times), 3 if len(times) >= 3 * max(4, least) else 1)
    return float(np.median([np.polyfit(part, np.arange(len(part)), 1)[0] for part in parts]))


#: Files with a container's memory limit and usage, for both versions of control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def memory_of(process: int) -> int:
    """Return the bytes of a process and its children, with shared memory counted once; 0 if unknown."""
    return sum(map(_own_memory, _tree(process)))


def available_memory() -> int | None:
    """Return the bytes that this machine, or container, has left; None if unknown."""
    limits = []
    with suppress(OSError, TypeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        limits.append(1024 * int(re.search(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)[1]))  # type: ignore[index]
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(limits, default=None)


def _tree(process: int) -> Iterator[int]:
    yield process
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):
                for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                    yield from _tree(int(child))


def _own_memory(process: int) -> int:
    with suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii", errors="replace")
        return 1024 * sum(int(size) for size in re.findall(r"^Pss:\s*(\d+)", text, re.MULTILINE))
    return 0
