"""``energon-lite convert``: write a data set in another format."""

from __future__ import annotations

from typing import Any

import click

from energon_lite.cli import bytes_of, job_options, progress
from energon_lite.errors import counted

__all__ = ["command"]


@click.command(name="convert")
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--to", type=click.Choice(["tar", "mds", "parquet", "jsonl"]), required=True, help="The new format.")
@click.option("--split-parts", "split", metavar="NAME", help="Split to convert.  [default: the whole data set]")
@click.option("--shard-size", default="64MiB", show_default=True, help="Approximate size of a shard in bytes.")
@click.option("--samples-per-shard", type=click.IntRange(min=1), help="Samples in a shard, instead of --shard-size.")
@click.option("--without", multiple=True, metavar="PART", help="Leave a part out. May be given several times.")
@click.option(
    "--look",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Number of first samples from which the types of columns are chosen.",
)
@click.option("--force-overwrite", is_flag=True, help="Replace an earlier conversion.")
@job_options("Processes.")
def command(
    source: str, target: str, shard_size: str, num_workers: int | None, show_progress: bool, **others: Any
) -> None:
    """Write the samples of data set SOURCE into the folder TARGET, in another format.

    SOURCE is any path of a data set: a prepared folder, JSONL, Parquet or Arrow files ('data/*.parquet'), an MDS
    folder, Megatron's .bin and .idx, or a URL. A run that was killed continues when it is started again.

    \b
    Examples:
      energon-lite convert data/coco data/coco-mds --to mds
      energon-lite convert 'data/train-*.parquet' data/tars --to tar --shard-size 1GB
      energon-lite convert data/chats lines.jsonl --to jsonl --without jpg
    """
    from energon_lite.extras.formats.converting.run import convert_dataset

    size = bytes_of(shard_size)
    with progress(show_progress, "Converting", "shards") as show:
        report = convert_dataset(
            source,
            target,
            shard_bytes=size,
            workers=num_workers,
            progress=show,
            without=others.pop("without"),
            **others,
        )
    click.echo(
        f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}, {report.size / 1e6:.1f} MB: "
        f"{report.path}"
    )
    if report.made < report.shards:
        click.echo(f"{counted(report.shards - report.made, 'shard')} of them there already.")
