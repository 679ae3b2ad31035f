"""Torch's information about a worker, in hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SavableDataLoader, TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.extras.energon.compat.install import tell_torch
from energon_lite.loading.executors import worker_process
from tests.testing import ALONE, alone


class Teller(TaskEncoder):
    """Batches say which worker made them, as torch tells it."""

    def batch(self, samples: list[Any]) -> Any:
        info = torch.utils.data.get_worker_info()
        config = ALONE
        return "none" if info is None else f"{info.id - config.rank_worker_id()} of {info.num_workers}"


def _loader(path: Path, workers: int, **options: Any) -> SavableDataLoader:
    dataset = get_train_dataset(path, batch_size=2, task_encoder=Teller(), worker_config=alone(workers))
    return get_savable_loader(dataset, **options)


@pytest.mark.parametrize(("method", "told"), [("fork", True), ("fork", False), ("thread", True), ("thread", False)])
def test_torch_tells_hooks_of_their_worker(
    leaf_of: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, method: str, told: bool
) -> None:
    monkeypatch.setattr(worker_process, "on_begin", tell_torch if told else None)
    with _loader(leaf_of(50), 2, start_method=method) as loader:
        found = {batch for _, batch in zip(range(8), loader, strict=False)}
    assert found == {"0 of 2" if told else "none"}
    assert torch.utils.data.get_worker_info() is None  # in the trainer, which shares its process with threads
    with _loader(leaf_of(50), 0) as loader:
        assert next(iter(loader)) == "none"
