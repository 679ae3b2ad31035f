"""Steps of a constant number of micro-batches, each with equal work for every rank, for any number of ranks.

A step is a fixed number of consecutive micro-batches of the global sequence. It keeps its samples: they are only
regrouped, so the optimizer sees the same step. The result is a function of the step alone; it does not depend on the
number of ranks, which may change during a run.

Without a cost model, steps are balanced in tokens and attention. A :class:`StepCostModel` balances them in all costs of
their samples; implementations are in :mod:`energon_lite.extras.balance`, and guests name theirs in their table
``COST_MODELS``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.epochs import keep_apart
from energon_lite.batching.exchange import exchange_samples
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.errors import TopologyError, UsageError

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
    # Each cost as a share of its row's total, without floating point.
    totals = [max(1, int(row.sum())) for row in costs]
    parts = [[cost * _SCALE // total for cost in row] for row, total in zip(costs.tolist(), totals, strict=True)]
    shares = np.array(parts, dtype=np.int64)
    assignments = _swap_batches(_differencing(shares.sum(axis=0).tolist(), ranks), shares)
    return np.array(sorted(sorted(share) for share in assignments), dtype=np.int64).T


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


def _swap_batches(assignments: list[list[int]], shares: Ints) -> list[list[int]]:
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


#: Version of the algorithm; raised when the same micro-batches would make other steps than before, or a limit of images
#: other micro-batches. It is written into states; states with another version are refused.
STEP_VERSION = 1

#: Sizes of the groups of micro-batches inside which samples are swapped: the first that divides the step is used. The
#: work is then linear in the step, not quadratic.
_GROUPS = (8, 7, 6, 5, 4, 9, 10, 11, 12, 13, 14, 15, 16)

#: A swap may make the fullest micro-batch fuller by one part in this number.
_SLACK = 200


def whole_steps(
    batches: MicroBatches,
    step: int,
    capacity: Capacity | None = None,
    sample: Ints | None = None,
    balancer: StepBalancer | None = None,
) -> MicroBatches:
    """Divide the samples of the last, partial step among a full number of micro-batches.

    Packed ones are regrouped, longest samples first, each to the emptiest micro-batch. Padded ones, and packed ones
    that would exceed the capacity that way, are split instead: the fullest is halved repeatedly, so that none exceeds
    the capacity. If there are fewer samples than micro-batches, some stay empty.

    Args:
        batches: the micro-batches, in the order of the steps.
        step: micro-batches in a step.
        capacity: capacity of a packed micro-batch; None: halve.
        sample: the number of the sample at each position of the chunk, such that copies go into different
            micro-batches; None: no sample repeats.
        balancer: balancer with a limit of images; None: there is no such limit.

    Example:
        >>> [part.tolist() for part in whole_steps(Fixed(4).plan(np.array([1, 1, 1, 1, 1])), step=3)]
        [[0, 1], [2, 3], [4]]
    """
    if not len(batches) % step:
        return batches
    first = len(batches) - len(batches) % step
    start = int(batches.offsets[first])
    lengths = batches.length[start:]
    assignments = None
    if batches.packed and capacity is not None:
        if balancer is None:
            sizes, limits = capacity.sizes(lengths)[None], [capacity.limit]
        else:
            sizes, limits = balancer.sizes(batches, capacity)
        owner = np.arange(len(batches.sample)) if sample is None else sample[batches.sample]
        assignments = _assigned(sizes[:, -len(lengths) :].T.tolist(), step, limits, owner[start:].tolist())
    if assignments is None:
        assignments = _halved(lengths, (batches.offsets[first:] - start).tolist(), step)
    entries = np.concatenate([np.arange(start), *(start + share for share in assignments)])
    rows = [*batches.rows()[:first], *map(len, assignments)]
    return batches.regrouped(entries, rows, later=len(lengths))


def _assigned(sizes: list[list[int]], count: int, limits: Sequence[int], owner: Sequence[int]) -> list[Ints] | None:
    """Indices of the samples of each of ``count`` micro-batches; None if that exceeds a limit or joins two copies."""
    assignments: list[list[int]] = [[] for _ in range(count)]
    owners: list[set[int]] = [set() for _ in range(count)]
    heap = [([0] * len(limits), number) for number in range(count)]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number][0], number)):
        passed = []
        while heap and owner[number] in owners[heap[0][1]]:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        loads, share = heapq.heappop(heap)
        after = [load + size for load, size in zip(loads, sizes[number], strict=True)]
        if any(load > limit for load, limit in zip(after, limits, strict=True)):
            return None
        assignments[share].append(number)
        owners[share].add(owner[number])
        for entry in (*passed, (after, share)):
            heapq.heappush(heap, entry)
    return [np.array(sorted(share), dtype=np.int64) for share in assignments]


def _halved(lengths: Ints, edges: list[int], count: int) -> list[Ints]:
    """Indices of the samples of each of ``count`` micro-batches, from fewer ones with the given edges."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    while len(edges) <= count:
        divisible = np.flatnonzero(np.diff(edges) > 1)
        if not len(divisible):
            edges.append(edges[-1])
            continue
        fullest = int(divisible[np.diff(ends[edges])[divisible].argmax()])
        first, stop = edges[fullest : fullest + 2]
        middle = (ends[first] + ends[stop]) / 2
        edges.insert(fullest + 1, first + 1 + int(np.abs(ends[first + 1 : stop] - middle).argmin()))
    return [np.arange(first, stop) for first, stop in pairwise(edges)]


def even_step(batches: MicroBatches, capacity: Capacity | None, sample: Ints | None = None) -> MicroBatches:
    """Balance attention cost and tokens over the micro-batches of one step, and sort them, costliest first.

    Samples of packed micro-batches are swapped (:func:`~energon_lite.batching.exchange.exchange_samples`).
    Padded ones are only sorted: a swap would add padding. :func:`rank_slot` relies on this order.

    Args:
        batches: the micro-batches of one step.
        capacity: capacity of a packed micro-batch; None: no samples are swapped.
        sample: the number of the sample at each position of the chunk; None: no sample repeats.
    """
    if batches.packed and capacity is not None and len(batches.sample):
        batches = _exchanged(batches, capacity, sample)
    return batches.select(np.argsort(-batches.attention(), kind="stable"))


def _exchanged(batches: MicroBatches, capacity: Capacity, sample: Ints | None) -> MicroBatches:
    count = len(batches)
    groups = next((count // size for size in _GROUPS if count % size == 0), 1)
    assignments = assign(
        np.stack([batches.tokens(), batches.attention()]), groups
    )  # [micro-batches of a group, groups]
    even = exchange_samples(batches.select(assignments.T.reshape(-1)), _bound(batches, capacity), step=len(assignments))
    if sample is None:
        return even
    sizes = capacity.sizes(even.length)
    apart = keep_apart(even, sample, sizes, np.zeros_like(sizes), lambda sizes, _: sum(sizes) <= capacity.limit)
    return apart if len(apart) == count else batches


def rank_slot(rank: int, world: int, turn: int) -> int:
    """Index of the micro-batch that a rank takes, among the ``world`` ones of a turn.

    The costliest come first, so every second turn is assigned in reverse: if a step has several turns, the sums of the
    ranks differ less.

    Example:
        >>> [rank_slot(0, world=4, turn=turn) for turn in range(4)]
        [0, 3, 0, 3]
    """
    return world - 1 - rank if turn % 2 else rank


def _bound(batches: MicroBatches, capacity: Capacity) -> Capacity:
    """A capacity that prevents a partly filled step from balancing attention at the expense of tokens."""
    edges = batches.offsets[:-1][batches.rows() > 0]
    sizes = np.add.reduceat(capacity.sizes(batches.length), edges) if len(edges) else edges
    fullest = int(sizes[sizes <= capacity.limit].max(initial=0))
    return replace(capacity, limit=min(capacity.limit, fullest + fullest // _SLACK)) if fullest else capacity


# -- the size of a step ------------------------------------------------------------------------------------------------


ScalingRule = Literal["linear", "sqrt", "none"]
SCALING_RULES: tuple[ScalingRule, ...] = get_args(ScalingRule)


def learning_rate_scale(size: float, reference: float, rule: ScalingRule = "sqrt") -> float:
    """Factor by which to multiply the learning rate of a step.

    Args:
        size: size of the step's global batch, in samples or, better, in tokens that count in the loss.
        reference: the size for which the learning rate was chosen, in the same unit.
        rule: ``linear``: proportional to the size, such that each sample has a constant influence on the weights, for
            SGD (Goyal et al. 2017, "Accurate, large minibatch SGD"); ``sqrt``: for Adam and similar optimizers
            (Malladi et al. 2022, "On the SDEs and scaling rules for adaptive gradient algorithms"); ``none``: 1.

    Raises:
        UsageError: a size is negative, the reference is not positive, or the rule is unknown.

    Example:
        >>> learning_rate_scale(48_000, 12_000, "linear"), learning_rate_scale(48_000, 12_000, "sqrt")
        (4.0, 2.0)
    """
    if rule not in SCALING_RULES:
        raise UsageError(f"there is no rule {rule!r} for the learning rate", fix=f"use one of {SCALING_RULES}")
    if not (size >= 0 and reference > 0):
        raise UsageError(f"a batch of {size} against one of {reference}", fix="give positive sizes, in the same unit")
    if rule == "none":
        return 1.0
    return size / reference if rule == "linear" else math.sqrt(size / reference)


# -- the door for cost models -----------------------------------------------------------------------------------------


class Lengths(Protocol):
    """Lengths of a leaf's samples: an array, or an object that is indexed like one."""

    def __len__(self) -> int:
        """Number of samples of the leaf."""

    def __getitem__(self, key: Any) -> Any:
        """Lengths of samples ``key`` in tokens, an int64 array."""


#: Names of sizes of a sample: its length, which the plan knows, and the number of its images, a column.
TOKENS = "tokens"
IMAGES = "images"


class StepBalancer(Protocol):
    """Balancer of the micro-batches of one plan chunk. Its methods are functions of their arguments alone, because all
    ranks call them."""

    def sizes(self, batches: MicroBatches, capacity: Capacity) -> tuple[Ints, list[int]]:
        """Return sizes of entries, ``[limits, entries]``, and the limit of a micro-batch for each row.

        The first row is the one of the capacity; images may follow.
        """

    def within_limits(self, batches: MicroBatches, capacity: Capacity, edges: Sequence[int]) -> MicroBatches:
        """Return micro-batches of the same samples that keep all limits; a sample that exceeds one is alone.

        Args:
            batches: the micro-batches of the chunk.
            capacity: capacity of a micro-batch.
            edges: boundaries of the chunk's stretches (:class:`~energon_lite.batching.epochs.Stretches`), which stay
                apart.
        """

    def even(self, batches: MicroBatches, capacity: Capacity | None, sample: Ints | None) -> MicroBatches:
        """Return the same number of micro-batches of the same samples, balanced in all costs, in the order of ranks: in
        turn ``t``, rank ``r`` of ``w`` takes micro-batch ``t * w + r``.

        Args:
            batches: the micro-batches of one step.
            capacity: capacity of a packed micro-batch; None: no samples are swapped.
            sample: the number of the sample at each position of the chunk; None: no sample repeats.
        """


class StepCostModel(Protocol):
    """Cost model of a step: the argument ``costs`` of :class:`~energon_lite.ByTokens`."""

    @property
    def needs(self) -> Sequence[str]:
        """Names of the sizes of a sample that the model needs: :data:`TOKENS`, and columns."""

    def by_feature(self) -> Mapping[str, int]:
        """Return the coefficients: plain data for states, equal for equal models only."""

    def balancer(self, sizes: Mapping[str, Ints], max_images: int | None) -> StepBalancer:
        """Return the balancer of a chunk.

        Args:
            sizes: by name, of each sample of the chunk, ``[samples]``: :data:`TOKENS`, the needed ones, and
                :data:`IMAGES` if they are limited.
            max_images: limit of images in a micro-batch; None: there is none.
        """


class CostColumns(NamedTuple):
    """Cost model of a plan, with the stored sizes of the samples.

    Args:
        model: the cost model.
        leaves: columns of each leaf's samples, by name of the size; tokens are the plan's lengths.
        max_images: limit of images in a micro-batch; None: there is none.
    """

    model: StepCostModel
    leaves: Sequence[Mapping[str, Lengths]]
    max_images: int | None = None
