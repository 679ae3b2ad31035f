"""``energon-lite tune``: find the number and kind of workers with which a data set is loaded fastest on a machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import click

from energon_lite.cli import aligned, batching_argument
from energon_lite.cli.text import parse_bytes
from energon_lite.documents.paths import local_path
from energon_lite.errors import UsageError, counted
from energon_lite.extras.inspect.tuning.search import Bounds, Speed, Tuning, tune
from energon_lite.extras.inspect.tuning.trials import Trials, What, available_memory
from energon_lite.loading.executors.work_seconds import usable_cores

__all__ = ["command", "draw_curve"]


#: Colour, marker and label of each kind of workers.
_KINDS = {"process": ("C0", "o", "processes"), "thread": ("C1", "s", "threads")}


def draw_curve(path: str | os.PathLike[str], tuning: Tuning, *, memory: int | None = None, title: str = "") -> None:
    """Plot samples per second, and memory, against the number of workers.

    Args:
        path: path of the picture, whose suffix selects the format.
        tuning: the measurements.
        memory: the limit in bytes; None if there is none.
        title: title of the picture.

    Raises:
        UsageError: matplotlib is not installed, or cannot write this format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib", fix="pip install 'energon-lite[plot]'") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    every = [speed for speed in tuning.all() if speed.samples > 0]
    alone = [speed for speed in every if not speed.setting.workers]
    for kind, (color, marker, name) in _KINDS.items():
        mine = sorted(
            (speed for speed in every if speed.setting.workers and speed.setting.kind == kind),
            key=lambda speed: speed.setting,
        )
        if not mine:
            continue
        usual = [*alone, *(speed for speed in mine if speed.setting.prefetch == 2)]
        workers = [speed.setting.workers for speed in usual]
        left.plot(workers, [speed.samples for speed in usual], color=color, marker=marker, label=name)
        for speed in mine:
            if speed.setting.prefetch != 2:
                left.plot(speed.setting.workers, speed.samples, color=color, marker="x")
                left.annotate(f" {speed.setting.prefetch} ahead", (speed.setting.workers, speed.samples), fontsize=7)
        known = [speed for speed in usual if speed.memory]
        right.plot(
            [speed.setting.workers for speed in known],
            [speed.memory / (1 << 30) for speed in known],
            color=color,
            marker=marker,
        )
    if tuning.best is not None:
        best = tuning.best
        left.plot(best.setting.workers, best.samples, "o", ms=14, mfc="none", mec="C3", mew=2, label="proposed")
    if memory is not None:
        right.axhline(memory / (1 << 30), color="C3", ls="--", label="limit")
        right.legend()
    left.set(xlabel="workers", ylabel="samples/s", title=title)
    right.set(xlabel="workers", ylabel="GiB, of a rank with its workers", title="memory")
    left.legend()
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(lw=0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"the picture cannot be written: {error}", where=path, fix="use .png, .pdf or .svg") from None


#: Number of settings to try in the given time.
_TRIES = 16
#: Share of the free memory that a loader may use.
_MEMORY = 0.8
#: Relative difference of measurements above which the machine is busy, or measurements are too short.
_QUIET = 0.15
#: Workers for each core: if hooks wait for something, more workers than cores may pay.
_PER_CORE = 4


@click.command(name="tune", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path())
@click.option("--task-encoder", default="", metavar="MODULE:CLASS", help="Your hooks.  [default: none]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples in a batch.  [default: 8, without --batching]")
@click.option("--packing-buffer-size", type=click.IntRange(min=1), help="As in get_train_dataset.")
@click.option("--batching", help="Batches by tokens: a YAML file, or a strategy such as best_fit:capacity=8192.")
@click.option("--shuffle-buffer-size", type=click.IntRange(min=1), help="As in get_train_dataset.")
@click.option("--max-samples-per-sequence", type=click.IntRange(min=1), help="As in get_train_dataset.")
@click.option("--trust-code", is_flag=True, help="Allow the files to name Python code that is run.")
@click.option(
    "--step-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of your training for a batch, to find the fewest workers that keep up.",
)
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Total time to measure.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that share this machine."
)
@click.option(
    "--most-workers", type=click.IntRange(min=1), help="Most workers of a rank.  [default: 4 for each of its cores]"
)
@click.option("--memory-limit", help="Memory of a rank with its workers, such as 6G.  [default: 80 % of what is free]")
@click.option("--threads/--no-threads", default=True, help="Try threads, too.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write the curve as a picture: .png, .pdf or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Write what was measured as JSON.")
def command(path: str, as_json: bool, **asked: Any) -> None:
    """Measure how fast the data set or blend PATH is loaded on this machine, and propose workers for it.

    It is loaded with increasing numbers of workers, as processes and as threads, with more or fewer batches ahead, for
    a few seconds each, and a minute in total. No trainer runs meanwhile, so stop other programs on the machine.
    Settings above the memory limit are not proposed. Of settings that are about equally fast, the one with the fewest
    workers is proposed.

    \b
    Examples:
      energon-lite tune data/coco --task-encoder train:Captions --batch-size 32
      energon-lite tune blend.yaml --task-encoder train:Captions --ranks 8 --step-seconds 0.4 --plot tune.png
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
    what = What(local_path(path), asked["task_encoder"], options, asked["trust_code"], bounds.seconds / _TRIES / 2)
    if not as_json:
        free = "an unknown amount of memory" if limit is None else f"{_gib(limit)} GiB of memory"
        click.echo(f"{path}: {counted(cores, 'core')} and {free} for a rank")

    def tell(speed: Speed) -> None:
        if not as_json:
            click.echo("  " + _line(speed))

    with Trials(what, limit) as trials:
        tuning = tune(trials, bounds, tell=tell)
    if asked["plot"] is not None:
        draw_curve(asked["plot"], tuning, memory=limit, title=f"{path}: {counted(cores, 'core')}")
    click.echo(json.dumps(_plain(tuning), indent=1) if as_json else _report(tuning, bounds))


def _report(found: Tuning, bounds: Bounds) -> str:
    best, alone = found.best, found.speeds[0]
    assert best is not None
    rows = [[str(speed.setting), f"{speed.samples:,.1f}", _memory(speed), speed.error] for speed in found.all()]
    rows += [[str(setting), "", "", why] for setting, why in found.left_out.items()]
    text = ["", *aligned([["", "samples/s", "memory", ""], *rows]), ""]
    setting = best.setting
    names = f"num_workers={setting.workers}"
    if setting.workers:
        names += f", prefetch_factor={setting.prefetch}, start_method={setting.start_method!r}"
    times = f", {best.samples / alone.samples:.1f} times as fast as without workers" if setting.workers else ""
    text.append(f"{names}: {best.samples:,.1f} samples/s{times}; {_memory(best)}")
    if bounds.batches is not None and best.batches < bounds.batches:
        short = best.batches / bounds.batches
        text.append(f"That is {100 * short:.0f} % of what the training could take: the loader will be the limit.")
    if best.limit is not None and best.limit["limit"] != "trainer":
        text.append(f"What limits the loader then: {best.limit['limit']}.")
    if found.spread > _QUIET:
        text.append(
            f"Looks at the same setting differed by {100 * found.spread:.0f} %: others use this machine, or a few "
            "samples take much longer than the rest. Stop what else runs on it, or give more --seconds, and try again."
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
