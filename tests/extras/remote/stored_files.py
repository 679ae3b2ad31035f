"""Files in a folder, and objects in a bucket in memory."""

from __future__ import annotations

import time
from pathlib import Path

import fsspec


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def size_of(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def objects(expected: int | dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Objects in the bucket, once there are so many, or these: they are written in threads."""
    fs, deadline = fsspec.filesystem("memory"), time.monotonic() + 20
    while True:
        names = [name for name in fs.find("/bucket/samples") if not name.endswith("energon_lite.store")]
        found = {name: fs.cat_file(name) for name in names}
        if expected in (None, len(found), found) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)
