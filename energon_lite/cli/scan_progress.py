"""Show how far the indexing of shards is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["scan_progress"]

#: Seconds between two lines where there is no terminal, such as in the log of a job.
_BETWEEN = 10.0


@contextmanager
def scan_progress(root: str, shards: int, wanted: bool) -> Iterator[Callable[[str], None] | None]:
    """Give a function to call with the name of each shard that is done.

    Bytes are those of the shards, of which little more than the headers is read; so GB/s may exceed the disk's.

    Args:
        root: the data set's folder.
        shards: how many there are to do.
        wanted: False: show nothing.
    """
    if not wanted or not shards:
        yield None
    elif sys.stderr.isatty():
        with _bar(root, shards) as tick:
            yield tick
    else:
        yield _lines(root, shards)


@contextmanager
def _bar(root: str, shards: int) -> Iterator[Callable[[str], None]]:
    from tqdm import tqdm

    size, start = 0, time.monotonic()
    with tqdm(total=shards, unit="shard", desc="Indexing", dynamic_ncols=True) as bar:

        def tick(name: str) -> None:
            nonlocal size
            size += _size(root, name)
            bar.set_postfix_str(_rate(size, time.monotonic() - start), refresh=False)
            bar.update(1)

        yield tick


def _lines(root: str, shards: int) -> Callable[[str], None]:
    size = done = 0
    start = last = time.monotonic()

    def tick(name: str) -> None:
        nonlocal size, done, last
        size, done, now = size + _size(root, name), done + 1, time.monotonic()
        if now - last < _BETWEEN:
            return
        last, elapsed = now, now - start
        left = elapsed / done * (shards - done)
        click.echo(f"Indexed {done} of {shards} shards, {_rate(size, elapsed)}, about {left:.0f} s left", err=True)

    return tick


def _size(root: str, name: str) -> int:
    try:
        return os.stat(os.path.join(root, name)).st_size
    except OSError:
        return 0


def _rate(size: int, seconds: float) -> str:
    return f"{size / max(seconds, 1e-6) / 1e9:.2f} GB/s"
