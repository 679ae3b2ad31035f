from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.demo.losses import Metrics
from examples.demo.pictures import Curves, draw_digits, draw_losses
from examples.demo.reading import Reading, accuracy

RED, ORANGE = (0xD1, 0x1F, 0x1F), (0xE0, 0x7B, 0x00)


def run_of(first: int, last: int, *, off: float = 0.0) -> Metrics:
    return {step: {"loss": 5.0 / step + off} for step in range(first, last + 1)}


def has_colour(path: Path, colour: tuple[int, int, int]) -> bool:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return bool((np.abs(pixels - colour).sum(axis=-1) < 8).sum() > 20)


def reading(caption: str, said: str) -> Reading:
    return Reading("key", torch.rand(3, 8, 8), caption, said)


# Nothing but zeros, rounding, and far too much: the axis of differences must take them all; None: no other layout.
@pytest.mark.parametrize("off", [0.0, 1e-16, 2.5, None])
def test_losses_are_drawn_whatever_the_difference(tmp_path: Path, off: float | None) -> None:
    other = None if off is None else run_of(21, 40, off=off)
    curves = Curves(run_of(1, 40), run_of(1, 23), run_of(21, 40), other, 23, 20, ("TP 2", "DP 4"), 1e-5)
    assert len(curves.resumed) == 2 + (off is not None)
    draw_losses(tmp_path / "losses.png", curves)
    assert has_colour(tmp_path / "losses.png", ORANGE) and (off is None or has_colour(tmp_path / "losses.png", RED))


def test_wrong_digits_are_red_and_only_they(tmp_path: Path) -> None:
    right = [reading("a handwritten one", "a handwritten one"), reading("a handwritten two", "a handwritten two")]
    wrong = reading("a handwritten two", "a handwritten nonsense without end")
    draw_digits(tmp_path / "right.png", right)
    assert not has_colour(tmp_path / "right.png", RED)
    draw_digits(tmp_path / "wrong.png", [*right, wrong])
    assert has_colour(tmp_path / "wrong.png", RED)


def test_accuracy_counts_whole_captions() -> None:
    caption = "a handwritten two"
    said = [caption, "a handwritten two ", "a handwritten tw", "a handwritten ten"]
    assert accuracy([reading(caption, one) for one in said]) == 0.25
