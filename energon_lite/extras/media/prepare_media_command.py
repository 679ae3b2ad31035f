"""``energon-lite prepare-media``: extract and store the metadata of images, sounds and videos.

``prepare`` has the same options: :func:`begin` is a step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from energon_lite.cli import ExistingPath, job_options, progress, show_share
from energon_lite.cli.arguments import local_dataset, with_options
from energon_lite.errors import UsageError
from energon_lite.storage.sharded_job import Ranks

if TYPE_CHECKING:
    from energon_lite.extras.media.media_scan import MediaFilterConfig

#: Largest number of broken media that are listed.
_NAMED = 10
#: Settings of the options by which media are selected.
_WAYS: dict[str, dict[str, Any]] = {
    "glob": {"metavar": "PATTERNS", "help": "Store the metadata of media whose names match a pattern: '*.jpg,*.mp4'."},
    "header": {"is_flag": True, "help": "Store the metadata of media, recognized by their first bytes."},
    "extension": {"is_flag": True, "help": "Store the metadata of media, recognized by their extensions."},
}
#: Options ``--media-metadata-by-glob``, ``-by-header`` and ``-by-extension``.
media_options = with_options(
    *(click.option(f"--media-metadata-by-{way}", **settings) for way, settings in _WAYS.items())
)


@click.command(name="prepare-media", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@media_options
@click.option(
    "--tmp-path",
    type=ExistingPath(),
    help="A folder in which index.sqlite is written first, if the disk of PATH is slow.",
)
@job_options("Processes that read media.")
def command(
    path: str, tmp_path: str | None, num_workers: int | None, show_progress: bool, ranks: Ranks, **given: Any
) -> None:
    """Store the metadata of the media in the folder PATH: size, duration, rates, numbers of frames and channels.

    PATH is a prepared data set, or any folder of media files. Exactly one of the three selections must be given. The
    metadata goes into PATH/.nv-meta/index.sqlite, as in Energon; it is kept when the data set is prepared again. A run
    that was killed continues when it is started again.
    """
    media = _media_filter(given)
    if media is None:
        raise UsageError(
            "no rule that finds media is given",
            fix="add --media-metadata-by-extension, --media-metadata-by-header, or --media-metadata-by-glob '*.mp4'",
        )
    _extract(local_dataset(path, "prepare-media"), media, ranks, num_workers, show_progress, tmp_path)


def _media_filter(options: Mapping[str, Any]) -> MediaFilterConfig | None:
    """Return the filter that options of a command describe; None: none of the three was given.

    Raises:
        UsageError: several were given.
    """
    given = [options[f"media_metadata_by_{way}"] for way in _WAYS]
    if not any(given):
        return None
    from energon_lite.extras.media.media_scan import MediaFilterConfig

    return MediaFilterConfig.parse(*given)


def begin(options: Mapping[str, Any]) -> Callable[[str], None] | None:
    """Return the step of ``prepare`` that stores the metadata of media; None: it was not requested."""
    media = _media_filter(options)
    if media is None:
        return None
    workers, show_progress = options["num_workers"], options["show_progress"]
    return lambda root: _extract(root, media, Ranks(), workers, show_progress, to_log=options["as_json"])


def _extract(
    root: str,
    media: MediaFilterConfig,
    ranks: Ranks,
    workers: int | None,
    show_progress: bool,
    tmp_path: str | None = None,
    *,
    to_log: bool = False,
) -> None:
    """Extract and store the metadata of the media in a folder, and report the result.

    The report goes to standard error with ``to_log``.
    """
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
    damaged = f"; damaged, and without metadata: {len(report.broken):,}" if report.broken else ""
    click.echo(f"Stored the metadata of {report.found:,} media{damaged}.", err=to_log)
