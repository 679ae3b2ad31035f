"""Options that say which files are media."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from energon_lite.cli import progress, show_share
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["extract_media", "media_options"]

#: Broken media that are named.
_NAMED = 10


def media_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--media-metadata-by-glob``, ``-by-header`` and ``-by-extension``. The command gets ``media``: a
    :class:`~energon_lite.extras.media.extractor.MediaFilterConfig`, or None if none of them was given."""
    options = [
        click.option(
            "--media-metadata-by-glob",
            metavar="PATTERNS",
            help="Store the metadata of media whose names fit a pattern: '*.jpg,*.mp4'.",
        ),
        click.option(
            "--media-metadata-by-header",
            is_flag=True,
            help="Store the metadata of media, known by their first bytes.",
        ),
        click.option(
            "--media-metadata-by-extension",
            is_flag=True,
            help="Store the metadata of media, known by extension.",
        ),
    ]

    @functools.wraps(command)
    def with_media(
        *arguments: Any,
        media_metadata_by_glob: str | None,
        media_metadata_by_header: bool,
        media_metadata_by_extension: bool,
        **others: Any,
    ) -> None:
        given = media_metadata_by_glob, media_metadata_by_header, media_metadata_by_extension
        media = None
        if any(given):
            from energon_lite.extras.media.extractor import MediaFilterConfig

            media = MediaFilterConfig.parse(*given)
        command(*arguments, media=media, **others)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_media)


def extract_media(
    root: str,
    media: Any,
    ranks: Ranks,
    workers: int | None,
    show_progress: bool,
    tmp_path: str | None = None,
    *,
    to_log: bool = False,
) -> None:
    """Extract and store the metadata of the media in a folder, and say what was found; on standard error, if
    ``to_log``."""
    from energon_lite.extras.media.media_scan import prepare_media

    with progress(show_progress, "Media", "units") as show:
        report = prepare_media(root, media, workers=workers, ranks=ranks, progress=show, tmp_path=tmp_path)
    if ranks.rank:
        show_share(ranks, f"metadata of {report.found:,} media")
        return
    for entry, what in report.broken[:_NAMED]:
        click.secho(f"Note: {entry}: {what}", fg="yellow", err=True)
    if len(report.broken) > _NAMED:
        click.secho(f"Note: and {len(report.broken) - _NAMED:,} more", fg="yellow", err=True)
    damaged = f"; {len(report.broken):,} are damaged, and have none" if report.broken else ""
    click.echo(f"Stored the metadata of {report.found:,} media{damaged}.", err=to_log)
