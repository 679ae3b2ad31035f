"""Factory of joined data sets, which raises an error: joins are written in metadatasets."""

from __future__ import annotations

from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.energon.factories.base import BaseCoreDatasetFactory, SampleT
from energon_lite.loading.iterators.dataset import SavableDataset

__all__ = ["JoinedWebdatasetFactory"]


class JoinedWebdatasetFactory(BaseCoreDatasetFactory[SampleT]):
    """Raises an error: it would need an index that Energon makes ahead. A ``join`` in a metadataset needs none."""

    def __init__(self, inner_datasets: Any, *, joiner: Any, join_index: Any = None, **kwargs: Any):
        raise UsageError(
            "JoinedWebdatasetFactory takes an index of Energon's",
            fix="write the join in a metadataset (`join:` with `joiner:`), as a file or as a dict, and give that to "
            "get_train_dataset",
        )

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError
