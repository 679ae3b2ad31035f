"""Draw the figure of ``docs/optimizer.md``: how parameters lie in buckets, and what happens when.

    python docs/figures/optimizer.py            # writes docs/figures/optimizer.png

Needs matplotlib. The upper part is what :func:`plan_buckets` really returns; the lower is a drawing.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import nn

from energon_lite.trainer.optimizer.bucket_plan import plan_buckets

RANKS = 3
# Distinguishable with all common kinds of colour blindness (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73")
plt.rcParams.update({"font.size": 10, "figure.dpi": 120})


def draw_buckets(axes: Axes) -> None:
    """Parameters of a small model in their buckets, and where each bucket is cut."""
    shapes = {"head": (16, 40), "norm": (64,), "up": (24, 16), "down": (16, 20), "bias": (64,), "table": (16, 44)}
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    start = 0
    for number, plan in enumerate(plan_buckets(named, 800, RANKS, 0)):
        for slot in plan.slots:
            decayed = slot.parameter.dim() > 1
            left, width = start + slot.start, slot.stop - slot.start
            axes.add_patch(Rectangle((left, 1.0), width, 0.8, facecolor="0.85" if decayed else "1", edgecolor="0.3"))
            axes.text(left + width / 2, 1.4, slot.name, ha="center", va="center", rotation=0 if width > 70 else 90)
        share = plan.size // RANKS
        for rank in range(RANKS):
            left = start + rank * share
            axes.add_patch(Rectangle((left, 0.1), share, 0.6, facecolor=COLOURS[rank], edgecolor="white"))
            axes.text(left + share / 2, 0.4, f"rank {rank}", ha="center", va="center", color="white")
        axes.text(start, 1.95, f"bucket {number}", va="bottom")
        start += plan.size + 60
    axes.set_xlim(0, start - 60)
    axes.set_ylim(0, 2.4)
    axes.axis("off")


def draw_time(axes: Axes, reduce: str) -> None:
    """Two micro-batches of a step: what computes, and what travels behind it."""
    forward, backward, tail = 1.0, 2.0, 0.5
    clock = 0.0
    for micro_batch in range(2):
        for layer in range(3):
            _box(axes, clock, forward / 3, 2, "0.85", f"F{layer}")
            if micro_batch == 0:
                _box(axes, clock - 0.36, 0.34, 1, COLOURS[2], f"gather {2 - layer}")
            clock += forward / 3
        for layer in reversed(range(3)):
            _box(axes, clock, backward / 3, 2, "0.7", f"B{layer}")
            clock += backward / 3
            if reduce == "every" or micro_batch == 1:
                _box(axes, clock, 0.6, 0, COLOURS[0], f"reduce {2 - layer}")
    _box(axes, clock + 0.6, tail, 2, COLOURS[1], "update")
    axes.set_yticks([0.4, 1.4, 2.4], ["gradients", "values", "compute"])
    axes.set_title(f'reduce="{reduce}"', loc="left", fontsize=10)
    axes.set_xlim(-0.4, clock + 1.2)
    axes.set_ylim(0, 3)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _box(axes: Axes, left: float, width: float, row: int, colour: str, text: str) -> None:
    axes.add_patch(Rectangle((left, row + 0.05), width - 0.02, 0.7, facecolor=colour))
    light = colour.startswith("#")
    axes.text(left + width / 2, row + 0.4, text, ha="center", va="center", color="white" if light else "k", fontsize=6)


def main() -> None:
    figure, (buckets, last, every) = plt.subplots(3, 1, figsize=(10, 6.2), height_ratios=(1.3, 1, 1))
    draw_buckets(buckets)
    draw_time(last, "last")
    draw_time(every, "every")
    every.set_xlabel("time: two micro-batches of one step")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
