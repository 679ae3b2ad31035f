"""Runs of frameworks: processes as torchrun starts them, but forked, and what they train.

Samples are numbers, and a model says which ones it was given. The framework makes its process group itself.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset, stateless
from energon_lite.loading.iterators.dataset import SavableDataset
from tests.testing import ALONE, free_port
from tests.trainer.parallel.rank_processes import DIED, RankFailure, run_ranks

Job = Callable[[], Any]


def run_processes(world: int, job: Job, folder: Path, *, kill_when: Callable[[], bool] | None = None) -> list[Any]:
    """What ``job()`` returns on each of ``world`` processes.

    Args:
        job: reads ``RANK`` and the like, as under torchrun; one process has none of these.
        folder: for what the processes write.
        kill_when: SIGKILL to all of them as soon as this is true; then there are no results.
    """
    port = free_port()

    def run(rank: int) -> Any:
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0"}
        _forget_the_parent()
        if kill_when is not None:
            threading.Thread(target=_die, args=(kill_when,), daemon=True).start()
        return job()

    try:
        results = run_ranks(world, run, 100, folder=folder, group=False)
    except RankFailure as failure:
        if kill_when is None or set(failure.by_rank.values()) != {DIED[1]}:
            raise
        return []
    assert kill_when is None, "through before it was killed"
    return results


def reached(folder: Path, log: str, step: int) -> Callable[[], bool]:
    """For ``kill_when``: whether a log has a line of this step or a later one."""
    return lambda: any(line["step"] >= step for line in logged(folder, log))


def _die(when: Callable[[], bool]) -> None:
    while not when():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def _forget_the_parent() -> None:
    """Accelerate keeps in which of how many processes it is, also over a fork."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def log_line(log: Path, **line: Any) -> None:
    """A line of JSON, whole even if the process is killed right after it."""
    with open(log, "a") as file:
        file.write(json.dumps(line) + "\n")


def logged(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The lines of all logs; one that a kill cut off is none."""
    found = []
    for path in sorted(folder.glob(pattern)):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


# -- what they train ---------------------------------------------------------------------------------------------------

SAMPLES = 26


class Numbers(TaskEncoder):
    """A sample is its number."""

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        number = int(sample.__key__.rpartition("-")[2])
        return {"number": torch.tensor(float(number)), "labels": torch.tensor(number), "unused": "text"}


class PackedNumbers(Numbers):
    """Two to four samples to a pack, by their numbers: how many batches there are is up to the hooks."""

    def select_samples_to_pack(self, samples: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        packs, taken = [], 0
        while taken < len(samples):
            size = 2 + int(samples[taken]["labels"]) % 3
            packs.append(list(samples[taken : taken + size]))
            taken += size
        return packs

    @stateless
    def pack_selected_samples(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "number": torch.stack([sample["number"] for sample in samples]).sum(),
            "labels": torch.tensor([int(sample["labels"]) for sample in samples] + [-1] * (5 - len(samples))),
        }


class Model(nn.Module):
    """One weight; its outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, number: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * number / 100).mean(), "logits": number[:, None] * self.weight.detach().sign()}


def train_data(leaf: Path, config: WorkerConfig, *, repeat: bool = True, packed: bool = False) -> SavableDataset:
    """Batches of two."""
    return get_train_dataset(
        leaf,
        batch_size=2,
        worker_config=config,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=repeat,
        packing_buffer_size=8 if packed else None,
        task_encoder=PackedNumbers() if packed else Numbers(),
    )


def val_data(leaf: Path, config: WorkerConfig) -> SavableDataset:
    """Batches of four, in order."""
    return get_val_dataset(leaf, batch_size=4, worker_config=config, task_encoder=Numbers())


def numbers_of(batch: Any) -> list[int]:
    """The samples in a batch; -1 fills packs up."""
    return [number for number in batch["labels"].flatten().tolist() if number >= 0]


def expected(leaf: Path, batches: int, **given: Any) -> list[list[int]]:
    """The first micro-batches of a run that nobody disturbed."""
    found = []
    with get_savable_loader(train_data(leaf, ALONE, **given)) as loader:
        while len(found) < batches:
            for batch in loader:
                found.append(numbers_of(batch))
                if len(found) == batches:
                    break
    return found


def micro_batches(folder: Path, tag: str, *, before: int | None = None) -> list[list[int]]:
    """What was logged, in the order of the run: of each step its micro-batches one after the other, of all ranks each.

    Args:
        before: the steps before this one only.
    """
    numbered: dict[tuple[int, int], int] = {}
    ordered = []
    for line in logged(folder, f"{tag}-*"):
        if before is None or line["step"] < before:
            place = (line["step"], line["rank"])
            numbered[place] = numbered.get(place, -1) + 1
            ordered.append((line["step"], numbered[place], line["rank"], line["numbers"]))
    return [numbers for *_, numbers in sorted(ordered, key=lambda line: line[:3])]
