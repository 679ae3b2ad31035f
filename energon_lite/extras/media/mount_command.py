"""``energon-lite mount``: mount a data set as a folder of files, by FUSE."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import local_path
from energon_lite.errors import EnergonLiteError, UsageError, counted
from energon_lite.storage.read.file_view import FileView

__all__ = ["FileOperations", "command"]

_T = TypeVar("_T")


@click.command(name="mount", context_settings={"show_default": True})
@click.argument("path", type=click.Path(path_type=str))
@click.argument("mountpoint", type=click.Path(path_type=str, file_okay=False))
@click.option("--detach", "-d", is_flag=True, help="Run in the background.")
@click.option("--sample-folders", "-s", is_flag=True, help="Make a folder for each sample, not one with all parts.")
@click.option("--allow-slow", "-w", is_flag=True, help="Ignored; accepted as in Energon.")
def command(path: str, mountpoint: str, detach: bool, sample_folders: bool, allow_slow: bool) -> None:
    """Mount the data set PATH, a prepared folder, its URL or a JSONL file, read-only at MOUNTPOINT.

    Each part of a sample is a file, 000007.jpg, whose bytes are read from its shard. Ctrl+C, or
    `fusermount -u MOUNTPOINT`, ends it.

    \b
    Example:
      energon-lite mount data/coco /tmp/coco -s &
      ls /tmp/coco/000007
    """
    text = local_path(path)
    if is_metadataset(text):
        raise UsageError("a metadataset has no samples of its own", where=text, fix="mount one of its data sets")
    fuse = _fuse()
    view = FileView(text, sample_folders=sample_folders)
    if view.doubled:
        click.secho(f"{counted(view.doubled, 'sample')} left out: others have their keys", fg="yellow", err=True)
    os.makedirs(mountpoint, exist_ok=True)
    click.echo(f"{text}: {counted(len(view.source), 'sample')}, {counted(view.files, 'file')}, at {mountpoint}")
    operations = type("_Operations", (FileOperations, fuse.Operations), {})(view)
    try:
        fuse.FUSE(operations, mountpoint, foreground=not detach, nothreads=True, ro=True)
    except RuntimeError as error:
        raise UsageError(
            f"the file system cannot be mounted (FUSE says {error})",
            where=mountpoint,
            fix="see that /dev/fuse is there and may be used (containers need --device /dev/fuse and SYS_ADMIN)",
        ) from error


def _fuse() -> Any:
    """Import the first FUSE package that is installed.

    Raises:
        UsageError: there is none, or the system's library is missing.
    """
    problems = []
    for name in ("mfusepy", "fuse"):
        try:
            module = __import__(name)
        except (ImportError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        if hasattr(module, "FUSE"):
            return module
    raise UsageError(
        f"there is no FUSE for Python ({'; '.join(problems)})",
        fix="pip install 'energon-lite[mount]', and install the system's libfuse (apt install fuse3)",
    )


class FileOperations:
    """Callbacks of a FUSE file system, implemented by a :class:`FileView`.

    Args:
        view: the files.
    """

    def __init__(self, view: FileView):
        self.view = view
        self._time = time.time()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Kind, size and times of the file or folder at a path."""
        entry = self._asked(lambda: self.view.entry(path))
        mode = 0o555 | stat.S_IFDIR if entry.part is None else 0o444 | stat.S_IFREG
        times = dict.fromkeys(("st_ctime", "st_mtime", "st_atime"), self._time)
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        return {"st_mode": mode, "st_nlink": 2 if entry.part is None else 1, "st_size": entry.size, **times, **owner}

    def readdir(self, path: str, fh: int) -> list[str]:
        """Names in a folder."""
        return [".", "..", *self._asked(lambda: self.view.listing(path))]

    def open(self, path: str, flags: int) -> int:
        """Open a file for reading."""
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_APPEND):
            raise OSError(errno.EROFS, "the data set is mounted read-only", path)
        self._asked(lambda: self.view.entry(path))
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read bytes of a file."""
        return self._asked(lambda: self.view.read(path, size, offset))

    def statfs(self, path: str) -> dict[str, int]:
        """Size of the file system, as `df` shows it."""
        blocks = -(-self.view.total_size // 512)
        return {"f_bsize": 512, "f_frsize": 512, "f_blocks": blocks, "f_files": self.view.files, "f_namemax": 255}

    def _asked(self, question: Callable[[], _T]) -> _T:
        """Call a function, and convert its errors to error numbers for FUSE."""
        try:
            return question()
        except EnergonLiteError as error:
            raise OSError(errno.EIO, error.what) from error
        except FileNotFoundError as error:
            raise OSError(errno.ENOENT, "there is no such file") from error
        except IsADirectoryError as error:
            raise OSError(errno.EISDIR, "it is a folder") from error
