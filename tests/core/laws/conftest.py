"""A cluster in one process: one loader a rank, stepped together. Worker processes, where asked for, are real."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import SavableDataLoader, TaskEncoder, WorkerConfig, get_savable_loader, stateless
from energon_lite.loading.iterators import lane_iterator
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.oracle import Rendezvous
from tests.core.laws.token_data import length_of


class Cluster:
    """All ranks of a run.

    Args:
        build: ``(worker_config) -> data set``.
        world: number of data-parallel ranks.
        workers: worker processes of each rank.
        state: to be restored on every rank.
    """

    def __init__(self, build: Callable[[WorkerConfig], Any], world: int, workers: int, state: Any = None):
        self.loaders: list[SavableDataLoader] = [
            get_savable_loader(build(WorkerConfig(rank=rank, world_size=world, num_workers=workers)))
            for rank in range(world)
        ]
        for loader in self.loaders:
            loader.restore_state_rank(state)
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> list[Any]:
        """The micro-batches of one step, in the order of the ranks."""
        return [next(iterator) for iterator in self.iterators]

    def steps(self, count: int) -> list[Any]:
        """The micro-batches of so many steps, one after the other."""
        return [batch for _ in range(count) for batch in self.step()]

    def state(self) -> Any:
        """The state, which must be the same on all ranks."""
        states = [loader.save_state_rank() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]

    @classmethod
    def straight(cls, build: Callable[[WorkerConfig], Any], segments: Sequence[tuple[int, int, int]]) -> list[Any]:
        """The batches of one rank without workers, as many as :meth:`chained` gives."""
        with cls(build, 1, 0) as alone:
            return alone.steps(sum(world * steps for world, _, steps in segments))

    @classmethod
    def chained(cls, build: Callable[[WorkerConfig], Any], segments: Sequence[tuple[int, int, int]]) -> list[Any]:
        """The batches of a run that goes on in other topologies, each a (world, workers, steps)."""
        found, state = [], None
        for world, workers, steps in segments:
            with cls(build, world, workers, state) as ranks:
                found += ranks.steps(steps)
                state = json.loads(json.dumps(ranks.state()))
        return found

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


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``on_ranks(world, work)``: the results of ``work(rank)`` on ranks that run at the same time."""

    def run(world: int, work: Callable[[int], Any]) -> list[Any]:
        meeting = Rendezvous(world)
        monkeypatch.setattr(lane_iterator, "agree_on_step", meeting.agree)
        monkeypatch.setattr(lane_iterator, "check_group", lambda **_: None)
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(work, range(world)))

    return run


class Augment(TaskEncoder):
    """Draws from every source of randomness that a hook may use."""

    padding = 0

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        noise = [self.rng.random(), random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "noise": torch.tensor(noise, dtype=torch.float64),
            "length": torch.zeros(len(sample.text)),
        }

    @stateless(restore_seeds=True)
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        batch = super().batch(samples)
        batch["drawn"] = torch.rand(2) + self.rng.random()
        return batch


@pytest.fixture
def augment() -> type[Augment]:
    return Augment


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
def write_blend(
    leaf_of: Callable[[int, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Leaves], Any]:
    """A blend of text leaves as a metadataset dict."""

    def write(leaves: Leaves) -> dict[str, Any]:
        blend = [
            {"path": str(leaf_of(count, "abcdef"[number])), "weight": weight}
            for number, (count, weight) in enumerate(leaves)
        ]
        return {
            "__module__": "megatron.energon",
            "__class__": "MetadatasetV2",
            "splits": {"train": {"blend": blend}, "val": {"blend": blend}},
        }

    return write
