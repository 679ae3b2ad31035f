"""Draw the figure of ``docs/balance.md``: what each of 16 ranks has to do in a step, with and without a plan.

    python docs/figures/balance.py            # writes docs/figures/balance.png

Needs matplotlib. The loads are those of steps that the library has planned, of made-up samples.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from energon_lite import BestFit, Capacity
from energon_lite.batching.steps import even_step, rank_slot
from energon_lite.batching.transformer_shape import TransformerShape
from energon_lite.extras.balance.cost_model import CostModel
from energon_lite.extras.balance.even_costs import even_costs

RANKS, TURNS, CAPACITY = 16, 4, 8192
LANGUAGE = TransformerShape(4096, 32, 32, 14336, kv_heads=8, vocab_size=128_256)
ENCODER = TransformerShape(3200, 45, 25, 12_800, gated=False, causal=False)
# Distinguishable with all common kinds of colour blindness (Okabe and Ito).
KINDS = {"language model": "#0072B2", "image encoder": "#E69F00", "output layer": "#009E73"}
plt.rcParams.update({"font.size": 10, "figure.dpi": 120})


def main() -> None:
    rng = np.random.default_rng(0)
    count = RANKS * TURNS
    patches = 4 * np.clip(np.rint(rng.lognormal(np.log(300), 0.7, 4000)), 16, 2048).astype(np.int64)
    patches *= rng.random(4000) < 0.7  # the others are texts
    text = np.clip(np.rint(rng.lognormal(np.log(120), 0.9, 4000)), 4, 2048).astype(np.int64)
    tokens = text + patches // 4
    model = CostModel.of_shape(LANGUAGE, ENCODER, logits_of_loss_only=True)
    sizes = {"tokens": tokens, "loss_tokens": text, "images": (patches > 0).astype(np.int64)}
    costs = model.costs({**sizes, "patches": patches, "squared_patches": patches**2})

    plan = BestFit(Capacity(CAPACITY)).plan(tokens).select(np.arange(count))
    chosen, home = plan.sample, np.repeat(np.arange(count), plan.rows())
    even = even_step(plan, Capacity(CAPACITY))
    slots = [turn * RANKS + rank_slot(rank, RANKS, turn) for turn in range(TURNS) for rank in range(RANKS)]
    of_slot = np.empty(count, dtype=np.int64)
    of_slot[slots] = np.arange(count)
    by_lengths = np.empty(len(tokens), dtype=np.int64)
    by_lengths[even.sample] = of_slot[np.repeat(np.arange(count), even.rows())]
    rows = np.concatenate([tokens[None, chosen] ** 2, costs[:, chosen]])
    planned = even_costs(rows, tokens[None, chosen], [CAPACITY], home, count)

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    cases = {
        "as packed": home,
        "micro_batches_per_step": by_lengths[chosen],
        "micro_batches_per_step, costs": planned,
    }
    for ax, (title, place) in zip(axes, cases.items(), strict=True):
        draw(ax, title, costs[:, chosen], place)
    axes[0].set_ylabel("seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(Path(__file__).with_name("balance.png"))


def draw(ax: plt.Axes, title: str, costs: NDArray[np.int64], place: NDArray[np.int64]) -> None:
    """The bars of the ranks, and a line where the slowest ends."""
    loads = [np.bincount(place % RANKS, weights=row, minlength=RANKS) / 1e9 for row in costs]
    bottom = np.zeros(RANKS)
    for (kind, colour), load in zip(KINDS.items(), loads, strict=True):
        ax.bar(range(RANKS), load, bottom=bottom, color=colour, label=kind, width=0.8)
        bottom += load
    ax.axhline(bottom.max(), color="0.3", linewidth=1)
    ax.set_title(f"{title}\nmean / max {bottom.mean() / bottom.max():.2f}")
    ax.set_xlabel("rank")
    ax.set_xticks(range(0, RANKS, 5))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
