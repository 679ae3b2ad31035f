"""Small random models of Hugging Face, saved in folders; and groups of forked ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conversion.small_models import SaveModel, make_model
from tests.trainer.parallel.conftest import run_ranks

__all__ = ["run_ranks"]


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """``save_model(name="hf", shard="10GB", **config) -> folder``."""

    def save(name: str = "hf", shard: str = "10GB", seed: int = 0, **changes: Any) -> Path:
        make_model(seed, **changes).save_pretrained(tmp_path / name, max_shard_size=shard)
        return tmp_path / name

    return save
