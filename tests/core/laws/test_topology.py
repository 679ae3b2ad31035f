"""Laws 1 and 2: the global sequence of micro-batches depends on nothing but data, configuration and seed, and goes on
exactly where it was saved, wherever that was, on whatever ranks and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_train_dataset
from tests.core.laws.kinds import training


def _keys(batches: list[Any]) -> list[list[str]]:
    return [batch.__key__ for batch in batches]


def test_the_seed_decides(cluster: Any, write_blend: Callable[..., Any]) -> None:
    metadataset = write_blend([(50, 1.0)])
    orders = []
    for seed in (0, 1):

        def build(config: WorkerConfig, seed: int = seed) -> Any:
            config.seed_offset = seed
            return get_train_dataset(metadataset, batch_size=5, worker_config=config)

        with cluster(build, 1, 0) as one:
            orders.append(_keys(one.steps(10)))
    assert orders[0] != orders[1]


def test_the_order_does_not_depend_on_where_the_data_lies(cluster: Any, tmp_path: Any, leaf_of: Any) -> None:
    import shutil

    moved = shutil.copytree(leaf_of(50, "a"), tmp_path / "elsewhere")
    found = []
    for path in (leaf_of(50, "a"), moved):

        def build(config: WorkerConfig, path: Any = path) -> Any:
            return get_train_dataset(path, batch_size=5, worker_config=config)

        with cluster(build, 1, 0) as one:
            found.append((_keys(one.steps(10)), one.state()))
    assert found[0] == found[1]


def test_the_same_leaf_twice_gives_two_streams(cluster: Any, leaf_of: Any) -> None:
    leaf = str(leaf_of(100, "a"))
    blend = {"splits": {"train": {"blend": [{"path": leaf, "weight": 1}, {"path": leaf, "weight": 1}]}}}
    metadataset = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", **blend}
    build = training(metadataset, batch_size=1)
    with cluster(build, 1, 0) as one:
        keys = [key for keys in _keys(one.steps(100)) for key in keys]
    assert 60 < len(set(keys)) < 90  # two independent permutations, half of each: 75 of 100 on average; one twice: 50


def test_golden_run(cluster: Any, write_blend: Callable[..., Any]) -> None:
    """The whole way from YAML to batches, for ever. If this changes, so must ORDER_VERSION."""
    metadataset = write_blend([(7, 2.0), (50, 1.0), (3, 0.5)])
    build = training(metadataset, batch_size=4)
    with cluster(build, 1, 0) as one:
        assert _keys(one.steps(5)) == [
            ["a-0", "c-0", "a-2", "b-6"],
            ["b-5", "a-6", "a-3", "a-5"],
            ["b-43", "c-1", "a-4", "a-1"],
            ["b-42", "a-6", "c-2", "b-12"],
            ["a-1", "a-5", "b-24", "a-2"],
        ]


# -- the state itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 10**9, 10**15])
def test_positions_far_out_are_like_any_other(cluster: Any, write_blend: Callable[..., Any], position: int) -> None:
    metadataset = write_blend([(20, 1.0), (30, 2.0)])
    build = training(metadataset, batch_size=4)
    with cluster(build, 1, 0) as one:
        state = one.state()
    state["position"] = position
    with cluster(build, 1, 0, state) as alone, cluster(build, 3, 1, state) as three:
        assert _keys(alone.steps(9)) == _keys(three.steps(3))
