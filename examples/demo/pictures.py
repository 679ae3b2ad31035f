"""Two pictures: the loss curves of all runs, and every held-out digit with the model's caption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.demo.digits import NAMES
from examples.demo.losses import Metrics
from examples.demo.reading import Reading, accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALE, _BLUE, _ORANGE, _RED, _GREY = "#b9c4cf", "#0b62a4", "#e07b00", "#d11f1f", "#555555"


@dataclass(frozen=True)
class Curves:
    """Contents of the first picture.

    Args:
        uninterrupted: the reference.
        until_kill, after_resume: the killed run, before and after its restart.
        other_layout: the run that resumed in another layout of ranks; None: there is none.
        kill: last step before the kill.
        resume: step of the checkpoint with which both resumed runs began.
        layouts: names of the first layout and the other.
        tolerance: how far the other layout may be off, in nats per token.
    """

    uninterrupted: Metrics
    until_kill: Metrics
    after_resume: Metrics
    other_layout: Metrics | None
    kill: int
    resume: int
    layouts: tuple[str, str]
    tolerance: float

    @property
    def resumed(self) -> list[tuple[str, str, Metrics]]:
        """Label, colour and metrics of the runs that are compared with the uninterrupted one."""
        first, other = self.layouts
        runs = [
            (f"until a rank was killed ({first})", _BLUE, self.until_kill),
            (f"started again after the kill ({first})", _ORANGE, self.after_resume),
        ]
        moved = (f"continued in another layout ({other})", "black")
        return runs if self.other_layout is None else [*runs, (*moved, self.other_layout)]


def draw_losses(path: Path, curves: Curves) -> None:
    """Draw the losses, and below them their differences from the uninterrupted run."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 7), sharex=True, height_ratios=[3, 1.3], layout="constrained"
    )
    _draw_curves(above, curves)
    _draw_differences(below, curves)
    for axes in (above, below):
        axes.axvspan(curves.resume, curves.kill, color=_ORANGE, alpha=0.12, lw=0)
        axes.axvline(curves.resume, color=_GREY, lw=1, ls=":")
        axes.axvline(curves.kill, color=_RED, lw=1.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_digits(path: Path, readings: Sequence[Reading]) -> None:
    """Draw all held-out digits, a row for each true digit, with the model's caption under each."""
    plt = pyplot()
    rows = [[one for one in readings if one.caption.endswith(f" {name}")] for name in NAMES]
    columns = max(len(row) for row in rows)
    # In units of pixels of the digits: a cell is a digit with a gap on its right, and space for a word below.
    size = max(reading.image.shape[-1] for reading in readings)
    wide, high = size + 2, size + 4
    canvas = np.ones((high * len(rows), wide * columns))
    figure, axes = plt.subplots(figsize=(0.5 * columns + 1.2, 0.6 * len(rows) + 0.9), layout="constrained")
    for y, row in enumerate(rows):
        axes.text(-2, y * high + size / 2, NAMES[y], ha="right", va="center", fontsize=11, weight="bold")
        for x, reading in enumerate(row):
            top, left = y * high, x * wide
            canvas[top : top + size, left : left + size] = 1.0 - reading.image.mean(dim=0).numpy()
            axes.text(left + size / 2, top + size + 0.2, _word(reading), ha="center", va="top", **_style(reading))
            if not reading.right:
                frame = plt.Rectangle((left - 1, top - 1), size + 1, size + 1, fill=False, ec=_RED, lw=1.5)
                axes.add_patch(frame)
    axes.imshow(canvas, cmap="gray", vmin=0, vmax=1, extent=(-0.5, canvas.shape[1] - 0.5, canvas.shape[0] - 0.5, -0.5))
    axes.set_xlim(-12, canvas.shape[1])
    axes.set_ylim(canvas.shape[0], -2)
    axes.axis("off")
    right = sum(reading.right for reading in readings)
    axes.set_title(
        f"The {len(readings)} held-out digits, a row for each, and what the model read: "
        f"{right} right ({accuracy(readings):.1%}), {len(readings) - right} wrong (red)",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_curves(axes: Axes, curves: Curves) -> None:
    label = f"never interrupted ({curves.layouts[0]})"
    axes.plot(*_points(curves.uninterrupted), color=_PALE, lw=6, label=label, solid_capstyle="round")
    for (label, colour, run), style in zip(curves.resumed, ("-", "-", (0, (3, 3))), strict=False):
        axes.plot(*_points(run), color=colour, lw=1.3, ls=style, label=label)
    axes.set_yscale("log")
    low = min(_points(curves.uninterrupted)[1])
    axes.set_yticks([tick for tick in (0.1, 0.2, 0.4, 0.8, 1, 1.5, 2, 3, 4, 5, 6) if tick > 0.8 * low])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylabel("training loss (nats per token)")
    moved = "" if curves.other_layout is None else "; moved to another layout"
    axes.set_title(f"One training run: uninterrupted; killed and started again{moved}")
    axes.legend(loc="upper right", frameon=False)
    twice = curves.kill - curves.resume
    _note(
        axes,
        curves.kill,
        f"one of 4 ranks killed\nafter step {curves.kill}; {twice} steps\nare done again",
        _RED,
        "left",
    )
    who = "it starts again" if curves.other_layout is None else "both later runs start"
    _note(axes, curves.resume, f"{who}\nfrom the checkpoint\nof step {curves.resume}", _GREY, "right")


def _note(axes: Axes, step: int, text: str, colour: str, side: str) -> None:
    """A note next to the line of a step, above the curves."""
    axes.annotate(
        text,
        (step, 0.64),
        xycoords=axes.get_xaxis_transform(),
        xytext=(8 if side == "left" else -8, 0),
        textcoords="offset points",
        color=colour,
        ha=side,
        va="center",
    )


def _draw_differences(axes: Axes, curves: Curves) -> None:
    largest = curves.tolerance
    for (_, colour, run), size in zip(curves.resumed, (16, 16, 4), strict=False):
        steps = sorted(run)
        far = [abs(run[step]["loss"] - curves.uninterrupted[step]["loss"]) for step in steps]
        largest = max(largest, *far)
        axes.scatter(steps, far, s=size, color=colour, lw=0, clip_on=False, zorder=3)
    # Linear near 0, so that "equal to the last bit" has a place on the axis. 1e-16 is the last bit of a float64.
    axes.set_yscale("symlog", linthresh=1e-16, linscale=2.0)
    axes.set_ylim(0, 1000 * largest)
    exponents = range(-16, math.floor(math.log10(1000 * largest)) + 1, 3)
    axes.set_yticks([0.0, *(10.0**n for n in exponents)], ["0 (equal)", *(f"$10^{{{n}}}$" for n in exponents)])
    axes.minorticks_off()
    if curves.other_layout is not None:
        axes.axhline(curves.tolerance, color=_GREY, lw=1, ls="--")
        axes.text(0, curves.tolerance * 1.3, "allowed for another layout", color=_GREY, va="bottom", fontsize=9)
    axes.set_ylabel("distance from the\nuninterrupted loss\n(nats per token)")
    axes.set_xlabel("optimizer step")


def _points(run: Metrics) -> tuple[list[int], list[float]]:
    steps = sorted(run)
    return steps, [run[step]["loss"] for step in steps]


def _word(reading: Reading) -> str:
    """The part of a caption that differs between captions."""
    prefix = reading.caption.rpartition(" ")[0] + " "
    said = reading.said.removeprefix(prefix)
    return said if len(said) <= 9 else said[:8] + "…"


def _style(reading: Reading) -> dict[str, Any]:
    if reading.right:
        return {"color": _GREY, "fontsize": 7.5}
    return {"color": _RED, "fontsize": 8, "weight": "bold"}


def pyplot() -> Any:
    """Pyplot that draws into files and needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
