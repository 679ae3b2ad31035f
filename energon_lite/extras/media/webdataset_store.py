"""A prepared data set, or a JSONL file, as a store: parts of samples by key and part name."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from energon_lite.errors import DatasetError, MissingEntryError
from energon_lite.extras.media.metadata import MediaTable
from energon_lite.samples import SourceInfo
from energon_lite.storage.index.key_index import KeyIndex
from energon_lite.storage.index.nv_meta import JSONL_PART
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.stores import FileStore
from energon_lite.storage.tar_scan import split_member_name

#: Most samples whose index rows are in memory at a time while samples are listed.
_LISTED = 1 << 16


class WebdatasetFileStore(FileStore[bytes]):
    """The parts of all samples of a prepared data set, in all splits; keys are the names of members of its tars,
    ``<key of the sample>.<part>``.

    Args:
        dataset_path: the folder, or its URL.

    Raises:
        NotPreparedError: there is no data set, or it was not prepared.
        DatasetError: as :meth:`~energon_lite.storage.read.webdataset.WebdatasetSource.open`.

    Example:
        >>> data, source = WebdatasetFileStore("data/coco")["000412.jpg"]
        >>> source.shard_name
        's001.tar'
    """

    def __init__(self, dataset_path: str | os.PathLike[str]):
        path = os.fspath(dataset_path) if hasattr(dataset_path, "__fspath__") else str(dataset_path)
        source = WebdatasetSource.open(path)
        self._begin(source, MediaTable(source.path))

    def _begin(self, source: WebdatasetSource, media: MediaTable) -> None:
        self._source = source
        self._media = media
        self._keys: KeyIndex | None = None
        self._lock = threading.Lock()
        _known[_name_of(type(self), source)] = self

    def __reduce__(self) -> Any:
        return _again, (type(self), self._source, self._media)

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        sample, name, part, offset, size = self._part(key)
        choice, shard = self._source.choice, self._shard_of(sample)
        data = self._source.store.read(*choice.shards[shard], offset, size)
        choice.verify(np.array([sample]), [part], [name], [[data]])
        return data, self._source_of(sample, key, shard)

    def locate(self, key: str) -> tuple[int, SourceInfo]:
        sample, *_, size = self._part(key)
        return size, self._source_of(sample, key, self._shard_of(sample))

    def _part(self, key: str) -> tuple[int, str, int, int, int]:
        """The part with a key: number of its sample, its name, its number in the sample, its offset and its size."""
        sample, name = self._located(key)
        parts = self._source.index.key_and_parts(sample)[1]
        for number in reversed(range(len(parts))):  # of two parts with one name the last counts
            own, offset, size = parts[number]
            if own == name:
                return sample, name, number, offset, size
        raise MissingEntryError(f"sample {key.rpartition('.')[0]!r} has no part {name!r}", where=self.get_path())

    def get_path(self) -> str:
        return self._source.path

    def get_media_metadata(self, key: str) -> Any:
        return self._media.get(key)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._source.index)

    def list_all_samples(self) -> Iterator[tuple[str, int, int]]:
        """Iterate over the samples: key, bytes in its shard (headers and padding included), and number of the shard.
        Only the index is read, in the order of the shards.

        Example:
            >>> next(WebdatasetFileStore("data/coco").list_all_samples())
            ('000000', 154112, 0)
        """
        index = self._source.index
        for shard, first, sizes in self._stretches():
            for sample, size in enumerate(sizes, first):
                yield index.key(sample), size, shard

    def list_all_sample_parts(self) -> Iterator[tuple[str, int, int]]:
        """Iterate over all parts of all samples: key of the part in this store, bytes, and number of the shard.

        Example:
            >>> next(WebdatasetFileStore("data/coco").list_all_sample_parts())
            ('000000.jpg', 152310, 0)
        """
        for shard, first, sizes in self._stretches():
            for sample in range(first, first + len(sizes)):
                key, parts = self._source.index.key_and_parts(sample)
                yield from ((f"{key}.{name}", size, shard) for name, _, size in parts)

    def list_sample_parts(self, sample_key: str, slow_mode: bool = False) -> Iterator[tuple[str, int, int]]:
        """Iterate over the parts of one sample: name without the key, bytes, and number of the shard.

        Args:
            sample_key: key of the sample.
            slow_mode: ignored; in Energon it reads the shard if the index lacks the parts, which this index has.

        Raises:
            MissingEntryError: there is no such sample; raised at the first part.
        """
        sample = self._sample(str(sample_key))
        shard = self._shard_of(sample)
        yield from ((name, size, shard) for name, _, size in self._source.index.key_and_parts(sample)[1])

    def get_total_size(self) -> int:
        """Bytes of all samples in their shards, headers and padding included."""
        return sum(sum(sizes) for _, _, sizes in self._stretches())

    def close(self) -> None:
        """Do nothing: open files belong to the process, and are shared. Energon's stores have this method."""

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.get_path()})"

    def _located(self, key: str) -> tuple[int, str]:
        """The number of the sample, and the name of the part, for a key."""
        split = split_member_name(key)
        if split is None:
            raise MissingEntryError(
                f"{key!r} is not the name of a part", where=self.get_path(), fix="write the sample's key, a dot, a part"
            )
        return self._sample(split[0]), split[1]

    def _sample(self, key: str) -> int:
        """The number of the sample with a key."""
        if self._keys is None:
            with self._lock:
                self._keys = self._keys or KeyIndex(self._source.index)
        samples = self._keys.find(key)
        if not samples:
            raise MissingEntryError(f"there is no sample {key!r}", where=self.get_path())
        if len(samples) > 1:
            raise DatasetError(
                f"{len(samples)} samples have the key {key!r}",
                where=self.get_path(),
                fix="give each of them a key of its own, or put them into data sets of their own",
            )
        return samples[0]

    def _shard_of(self, sample: int) -> int:
        return int(self._source.index.shards[:, 3].searchsorted(sample, "right")) - 1

    def _stretches(self) -> Iterator[tuple[int, int, list[int]]]:
        """All samples in stretches: number of the shard, number of the first sample, and the bytes of each sample."""
        index = self._source.index
        for shard, (_, _, end, first, _) in enumerate(index.shards[:-1].tolist()):
            stop = int(index.shards[shard + 1, 3])
            for begin in range(first, stop, _LISTED):
                last = min(begin + _LISTED, stop)
                headers = index.samples[begin : last + 1][:, 2].copy()
                if last == stop:
                    headers[-1] = end  # the row after the last sample belongs to the next shard
                yield shard, begin, np.diff(headers).tolist()

    def _source_of(self, sample: int, key: str, shard: int) -> SourceInfo:
        name = self._source.index.shard_names[shard]
        return SourceInfo(dataset_path=self.get_path(), index=key, shard_name=name, file_names=(key,))


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

    def list_sample_parts(self, sample_key: str, slow_mode: bool = False) -> Iterator[tuple[str, int, int]]:
        """The line with a number: its key in this store, its bytes with the line end, and 0; as in Energon."""
        sample = self._sample(str(sample_key))
        for _, first, sizes in self._stretches():
            if sample < first + len(sizes):
                yield f"{sample}.{JSONL_PART}", sizes[sample - first], 0
                return

    def list_all_sample_parts(self) -> Iterator[tuple[str, int, int]]:
        """Iterate over the lines: key in this store, bytes with the line end, and 0."""
        return ((f"{key}.{JSONL_PART}", size, shard) for key, size, shard in self.list_all_samples())

    def _located(self, key: str) -> tuple[int, str]:
        return self._sample(str(key).removesuffix(f".{JSONL_PART}")), JSONL_PART

    def _sample(self, key: str) -> int:
        if not key.isdecimal() or int(key) >= len(self):
            raise MissingEntryError(
                f"there is no line {key!r} in {len(self)}", where=self.get_path(), fix="give <number>.json, from 0"
            )
        return int(key)

    def _source_of(self, sample: int, key: str, shard: int) -> SourceInfo:
        name, files = self._source.index.shard_names[shard], (f"{sample}.{JSONL_PART}",)
        return SourceInfo(dataset_path=self.get_path(), index=sample, shard_name=name, file_names=files)


_Name = tuple[type["WebdatasetFileStore"], str, tuple[str, tuple[int, ...]]]
_known: weakref.WeakValueDictionary[_Name, WebdatasetFileStore] = weakref.WeakValueDictionary()


def _name_of(kind: type[WebdatasetFileStore], source: WebdatasetSource) -> _Name:
    return kind, source.path, source.version


def _again(kind: type[WebdatasetFileStore], source: WebdatasetSource, media: MediaTable) -> WebdatasetFileStore:
    """Return the copy of a store in another process, which opens the index at the first request. An existing copy is
    reused, because each pickled lazy value brings its store along."""
    store = _known.get(_name_of(kind, source))
    if store is None:
        store = kind.__new__(kind)
        store._begin(source, media)
    return store
