"""Going on with micro-batches of another size: a place that was counted in those of one size, in those of another.

The sequence of samples does not depend on the size of micro-batches, only where it is cut. So a run may go on with
another size wherever one of its micro-batches begins. With ``micro_batch_size * world_size`` unchanged, or any other
split of the global batch, each global batch then has the samples that it would have had.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any, TypeVar

from energon_lite.errors import StateMismatchError, counted
from energon_lite.loading.iterators.state import Numbers, saved_settings

__all__ = ["BATCH_SIZE", "next_position", "resized", "saved_batch_size", "steps_to"]

N = TypeVar("N", bound=Numbers)

#: Where a size of micro-batches stands among the settings of a run, and from where on it cannot be one.
BATCH_SIZE = "batch_size"
_MOST = 1 << 32


def saved_batch_size(state: Any) -> Any:
    """The ``batch_size`` of the run that a state is of, as it was given; None: single samples, or it does not say."""
    size = (saved_settings(state) or {}).get(BATCH_SIZE)
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < _MOST else None


def next_position(position: int, old: int, new: int) -> int:
    """The first position from ``position`` on, in micro-batches of ``old`` samples, at which one of ``new`` begins.

    Example:
        >>> next_position(3, old=2, new=4)
        4
    """
    unit = new // gcd(old, new)
    return -(-position // unit) * unit


def steps_to(position: int, old: int, new: int, world_size: int) -> int | None:
    """How many more steps of ``world_size`` micro-batches of ``old`` samples end where one of ``new`` begins; None:
    none does.

    Example:
        >>> steps_to(3, old=2, new=4, world_size=3), steps_to(3, old=2, new=4, world_size=2)
        (1, None)
    """
    unit = new // gcd(old, new)
    return next((steps for steps in range(unit) if not (position + steps * world_size) % unit), None)


def resized(
    numbers: N, old: int, new: int, ends: tuple[int | None, int | None], world_size: int, *, give_up: bool = False
) -> N:
    """A place in micro-batches of another size.

    Args:
        numbers: the place, in micro-batches of ``old`` samples.
        old, new: samples in a micro-batch.
        ends: positions at which the pass ends, with either size; None: it does not.
        world_size: of the ranks that go on, for the message.
        give_up: pass over the rest of a new micro-batch that begins before the place.

    Raises:
        StateMismatchError: the place is inside of a new micro-batch; says where the next one begins.
    """
    position, (end, new_end) = numbers.position, ends
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
    # A loop that was begun has as many samples behind it as before; rounded up, where that is no whole number.
    in_loop = -(-(position - numbers.loop_start) * old // new)
    here = -(-samples // new)
    return replace(numbers, position=here, loop_start=max(0, here - in_loop))
