"""Actors of Ray as servers: whom they work for, and what is said of those that cannot be used."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite import SavableDataset, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import UsageError
from energon_lite.extras.remote_workers import RayWorkers, ray_workers, tcp_workers
from energon_lite.extras.remote_workers.handshake import RefusedError, join
from energon_lite.extras.remote_workers.run_card import run_card
from tests.testing import ALONE, take

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def _dataset(leaf: Path, config: WorkerConfig) -> SavableDataset:
    return get_train_dataset(leaf, worker_config=config, batch_size=2)


def test_an_actor_works_for_its_trainer_only(leaf_of: Any) -> None:
    runs = _dataset(leaf_of(50), ALONE).resolved
    card = run_card(runs.identity.to_plain(), runs.runner()) | {"max_bytes": 1 << 20, "trace": False}
    actor = ray.remote(ray_workers.Worker).remote(runs.runner(), 7, b"s" * 32, card)
    host, _, port = ray.get(actor.ready.remote(), timeout=60).rpartition(":")

    def told(secret: bytes, **change: Any) -> Any:
        with socket.create_connection((host, int(port))) as connection:
            return join(connection, secret, card | change, 60.0)

    with pytest.raises(RefusedError, match="does not know the secret"):
        told(b"t" * 32)
    with pytest.raises(RefusedError, match="the seed is 7 at the trainer"):
        told(b"s" * 32, seed="7")
    assert told(b"s" * 32) == {"workers": 1}
    ray.kill(actor)


def test_actors_with_other_packages_are_refused_by_name(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> dict[str, Any]:
        card = run_card(*arguments)
        return card | {"environment": card["environment"] | {"torch": "0.1"}}

    monkeypatch.setattr(tcp_workers, "run_card", other)
    config = WorkerConfig(0, 1, workers=RayWorkers(1, 1))
    with get_savable_loader(_dataset(leaf_of(50), config)) as loader:
        with pytest.raises(UsageError, match=r"torch is 0\.1 at the trainer and \d"):
            take(loader, 1)


def test_actors_that_cannot_be_reached_are_told(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "_CALM", 0.1)
    monkeypatch.setattr(ray_workers, "_CONNECTED", 0.5)
    monkeypatch.setattr(ray_workers.RaySource, "connect_to", lambda *_: None)
    config = WorkerConfig(0, 1, workers=RayWorkers(1, 1))
    with get_savable_loader(_dataset(leaf_of(50), config)) as loader:
        with pytest.raises(UsageError, match=r"no connection to [\d.:]+ was made in 0\.5 s(.|\n)*`ray status`"):
            take(loader, 1)
