"""Instructions after the preparation of a data set."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

import click

from energon_lite.storage.index import nv_meta
from energon_lite.storage.prepare.prepare import PrepareReport
from energon_lite.storage.prepare.sample_document import SAMPLE_LOADER

__all__ = ["show_next_step"]


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
