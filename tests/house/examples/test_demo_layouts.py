"""The first steps of a run in several layouts, by forked ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.demo.errors import DemoError
from examples.demo.layout_picture import draw_layouts
from examples.demo.layouts import LAYOUTS, Layout, train_in
from examples.demo.losses import Metrics

RUN = """\
data: {path: PATH, micro_batch_size: 2, micro_batches_per_step: 2, max_length: 12, workers: 0}
model: {hidden_size: 16, num_layers: 2, num_heads: 2, ffn_size: 16, dtype: float64}
train: {steps: 5}
"""


def test_there_is_a_layout_for_each_axis_and_one_with_all() -> None:
    assert [str(layout) for layout in LAYOUTS] == ["DP 2", "TP 2", "PP 2", "CP 2", "TP 2 x PP 2 x CP 2 x DP 2"]
    assert [layout.ranks for layout in LAYOUTS] == [2, 2, 2, 2, 16]


@pytest.fixture
def config(write_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    texts = [(f"{number}", {"txt": f"line {number}".encode()}) for number in range(20)]
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("PATH", str(write_dataset(tmp_path / "texts", {"train.tar": texts}))))
    return path


def test_layouts_have_equal_losses(config: Path, tmp_path: Path) -> None:
    found = [train_in(layout, config, tmp_path / str(layout), 3) for layout in (Layout(dp=2), Layout(tp=2, pp=2))]
    assert sorted(found[0]) == sorted(found[1]) == [1, 2, 3]
    for step, values in found[0].items():
        assert found[1][step]["loss"] == pytest.approx(values["loss"], abs=1e-12)
    assert found[0][3]["loss"] < found[0][1]["loss"]


def test_what_goes_wrong_on_a_rank_is_shown(config: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"(?s)Training as PP 2 failed.*no_such"):
        train_in(Layout(pp=2), config, tmp_path / "out", 1, ["model.norm=no_such"])


def test_curves_are_drawn_on_top_of_each_other(tmp_path: Path) -> None:
    def run(off: float) -> Metrics:
        return {step: {"loss": 5.0 / step + off} for step in range(1, 31)}

    draw_layouts(tmp_path / "x.png", ("TP 2", run(0)), {"DP 2": run(0), "PP 2": run(1e-15), "CP 2": run(0.3)}, 1e-5)
    with Image.open(tmp_path / "x.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    for colour in ((0x0B, 0x62, 0xA4), (0xE0, 0x7B, 0x00), (0x2E, 0x8B, 0x57)):
        assert (np.abs(pixels - colour).sum(axis=-1) < 8).sum() > 20
