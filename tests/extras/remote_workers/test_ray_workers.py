"""Actors of Ray as workers, in a cluster of several raylets on this machine."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from energon_lite import SavableDataset, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.extras.remote_workers import RayWorkers, ray_workers, tcp_workers
from energon_lite.extras.remote_workers.protocol import RefusedError, join
from energon_lite.extras.remote_workers.run_card import run_card
from energon_lite.extras.remote_workers.tcp_workers import TcpHandle
from energon_lite.loading.executors.worker_handle import LocalHandle
from tests.core.laws.kinds import KINDS
from tests.extras.remote_workers.served import pool_with, serving
from tests.servers import ray_cluster
from tests.testing import ALONE, batches_of, examples, same, take, until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ONE_ACTOR = WorkerConfig(0, 1, workers=RayWorkers(1, 1))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two processors."""
    with ray_cluster(2, num_cpus=2, resources={"cpu_node": 2}) as made:
        yield made


class Drawn(TaskEncoder):
    """Tensors, arrays and texts with randomness, and an object that only pickle takes."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        numbers = self.rng.random(5000)
        return {"__key__": sample.__key__, "__restore_key__": (), "x": torch.tensor(numbers), "text": sample.text}

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        x = torch.stack([sample["x"] for sample in samples])
        return {
            "__key__": [sample["__key__"] for sample in samples],
            "x": x,
            "y": x.numpy().astype(np.float32),
            "z": Fraction(1, 3),
        }


class Patient(Drawn):
    """Takes its time."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        time.sleep(0.005)
        return super().encode_sample(sample)


def _dataset(leaf: Path, encoder: TaskEncoder, config: WorkerConfig) -> SavableDataset:
    return get_train_dataset(leaf, worker_config=config, task_encoder=encoder, batch_size=2)


def _plain(leaf: Path, count: int) -> list[Any]:
    """Batches of a run without actors."""
    return batches_of(_dataset(leaf, Drawn(), ALONE), count)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(3), phases=[Phase.generate])
@given(data=st.data())
@pytest.mark.usefixtures("cluster", "known_lengths")
def test_a_run_goes_on_with_workers_of_any_kind(leaf_of: Any, kind: str, data: st.DataObject) -> None:
    """Actors, servers, threads, processes and the trainer alone, one after the other, and some beside each other."""
    build = data.draw(KINDS[kind]).builder(leaf_of)

    def go_on(count: int, config: WorkerConfig, state: Any, **options: Any) -> tuple[list[Any], Any]:
        with get_savable_loader(build(config), **options) as loader:
            loader.restore_state_rank(state)
            return take(loader, count), loader.save_state_rank()

    try:
        expected, after = go_on(20, ALONE, None)
    except EnergonLiteError:  # hooks that give no batch
        return
    with serving(build(ALONE)) as served:
        actors, servers = RayWorkers(2, 2, resources={"CPU": 1, "cpu_node": 1}), served.tcp()
        ways = [(WorkerConfig(0, 1, workers=actors), "fork"), (WorkerConfig(0, 1, 1, workers=actors), "thread")]
        ways += [(WorkerConfig(0, 1, workers=servers), "fork"), (WorkerConfig(0, 1, 1), "fork")]
        state, batches = None, list[Any]()
        for config, method in data.draw(st.permutations(ways)):
            found, state = go_on(5, config, state, start_method=method)
            batches += found
    assert same(batches, expected) and state == after


@pytest.mark.parametrize("method", ["fork", "thread"])
def test_actors_beside_local_workers(cluster: Any, leaf_of: Any, method: str) -> None:
    """Both make batches of the same run, as soon as local ones cannot keep up."""
    config = WorkerConfig(0, 1, 1, workers="ray")
    with get_savable_loader(_dataset(leaf_of(50), Patient(), config), start_method=method) as loader:
        pool: Any = loader._workers.executor()
        makers, send = Counter[type](), pool._send

        def noting(worker: Any, tickets: Any) -> None:
            makers[TcpHandle if isinstance(worker, TcpHandle) else LocalHandle] += len(tickets)
            send(worker, tickets)

        pool._send = noting
        iterator, batches = iter(loader), list[Any]()
        assert until(lambda: (batches.append(next(iterator)), min(makers[TcpHandle], makers[LocalHandle]) > 20)[1])
    assert same(batches, _plain(leaf_of(50), len(batches)))


def test_a_killed_actor_a_killed_node_and_a_killed_receiver_cost_nothing(cluster: Any, leaf_of: Any) -> None:
    workers = RayWorkers(2, 2, resources={"CPU": 2, "cpu_node": 1})  # one on each node
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), WorkerConfig(0, 1, workers=workers))) as loader:
        batches = take(loader, 20)
        pool: Any = loader._workers.executor()
        os.kill(_place_of(pool, pool._workers[0])[0], signal.SIGKILL)
        batches += take(loader, 20)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        cluster.add_node(num_cpus=2, resources={"cpu_node": 2})
        batches += take(loader, 20)
        assert loader.stats()["worker_deaths"] >= 1
        pool._source._process.kill()  # the receiver
        batches += take(loader, 20)
    assert same(batches, _plain(leaf_of(50), 80))
    batches[0]["x"].zero_()


def _actor_of(pool: Any, worker: Any) -> Any:
    """The actor that a worker is; None: it has ended."""
    return next((one.actor for one in pool._source._live if one.worker is worker), None)


def _place_of(pool: Any, worker: Any) -> tuple[int, str]:
    """Process of an actor, and its node."""
    look = _actor_of(pool, worker).__ray_call__
    return ray.get(look.remote(lambda _: (os.getpid(), ray.get_runtime_context().get_node_id())), timeout=60)


def test_actors_come_while_they_are_needed(cluster: Any, leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "_CALM", 0.2)
    monkeypatch.setattr(ray_workers, "_IDLE", 1.0)
    config = WorkerConfig(0, 1, 1, workers=RayWorkers(3, 1, resources={"CPU": 1, "cpu_node": 1}))
    with get_savable_loader(_dataset(leaf_of(50), Patient(), config)) as loader:
        iterator, counts = iter(loader), set[int]()
        pool: Any = loader._workers.executor()

        def actors_after(pause: float) -> int:
            time.sleep(pause)
            next(iterator)
            counts.add(len(pool._workers) - 1)
            return len(pool._workers) - 1

        assert until(lambda: actors_after(0.0) == 3)
        assert until(lambda: actors_after(0.1) == 1)  # the local worker keeps up
        counts.clear()
        for _ in range(30):
            actors_after(0.1)
        assert counts == {1}


class Fire:
    """Kills or stops a worker every half a second, actors and local ones in turn; those that were stopped go on.

    Args:
        pool: their pool.
        spared: the actor that is not hit.
        seed: of the choices.
        delivered: the batches until now.
    """

    def __init__(self, pool: Any, spared: Any, seed: int, delivered: list[Any]):
        self.pool, self.spared, self.draw, self.delivered = pool, spared, random.Random(seed), delivered
        self.hits = 0
        self.pids = dict[Any, int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._shoot)
        self._thread.start()

    def _shoot(self) -> None:
        stopped = killed = 0
        while not self._over.wait(0.5):
            others = [worker for worker in self.pool._workers if worker is not self.spared]
            local = [worker for worker in others if isinstance(worker, LocalHandle) and worker.process.pid]
            actors = [worker for worker in others if isinstance(worker, TcpHandle)]
            for worker in [worker for worker in actors if worker not in self.pids]:
                with suppress(ray.exceptions.RayError, AttributeError):  # its node was killed
                    self.pids[worker] = _place_of(self.pool, worker)[0]
            actors = [worker for worker in actors if worker in self.pids]
            if stopped:
                self._signal(stopped, signal.SIGCONT)
            if not (victims := local if local and (self.hits % 2 or not actors) else actors):
                continue
            worker, hit = self.draw.choice(victims), self.draw.choice([signal.SIGKILL, signal.SIGSTOP])
            stopped = worker.process.pid if worker in local else self.pids[worker]
            if worker in local and len(self.delivered) < killed + 30:  # a job in which three workers die is given up
                hit = signal.SIGSTOP
            killed = len(self.delivered) if worker in local and hit == signal.SIGKILL else killed
            self._signal(stopped, hit)
            self.hits += 1

    def _signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for pid in self.pids.values():
            self._signal(pid, signal.SIGCONT)


@pytest.mark.parametrize("local", [0, 1])
def test_an_epoch_under_fire(cluster: Any, leaf_of: Any, local: int, caplog: pytest.LogCaptureFixture) -> None:
    """Workers are killed or stopped every half a second, and a raylet is killed; one actor lives: batches come."""
    caplog.set_level("ERROR", logger="energon_lite")

    def dataset(config: WorkerConfig, encoder: TaskEncoder) -> SavableDataset:
        arguments: dict[str, Any] = {"worker_config": config, "task_encoder": encoder}
        return get_train_dataset(leaf_of(400), batch_size=2, repeat=False, **arguments)

    workers = RayWorkers(3, 3, resources={"CPU": 1, "cpu_node": 1})
    batches, waits, fire = list[Any](), list[float](), None
    try:
        with get_savable_loader(dataset(WorkerConfig(0, 1, local, workers=workers), Patient())) as loader:
            iterator = iter(loader)
            batches.append(next(iterator))
            pool = pool_with(loader, 3 + local)
            spared = pool._workers[local]
            home, began = _place_of(pool, spared)[1], time.monotonic()
            for batch in iterator:
                waits.append(time.monotonic() - began)
                batches.append(batch)
                if len(batches) == 40:
                    fire = Fire(pool, spared, local, batches)
                if len(batches) == 80:
                    node = next(node for node in cluster.worker_nodes if node.node_id != home)
                    cluster.remove_node(node, allow_graceful=False)
                    cluster.add_node(num_cpus=2, resources={"cpu_node": 2})
                time.sleep(0.05)  # a step of training
                began = time.monotonic()
    finally:
        if fire is not None:
            fire.end()
    assert same(batches, batches_of(dataset(ALONE, Drawn())))
    assert fire is not None and fire.hits > 5
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in fire.pids.values()))
    assert max(waits) < 1.0 + 10 * max(waits[20:39])  # a second, and what this machine needs without the fire


def test_the_example(cluster: Any, leaf_of: Any) -> None:
    script = Path(__file__).parents[3] / "examples" / "machines" / "ray_actors.py"
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    command = [sys.executable, str(script), str(leaf_of(7))]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    assert f"{[f'a-{n}' for n in range(7)]}" in said.splitlines()  # Ray may print that an earlier node has died


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


def test_actors_get_jobs_when_they_have_started(cluster: Any, leaf_of: Any, tmp_path: Path) -> None:
    config = WorkerConfig(0, 1, workers=RayWorkers(2, 2))
    with get_savable_loader(_dataset(leaf_of(50), Gated(tmp_path), config)) as loader:
        batches = take(loader, 20)
        pool: Any = loader._workers.executor()
        assert len(pool._workers) == 1 and loader.stats()["worker_deaths"] == 0
        (tmp_path / "gate").touch()
        batches += take(loader, 20)
    assert same(batches, _plain(leaf_of(50), 40))


def test_actors_that_end_at_their_start_are_told(
    cluster: Any, leaf_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"3 in a row ended at their start(.|\n)*ray logs"):
        batches_of(_dataset(leaf_of(50), Gated(tmp_path, ends=True), ONE_ACTOR), 1)
    assert caplog.text.count("in a row ended at their start") == 1


def test_local_workers_go_on_without_actors(cluster: Any, leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Ray refuses these actors before it starts a process, so that their ends take no time."""
    config = WorkerConfig(0, 1, 1, workers=RayWorkers(1, 1, resources={"cpu_node": -1}))
    with get_savable_loader(_dataset(leaf_of(50), Drawn(), config)) as loader:
        batches = take(loader, 10)
        pool: Any = loader._workers.executor()
        assert until(lambda: pool._source._failed > 3, 300)  # tries go on, less often
        assert same(batches + take(loader, 10), _plain(leaf_of(50), 20))
    assert caplog.text.count("3 actors of Ray in a row ended at their start") == 1


# -- actors as servers -------------------------------------------------------------------------------------------------


def test_an_actor_works_for_its_trainer_only(cluster: Any, leaf_of: Any) -> None:
    runs = _dataset(leaf_of(50), TaskEncoder(), ALONE).resolved
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


def test_actors_with_other_packages_are_refused_by_name(
    cluster: Any, leaf_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*arguments: Any) -> dict[str, Any]:
        card = run_card(*arguments)
        return card | {"environment": card["environment"] | {"torch": "0.1"}}

    monkeypatch.setattr(tcp_workers, "run_card", other)
    with pytest.raises(UsageError, match=r"torch is 0\.1 at the trainer and \d"):
        batches_of(_dataset(leaf_of(50), TaskEncoder(), ONE_ACTOR), 1)


def test_actors_that_cannot_be_reached_are_told(cluster: Any, leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "_CALM", 0.1)
    monkeypatch.setattr(ray_workers, "_CONNECTED", 0.5)
    monkeypatch.setattr(ray_workers.RaySource, "connect_to", lambda *_: None)
    with pytest.raises(UsageError, match=r"no connection to [\d.:]+ was made in 0\.5 s(.|\n)*`ray status`"):
        batches_of(_dataset(leaf_of(50), TaskEncoder(), ONE_ACTOR), 1)
