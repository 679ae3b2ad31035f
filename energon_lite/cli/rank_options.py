"""Options of the commands whose work several processes may share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["rank_options"]


def rank_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--rank``, ``--world-size`` and ``--rank-timeout``; the command gets them as its argument ``ranks``."""

    @click.option(
        "--rank", type=int, envvar="RANK", default=0, help="Number of this process.  [default: $RANK, else 0]"
    )
    @click.option(
        "--world-size",
        type=int,
        envvar="WORLD_SIZE",
        default=1,
        help="Processes, on any machines, that share the work.  [default: $WORLD_SIZE, else 1]",
    )
    @click.option(
        "--rank-timeout",
        type=float,
        default=600.0,
        show_default=True,
        help="Seconds rank 0 waits without any progress.",
    )
    @functools.wraps(command)
    def with_ranks(*arguments: Any, rank: int, world_size: int, rank_timeout: float, **options: Any) -> None:
        command(*arguments, ranks=Ranks(rank, world_size, rank_timeout), **options)

    return with_ranks
