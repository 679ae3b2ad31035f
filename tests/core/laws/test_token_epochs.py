"""The epoch law of batches by tokens, as a loader delivers them: of small data sets, with the default chunk.

Plans by the measured tokens of one data set have it in ``tests/core/batching/test_epochs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset, stateless
from tests.testing import ALONE, take

STRATEGIES = [
    {"strategy": "best_fit", "capacity": 100},
    {"strategy": "bfd", "capacity": 100},
    {"strategy": "sorted_window", "capacity": 100},
    {"strategy": "capacity", "capacity": 100},
    {"strategy": "fixed", "batch_size": 4, "sort": True},
]


class Shown(TaskEncoder):
    """Of each sample, its address."""

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"__key__": sample.__key__, "address": sample.__restore_key__[1:4]}

    def sample_length(self, encoded: Any) -> int:
        return int(encoded["address"][1]) * 37 % 60 + 1

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"shown": [sample["address"] for sample in samples]}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["strategy"])
def test_one_small_data_set(leaf_of: Callable[..., Any], strategy: dict[str, Any]) -> None:
    # A chunk has whole epochs; those of several lanes take turns.
    arguments: dict[str, Any] = {"batch_size": None, "batching": strategy, "length_column": None, "lanes": 1}
    dataset = get_train_dataset(leaf_of(50), worker_config=ALONE, task_encoder=Shown(), **arguments)
    with get_savable_loader(dataset) as loader:
        batches = [[tuple(address) for address in batch["shown"]] for batch in take(loader, 200)]
    first, epochs = 0, max(epoch for batch in batches for *_, epoch in batch)
    assert epochs >= 3
    for number, batch in enumerate(batches):
        assert len({epoch for *_, epoch in batch}) == 1, "epochs are mixed"
        if batch[0][2] != batches[first][0][2]:
            seen = [address for one in batches[first:number] for address in one]
            assert sorted(seen) == [(0, index, batches[first][0][2]) for index in range(50)]
            first = number


@pytest.mark.usefixtures("known_lengths")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["strategy"])
@pytest.mark.parametrize("repeat", [True, False])
def test_repetitions(leaf_of: Callable[..., Any], strategy: dict[str, Any], repeat: bool) -> None:
    """Ten samples that come four times an epoch, among fifty that come once: together the whole of each epoch."""
    leaves = [{"path": str(leaf_of(50)), "repetitions": 1}, {"path": str(leaf_of(10, "b")), "repetitions": 4}]
    path = {"splits": {"train": {"blend_epochized": leaves}}}
    arguments: dict[str, Any] = {"batch_size": None, "batching": strategy, "repeat": repeat}
    dataset = get_train_dataset(path, worker_config=ALONE, task_encoder=Shown(), **arguments)
    with get_savable_loader(dataset) as loader:
        batches = [[tuple(address) for address in batch["shown"]] for batch in take(loader, 120)]
    samples = [address for batch in batches for address in batch][:90]
    assert sorted(samples) == [(0, index, 0) for index in range(50)] + [
        (1, index, epoch) for index in range(10) for epoch in range(4)
    ]
    for batch in batches:
        assert len({address[:2] for address in batch}) == len(batch)
