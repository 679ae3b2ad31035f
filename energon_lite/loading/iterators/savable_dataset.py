"""What loaders take: each kind of data set there is."""

from __future__ import annotations

from typing import TypeAlias

from energon_lite.loading.iterators.chunked_dataset import ChunkedDataset
from energon_lite.loading.iterators.dataset import PlannedDataset
from energon_lite.loading.iterators.token_dataset import TokenDataset

__all__ = ["SavableDataset"]

#: Batches that are planned by a number of samples, that content decides, or that are planned by tokens.
SavableDataset: TypeAlias = PlannedDataset | ChunkedDataset | TokenDataset
