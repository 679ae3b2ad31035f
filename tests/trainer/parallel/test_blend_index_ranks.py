"""A blend index written by four ranks together is the one that a single process writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist

from energon_lite.extras.tools.order_arrays import build_blend_index
from tests.trainer.parallel.rank_processes import RunRanks

WEIGHTS, N = [2, 1, 0.1, 3e-5], 100_001


def test_four_ranks_write_the_same_bytes(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone = build_blend_index(WEIGHTS, N, tmp_path / "alone", key=5)

    def build(rank: int) -> list[int]:
        columns = build_blend_index(WEIGHTS, N, tmp_path / "together", key=5, workers=1)
        assert dist.get_world_size() == 4
        assert all(np.array_equal(column, expected) for column, expected in zip(columns, alone, strict=True))
        return [len(column) for column in columns]

    assert run_ranks(4, build) == [[N, N]] * 4
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "together" / file.name).read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir() if not file.name.startswith("ranks-")) == [
        "alone",
        "together",
    ]
