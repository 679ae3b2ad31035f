"""Small random models of Hugging Face, saved in folders; and groups of forked ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conversion.small_models import SaveModel, make_model

# Test folders are no packages; helpers are imported by their plain names.
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.rank_processes import run_ranks as run

# As for the tests of parallelism: what a forked process cannot do, or not quickly, is done before.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
torch.set_num_threads(1)


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """``run_ranks(world, fn, timeout=300)``: call ``fn(rank)`` on each rank of a gloo group; returns the results."""
    return partial(run, folder=tmp_path)


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """``save_model(name="hf", shard="10GB", **config) -> folder``."""

    def save(name: str = "hf", shard: str = "10GB", seed: int = 0, **changes: Any) -> Path:
        make_model(seed, **changes).save_pretrained(tmp_path / name, max_shard_size=shard)
        return tmp_path / name

    return save
