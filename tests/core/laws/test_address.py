"""Laws 3 and 7: every sample and every batch can be made again alone, bit for bit, with its own randomness."""

from __future__ import annotations

from typing import Any

import pytest

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import SampleError, UsageError
from tests.testing import ALONE


def _train(metadataset: Any, encoder: Any, config: WorkerConfig, **kwargs: Any) -> Any:
    return get_train_dataset(metadataset, batch_size=3, task_encoder=encoder, worker_config=config, **kwargs)


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
