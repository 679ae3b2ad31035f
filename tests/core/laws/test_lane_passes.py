"""Laws 4 and 5 where content decides: each sample once in a pass that ends, and ranks in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from energon_lite import TaskEncoder, WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import FatalSampleError, UnknownLengthError, UsageError
from tests.core.laws.content_encoders import Content
from tests.testing import ALONE, errors_of


def test_without_a_group_the_first_pass_says_what_to_do(leaf_of: Any) -> None:
    config = WorkerConfig(rank=0, world_size=2)
    loader = get_loader(get_val_dataset(leaf_of(20, "a"), worker_config=config, **Content(groups=2).arguments()))
    with pytest.raises(UsageError, match=r"(?s)no process group.*init_process_group.*world_size=1"):
        next(iter(loader))


def test_a_rank_without_data_cannot_know_the_end(leaf_of: Any) -> None:
    content = Content(groups=2)
    config = WorkerConfig(rank=0, world_size=2, loads_data=False)
    with pytest.raises(UsageError, match="loads no data cannot know"):
        next(iter(get_loader(get_val_dataset(leaf_of(20, "a"), worker_config=config, **content.arguments()))))
    endless = get_savable_loader(get_train_dataset(leaf_of(20, "a"), worker_config=config, **content.arguments()))
    assert [batch for _, batch in zip(range(3), endless, strict=False)] == [None] * 3
    assert endless.state_dict()["cursors"] == [] and endless.state_dict()["position"] == 6


def test_the_length_is_not_known(leaf_of: Any) -> None:
    content = Content(groups=2)
    loader = get_loader(get_val_dataset(leaf_of(20, "a"), worker_config=ALONE, **content.arguments()))
    with pytest.raises(UnknownLengthError, match="virtual_epoch_length"):
        len(loader)
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) >= 7  # list() asks for the length, and can do without it
    dataset = get_train_dataset(leaf_of(20, "a"), worker_config=ALONE, virtual_epoch_length=5, **content.arguments())
    loops = get_loader(dataset)
    assert len(loops) == 5 and [len(list(loops)) for _ in range(3)] == [5, 5, 5]


def test_an_error_on_one_rank_ends_the_loop_on_all(on_ranks: Any, leaf_of: Any) -> None:
    class Breaks(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            if sample.text == "a-17":
                raise FatalSampleError("seventeen")
            yield sample

    leaf = leaf_of(60, "a")

    def work(rank: int) -> None:
        config = WorkerConfig(rank=rank, world_size=3)
        list(get_loader(get_val_dataset(leaf, batch_size=2, chunk_size=4, worker_config=config, task_encoder=Breaks())))

    words = errors_of(on_ranks, 3, FatalSampleError, work)
    assert sorted("seventeen" in word for word in words) == [False, False, True]
    assert sum("another rank of the data-parallel group failed" in word for word in words) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_look_like_the_others(on_ranks: Any, leaf_of: Any, workers: int) -> None:
    leaf = leaf_of(9, "a")

    def work(rank: int) -> list[Any]:
        config = WorkerConfig(rank=rank, world_size=2, num_workers=workers)
        dataset = get_val_dataset(leaf, batch_size=2, chunk_size=6, worker_config=config, task_encoder=Echo())
        with get_loader(dataset) as loader:
            return list(loader)

    per_rank = on_ranks(2, work)
    assert [[batch.text for batch in batches] for batches in per_rank] == [
        [["a-0", "a-1"], ["a-2", "a-3"], ["a-4", "a-5"]],
        [["a-6", "a-7"], ["a-8"], []],
    ]
    assert per_rank[1][2].__restore_key__ == ("empty",)


class Halves(TaskEncoder):
    """Makes two batches of the samples for one; with ``tensors`` their names are told by nothing but a tensor."""

    tensors = False

    def batch(self, samples: list[Any]) -> Any:
        numbers = [int(sample.text.split("-")[1]) for sample in samples]
        for half in (numbers[::2], numbers[1::2]):
            if half and self.tensors:
                yield {"numbers": torch.tensor(half), "mean": torch.tensor(half).float().mean()}
            elif half:
                yield {"__key__": [f"a-{number}" for number in half], "numbers": half, "shape": (2, 3)}


class TensorHalves(Halves):
    tensors = True


@pytest.mark.parametrize("encoder", [Halves, TensorHalves])
@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_of_hooks_that_yield_batches_are_empty(
    on_ranks: Any, leaf_of: Any, encoder: Any, workers: int
) -> None:
    leaf = leaf_of(13, "a")

    def work(rank: int) -> list[Any]:
        config = WorkerConfig(rank=rank, world_size=2, num_workers=workers)
        dataset = get_val_dataset(leaf, batch_size=3, chunk_size=9, worker_config=config, task_encoder=encoder())
        with get_loader(dataset) as loader:
            return [list(map(int, batch["numbers"])) for batch in loader]

    per_rank = on_ranks(2, work)
    assert len(per_rank[0]) == len(per_rank[1]) and [] in per_rank[1]
    assert sorted(number for batches in per_rank for batch in batches for number in batch) == list(range(13))


@pytest.mark.parametrize("yields", [False, True])
def test_a_batch_that_cannot_be_emptied_is_an_error_on_all_ranks(on_ranks: Any, leaf_of: Any, yields: bool) -> None:
    class Sums(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            return {"sum": sum(int(sample.text.split("-")[1]) for sample in samples)}

        if yields:

            def encode_batch(self, batch: Any) -> Any:
                yield batch

        else:

            def encode_sample(self, sample: Any) -> Any:
                yield sample

    leaf = leaf_of(33, "a")  # once, not by both ranks

    def work(rank: int) -> None:
        config = WorkerConfig(rank=rank, world_size=2)
        dataset = get_val_dataset(leaf, batch_size=3, chunk_size=24, worker_config=config, task_encoder=Sums())
        list(get_loader(dataset))

    words = errors_of(on_ranks, 2, FatalSampleError, work)
    assert sum("another rank of the data-parallel group failed" in word for word in words) == 1
    assert sum("write empty_batch(self, like, rows)" in word for word in words) == 1


class Echo(TaskEncoder):
    """A generator that yields what it gets."""

    def encode_sample(self, sample: Any) -> Any:
        yield sample
