"""A model passes through the memory of its largest tensor; tools/bench/conversion_memory.py measures it."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.testing import script

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return script(ROOT / "tools/bench/conversion_memory.py")


@pytest.mark.slow
def test_there_and_back_in_less_than_two_tensors(tmp_path: Path, bench: ModuleType) -> None:
    largest = bench.write_model(tmp_path / "hf", bench.model_of(2**26, layers=2), shard_bytes=30_000_000)
    # Each tensor in one rectangle, which needs the most.
    assert bench.growth("there-and-back", tmp_path / "hf", tmp_path / "made", 2 * largest) < 2 * largest


@pytest.mark.nightly
def test_a_gigabyte(tmp_path: Path, bench: ModuleType) -> None:
    found = bench.measure(tmp_path, 1.0)
    assert found["model"] > 2**30
    assert all(peak < 2 * found["largest"] for peak in found["peaks"].values()), found
