"""A data set as a tree of read-only files: each part of a sample is a file. Nothing is unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

from energon_lite.storage.files.shard_store import Shard
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar.sample_columns import split_member_name

__all__ = ["FileEntry", "FileView"]

#: Folder listings that are kept; making one reads all keys.
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
        sample = self._find(key)
        for name, offset, size in [] if sample is None else reversed(self._parts(sample)):
            if sample is not None and name == part:  # of two parts with one name the last counts, as in a sample
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
        if self.sample_folders and path and (sample := self._find(path)) is not None:
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
        index = self.source.index
        _, flat = index.key_and_part_rows(sample)
        rows = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return [(index.part_names[name], offset, size) for offset, size, name in rows]

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
