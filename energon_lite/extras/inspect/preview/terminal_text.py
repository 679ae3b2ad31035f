"""``energon-lite preview --text``: write samples to the terminal, one after the other, or those of a step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click

from energon_lite.cli.sample_text import sample_lines
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.errors import ConfigError, EmptyDatasetError, counted
from energon_lite.extras.inspect.preview.shown_sample import ShownSample
from energon_lite.extras.inspect.preview.site import Site
from energon_lite.extras.inspect.preview.steps import Place
from energon_lite.hooks import DefaultTaskEncoder, HookContext, TaskEncoder, hooks_of
from energon_lite.loading.leaves import find_leaves, open_source, open_whole
from energon_lite.loading.makers.outcomes import Failure, Rejected
from energon_lite.loading.makers.sample_maker import SampleMaker
from energon_lite.storage.index.jsonl import is_jsonl

__all__ = ["show_place", "show_samples"]


def show_samples(path: str, split_parts: str, encoder: TaskEncoder | None, **asked: Any) -> None:
    """Write the first samples of each data set; an interactive terminal asks after each, and images are drawn.

    Args:
        path: a folder, a JSONL file or a metadataset.
        split_parts: the splits, with commas.
        asked: the options of the command.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    for spec in _specs(path, split_parts, asked["dataset_config"], asked["split_config"]):
        try:
            shown = _samples(spec, encoder or DefaultTaskEncoder(), asked)
            total = next(shown)
        except EmptyDatasetError:
            click.echo(f"{spec.path} [{spec.split_part}]: empty, skipped")
            continue
        click.echo(f"{spec.path} [{spec.split_part}]: {counted(total, 'sample')}")
        for count, (number, key, sample) in enumerate(shown, 1):
            click.echo(f"Sample {number}, key {key!r}" + ("" if sample is None else f", {type(sample).__name__}"))
            if isinstance(sample, Rejected):
                _tell(sample.failure)
            else:
                _write(sample, asked["images"])
            if interactive and not click.confirm("Go on?", default=True):
                return
            if not interactive and count >= asked["samples"]:
                break


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
    for failure in shown.failures:
        _tell(failure)
    for value in shown.made:
        _write(value, images)


def _tell(failure: Failure) -> None:
    click.echo(f"  {failure.stage}: {failure.reason}")


def _write(sample: Any, images: bool | None) -> None:
    draws = sys.stdout.isatty() if images is None else images
    for line in sample_lines(sample, width=shutil.get_terminal_size().columns, colours=draws):
        click.echo(line, color=draws or None)


def _specs(path: str, split_parts: str, dataset_config: str, split_config: str) -> Iterator[LeafSpec]:
    """Yield the data sets of the existing splits."""
    problem = None
    any_split = False
    parts = [part.strip() for part in split_parts.split(",")][: 1 if is_jsonl(path) else None]  # a file has no splits
    for part in parts:
        try:
            specs = find_leaves(path, part, dataset_config, split_config, None)
            if not is_metadataset(path):
                open_source(specs[0])
        except (ConfigError, EmptyDatasetError) as error:
            problem = error
            continue
        any_split = True
        yield from specs
    if not any_split and problem is not None:
        raise problem


def _samples(spec: LeafSpec, encoder: TaskEncoder, asked: dict[str, Any]) -> Iterator[Any]:
    """Yield the number of samples first; then number, key and sample of each."""
    source = open_source(spec)
    yield len(source)
    leaf = open_whole(spec, encoder, asked["trust_code"], source)
    maker = SampleMaker([leaf], encoder, hooks_of(encoder, packing=False, batched=False), seed=0)
    for number in range(asked["start"], len(source)):
        with HookContext() as context:
            sample = maker.one((0, number, 0), context)
        yield number, source.key(number), sample
