"""Data sets made of others: what is refused, counted and sent to workers. What the wrappers make, cut anywhere and
restored anywhere, is compared with plain code by ``tests/core/laws/test_oracle.py`` and ``test_ends.py``."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.errors import FatalSampleError, StateMismatchError, UsageError
from energon_lite.extras.energon import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from tests.testing import ALONE, alone, batches_of, take


class Names(TaskEncoder):
    """Batches are the texts of their samples."""

    def encode_sample(self, sample: Any) -> str:
        return str(sample.text)

    def batch(self, samples: list[str]) -> list[str]:
        return samples


class PackedNames(Names):
    """Two samples a pack."""

    def select_samples_to_pack(self, samples: list[str]) -> list[list[str]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[str]) -> str:
        return "+".join(samples)


def val(path: Path, batch_size: int | None = 2, config: WorkerConfig = ALONE, **more: Any) -> Any:
    arguments = {"batch_size": batch_size, "task_encoder": Names(), "split_part": "train"} | more
    return get_val_dataset(path, worker_config=config, **arguments)


def train(path: Path, batch_size: int | None = 2, config: WorkerConfig = ALONE, **more: Any) -> Any:
    return get_train_dataset(path, worker_config=config, batch_size=batch_size, task_encoder=Names(), **more)


def packed(path: Path) -> Any:
    return val(path, batch_size=1, packing_buffer_size=4, task_encoder=PackedNames())


@pytest.fixture
def a(leaf_of: Callable[..., Path]) -> Path:
    return leaf_of(5, "a")


@pytest.fixture
def b(leaf_of: Callable[..., Path]) -> Path:
    return leaf_of(6, "b")


def test_what_a_filter_leaves_out_is_replaced_in_training_and_counted(a: Path) -> None:
    loader = get_loader(FilterDataset(train(a, None), filter_fn=lambda text: text != "a-3"))
    assert set(take(loader, 20)) == {"a-0", "a-1", "a-2", "a-4"} and loader.stats()["skipped"] >= 4
    assert batches_of(FilterDataset(val(a, None), filter_fn=lambda text: text != "a-3"))[3] is None


def test_nothing_gets_through(a: Path) -> None:
    def never(item: Any) -> Any:
        raise SkipSample("never")

    with pytest.raises(FatalSampleError, match="in a row"):
        next(iter(get_loader(MapDataset(train(a), never, failure_tolerance=7))))
    assert batches_of(MapDataset(val(a, None), lambda item: 1 / 0)) == [None] * 5


def test_functions_that_wrappers_have_of_their_own(a: Path, b: Path) -> None:
    mixed = batches_of(MixBatchDataset((train(a, None), 3), (train(b, None), 1), batch_size=4), 64)
    shares = Counter(text[0] for batch in mixed for text in batch)
    assert {len(batch) for batch in mixed} == {4} and abs(shares["a"] - 3 * shares["b"]) <= 20
    encoded = PackingDataset(val(b, None), 4, lambda some: [some[:3], some[3:]], "+".join, sample_encoder=str.upper)
    assert sorted("+".join(batches_of(encoded)).split("+")) == [f"B-{number}" for number in range(6)]


def test_what_cannot_be_planned_is_refused(a: Path, b: Path) -> None:
    def several(item: Any) -> Any:
        yield item

    def grouped(inner: Any) -> Any:
        return GroupBatchDataset(inner, 2, lambda text: (int(text[2]) % 2, None), list)

    singles, counts = val(b, None), "of a data set that counts single samples"
    for make, words in (
        (lambda: IterMapDataset(val(a), iter), "encode_sample"),
        (lambda: MapDataset(val(a), several), "generator"),
        (lambda: LimitDataset(val(a), 3, worker_config=WorkerConfig(rank=0, world_size=2)), "another worker_config"),
        (lambda: batches_of(ConcatDataset(train(a), val(b))), "never ends"),
        (lambda: batches_of(ConcatDataset(packed(a), val(a))), "hooks or tokens decide"),
        (lambda: batches_of(ConcatDataset(RepeatDataset(grouped(singles)), singles)), "of a data set whose hooks"),
        (lambda: batches_of(grouped(val(b, None, limit=4))), counts),
        (lambda: batches_of(grouped(train(b, None, virtual_epoch_length=4))), counts),
        (lambda: batches_of(grouped(val(b))), "single samples|of batches"),
        (lambda: RepeatDataset(val(a), repeats=0), "repeats is 0"),
        (lambda: LimitDataset(val(a), 0), r"length=0"),
        (lambda: EpochizeDataset(val(a), 0), r"length=0"),
        (lambda: ShuffleBufferDataset(val(a), 0), r"size=0"),
        (lambda: BlendDataset((val(a), 0)), "weight of a BlendDataset is 0"),
        (lambda: ConcatDataset(val(a), val(b)).dataset, "has 2 data sets"),
        (lambda: MapDataset([1], sorted), "MapDataset of a int"),
    ):
        with pytest.raises(UsageError, match=words):
            make()


def test_a_limit_inside_belongs_to_its_ranks(a: Path) -> None:
    def tree(config: WorkerConfig) -> Any:
        return RepeatDataset(LimitDataset(val(a, config=config), 1))

    loader = get_savable_loader(tree(WorkerConfig(rank=0, world_size=2)))
    next(iter(loader))
    with pytest.raises(StateMismatchError, match="ranks: 2 in the state"):
        get_savable_loader(tree(ALONE)).restore_state_rank(loader.save_state_rank())


def test_the_last_step_may_be_skipped(a: Path) -> None:
    packed = get_train_dataset(a, worker_config=ALONE, batch_size=1, packing_buffer_size=4, task_encoder=PackedNames())
    loader = get_savable_loader(LimitDataset(packed, 4), skip_steps=[1, 3])
    assert [loader.is_last() for _ in loader] == [False, True]


def test_ranks_that_have_nothing_left(b: Path) -> None:
    config = WorkerConfig(rank=1, world_size=2)
    singles = FilterDataset(val(b, None, config), filter_fn=lambda text: text != "b-0")
    numbers = BatchDataset(singles, 2, lambda texts: torch.tensor([[int(text[2:])] for text in texts]))
    batch, empty = batches_of(numbers)
    assert batch.tolist() == [[2], [3]] and empty.shape == (0, 1)
    with pytest.raises(FatalSampleError, match="an empty batch cannot be made: this str has no tensors or lists"):
        batches_of(BatchDataset(singles, 2, "".join))
    assert len(RepeatDataset(val(b, config=config, batch_drop_last=True), repeats=2)) == 2


def test_states_of_many_wrappers_are_short(b: Path) -> None:
    def loader(wrappers: int) -> Any:
        dataset = val(b, None)
        for _ in range(wrappers):
            dataset = MapDataset(dataset, list)
        return get_savable_loader(dataset)

    state = loader(99).save_state_rank()
    assert len(str(state)) < 1000
    loader(99).restore_state_rank(state)
    with pytest.raises(StateMismatchError):
        loader(98).restore_state_rank(state)


def test_samples_of_a_mixed_item(a: Path, b: Path) -> None:
    mixed = MapDataset(BlendDataset((train(a), np.float32(1)), (train(b), np.int64(2))), sorted)
    assert "weights=[1.0, 2]" in str(mixed)
    sources = get_savable_loader(mixed).samples_at(4)
    assert {sample.dataset for sample in sources} <= {str(a), str(b)} and len(sources) == 2
    assert mixed.runner().results((1, 3, 0)) == (["b-3"], [])


def test_workers_that_start_afresh_get_a_copy_and_threads_are_refused(a: Path, b: Path) -> None:
    def mixed(config: WorkerConfig) -> Any:
        both = RepeatDataset(ConcatDataset(val(a, config=config), val(b, config=config)))
        return BlendDataset((both, 2), (MapDataset(train(b, config=config), sorted), 1))

    loader = get_loader(mixed(ALONE))
    expected = take(loader, 9)
    loader = get_loader(mixed(ALONE))
    nested = get_loader(MapDataset(BatchDataset(val(b, None), 2, list), list))._runner
    assert nested._runners[0]._runners[0].services is nested.services
    loader._runner = pickle.loads(pickle.dumps(loader._runner))  # what a spawned worker gets
    assert take(loader, 9) == expected
    with pytest.raises(UsageError, match="thread"):
        next(iter(get_savable_loader(mixed(alone(1)), start_method="thread")))
