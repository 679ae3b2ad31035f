"""Pictures of the demo, and the layouts whose losses they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.demo.errors import DemoError
from examples.demo.layout_picture import draw_layouts
from examples.demo.layouts import LAYOUTS, Layout, train_in
from examples.demo.losses import Metrics
from examples.demo.pictures import Curves, draw_digits, draw_losses
from examples.demo.reading import Reading, accuracy
from tests.testing import text_dataset

RED, ORANGE, BLUE, GREEN = (0xD1, 0x1F, 0x1F), (0xE0, 0x7B, 0x00), (0x0B, 0x62, 0xA4), (0x2E, 0x8B, 0x57)


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


# -- layouts -----------------------------------------------------------------------------------------------------------


RUN = """\
data: {path: PATH, micro_batch_size: 2, micro_batches_per_step: 2, max_length: 12, workers: 0}
model: {hidden_size: 16, num_layers: 2, num_heads: 2, ffn_size: 16, dtype: float64}
train: {steps: 5}
"""


def test_there_is_a_layout_for_each_axis_and_one_with_all() -> None:
    assert [str(layout) for layout in LAYOUTS] == ["DP 2", "TP 2", "PP 2", "CP 2", "TP 2 x PP 2 x CP 2 x DP 2"]
    assert [layout.ranks for layout in LAYOUTS] == [2, 2, 2, 2, 16]


def test_what_goes_wrong_on_a_rank_is_shown(tmp_path: Path) -> None:
    (config := tmp_path / "run.yaml").write_text(RUN.replace("PATH", str(text_dataset(tmp_path / "texts", 20))))
    with pytest.raises(DemoError, match=r"(?s)Training as PP 2 failed.*no_such"):
        train_in(Layout(pp=2), config, tmp_path / "out", 1, ["model.norm=no_such"])


def test_curves_are_drawn_on_top_of_each_other(tmp_path: Path) -> None:
    others = {name: run_of(1, 30, off=off) for name, off in (("DP 2", 0), ("PP 2", 1e-15), ("CP 2", 0.3))}
    draw_layouts(tmp_path / "x.png", ("TP 2", run_of(1, 30)), others, 1e-5)
    assert all(has_colour(tmp_path / "x.png", colour) for colour in (BLUE, ORANGE, GREEN))
