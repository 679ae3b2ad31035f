"""``energon-lite mount``: mount a data set as a folder of files, by FUSE."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import click

from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import local_path
from energon_lite.errors import EnergonLiteError, UsageError, counted
from energon_lite.storage.files.shard_store import Shard
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_scan import split_member_name

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
    if os.listdir(mountpoint):
        raise UsageError("the mountpoint is not empty", where=mountpoint, fix="give an empty or a new folder")
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


# -- a data set as files ---------------------------------------------------------------------------------------------

#: Most folder listings that are kept; making one reads all keys.
_LISTINGS = 16
#: Names that no file or folder can have.
_NO_NAMES = frozenset(("", ".", ".."))


class FileEntry(NamedTuple):
    """A file or folder of a view.

    Attributes:
        size: bytes of a file; for a sample's folder the bytes of all its files.
        part: place of the bytes (shard, first byte, size); None: it is a folder.
    """

    size: int
    part: tuple[Shard, int, int] | None


class FileView:
    """The samples of a data set as files ``<key>.<part>``, or as folders ``<key>/`` with a file for each part.

    Slashes in keys make folders. If several samples have one key, the first is shown. Keys that are no paths (with
    nothing, ``.`` or ``..`` between slashes) are not listed.

    Args:
        path: the prepared folder, its URL, or a JSONL file.
        sample_folders: show a folder for each sample.

    Attributes:
        doubled: samples that are not shown because an earlier one has their key.

    Example:
        >>> view = FileView("data/coco")
        >>> [*view.listing("")][:2], view.entry("000007.txt").size
        (['000000.jpg', '000000.txt'], 21)
    """

    def __init__(self, path: str, *, sample_folders: bool = False):
        self.source = WebdatasetSource.open(path)
        self.sample_folders = sample_folders
        self._keys = KeyIndex(self.source.index)
        self.doubled = self._keys.doubled
        self.names = lru_cache(_LISTINGS)(self._names)

    @cached_property
    def total_size(self) -> int:
        """Bytes of all parts of all samples."""
        return int(self.source.index.parts[:][:, 1].sum())

    @property
    def files(self) -> int:
        """Number of parts of all samples."""
        return len(self.source.index.parts)

    def entry(self, path: str) -> FileEntry:
        """Return the entry at a path, which has no slash in front.

        Raises:
            FileNotFoundError: there is neither a file nor a folder.
        """
        path = path.strip("/")
        if not path:
            return FileEntry(0, None)
        if self.sample_folders:
            if (sample := self._find(path)) is not None:
                return FileEntry(sum(size for _, _, size in self._parts(sample)), None)
            key, _, part = path.rpartition("/")
        else:
            key, part = split_member_name(path) or ("", "")
        if (sample := self._find(key)) is not None:
            for name, offset, size in reversed(self._parts(sample)):
                if name == part:  # of two parts with one name the last counts, as in a sample
                    place, _ = self.source.locate(sample)
                    return FileEntry(size, (self.source.choice.shards[place], offset, size))
        if self.names(path):
            return FileEntry(0, None)
        raise FileNotFoundError(path)

    def listing(self, path: str) -> Iterator[str]:
        """Iterate over the names in a folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        path = path.strip("/")
        if self.sample_folders and (sample := self._find(path)) is not None:
            return iter(dict.fromkeys([*(name for name, _, _ in self._parts(sample)), *self.names(path)]))
        names = self.names(path)
        if path and not names:
            raise FileNotFoundError(path)
        return iter(names)

    def read(self, path: str, size: int, offset: int = 0) -> bytes:
        """Read up to ``size`` bytes of a file from ``offset`` on; fewer at its end.

        Raises:
            FileNotFoundError: there is no such file.
            IsADirectoryError: it is a folder.
            DatasetError: the shard cannot be read, or has changed.
        """
        entry = self.entry(path)
        if entry.part is None:
            raise IsADirectoryError(path)
        shard, begin, whole = entry.part
        size = max(0, min(size, whole - offset))
        return self.source.store.fetch([(shard, begin + offset, size)])[0] if size else b""

    # -- look-ups -----------------------------------------------------------------------------------------------------

    def _find(self, key: str) -> int | None:
        """The number of the first sample with a key; None if there is none."""
        return next(iter(self._keys.find(key)), None)

    def _parts(self, sample: int) -> list[tuple[str, int, int]]:
        """Name, offset and size in bytes of each part of a sample."""
        return self.source.index.key_and_parts(sample)[1]

    def _names(self, folder: str) -> tuple[str, ...]:
        """The names in a folder that keys with slashes make; empty if there is no such folder."""
        start, index = f"{folder}/" if folder else "", self.source.index
        names: dict[str, None] = {}
        for sample, key in enumerate(index.keys(0, len(index))):
            if not key.startswith(start):
                continue
            rest = key[len(start) :]
            folders = rest.split("/") if self.sample_folders else rest.split("/")[:-1]
            if not _NO_NAMES.isdisjoint(folders):  # the kernel would refuse the whole listing
                continue
            head, slash, _ = rest.partition("/")
            if slash or self.sample_folders:
                names[head] = None
            else:
                names.update((f"{head}.{name}", None) for name, _, _ in self._parts(sample))
        return tuple(names)
