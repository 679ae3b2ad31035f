"""Laws 1 and 2: the global sequence of micro-batches depends on nothing but data, configuration and seed, and goes on
exactly where it was saved, wherever that was, on whatever ranks and workers; however the bytes are fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite import ReadAhead
from energon_lite.storage.prepare import prepare_dataset
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import training
from tests.servers import upload
from tests.testing import blend_of, metadataset, same, take, train_loader, val_loader


def _keys(batches: list[Any]) -> list[list[str]]:
    return [batch.__key__ for batch in batches]


def test_the_seed_decides(leaf_of: Any) -> None:
    one, other = (_keys(take(train_loader(leaf_of(50), batch_size=5, seed_offset=seed), 10)) for seed in (0, 1))
    assert one != other


def test_the_order_does_not_depend_on_where_the_data_lies_nor_on_its_being_a_subset(
    tmp_path: Any, leaf_of: Any
) -> None:
    whole = metadataset({"path": str(leaf_of(50)), "subset": {"range": ["0%", "100%"]}})
    found = []
    for path in (leaf_of(50), shutil.copytree(leaf_of(50), tmp_path / "elsewhere"), whole):
        loader = train_loader(path, batch_size=5)
        found.append((_keys(take(loader, 10)), loader.save_state_rank()))
    assert found[0] == found[1] == found[2]


def test_the_same_leaf_twice_gives_two_streams(leaf_of: Any) -> None:
    loader = train_loader(blend_of([(leaf_of(100), 1)] * 2), batch_size=1)
    keys = [key for keys in _keys(take(loader, 100)) for key in keys]
    assert 60 < len(set(keys)) < 90  # two independent permutations, half of each: 75 of 100 on average; one twice: 50


def test_golden_run(write_blend: Callable[..., Any]) -> None:
    """The whole way from YAML to batches, for ever. If this changes, so must ORDER_VERSION."""
    loader = train_loader(write_blend([(7, 2.0), (50, 1.0), (3, 0.5)]), batch_size=4)
    assert _keys(take(loader, 5)) == [
        ["a-0", "c-0", "a-2", "b-6"],
        ["b-5", "a-6", "a-3", "a-5"],
        ["b-43", "c-1", "a-4", "a-1"],
        ["b-42", "a-6", "c-2", "b-12"],
        ["a-1", "a-5", "b-24", "a-2"],
    ]


# -- the state itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 10**9, 10**15])
def test_positions_far_out_are_like_any_other(write_blend: Callable[..., Any], position: int) -> None:
    build = training(write_blend([(20, 1.0), (30, 2.0)]), batch_size=4)
    with Cluster(build, 1, 0) as one:
        state = one.state() | {"position": position}
    with Cluster(build, 1, 0, state) as alone, Cluster(build, 3, 1, state) as three:
        assert _keys(alone.steps(9)) == _keys(three.steps(3))


def epochs(path: str, workers: int, count: int, **more: Any) -> list[Any]:
    runs = {"shuffle_buffer_size": 1000, "max_samples_per_sequence": 100}
    with train_loader(path, workers, batch_size=50, **runs, **more) as loader:
        return take(loader, count)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_once_with_runs_of_100_and_a_window_of_1000(
    workers: int, leaf_of: Callable[..., Path], tmp_path: Path
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
    url = upload(local, "laws/r-300")
    try:
        here, there = (epochs(path, workers, 12) for path in (str(local), url))
        assert [batch.text for batch in here] == [batch.text for batch in there]
        with val_loader(url, workers, batch_size=7) as loader:
            assert [text for batch in loader for text in batch.text] == [f"r-{number}" for number in range(300)]
    finally:
        fsspec.filesystem("memory").store.clear()
