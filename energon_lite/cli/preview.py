"""``energon-lite preview``: look at the samples of a data set, one after the other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import click

from energon_lite.cli.sample_text import sample_lines
from energon_lite.cli.task_encoder_argument import make_task_encoder
from energon_lite.config.metadataset import LeafSpec, is_metadataset
from energon_lite.documents.paths import local_path
from energon_lite.errors import ConfigError, EmptyDatasetError
from energon_lite.hooks import DefaultTaskEncoder, HookContext, hooks_of
from energon_lite.loading.leaves import find_leaves, open_source, open_whole
from energon_lite.loading.makers.outcomes import Rejected
from energon_lite.loading.makers.sample_maker import SampleMaker
from energon_lite.storage.index.jsonl import is_jsonl

__all__ = ["command"]

_PARTS = "train,val,test"


@click.command(name="preview", context_settings={"show_default": True})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--split-parts", default=_PARTS, help="The splits to show, with commas.")
@click.option("--dataset-config", default="dataset.yaml", help="For a folder: what a sample is.")
@click.option("--split-config", default="split.yaml", help="For a folder: the file of its splits.")
@click.option("--samples", "-n", type=click.IntRange(min=1), default=3, help="So many of each, where nobody is asked.")
@click.option("--start", type=click.IntRange(min=0), default=0, help="Begin with this sample of each data set.")
@click.option("--task-encoder", metavar="MODULE:CLASS", help="Show what its cookers and hooks make of the samples.")
@click.option("--trust-code", is_flag=True, help="Allow dataset.yaml to name Python code that is run.")
@click.option("--images/--no-images", default=None, help="Draw images.  [default: on a terminal]")
def command(path: str, split_parts: str, **asked: Any) -> None:
    """Show samples of PATH: a prepared folder, a JSONL file, or a metadataset .yaml (then all that is in it).

    On a terminal, each sample waits for an answer, and images are drawn as small pictures. Elsewhere the first samples
    of each data set are written, and images are described.

    \b
    Example:
      energon-lite preview data/coco
      energon-lite preview blend.yaml --split-parts train -n 1 | less
    """
    path, interactive = local_path(path), sys.stdin.isatty() and sys.stdout.isatty()
    draws = sys.stdout.isatty() if asked["images"] is None else asked["images"]
    for spec in _specs(path, split_parts, asked["dataset_config"], asked["split_config"]):
        try:
            shown = _samples(spec, asked)
            total = next(shown)
        except EmptyDatasetError:
            click.echo(f"{spec.path} [{spec.split_part}]: empty, skipped")
            continue
        click.echo(f"{spec.path} [{spec.split_part}]: {total:,} samples")
        for count, (number, key, sample) in enumerate(shown, 1):
            click.echo(f"Sample {number}, key {key!r}" + ("" if sample is None else f", {type(sample).__name__}"))
            if isinstance(sample, Rejected):
                click.echo(f"  {sample.failure.stage}: {sample.failure.reason}")
            else:
                for line in sample_lines(sample, width=shutil.get_terminal_size().columns, colours=draws):
                    click.echo(line, color=draws or None)
            if interactive and not click.confirm("Go on?", default=True):
                return
            if not interactive and count >= asked["samples"]:
                break


def _specs(path: str, split_parts: str, dataset_config: str, split_config: str) -> Iterator[LeafSpec]:
    """The data sets of the splits that there are."""
    problem, found = None, False
    parts = [part.strip() for part in split_parts.split(",")][: 1 if is_jsonl(path) else None]  # a file has no splits
    for part in parts:
        try:
            specs = find_leaves(path, part, dataset_config, split_config, None)
            if not is_metadataset(path):
                open_source(specs[0])
        except (ConfigError, EmptyDatasetError) as error:
            problem = error
            continue
        found = True
        yield from specs
    if not found and problem is not None:
        raise problem


def _samples(spec: LeafSpec, asked: dict[str, Any]) -> Iterator[Any]:
    """How many samples there are; then number, key and sample of each."""
    source = open_source(spec)
    yield len(source)
    encoder = make_task_encoder(asked["task_encoder"]) if asked["task_encoder"] else DefaultTaskEncoder()
    leaf = open_whole(spec, encoder, asked["trust_code"], source)
    maker = SampleMaker([leaf], encoder, hooks_of(encoder, packing=False, batched=False), seed=0)
    for number in range(asked["start"], len(source)):
        with HookContext() as context:
            sample = maker.one((0, number, 0), context)
        yield number, source.key(number), sample
