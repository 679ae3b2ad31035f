"""Samples in a terminal: the first of each data set, or those of a place; values with their types and shapes, images as
small pictures."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
import numpy as np
import torch

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.errors import ConfigError, EmptyDatasetError, counted
from energon_lite.extras.inspect.preview.media import HIDDEN, fields_of, pixels_of
from energon_lite.extras.inspect.preview.site import Site
from energon_lite.extras.inspect.preview.steps import Place, ShownSample
from energon_lite.extras.inspect.preview.value_view import short_text, tensor_words
from energon_lite.hooks import DefaultTaskEncoder, HookContext, TaskEncoder, hooks_of
from energon_lite.loading.leaves import find_leaves, open_source, open_whole
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.outcomes import Failure, Rejected
from energon_lite.storage.index.nv_meta import is_jsonl

#: Fields of every sample that do not describe its contents. The key is shown, as by Energon's command.
_HIDDEN = HIDDEN - {"__key__"} | {"__subflavors__"}
#: Characters of a text that are shown.
_LONGEST_TEXT = 400
#: Items of a collection that are shown.
_MOST_VALUES = 8
#: Nesting depth to which collections are shown.
_DEEPEST = 4


def sample_lines(sample: Any, *, width: int, colours: bool) -> Iterator[str]:
    """Yield the lines of a sample: one for each field, followed by a picture if it is an image.

    Args:
        sample: an object with fields, or a dict of parts.
        width: width of the terminal, in characters.
        colours: draw pictures; False: images are only described.
    """
    for name, value in fields_of(sample, _HIDDEN):
        if value is not None:
            yield from _lines(name, value, "  ", width, colours, 0)


def _lines(name: str, value: Any, indent: str, width: int, colours: bool, depth: int) -> Iterator[str]:
    is_list = isinstance(value, (list, tuple))
    items = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value if is_list else ())]
    if depth >= _DEEPEST or not any(_is_large(item) for _, item in items):
        kind = "" if depth else f" ({type(value)})"
        yield f"{indent}{name}{kind}: {_words(value)}"
    else:
        kind = "" if isinstance(value, Mapping) else f" ({type(value).__name__} of {len(value)})"
        yield f"{indent}{name}:{kind}"
        for key, item in items[:_MOST_VALUES]:
            yield from _lines(str(key), item, indent + "  ", width, colours, depth + 1)
        if len(items) > _MOST_VALUES:
            yield f"{indent}  ... and {len(items) - _MOST_VALUES} more"
    if colours and (pixels := pixels_of(value)) is not None:
        columns = max(8, min(width - len(indent) - 2, 64))
        pixels = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
        yield from (f"{indent}  {line}" for line in picture_lines(pixels, columns))


def _is_large(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, bytes, Mapping, list, tuple)) or hasattr(value, "getbands")


def _words(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tensor_words(value)
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes {bytes(value[:16])!r}" + ("..." if len(value) > 16 else "")
    if hasattr(value, "getbands"):
        return f"image {value.size[0]}x{value.size[1]} {value.mode}"
    return short_text(repr(value), _LONGEST_TEXT)


def picture_lines(pixels: np.ndarray[Any, Any], columns: int) -> Iterator[str]:
    """Draw an image as lines of half blocks in 24-bit colours: each character is two pixels, one above the other.

    Args:
        pixels: uint8 ``[height, width, 3]``.
        columns: largest number of characters in a line.
    """
    height, width, _ = pixels.shape
    across = min(columns, width)
    down = max(2, round(height * across / width) // 2 * 2)
    rows = (np.arange(down) + 0.5) * height // down
    small = pixels[rows.astype(int)][:, ((np.arange(across) + 0.5) * width // across).astype(int)]
    for top, bottom in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{r};{g};{b}m\x1b[48;2;{x};{y};{z}m▀" for (r, g, b), (x, y, z) in zip(top, bottom, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"


def show_samples(path: str, split_parts: str, encoder: TaskEncoder | None, **asked: Any) -> None:
    """Write the first samples of each data set; an interactive terminal asks after each, and images are drawn.

    Args:
        path: a folder, a JSONL file or a metadataset.
        split_parts: the splits, with commas.
        asked: the options of the command.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    encoder = encoder or DefaultTaskEncoder()
    for spec in _specs(path, split_parts, asked["dataset_config"], asked["split_config"]):
        where = f"{spec.path} [{spec.split_part}]"
        try:
            source = open_source(spec)
        except EmptyDatasetError:
            click.echo(f"{where}: empty, skipped")
            continue
        click.echo(f"{where}: {counted(len(source), 'sample')}")
        leaf = open_whole(spec, encoder, asked["trust_code"], source)
        runner = JobRunner([leaf], encoder, hooks_of(encoder, packing=False, batched=False), seed=0)
        stop = len(source) if interactive else min(len(source), asked["start"] + asked["samples"])
        for number in range(asked["start"], stop):
            with HookContext() as context:
                sample = runner.one((0, number, 0), context)
            kind = "" if sample is None else f", {type(sample).__name__}"
            click.echo(f"Sample {number}, key {source.key(number)!r}{kind}")
            _write(sample.failure if isinstance(sample, Rejected) else sample, asked["images"])
            if interactive and not click.confirm("Go on?", default=True):
                return


def show_place(site: Site, places: list[Place], samples: list[tuple[int, int]], images: bool | None) -> None:
    """Write the samples of steps, or single samples, after the hooks."""
    run = site.run
    for place in places:
        for micro_batch in site.finder.make(place):
            rank = "" if micro_batch.rank is None or run.options.ranks == 1 else f", rank {micro_batch.rank}"
            click.echo(f"{str(place).capitalize()}{rank}: {counted(len(micro_batch.planned), 'sample')}")
            for address in micro_batch.planned:
                _show(site, site.makers.sample(*address[:3]), images)
    for leaf, index in samples:
        _show(site, site.makers.sample(leaf, index, 0), images)


def _show(site: Site, shown: ShownSample, images: bool | None) -> None:
    where = f"{site.run.leaf_name(shown.leaf)}, number {shown.index:,}, epoch {shown.epoch:,}"
    click.echo(f"Sample {shown.key!r} ({where})")
    for value in (*shown.failures, *shown.made):
        _write(value, images)


def _write(sample: Any, images: bool | None) -> None:
    if isinstance(sample, Failure):
        click.echo(f"  {sample.stage}: {sample.reason}")
        return
    draws = sys.stdout.isatty() if images is None else images
    for line in sample_lines(sample, width=shutil.get_terminal_size().columns, colours=draws):
        click.echo(line, color=draws)


def _specs(path: str, split_parts: str, dataset_config: str, split_config: str) -> Iterator[LeafSpec]:
    """Yield the data sets of the existing splits."""
    problems = []
    parts = [part.strip() for part in split_parts.split(",")][: 1 if is_jsonl(path) else None]  # a file has no splits
    for part in parts:
        try:
            specs = find_leaves(path, part, dataset_config, split_config, None)
            if not is_metadataset(path):
                open_source(specs[0])
        except (ConfigError, EmptyDatasetError) as error:
            problems.append(error)
            continue
        yield from specs
    if len(problems) == len(parts):
        raise problems[-1]
