"""Loaders that are what Energon's are: a ``torch.utils.data.DataLoader``, for code that asks."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from energon_lite.loading import loader, savable_loader
from energon_lite.loading.energon_compat import loader_arguments
from energon_lite.loading.iterators.dataset import SavableDataset

__all__ = ["BasicDataLoader", "SavableDataLoader", "get_loader", "get_savable_loader"]


class _TorchLoader(torch.utils.data.DataLoader[Any]):
    """What torch's loader shows; nothing of it does anything here."""

    batch_size = None
    sampler: Any = None
    batch_sampler = None
    collate_fn: Any = None
    drop_last = False
    pin_memory = False
    persistent_workers = True
    timeout = 0.0
    worker_init_fn = None
    generator = None

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        """Worker processes of this rank."""
        found: int = self.worker_config.num_workers  # type: ignore[attr-defined]
        return found


class BasicDataLoader(loader.DataLoader, _TorchLoader):  # type: ignore[misc]
    """:class:`energon_lite.DataLoader`, as a loader of torch's, with Energon's keywords."""

    def __init__(self, dataset: SavableDataset, **kwargs: Any):
        super().__init__(dataset, **loader_arguments(dataset, kwargs, BasicDataLoader))


class SavableDataLoader(savable_loader.SavableDataLoader, _TorchLoader):  # type: ignore[misc]
    """:class:`energon_lite.SavableDataLoader`, as a loader of torch's, with Energon's keywords."""

    def __init__(self, dataset: SavableDataset, **kwargs: Any):
        super().__init__(dataset, **loader_arguments(dataset, kwargs, SavableDataLoader))


def get_loader(dataset: SavableDataset, **kwargs: Any) -> BasicDataLoader:
    """:func:`energon_lite.get_loader`."""
    return BasicDataLoader(dataset, **kwargs)


def get_savable_loader(dataset: SavableDataset, **kwargs: Any) -> SavableDataLoader:
    """:func:`energon_lite.get_savable_loader`."""
    return SavableDataLoader(dataset, **kwargs)
