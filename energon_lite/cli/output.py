"""Output of commands: the progress of jobs, sizes and tables, and the reports of ``prepare`` and ``measure``."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import click

from energon_lite.errors import counted, listed
from energon_lite.storage.index import nv_meta
from energon_lite.storage.index.columns import CHECKSUMS
from energon_lite.storage.prepare_choices import SAMPLE_LOADER
from energon_lite.storage.sharded_job import Progress, Ranks

if TYPE_CHECKING:
    from energon_lite.loading.measured_columns import MeasureReport  # imports torch
    from energon_lite.storage.dataset_scan import DatasetScan
    from energon_lite.storage.prepare import PrepareReport

#: Seconds between two lines without a terminal, such as in the log of a job.
_BETWEEN = 10.0
#: Largest number of reasons that are shown.
_SHOWN_REASONS = 20
_UNITS = ("B", "kB", "MB", "GB", "TB")


@contextmanager
def progress(wanted: bool, doing: str, unit: str) -> Iterator[Progress | None]:
    """Provide a function that shows progress; None if it is not ``wanted``. A bar ends when all is done.

    Args:
        doing: description of the work, such as ``"Indexing"``.
        unit: the counted unit, in the plural.
    """
    if not wanted:
        yield None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(unit=f" {unit}", desc=doing, dynamic_ncols=True) as bar:

            def move(done: int, total: int, note: str) -> None:
                bar.total = total
                bar.set_postfix_str(note, refresh=False)
                bar.update(done - bar.n)
                if done == total > 0:
                    bar.close()  # questions may follow

            yield move
    else:
        yield _lines(doing, unit)


def _lines(doing: str, unit: str) -> Progress:
    start = last = time.monotonic()

    def line(done: int, total: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _BETWEEN or not done:
            return
        last, elapsed = now, now - start
        left = elapsed / done * (total - done)
        rate = f"{done / elapsed:,.1f}/s" + (f", {note}" if note else "")
        click.echo(f"{doing}: {done:,} of {total:,} {unit}, {rate}, about {left:.0f} s left", err=True)

    return line


def show_share(ranks: Ranks, done: str) -> None:
    """Report the share of work of a rank other than 0."""
    click.echo(f"Rank {ranks.rank} of {ranks.world_size}: {done}; rank 0 goes on")


def byte_size(count: float) -> str:
    """Format a number of bytes with four digits, in a unit that is a power of 1000.

    Example:
        >>> byte_size(12), byte_size(3_456_789)
        ('12 B', '3.457 MB')
    """
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.4g} {unit}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the columns of a table: the first one to the left, the others to the right.

    Example:
        >>> list(aligned([["name", "n"], ["a", "12"]]))
        ['name   n', 'a     12']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


# -- reports of prepare ---------------------------------------------------------------------------------------------


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


# -- reports of measure ---------------------------------------------------------------------------------------------


def measuring(folder: str, wanted: bool) -> AbstractContextManager[Progress | None]:
    """Show the progress of measuring a data set."""
    return progress(wanted, f"Measuring {os.path.basename(folder.rstrip('/')) or folder}", "samples")


def show_report(report: MeasureReport) -> None:
    """Write a report of the measurements."""
    known = f", {report.known:,} of them measured before" if report.known else ""
    click.echo(f"{report.path}: {counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}{known}")
    if report.kept and report.total:
        click.echo(
            f"  {report.kept:,} have a length: {report.shortest:,} to {report.longest:,}, "
            f"{report.total / report.kept:,.1f} on average, {report.total:,} in all"
        )
    for name, (count, total, largest) in report.columns.items():
        if name == CHECKSUMS:
            click.echo(f"  {count:,} parts have a checksum, by which they are verified when they are read")
            continue
        added = f", {total:,} in all" if total else ""
        click.echo(f"  column {name}: {counted(count, 'value')} of up to {largest:,}{added}")
    if report.skipped or report.failed:
        click.echo(f"  {report.skipped:,} were skipped, {report.failed:,} failed")
    if report.known and report.reasons:
        click.echo("  of those measured now:")
    for count, stage, reason, skipped in report.reasons[:_SHOWN_REASONS]:
        click.echo(f"    {count:,} x {'skipped' if skipped else 'failed'} in {stage}: {reason}")
    if len(report.reasons) > _SHOWN_REASONS:
        click.echo(f"    ... and {len(report.reasons) - _SHOWN_REASONS} other reasons")
    for text in report.failures:
        click.secho(f"  failed: {text}", fg="yellow", err=True)
    if report.failed > len(report.failures):
        click.secho(f"  failed: ... and {report.failed - len(report.failures):,} more", fg="yellow", err=True)
    click.echo("  in " + ", ".join(report.written))
