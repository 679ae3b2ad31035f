"""Plot of ``energon-lite tune``: speed and memory against the number of workers."""

from __future__ import annotations

import os

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.tuning.search import Tuning

__all__ = ["draw_curve"]

#: Colour, marker and label of each kind of workers.
_KINDS = {"process": ("C0", "o", "processes"), "thread": ("C1", "s", "threads")}


def draw_curve(path: str | os.PathLike[str], tuning: Tuning, *, memory: int | None = None, title: str = "") -> None:
    """Plot samples per second, and memory, against the number of workers.

    Args:
        path: path of the picture, whose suffix selects the format.
        tuning: the measurements.
        memory: the limit in bytes; None if there is none.
        title: title of the picture.

    Raises:
        UsageError: matplotlib is not installed, or cannot write this format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib", fix="pip install 'energon-lite[plot]'") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    every = [speed for speed in tuning.all() if speed.samples > 0]
    alone = [speed for speed in every if not speed.setting.workers]
    for kind, (color, marker, name) in _KINDS.items():
        mine = sorted(
            (speed for speed in every if speed.setting.workers and speed.setting.kind == kind),
            key=lambda speed: speed.setting,
        )
        if not mine:
            continue
        usual = [*alone, *(speed for speed in mine if speed.setting.prefetch == 2)]
        workers = [speed.setting.workers for speed in usual]
        left.plot(workers, [speed.samples for speed in usual], color=color, marker=marker, label=name)
        for speed in mine:
            if speed.setting.prefetch != 2:
                left.plot(speed.setting.workers, speed.samples, color=color, marker="x")
                left.annotate(f" {speed.setting.prefetch} ahead", (speed.setting.workers, speed.samples), fontsize=7)
        known = [speed for speed in usual if speed.memory]
        right.plot(
            [speed.setting.workers for speed in known],
            [speed.memory / (1 << 30) for speed in known],
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
