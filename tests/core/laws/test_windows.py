"""Runs and windows as they are used: every epoch exactly once, however the bytes are fetched."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite import ReadAhead, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.storage.prepare import prepare_dataset
from tests.testing import alone


def epochs(path: str, workers: int, read_ahead: ReadAhead | None, count: int) -> list[Any]:
    dataset = get_train_dataset(
        path,
        worker_config=alone(workers),
        batch_size=50,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        read_ahead=read_ahead,
    )
    with get_savable_loader(dataset) as loader:
        return list(itertools.islice(loader, count))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_once_with_runs_of_100_and_a_window_of_1000(
    workers: int, leaf_of: Callable[..., Path], same: Callable[[Any, Any], bool], tmp_path: Path
) -> None:
    path = str(leaf_of(2500, "w"))
    plain = epochs(path, workers, None, 100)
    for first in (0, 50):
        keys = [key for batch in plain[first : first + 50] for key in batch.__key__]
        assert sorted(keys) == sorted(f"w-{number}" for number in range(2500))
    for read_ahead in (ReadAhead(), ReadAhead(memory_bytes=1), ReadAhead(folder=str(tmp_path / "cache"))):
        assert same(epochs(path, workers, read_ahead, 100), plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_remote_data_set_gives_the_same_batches(
    workers: int, leaf_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    local = leaf_of(300, "r")
    prepare_dataset(
        local,
        split_parts={"train": ".*", "val": ".*"},
        sample_type="TextSample",
        field_map={"text": "txt"},
        force_overwrite=True,
    )
    memory = fsspec.filesystem("memory")
    for path in local.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/laws/r-300/{path.relative_to(local)}", path.read_bytes())
    try:
        here, there = (epochs(path, workers, None, 12) for path in (str(local), "memory://laws/r-300"))
        assert [batch.text for batch in here] == [batch.text for batch in there]
        dataset = get_val_dataset("memory://laws/r-300", worker_config=alone(workers), batch_size=7)
        with get_savable_loader(dataset) as loader:
            assert [text for batch in loader for text in batch.text] == [f"r-{number}" for number in range(300)]
    finally:
        memory.store.clear()
