"""Draw the figures of ``docs/order.md`` from the library itself.

    python docs/figures/make_figures.py            # writes docs/figures/*.png

Needs matplotlib. Every picture is made of what ``energon_lite.order`` really returns, so that it cannot lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from energon_lite.order.blend import BLOCK, Blend
from energon_lite.order.shuffle import LeafOrder, Leaves

FOLDER = Path(__file__).parent
# Distinguishable with all common kinds of colour blindness (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110})


def blend_figure() -> None:
    """Which leaf stands at the first positions, and how far each leaf's count is from its share."""
    weights, blocks = (0.6, 0.3, 0.1), 40
    blend = Blend(weights, key=0)
    figure = plt.figure(figsize=(10, 6), constrained_layout=True)
    strip, drawn, ours = figure.subplot_mosaic("SS;RB", height_ratios=(1, 2.6)).values()
    _strip(strip, blend.lookup(np.arange(150))[0].reshape(3, -1))

    ends = np.arange(blocks + 1) * BLOCK
    counts = np.array([blend.counts_before(block * BLOCK) for block in range(blocks + 1)])
    draws = np.random.default_rng(1).choice(3, size=blocks * BLOCK, p=weights)
    for number, weight in enumerate(weights):
        random_counts = np.r_[0, np.cumsum(draws == number)][ends]
        drawn.plot(ends, random_counts - weight * ends, color=COLOURS[number], linewidth=1.6)
        ours.plot(ends, counts[:, number] - weight * ends, "o", color=COLOURS[number], markersize=5)
    drawn.set_title("Drawn at random: leaves drift off", loc="left", fontsize=11)
    ours.set_title("Here: within one sample at each block's end", loc="left", fontsize=11)
    ours.axhspan(-1, 1, color="0.93", zorder=-1)
    ours.set_ylim(-2, 2)
    for axis in (drawn, ours):
        axis.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        axis.set_xlabel("position, in thousands")
        axis.set_xticks(range(0, 160_001, 40_000), ["0", "40", "80", "120", "160"])
    drawn.set_ylabel("samples so far minus weight x position")
    figure.legend(
        handles=[Patch(color=COLOURS[number], label=f"weight {weight}") for number, weight in enumerate(weights)],
        loc="outside upper right",
        ncols=3,
        frameon=False,
    )
    _save(figure, "blend.png")


def _strip(axis: Any, cells: np.ndarray[Any, Any]) -> None:
    """Positions as coloured cells, row by row."""
    rows, columns = cells.shape
    axis.imshow(cells, aspect="auto", interpolation="nearest", cmap=ListedColormap(COLOURS[:3]))
    axis.set_xticks(np.arange(-0.5, columns), minor=True)
    axis.set_yticks(np.arange(-0.5, rows), minor=True)
    axis.grid(which="minor", color="white", linewidth=1)
    axis.tick_params(which="both", length=0)
    axis.set_yticks(range(rows), [f"{row * columns} ..." for row in range(rows)])
    axis.set_xticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_title(f"The first {cells.size} positions of a blend of three data sets", loc="left", fontsize=11)


def windows_figure() -> None:
    """Which sample stands at which position of an epoch, for three pairs of settings."""
    length = 240
    settings: tuple[tuple[int | None, int | None, str], ...] = (
        (None, None, "one full permutation"),
        (20, 1, "runs of 20, no mixing"),
        (20, 80, "runs of 20, windows of 80"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(11, 4), sharey=True, constrained_layout=True)
    for axis, (run, window, title) in zip(axes, settings, strict=True):
        leaves = Leaves([LeafOrder(length, key=3)], run=run, window=window)
        index, _ = leaves.lookup(np.zeros(length, dtype=np.int64), np.arange(length))
        axis.scatter(np.arange(length), index, s=7, color=COLOURS[0])
        if run == 20 and window == 80:
            for edge in range(0, length + 1, window):
                axis.axvline(edge, color=COLOURS[1], linewidth=1.2)
        axis.set_yticks(range(0, length + 1, 40))
        axis.set_xticks(range(0, length + 1, 80))
        axis.grid(axis="y", color="0.92", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("position in the epoch")
    axes[0].set_ylabel("sample number (place on disk)")
    _save(figure, "windows.png")


def divisor_figure() -> None:
    """One heavy leaf among 5,000 light ones: its error under a divisor method and under the halving blend."""
    light = 5_000
    # Weight 1/2 and 5,000 times 1/10,000. Under Webster's method all light leaves get their k-th sample at the same
    # moment, when the heavy one has 5,000 (k - 1/2): it waits while they all get theirs.
    position = np.arange(0, 60_000, 25)
    heavy = np.array([_webster_heavy(int(n), light) for n in position])
    blend = Blend([float(light), *([1.0] * light)], key=0)
    blocks = np.arange(1, 60_000 // BLOCK + 1)
    ours = np.array([blend.counts_before(int(block) * BLOCK)[0] for block in blocks])
    figure, axis = plt.subplots(figsize=(9, 3.6), constrained_layout=True)
    axis.plot(position, heavy - position / 2, color=COLOURS[1], label="divisor method (Webster)")
    axis.plot(blocks * BLOCK, ours - blocks * BLOCK / 2, "o", color=COLOURS[0], label="halving blend, block ends")
    axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axis.set_xlabel("position")
    axis.set_ylabel("samples of the heavy leaf\nminus its share")
    axis.set_title(f"One leaf with half of the weight among {light:,} equal ones", loc="left", fontsize=11)
    axis.set_ylim(-1500, 2300)
    axis.legend(loc="upper right", frameon=False, ncols=2)
    _save(figure, "divisor.png")


def _webster_heavy(total: int, light: int) -> int:
    """Samples of the heavy leaf (weight ``light``) beside ``light`` leaves of weight 1 after ``total`` positions."""
    rounds = 0
    while True:
        # Before the light leaves' next round the heavy leaf may grow to light * (rounds + 1/2).
        heavy = min(total - rounds * light, int(light * (rounds + 0.5)))
        if total <= light * (rounds + 0.5) + (rounds + 1) * light:
            return max(heavy, 0)
        rounds += 1


def _save(figure: Any, name: str) -> None:
    figure.savefig(FOLDER / name)
    plt.close(figure)


def main() -> None:
    """Draw everything."""
    blend_figure()
    windows_figure()
    divisor_figure()


if __name__ == "__main__":
    main()
