"""Laws 4, 5 and 6: each sample once an epoch over all ranks, ranks in step, and nothing vanishes uncounted; jobs over
data, cut anywhere on each rank by itself, have each sample exactly once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
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
    get_processing_dataset,
    get_savable_loader,
    get_val_datasets,
)
from energon_lite.errors import EmptyDatasetError, StateMismatchError, UsageError
from energon_lite.extras.energon import log_exception, reraise_exception
from energon_lite.loading import get_processing_datasets
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import blends, in_step, training, validation
from tests.testing import ALONE, blend_of, examples, take, train_loader, val_loader

#: Few, so that their files are written once.
counts = st.sampled_from([1, 2, 7, 11, 20, 31, 64, 120])
some = counts.filter(lambda count: count > 10)
workers = st.sampled_from([0, 0, 2])


def _texts(batches: Any) -> list[str]:
    return [text for batch in batches for text in batch.text]


@settings(max_examples=examples(20))
@given(count=counts, world=st.integers(1, 8), batch_size=st.integers(1, 9), worker_count=workers)
def test_each_epoch_of_training_once(leaf_of: Any, count: int, world: int, batch_size: int, worker_count: int) -> None:
    with Cluster(training(leaf_of(count, "a"), batch_size=batch_size), world, worker_count) as ranks:
        texts = _texts(ranks.steps(-(-3 * count // (batch_size * world))))
    for epoch in range(3):
        assert sorted(texts[epoch * count : (epoch + 1) * count]) == sorted(f"a-{i}" for i in range(count))


@settings(max_examples=examples(20))
@given(blend=blends, world=st.integers(1, 8), batch_size=st.integers(1, 9), worker_count=workers)
def test_validation_once_over_all_ranks_and_in_step(
    write_blend: Callable[..., Any], blend: Any, world: int, batch_size: int, worker_count: int
) -> None:
    names = [f"{'abcdef'[leaf]}-{i}" for leaf, (count, _) in enumerate(blend) for i in range(count)]
    world = min(world, len(names))
    with Cluster(validation(write_blend(blend), batch_size=batch_size), world, worker_count) as ranks:
        for _ in range(2):
            steps = in_step(ranks.loaders)
            assert {len(loader) * world for loader in ranks.loaders} == {len(steps)}
            assert _texts(steps) == names  # every sample once, in order


@settings(max_examples=examples(30))
@given(count=counts, world=st.integers(1, 8), batch_size=st.integers(1, 9), drop_last=st.booleans())
def test_a_single_pass_of_training(leaf_of: Any, count: int, world: int, batch_size: int, drop_last: bool) -> None:
    world = min(world, count)
    build = training(leaf_of(count, "a"), batch_size=batch_size, batch_drop_last=drop_last, repeat=False)
    if drop_last and count < world * batch_size:
        with pytest.raises(EmptyDatasetError, match="batch_drop_last"):
            Cluster(build, world, 0)
        return
    orders = []
    with Cluster(build, world, 0) as ranks:
        for _ in range(2):
            steps = in_step(ranks.loaders)
            texts = _texts(steps)
            assert len(set(texts)) == len(texts)
            assert len(texts) == (count // (world * batch_size) * world * batch_size if drop_last else count)
            assert not drop_last or {len(batch.text) for batch in steps} == {batch_size}
            orders.append(texts)
    assert count < 20 or orders[0] != orders[1]  # another pass is another epoch


@settings(max_examples=examples(15))
@given(blend=blends)
def test_a_blend_keeps_its_weights(write_blend: Callable[..., Any], blend: Any) -> None:
    batches = take(train_loader(write_blend(blend), batch_size=256), 16)  # one block of 4,096
    counts = Counter(text[0] for text in _texts(batches))
    shares = np.array([weight for _, weight in blend])
    for leaf, share in enumerate(shares / shares.sum()):
        assert abs(counts["abcdef"[leaf]] - share * 4096) <= 1


def test_each_validation_set_by_itself(write_blend: Callable[..., Any]) -> None:
    pairs = get_val_datasets(write_blend([(5, 1.0), (3, 1.0)]), batch_size=2, worker_config=ALONE)
    found = [(_texts(get_loader(dataset)), Path(spec.path).name) for dataset, spec in pairs]
    assert found == [([f"a-{i}" for i in range(5)], "a-5"), ([f"b-{i}" for i in range(3)], "b-3")]


def test_more_ranks_than_samples(leaf_of: Any) -> None:
    with pytest.raises(EmptyDatasetError, match="3 samples for 4 data-parallel ranks") as caught:
        val_loader(leaf_of(3, "a"), batch_size=2, world_size=4)
    assert "a-3[val]" in str(caught.value) and "at most 3" in str(caught.value)
    assert "in training, repeat=True" in str(caught.value)


def test_a_pass_over_a_blend_has_no_end(write_blend: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="repeat=False"):
        train_loader(write_blend([(3, 1.0), (4, 1.0)]), batch_size=1, repeat=False)


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
@given(count=some, world=st.integers(1, 4), batch_size=st.integers(1, 6), worker_count=workers)
def test_in_training_a_bad_sample_is_replaced_and_moves_nobody(
    leaf_of: Any, count: int, world: int, batch_size: int, worker_count: int
) -> None:
    clean, picky = (training(leaf_of(count), batch_size=batch_size, task_encoder=e) for e in (TaskEncoder(), Picky()))
    steps = -(-count // (world * batch_size))
    with Cluster(clean, world, worker_count) as ranks:
        expected = _texts(ranks.steps(steps))
    with Cluster(picky, world, worker_count) as ranks:
        batches = ranks.steps(steps)
        found = _texts(batches)
        stats = [loader.stats() for loader in ranks.loaders]
    assert [len(batch.text) for batch in batches] == [batch_size] * len(batches)
    assert [text for text in found if _bad(text)] == []
    assert all(one == other for one, other in zip(expected, found, strict=True) if not _bad(one))
    lost = sum(stat["skipped"] + stat["failed"] for stat in stats)
    assert lost >= sum(map(_bad, expected))  # replacements may be bad as well, and are counted too
    assert sum(stat["samples"] for stat in stats) == len(found)


def test_a_batch_hook_that_fails_gets_other_samples(leaf_of: Any) -> None:
    class Refuses(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            if any(sample.text == "a-3" for sample in samples):
                raise SkipSample("3 is in it")
            return super().batch(samples)

    build = training(leaf_of(20, "a"), batch_size=2, task_encoder=Refuses())
    with Cluster(build, 2, 1) as ranks:
        batches = ranks.steps(10)
        stats = [loader.stats() for loader in ranks.loaders]
    assert all(len(batch.text) == 2 and "a-3" not in batch.text for batch in batches)
    assert sum(stat["skipped"] for stat in stats) >= 2


def _picky(leaf_of: Any, handler: Any = None) -> Any:
    return val_loader(leaf_of(20, "a"), batch_size=4, task_encoder=Picky(), global_error_handler=handler)


def test_error_handlers_see_each_failure(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One of the user's, and those that come with the library."""
    seen: list[tuple[str, Any]] = []
    list(_picky(leaf_of, lambda error, sample, sources: seen.append((str(error), sources[0].index))))
    assert seen == [("cannot read 7", 7), ("cannot read 17", 17)]
    with pytest.raises(ValueError, match="cannot read 7"):
        list(_picky(leaf_of, reraise_exception))
    caplog.clear()
    list(_picky(leaf_of, log_exception))
    told = [record.message for record in caplog.records if "failed: " in record.message and "[7]" in record.message]
    assert len(told) == 1 and ".tar" in told[0] and "cannot read 7" in caplog.text and "cannot read 17" in caplog.text


def test_skips_are_summed_up_at_close(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="energon_lite")
    with _picky(leaf_of) as loader:
        list(loader)
    assert "2 of 20 samples were skipped, 2 failed" in caplog.text
    assert "2 x a-20[val], encode_sample: ValueError: cannot read 7 (one of them)" in caplog.text
    assert caplog.text.count("Traceback") == 1  # the first of a kind in full, the others counted


class Twice(Picky):
    """Makes two of each other sample."""

    def encode_sample(self, sample: Any) -> Iterator[Any]:
        made = super().encode_sample(sample)
        yield from (replace(made, __key__=f"{made.__key__}-{part}") for part in (0, 1))


def document(leaf_of: Callable[..., Path], sizes: list[int]) -> dict[str, Any]:
    return blend_of([(leaf_of(size, "abc"[number]), 3 - number) for number, size in enumerate(sizes) if size])


def expected(sizes: list[int], twice: bool) -> Counter[str]:
    numbers = [(leaf, number) for leaf, size in enumerate(sizes) for number in range(size)]
    kept = [key for leaf, number in numbers if not _bad(key := f"{'abc'[leaf]}-{number}")]
    return Counter(f"{key}-{part}" for key in kept for part in (0, 1)) if twice else Counter(kept)


def keys_of(batch: Any) -> list[str]:
    return [batch.__key__] if isinstance(batch.__key__, str) else list(batch.__key__)


@settings(max_examples=examples(30))
@given(
    sizes=st.sampled_from([[13, 7], [50], [1], [3, 13, 2], [7, 50]]),
    world=st.integers(1, 5),
    workers=st.sampled_from([0, 0, 0, 0, 1, 2]),
    size=st.sampled_from([None, None, 1, 3, 8]),
    cuts=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    twice=st.booleans(),
)
def test_each_sample_once_cut_anywhere(
    leaf_of: Any, sizes: list[int], world: int, workers: int, size: int | None, cuts: list[int], twice: bool
) -> None:
    found, left_out, states = Counter[str](), 0, []
    arguments: Any = {"batch_size": size, "task_encoder": Twice() if twice else Picky()}
    for rank in range(world):
        state: Any = None
        for cut in (cuts[rank], None):
            config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
            dataset = get_processing_dataset(document(leaf_of, sizes), worker_config=config, **arguments)
            with get_savable_loader(dataset).with_restored_state_rank(state) as loader:
                for number, batch in enumerate(loader, 1):
                    assert batch is not None and keys_of(batch)
                    found.update(keys_of(batch))
                    if number == cut:
                        break
                state = json.loads(json.dumps(loader.save_state_rank()))
                if cut is None:
                    assert list(loader) == []  # there is one pass, and no more
                left_out += sum(loader.stats()[kind] for kind in ("skipped", "failed"))
        states.append(state)
    assert found == expected(sizes, twice)
    assert left_out >= sum(sizes) - len(expected(sizes, False))
    with get_savable_loader(dataset).with_restored_state_rank(states[-1]) as loader:
        assert list(loader) == []


def test_ranks_in_step_go_on_on_others(leaf_of: Callable[..., Path]) -> None:
    def loader(rank: int, world: int) -> Any:
        config = WorkerConfig(rank=rank, world_size=world)
        return get_savable_loader(get_processing_dataset(leaf_of(50), batch_size=3, worker_config=config))

    begun = [loader(rank, 2) for rank in range(2)]
    found = [key for one in begun for batch in take(one, 4) for key in batch.__key__]
    state = begun[0].save_state_rank()
    assert state == begun[1].save_state_rank()
    for rank in range(3):
        one = loader(rank, 3).with_restored_state_rank(state)
        found += [key for batch in one for key in batch.__key__]
    assert Counter(found) == Counter(f"a-{number}" for number in range(50))
    assert [(len(one), len(list(one))) for one in (loader(0, 3), loader(2, 3))] == [(6, 6), (5, 5)]


def test_leaves_by_themselves_and_what_is_refused(leaf_of: Callable[..., Path]) -> None:
    pairs = get_processing_datasets(document(leaf_of, [13, 7]), worker_config=ALONE)
    found = [(len(list(get_savable_loader(dataset))), Path(spec.path).name) for dataset, spec in pairs]
    assert found == [(13, leaf_of(13, "a").name), (7, leaf_of(7, "b").name)]
    state = val_loader(leaf_of(13, "a"), split_part="train").state_dict()
    with pytest.raises(StateMismatchError, match="kind: 'val' in the state, 'processing' here"):
        get_savable_loader(pairs[0][0]).restore_state_rank(state)
    with pytest.raises(UsageError, match="has no argument 'shuffle_buffer_size'"):
        get_processing_dataset(leaf_of(13, "a"), shuffle_buffer_size=3, worker_config=ALONE)
