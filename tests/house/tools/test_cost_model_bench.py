"""Costs that are fitted by some micro-batches predict how long others take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.testing import script

SCRIPT = Path(__file__).parents[3] / "tools/bench/cost_model.py"


def mean_errors(*words: str) -> dict[str, float]:
    bench = script(SCRIPT)
    found = bench.errors_of(bench.arguments().parse_args(words))
    return {name: float(errors.mean()) for name, errors in found.items()}


@pytest.mark.nightly
def test_predictions_are_within_8_percent_on_a_processor() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = mean_errors("--count", "80", "--repeats", "3")
    finally:
        torch.set_num_threads(threads)
    assert found["fitted"] < 0.08
    assert found["fitted"] < found["costs by shape"] < found["tokens"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu")
def test_predictions_are_within_5_percent_on_a_gpu() -> None:
    sizes = {"hidden": 1024, "layers": 12, "vision": 768, "vision-layers": 12, "capacity": 8192, "count": 60}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert mean_errors("--device", "cuda", *words)["fitted"] < 0.05
