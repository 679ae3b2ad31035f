"""How a loader begins and ends, by torch's names and Energon 8's: length, last batch, ``with``, ``shutdown``, state."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import SavableDataLoader, TaskEncoder, get_loader, get_savable_loader, get_train_dataset, stateless
from energon_lite.errors import UsageError
from energon_lite.loading import recipes
from tests.testing import ALONE, alone, take, train_loader, val_loader

_train, _val = (partial(loader, batch_size=4) for loader in (train_loader, val_loader))


class Where(TaskEncoder):
    """Says who made a sample, and draws by its own generator only."""

    @stateless(restore_task_encoder_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "pid": os.getpid(), "drawn": float(self.rng.numpy.random())}


def dataset(leaf: Path, workers: int) -> Any:
    return get_train_dataset(leaf, batch_size=2, task_encoder=Where(), worker_config=alone(workers))


@pytest.mark.parametrize("kind", ["fork", "thread", "main"])
def test_worker_types_make_the_same_batches(
    leaf_of: Callable[..., Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = take(get_loader(dataset(leaf_of(50), 0)), 3)
    with get_savable_loader(dataset(leaf_of(50), 2), worker_type=kind) as loader:
        found = take(loader, 3)
    assert [batch["drawn"] for batch in found] == [batch["drawn"] for batch in expected]
    here = {pid == os.getpid() for batch in found for pid in batch["pid"]}
    assert here == {kind in ("thread", "main")}
    assert "one at a time" not in caplog.text  # threads: hooks that draw by their own generator run side by side


@pytest.mark.parametrize("method", ["fork", "thread"])
def test_a_restore_and_a_close_in_the_middle(leaf_of: Callable[..., Path], method: Any) -> None:
    """The workers end; nothing else changes."""

    def running() -> set[Any]:
        all_ = [*threading.enumerate(), *multiprocessing.active_children()]
        return {one for one in all_ if one.name.startswith(("energon-lite-worker", "energon-lite-thread"))}

    others = running()
    with _train(leaf_of(50)) as alone, _train(leaf_of(50), 2, start_method=method) as loader:
        expected = [batch.__key__ for batch in take(alone, 12)]
        found = [batch.__key__ for batch in take(loader, 4)]
        state = loader.save_state_rank()
        take(loader, 5)
        assert len(running() - others) == 2
        loader.restore_state_rank(state)
        found += [batch.__key__ for batch in take(loader, 4)]
        loader.close()
        loader.close()
        assert not running() - others
        found += [batch.__key__ for batch in take(loader, 4)]
    assert found == expected


def test_shutdown_ends_the_workers_and_a_chain_restores(leaf_of: Callable[..., Path]) -> None:
    loader = get_savable_loader(dataset(leaf_of(50), 1))
    take(loader, 3)
    state = loader.save_state_rank()
    following = next(iter(loader))["__key__"]
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
    for wrong, words in (
        ({"worker_type": "thread", "start_method": "spawn"}, "worker_type='thread' with start_method='spawn'"),
        ({"worker_type": "threads"}, "did you mean 'thread'"),
        ({"multiprocessing_context": "spawnn"}, "did you mean 'spawn'"),
    ):
        with pytest.raises(UsageError, match=words):
            get_loader(one, **wrong)


def test_a_data_set_that_was_used_is_sent_to_another_process(leaf_of: Callable[..., Path]) -> None:
    used = dataset(leaf_of(50), 0)
    expected = take(get_loader(used), 3)
    sent = pickle.loads(pickle.dumps(used))
    assert [batch["drawn"] for batch in take(get_loader(sent), 3)] == [batch["drawn"] for batch in expected]
    assert sent.config() == used.config()


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


def test_the_length_is_that_of_a_loop(leaf_of: Any) -> None:
    assert len(_train(leaf_of(30), virtual_epoch_length=7)) == 7
    assert len(_train(leaf_of(30))) == 8  # an endless stream: as long as its data
    validation = _val(leaf_of(30))
    assert len(validation) == len(list(validation)) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_the_context_closes_also_after_an_error(leaf_of: Any, workers: int) -> None:
    loader = _train(leaf_of(30), workers)
    with pytest.raises(ZeroDivisionError), loader as entered:
        assert entered is loader
        next(iter(loader))
        raise ZeroDivisionError
    assert loader._workers._executor is None
    loader.close()
    loader.close()
    _train(leaf_of(30), workers).close()  # before it was used


def test_the_state_by_torchs_names(leaf_of: Any, tmp_path: Any) -> None:
    with _train(leaf_of(30)) as loader, _train(leaf_of(30), 1) as other:
        take(loader, 3)
        torch.save(loader.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.state_dict() == loader.state_dict()
        assert next(iter(other)).__key__ == next(iter(loader)).__key__


def test_a_loader_without_a_state_has_the_rest(leaf_of: Any) -> None:
    dataset = get_train_dataset(leaf_of(30), batch_size=4, worker_config=ALONE)
    with get_loader(dataset, log_every=0).to("cpu") as loader:
        next(iter(loader))
        assert loader.stats()["batches"] == 1 and not hasattr(loader, "state_dict")


def test_forked_workers_of_a_trainer_with_busy_threads(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Threads that hold the locks of logging, of memory, of torch's pools while workers are forked: none hangs."""
    done = threading.Event()
    logger = logging.getLogger("test.busy")
    before = torch.get_num_threads()

    def busy() -> None:
        x = torch.randn(64, 64)
        while not done.wait(0.001):
            logger.warning("busy")
            x = (x @ x).clamp(-1, 1)
            [bytearray(1 << 16) for _ in range(10)]

    class Heavy(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            logger.warning("encode")
            return {"x": torch.randn(200, 200) @ torch.randn(200, 200)}

    torch.set_num_threads(2)  # a parallel region of OpenMP in the trainer, before it forks
    torch.randn(512, 512) @ torch.randn(512, 512)
    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            with _train(leaf_of(30), 2, task_encoder=Heavy(), on_timeout="raise") as loader:
                take(loader, 3)
                assert loader.stats()["worker_deaths"] == 0
    finally:
        done.set()
        torch.set_num_threads(before)
        for thread in threads:
            thread.join()


class Groups(TaskEncoder):
    """Batches of what comes: hooks decide how many there are."""

    def batch_group_criterion(self, sample: Any) -> tuple[str, Any]:
        return sample.__key__[-1], np.int64(2)


def said(loader: SavableDataLoader) -> list[bool | None]:
    """What is said after each batch of a loop."""
    with loader:
        return [loader.is_last() for _ in loader]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pass_that_ends(rank: int, leaf_of: Callable[..., Path]) -> None:
    """14 samples in batches of two are three steps on three ranks; in the last one the third rank has none."""
    loader = val_loader(leaf_of(14), batch_size=2, rank=rank, world_size=3)
    assert said(loader) == [False, False, True]
    assert said(loader) == [False, False, True]
    skipping = get_savable_loader(loader.dataset, skip_steps=np.array([2]))
    assert said(skipping) == [False, True]
    take(loader, 1)
    assert json.loads(json.dumps(loader.state_at(np.int64(2 * 9 + 3)))) == loader.state_dict()
    assert loader.state_at(2 * 9 + 5) == loader.state_dict()  # in whole steps
    loader.restore_state_rank(loader.state_dict())
    assert said(loader) == [False, True]


def test_an_endless_stream_ends_with_its_virtual_epoch(leaf_of: Callable[..., Path]) -> None:
    loader = train_loader(leaf_of(14), batch_size=2, virtual_epoch_length=4)
    assert said(loader) == said(loader) == [False, False, False, True]
    endless = train_loader(leaf_of(14), batch_size=2)
    assert [endless.is_last() for _, _ in zip(range(20), endless, strict=False)] == [False] * 20


def test_nobody_knows_where_hooks_decide(leaf_of: Callable[..., Path]) -> None:
    assert set(said(train_loader(leaf_of(14), task_encoder=Groups(), repeat=False))) == {None}
    assert said(train_loader(leaf_of(14), task_encoder=Groups(), virtual_epoch_length=2)) == [False, True]
    skipping = train_loader(leaf_of(14), task_encoder=Groups(), virtual_epoch_length=3, skip_steps=[1, 2])
    assert said(skipping) == [True]


class Odd(Groups):
    """Fails at half of the samples."""

    def encode_sample(self, sample: Any) -> Any:
        return sample if int(sample.text[2:]) % 2 else 1 / 0


def test_a_step_that_is_skipped_or_lost_is_no_batch(leaf_of: Callable[..., Path]) -> None:
    plain = type("OddAlone", (TaskEncoder,), {"encode_sample": Odd.encode_sample})()
    once = partial(recipes.get_processing_dataset, leaf_of(14), worker_config=ALONE)
    for dataset, skipped in ((once(batch_size=1, task_encoder=plain), 1), (once(task_encoder=Odd()), 0)):
        with get_savable_loader(dataset, skip_steps=[skipped]) as loader:
            delivered = [batch.__key__ for batch in loader]
            stats = loader.stats()
            assert list(loader.with_restored_state_rank(loader.save_state_rank())) == []
        assert stats["batches"] == len(delivered) > 1 and stats["samples"] == sum(map(len, delivered)) < 7
        assert stats["failed"] == 7  # those of a step that is skipped, too
