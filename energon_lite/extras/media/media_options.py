"""Options that say which files are media, and the step that they add to ``prepare``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from energon_lite.cli.progress import progress, show_share
from energon_lite.storage.sharded_job.ranks import Ranks

if TYPE_CHECKING:
    from energon_lite.extras.media.extractor import MediaFilterConfig

__all__ = ["begin", "extract_media", "media_filter", "media_options"]

T = TypeVar("T", bound=Callable[..., object])

#: Broken media that are named.
_NAMED = 10
_OPTIONS = (
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
)


def media_options(command: T) -> T:
    """Add ``--media-metadata-by-glob``, ``-by-header`` and ``-by-extension``; :func:`media_filter` reads them."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(_OPTIONS), command)


def media_filter(options: Mapping[str, Any]) -> MediaFilterConfig | None:
    """Return the filter that options of a command describe; None: none of the three was given.

    Raises:
        UsageError: several were given.
    """
    given = tuple(options[f"media_metadata_by_{way}"] for way in ("glob", "header", "extension"))
    if not any(given):
        return None
    from energon_lite.extras.media.extractor import MediaFilterConfig

    return MediaFilterConfig.parse(*given)


def begin(options: Mapping[str, Any]) -> Callable[[str], None] | None:
    """Return the step of ``prepare`` that stores the metadata of media; None: it was not requested."""
    media = media_filter(options)
    if media is None:
        return None
    workers, show_progress = options["num_workers"], options["show_progress"]
    return lambda root: extract_media(root, media, Ranks(), workers, show_progress, to_log=options["as_json"])


def extract_media(
    root: str,
    media: MediaFilterConfig,
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
