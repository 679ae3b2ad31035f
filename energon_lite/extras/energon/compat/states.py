"""Energon's names for states and workers, which code imports mostly for annotations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, ClassVar

from energon_lite.extras.energon.wrappers.mapping import GcDataset
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.worker_config import WorkerConfig

__all__ = [
    "Bucket",
    "FlexState",
    "GcFreezeError",
    "Savable",
    "SavableDataLoaderState",
    "SimpleSavableDatasetWrapper",
    "WatchdogDataset",
    "gc_init_worker",
]


class FlexState(dict[str, Any]):
    """State in the form of a dict."""


#: Type of the result of ``save_state_rank``.
SavableDataLoaderState = dict


class Savable(ABC):
    """Interface of objects with a state."""

    @abstractmethod
    def save_state(self) -> Any:
        """Return the state."""

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """Restore a state."""


class WatchdogDataset(GcDataset):
    """Data set with the same items: the loader watches workers, by ``watchdog_timeout_seconds``."""

    def __init__(
        self,
        dataset: SavableDataset,
        worker_config: WorkerConfig,
        timeout_seconds: float | None = 60,
        initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
    ):
        super().__init__(dataset, worker_config=worker_config)

    @staticmethod
    def _watchdog_trigger() -> None:
        """Hook for user code to patch, called when a loader without workers has warned of a hang."""


class SimpleSavableDatasetWrapper(GcDataset):
    """Data set with the same items."""

    def __init__(self, dataset: SavableDataset, worker_config: WorkerConfig, cache_pool: Any = None):
        super().__init__(dataset, worker_config=worker_config)


class GcFreezeError(Exception):
    """Error that is never raised here."""


def gc_init_worker(worker_id: int) -> None:
    """Do nothing."""


@dataclass
class Bucket:
    """Collected samples of a group."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # allows parameters in annotations

    batch_size: int
    samples: list[Any]
