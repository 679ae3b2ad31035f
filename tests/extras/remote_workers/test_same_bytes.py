"""Batches are the same, byte for byte, whoever makes them; and a run goes on with workers of any kind."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.errors import EnergonLiteError
from energon_lite.extras.remote_workers import TcpWorkers
from tests.core.laws.kinds import KINDS, Noise, training, validation
from tests.extras.remote_workers.served import pool_with, serving
from tests.testing import ALONE, batches_of, examples, same, take, until

#: Local workers, their start method, and whether there are others behind TCP.
WAYS = [(1, "thread", False), (1, "fork", False), (0, "fork", True), (2, "fork", True), (1, "thread", True)]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="energon_lite")


def _run(build: Callable[[WorkerConfig], Any], way: Any, tcp: Any, count: int, state: Any = None) -> tuple[Any, Any]:
    """The next batches, and the state behind them."""
    workers, method, elsewhere = way
    config = WorkerConfig(0, 1, workers, workers=tcp if elsewhere else None)
    with get_savable_loader(build(config), start_method=method) as loader:
        loader.restore_state_rank(state)
        try:
            batches = take(loader, 1)
            if elsewhere:  # local workers alone would make all of so few batches
                pool_with(loader, workers + 2)
            return batches + take(loader, count - 1), loader.save_state_rank()
        except EnergonLiteError as error:  # hooks that give no batch, in every way alike
            return [type(error), str(error)], None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(3), phases=[Phase.generate])
@given(data=st.data())
def test_any_worker_makes_the_same_batches(leaf_of: Any, known_lengths: None, kind: str, data: st.DataObject) -> None:
    build, ways = data.draw(KINDS[kind]).builder(leaf_of), data.draw(st.permutations(WAYS))
    expected, state = _run(build, (0, "fork", False), None, 14)
    if state is None:
        return
    with serving(build(ALONE)) as served:
        tcp = served.tcp()
        batches, after = _run(build, ways[0], tcp, 14)
        assert same(batches, expected) and after == state, ways[0]
        first, between = _run(build, ways[1], tcp, 5)
        rest, after = _run(build, ways[2], tcp, 9, between)  # one kind goes on where another one was
        assert same([*first, *rest], expected) and after == state, ways


def test_a_validation_ends_alike(leaf_of: Any) -> None:
    build = validation(leaf_of(50), batch_size=4, task_encoder=Noise())
    with serving(build(ALONE)) as served:
        for workers in (served.tcp(), f"tcp://{served.address}"):
            assert same(batches_of(build(WorkerConfig(0, 1, workers=workers))), batches_of(build(ALONE)))


def test_ranks_share_a_server(leaf_of: Any) -> None:
    build = training(leaf_of(50), batch_size=2, task_encoder=Noise())

    def run(tcp: Any) -> Any:
        with ExitStack() as stack:
            configs = [WorkerConfig(rank, 3, workers=tcp) for rank in range(3)]
            ranks = [iter(stack.enter_context(get_savable_loader(build(config)))) for config in configs]
            return [next(rank) for _ in range(6) for rank in ranks]

    with serving(build(ALONE), workers=3) as served:
        assert same(run(served.tcp(per_server=1)), run(None))


@pytest.mark.slow
def test_the_step_after_5000_comes_next(leaf_of: Any, tmp_path: Path) -> None:
    """With workers elsewhere that are busy, and far ahead, trainer and servers are killed (tensorflow#63079)."""
    build, saved = training(leaf_of(50), batch_size=2, task_encoder=Noise()), tmp_path / "state"

    def train(tcp: TcpWorkers) -> None:
        with get_savable_loader(build(WorkerConfig(0, 1, workers=tcp))) as loader:
            batches = iter(loader)
            take(batches, 5000)
            (tmp_path / "new").write_text(json.dumps(loader.save_state_rank()))
            (tmp_path / "new").rename(saved)
            while True:
                next(batches)

    with serving(build(ALONE)) as served:
        trainer = multiprocessing.get_context("fork").Process(target=train, args=(served.tcp(),))
        trainer.start()
        until(lambda: saved.exists() or not trainer.is_alive(), 300)
        trainer.kill()
        trainer.join()
    assert trainer.exitcode == -signal.SIGKILL
    state = json.loads(saved.read_text())
    expected = _run(build, (0, "fork", False), None, 5020)[0][5000:]
    with serving(build(ALONE)) as served:
        for way in WAYS:
            assert same(_run(build, way, served.tcp(), 20, state)[0], expected), way
