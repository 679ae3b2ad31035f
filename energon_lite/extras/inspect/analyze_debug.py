"""``energon-lite analyze-debug``: heat map of traces, with the name and options of Energon's command."""

from __future__ import annotations

import colorsys
import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from energon_lite.cli import ExistingPath
from energon_lite.errors import UsageError, counted
from energon_lite.extras.inspect.audited_run import json_lines
from energon_lite.extras.inspect.trace import is_trace, read_runs
from energon_lite.imports import optional_imports


def save_heat_map(
    path: str, seen: Sequence[tuple[int, int, int]], *, samples: int, steps: int, colours: int, gain: float
) -> tuple[int, int]:
    """Draw counts of sightings in cells, which become coarser if there are more samples or steps than cells.

    Args:
        path: path of the file; its ending determines the format.
        seen: sample, step and rank of each sighting.
        samples: largest number of rows.
        steps: largest number of columns.
        colours: number of ranks with different colours; 1: all ranks have the same.
        gain: factor of the brightness; 1: the fullest cell has full brightness.

    Returns:
        The last sample and the last step.

    Raises:
        UsageError: Pillow is missing, or does not support the format.

    Example:
        >>> save_heat_map("seen.png", [(3, 0, 1)], samples=1000, steps=1000, colours=8, gain=10.0)
        (3, 0)
    """
    with optional_imports("image", "the picture needs the package Pillow"):
        from PIL import Image
    places = np.array(seen, dtype=np.int64).reshape(-1, 3).T
    last = places[:2].max(axis=1, initial=0).tolist()
    for axis, most in enumerate((samples, steps)):  # cells are halved until all places have one
        while places[axis].max(initial=0) >= 2 * -(-most // 2):
            places[axis] //= 2
    hues = (np.arange(colours) * 0.618034) % 1.0  # far apart, for any number of colours
    palette = np.array([colorsys.hsv_to_rgb(hue, 0.85, 1.0) for hue in hues] if colours > 1 else [[1, 1, 1]])
    cells: NDArray[np.float64] = np.zeros((*(places[:2].max(axis=1, initial=0) + 1), 3))
    np.add.at(cells, (places[0], places[1]), palette[places[2] % len(palette)])
    bright = (cells * (gain * 255 / max(cells.max(), 1e-9))).clip(0, 255).astype(np.uint8)
    try:
        Image.fromarray(bright).save(path)
    except ValueError as error:
        raise UsageError(f"{os.path.basename(path)}: {error}", fix="give a name that ends with .png") from error
    return last[0], last[1]


#: Types of the lines with batch keys in Energon's own debug files.
_ENERGON = ("SavableDataLoader.yield", "BasicDataLoader.yield")
_SIZE = click.IntRange(min=2)

#: One sample in one batch: ``(rank, step, key)``.
Sighting = tuple[int, int, str]


@click.command(name="analyze-debug", context_settings={"show_default": True})
@click.argument("log_paths", nargs=-1, required=True, type=ExistingPath())
@click.option("--heatmap-path", type=click.Path(dir_okay=False), default="heatmap.png", help="File of the picture.")
@click.option("--heatmap-steps", type=_SIZE, default=1000, help="Largest width; more steps share a column.")
@click.option("--heatmap-samples", type=_SIZE, default=1000, help="Largest height; more samples share a row.")
@click.option("--heatmap-gain", type=float, default=10.0, help="Factor of the brightness.")
@click.option("--force-loading-order", is_flag=True, help="Ignored; accepted as in Energon.")
@click.option("--include-modality", default="train", help="Ignored; accepted as in Energon. All traces are used.")
@click.option("--skip", type=click.IntRange(min=0), default=0, help="Number of first steps to leave out.")
@click.option("--no-colors", is_flag=True, help="Use one colour for all ranks.")
@click.option("--json", "as_json", is_flag=True, help="Write the counts as JSON.")
def command(log_paths: tuple[str, ...], heatmap_path: str, skip: int, as_json: bool, **asked: Any) -> None:
    """Draw a picture of samples over time. LOG_PATHS are traces of loaders, or folders of them (*.jsonl).

    Samples are numbered in the order of their first occurrence: the first epoch is a diagonal, later ones are scattered
    by the shuffling. Debug files written by Energon are read as well. For tables and times of the same traces, see
    `energon-lite trace`.
    """
    files = _files(log_paths)
    if not as_json:
        click.echo(f"Analyzing {counted(len(files), 'log')}")
    seen = sorted(_sightings(files), key=lambda sighting: sighting[1])
    first = min((step for _, step, _ in seen), default=0)
    seen = [sighting for sighting in seen if sighting[1] - first >= skip]
    if not seen:
        fix = "give a smaller --skip" if skip else "trace some steps of a loop first"
        raise UsageError(f"there is no batch in {', '.join(log_paths)}", fix=fix)
    ranks = len({rank for rank, _, _ in seen})
    numbers: dict[str, int] = {}
    last_sample, last_step = save_heat_map(
        heatmap_path,
        [(numbers.setdefault(key, len(numbers)), step - first, rank) for rank, step, key in seen],
        samples=asked["heatmap_samples"],
        steps=asked["heatmap_steps"],
        colours=1 if asked["no_colors"] else ranks,
        gain=asked["heatmap_gain"],
    )
    steps = last_step + 1
    if as_json:
        counts = {"files": len(files), "ranks": ranks, "samples": len(numbers), "sightings": len(seen)}
        click.echo(json.dumps({**counts, "steps": steps, "heatmap": heatmap_path}, indent=2))
        return
    click.echo(
        f"Found {counted(len(numbers), 'unique sample key')}, {counted(steps, 'step')}, {counted(ranks, 'rank')}; "
        f"seen {counted(len(seen), 'time')}"
    )
    click.echo(
        f"The picture is in {heatmap_path}: {counted(steps, 'step')} to the right, "
        f"{counted(last_sample + 1, 'sample')} downwards."
    )


def _files(paths: Sequence[str]) -> list[str]:
    """Files of the paths; a folder stands for the traces in it."""
    files: list[str] = []
    for path in paths:
        inside = glob.glob(os.path.join(glob.escape(path), "**/*.jsonl"), recursive=True)
        files += sorted(inside) if os.path.isdir(path) else [path]
    if not files:
        raise UsageError(f"there are no files *.jsonl in {', '.join(paths)}", fix="give the folder of the traces")
    return files


def _sightings(files: Sequence[str]) -> Iterator[Sighting]:
    for path in files:
        if not is_trace(path):
            yield from _of_energon(path)
            continue
        # Steps of each pass start at zero, so they are counted: the picture shows time.
        steps: dict[int, int] = {}
        for run in read_runs([path])[0]:
            for batch in run.batches:
                step = steps[run.rank] = steps.get(run.rank, -1) + 1
                for leaf, key in batch["sources"]:
                    yield run.rank, step, f"{leaf} {key}"


def _of_energon(path: str) -> Iterator[Sighting]:
    """Yield the sightings in Energon's debug files; none for other files."""
    for line in json_lines(path):
        with suppress(ValueError, KeyError, TypeError):  # of another form
            if line["t"] in _ENERGON:
                yield from ((int(line["r"]), int(line["global_idx"]), str(key)) for key in line.get("keys") or ())
