"""Stored data as Energon's functions see it: kind of a data set, shards of its splits, contents of files, offsets of
lines; and entries of metadatasets."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from energon_lite.config.dataset import load_split_config
from energon_lite.config.metadataset import is_metadataset
from energon_lite.errors import DatasetError, NotPreparedError, ShardFormatError
from energon_lite.extras.energon.epath import EPath
from energon_lite.storage.index.index_cache import local_meta
from energon_lite.storage.index.nv_meta import BOM, JSONL_PART, META_FOLDER, is_jsonl, read_info
from energon_lite.storage.tar_scan import split_member_name

#: Suffix of the file with the offsets of the lines of a JSONL file.
_SUFFIX = ".jsonl.idx"


class EnergonDatasetType(Enum):
    """Kind of a data set at a path."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: str | os.PathLike[str]) -> EnergonDatasetType:
    """Return the kind of the data set at a path.

    Example:
        >>> get_dataset_type("blend.yaml")
        <EnergonDatasetType.METADATASET: 'metadataset'>
    """
    where = EPath(path)
    if where.is_file():
        if is_jsonl(where.url):
            return EnergonDatasetType.JSONL
        return EnergonDatasetType.METADATASET if is_metadataset(where.url) else EnergonDatasetType.INVALID
    meta = where / META_FOLDER
    if any((meta / name).is_file() for name in (".info.json", ".info.yaml")):
        return EnergonDatasetType.WEBDATASET
    return EnergonDatasetType.FILESYSTEM if (meta / "index.sqlite").is_file() else EnergonDatasetType.INVALID


@dataclass(frozen=True)
class ShardInfo:
    """Name, path and number of samples of a shard."""

    name: str
    path: EPath
    count: int


@dataclass(frozen=True, kw_only=True)
class WebdatasetInfo:
    """Contents of ``.info.json``: the number of samples of each shard."""

    shard_counts: Mapping[str, int]
    energon_version: str | None = None


@dataclass(frozen=True, kw_only=True)
class WebdatasetSplits:
    """Contents of ``split.yaml``: the shards of each split."""

    split_parts: Mapping[str, Sequence[str]]
    exclude: Sequence[str] = ()


def get_dataset_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the number of samples of each shard of a prepared folder, from ``.info.json``."""
    return {"shard_counts": read_info(local_meta(os.fspath(EPath(path))))}


def get_info_shard_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the shards of a prepared folder, in all splits."""
    return list(get_dataset_info(path)["shard_counts"])


def check_dataset_info_present(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is prepared."""
    return get_dataset_type(path) is EnergonDatasetType.WEBDATASET


@dataclass(frozen=True)
class WebdatasetMeta:
    """Shards of a split.

    Args:
        sample_excludes: ``shard/key`` of excluded samples.
        shards: shards of the split.
        split_part_files: names of these shards.
        info_shard_files: names of all shards of the data set.
    """

    sample_excludes: frozenset[str]
    shards: Sequence[ShardInfo]
    split_part_files: Sequence[str]
    info_shard_files: Sequence[str]

    @staticmethod
    def from_config(
        path: str | os.PathLike[str], *, split_part: str, split_config: str | None = None
    ) -> WebdatasetMeta:
        """Read the shards of a split from ``.nv-meta``.

        Raises:
            ConfigError, DatasetError: the split does not exist, or the files are invalid.
        """
        folder = EPath(path)
        meta = local_meta(os.fspath(folder))
        counts = read_info(meta)
        split = load_split_config(os.path.join(meta, META_FOLDER, split_config or "split.yaml"))
        names = list(split.shards(split_part))
        return WebdatasetMeta(
            frozenset(f"{shard}/{key}" for shard, key in split.excluded_samples),
            [ShardInfo(name, folder / name, counts[name]) for name in names],
            names,
            list(counts),
        )


def iter_tar_contents(
    path: str | os.PathLike[str], extract_keys: Container[str] = ()
) -> Iterator[dict[str, bytes | None]]:
    """Yield the samples of a tar: parts by name, with bytes for those in ``extract_keys``, else None.

    Args:
        path: path or URL of the tar, which may be compressed.
        extract_keys: names of parts whose bytes to read.

    Raises:
        DatasetError: the file does not exist, or cannot be read.
        ShardFormatError: the file is no tar, or ends within a part.

    Example:
        >>> next(iter_tar_contents("s000.tar", ("json",)))
        {'jpg': None, 'json': b'{"label": 3}'}
    """
    where = os.fspath(EPath(path))
    sample, last = dict[str, "bytes | None"](), None
    try:
        with EPath(path).open("rb") as file, tarfile.open(fileobj=file, mode="r:*") as tar:
            for member in tar:
                split = split_member_name(member.name) if member.isreg() else None
                if split is None:
                    continue
                key, part = split
                if key != last and sample:
                    yield sample
                    sample = {}
                last = key
                data = tar.extractfile(member) if part in extract_keys else None
                sample[part] = None if data is None else data.read()
    except (tarfile.TarError, EOFError) as error:
        what = f"it is not a complete tar: {error}"
        raise ShardFormatError(what, where=where, fix="write it again") from error
    except FileNotFoundError as error:
        raise DatasetError("there is no such file", where=where, fix="check the path") from error
    if sample:
        yield sample


def iter_jsonl_contents(path: str | os.PathLike[str]) -> Iterator[dict[str, bytes]]:
    """Yield the lines of a JSONL file that are not blank, as bytes under ``json``.

    Raises:
        NotPreparedError: the file does not exist.

    Example:
        >>> next(iter_jsonl_contents("chats.jsonl"))
        {'json': b'{"text": "a red bicycle"}'}
    """
    try:
        with EPath(path).open("rb") as file:
            for number, line in enumerate(file):
                text = (line.removeprefix(BOM) if not number else line).strip()
                if text:
                    yield {JSONL_PART: text}
    except FileNotFoundError as error:
        where = os.fspath(EPath(path))
        raise NotPreparedError("there is no such JSONL file", where=where, fix="check the path") from error


class IJsonlIndexReader:
    """Reader of the offsets of the lines of a JSONL file, and the file's size after them, which users' tools call.

    Example:
        >>> IJsonlIndexReader.count_samples("chats.jsonl")
        30
    """

    def __init__(self, jsonl_path: EPath | str):
        self._offsets = np.frombuffer(EPath(jsonl_path).with_suffix(_SUFFIX).read_bytes(), "<u8")

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"the index has {len(self)} offsets, so none has number {index}")
        return int(self._offsets[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._offsets.tolist())

    def __len__(self) -> int:
        return len(self._offsets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the offsets are in memory."""

    @staticmethod
    def count_samples(jsonl_path: EPath | str) -> int:
        """Return the number of samples."""
        return EPath(jsonl_path).with_suffix(_SUFFIX).size() // 8 - 1

    @staticmethod
    def size(jsonl_path: EPath | str) -> int:
        """Return the size in bytes that the file had when it was indexed."""
        return IJsonlIndexReader(jsonl_path)._offsets[-1].item()


class IJsonlIndexWriter:
    """Writer of the index: append the offset of each sample, then the size of the file.

    Example:
        >>> with IJsonlIndexWriter(EPath("chats.jsonl")) as index:
        ...     index.append(0)
        ...     index.append(58)
    """

    def __init__(self, jsonl_path: EPath):
        self._index = jsonl_path.with_suffix(_SUFFIX)
        self._offsets = bytearray()

    def append(self, offset: int) -> None:
        """Append an offset."""
        self._offsets += offset.to_bytes(8, "little")

    def close(self, finalize: bool = True) -> None:
        """Write the index at once; without `finalize`, leave the earlier one."""
        if finalize:
            self._index.write_bytes(bytes(self._offsets))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close(finalize=kind is None)


class MetadatasetNode(dict[str, Any]):
    """An entry of a metadataset: a reference to a data set, a blend, a join, or a part of one.

    Args:
        fields: its keys, as in YAML; None values are left out.

    Example:
        >>> MetadatasetV2(path="blend.yaml", splits={"train": MetadatasetNode(path="coco", subset={"range": [0, 100]})})
    """

    def __init__(self, **fields: Any):
        given = {name: value for name, value in fields.items() if value is not None}
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        super().__init__(plain)
