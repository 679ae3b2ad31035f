"""When a sample was trained on: what going through the run finds, for every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BestFit,
    Capacity,
    TaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.errors import UsageError
from energon_lite.extras.inspect import find_samples, sample_history
from tests.testing import ALONE, take

WriteDataset = Callable[..., Path]


@pytest.fixture
def blend(tmp_path: Path, write_dataset: WriteDataset) -> dict[str, Any]:
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
    blend = {"blend": parts}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": blend, "val": blend}}


def check(dataset: Any, steps: int) -> None:
    """Go through some steps of a run, and compare with what is said of each sample afterwards."""
    seen: dict[tuple[int, int], list[int]] = {}
    with get_savable_loader(dataset) as loader:
        iterator = iter(loader)
        for number in range(steps):
            for leaf, index, *_ in loader._dataset_iterator.addresses_at(None, number, [0])[0]:
                seen.setdefault((leaf, index), []).append(number)
            next(iterator)
        state = loader.save_state_rank()
    for leaf, one in enumerate(dataset.leaves):
        for index in range(len(one.source)):
            history = sample_history(dataset, leaf, index, state, most=1000)
            found = [appearance.micro_batch for appearance in history.appearances]
            assert found == seen.get((leaf, index), []) and history.times == len(found)
            assert history.coming is None or (history.coming.micro_batch or 0) >= steps
            assert find_samples(dataset, history.key) == [(leaf, index)]


@pytest.mark.parametrize("window", [{}, {"shuffle_buffer_size": 30, "max_samples_per_sequence": 4}])
def test_of_a_number_of_samples(blend: Any, window: Any) -> None:
    check(get_train_dataset(blend, batch_size=3, worker_config=ALONE, **window), 45)


def test_in_passes(tmp_path: Path, blend: Any) -> None:
    dataset = get_train_dataset(tmp_path / "a", batch_size=3, repeat=False, batch_drop_last=True, worker_config=ALONE)
    with get_savable_loader(dataset) as loader:
        every = [list(loader), list(loader)]
        half = take(loader, 10)
        state = loader.state_dict()
    assert state["pass_number"] == 2
    keys = [key for batches in (*every, half) for batch in batches for key in batch.__key__]
    for index in range(40):
        history = sample_history(dataset, 0, index, state)
        # The batch behind the ten was taken from the loader, too.
        assert history.times - keys.count(history.key) in (0, 1), history
    assert (
        sum(sample_history(dataset, 0, index, state).times for index in range(40)) == 13 * 3 * 2 + state["position"] * 3
    )


def test_of_validation(blend: Any) -> None:
    dataset = get_val_dataset(blend, batch_size=7, worker_config=ALONE)
    history = sample_history(dataset, 1, 3, None)
    assert history.times == 0 and history.coming is not None and history.coming.micro_batch == (40 + 3) // 7


@pytest.mark.usefixtures("known_lengths")
@pytest.mark.parametrize("step", [None, 6])
def test_by_tokens(blend: Any, step: int | None) -> None:
    from tests.core.laws.token_data import Tokens

    batching = BestFit(Capacity(70), oversize="error")
    dataset = get_train_dataset(
        blend, batching=batching, chunk_size=50, micro_batches_per_step=step, task_encoder=Tokens(), worker_config=ALONE
    )
    check(dataset, 31)


@pytest.mark.usefixtures("known_lengths")
def test_what_the_plan_leaves_out_was_never_trained_on(blend: Any) -> None:
    from tests.core.laws.token_data import Tokens

    batching = BestFit(Capacity(30), oversize="drop")
    dataset = get_train_dataset(blend, batching=batching, chunk_size=50, task_encoder=Tokens(), worker_config=ALONE)
    long = next(index for index in range(40) if index * 37 % 60 + 1 > 30)
    with get_savable_loader(dataset) as loader:
        take(loader, 100)
        state = loader.save_state_rank()
    history = sample_history(dataset, 0, long, state)
    assert history.appearances == () and history.coming is None


class Yields(TaskEncoder):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        yield sample


@pytest.mark.parametrize("world", [1, 2])
def test_in_lanes(blend: Any, world: int) -> None:
    def build(rank: int) -> Any:
        config = WorkerConfig(rank=rank, world_size=world)
        return get_train_dataset(
            blend, batch_size=3, task_encoder=Yields(), lanes=4, chunk_size=8, worker_config=config
        )

    loaders = [get_savable_loader(build(rank)) for rank in range(world)]
    iterators = [iter(loader) for loader in loaders]
    keys = [key for _ in range(30 // world) for one in iterators for key in next(one).__key__]
    from energon_lite.loading.saved_states import merged

    state = merged([loader.save_state_rank() for loader in loaders])
    dataset = loaders[0].dataset
    for leaf, one in enumerate(dataset.leaves):
        for index in range(len(one.source)):
            history = sample_history(dataset, leaf, index, state, most=1000)
            assert history.times == len(history.appearances) == keys.count(history.key)


def test_what_there_is_not_is_refused(blend: Any) -> None:
    dataset = get_train_dataset(blend, batch_size=3, worker_config=ALONE)
    assert find_samples(dataset, "b1000") == []  # outside of the subset
    with pytest.raises(UsageError, match="there is no sample 99 of data set 0"):
        sample_history(dataset, 0, 99)
