"""Factory of any leaf of a metadataset, including joined data sets and custom sources."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.extras.energon.factories.base import BaseCoreDatasetFactory, singles
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.identity import LeafIdentity
from energon_lite.loading.leaves import open_leaves
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.storage.files.epath import EPath
from energon_lite.trust import trusts
from energon_lite.worker_config import WorkerConfig

__all__ = ["LeafFactory"]


class LeafFactory(BaseCoreDatasetFactory):
    """Factory for a leaf of a metadataset.

    Args:
        spec: specification of the leaf, from the documents.
        training: True for an endless, shuffled data set; False for each sample once, in order.
        worker_config: configuration of this rank.
        shuffle_over_epochs: number of epochs to mix.
        trust_code: True if its documents may name code.
    """

    def __init__(
        self,
        spec: LeafSpec,
        *,
        training: bool,
        worker_config: WorkerConfig,
        shuffle_over_epochs: int | None = 1,
        trust_code: bool | None = None,
        **ignored: Any,
    ):
        self.spec = spec
        self.training = training
        self.worker_config = worker_config
        self.shuffle_over_epochs = shuffle_over_epochs
        self._trusts = trusts(trust_code)
        self.subflavors = dict(spec.subflavors)
        self.paths = [EPath(path) for path in getattr(spec, "folders", None) or [spec.path]]

    @cached_property
    def _opened(self) -> tuple[Leaf, LeafIdentity]:
        (leaf,), (identity,) = open_leaves([self.spec], TaskEncoder[Any, Any, Any, Any](), self._trusts)
        return leaf, identity

    def __len__(self) -> int:
        return len(self._opened[0].source)

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        """Build the data set; see :class:`~energon_lite.extras.energon.factories.base.BaseCoreDatasetFactory`."""
        epochs = self.shuffle_over_epochs
        return singles(*self._opened, self.worker_config, training=self.training, epochs=epochs)
