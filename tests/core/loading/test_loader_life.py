"""How a loader begins and ends, by Energon 8's names: worker types, ``shutdown``, ``with``, restoring in a chain."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import TaskEncoder, get_loader, get_savable_loader, get_train_dataset, stateless
from energon_lite.errors import UsageError
from tests.testing import alone, take


class Where(TaskEncoder):
    """Says who made a sample, and draws by its own generator only."""

    @stateless(restore_task_encoder_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "pid": os.getpid(), "drawn": float(self.rng.numpy.random())}


def dataset(leaf: Path, workers: int) -> Any:
    return get_train_dataset(leaf, batch_size=2, task_encoder=Where(), worker_config=alone(workers))


@pytest.mark.parametrize("kind", ["fork", "thread", "main"])
def test_worker_types_make_the_same_batches(leaf_of: Callable[..., Path], kind: str) -> None:
    one = dataset(leaf_of(50), 0)
    expected = take(get_loader(one), 3)
    with get_savable_loader(dataset(leaf_of(50), 2), worker_type=kind) as loader:
        found = take(loader, 3)
    assert [batch["drawn"] for batch in found] == [batch["drawn"] for batch in expected]
    here = {pid == os.getpid() for batch in found for pid in batch["pid"]}
    assert here == {kind in ("thread", "main")}


def test_hooks_of_threads_that_draw_by_their_own_generator_run_side_by_side(
    leaf_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with get_loader(dataset(leaf_of(50), 2), worker_type="thread") as loader:
        next(iter(loader))
    assert "one at a time" not in caplog.text


def test_shutdown_ends_the_workers_and_a_chain_restores(leaf_of: Callable[..., Path]) -> None:
    loader = get_savable_loader(dataset(leaf_of(50), 1))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.save_state_rank()
    following = next(batches)["__key__"]
    loader.shutdown()
    loader.shutdown()
    assert loader.stats()["queue"]["pending"] == 0
    again = get_savable_loader(dataset(leaf_of(50), 0))
    with again.with_restored_state_rank(state) as resumed:
        assert resumed is again and next(iter(resumed))["__key__"] == following
    with again.with_restored_state_global([state, None]) as resumed:
        assert next(iter(resumed))["__key__"] == following


def test_what_does_not_go_together(leaf_of: Callable[..., Path]) -> None:
    one = dataset(leaf_of(50), 1)
    assert get_loader(one, worker_type="fork", start_method="fork", pin_memory="automatic")
    with pytest.raises(UsageError, match="worker_type='thread' with start_method='spawn'"):
        get_loader(one, worker_type="thread", start_method="spawn")
    with pytest.raises(UsageError, match="did you mean 'thread'"):
        get_loader(one, worker_type="threads")
    with pytest.raises(UsageError, match="did you mean 'spawn'"):
        get_loader(one, multiprocessing_context="spawnn")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_is_not_copied(leaf_of: Callable[..., Path], workers: int, copied: Callable[[Any], Any]) -> None:
    with get_savable_loader(dataset(leaf_of(50), workers)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(UsageError, match="cannot be copied or pickled") as refused:
            copied(loader)
        # What it advises, word by word.
        assert refused.value.fix
        names = {"get_savable_loader": get_savable_loader, "loader": loader}
        with eval(refused.value.fix.split(": ", 1)[1], names) as other:
            assert next(iter(other))["__key__"] == next(batches)["__key__"]


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_workers_of_a_daemon(leaf_of: Callable[..., Path], kind: str) -> None:
    """Processes that multiprocessing lets have none of their own, as those of its pools."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)

    def body() -> None:
        with pytest.raises(UsageError, match=r"(?s)daemon.*start_method='thread'.*num_workers=0") as refused:
            next(iter(get_savable_loader(dataset(leaf_of(50), 2), worker_type=kind)))
        found = []
        for workers, other in ((2, "thread"), (0, kind)):
            with get_savable_loader(dataset(leaf_of(50), workers), worker_type=other) as loader:
                found.append(next(iter(loader))["__key__"])
        send.send((str(refused.value), found))

    process = multiprocessing.get_context("fork").Process(target=body, daemon=True)
    process.start()
    send.close()
    _, found = receive.recv()
    process.join(120)
    assert found[0] == found[1] and process.exitcode == 0
