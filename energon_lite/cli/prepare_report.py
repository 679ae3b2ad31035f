"""Output of ``energon-lite prepare``: the shards that were found, the result, and the next steps; and the door of the
guest that asks for missing options."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import click

from energon_lite.cli.text import byte_size
from energon_lite.entry_points import load, storage_guests
from energon_lite.errors import counted, listed
from energon_lite.storage.index import nv_meta
from energon_lite.storage.prepare.choice import SAMPLE_LOADER
from energon_lite.storage.prepare.dataset_scan import DatasetScan
from energon_lite.storage.prepare.prepare import PrepareReport


def show_scan(scan: DatasetScan) -> None:
    """Write the numbers of shards, samples and parts."""
    names = scan.shard_names
    size = sum(shard.size for shard in scan.scans)
    click.echo(
        f"Found {counted(len(names), 'shard')} with {counted(scan.samples, 'sample')} ({byte_size(size)}) "
        f"in {scan.root}"
    )
    click.echo(f"  first shard: {names[0]}")
    click.echo(f"  last shard:  {names[-1]}")
    parts = [f"{name} ({count})" for name, count in scan.parts.items()]
    click.echo(f"  parts:       {listed(parts, 10)}")


def show_preparation(report: PrepareReport, as_json: bool = False) -> None:
    """Write a report to the terminal: warnings, splits, and files that were written."""
    show_notes(report.warnings)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    if report.splits:
        splits = [
            f"{name} {counted(samples, 'sample')} in {counted(shards, 'shard')}"
            for name, (shards, samples) in report.splits.items()
        ]
        click.echo(f"Splits: {'; '.join(splits)}")
    click.echo(
        f"Wrote {counted(report.shards, '.tar.idx file')} and, in {os.path.join(report.path, nv_meta.META_FOLDER)}:"
    )
    click.echo("  " + ", ".join(os.path.basename(name) for name in report.written))


def show_notes(notes: Iterable[str]) -> None:
    """Write notes to the error output."""
    for note in notes:
        click.secho(f"Note: {note}", fg="yellow", err=True)


def show_next_step(report: PrepareReport, dataset_yaml_name: str, begun: Mapping[str, str] | None) -> None:
    """Write the next steps to the terminal.

    Args:
        report: the result of the preparation.
        dataset_yaml_name: name of the file that defines the samples.
        begun: a mapping if a file of code was started that the user has to complete: likely parts of the fields, empty
            if none are known. None: nothing has to be completed.
    """
    if not report.has_dataset_yaml:
        click.echo(
            f"There is no {dataset_yaml_name} yet, which says what a sample is. Write it by hand, or run\n"
            f"  energon-lite prepare {shlex.quote(report.path)} --force-overwrite"
        )
        return
    split = next((name for name, (shards, _) in report.splits.items() if shards), "train")
    extra = "" if split == "train" else f", split_part={split!r}"
    extra += "" if dataset_yaml_name == nv_meta.DATASET_YAML else f", dataset_config={dataset_yaml_name!r}"
    if begun is not None:
        extra += ", trust_code=True"
        if begun:
            click.echo("Without code, if these are the parts of its fields: run this again, and add\n")
            click.echo(f"  --force-overwrite --field-map {shlex.quote(json.dumps(dict(begun)))}\n")
    click.echo("Next, in Python:\n" if begun is None else f"When {SAMPLE_LOADER} is complete, in Python:\n")
    click.echo("  from energon_lite import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset")
    click.echo('  encoder = DefaultTaskEncoder(padding="list")  # what differs in size or kind stays in lists')
    click.echo(f"  dataset = get_train_dataset({report.path!r}, batch_size=2, shuffle_buffer_size=None{extra},")
    click.echo("      max_samples_per_sequence=None, task_encoder=encoder,")
    click.echo("      worker_config=WorkerConfig.default_worker_config(num_workers=2))")
    click.echo("  print(next(iter(get_savable_loader(dataset))))")


class PrepareDialogue(Protocol):
    """Guest that asks for missing options: entry ``prepare_dialogue`` of the table ``STORAGE_GUESTS``."""

    def show_samples(self, scan: DatasetScan) -> None:
        """Write the first samples."""

    def ask_again(self, root: str) -> bool:
        """Ask if a prepared data set is to be prepared again."""

    def ask_split_ratio(self) -> str:
        """Ask for the shares of train, val and test, as text."""

    def ask_dataset_document(
        self, scan: DatasetScan, sample_type: str | None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Ask for the definition of samples: the document, None if no file is wanted; and the further files that it
        needs, by name."""

    def begin_loader(self, scan: DatasetScan, sample_type: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the document of samples whose fields a file of code defines, and templates of the files, by name."""

    def guess_field_map(self, scan: DatasetScan, sample_type: str) -> dict[str, str]:
        """Guess the parts of the required fields of a sample; empty if one of them cannot be guessed."""


def find_dialogue() -> PrepareDialogue | None:
    """Return the guest that asks; None: there is none, and nothing is asked."""
    target = storage_guests().get("prepare_dialogue")
    dialogue: PrepareDialogue | None = None if target is None else load(target)
    return dialogue
