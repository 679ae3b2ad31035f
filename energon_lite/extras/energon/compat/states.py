"""Names around states and workers that other people's code imports, mostly for annotations."""

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
    """A state as a dict."""


#: What ``save_state_rank`` returns.
SavableDataLoaderState = dict


class Savable(ABC):
    """Something with a state."""

    @abstractmethod
    def save_state(self) -> Any:
        """The state."""

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """Go back to a state."""


class WatchdogDataset(GcDataset):
    """The same items: the loader is watched, by ``watchdog_timeout_seconds``."""

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
        """Called when a loader without workers has warned of a hang; for those who patch it."""


class SimpleSavableDatasetWrapper(GcDataset):
    """The same items."""

    def __init__(self, dataset: SavableDataset, worker_config: WorkerConfig, cache_pool: Any = None):
        super().__init__(dataset, worker_config=worker_config)


class GcFreezeError(Exception):
    """Nothing raises it."""


def gc_init_worker(worker_id: int) -> None:
    """Nothing has to be done."""


@dataclass
class Bucket:
    """Samples of a group."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations may say what is in it

    batch_size: int
    samples: list[Any]
