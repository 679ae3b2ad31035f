"""``energon-lite analyze-debug``: a picture of traces, by the name and with the options that Energon has for it."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import click

from energon_lite.cli import ExistingPath
from energon_lite.errors import UsageError, counted
from energon_lite.extras.inspect.tracing.command import is_trace, read_runs
from energon_lite.extras.inspect.tracing.heat_map import HeatMap

__all__ = ["command"]

#: Lines of Energon's own debug files that have the keys of a batch.
_ENERGON = ("SavableDataLoader.yield", "BasicDataLoader.yield")
_SIZE = click.IntRange(min=2)

#: ``(rank, step, key)``
Sighting = tuple[int, int, str]


@click.command(name="analyze-debug", context_settings={"show_default": True})
@click.argument("log_paths", nargs=-1, required=True, type=ExistingPath())
@click.option("--heatmap-path", type=click.Path(dir_okay=False), default="heatmap.png", help="The picture.")
@click.option("--heatmap-steps", type=_SIZE, default=1000, help="Its width; more steps share a column.")
@click.option("--heatmap-samples", type=_SIZE, default=1000, help="Its height; more samples share a row.")
@click.option("--heatmap-gain", type=float, default=10.0, help="Its brightness.")
@click.option("--force-loading-order", is_flag=True, help="As in Energon; of no effect: samples are loaded as planned.")
@click.option("--include-modality", default="train", help="As in Energon; traces are of one loader each, all are used.")
@click.option("--skip", type=click.IntRange(min=0), default=0, help="Leave out so many steps at the beginning.")
@click.option("--no-colors", is_flag=True, help="Do not tell ranks apart by colours.")
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON.")
def command(log_paths: tuple[str, ...], heatmap_path: str, skip: int, as_json: bool, **asked: Any) -> None:
    """Draw which sample was seen when: LOG_PATHS are traces of loaders, or folders of them (*.jsonl).

    Samples are numbered in the order in which they were first seen: an epoch is a diagonal, the next one is scattered
    as far as the order is shuffled. Debug files that Energon wrote are understood as well. For tables of the same
    traces, and for the times in them, see `energon-lite trace`.
    """
    files = _files(log_paths)
    if not as_json:
        click.echo(f"Analyzing {len(files)} logs")
    seen = sorted(_sightings(files), key=lambda one: one[1])
    first = min((step for _, step, _ in seen), default=0)
    seen = [one for one in seen if one[1] - first >= skip]
    if not seen:
        raise UsageError(f"there is no batch in {', '.join(log_paths)}", fix="trace some steps of a loop first")
    ranks = len({rank for rank, _, _ in seen})
    colours = 1 if asked["no_colors"] else ranks
    picture = HeatMap(asked["heatmap_samples"], asked["heatmap_steps"], colours)
    numbers: dict[str, int] = {}
    for rank, step, key in seen:
        picture.add(numbers.setdefault(key, len(numbers)), step - first, rank)
    last_sample, last_step = picture.save(heatmap_path, asked["heatmap_gain"])
    if as_json:
        found = {"files": len(files), "ranks": ranks, "samples": len(numbers), "sightings": len(seen)}
        click.echo(json.dumps({**found, "steps": last_step + 1, "heatmap": heatmap_path}, indent=2))
        return
    steps = last_step + 1
    click.echo(
        f"Found {counted(len(numbers), 'unique sample key')}, {counted(steps, 'step')}, {counted(ranks, 'rank')}; "
        f"seen {counted(len(seen), 'time')}"
    )
    click.echo(
        f"The picture is in {heatmap_path}: {counted(steps, 'step')} to the right, "
        f"{counted(last_sample + 1, 'sample')} downwards."
    )


def _files(paths: Sequence[str]) -> list[str]:
    """The files that are meant; a folder stands for those in it."""
    found: list[str] = []
    for path in paths:
        found += (
            sorted(glob.glob(os.path.join(glob.escape(path), "**/*.jsonl"), recursive=True))
            if os.path.isdir(path)
            else [path]
        )
    if not found:
        raise UsageError(f"there are no files *.jsonl in {', '.join(paths)}", fix="give the folder of the traces")
    return found


def _sightings(files: Sequence[str]) -> Iterator[Sighting]:
    for path in files:
        if not is_trace(path):
            yield from _of_energon(path)
            continue
        # Steps of a pass begin at zero again, so they are counted: the picture is of time.
        steps: dict[int, int] = {}
        for run in read_runs([path])[0]:
            for batch in run.batches:
                step = steps[run.rank] = steps.get(run.rank, -1) + 1
                for leaf, key in batch["sources"]:
                    yield run.rank, step, f"{leaf} {key}"


def _of_energon(path: str) -> Iterator[Sighting]:
    """What Energon wrote into its debug files; nothing if it is another kind of file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            if not any(name in text for name in _ENERGON):
                continue
            try:
                line = json.loads(text)
                if line["t"] in _ENERGON:
                    yield from ((int(line["r"]), int(line["global_idx"]), str(key)) for key in line.get("keys") or ())
            except (ValueError, KeyError, TypeError):
                continue  # a line that was cut off
