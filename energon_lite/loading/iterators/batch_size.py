"""Resuming with another micro-batch size: conversion of a cursor from one size to another.

The sequence of samples does not depend on the size of micro-batches; the size only decides where the sequence is cut.
So a run can be resumed with another size at every position at which a micro-batch of that size begins. If
``micro_batch_size * world_size`` stays the same, or the global batch is split in any other way, each global batch has
the same samples as before.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any, TypeVar

from energon_lite.errors import StateMismatchError, counted
from energon_lite.loading.iterators.state import Numbers, saved_settings

__all__ = ["BATCH_SIZE", "next_position", "resized", "saved_batch_size", "steps_to"]

N = TypeVar("N", bound=Numbers)

#: Name of the micro-batch size among the settings of a run.
BATCH_SIZE = "batch_size"
#: Exclusive upper bound of a valid micro-batch size, in samples.
_MOST = 1 << 32


def saved_batch_size(state: Any) -> Any:
    """Return the ``batch_size`` that a state was saved with; None if batches are single samples or it is not stored."""
    size = (saved_settings(state) or {}).get(BATCH_SIZE)
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < _MOST else None


def next_position(position: int, old: int, new: int) -> int:
    """Return the first position from ``position`` on, in micro-batches of ``old`` samples, where one of ``new`` begins.

    Example:
        >>> next_position(3, old=2, new=4)
        4
    """
    unit = new // gcd(old, new)
    return -(-position // unit) * unit


def steps_to(position: int, old: int, new: int, world_size: int) -> int | None:
    """Return the number of steps after which a micro-batch of ``new`` samples begins; None if there is no such step.

    A step is ``world_size`` micro-batches of ``old`` samples; ``position`` counts micro-batches of ``old`` samples.

    Example:
        >>> steps_to(3, old=2, new=4, world_size=3), steps_to(3, old=2, new=4, world_size=2)
        (1, None)
    """
    unit = new // gcd(old, new)
    return next((steps for steps in range(unit) if not (position + steps * world_size) % unit), None)


def resized(
    numbers: N, old: int, new: int, ends: tuple[int | None, int | None], world_size: int, *, give_up: bool = False
) -> N:
    """Convert a cursor to micro-batches of another size.

    Args:
        numbers: the cursor, in micro-batches of ``old`` samples.
        old, new: samples in a micro-batch.
        ends: positions at which the pass ends, with the old and the new size; None if it does not end.
        world_size: number of ranks of the resumed run; only used in the error message.
        give_up: skip the rest of a new micro-batch that begins before the position.

    Raises:
        StateMismatchError: the position is inside a new micro-batch; the message says where the next one begins.
    """
    position = numbers.position
    end, new_end = ends
    if end is not None and new_end is not None and position >= end:
        return replace(numbers, position=new_end, loop_start=0)
    samples = position * old
    if samples % new and not give_up:
        following = next_position(position, old, new)
        following = following if end is None else min(following, end)
        steps = steps_to(position, old, new, world_size)
        ranks = counted(world_size, "rank")
        way = f"{steps} on {ranks}" if steps is not None else f"{following - position} on 1 rank; on {ranks} none ends"
        raise StateMismatchError(
            f"batch_size: {old} in the state, {new} here, and no batch of {new} begins at micro-batch {position:,}, "
            f"which is sample {samples:,}",
            fix=f"go on with batch_size={old} to micro-batch {following:,} (steps: {way} there), save, and change it "
            f"then; or take a state that was saved at a multiple of {new // gcd(old, new)} micro-batches",
        )
    # The samples delivered in the running loop stay the same; they are rounded up to whole new micro-batches.
    in_loop = -(-(position - numbers.loop_start) * old // new)
    here = -(-samples // new)
    return replace(numbers, position=here, loop_start=max(0, here - in_loop))
