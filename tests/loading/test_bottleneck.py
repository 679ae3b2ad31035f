"""What a run waits for, where it is known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from staged_limits import CASES, Case, run, staged_loader


@pytest.fixture(scope="module")
def texts(leaf_of: Any) -> Path:
    path: Path = leaf_of(200, "limits")
    return path


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_limit_of_staged_cases(case: Case, texts: Path) -> None:
    with staged_loader(case, texts) as loader:
        stats = run(case, loader)
    found = stats["bottleneck"]
    assert found is not None and found["limit"] == case.limit, stats
