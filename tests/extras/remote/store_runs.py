"""Runs with a store of samples, of hooks that write down each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SkipSample, TaskEncoder, WorkerConfig, get_train_dataset, stateless
from energon_lite.extras.remote import SampleStore
from tests.testing import ALONE, batches_of, same

LARGE = 1 << 30


class Encoder(TaskEncoder):
    """Writes down each call. Some samples draw, some ask for their number, some are left out."""

    def __init__(self, calls: Path, salt: int = 0):
        self.calls = str(calls)
        self.salt = salt

    def encode_sample(self, sample: Any) -> Any:
        with open(self.calls, "a") as file:
            file.write(f"{sample.text}\n")
        number = int(sample.text.rsplit("-", 1)[-1])
        extra = self.salt
        if number % 4 == 1:
            extra += float(torch.rand(()))
        if number % 4 == 2:
            extra += float(self.rng.random())
        if number % 8 == 3:
            extra += self.current_sample_index
        if number == 7:
            raise SkipSample("7")
        return {"__key__": sample.__key__, "values": torch.full((1 + number % 3,), extra), "pair": (number, "x")}

    def batch(self, samples: list[Any]) -> Any:
        for sample in samples:
            sample["values"] += 1  # in place: it must not be found in the store
        return samples


class Plain(TaskEncoder):
    """Samples of equal size, without random numbers. Writes down each call."""

    def __init__(self, calls: Path):
        self.calls = str(calls)

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        with open(self.calls, "a") as file:
            file.write(f"{sample.text}\n")
        return {"__key__": sample.__key__, "values": torch.full((400,), int(sample.text.rsplit("-", 1)[-1]))}


@pytest.fixture
def run(leaf_of: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[list[Any], int]]:
    """``run(...)``: batches of a run, and how often the hook was called."""

    def batches(store: SampleStore | None, count: int = 20, samples: int = 32, **more: Any) -> tuple[list[Any], int]:
        calls = tmp_path / "calls"
        calls.write_text("")
        arguments = {"batch_size": 4, "worker_config": ALONE, "task_encoder": Encoder(calls), **more}
        dataset = get_train_dataset(leaf_of(samples), **arguments)
        return batches_of(dataset, count, sample_store=store), len(calls.read_text().split())

    return batches


@pytest.fixture
def made(run: Callable[..., tuple[list[Any], int]]) -> Callable[..., int]:
    """``made(store, ...)``: how often the hook was called in a run whose batches are those without the store."""

    def calls(store: SampleStore, worker_config: WorkerConfig = ALONE, **arguments: Any) -> int:
        batches, count = run(store, worker_config=worker_config, **arguments)
        assert same(batches, run(None, **arguments)[0])
        return count

    return calls


def store_in(tmp_path: Path, **arguments: Any) -> SampleStore:
    return SampleStore(str(tmp_path / "store"), **{"max_bytes": LARGE, **arguments})
