"""A store whose values tell whether they are whole."""

from __future__ import annotations

import hashlib
import threading

from energon_lite import SourceInfo
from energon_lite.storage.stores import FileStore


def value_of(key: str) -> bytes:
    """Bytes that nothing but this key has: ``<anything>-<size>``."""
    size = int(key.rpartition("-")[2])
    block = hashlib.sha256(key.encode()).digest()
    return (block * (size // 32 + 1))[:size]


def source_of(key: str) -> SourceInfo:
    return SourceInfo(dataset_path="numbers", index=key, shard_name="", file_names=(key,))


class NumberedStore(FileStore[bytes]):
    """Makes the values of all keys; counts how often."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.gate: threading.Event | None = None

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        self.reads.append(key)
        if self.gate is not None:
            self.gate.wait(60)
        return value_of(key), source_of(key)

    def get_path(self) -> str:
        return "numbers"
