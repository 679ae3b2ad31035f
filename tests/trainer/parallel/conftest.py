"""Process groups without start-up cost: ranks are forked from the test process, which has imported torch already."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.rank_processes import run_ranks as run
from tests.trainer.parallel.small_runs import blend, measured

__all__ = ["blend", "measured", "run_ranks"]

# The first optimizer of a process imports torch's compiler, which takes a second or more: here once, not in each rank.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
# A forked child cannot use threads its parent has started; with one thread, none are.
torch.set_num_threads(1)


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """``run_ranks(world, fn, timeout=120)``: call ``fn(rank)`` on each rank of a gloo group; returns the results."""
    return partial(run, folder=tmp_path)
