"""Energon's reader and writer of the line offsets of a JSONL file (``.jsonl.idx``), which users' tools call."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
from typing_extensions import Self

from energon_lite.extras.energon.epath import EPath

_SUFFIX = ".jsonl.idx"


class IJsonlIndexReader:
    """Offsets of the lines of a JSONL file, and the file's size after them.

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
