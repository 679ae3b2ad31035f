"""A whole epoch under fire: whatever happens to the workers, every sample comes once and in its place."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SavableDataLoader, TaskEncoder
from tests.testing import train_loader

PAUSE = 0.5


class Slow(TaskEncoder):
    """Takes its time, and makes batches that are larger than a pipe holds."""

    pause = 0.001

    def encode_sample(self, sample: Any) -> Any:
        time.sleep(self.pause)
        x = torch.full((40_000,), float(self.rng.random()))
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "x": x}


class SlowPacks(Slow):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 3] for at in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        together = torch.stack([sample["x"] for sample in samples]).sum(0)
        return {"__key__": "+".join(s["__key__"] for s in samples), "__restore_key__": (), "x": together}


class Two(SlowPacks):
    """Groups of samples whose numbers are alike."""

    def batch_group_criterion(self, sample: Any) -> Any:
        return len(sample["__key__"]) % 2, None


# A job during which three workers die is given up: so those that are begun at one kill are done before the next one.
IN_FLIGHT = 6
MANNERS: dict[str, dict[str, Any]] = {
    "planned": {"task_encoder": Slow()},
    "packed": {"task_encoder": SlowPacks(), "packing_buffer_size": 12, "chunk_size": 12},
    "grouped packs": {"task_encoder": Two(), "packing_buffer_size": 12, "chunk_size": 12},
}


def _loader(path: Path, manner: str, workers: int) -> SavableDataLoader:
    MANNERS[manner]["task_encoder"].pause = Slow.pause if workers else 0.0
    return train_loader(path, workers, batch_size=4, repeat=False, **MANNERS[manner])


def _digest(batch: Any) -> tuple[Any, ...]:
    return (*batch["__key__"], float(batch["x"].double().sum()))


def _children() -> dict[int, str]:
    """This process's children and what state they are in."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == os.getpid():
                found[int(entry)] = state
    return found


@contextmanager
def _fire(loader: SavableDataLoader, draw: random.Random, found: list[Any], hit: int) -> Iterator[None]:
    """Kill or stop a worker, whichever, every half a second, and let the one before go on; kill later on a machine that
    is busy."""
    ended = threading.Event()

    def shoot() -> None:
        earliest, stopped = 0, list[int]()
        while not ended.wait(PAUSE):
            while stopped:
                os.kill(stopped.pop(), signal.SIGCONT)
            if len(found) < earliest:
                continue
            earliest = len(found) + IN_FLIGHT
            executor: Any = loader._workers.executor()
            pid = draw.choice([worker.process.pid for worker in executor._workers])
            if pid in _children():
                os.kill(pid, hit)
                stopped += [pid] if hit == signal.SIGSTOP else []
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "samples, seconds", [(500, 2), pytest.param(2000, 15, marks=pytest.mark.nightly, id="2000-nightly")]
)
@pytest.mark.parametrize(
    ("manner", "hit"), [*((manner, signal.SIGKILL) for manner in MANNERS), ("planned", signal.SIGSTOP)]
)
def test_a_worker_is_hit_every_half_a_second(
    manner: str, hit: signal.Signals, samples: int, seconds: int, leaf_of: Any
) -> None:
    with _loader(leaf_of(samples), manner, 0) as alone:
        expected = [_digest(batch) for batch in alone]
    before = _children()
    with _loader(leaf_of(samples), manner, 2) as loader:
        iterator = iter(loader)
        found = [_digest(next(iterator))]  # the workers are there
        with _fire(loader, random.Random(samples), found, hit):
            for batch in iterator:
                found.append(_digest(batch))
                time.sleep(seconds / len(expected))  # a step of training
        deaths = loader.stats()["worker_deaths"]
        # Whoever was killed behind the last batch is waited for when the loader closes.
        own = [state for pid, state in _children().items() if pid not in before]
        assert own.count("Z") <= loader.worker_config.num_workers
    assert deaths >= seconds if hit == signal.SIGKILL else not deaths
    assert found == expected
    keys = [key for *names, _ in found for name in names for key in name.split("+")]
    assert sorted(keys) == sorted(f"a-{number}" for number in range(samples))
    assert _children().keys() <= before.keys()
