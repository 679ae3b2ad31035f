"""Steps of a constant number of micro-batches, each with the same work for every rank, however many ranks there are.

A step is so many consecutive micro-batches of the global sequence. It keeps its samples: they are only put together
differently, so the optimizer sees the same step. All of this is a function of the step alone; the number of ranks,
which may change in mid-run, is not asked.
"""

from __future__ import annotations

import numpy as np

from energon_lite.batching.balance import deal
from energon_lite.batching.capacity import Capacity
from energon_lite.batching.exchange import exchange_samples
from energon_lite.batching.micro_batches import MicroBatches

__all__ = ["even_step", "seat", "whole_steps"]

#: Samples are exchanged inside groups of so many micro-batches, the first of these numbers that divides the step: the
#: work then grows with the step, not with its square.
_GROUPS = (8, 7, 6, 5, 4, 9, 10, 11, 12, 13, 14, 15, 16)


def whole_steps(batches: MicroBatches, step: int) -> MicroBatches:
    """Divide micro-batches of the last step until it has as many as the others.

    The fullest is halved, again and again, so nothing exceeds the capacity. Fewer samples than micro-batches leave some
    of them empty.

    Args:
        batches: in the order of the steps.
        step: micro-batches in a step.

    Example:
        >>> [part.tolist() for part in whole_steps(Fixed(4).plan(np.array([1, 1, 1, 1, 1])), step=3)]
        [[0, 1], [2, 3], [4]]
    """
    missing = -len(batches) % step
    if not missing:
        return batches
    first = len(batches) - len(batches) % step
    edges = batches.offsets[first:].tolist()
    ends = np.concatenate([[0], np.cumsum(batches.length)])
    for _ in range(missing):
        sizes = np.diff(ends[edges])
        divisible = np.flatnonzero(np.diff(edges) > 1)
        if not len(divisible):
            edges.append(edges[-1])
            continue
        fullest = int(divisible[sizes[divisible].argmax()])
        start, stop = edges[fullest : fullest + 2]
        middle = (ends[start] + ends[stop]) / 2
        edges.insert(fullest + 1, start + 1 + int(np.abs(ends[start + 1 : stop] - middle).argmin()))
    offsets = np.concatenate([batches.offsets[:first], edges]).astype(np.int64)
    return batches.cut(offsets)


def even_step(batches: MicroBatches, capacity: Capacity | None) -> MicroBatches:
    """The micro-batches of one step with attention cost, and tokens, as equal as can be found, costliest first.

    Between packed ones, samples are exchanged (:func:`~energon_lite.batching.exchange.exchange_samples`). Padded ones
    are only brought into order: an exchange would add padding. :func:`seat` makes use of the order.

    Args:
        batches: those of one step.
        capacity: what a packed micro-batch may hold; None: nothing is exchanged.
    """
    if batches.packed and capacity is not None:
        groups = _groups(len(batches))
        hands = deal(batches.tokens(), batches.attention(), groups)  # [micro-batches of a group, groups]
        batches = exchange_samples(batches.select(hands.T.reshape(-1)), capacity, step=len(hands))
    return batches.select(np.argsort(-batches.attention(), kind="stable"))


def seat(rank: int, world: int, turn: int) -> int:
    """Which of the ``world`` micro-batches of a turn a rank takes.

    The costliest come first, so every second turn is dealt the other way round: where a step has several turns, the
    sums of the ranks are nearer to each other then.

    Example:
        >>> [seat(0, world=4, turn=turn) for turn in range(4)]
        [0, 3, 0, 3]
    """
    return world - 1 - rank if turn % 2 else rank


def _groups(count: int) -> int:
    """Into how many equal groups so many micro-batches are divided; 1 if their number has no suitable divisor."""
    return next((count // size for size in _GROUPS if count % size == 0), 1)
