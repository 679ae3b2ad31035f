"""Actors of Ray as workers, in a cluster of several raylets on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import SavableDataset, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import UsageError
from energon_lite.extras.remote_workers import RayWorkers
from tests.servers import ray_cluster
from tests.testing import ALONE, take, until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two processors."""
    with ray_cluster(2, num_cpus=2, resources={"decoder": 2}) as made:
        yield made


class Drawn(TaskEncoder):
    """Tensors, arrays and texts with randomness."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        numbers = self.rng.random(5000)
        return {"__key__": sample.__key__, "__restore_key__": (), "x": torch.tensor(numbers), "text": sample.text}

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        x = torch.stack([sample["x"] for sample in samples])
        return {"__key__": [sample["__key__"] for sample in samples], "x": x, "y": x.numpy().astype(np.float32)}


class Packs(Drawn):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"__key__": "+".join(s["__key__"] for s in samples), "x": torch.stack([s["x"] for s in samples]).sum(0)}


def _dataset(leaf: Path, encoder: TaskEncoder, config: WorkerConfig) -> SavableDataset:
    packing = {"packing_buffer_size": 12} if isinstance(encoder, Packs) else {}
    return get_train_dataset(leaf, worker_config=config, task_encoder=encoder, batch_size=2, **packing)


@pytest.mark.parametrize("encoder", [Drawn(), Packs()])
@pytest.mark.parametrize("local", [1, 0])
def test_actors_make_the_same_batches(
    cluster: Any, leaf_of: Any, same: Callable[[Any, Any], bool], encoder: TaskEncoder, local: int
) -> None:
    with get_savable_loader(_dataset(leaf_of(50), encoder, ALONE)) as loader:
        expected = take(loader, 30)
        after = loader.save_state_rank()
    workers = RayWorkers(2, 2, resources={"CPU": 1, "decoder": 1})
    with get_savable_loader(_dataset(leaf_of(50), encoder, WorkerConfig(0, 1, local, workers=workers))) as loader:
        batches = take(loader, 30)
        assert same(batches, expected) and loader.save_state_rank() == after
        batches[0]["x"].zero_()


def test_a_killed_actor_and_a_killed_node_cost_nothing(
    cluster: Any, leaf_of: Any, same: Callable[[Any, Any], bool]
) -> None:
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), ALONE)) as loader:
        expected = take(loader, 60)
    workers = RayWorkers(2, 2, resources={"CPU": 2, "decoder": 1})  # one on each node
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), WorkerConfig(0, 1, workers=workers))) as loader:
        batches = take(loader, 20)
        pool: Any = loader._workers.executor()
        victim = ray.get(pool._workers[0].channel.actor.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(victim, signal.SIGKILL)
        batches += take(loader, 20)
        cluster.remove_node(next(iter(cluster.worker_nodes)))
        batches += take(loader, 20)
        assert loader.stats()["worker_deaths"] >= 1
    assert same(batches, expected)


class Gated(Drawn):
    """One process can load it; others wait for a file, or end."""

    def __init__(self, folder: Path, ends: bool = False):
        self.trainer, self.folder, self.ends = os.getpid(), str(folder), ends

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() == self.trainer:
            return
        if self.ends:
            os._exit(1)
        try:
            Path(self.folder, "first").touch(exist_ok=False)
        except FileExistsError:
            while not Path(self.folder, "gate").exists():
                time.sleep(0.05)


def test_actors_get_jobs_when_they_have_started(
    cluster: Any, leaf_of: Any, tmp_path: Path, same: Callable[[Any, Any], bool]
) -> None:
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), ALONE)) as loader:
        expected = take(loader, 40)
    config = WorkerConfig(0, 1, workers=RayWorkers(2, 2))
    with get_savable_loader(_dataset(leaf_of(50), Gated(tmp_path), config)) as loader:
        batches = take(loader, 20)
        pool: Any = loader._workers.executor()
        assert len(pool._workers) == 1 and loader.stats()["worker_deaths"] == 0
        (tmp_path / "gate").touch()
        batches += take(loader, 20)
    assert same(batches, expected)


def test_actors_that_end_at_their_start_are_told(
    cluster: Any, leaf_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = WorkerConfig(0, 1, workers=RayWorkers(1, 1))
    with get_savable_loader(_dataset(leaf_of(50), Gated(tmp_path, ends=True), config)) as loader:
        with pytest.raises(UsageError, match=r"3 in a row ended at their start(.|\n)*ray logs"):
            take(loader, 1)
    assert caplog.text.count("in a row ended at their start") == 1


def test_local_workers_go_on_without_actors(
    cluster: Any, leaf_of: Any, caplog: pytest.LogCaptureFixture, same: Callable[[Any, Any], bool]
) -> None:
    """Ray refuses these actors before it starts a process, so that their ends take no time."""
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), ALONE)) as loader:
        expected = take(loader, 20)
    config = WorkerConfig(0, 1, 1, workers=RayWorkers(1, 1, resources={"decoder": -1}))
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), config)) as loader:
        batches = take(loader, 10)
        pool: Any = loader._workers.executor()
        assert until(lambda: pool._source._failed > 3, 300)  # tries go on, less often
        assert same(batches + take(loader, 10), expected)
    assert caplog.text.count("3 actors of Ray in a row ended at their start") == 1
