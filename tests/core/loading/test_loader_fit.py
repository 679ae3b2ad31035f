"""What users expect of any loader: length, context manager, close, torch's names for the state; and a safe start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from energon_lite import TaskEncoder, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import UnknownLengthError
from tests.testing import ALONE, alone, take


def _loader(path: Any, workers: int = 0, *, val: bool = False, **kwargs: Any) -> Any:
    config = alone(workers)
    data = {name: kwargs.pop(name) for name in ("virtual_epoch_length", "packing_buffer_size") if name in kwargs}
    encoder = kwargs.pop("task_encoder", None)
    get = get_val_dataset if val else get_train_dataset
    return get_savable_loader(get(path, batch_size=4, task_encoder=encoder, worker_config=config, **data), **kwargs)


def test_the_length_is_that_of_a_loop(leaf_of: Any) -> None:
    assert len(_loader(leaf_of(30), virtual_epoch_length=7)) == 7
    assert len(_loader(leaf_of(30))) == 8  # an endless stream: as long as its data
    validation = _loader(leaf_of(30), val=True)
    assert len(validation) == len(list(validation)) == 8


def test_a_length_that_nobody_knows(leaf_of: Any) -> None:
    class Twice(TaskEncoder):
        def encode_sample(self, sample: Any) -> Iterator[Any]:
            yield sample
            yield sample

    with pytest.raises(UnknownLengthError, match="unknown until the hooks have run"):
        len(_loader(leaf_of(30), task_encoder=Twice()))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_context_closes_also_after_an_error(leaf_of: Any, workers: int) -> None:
    loader = _loader(leaf_of(30), workers)
    with pytest.raises(ZeroDivisionError), loader as entered:
        assert entered is loader
        next(iter(loader))
        raise ZeroDivisionError
    assert loader._workers._executor is None
    loader.close()
    loader.close()
    _loader(leaf_of(30), workers).close()  # before it was used


def test_the_state_by_torchs_names(leaf_of: Any, tmp_path: Any) -> None:
    with _loader(leaf_of(30)) as loader, _loader(leaf_of(30), 1) as other:
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
            with _loader(
                leaf_of(30), 2, task_encoder=Heavy(), watchdog_timeout_seconds=60, on_timeout="raise"
            ) as loader:
                take(loader, 3)
                assert loader.stats()["worker_deaths"] == 0
    finally:
        done.set()
        torch.set_num_threads(before)
        for thread in threads:
            thread.join()
