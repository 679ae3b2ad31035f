"""Picture of ``energon-lite plan``: lengths, fill of micro-batches, tokens of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.metrics import rank_loads
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.errors import UsageError, counted

__all__ = ["draw_plans"]

#: Largest number of steps in the picture.
_STEPS = 200
#: Height of a plan's curve, as a share of its row.
_HEIGHT = 0.9


def draw_plans(
    path: str | os.PathLike[str], lengths: Ints, plans: Mapping[str, MicroBatches], capacity: int, ranks: int
) -> None:
    """Draw a histogram of the lengths, the fill of each plan's micro-batches, and the tokens of its ranks in each step.

    Args:
        path: the file; its ending determines the format.
        lengths: tokens of each sample.
        plans: the plans by their names in the picture.
        capacity: the unit of the fill, in tokens.
        ranks: data-parallel ranks, each with one micro-batch a step.

    Raises:
        UsageError: matplotlib is not installed, or cannot write this format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib", fix="pip install 'energon-lite[plot]'") from None
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    left.hist(lengths, bins=100, color="0.4")
    left.set(xlabel="tokens of a sample", ylabel="samples", title=f"{len(lengths):,} lengths")
    # One row for each plan, so that similar curves do not hide each other.
    edges = np.linspace(0, max(1.0, *(float(plan.tokens().max(initial=0)) / capacity for plan in plans.values())), 51)
    shares = [np.histogram(plan.tokens() / capacity, bins=edges)[0] / max(1, len(plan)) for plan in plans.values()]
    loads = [np.sort(rank_loads(plan, ranks=ranks)[0][:_STEPS], axis=1) for plan in plans.values()]
    highest = max(1e-9, *(float(share.max()) for share in shares))
    most = max(capacity, *(int(load.max(initial=0)) for load in loads))
    for number, (share, load) in enumerate(zip(shares, loads, strict=True)):
        row, color = len(plans) - 1 - number, f"C{number % 10}"
        middle.stairs(row + _HEIGHT * share / highest, edges, baseline=row, fill=True, color=color)
        least, mean, largest = (row + _HEIGHT * part / most for part in (load[:, 0], load.mean(axis=1), load[:, -1]))
        right.fill_between(np.arange(len(load)), least, largest, color=color, alpha=0.25, lw=0)
        right.plot(mean, lw=1, color=color)
        right.axhline(row + _HEIGHT * capacity / most, color="k", lw=0.8, ls=":")
    middle.set_yticks(np.arange(len(plans)), [*plans][::-1], va="bottom")
    right.set_yticks(np.arange(len(plans)), [""] * len(plans))
    for axes in (middle, right):
        axes.set_ylim(0, len(plans))
        axes.grid(axis="y", lw=0.5)
    middle.set(xlabel="tokens of a micro-batch / capacity", title=f"Fill (highest: {highest:.0%} of a plan)")
    right.set(xlabel="step", title=f"{counted(ranks, 'rank')}: least, mean, most tokens (dotted: {capacity:,})")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"the picture cannot be written: {error}", where=path, fix="use .png, .pdf or .svg") from None
