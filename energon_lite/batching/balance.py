"""Assignment of the micro-batches of a step to data-parallel ranks, such that all ranks have equal work."""

from __future__ import annotations

import heapq

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.errors import TopologyError

__all__ = ["assign"]

#: Loads are compared as integers, in units of 1/2**40 of the step's total: floating point could differ between ranks.
_SCALE = 1 << 40


def assign(costs: Ints, ranks: int) -> Ints:
    """Give each rank the same number of micro-batches, with every kind of cost balanced over the ranks.

    The contents of the step do not change, only their distribution over the ranks. The optimizer's result is the same.

    The largest differencing method of Karmarkar and Karp, in the variant with equal counts, runs first, on the sum of
    all shares. Then micro-batches of the most loaded rank are swapped with others while that lowers its load.

    Args:
        costs: costs of each micro-batch of the step, one row for each kind (such as tokens and attention):
            ``[rows, micro-batches]``.
        ranks: a divisor of the number of micro-batches.

    Returns:
        Numbers of micro-batches ``[micro-batches // ranks, ranks]``; column ``r`` is for rank ``r``.

    Raises:
        TopologyError: the micro-batches cannot be divided into equal numbers.

    Example:
        >>> assign(np.array([[9, 5, 1, 5]]), ranks=2).T.tolist()
        [[0, 2], [1, 3]]
    """
    count = costs.shape[1]
    if ranks < 1 or count % ranks:
        raise TopologyError(
            f"{count} micro-batches of a step cannot be assigned to {ranks} ranks in equal numbers",
            fix="make the micro-batches of a step a multiple of the data-parallel ranks",
        )
    if count <= ranks:
        return np.arange(count, dtype=np.int64).reshape(-1, ranks)
    shares = np.stack([_share(row) for row in costs])
    assignments = _exchange(_differencing(shares.sum(axis=0).tolist(), ranks), shares)
    return np.array(sorted(sorted(share) for share in assignments), dtype=np.int64).T


def _share(values: Ints) -> Ints:
    """Each value as a share of the total, in units of 1/2**40, without floating point."""
    total = max(1, int(values.sum()))
    return np.array([value * _SCALE // total for value in values.tolist()], dtype=np.int64)


def _differencing(weights: list[int], ranks: int) -> list[list[int]]:
    """Indices of the weights for each rank: equal counts, with sums close to each other."""
    order = sorted(range(len(weights)), key=lambda number: (-weights[number], number))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for serial, first in enumerate(range(0, len(order), ranks)):
        parts = [(weights[number], [number]) for number in order[first : first + ranks]]
        heap.append((parts[-1][0] - parts[0][0], serial, parts))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        # Merge the two partial assignments with the largest differences: large sums of one, small sums of the other.
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a + b, mine + yours) for (a, mine), (b, yours) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [numbers for _, numbers in heap[0][2]]


def _exchange(assignments: list[list[int]], shares: Ints) -> list[list[int]]:
    """Swap single micro-batches of the most loaded rank with others while that lowers the largest load."""
    held = np.array(assignments)  # [ranks, each]
    loads = shares[:, held].sum(axis=2)  # [rows, ranks]
    for _ in range(4 * held.size):
        worst = int(loads.max(axis=0).argmax())
        # Effect of swapping micro-batch i of the most loaded rank with j of rank r: [rows, i, r, j]
        moved = shares[:, held[worst]][:, :, None, None] - shares[:, held][:, None]
        mine = (loads[:, worst][:, None, None, None] - moved).max(axis=0)
        yours = (loads[:, None, :, None] + moved).max(axis=0)
        after = np.maximum(mine, yours)
        after[:, worst] = loads.max()
        best = int(after.argmin())
        if int(after.flat[best]) >= int(loads.max()):
            break
        i, other, j = (int(place) for place in np.unravel_index(best, after.shape))
        change = moved[:, i, other, j]
        loads[:, worst] -= change
        loads[:, other] += change
        held[worst, i], held[other, j] = held[other, j], held[worst, i]
    return [[int(number) for number in share] for share in held]
