"""When a sample was trained on, for every kind of plan; where it stands in an order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, TaskEncoder, get_train_dataset, get_val_dataset, stateless
from energon_lite.errors import UsageError
from energon_lite.extras.blends.staged_run import Stages
from energon_lite.extras.blends.stages import WeightStage
from energon_lite.extras.energon.wrappers.datasets import EpochizeDataset
from energon_lite.extras.inspect import find_samples, sample_history
from energon_lite.extras.inspect.appearances import SampleHistory
from energon_lite.extras.inspect.occurrences import Occurrences, StreamPlaces
from energon_lite.loading.saved_states import merged
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order, Rebase
from energon_lite.order.shuffle import LeafOrder, Leaves
from tests.core.laws.token_data import Tokens
from tests.testing import ALONE, examples, metadataset, take, train_loader, write_dataset


@pytest.fixture
def blend(tmp_path: Path) -> dict[str, Any]:
    """Two data sets of texts, the second with a subset of its samples."""
    for name, count in (("a", 20), ("b", 15)):
        shards = {
            f"{part}.tar": [(f"{name}{part}{number:03d}", {"txt": b"some text"}) for number in range(count)]
            for part in (0, 1)
        }
        write_dataset(tmp_path / name, shards, splits={"train": ["1.tar", "0.tar"], "val": ["1.tar", "0.tar"]})
    parts = [
        {"path": str(tmp_path / "a"), "weight": 2},
        {"path": str(tmp_path / "b"), "weight": 1, "subset": {"range": ["20%", "80%"]}},
    ]
    return metadataset({"blend": parts})


def histories(dataset: Any, state: Any) -> Iterator[tuple[tuple[int, int], SampleHistory]]:
    """Leaf and index of each sample, and what is said of it."""
    for leaf, one in enumerate(dataset.leaves):
        for index in range(len(one.source)):
            yield (leaf, index), sample_history(dataset, leaf, index, state, most=1000)


def by_tokens(step: int | None, chunk: int) -> dict[str, Any]:
    batching = {"batching": BestFit(Capacity(70), oversize="error"), "micro_batches_per_step": step}
    return {"chunk_size": chunk, "task_encoder": Tokens(), **batching}


@pytest.mark.usefixtures("known_lengths")
@pytest.mark.parametrize(
    ("steps", "arguments"),
    [
        (45, {"batch_size": 3}),
        (45, {"batch_size": 3, "shuffle_buffer_size": 30, "max_samples_per_sequence": 4}),
        *((31, by_tokens(*numbers)) for numbers in ((None, 50), (6, 50), (None, 4))),
    ],
)
def test_all_that_a_run_went_through(blend: Any, steps: int, arguments: dict[str, Any]) -> None:
    seen: dict[tuple[int, int], list[int]] = {}
    with train_loader(blend, **arguments) as loader:
        iterator = iter(loader)
        for number in range(steps):
            for leaf, index, *_ in loader._dataset_iterator.addresses_at(None, number, [0])[0]:
                seen.setdefault((leaf, index), []).append(number)
            next(iterator)
        state = loader.save_state_rank()
    for place, history in histories(loader.dataset, state):
        found = [appearance.micro_batch for appearance in history.appearances]
        assert found == seen.get(place, []) and history.times == len(found)
        coming = None if history.coming is None else history.coming.micro_batch
        assert coming is None or coming >= steps  # None: none, or its number is not known so far ahead
        assert find_samples(loader.dataset, history.key) == [place]


def test_in_passes(tmp_path: Path, blend: Any) -> None:
    with train_loader(tmp_path / "a", batch_size=3, repeat=False, batch_drop_last=True) as loader:
        batches = [*loader, *loader, *take(loader, 10)]
        state = loader.state_dict()
    assert state["pass_number"] == 2
    keys, found = [key for batch in batches for key in batch.__key__], dict(histories(loader.dataset, state))
    for history in found.values():
        # The batch behind the ten was taken from the loader, too.
        assert history.times - keys.count(history.key) in (0, 1), history
    assert sum(history.times for history in found.values()) == 13 * 3 * 2 + state["position"] * 3


def test_of_validation(blend: Any) -> None:
    dataset = get_val_dataset(blend, batch_size=7, worker_config=ALONE)
    history = sample_history(dataset, 1, 3, None)
    assert history.times == 0 and history.coming is not None and history.coming.micro_batch == (40 + 3) // 7


@pytest.mark.usefixtures("known_lengths")
def test_what_the_plan_leaves_out_was_never_trained_on(blend: Any) -> None:
    long = next(index for index in range(40) if index * 37 % 60 + 1 > 30)
    with train_loader(blend, **by_tokens(None, 50) | {"batching": BestFit(Capacity(30), oversize="drop")}) as loader:
        take(loader, 100)
        history = sample_history(loader.dataset, 0, long, loader.save_state_rank())
    assert history.appearances == () and history.coming is None


class Yields(TaskEncoder):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        yield sample


@pytest.mark.parametrize("world", [1, 2])
def test_in_lanes(blend: Any, world: int) -> None:
    lanes: dict[str, Any] = {"lanes": 4, "chunk_size": 8, "task_encoder": Yields(), "batch_size": 3}
    loaders = [train_loader(blend, rank=rank, world_size=world, **lanes) for rank in range(world)]
    keys = [key for batches in take(zip(*loaders, strict=True), 30 // world) for one in batches for key in one.__key__]
    state = merged([loader.save_state_rank() for loader in loaders])
    for _, history in histories(loaders[0].dataset, state):
        assert history.times == len(history.appearances) == keys.count(history.key)


def test_what_there_is_not_is_refused(blend: Any) -> None:
    dataset = get_train_dataset(blend, batch_size=3, worker_config=ALONE)
    assert find_samples(dataset, "b1000") == []  # outside of the subset
    with pytest.raises(UsageError, match="there is no sample 99 of data set 0"):
        sample_history(dataset, 0, 99)
    lanes = get_train_dataset(blend, batch_size=3, task_encoder=Yields(), worker_config=ALONE)
    with pytest.raises(UsageError, match="in a wrapped LaneDataset is not known"):
        sample_history(EpochizeDataset(lanes, 5, worker_config=ALONE), 0, 0)


# -- where it stands in an order ---------------------------------------------------------------------------------------


#: Positions that are gone through.
STOP = 20_000

leaf_orders = st.builds(
    LeafOrder,
    length=st.sampled_from([7, 500, 1500, 5000]),
    key=st.integers(0, 1 << 60),
    copies=st.sampled_from([1, 1, 1, None, -1, 3]),
)
windows = st.sampled_from([{}, {"run": 5, "window": 20}, {"run": 3, "window": 0}, {"run": 7, "window": 1000}])


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, int, list[LeafOrder]]:
    """An order, the first position that it knows, and its leaves."""
    leaves = draw(st.lists(leaf_orders, min_size=1, max_size=3))
    arguments: dict[str, Any] = draw(windows)
    kind = draw(st.sampled_from(["weights", "stages", "repetitions", "passes", "concat"]))
    order: Any
    if kind == "concat":
        return ConcatOrder([leaf.length for leaf in leaves]), 0, leaves
    if kind in ("repetitions", "passes"):
        times = [draw(st.sampled_from([0.7, 1.0, 2.5])) for _ in leaves]
        order = EpochBlendOrder(leaves, times, 9, repeat=kind == "repetitions", **arguments)
    elif kind == "stages":
        share = draw(st.sampled_from([0.0, 0.2]))
        stages = (
            WeightStage(0, (1.0, *(0.5 for _ in leaves[1:]))),
            WeightStage(draw(st.sampled_from([100, 4096])), (*(share for _ in leaves[1:]), 1.0), (1.0,) * len(leaves)),
            WeightStage(12_000, (1.0,) * len(leaves)),
        )
        order = BlendOrder(leaves, Stages(stages), 5, **arguments)
    else:
        order = BlendOrder(leaves, [draw(st.floats(0.001, 1)) for _ in leaves], 5, **arguments)
    if kind != "passes" and draw(st.booleans()):
        starts = tuple(draw(st.integers(0, 400)) for _ in leaves)
        return order.rebased(Rebase(1234, starts)), 1234, leaves
    return order, 0, leaves


@settings(max_examples=examples(30))
@given(made=orders(), data=st.data())
def test_it_is_the_inverse_of_going_through_the_order(made: Any, data: st.DataObject) -> None:
    order, first, leaves = made
    bounds = order.bounds(0)
    stop = min(STOP, bounds[1]) if isinstance(order, ConcatOrder) else STOP
    every = order.lookup(np.arange(first, stop))
    leaf = data.draw(st.integers(0, len(leaves) - 1))
    index = data.draw(st.integers(0, leaves[leaf].length - 1))
    expected = (np.flatnonzero((every.leaf == leaf) & (every.index == index)) + first).tolist()
    found = Occurrences(order, leaf, index)
    assert list(islice(found.between(0, stop), 6)) == expected[:6]
    low, high = sorted((data.draw(st.integers(first, stop)), data.draw(st.integers(first, stop))))
    inside = [position for position in expected if low <= position < high]
    assert list(islice(found.between(low, high, newest=True), 6)) == inside[::-1][:6]
    assert found.count(high) - found.before_rebase == sum(position < high for position in expected)


def test_what_was_shown_before_a_rebase_is_counted() -> None:
    leaves = [LeafOrder(10, 1), LeafOrder(20, 2)]
    order = BlendOrder(leaves, [1, 1], 0).rebased(Rebase(100, (45, 55)))
    found = Occurrences(order, 0, 3)
    streamed, _ = Leaves(leaves).lookup(np.zeros(45, dtype=np.int64), np.arange(45))
    assert found.before_rebase == int((streamed == 3).sum()) in (4, 5)
    assert found.count(50) == found.before_rebase and list(found.between(0, 100)) == []


@pytest.mark.parametrize("copies", [1, 3])
def test_all_cycles_are_inverted_at_once(copies: int) -> None:
    places = StreamPlaces(Leaves([LeafOrder(100, 1, copies)]), 0, 7)
    found = list(places.between(0, 300_000))
    assert len(found) == places.count(300_000) == 3000 and found == sorted(set(found))


def test_a_sample_of_a_billion_is_found_at_once() -> None:
    leaves = [LeafOrder(10**9, 1), LeafOrder(10**6, 2), LeafOrder(3, 4)]
    order = BlendOrder(leaves, [0.7, 0.3, 1e-6], 0, run=100, window=10_000)
    for leaf, index in ((0, 123_456_789), (1, 5), (2, 1)):
        began = time.process_time()
        found = Occurrences(order, leaf, index)
        times, last = found.count(10**12), list(islice(found.between(0, 10**12, newest=True), 10))
        assert time.process_time() - began < 1.0
        assert times == pytest.approx(10**12 * [0.7, 0.3, 1e-6][leaf] / leaves[leaf].length, rel=0.01, abs=2)
        assert all(row[:2] == (leaf, index) for row in order.lookup(np.array(last)).rows())
