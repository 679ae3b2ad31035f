"""What is kept of each released version: data sets as it prepared them, and states of runs on them with what came next.

Names here are today's; what a version wrote is in its folder. A new feature with a state of its own gets a scenario.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_lite import (
    ByTokens,
    Chunks,
    Reading,
    TaskEncoder,
    WorkerConfig,
    get_processing_dataset,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)

#: Steps before a state is saved, and those behind it that have to be the same.
BEFORE, BEHIND = 5, 6
#: When the JSONL file was written: its index holds that, and git does not.
TIME = 1_000_000_000
BEST_FIT = {"strategy": "best_fit", "capacity": 20}


def drawn() -> list[float]:
    """A random number of each global generator."""
    return [
        round(number, 12) for number in (random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item())
    ]


class Words(TaskEncoder):
    """Words of a text, and random numbers of the sample's; packs of up to twelve words."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        text = sample["json"]["text"] if isinstance(sample, dict) else sample.text
        text = text.decode() if isinstance(text, bytes) else text
        fields = {"key": sample["__key__"]} if isinstance(sample, dict) else {"key": sample.__key__}
        return {**fields, "tokens": text.split(), "drawn": drawn()}

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"samples": [[one["key"], one["drawn"]] for one in samples], "drawn": drawn()}


class Packs(Words):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = [[]]
        for sample in samples:
            if sum(len(one["tokens"]) for one in [*packs[-1], sample]) > 12:
                packs.append([])
            packs[-1].append(sample)
        return packs

    @stateless(restore_seeds=True)
    def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
        return {**samples[0], "key": "+".join(one["key"] for one in samples)}


class FullPacks(Packs):
    """The library selects."""

    pack_capacity = 12
    select_samples_to_pack = TaskEncoder.select_samples_to_pack


def _train(name: str, **options: Any) -> Callable[[Path, WorkerConfig], Any]:
    options = {"task_encoder": Words(), "batch_size": 3} | options
    return lambda data, config: get_train_dataset(data / name, worker_config=config, **options)


#: By name: how many ranks, and the data set of one of them.
SCENARIOS: dict[str, tuple[int, Callable[[Path, WorkerConfig], Any]]] = {
    "batches": (2, _train("blend.yaml")),
    "batches_windows": (2, _train("blend.yaml", shuffle_buffer_size=16, max_samples_per_sequence=4)),
    "batches_loops": (2, _train("prose", virtual_epoch_length=3)),
    "epochs": (3, _train("epochs.yaml")),
    "schedule": (2, _train("schedule.yaml")),
    "jsonl": (1, _train("notes.jsonl")),
    "subset": (1, _train("subset.yaml")),
    "filtered": (1, _train("prose", reading=Reading(filter="length >= 4"))),
    "tokens": (2, _train("prose", batch_size=None, batching=ByTokens(BEST_FIT, length_column="length"))),
    "tokens_measured_now": (
        2,
        _train("blend.yaml", batch_size=None, batching=ByTokens(BEST_FIT, length_column=None, length_field="tokens"),
               chunks=Chunks(size=10)),
    ),
    "packs": (2, _train("blend.yaml", task_encoder=Packs(), batch_size=2, packing_buffer_size=6)),
    "full_packs": (2, _train("blend.yaml", task_encoder=FullPacks(), batch_size=2, packing_buffer_size=6)),
    "validation": (
        2,
        lambda data, config: get_val_dataset(data / "prose", batch_size=2, task_encoder=Words(), worker_config=config),
    ),
    "processing": (
        2, lambda data, config: get_processing_dataset(data / "prose", task_encoder=Words(), worker_config=config)
    ),
}  # fmt: skip


def run(name: str, data: Path, states: Sequence[Any] | None = None) -> dict[str, Any]:
    """Run a scenario on all of its ranks.

    Args:
        states: of its ranks, to go on with; None: begin, and save some.

    Returns:
        ``states`` of the ranks, and what each of them got ``next``.
    """
    world, make = SCENARIOS[name]
    found: dict[str, Any] = {"states": [], "next": []}
    for rank in range(world):
        config = WorkerConfig(rank=rank, world_size=world, num_workers=0, seed_offset=11)
        with get_savable_loader(make(data, config)) as loader:
            batches = _endless(loader)
            if states is None:
                for _ in range(BEFORE):
                    next(batches)
            else:
                loader.restore_state_rank(states[rank])
            found["states"].append(loader.save_state_rank())
            found["next"].append([_plain(next(batches)) for _ in range(BEHIND)])
    return json.loads(json.dumps(found))


def _endless(loader: Any) -> Iterator[Any]:
    """Batches of one loop after the other; a mark where one ends."""
    while True:
        yield from loader
        yield "end"


def _plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value for name, value in batch.items() if not name.startswith("__")}
    return batch
