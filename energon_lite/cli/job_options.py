"""Options of commands whose work is shared by processes and ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import click

from energon_lite.errors import UsageError
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["job_options", "json_object"]


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
