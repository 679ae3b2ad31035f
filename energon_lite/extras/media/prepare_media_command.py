"""``energon-lite prepare-media``: what pictures, sounds and films say about themselves, stored to be looked up."""

from __future__ import annotations

from typing import Any

import click

from energon_lite.cli import ExistingPath, job_options
from energon_lite.cli.local_paths import local_dataset
from energon_lite.errors import UsageError
from energon_lite.extras.media.media_options import extract_media, media_options
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["command"]


@click.command(name="prepare-media", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=str))
@media_options
@click.option(
    "--tmp-path",
    type=ExistingPath(),
    help="A folder in which index.sqlite is written first, where the disk of PATH is slow.",
)
@job_options("Processes that read media.")
def command(
    path: str, media: Any, tmp_path: str | None, num_workers: int | None, show_progress: bool, ranks: Ranks
) -> None:
    """Store the metadata of the media in the folder PATH: size, duration, rates, numbers of frames and channels.

    PATH is a prepared data set, or any folder of media files. Exactly one of the three selections is to be given. The
    metadata goes into PATH/.nv-meta/index.sqlite, where Energon looks for it, too; it is kept when the data set is
    prepared again. Killed and run again, it goes on where it was.
    """
    if media is None:
        raise UsageError(
            "which files are media is not said",
            fix="add --media-metadata-by-extension, --media-metadata-by-header, or --media-metadata-by-glob '*.mp4'",
        )
    extract_media(local_dataset(path, "prepare-media"), media, ranks, num_workers, show_progress, tmp_path)
