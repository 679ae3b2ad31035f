"""Draw samples of unequal length in padded batches, and then packed, as a moving picture.

    python docs/figures/packing.py            # writes docs/figures/packing.svg

The packs are those of ``BestFit``; what is padding is counted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from moving import MovingPicture

FOLDER = Path(__file__).parent
SAMPLES, BATCH, CAPACITY = 28, 4, 512
WIDTH, HEIGHT, ROUND = 800, 330, 12.0
#: Units for a token, and of the rows.
TOKEN, THICK, TOP = 0.66, 7, 62
LEFT, RIGHT = 20, 430
#: Distinguishable with all common kinds of colour blindness (Okabe and Ito): one for each padded batch.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#b5a900")


def lengths() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Tokens of the samples, as texts have them: log-normal."""
    drawn = np.random.default_rng(3).lognormal(np.log(120), 0.7, size=SAMPLES)
    return np.clip(drawn, 16, CAPACITY).astype(np.int64)


def draw() -> str:
    """The picture, as SVG."""
    from energon_lite import BestFit, Capacity

    tokens = lengths()
    packs = [sorted(pack.tolist()) for pack in BestFit(Capacity(CAPACITY)).plan(tokens, seed=0)]
    longest = tokens.reshape(-1, BATCH).max(axis=1)
    padded = int((longest * BATCH).sum())
    said = "Samples of unequal length, first in padded batches, then packed into rows of a given number of tokens."
    image = MovingPicture(WIDTH, HEIGHT, ROUND, said)
    image.add(image.text(LEFT, 30, f"Batches of {BATCH}, padded to the longest"))
    waste = f"{1 - tokens.sum() / padded:.0%} of {padded:,} positions are padding"
    image.add(image.text(LEFT, 48, waste, "small"))
    places = {}
    for number in range(SAMPLES):
        batch, row = divmod(number, BATCH)
        places[number] = (LEFT, TOP + batch * (BATCH * (THICK + 1) + 5) + row * (THICK + 1))
        image.add(_bar(*places[number], int(longest[batch]), 'class="padding"'))
    image.add(image.text(RIGHT, 30, f"Packed, {CAPACITY} tokens a micro-batch"), "packed")
    image.show("packed", 1.6)
    at = 2.0
    for pack, samples in enumerate(packs):
        x, y = float(RIGHT), float(TOP + pack * (THICK + 12))
        image.add(_bar(x, y, CAPACITY, 'class="padding"'), "packed")
        for number in samples:
            image.add(_bar(*places[number], int(tokens[number]), f'fill="{_colour(number)}"'), "ghost")
            image.add(_bar(x, y, int(tokens[number]) - 2, f'fill="{_colour(number)}"'), f"sample{number}")
            image.move(f"sample{number}", (places[number][0] - x, places[number][1] - y), at)
            x += int(tokens[number]) * TOKEN
            at += 0.18
    full = f"{tokens.sum() / (len(packs) * CAPACITY):.0%} of {len(packs) * CAPACITY:,} positions are tokens"
    image.add(image.text(RIGHT, 48, full, "small"), "full")
    image.show("full", at + 0.6)
    below = TOP + len(packs) * (THICK + 12) + 22
    image.add(image.text(RIGHT, below, "Planned from lengths alone: the same on every rank,"), "full")
    image.add(image.text(RIGHT, below + 18, "resumed on any number of them."), "full")
    return image.svg()


def _colour(number: int) -> str:
    return COLOURS[number // BATCH]


def _bar(x: float, y: float, tokens: int, paint: str) -> str:
    return f'<rect {paint} x="{x:g}" y="{y:g}" width="{tokens * TOKEN:.1f}" height="{THICK}" rx="1.5"/>'


if __name__ == "__main__":
    (FOLDER / "packing.svg").write_text(draw())
