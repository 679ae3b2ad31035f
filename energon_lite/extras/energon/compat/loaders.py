"""Loaders that are instances of ``torch.utils.data.DataLoader``, as Energon's are."""

from __future__ import annotations

from types import GenericAlias
from typing import Any, ClassVar

import torch.utils.data

from energon_lite.errors import UnknownLengthError
from energon_lite.loading import loader, savable_loader
from energon_lite.loading.energon_compat import loader_arguments
from energon_lite.loading.iterators.dataset import SavableDataset

__all__ = ["BasicDataLoader", "SavableDataLoader", "get_loader", "get_savable_loader"]


class _LengthAsThere(loader.DataLoader):
    """Loader with Energon's length for content-decided batches: as if hooks kept all samples."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # allows parameters in annotations

    def __len__(self) -> int:
        try:
            return super().__len__()
        except UnknownLengthError:
            dataset = self.dataset.resolved
            rows = getattr(dataset.plan, "batch_size", None)
            if rows is None or self.dataset is not dataset:
                raise
            samples = sum(leaf.length for leaf in dataset.leaves)
            return -(-samples // (rows * dataset.worker_config.world_size))


class _TorchLoader(torch.utils.data.DataLoader[Any]):
    """Attributes of torch's loader, without effect."""

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
        """Number of worker processes of this rank."""
        number: int = self.worker_config.num_workers  # type: ignore[attr-defined]
        return number


class BasicDataLoader(_LengthAsThere, _TorchLoader):  # type: ignore[misc]
    """The loader :class:`energon_lite.DataLoader` as a torch loader, with Energon's keywords."""

    def __init__(self, dataset: SavableDataset, **kwargs: Any):
        super().__init__(dataset, **loader_arguments(dataset, kwargs, BasicDataLoader))


class SavableDataLoader(_LengthAsThere, savable_loader.SavableDataLoader, _TorchLoader):  # type: ignore[misc]
    """The loader :class:`energon_lite.SavableDataLoader` as a torch loader, with Energon's keywords."""

    def __init__(self, dataset: SavableDataset, **kwargs: Any):
        super().__init__(dataset, **loader_arguments(dataset, kwargs, SavableDataLoader))


def get_loader(dataset: SavableDataset, **kwargs: Any) -> BasicDataLoader:
    """Make a loader, as :func:`energon_lite.get_loader` does."""
    return BasicDataLoader(dataset, **kwargs)


def get_savable_loader(dataset: SavableDataset, **kwargs: Any) -> SavableDataLoader:
    """Make a savable loader, as :func:`energon_lite.get_savable_loader` does."""
    return SavableDataLoader(dataset, **kwargs)
