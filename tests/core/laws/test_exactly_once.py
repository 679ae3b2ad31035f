"""Laws 4, 5 and 6: each sample once an epoch over all ranks, ranks in step, and nothing vanishes uncounted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.errors import EmptyDatasetError, UsageError
from energon_lite.extras.energon import log_exception, reraise_exception
from tests.core.laws.kinds import blends, training, validation
from tests.testing import ALONE, examples

#: Few, so that their files are written once.
counts = st.sampled_from([1, 2, 7, 11, 20, 31, 64, 120])
some = counts.filter(lambda count: count > 10)
workers = st.sampled_from([0, 0, 2])


def _texts(batches: list[Any]) -> list[str]:
    return [text for batch in batches for text in batch.text]


@settings(max_examples=examples(20))
@given(count=counts, world=st.integers(1, 8), batch_size=st.integers(1, 9), worker_count=workers)
def test_each_epoch_of_training_once(
    cluster: Any, leaf_of: Any, count: int, world: int, batch_size: int, worker_count: int
) -> None:
    leaf = leaf_of(count, "a")
    build = training(leaf, batch_size=batch_size)
    with cluster(build, world, worker_count) as ranks:
        texts = _texts(ranks.steps(-(-3 * count // (batch_size * world))))
    for epoch in range(3):
        assert sorted(texts[epoch * count : (epoch + 1) * count]) == sorted(f"a-{i}" for i in range(count))


@settings(max_examples=examples(20))
@given(blend=blends, world=st.integers(1, 8), batch_size=st.integers(1, 9), worker_count=workers)
def test_validation_once_over_all_ranks_and_in_step(
    cluster: Any, write_blend: Callable[..., Any], blend: Any, world: int, batch_size: int, worker_count: int
) -> None:
    metadataset = write_blend(blend)
    names = [f"{'abcdef'[leaf]}-{i}" for leaf, (count, _) in enumerate(blend) for i in range(count)]
    world = min(world, len(names))
    build = validation(metadataset, batch_size=batch_size)
    with cluster(build, world, worker_count) as ranks:
        for iterators in (ranks.iterators, [iter(loader) for loader in ranks.loaders]):
            per_rank = [list(iterator) for iterator in iterators]
            assert len({len(batches) for batches in per_rank}) == 1
            assert all(len(batches) == len(loader) for batches, loader in zip(per_rank, ranks.loaders, strict=True))
            steps = [batch for step in zip(*per_rank, strict=True) for batch in step]
            assert _texts(steps) == names  # every sample once, in order


@settings(max_examples=examples(30))
@given(count=counts, world=st.integers(1, 8), batch_size=st.integers(1, 9), drop_last=st.booleans())
def test_a_single_pass_of_training(
    cluster: Any, leaf_of: Any, count: int, world: int, batch_size: int, drop_last: bool
) -> None:
    leaf = leaf_of(count, "a")
    world = min(world, count)
    build = training(leaf, batch_size=batch_size, batch_drop_last=drop_last, repeat=False)
    if drop_last and count < world * batch_size:
        with pytest.raises(EmptyDatasetError, match="batch_drop_last"):
            cluster(build, world, 0)
        return
    orders = []
    with cluster(build, world, 0) as ranks:
        for iterators in (ranks.iterators, [iter(loader) for loader in ranks.loaders]):
            per_rank = [list(iterator) for iterator in iterators]
            assert len({len(batches) for batches in per_rank}) == 1
            texts = _texts([batch for step in zip(*per_rank, strict=True) for batch in step])
            assert len(set(texts)) == len(texts)
            assert len(texts) == (count // (world * batch_size) * world * batch_size if drop_last else count)
            assert not drop_last or all(len(batch.text) == batch_size for batches in per_rank for batch in batches)
            orders.append(texts)
    assert count < 20 or orders[0] != orders[1]  # another pass is another epoch


@settings(max_examples=examples(15))
@given(blend=blends)
def test_a_blend_keeps_its_weights(cluster: Any, write_blend: Callable[..., Any], blend: Any) -> None:
    metadataset = write_blend(blend)
    build = training(metadataset, batch_size=256)
    with cluster(build, 1, 0) as one:
        counts = Counter(text[0] for text in _texts(one.steps(16)))  # one block of 4,096
    shares = np.array([weight for _, weight in blend])
    for leaf, share in enumerate(shares / shares.sum()):
        assert abs(counts["abcdef"[leaf]] - share * 4096) <= 1


def test_each_validation_set_by_itself(write_blend: Callable[..., Any]) -> None:
    metadataset = write_blend([(5, 1.0), (3, 1.0)])
    datasets = get_val_datasets(metadataset, batch_size=2, worker_config=ALONE)
    assert [_texts(list(get_loader(dataset))) for dataset, _ in datasets] == [
        [f"a-{i}" for i in range(5)],
        [f"b-{i}" for i in range(3)],
    ]
    assert [spec.path.endswith(name) for (_, spec), name in zip(datasets, ("a-5", "b-3"), strict=True)] == [True, True]


def test_more_ranks_than_samples(leaf_of: Any) -> None:
    with pytest.raises(EmptyDatasetError, match="3 samples for 4 data-parallel ranks") as caught:
        get_val_dataset(leaf_of(3, "a"), batch_size=2, worker_config=WorkerConfig(rank=0, world_size=4))
    assert "a-3[val]" in str(caught.value) and "at most 3" in str(caught.value)


def test_a_pass_over_a_blend_has_no_end(write_blend: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="repeat=False"):
        get_train_dataset(write_blend([(3, 1.0), (4, 1.0)]), batch_size=1, repeat=False, worker_config=ALONE)


# -- law 6 ----------------------------------------------------------------------------------------------------------


class Picky(TaskEncoder):
    """Skips some samples and stumbles over others, by their number."""

    def encode_sample(self, sample: Any) -> Any:
        number = int(sample.text.split("-")[1])
        if number % 10 == 3:
            raise SkipSample("ends in 3")
        if number % 10 == 7:
            raise ValueError(f"cannot read {number}")
        return sample


def _bad(text: str) -> bool:
    return int(text.split("-")[1]) % 10 in (3, 7)


@settings(max_examples=examples(25))
@given(
    count=counts.filter(lambda count: count > 10),
    world=st.integers(1, 4),
    batch_size=st.integers(1, 6),
    worker_count=workers,
)
def test_in_training_a_bad_sample_is_replaced_and_moves_nobody(
    cluster: Any, leaf_of: Any, count: int, world: int, batch_size: int, worker_count: int
) -> None:
    leaf = leaf_of(count, "a")

    def build(encoder: TaskEncoder) -> Callable[[WorkerConfig], Any]:
        return lambda config: get_train_dataset(leaf, batch_size=batch_size, task_encoder=encoder, worker_config=config)

    steps = -(-count // (world * batch_size))
    with cluster(build(TaskEncoder()), world, worker_count) as clean:
        expected = _texts(clean.steps(steps))
    with cluster(build(Picky()), world, worker_count) as picky:
        batches = picky.steps(steps)
        found = _texts(batches)
        stats = [loader.stats() for loader in picky.loaders]
    assert [len(batch.text) for batch in batches] == [batch_size] * len(batches)
    assert [text for text in found if _bad(text)] == []
    assert all(one == other for one, other in zip(expected, found, strict=True) if not _bad(one))
    lost = sum(stat["skipped"] + stat["failed"] for stat in stats)
    assert lost >= sum(map(_bad, expected))  # replacements may be bad as well, and are counted too
    assert sum(stat["samples"] for stat in stats) == len(found)


def test_a_batch_hook_that_fails_gets_other_samples(leaf_of: Any, cluster: Any) -> None:
    class Refuses(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            if any(sample.text == "a-3" for sample in samples):
                raise SkipSample("3 is in it")
            return super().batch(samples)

    build = training(leaf_of(20, "a"), batch_size=2, task_encoder=Refuses())
    with cluster(build, 2, 1) as ranks:
        batches = ranks.steps(10)
        stats = [loader.stats() for loader in ranks.loaders]
    assert all(len(batch.text) == 2 and "a-3" not in batch.text for batch in batches)
    assert sum(stat["skipped"] for stat in stats) >= 2


def test_the_users_error_handler_sees_each_failure(leaf_of: Any) -> None:
    seen: list[tuple[str, Any]] = []

    def handler(error: Exception, sample: Any, sources: Any) -> None:
        seen.append((str(error), sources[0].index))

    config = WorkerConfig(rank=0, world_size=1, global_error_handler=handler)
    dataset = get_val_dataset(leaf_of(20, "a"), batch_size=4, task_encoder=Picky(), worker_config=config)
    list(get_loader(dataset))
    assert seen == [("cannot read 7", 7), ("cannot read 17", 17)]


def test_handlers_that_come_with_the_library(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    def loader(handler: Any) -> Any:
        config = WorkerConfig(rank=0, world_size=1, global_error_handler=handler)
        return get_loader(get_val_dataset(leaf_of(20, "a"), batch_size=4, task_encoder=Picky(), worker_config=config))

    with pytest.raises(ValueError, match="cannot read 7"):
        list(loader(reraise_exception))
    caplog.clear()
    list(loader(log_exception))
    told = [record.message for record in caplog.records if "failed: " in record.message and "[7]" in record.message]
    assert len(told) == 1 and ".tar" in told[0] and "cannot read 7" in caplog.text and "cannot read 17" in caplog.text


def test_skips_are_summed_up_at_close(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    dataset = get_val_dataset(leaf_of(20, "a"), batch_size=4, task_encoder=Picky(), worker_config=ALONE)
    caplog.set_level("WARNING", logger="energon_lite")
    with get_loader(dataset) as loader:
        list(loader)
    assert "2 of 20 samples were skipped, 2 failed" in caplog.text
    assert "2 x a-20[val], encode_sample: ValueError: cannot read 7 (one of them)" in caplog.text
    assert caplog.text.count("Traceback") == 1  # the first of a kind in full, the others counted
