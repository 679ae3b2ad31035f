"""The picture of ``energon-lite tune``: speed and memory against the number of workers."""

from __future__ import annotations

import os

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.tuning.search import Tuning

__all__ = ["draw_curve"]

#: How each kind of workers is drawn.
_KINDS = {"process": ("C0", "o", "processes"), "thread": ("C1", "s", "threads")}


def draw_curve(path: str | os.PathLike[str], tuning: Tuning, *, memory: int | None = None, title: str = "") -> None:
    """Draw samples a second, and memory, of each number of workers.

    Args:
        path: where to; the ending says in which format.
        tuning: what was measured.
        memory: the limit, in bytes; None: there is none.
        title: over the picture.

    Raises:
        UsageError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib", fix="pip install 'energon-lite[plot]'") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    every = [one for one in tuning.all() if one.samples > 0]
    alone = [one for one in every if not one.setting.workers]
    for kind, (color, marker, name) in _KINDS.items():
        mine = sorted(
            (one for one in every if one.setting.workers and one.setting.kind == kind), key=lambda one: one.setting
        )
        if not mine:
            continue
        usual = [*alone, *(one for one in mine if one.setting.prefetch == 2)]
        workers = [one.setting.workers for one in usual]
        left.plot(workers, [one.samples for one in usual], color=color, marker=marker, label=name)
        for one in mine:
            if one.setting.prefetch != 2:
                left.plot(one.setting.workers, one.samples, color=color, marker="x")
                left.annotate(f" {one.setting.prefetch} ahead", (one.setting.workers, one.samples), fontsize=7)
        known = [one for one in usual if one.memory]
        right.plot(
            [one.setting.workers for one in known],
            [one.memory / (1 << 30) for one in known],
            color=color,
            marker=marker,
        )
    if tuning.best is not None:
        best = tuning.best
        left.plot(best.setting.workers, best.samples, "o", ms=14, mfc="none", mec="C3", mew=2, label="proposed")
    if memory is not None:
        right.axhline(memory / (1 << 30), color="C3", ls="--", label="limit")
        right.legend()
    left.set(xlabel="workers", ylabel="samples/s", title=title)
    right.set(xlabel="workers", ylabel="GiB, of a rank with its workers", title="memory")
    left.legend()
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(lw=0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"the picture cannot be written: {error}", where=path, fix="use .png, .pdf or .svg") from None
