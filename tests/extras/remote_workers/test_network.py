"""A server behind a link of 1 Gbit/s (and 5 ms, if the kernel has netem) that is cut off and comes back.

The server is in a network namespace of its own, which needs root. Where that is impossible, the tests are skipped.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.extras.remote_workers import JobServer, TcpWorkers
from tests.extras.remote_workers.served import pool_with
from tests.extras.remote_workers.slow_samples import dataset_of, digest, expected_of
from tests.testing import ALONE

SECRET = b"0123456789abcdef"
CLONE_NEWNET = 0x40000000


def _run(*words: object) -> bool:
    """Whether a command succeeds."""
    return not subprocess.run([*map(str, words)], capture_output=True, check=False).returncode


class Link:
    """A namespace, and a link to it."""

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
        with get_savable_loader(dataset_of(leaf, WorkerConfig(0, 1, local, workers=workers), 0.005)) as loader:
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
