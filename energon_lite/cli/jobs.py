"""Options of commands whose work is shared by processes and ranks, and their progress: a bar, or lines."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from energon_lite.errors import UsageError
from energon_lite.storage.sharded_job.job import Progress
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["job_options", "json_object", "progress", "show_share"]

#: Seconds between two lines without a terminal, such as in the log of a job.
_BETWEEN = 10.0


def json_object(text: str | None, option: str, example: str) -> dict[str, Any] | None:
    """Parse the value of an option that is a JSON object; None if it is not given.

    Raises:
        UsageError: the value is no JSON object.
    """
    if text is None:
        return None
    cure = f"write it like {option} '{example}', in single quotes"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}", fix=cure) from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} is not a JSON object", fix=cure)
    return value


def job_options(workers_do: str, *, least_workers: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--num-workers``, ``--progress``, ``--rank``, ``--world-size`` and ``--rank-timeout``.

    The command gets ``num_workers``, ``show_progress`` and ``ranks``.

    Args:
        workers_do: description of the processes, such as "Processes that read shards."
        least_workers: smallest number of processes.
    """
    options = [
        click.option(
            "--num-workers", type=click.IntRange(min=least_workers), help=f"{workers_do}  [default: one per core]"
        ),
        click.option(
            "--progress/--no-progress",
            "show_progress",
            default=True,
            help="Show the progress, as a bar or in lines.",
        ),
        click.option(
            "--rank", type=int, envvar="RANK", default=0, help="Rank of this process.  [default: $RANK, else 0]"
        ),
        click.option(
            "--world-size",
            type=int,
            envvar="WORLD_SIZE",
            default=1,
            help="Number of processes, on any machines, that share the work.  [default: $WORLD_SIZE, else 1]",
        ),
        click.option(
            "--rank-timeout",
            type=float,
            default=600.0,
            show_default=True,
            help="Seconds that rank 0 waits for other ranks without any progress.",
        ),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_ranks(*arguments: Any, rank: int, world_size: int, rank_timeout: float, **others: Any) -> None:
            command(*arguments, ranks=Ranks(rank, world_size, rank_timeout), **others)

        return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_ranks)

    return decorate


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
