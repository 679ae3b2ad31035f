"""A prepared data set, or a JSONL file, as a store: parts of samples by key and name."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from energon_lite.errors import DatasetError, MissingEntryError
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.shard_store import ShardIdentity
from energon_lite.storage.index.jsonl import PART
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.stores.file_store import FileStore
from energon_lite.storage.stores.media_table import MediaTable
from energon_lite.storage.tar.sample_columns import split_member_name

__all__ = ["JsonlFileStore", "WebdatasetFileStore"]


class WebdatasetFileStore(FileStore[bytes]):
    """The parts of all samples of a prepared data set, whatever its splits; keys are names of members of its tars,
    ``<key of the sample>.<part>``.

    Args:
        dataset_path: the folder, or its URL.

    Raises:
        NotPreparedError: there is none, or it was not prepared.
        DatasetError: as :meth:`~energon_lite.storage.read.webdataset.WebdatasetSource.open`.

    Example:
        >>> data, source = WebdatasetFileStore("data/coco")["000412.jpg"]
        >>> source.shard_name
        's001.tar'
    """

    def __init__(self, dataset_path: str | os.PathLike[str]):
        path = os.fspath(dataset_path) if hasattr(dataset_path, "__fspath__") else str(dataset_path)
        self._source = WebdatasetSource.open(path)
        self._media = MediaTable(self._source.path)
        self._keys: KeyIndex | None = None
        self._lock = threading.Lock()
        _known[_name_of(type(self), self._source)] = self

    def __reduce__(self) -> Any:
        return _again, (type(self), self._source, self._media)

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        sample, part = self._located(key)
        index = self._source.index
        shard = int(index.shards[:, 3].searchsorted(sample, "right")) - 1
        _, rows = index.key_and_part_rows(sample)
        found = [at for at in range(0, len(rows), 3) if index.part_names[rows[at + 2]] == part]
        if not found:
            raise MissingEntryError(f"sample {key.rpartition('.')[0]!r} has no part {part!r}", where=self.get_path())
        offset, size, _ = rows[found[-1] : found[-1] + 3]  # of two parts with one name the last counts
        name, path = index.shard_names[shard], self._source.choice.shards[shard][0]
        data = self._source.store.read(path, ShardIdentity(*index.shards[shard, :2].tolist()), offset, size)
        return data, self._source_of(sample, key, name)

    def get_path(self) -> str:
        return self._source.path

    def get_media_metadata(self, key: str) -> Any:
        return self._media.get(key)

    def __len__(self) -> int:
        """Samples."""
        return len(self._source.index)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.get_path()})"

    def _located(self, key: str) -> tuple[int, str]:
        """The number of the sample, and the name of the part."""
        split = split_member_name(key)
        if split is None:
            raise MissingEntryError(
                f"{key!r} is no name of a part", where=self.get_path(), fix="write the sample's key, a dot, the part"
            )
        if self._keys is None:
            with self._lock:
                self._keys = self._keys or KeyIndex(self._source.index)
        samples = self._keys.find(split[0])
        if not samples:
            raise MissingEntryError(f"there is no sample {split[0]!r}", where=self.get_path())
        if len(samples) > 1:
            raise DatasetError(
                f"{len(samples)} samples have the key {split[0]!r}",
                where=self.get_path(),
                fix="give each of them a key of its own, or put them into data sets of their own",
            )
        return samples[0], split[1]

    def _source_of(self, sample: int, key: str, shard: str) -> SourceInfo:
        return SourceInfo(dataset_path=self.get_path(), index=key, shard_name=shard, file_names=(key,))


class JsonlFileStore(WebdatasetFileStore):
    """The lines of a JSONL file; keys are ``<number>.json``, counted from 0.

    Args:
        jsonl_path: the file.

    Example:
        >>> JsonlFileStore("chats.jsonl").get("7.json")
        b'{"text": "a red bicycle"}'
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]):
        super().__init__(jsonl_path)

    def _located(self, key: str) -> tuple[int, str]:
        number = str(key).removesuffix(f".{PART}")
        if not number.isdecimal() or int(number) >= len(self):
            raise MissingEntryError(
                f"there is no line {key!r} in {len(self)}", where=self.get_path(), fix="give <number>.json, from 0"
            )
        return int(number), PART

    def _source_of(self, sample: int, key: str, shard: str) -> SourceInfo:
        names = (f"{sample}.{PART}",)
        return SourceInfo(dataset_path=self.get_path(), index=sample, shard_name=shard, file_names=names)


_Name = tuple[type["WebdatasetFileStore"], str, str]
_known: weakref.WeakValueDictionary[_Name, WebdatasetFileStore] = weakref.WeakValueDictionary()


def _name_of(kind: type[WebdatasetFileStore], source: WebdatasetSource) -> _Name:
    return kind, source.path, source.fingerprint


def _again(kind: type[WebdatasetFileStore], source: WebdatasetSource, media: MediaTable) -> WebdatasetFileStore:
    """A copy in another process, which opens the index when it is first asked; or the one that is there already: lazy
    values bring their stores along wherever they are sent."""
    store = _known.get(_name_of(kind, source))
    if store is not None:
        return store
    store = _known[_name_of(kind, source)] = kind.__new__(kind)
    store._source, store._media, store._keys, store._lock = source, media, None, threading.Lock()
    return store
