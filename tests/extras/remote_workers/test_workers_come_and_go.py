"""Servers that are killed, stopped, cut off and started during a run: nothing is lost, doubled or moved, or late."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.errors import FatalSampleError, WorkerError
from energon_lite.extras.remote_workers import JobServer, TcpWorkers
from energon_lite.loading.executors.segments import mapped_at
from tests.extras.remote_workers.served import Served, pool_with, served_loader, serving
from tests.extras.remote_workers.slow_samples import Slow, dataset_of, digest, expected_of
from tests.testing import ALONE, in_time, take, until


def loader_of(leaf: Path, workers: TcpWorkers, local: int = 0, seconds: float = 0.002, **options: Any) -> Any:
    return get_savable_loader(dataset_of(leaf, WorkerConfig(0, 1, local, workers=workers), seconds), **options)


@pytest.mark.parametrize("local", [0, 1])
def test_an_epoch_under_fire(leaf_of: Any, tmp_path: Path, local: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two of three servers, or the local worker, are hit every 0.2 s; one lives, so that batches come in a second."""
    caplog.set_level(logging.ERROR, logger="energon_lite")
    leaf, addresses = leaf_of(400), tmp_path / "servers"
    servers = [Served(dataset_of(leaf, ALONE), 1) for _ in range(3)]
    addresses.write_text("\n".join(served.address for served in servers))
    draw, over = random.Random(local), threading.Event()

    def fire(pool: Any) -> None:
        killed = 0
        while not over.wait(0.2):
            place, stops = draw.randrange(2 + local), draw.random() < 0.5
            if place == 2:
                pid = pool._workers[0].process.pid
                stops = stops or len(found) < killed + 30  # a job in which three workers die is given up
                killed = killed if stops else len(found)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
                continue
            served = servers[place]
            served.signal(signal.SIGCONT)
            if stops:
                served.signal(signal.SIGSTOP)
            else:
                served.kill()
                servers[place] = Served(dataset_of(leaf, ALONE), 1)
                addresses.write_text("\n".join(served.address for served in servers))

    found, waits, shooter = [], [], threading.Thread()
    try:
        with loader_of(leaf, TcpWorkers(file=addresses), local) as loader:
            iterator = iter(loader)
            found.append(digest(next(iterator)))
            began = time.monotonic()
            for batch in iterator:
                waits.append(time.monotonic() - began)
                if len(waits) == 40:
                    shooter = threading.Thread(target=fire, args=(loader._workers.executor(),))
                    shooter.start()
                found.append(digest(batch))
                time.sleep(0.005)
                began = time.monotonic()
    finally:
        over.set()
        if shooter.ident:
            shooter.join()
        for served in servers:
            served.signal(signal.SIGCONT)
            served.kill()
    assert found == expected_of(leaf)
    assert max(waits) < 1.0 + 10 * max(waits[20:40])  # a second, and what this machine needs without the fire


@pytest.mark.parametrize("room", [1 << 30, 1], ids=["room", "room for one job"])
def test_jobs_of_a_stopped_worker_run_elsewhere(leaf_of: Any, caplog: pytest.LogCaptureFixture, room: int) -> None:
    leaf = leaf_of(50)
    with serving(dataset_of(leaf, ALONE), 1) as one, serving(dataset_of(leaf, ALONE), 1) as other:
        with loader_of(leaf, TcpWorkers([one.address, other.address]), max_bytes_in_flight=room) as loader:
            iterator = iter(loader)
            found = [digest(batch) for batch in take(iterator, 6)]
            pool = pool_with(loader, 2)
            stopped = one if one.address in str(pool._workers[0]) else other  # the first to get a job
            stopped.signal(signal.SIGSTOP)
            found += [digest(batch) for batch in take(iterator, 6)]
            assert loader.stats()["worker_deaths"] == 0  # it is not yet dropped
            assert until(lambda: (pool.load(), "is silent" in caplog.text)[1], 60)
            stopped.signal(signal.SIGCONT)
            found += [digest(batch) for batch in iterator]
    assert sorted(found) == sorted(expected_of(leaf))


class Fails(Slow):
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if sample.__key__ == "a-7":
            raise FatalSampleError("seven")
        return super().encode_sample(sample)


class Dies(Slow):
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


@pytest.mark.parametrize(
    ("encoder", "error", "said"),
    [
        (Fails(), FatalSampleError, "seven"),
        (Dies(), WorkerError, "workers died while making the same micro-batch"),
    ],
)
def test_errors_of_hooks_and_jobs_in_which_workers_die_end_the_run(
    leaf_of: Any, encoder: Slow, error: type[Exception], said: str
) -> None:
    with served_loader(lambda config: dataset_of(leaf_of(50), config, task_encoder=encoder)) as loader:
        with pytest.raises(error, match=said):
            list(loader)


def test_a_name_in_a_file_is_looked_up_again(leaf_of: Any, tmp_path: Path) -> None:
    leaf, addresses = leaf_of(50), tmp_path / "servers"
    addresses.write_text("# none yet\n")
    with loader_of(leaf, TcpWorkers(file=addresses)) as loader, serving(dataset_of(leaf, ALONE)) as served:
        threading.Timer(0.3, addresses.write_text, [f"localhost:{served.port}  # here\n"]).start()
        assert [digest(batch) for batch in loader] == expected_of(leaf)


#: What each Python process of a test runs at its start: the name ``decoders`` has the addresses in a file.
NAMES = """
import socket
real = socket.getaddrinfo
def getaddrinfo(host, *rest, **options):
    hosts = open({path!r}).read().split() if host == "decoders" else [host]
    return [found for one in hosts for found in real(one, *rest, **options)]
socket.getaddrinfo = getaddrinfo
"""


def test_a_name_whose_addresses_change_in_the_run(
    leaf_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, names = leaf_of(50), tmp_path / "names"
    names.write_text("127.0.0.1")
    (tmp_path / "sitecustomize.py").write_text(NAMES.format(path=str(names)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first = Served(dataset_of(leaf, ALONE), 1)
    second = Served(dataset_of(leaf, ALONE), 1, port=first.port, host="127.0.0.2")
    try:
        with loader_of(leaf, TcpWorkers([f"decoders:{first.port}"])) as loader:
            iterator = iter(loader)
            found = [digest(batch) for batch in take(iterator, 6)]
            pool: Any = loader._workers.executor()
            assert [str(worker).count("127.0.0.1") for worker in pool._workers] == [1]
            names.write_text("127.0.0.2")
            first.kill()
            found += [digest(batch) for batch in iterator]
    finally:
        first.kill()
        second.kill()
    assert found == expected_of(leaf)


def test_a_refusal_is_forgotten_when_a_worker_joins(
    leaf_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of other code comes, and is replaced by one of ours. When that ends, too, the trainer waits."""
    leaf, addresses, servers = leaf_of(50), tmp_path / "servers", list[Served]()

    def serve(batch_size: int = 2) -> None:
        servers.append(Served(dataset_of(leaf, ALONE, batch_size=batch_size), 1))
        addresses.write_text("\n".join(served.address for served in servers))

    try:
        serve()
        with loader_of(leaf, TcpWorkers(file=addresses)) as loader:
            iterator = iter(loader)
            found = [digest(next(iterator))]
            serve(batch_size=3)
            assert until(lambda: f"{servers[1].address} is not used" in caplog.text)
            servers.pop().kill()
            serve()
            pool_with(loader, 2)
            servers.pop(0).kill()
            found += [digest(batch) for batch in take(iterator, 6)]  # the rest of the first, and some of the second
            servers.pop().kill()
            threading.Timer(0.5, serve).start()
            found += [digest(batch) for batch in iterator]
    finally:
        for served in servers:
            served.kill()
    assert found == expected_of(leaf)


def test_a_server_that_never_answers_holds_nobody_up(leaf_of: Any) -> None:
    leaf = leaf_of(50)
    with socket.create_server(("127.0.0.1", 0)) as silent, serving(dataset_of(leaf, ALONE)) as served:
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", served.address]
        with loader_of(leaf, TcpWorkers(addresses)) as loader:
            assert in_time(lambda: [digest(batch) for batch in loader], 60) == expected_of(leaf)


# -- the process that receives ----------------------------------------------------------------------------------------


def test_large_answers_lie_in_shared_memory(leaf_of: Any) -> None:
    """As long as the trainer keeps few batches; those that find no free segment arrive all the same."""
    leaf = leaf_of(50)
    with served_loader(lambda config: dataset_of(leaf, config)) as loader:
        places, found = zip(*((mapped_at(batch["x"].data_ptr()), digest(batch)) for batch in loader), strict=True)
    with served_loader(lambda config: dataset_of(leaf, config)) as loader:
        kept = list(loader)
    assert all(places) and [*found] == expected_of(leaf)
    assert [digest(batch) for batch in kept] == [*found]
    assert None in [mapped_at(batch["x"].data_ptr()) for batch in kept]


@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_is_killed_or_stopped_is_replaced(
    leaf_of: Any, caplog: pytest.LogCaptureFixture, hit: int
) -> None:
    leaf, found = leaf_of(50), []
    with served_loader(lambda config: dataset_of(leaf, config)) as loader:
        for number, batch in enumerate(loader):
            found.append(digest(batch))
            if number == 5:
                pool: Any = loader._workers.executor()
                receiver = pool._source._process
                receiver.send_signal(hit)
        loader.close()
        assert receiver.wait(60) and pool._source._process.wait(60)  # none is left
    assert found == expected_of(leaf)
    assert f"ended with status {-signal.SIGKILL}; it is replaced" in caplog.text


# -- a link of 1 Gbit/s, and 5 ms if the kernel has netem --------------------------------------------------------------


SECRET = b"0123456789abcdef"
CLONE_NEWNET = 0x40000000


def _run(*words: object) -> bool:
    """Whether a command succeeds."""
    return not subprocess.run([*map(str, words)], capture_output=True, check=False).returncode


class Link:
    """A network namespace, which needs root, and a link to it."""

    def __init__(self) -> None:
        number = os.getpid() % 60_000
        self.name, self._here, self._there = f"elw{number}", f"elwa{number}", f"elwb{number}"
        prefix = f"10.{213 + number % 20}.{number // 20 % 250}"
        self.host = f"{prefix}.2"
        self.is_made = (
            _run("ip", "netns", "add", self.name)
            and _run("ip", "link", "add", self._here, "type", "veth", "peer", "name", self._there)
            and _run("ip", "link", "set", self._there, "netns", self.name)
            and _run("ip", "addr", "add", f"{prefix}.1/24", "dev", self._here)
            and self._inside("ip", "addr", "add", f"{self.host}/24", "dev", self._there)
            and _run("ip", "link", "set", self._here, "up")
            and self.set("up")
            and self._shaped(self._here, _run)
            and self._shaped(self._there, self._inside)
        )

    def _inside(self, *words: object) -> bool:
        return _run("ip", "netns", "exec", self.name, *words)

    def _shaped(self, device: str, run: Callable[..., bool]) -> bool:
        add = ("tc", "qdisc", "add", "dev", device, "root")
        slow = run(*add, "netem", "delay", "2.5ms", "rate", "1gbit")
        return slow or run(*add, "tbf", "rate", "1gbit", "burst", "1mb", "latency", "50ms")

    def set(self, state: str) -> bool:
        """Cut the link off (``down``), or bring it back (``up``)."""
        return self._inside("ip", "link", "set", self._there, state)

    def remove(self) -> None:
        _run("ip", "link", "del", self._here)
        _run("ip", "netns", "del", self.name)

    def enter(self) -> None:
        """Move this process into the namespace."""
        with open(f"/run/netns/{self.name}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs root, ip and tc")
    made = Link()
    try:
        if not made.is_made:
            pytest.skip("this kernel gives no network namespace, or neither netem nor tbf")
        yield made
    finally:
        made.remove()


@pytest.mark.slow
@pytest.mark.parametrize("local", [0, 1])
def test_a_link_that_is_cut_off_and_comes_back(link: Link, leaf_of: Any, tmp_path: Path, local: int) -> None:
    """Nothing is lost, doubled or moved. With a local worker, batches come within a second all the time."""
    leaf, secret = leaf_of(1000), tmp_path / "secret"
    secret.write_bytes(SECRET)

    def serve() -> None:
        link.enter()
        JobServer(dataset_of(leaf, ALONE, 0.005), link.host, 7070, workers=2, secret=SECRET).run()

    server = multiprocessing.get_context("fork").Process(target=serve)
    server.start()
    workers = TcpWorkers([f"{link.host}:7070"], secret_file=secret)
    found, waits = [], []
    try:
        with loader_of(leaf, workers, local, 0.005) as loader:
            iterator = iter(loader)
            found.append(digest(next(iterator)))
            pool_with(loader, 2 + local)
            for number in range(1, 500):
                if number in (40, 280):
                    assert link.set("down")
                    threading.Timer(1.5, link.set, ["up"]).start()
                began = time.monotonic()
                found.append(digest(next(iterator)))
                waits.append(time.monotonic() - began)
    finally:
        server.kill()
        server.join()
    assert found == expected_of(leaf)
    # A second, and what this machine needs besides, while there is the link.
    assert max(waits) < (1.5 + 10 * max(waits[20:39]) if local else 15)
    assert local or max(waits) > 0.5  # it was cut off
