"""The tiny model that the examples of this folder train."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from energon_lite import (
    SavableDataLoader,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)


class ByteCounts(TaskEncoder):
    """A text becomes the number of times that each byte occurs in it."""

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, object]:
        data = torch.tensor(list(sample.text.encode()), dtype=torch.int64)
        return {"key": sample.__key__, "counts": torch.bincount(data, minlength=256).float()}


def make_loader(path: str | Path, *, rank: int = 0, world_size: int = 1, workers: int = 0) -> SavableDataLoader:
    """An endless stream of batches ``{"key": [...], "counts": float32 [batch, 256]}`` of a data set of texts."""
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=rank, world_size=world_size, num_workers=workers),
        batch_size=2,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=ByteCounts(),
    )
    return get_savable_loader(dataset)


def make_model() -> nn.Module:
    """Counts in, counts out, through four numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 4), nn.Linear(4, 256))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    return torch.nn.functional.mse_loss(model(batch["counts"]), batch["counts"])
