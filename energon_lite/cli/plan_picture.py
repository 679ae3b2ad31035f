"""The picture of ``energon-lite plan``: lengths, fill of micro-batches, tokens of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.metrics import rank_loads
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.errors import UsageError

__all__ = ["draw_plans"]

#: More steps than this are not told apart in a picture.
_STEPS = 200


def draw_plans(
    path: str | os.PathLike[str], lengths: Ints, plans: Mapping[str, MicroBatches], capacity: int, ranks: int
) -> None:
    """Draw a histogram of the lengths, the fill of each plan's micro-batches, and what its ranks have in each step.

    Args:
        path: where to; the ending says in which format.
        lengths: tokens of each sample.
        plans: by the name to be shown.
        capacity: what fill is counted in.
        ranks: data-parallel ranks, each with one micro-batch a step.

    Raises:
        UsageError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib", fix="pip install 'energon-lite[plot]'") from None
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    left.hist(lengths, bins=100, color="0.4")
    left.set(xlabel="tokens of a sample", ylabel="samples", title=f"{len(lengths):,} lengths")
    edges = np.linspace(0, max(1.0, *(float(plan.tokens().max(initial=0)) / capacity for plan in plans.values())), 51)
    for name, plan in plans.items():
        if not len(plan):
            continue
        fill = plan.tokens() / capacity
        middle.hist(fill, bins=edges, weights=np.full(len(fill), 1 / len(fill)), histtype="step", label=name)
        tokens = np.sort(rank_loads(plan, ranks=ranks)[0][:_STEPS], axis=1)
        line = right.plot(tokens.mean(axis=1), lw=1, label=name)[0]
        right.fill_between(
            np.arange(len(tokens)), tokens[:, 0], tokens[:, -1], color=line.get_color(), alpha=0.15, lw=0
        )
    middle.set(xlabel="tokens of a micro-batch / capacity", ylabel="share of micro-batches", title="Fill")
    middle.legend(fontsize="small", loc="upper left")
    right.axhline(capacity, color="k", lw=0.8, ls=":")
    right.set(xlabel="step", ylabel="tokens of a rank, with padding", title=f"{ranks} ranks: least, mean, most")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"the picture cannot be written: {error}", where=path, fix="use .png, .pdf or .svg") from None
