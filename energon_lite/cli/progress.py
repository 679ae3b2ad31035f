"""Progress of long commands: a bar on a terminal, lines at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from energon_lite.storage.sharded_job.job import Progress
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["progress", "show_share"]

#: Seconds between two lines without a terminal, such as in the log of a job.
_BETWEEN = 10.0


@contextmanager
def progress(wanted: bool, doing: str, unit: str) -> Iterator[Progress | None]:
    """Provide a function that shows progress; None if it is not ``wanted``. A bar ends when all is done.

    Args:
        doing: description of the work, such as ``"Indexing"``.
        unit: the counted unit, in the plural.
    """
    if not wanted:
        yield None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(unit=f" {unit}", desc=doing, dynamic_ncols=True) as bar:

            def move(done: int, total: int, note: str) -> None:
                bar.total = total
                bar.set_postfix_str(note, refresh=False)
                bar.update(done - bar.n)
                if done == total > 0:
                    bar.close()  # questions may follow

            yield move
    else:
        yield _lines(doing, unit)


def _lines(doing: str, unit: str) -> Progress:
    start = last = time.monotonic()

    def line(done: int, total: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _BETWEEN or not done:
            return
        last, elapsed = now, now - start
        left = elapsed / done * (total - done)
        rate = f"{done / elapsed:,.1f}/s" + (f", {note}" if note else "")
        click.echo(f"{doing}: {done:,} of {total:,} {unit}, {rate}, about {left:.0f} s left", err=True)

    return line


def show_share(ranks: Ranks, done: str) -> None:
    """Report the share of work of a rank other than 0."""
    click.echo(f"Rank {ranks.rank} of {ranks.world_size}: {done}; rank 0 goes on")
