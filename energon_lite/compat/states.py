"""Names around states and workers that other people's code imports, mostly for annotations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.wrappers.mapping import GcDataset
from energon_lite.worker_config import WorkerConfig

__all__ = ["FlexState", "Savable", "SavableDataLoaderState", "WatchdogDataset"]


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
