"""A picture of one run in several layouts of ranks: its losses, and their differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from examples.demo.losses import Metrics
from examples.demo.pictures import pyplot

_COLOURS = ("#0b62a4", "#e07b00", "#2e8b57", "#8e44ad", "#d11f1f", "#555555")


def draw_layouts(path: Path, reference: tuple[str, Metrics], layouts: Mapping[str, Metrics], tolerance: float) -> None:
    """Draw the first steps of a run in all its layouts.

    Args:
        path: of the picture.
        reference: name and metrics of the run that the others are compared with.
        layouts: the others' metrics, all of the same steps, by name.
        tolerance: how far losses may be apart, in nats per token.
    """
    plt = pyplot()
    name, base = reference
    steps = sorted(next(iter(layouts.values())))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=[3, 1.5], layout="constrained"
    )
    above.plot(
        steps, [base[step]["loss"] for step in steps], color="#b9c4cf", lw=11, label=name, solid_capstyle="round"
    )
    for number, (layout, run) in enumerate(layouts.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        # Ever thinner, so that each shows below the next.
        width = 8.0 * (1 - number / len(layouts)) + 0.6
        above.plot(steps, [run[step]["loss"] for step in steps], color=colour, lw=width, label=layout)
        apart = [abs(run[step]["loss"] - base[step]["loss"]) for step in steps]
        below.plot(steps, apart, color=colour, marker="o", ms=3.5, lw=0, clip_on=False)
    above.set_ylabel("training loss (nats per token)")
    above.set_title(f"The first {len(steps)} steps of one run in {len(layouts) + 1} layouts of ranks")
    above.legend(loc="upper right", frameon=False)
    below.set_yscale("symlog", linthresh=1e-16, linscale=1.0)
    below.set_ylim(0, 100 * tolerance)
    below.set_yticks([0.0, 1e-16, 1e-13, 1e-10, 1e-7, 1e-4])
    below.minorticks_off()
    below.axhline(tolerance, color="#555555", lw=1, ls="--")
    below.text(steps[0], tolerance * 1.4, "allowed", color="#555555", va="bottom", fontsize=9)
    below.set_ylabel(f"distance from\n{name}\n(nats per token)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
