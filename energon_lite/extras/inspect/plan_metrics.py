"""Metrics of a plan: its fill, its balance over ranks, and its effect on the statistics of training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import assign, even_step, rank_slot, whole_steps

__all__ = ["PlanMetrics", "even_balance", "lateness", "length_correlation", "measure_plan", "rank_loads"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PlanMetrics:
    """Metrics of a plan.

    Args:
        micro_batches: number of micro-batches.
        steps: optimizer steps of an epoch, including a last partial one.
        fill: tokens, of the tokens that all micro-batches could hold; None without a capacity.
        padding_efficiency: tokens, as a share of tokens and padding.
        over: share of the micro-batches above the capacity.
        length_correlation: intraclass correlation of log lengths in micro-batches. 0: lengths are combined at random;
            1: all lengths of a micro-batch are equal.
        step_variance_ratio: variance of a step's mean log length, relative to that of steps of random samples.
        effective_samples: share of the samples that count if each micro-batch's mean loss has the same weight
            (Kish's effective sample size); 1 if all samples weigh the same.
        lateness: largest number of places by which a sample comes after its place in the stream.
        token_balance: mean over maximum of the ranks' tokens (padding included), averaged over steps.
        attention_balance: the same for squared lengths.
    """

    micro_batches: int
    steps: int
    fill: float | None
    padding_efficiency: float
    over: float
    length_correlation: float
    step_variance_ratio: float
    effective_samples: float
    lateness: int
    token_balance: float
    attention_balance: float


def measure_plan(batches: MicroBatches, *, ranks: int = 8, per_rank: int = 1) -> PlanMetrics:
    """Measure a plan with steps of ``ranks * per_rank`` consecutive micro-batches, balanced over the ranks.

    Args:
        batches: the plan of an epoch, at least one micro-batch.
        ranks: data-parallel ranks.
        per_rank: micro-batches of a rank in a step.
    """
    step = ranks * per_rank
    tokens = batches.tokens()
    space = batches.space()
    rows = batches.rows()
    token_loads, attention_loads = rank_loads(batches, ranks=ranks, per_rank=per_rank)
    weights = np.repeat(1.0 / np.maximum(rows, 1), rows)
    limit = batches.limit
    return PlanMetrics(
        micro_batches=len(batches),
        steps=-(-len(batches) // step),
        fill=None if limit is None else float(tokens.sum() / (len(batches) * limit)),
        padding_efficiency=float(tokens.sum() / max(1, int(space.sum()))),
        over=0.0 if limit is None else float((space > limit).mean()),
        length_correlation=length_correlation(batches),
        step_variance_ratio=_step_variance_ratio(batches, step),
        effective_samples=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        lateness=int(lateness(batches).max(initial=0)),
        token_balance=_mean_balance(token_loads),
        attention_balance=_mean_balance(attention_loads),
    )


def even_balance(
    batches: MicroBatches, capacity: Capacity | None, *, ranks: int = 8, per_rank: int = 1, steps: int | None = None
) -> tuple[float, float]:
    """Balance of tokens and of attention, as achieved by the loader's steps of ``ranks * per_rank`` micro-batches.

    Args:
        batches: the plan.
        capacity: capacity of packed micro-batches; None: no samples are swapped.
        ranks, per_rank: see :func:`measure_plan`.
        steps: measure only this number of steps, from the first; None: all.
    """
    step = ranks * per_rank
    whole = whole_steps(batches, step, capacity)
    count = len(whole) // step if steps is None else min(steps, len(whole) // step)
    slots = np.array(
        [[rank_slot(rank, ranks, turn) + turn * ranks for rank in range(ranks)] for turn in range(per_rank)]
    )
    loads = np.zeros((2, count, ranks), dtype=np.int64)
    for number in range(count):
        even = even_step(whole.select(np.arange(number * step, (number + 1) * step)), capacity)
        loads[0, number] = even.space()[slots].sum(axis=0)
        loads[1, number] = even.attention()[slots].sum(axis=0)
    return _mean_balance(loads[0]), _mean_balance(loads[1])


def rank_loads(batches: MicroBatches, *, ranks: int, per_rank: int = 1) -> tuple[Ints, Ints]:
    """Tokens (padding included) and squared lengths of each rank in each full step, ``[steps, ranks]`` both."""
    step = ranks * per_rank
    shape = (len(batches) // step, step)
    tokens, squares = (values[: shape[0] * step].reshape(shape) for values in (batches.space(), batches.attention()))
    if per_rank == 1:
        return tokens, squares
    assignments = [assign(np.stack([mine, costs]), ranks) for mine, costs in zip(tokens, squares, strict=True)]
    assigned = np.array(assignments, dtype=np.int64).reshape(shape[0], step)
    rows = np.arange(shape[0])[:, None]
    loads = (values[rows, assigned].reshape(shape[0], per_rank, ranks).sum(axis=1) for values in (tokens, squares))
    return next(loads), next(loads)


def lateness(batches: MicroBatches) -> Ints:
    """Number of places by which each entry comes after its place in the stream, ``[entries]``; negative if before."""
    rank = np.empty(len(batches.sample), dtype=np.int64)
    rank[np.lexsort((batches.start, batches.sample))] = np.arange(len(rank))
    return np.arange(len(rank)) - rank


def length_correlation(batches: MicroBatches) -> float:
    """Intraclass correlation of log lengths, with micro-batches as classes.

    It is a one-way analysis of variance with classes of unequal size (Donner 1986). Slightly negative values are noise,
    or the effect of combining long samples with short ones.
    """
    rows, group, values = _log_lengths(batches)
    count, total = int((rows > 0).sum()), len(values)
    if count < 2 or total <= count:
        return 0.0
    means = np.bincount(group, weights=values, minlength=len(rows)) / np.maximum(rows, 1)
    between = float((rows * (means - values.mean()) ** 2).sum()) / (count - 1)
    within = float(((values - means[group]) ** 2).sum()) / (total - count)
    size = float(total - (rows**2).sum() / total) / (count - 1)
    spread = between + (size - 1) * within
    return (between - within) / spread if spread > 0 else 0.0


def _step_variance_ratio(batches: MicroBatches, step: int) -> float:
    """Variance of the steps' mean log lengths, each relative to that of a mean of equally many random samples."""
    rows, group, values = _log_lengths(batches)
    steps = len(rows) // step
    variance = float(values.var()) if len(values) else 0.0
    if steps < 2 or variance == 0.0:
        return 1.0
    of_step = group // step
    kept = of_step < steps
    counts = np.bincount(of_step[kept])
    means = np.bincount(of_step[kept], weights=values[kept]) / counts
    return float((counts * (means - values.mean()) ** 2).mean()) / variance


def _log_lengths(batches: MicroBatches) -> tuple[Ints, Ints, Floats]:
    rows = batches.rows()
    return rows, np.repeat(np.arange(len(rows)), rows), np.log(np.maximum(batches.length, 1).astype(np.float64))


def _mean_balance(loads: Ints) -> float:
    """Mean over steps of mean / max over ranks."""
    if not len(loads):
        return 1.0
    return float((loads.mean(axis=1) / np.maximum(loads.max(axis=1), 1)).mean())
