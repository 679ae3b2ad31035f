"""Show how far measuring is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from energon_lite.cli.progress import progress

__all__ = ["measure_progress"]


@contextmanager
def measure_progress(root: str, samples: int, wanted: bool) -> Iterator[Callable[[int], None] | None]:
    """Give a function to call with each number of samples that are done.

    Args:
        root: the data set's folder.
        samples: how many there are to do.
        wanted: False: show nothing.
    """
    done = 0
    with progress(wanted and samples > 0, f"Measuring {os.path.basename(root.rstrip('/')) or root}", "samples") as show:

        def tick(count: int) -> None:
            nonlocal done
            done += count
            if show is not None:
                show(done, samples)

        yield None if show is None else tick
