"""Show how far the indexing of shards is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from energon_lite.cli.progress import progress

__all__ = ["scan_progress"]


@contextmanager
def scan_progress(root: str, shards: int, wanted: bool) -> Iterator[Callable[[str], None] | None]:
    """Give a function to call with the name of each shard that is done.

    Bytes are those of the shards, of which little more than the headers is read; so GB/s may exceed the disk's.

    Args:
        root: the data set's folder.
        shards: how many there are to do.
        wanted: False: show nothing.
    """
    done = size = 0
    start = time.monotonic()
    with progress(wanted and shards > 0, "Indexing", "shards") as show:

        def tick(name: str) -> None:
            nonlocal done, size
            done, size = done + 1, size + _size(root, name)
            if show is not None:
                show(done, shards, f"{size / max(time.monotonic() - start, 1e-6) / 1e9:.2f} GB/s")

        yield None if show is None else tick


def _size(root: str, name: str) -> int:
    try:
        return os.stat(os.path.join(root, name)).st_size
    except OSError:
        return 0
