"""Files in a folder, and objects in a bucket in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import fsspec

from energon_lite.extras.remote import checked_bucket
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource


def parts_of(source: WebdatasetSource, indices: Iterable[int] = range(10)) -> list[dict[str, bytes]]:
    """The parts of samples, one after the other."""
    reader = SampleReader(source)
    return [dict(reader.sample(index).parts) for index in indices]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def size_of(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def wait_for_writers() -> None:
    """Wait until threads have written all objects that this process has given to buckets."""
    waiting = checked_bucket._threads(os.getpid()).waiting
    for _ in range(checked_bucket._WAITING):
        assert waiting.acquire(timeout=60)
    waiting.release(checked_bucket._WAITING)


def objects() -> dict[str, bytes]:
    """Objects in the bucket, when all are written."""
    wait_for_writers()
    fs = fsspec.filesystem("memory")
    names = [name for name in fs.find("/bucket/samples") if not name.endswith("energon_lite.store")]
    return {name: fs.cat_file(name) for name in names}
