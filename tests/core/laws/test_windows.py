"""Runs and windows as they are used: every epoch exactly once, however the bytes are fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite import ReadAhead
from energon_lite.storage.prepare.prepare import prepare_dataset
from tests.testing import take, train_loader, val_loader


def epochs(path: str, workers: int, count: int, **more: Any) -> list[Any]:
    runs = {"shuffle_buffer_size": 1000, "max_samples_per_sequence": 100}
    with train_loader(path, workers, batch_size=50, **runs, **more) as loader:
        return take(loader, count)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_once_with_runs_of_100_and_a_window_of_1000(
    workers: int, leaf_of: Callable[..., Path], same: Callable[[Any, Any], bool], tmp_path: Path
) -> None:
    path = str(leaf_of(2500, "w"))
    plain = epochs(path, workers, 100)
    for first in (0, 50):
        keys = [key for batch in plain[first : first + 50] for key in batch.__key__]
        assert sorted(keys) == sorted(f"w-{number}" for number in range(2500))
    for read_ahead in (ReadAhead(), ReadAhead(memory_bytes=1), ReadAhead(folder=str(tmp_path / "cache"))):
        assert same(epochs(path, workers, 100, read_ahead=read_ahead), plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_remote_data_set_gives_the_same_batches(
    workers: int, leaf_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    local = leaf_of(300, "r")
    settings: Any = {"sample_type": "TextSample", "field_map": {"text": "txt"}, "force_overwrite": True}
    prepare_dataset(local, split_parts={"train": ".*", "val": ".*"}, **settings)
    memory = fsspec.filesystem("memory")
    for path in local.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/laws/r-300/{path.relative_to(local)}", path.read_bytes())
    try:
        here, there = (epochs(path, workers, 12) for path in (str(local), "memory://laws/r-300"))
        assert [batch.text for batch in here] == [batch.text for batch in there]
        with val_loader("memory://laws/r-300", workers, batch_size=7) as loader:
            assert [text for batch in loader for text in batch.text] == [f"r-{number}" for number in range(300)]
    finally:
        memory.store.clear()
