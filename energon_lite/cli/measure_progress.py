"""Show how far measuring is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["measure_progress"]

#: Seconds between two lines where there is no terminal, such as in the log of a job.
_BETWEEN = 10.0


@contextmanager
def measure_progress(root: str, samples: int, wanted: bool) -> Iterator[Callable[[int], None] | None]:
    """Give a function to call with each number of samples that are done.

    Args:
        root: the data set's folder.
        samples: how many there are to do.
        wanted: False: show nothing.
    """
    name = os.path.basename(root.rstrip("/")) or root
    if not wanted or not samples:
        yield None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=samples, unit=" samples", desc=f"Measuring {name}", dynamic_ncols=True, unit_scale=True) as bar:

            def tick(count: int) -> None:
                bar.update(count)

            yield tick
    else:
        yield _lines(name, samples)


def _lines(name: str, samples: int) -> Callable[[int], None]:
    done = 0
    start = last = time.monotonic()

    def tick(count: int) -> None:
        nonlocal done, last
        done, now = done + count, time.monotonic()
        if now - last < _BETWEEN:
            return
        last, elapsed = now, now - start
        left = elapsed / done * (samples - done)
        click.echo(
            f"Measured {done:,} of {samples:,} samples of {name}, {done / elapsed:,.0f}/s, about {left:.0f} s left",
            err=True,
        )

    return tick
