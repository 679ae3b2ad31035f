"""Laws 1 and 2: the global sequence of micro-batches depends on nothing but data, configuration and seed, and goes on
exactly where it was saved, wherever that was, on whatever ranks and workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_train_dataset, get_val_dataset
from tests.testing import examples

#: 1..6 leaves with 1..500 samples each; some sizes come often, so that their files are written once.
sizes = st.one_of(st.sampled_from([1, 2, 3, 7, 50, 500]), st.integers(1, 500))
blends = st.lists(st.tuples(sizes, st.floats(0.01, 10).map(lambda w: round(w, 3))), min_size=1, max_size=6)
worlds = st.one_of(st.integers(1, 4), st.integers(1, 8))
windows = st.sampled_from([(None, None), (1000, 100), (10, 3), (5, 1)])
#: Mostly no worker processes, because each takes some 20 ms to start.
workers = st.sampled_from([0, 0, 0, 1, 2, 4])
#: Segments of a run: so many ranks, workers, and steps until it is saved and stopped (0: before the first batch).
segments = st.lists(st.tuples(worlds, workers, st.integers(0, 12)), min_size=1, max_size=5)


def _keys(batches: list[Any]) -> list[list[str]]:
    return [batch.__key__ for batch in batches]


@settings(max_examples=examples(18))
@given(blend=blends, batch_size=st.integers(1, 7), window=windows, seed=st.integers(0, 3), segments=segments)
def test_any_chain_of_topologies_is_the_uninterrupted_run(
    cluster: Any,
    write_blend: Callable[..., Any],
    blend: Any,
    batch_size: int,
    window: tuple[int | None, int | None],
    seed: int,
    segments: list[tuple[int, int, int]],
) -> None:
    metadataset = write_blend(blend)

    def build(config: WorkerConfig) -> Any:
        config.seed_offset = seed
        return get_train_dataset(
            metadataset,
            batch_size=batch_size,
            shuffle_buffer_size=window[0],
            max_samples_per_sequence=window[1],
            worker_config=config,
        )

    assert _keys(cluster.chained(build, segments)) == _keys(cluster.straight(build, segments))


@settings(max_examples=examples(12))
@given(blend=blends, batch_size=st.integers(1, 7), segments=segments)
def test_validation_goes_on_too_and_passes_are_equal(
    cluster: Any, write_blend: Callable[..., Any], blend: Any, batch_size: int, segments: list[tuple[int, int, int]]
) -> None:
    metadataset = write_blend(blend)
    samples = sum(count for count, _ in blend)
    segments = [(min(world, samples), worker_count, steps) for world, worker_count, steps in segments]

    def build(config: WorkerConfig) -> Any:
        return get_val_dataset(metadataset, batch_size=batch_size, worker_config=config)

    with cluster(build, 1, 0) as alone:
        one_pass = _keys(list(alone.iterators[0]))
        assert _keys(list(alone.loaders[0])) == one_pass
    expected, found, state = [], [], None
    at = 0
    for world, worker_count, steps in segments:
        with cluster(build, world, worker_count, state) as ranks:
            left = -(-(len(one_pass) - at) // world) if at < len(one_pass) else -(-len(one_pass) // world)
            at = 0 if at >= len(one_pass) and steps else at
            steps = min(steps, left)
            found += [keys for keys in _keys(ranks.steps(steps)) if keys]
            expected += one_pass[at : at + steps * world]
            at = min(len(one_pass), at + steps * world)
            state = ranks.state()
    assert found == expected


@settings(max_examples=examples(14))
@given(blend=blends, cut=st.integers(0, 10), worker_count=workers)
def test_saving_changes_nothing_and_can_be_repeated(
    cluster: Any, write_blend: Callable[..., Any], blend: Any, cut: int, worker_count: int
) -> None:
    metadataset = write_blend(blend)

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=2, worker_config=config)

    with cluster(build, 2, worker_count) as one:
        one.steps(cut)
        states = [one.state(), one.state()]
        following = _keys(one.steps(4))
    assert states[0] == states[1]
    with cluster(build, 2, 0, states[0]) as other:
        assert other.state() == states[0]  # right after a restore, before the first batch
        assert _keys(other.steps(4)) == following


def test_restoring_in_the_middle_of_a_loop(cluster: Any, write_blend: Callable[..., Any]) -> None:
    metadataset = write_blend([(20, 1.0), (30, 2.0)])

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=2, worker_config=config)

    with cluster(build, 1, 2) as one:
        first = _keys(one.steps(3))
        state = one.state()
        _keys(one.steps(5))
        one.loaders[0].restore_state_rank(state)  # workers are running, batches are prefetched
        again = _keys(one.steps(4))
        one.loaders[0].restore_state_rank(None)
        assert _keys(one.steps(3)) == first
    with cluster(build, 1, 0, state) as other:
        assert _keys(other.steps(4)) == again


def test_virtual_epochs_pause_and_go_on(cluster: Any, write_blend: Callable[..., Any]) -> None:
    metadataset = write_blend([(20, 1.0), (30, 2.0)])

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=2, virtual_epoch_length=5, worker_config=config)

    with cluster(build, 1, 2) as one:
        loader = one.loaders[0]
        assert len(loader) == 5
        loops = [_keys(list(one.iterators[0])), _keys(list(loader)), _keys(list(loader))]
        assert [len(loop) for loop in loops] == [5, 5, 5]
    with cluster(build, 1, 0) as other:
        iterator = iter(other.loaders[0])
        assert _keys([next(iterator) for _ in range(3)]) == loops[0][:3]
        state = other.state()
    with cluster(build, 1, 1, state) as third:
        assert _keys(list(third.iterators[0])) == loops[0][3:]  # the loop that was cut ends where it would have
        assert _keys(list(third.loaders[0])) == loops[1]


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

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=1, worker_config=config)

    with cluster(build, 1, 0) as one:
        keys = [key for keys in _keys(one.steps(100)) for key in keys]
    assert 60 < len(set(keys)) < 90  # two independent permutations, half of each: 75 of 100 on average; one twice: 50


def test_golden_run(cluster: Any, write_blend: Callable[..., Any]) -> None:
    """The whole way from YAML to batches, for ever. If this changes, so must ORDER_VERSION."""
    metadataset = write_blend([(7, 2.0), (50, 1.0), (3, 0.5)])

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=4, worker_config=config)

    with cluster(build, 1, 0) as one:
        assert _keys(one.steps(5)) == [
            ["a-0", "c-0", "a-2", "b-6"],
            ["b-5", "a-6", "a-3", "a-5"],
            ["b-43", "c-1", "a-4", "a-1"],
            ["b-42", "a-6", "c-2", "b-12"],
            ["a-1", "a-5", "b-24", "a-2"],
        ]


# -- the state itself -----------------------------------------------------------------------------------------------


def test_state_is_small_plain_and_quick(leaf_of: Any, tmp_path: Any) -> None:
    import time

    from energon_lite import get_savable_loader

    leaves = [{"path": str(leaf_of(5 + number % 7, "a")), "weight": 1 + number / 7} for number in range(100)]
    metadataset = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": leaves}},
    }
    config = WorkerConfig(rank=1, world_size=16, num_workers=2, seed_offset=123456)
    dataset = get_train_dataset(
        metadataset, batch_size=128, shuffle_buffer_size=100_000, max_samples_per_sequence=10_000, worker_config=config
    )
    with get_savable_loader(dataset) as loader:
        iterator = iter(loader)
        times = []
        for _ in range(20):
            next(iterator)
            start = time.perf_counter()
            state = loader.save_state_rank()
            times.append(time.perf_counter() - start)
        assert min(times[1:]) < 1e-3
        assert state is not None
        state["position"] = 10**15
        text = json.dumps(state)
        assert len(text) <= 1024
        assert json.loads(text) == state == msgpack.unpackb(msgpack.packb(state))
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state
        loader.restore_state_rank(json.loads(text))
        assert loader.state_dict() == state


@pytest.mark.parametrize("position", [0, 10**9, 10**15])
def test_positions_far_out_are_like_any_other(cluster: Any, write_blend: Callable[..., Any], position: int) -> None:
    metadataset = write_blend([(20, 1.0), (30, 2.0)])

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=4, worker_config=config)

    with cluster(build, 1, 0) as one:
        state = one.state()
    state["position"] = position
    with cluster(build, 1, 0, state) as alone, cluster(build, 3, 1, state) as three:
        assert _keys(alone.steps(9)) == _keys(three.steps(3))
