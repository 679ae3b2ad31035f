"""Groups of forked ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

# Test folders are no packages; helpers are imported by their plain names.
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.rank_processes import run_ranks as run

torch.set_num_threads(1)


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """``run_ranks(world, fn, timeout=300)``: call ``fn(rank)`` on each rank of a gloo group; returns the results."""
    return partial(run, folder=tmp_path)
