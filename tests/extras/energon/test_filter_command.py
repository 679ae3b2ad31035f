"""``energon-lite filter``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from energon_lite import get_val_dataset
from energon_lite.storage.index.columns import write_column
from tests.testing import ALONE, command


def run(*arguments: Any) -> tuple[int, str]:
    return command("filter", *arguments)


def test_a_condition_is_stored_under_a_name(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    leaf = Path(shutil.copytree(leaf_of(50), tmp_path / "leaf"))
    write_column(leaf, "length", np.arange(50))
    code, output = run(leaf, "short", "tokens < 12 and tokens % 2 == 0")
    assert code == 0 and "filter 'short' keeps 6 of 50 samples" in output
    assert len(get_val_dataset(leaf, filter="short", worker_config=ALONE).leaves[0].source) == 6
    assert run(leaf, "short", "tokens < 3")[0] == 1
    assert "keeps 3 of 50" in run(leaf, "short", "tokens < 3", "--force-overwrite")[1]
    for where, words in (
        ("short", "is not a condition"),
        ("tokens <", "not a filter"),
        ("score > 1", "no column 'score'"),
    ):
        code, output = run(leaf, "other", where)
        assert code == 1 and words in output
