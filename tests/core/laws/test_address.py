"""Laws 3 and 7: every sample and every batch can be made again alone, bit for bit, with its own randomness."""

from __future__ import annotations

from typing import Any

import pytest

from energon_lite import TaskEncoder
from energon_lite.errors import SampleError, UsageError
from tests.core.laws.kinds import training
from tests.testing import train_loader, val_loader


def test_indices_that_hooks_can_ask_for(leaf_of: Any, cluster: Any) -> None:
    class Asks(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return {"sample": self.current_sample_index, "text": sample.text}

        def encode_batch(self, batch: Any) -> Any:
            return batch | {"batch": self.current_batch_index}

    with cluster(training(leaf_of(5, "a"), batch_size=3, task_encoder=Asks()), 2, 1) as ranks:
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

    loader = train_loader(leaf_of(5, "a"), batch_size=3, task_encoder=Fails())
    with pytest.raises(SampleError, match="encode_sample: ValueError: no") as caught:
        loader.restore_sample(("sample", 0, 3, 0, 0))
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
    with pytest.raises(UsageError, match="not a restore key"):
        val_loader(leaf_of(5, "a"), batch_size=2).restore_sample(key)
