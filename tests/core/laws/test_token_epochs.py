"""The epoch law of batches by tokens, as a loader delivers them: of small data sets, with the default chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset, stateless
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import ALONE

STRATEGIES = [
    {"strategy": "best_fit", "capacity": 100},
    {"strategy": "bfd", "capacity": 100},
    {"strategy": "sorted_window", "capacity": 100},
    {"strategy": "capacity", "capacity": 100},
    {"strategy": "concat_split", "tokens": 100},
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


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: np.arange(len(self)) * 37 % 60 + 1)


def shown(path: Any, batches: int | None, **arguments: Any) -> list[list[tuple[int, int, int]]]:
    """The addresses of the samples of each micro-batch; ``None``: of a pass."""
    dataset = get_train_dataset(path, batch_size=None, worker_config=ALONE, task_encoder=Shown(), **arguments)
    with get_savable_loader(dataset) as loader:
        found = loader if batches is None else (batch for batch, _ in zip(loader, range(batches), strict=False))
        return [[tuple(address) for address in batch["shown"]] for batch in found]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["strategy"])
@pytest.mark.parametrize("column", ["length", None], ids=["column", "encoded"])
def test_one_small_data_set(leaf_of: Callable[..., Any], strategy: dict[str, Any], column: str | None) -> None:
    if column is None and strategy["strategy"] == "concat_split":
        pytest.skip("cuts samples, which are no sequences here")
    if column is not None and strategy["strategy"] == "concat_split":
        strategy = strategy | {"tokens": 10_000}  # as many as nothing is cut for
    lanes = {"lanes": 1} if column is None else {}  # a chunk has whole epochs; those of several lanes take turns
    batches = shown(leaf_of(50), 200, batching=strategy, length_column=column, **lanes)
    first, epochs = 0, max(epoch for batch in batches for *_, epoch in batch)
    assert epochs >= 3
    for number, batch in enumerate(batches):
        assert len({epoch for *_, epoch in batch}) == 1, "epochs are mixed"
        if batch[0][2] != batches[first][0][2]:
            seen = [address for one in batches[first:number] for address in one]
            assert sorted(seen) == [(0, index, batches[first][0][2]) for index in range(50)]
            first = number


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one["strategy"] != "concat_split"], ids=str)
@pytest.mark.parametrize("repeat", [True, False])
def test_repetitions(leaf_of: Callable[..., Any], strategy: dict[str, Any], repeat: bool) -> None:
    """Ten samples that come four times an epoch, among fifty that come once: together the whole of each epoch."""
    leaves = [{"path": str(leaf_of(50)), "repetitions": 1}, {"path": str(leaf_of(10, "b")), "repetitions": 4}]
    path = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend_epochized": leaves}},
    }
    batches = shown(path, 120 if repeat else None, batching=strategy, repeat=repeat)
    samples = [address for batch in batches for address in batch][:90]
    assert Counter(leaf for leaf, *_ in samples) == {0: 50, 1: 40}
    assert sorted(samples) == [(0, index, 0) for index in range(50)] + [
        (1, index, epoch) for index in range(10) for epoch in range(4)
    ]
    for batch in batches:
        assert len({address[:2] for address in batch}) == len(batch)
