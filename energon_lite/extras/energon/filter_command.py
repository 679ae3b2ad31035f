"""``energon-lite filter``: store the samples of a data set that meet a condition, as a filter index."""

from __future__ import annotations

import click

from energon_lite.cli import ExistingPath
from energon_lite.errors import UsageError, counted


@click.command(name="filter", context_settings={"show_default": True})
@click.argument("path", type=ExistingPath())
@click.argument("name")
@click.argument("where")
@click.option("--force-overwrite", "overwrite", is_flag=True, help="Replace a filter index with this name.")
def command(path: str, name: str, where: str, overwrite: bool) -> None:
    """Store which samples of PATH, a prepared folder or a JSONL file, meet the condition WHERE, under a NAME.

    WHERE compares measured columns, such as "tokens <= 4096 and quality.score > 0.5". A metadataset may name the filter
    (filter: NAME), also for Megatron-Energon 8. In energon_lite it may have the condition itself instead, which follows
    changes of the columns; an index does not change.

    \b
    Example:
      energon-lite filter data/coco short "tokens <= 4096"
    """
    from energon_lite.extras.energon.sample_filters import SampleFilter, build_filter_index
    from energon_lite.storage.read.webdataset import WebdatasetSource

    condition = SampleFilter(where)
    if condition.index is not None:
        raise UsageError(f"{where!r} is not a condition", fix='compare columns: "tokens <= 4096"')
    source = WebdatasetSource.open(path)
    kept = condition.keep({column: source.column(column)[:] for column in condition.columns}).nonzero()[0]
    build_filter_index(path, name, kept, overwrite=overwrite)
    click.echo(f"{path}: filter {name!r} keeps {len(kept):,} of {counted(len(source), 'sample')}")
