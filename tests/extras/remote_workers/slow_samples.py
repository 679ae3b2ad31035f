"""Samples that take a time, in batches that are larger than a packet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from energon_lite import SavableDataset, TaskEncoder, WorkerConfig, get_train_dataset
from tests.testing import ALONE, batches_of


class Slow(TaskEncoder):
    """Takes its time, and makes batches that are larger than a packet."""

    def __init__(self, seconds: float = 0.002):
        self.seconds = seconds

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        time.sleep(self.seconds)
        numbers = torch.full((20_000,), float(self.rng.random()))
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "x": numbers}


def dataset_of(leaf: Path, config: WorkerConfig, seconds: float = 0.002, **options: Any) -> SavableDataset:
    arguments = {"batch_size": 2, "repeat": False, "task_encoder": Slow(seconds)} | options
    return get_train_dataset(leaf, worker_config=config, **arguments)


def digest(batch: Any) -> tuple[Any, ...]:
    return (*batch["__key__"], float(batch["x"].double().sum()))


def expected_of(leaf: Path, count: int | None = None, **options: Any) -> list[Any]:
    return [digest(batch) for batch in batches_of(dataset_of(leaf, ALONE, 0.0, **options), count)]
