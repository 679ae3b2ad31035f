"""How full packs are: made by hooks with all defaults, and by the selections that people write; no file is read.

    python tools/bench/packing_fill.py [--packs 2000] [--workers 0]

Prints for three mixes of log-normal lengths which part of the capacity of 4,096 tokens is delivered, how many batches
are short, the largest state in bytes, and the time for each sample.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, register_source

CAPACITY, SAMPLES = 4096, 50_000


def tokens_of(mix: str) -> Any:
    """Chats; images of four sizes with a caption; texts with up to four images between them."""
    draw = np.random.default_rng(3)
    median, sigma = {"chat": (245, 0.9), "image-text": (120, 0.8), "interleaved": (700, 0.7)}[mix]
    tokens = draw.lognormal(np.log(median), sigma, SAMPLES)
    if mix == "image-text":
        tokens += draw.choice([256, 576, 1024, 1600], SAMPLES, p=[0.3, 0.4, 0.2, 0.1])
    elif mix == "interleaved":
        tokens += 256 * draw.integers(0, 5, SAMPLES)
    return np.clip(tokens, 8, CAPACITY).astype(int)


class Mix:
    """Samples that are nothing but a length."""

    def __init__(self, url: str, split_part: str):
        self.identity, self.tokens = url, tokens_of(url.removeprefix("mix://"))

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, index: int) -> dict[str, Any]:
        return {"length": int(self.tokens[index])}


class Defaults(TaskEncoder):
    """The library selects."""

    pack_capacity: int | None = CAPACITY

    def sample_length(self, sample: Any) -> int:
        return int(sample["length"])

    def pack_selected_samples(self, samples: list[Any]) -> list[int]:
        return [sample["length"] for sample in samples]

    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


class Selection(Defaults):
    """Packs each buffer to its end. It goes through the samples in their order, or longest first (``decreasing``), and
    closes a pack when the next sample does not fit, or looks for one that has room (``first``)."""

    pack_capacity = None
    decreasing = first = False

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        packs: list[list[Any]] = []
        rooms: list[int] = []
        for sample in sorted(samples, key=lambda one: -one["length"]) if self.decreasing else samples:
            size, open_packs = sample["length"], range(len(packs)) if self.first else range(len(packs))[-1:]
            found = next((number for number in open_packs if rooms[number] >= size), None)
            if found is None:
                packs.append([])
                rooms.append(CAPACITY)
                found = len(packs) - 1
            packs[found].append(sample)
            rooms[found] -= size
        return packs


class NextFitDecreasing(Selection):
    decreasing = True


class FirstFitDecreasing(Selection):
    decreasing = first = True


def measured(mix: str, encoder: TaskEncoder, size: int, packs: int, workers: int, **arguments: Any) -> str:
    """Fill, state and time of a run, and whether all of its batches are full."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        f"mix://{mix}", task_encoder=encoder, batch_size=size, worker_config=config, **arguments
    )
    tokens = samples = state = short = 0
    began = time.perf_counter()
    with get_savable_loader(dataset) as loader:
        for step, batch in zip(range(packs // size), loader, strict=False):
            tokens += sum(map(sum, batch))
            samples += sum(map(len, batch))
            short += len(batch) < size
            if step % 20 == 0:
                state = max(state, len(json.dumps(loader.save_state_rank())))
    micros = 1e6 * (time.perf_counter() - began) / samples
    return f"{tokens / (packs // size * size * CAPACITY):.3f}, {short} short, {state:,} bytes, {micros:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    register_source("mix", Mix)
    for mix in ("chat", "image-text", "interleaved"):
        for size in (1, 2, 8):
            print(
                f"{mix}, batch size {size}: {measured(mix, Defaults(), size, given.packs, given.workers)}", flush=True
            )
        for selection in (FirstFitDecreasing, NextFitDecreasing, Selection):
            found = measured(mix, selection(), 8, given.packs, given.workers, packing_buffer_size=100)
            print(f"{mix}, {selection.__name__} of buffers of 100: {found}", flush=True)


if __name__ == "__main__":
    main()
