"""Hooks find the config of the loader that they run for, in whichever worker, and whoever else is at work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader
from energon_lite.extras.energon import MapDataset
from energon_lite.hooks import HookContext, hook_context
from energon_lite.storage.stores import NoCachePool
from energon_lite.topology import Replica
from tests.testing import Listed, train_loader


def seen() -> tuple[int, int, int]:
    config = WorkerConfig.active_worker_config
    assert isinstance(config, WorkerConfig) and config.active_worker_config is config
    return config.rank, config.num_workers, config.rank_worker_id()


class Seer(TaskEncoder):
    """Batches of what hooks see."""

    def encode_sample(self, sample: Any) -> Any:
        return seen()

    def batch(self, samples: list[Any]) -> Any:
        return [*samples, seen()]


class Packer(Seer):
    """The same, in chunks."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[:2], samples[2:]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return [*samples, seen()]

    def batch(self, samples: list[Any]) -> Any:
        return [one for pack in samples for one in pack] + [seen()]


@pytest.fixture(autouse=True)
def nobody_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerConfig, "_asked", None)


@pytest.mark.parametrize(
    ("method", "encoder"),
    [
        *(("main", Seer()), ("fork", Seer()), ("thread", Seer()), ("spawn", Seer())),
        *(("main", Packer()), ("fork", Packer()), ("thread", Packer())),
    ],
)
def test_two_loaders_take_turns(leaf_of: Callable[..., Path], method: str, encoder: TaskEncoder) -> None:
    assert WorkerConfig.active_worker_config is None
    # Ranks that are not this process's, with what cannot be sent anywhere.
    groups = {"tp": threading.Lock()}
    configs = [
        WorkerConfig(
            rank=rank,
            world_size=3,
            num_workers=workers,
            restore_error_handler=lambda *_: None,
            replica=Replica(coordinates={"tp": 0}, groups=groups),  # type: ignore[arg-type]
        )
        for rank, workers in ((1, 1), (2, 2))
    ]
    arguments: Any = {"batch_size": 2, "task_encoder": encoder, "start_method": method}
    arguments |= {"packing_buffer_size": 4} if isinstance(encoder, Packer) else {}
    one, other = (train_loader(leaf_of(50), worker_config=config, **arguments) for config in configs)
    with one, other:
        for (first, second), _ in zip(zip(one, other, strict=False), range(4), strict=False):
            assert set(first) == {(1, 1, 0)}
            assert {(rank, workers) for rank, workers, _ in second} == {(2, 2)}
            assert {number for *_, number in second} <= ({0} if method == "main" else {0, 1})
            assert WorkerConfig.active_worker_config is configs[1]  # it was asked last
            assert one.restore_sample(("sample", 0, 3, 0, 0)) == (1, 1, 0)
            assert WorkerConfig.active_worker_config is configs[1]
    assert configs[0].replica is not None and configs[0].replica.groups is groups


def test_functions_of_wrappers(leaf_of: Callable[..., Path]) -> None:
    inner = train_loader(leaf_of(50), 1, batch_size=2, task_encoder=Seer()).dataset
    dataset = MapDataset(inner, lambda batch: [*batch, seen()], worker_config=inner.worker_config)
    with get_savable_loader(dataset) as loader:
        assert set(next(iter(loader))) == {(0, 1, 0)}


class Cached(Listed):
    """Batches of the caches that hooks find."""

    def encode_sample(self, sample: Any) -> Any:
        return self.cache


def test_the_cache_inside_of_wrappers(leaf_of: Callable[..., Path]) -> None:
    pool, inner = NoCachePool(), train_loader(leaf_of(50), batch_size=2, task_encoder=Cached()).dataset
    with get_savable_loader(MapDataset(inner, list), cache_pool=pool) as loader:
        assert all(found is pool for found in next(iter(loader)))


def test_each_worker_closes_its_cache(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    class Noted(NoCachePool):
        def close(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    with train_loader(leaf_of(50), 2, batch_size=2, cache_pool=Noted()) as loader:
        next(iter(loader))
    assert len({file.name for file in tmp_path.iterdir()} - {str(os.getpid())}) == 2


def test_hooks_that_are_called_in_tests() -> None:
    config = WorkerConfig(rank=0, world_size=1)
    with hook_context(HookContext(1, worker_config=config)):
        assert WorkerConfig.active_worker_config is config
        with hook_context(HookContext(2)):
            assert WorkerConfig.active_worker_config is config
    assert WorkerConfig.active_worker_config is None
