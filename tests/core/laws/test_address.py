"""Laws 3 and 7: every sample and every batch can be made again alone, bit for bit, with its own randomness."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite import stateless as stateless_hook
from energon_lite.errors import SampleError, UsageError
from tests.testing import ALONE, examples

blends = st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 5)), min_size=1, max_size=4)


def _train(metadataset: Any, encoder: Any, config: WorkerConfig, **kwargs: Any) -> Any:
    return get_train_dataset(metadataset, batch_size=3, task_encoder=encoder, worker_config=config, **kwargs)


@settings(max_examples=examples(12))
@given(blend=blends, workers=st.sampled_from([0, 1, 3]), world=st.integers(1, 4), data=st.data())
def test_batches_and_their_samples_again(
    cluster: Any,
    augment: Any,
    same: Any,
    write_blend: Callable[..., Any],
    blend: Any,
    workers: int,
    world: int,
    data: st.DataObject,
) -> None:
    metadataset = write_blend(blend)
    with cluster(lambda config: _train(metadataset, augment(), config), world, workers) as ranks:
        batches = ranks.steps(6)
    chosen = data.draw(st.lists(st.sampled_from(batches), min_size=1, max_size=6))
    # Another loader, that never ran, on another rank of another world; the key went through JSON.
    other = get_savable_loader(_train(metadataset, augment(), WorkerConfig(rank=1, world_size=3)))
    for batch in chosen:
        key = json.loads(json.dumps(batch["__restore_key__"]))
        again = other.restore_sample(key)
        assert same(again, batch)
    assert other.save_state_rank()["position"] == 0


@settings(max_examples=examples(12))
@given(blend=blends, steps=st.integers(1, 20))
def test_single_samples_again(
    cluster: Any, augment: Any, same: Any, write_blend: Callable[..., Any], blend: Any, steps: int
) -> None:
    metadataset = write_blend(blend)

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(metadataset, batch_size=None, task_encoder=augment(), worker_config=config)

    with cluster(build, 2, 1) as ranks:
        samples = ranks.steps(steps)
    other = get_savable_loader(build(ALONE))
    for sample in samples:
        assert same(other.restore_sample(sample["__restore_key__"]), sample)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10), workers=st.sampled_from([0, 2]))
def test_randomness_does_not_depend_on_who_makes_a_sample(
    cluster: Any, augment: Any, same: Any, write_blend: Callable[..., Any], seed: int, workers: int
) -> None:
    metadataset = write_blend([(20, 1.0), (30, 2.0)])

    def build(config: WorkerConfig) -> Any:
        config.seed_offset = seed
        return _train(metadataset, augment(), config)

    with cluster(build, 1, 0) as alone, cluster(build, 2, workers) as two:
        expected, found = alone.steps(12), two.steps(6)
        assert all(map(same, expected, found))
    noise = torch.cat([batch["noise"] for batch in expected])
    assert len(torch.unique(noise)) == noise.numel()  # no two samples, and no two generators, draw the same
    drawn = torch.cat([batch["drawn"] for batch in expected])
    assert len(torch.unique(drawn)) == drawn.numel()


def test_each_epoch_draws_anew_and_another_seed_too(augment: Any, leaf_of: Any) -> None:
    def noise(seed: int, steps: int) -> dict[tuple[str, int], torch.Tensor]:
        config = WorkerConfig(rank=0, world_size=1, seed_offset=seed)
        dataset = get_train_dataset(leaf_of(5, "a"), batch_size=None, task_encoder=augment(), worker_config=config)
        samples = zip(range(steps), get_savable_loader(dataset), strict=False)
        return {(sample["__key__"], number // 5): sample["noise"] for number, sample in samples}

    first, other = noise(0, 10), noise(1, 5)
    assert len(first) == 10
    for key in {key for key, _ in first}:
        assert not torch.equal(first[key, 0], first[key, 1])
        assert not torch.equal(first[key, 0], other[key, 0])


def test_the_callers_generators_are_left_alone(augment: Any, leaf_of: Any) -> None:
    dataset = _train(leaf_of(50, "a"), augment(), ALONE)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    for _ in zip(range(20), get_savable_loader(dataset), strict=False):
        pass
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert before == after


def test_generators_come_back_after_an_error(leaf_of: Any) -> None:
    class Fails(TaskEncoder):
        @stateless_hook(restore_seeds=True)
        def encode_sample(self, sample: Any) -> Any:
            torch.rand(1)
            raise ValueError("no")

    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = get_savable_loader(_train(leaf_of(5, "a"), Fails(), ALONE))
    with pytest.raises(Exception, match="100 samples in a row"):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_indices_that_hooks_can_ask_for(leaf_of: Any, cluster: Any) -> None:
    class Asks(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return {"sample": self.current_sample_index, "text": sample.text}

        def encode_batch(self, batch: Any) -> Any:
            return batch | {"batch": self.current_batch_index}

    leaf = leaf_of(5, "a")
    with cluster(lambda config: _train(leaf, Asks(), config), 2, 1) as ranks:
        batches = ranks.steps(5)
    assert [batch["batch"] for batch in batches] == list(range(10))
    numbers = [number for batch in batches for number in batch["sample"]]
    assert sorted(numbers) == list(range(30))  # 6 epochs of 5, each number once
    for batch in batches:
        for number, text in zip(batch["sample"], batch["text"], strict=True):
            assert text == f"a-{number % 5}"


def test_asking_outside_of_a_hook_is_an_error() -> None:
    encoder = TaskEncoder()
    with pytest.raises(UsageError, match="outside of a hook"):
        encoder.rng  # noqa: B018
    with pytest.raises(UsageError, match="outside of a hook"):
        encoder.current_batch_index  # noqa: B018


def test_a_sample_that_fails_says_so_when_it_is_made_again(leaf_of: Any) -> None:
    class Fails(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("no")

    dataset = _train(leaf_of(5, "a"), Fails(), ALONE)
    with pytest.raises(SampleError, match="encode_sample: ValueError: no") as caught:
        get_savable_loader(dataset).restore_sample(("sample", 0, 3, 0, 0))
    assert "a-5[train], a-3" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        (),
        ("batch", 0),
        ("sample", 99, 0, 0, 0),
        ("sample", 0, 5, 0, 0),
        ("batch", 0, -1),
        ("Webdataset", 5),
        ("batch", "0", "1"),
    ],
)
def test_foreign_keys_are_refused(leaf_of: Any, key: Any) -> None:
    dataset = get_val_dataset(leaf_of(5, "a"), batch_size=2, worker_config=ALONE)
    with pytest.raises(UsageError, match="not a restore key"):
        get_savable_loader(dataset).restore_sample(key)
