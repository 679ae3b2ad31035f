"""A cluster in one process: one loader a rank, stepped together. Worker processes, where asked for, are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import SavableDataLoader, WorkerConfig, get_savable_loader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.token_data import length_of
from tests.testing import CRUDE_YAML, blend_of, write_dataset


class Cluster:
    """All ranks of a run.

    Args:
        build: ``(worker_config) -> data set``.
        world: number of data-parallel ranks.
        workers: worker processes of each rank.
        state: to be restored on every rank: of one of them, or a list of all.
    """

    def __init__(self, build: Callable[[WorkerConfig], Any], world: int, workers: int, state: Any = None):
        self.loaders: list[SavableDataLoader] = [
            get_savable_loader(build(WorkerConfig(rank=rank, world_size=world, num_workers=workers)))
            for rank in range(world)
        ]
        for loader in self.loaders:
            restore = loader.restore_state_global if isinstance(state, list) else loader.restore_state_rank
            restore(state)
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> list[Any]:
        """The micro-batches of one step, in the order of the ranks."""
        return [next(iterator) for iterator in self.iterators]

    def steps(self, count: int) -> list[Any]:
        """The micro-batches of so many steps, one after the other."""
        return [batch for _ in range(count) for batch in self.step()]

    def states(self) -> list[Any]:
        """The state of each rank."""
        return [loader.save_state_rank() for loader in self.loaders]

    def state(self) -> Any:
        """The state, which must be the same on all ranks."""
        states = self.states()
        assert all(state == states[0] for state in states)
        return states[0]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def cluster() -> type[Cluster]:
    return Cluster


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("ERROR", logger="energon_lite")
    yield


@pytest.fixture
def known_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any column of any data set has the lengths of ``token_data``."""

    def column(self: WebdatasetSource, name: str) -> np.ndarray:
        return np.array([length_of(index) for index in range(len(self))], dtype=np.int64)

    monkeypatch.setattr(WebdatasetSource, "column", column)


Leaves = Sequence[tuple[int, float]]


@pytest.fixture(scope="session")
def write_blend(leaf_of: Callable[[int, str], Path]) -> Callable[[Leaves], Any]:
    """A blend of text leaves as a metadataset dict."""
    return lambda leaves: blend_of((leaf_of(count, "abcdef"[n]), weight) for n, (count, weight) in enumerate(leaves))


@pytest.fixture(scope="session")
def crude(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 crude samples, whose texts are their keys."""
    samples = [(str(number), {"txt": str(number).encode()}) for number in range(100)]
    return write_dataset(tmp_path_factory.mktemp("crude") / "data", {"a.tar": samples}, dataset_yaml=CRUDE_YAML)
