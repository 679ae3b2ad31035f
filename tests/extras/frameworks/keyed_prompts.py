"""Data sets for keys; the driver and its workers import this module by its name."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from energon_lite import DefaultTaskEncoder, SkipSample, WorkerConfig, get_train_dataset, get_val_dataset
from energon_lite.extras.frameworks.ray import SampleKey, SampleKeys

ALONE = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=7)


def write_blend(path: Path, large: Path, small: Path) -> str:
    """A blend of two data sets, of which the smaller one says where its prompts come from."""
    labels = "subflavors: {data_source: openai/gsm8k}"
    lines = [f"      - {{path: {large}, weight: 3}}", f"      - {{path: {small}, weight: 1, {labels}}}"]
    head = ["__module__: megatron.energon", "__class__: MetadatasetV2", "splits:", "  train:", "    blend:"]
    path.write_text("\n".join([*head, *lines]) + "\n")
    return str(path)


#: Function of the data set, by which workers find it.
PROMPTS = f"{__name__}:open_prompts"


class Prompts(DefaultTaskEncoder):
    """A picture of random pixels, a question, and the answer. Keys that end with 3 are skipped."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if sample.__key__.endswith("3"):
            raise SkipSample("ends with 3")
        picture = {"type": "image", "image": torch.rand(3, 8, 8)}
        content = [picture, {"type": "text", "text": f"What is {sample.text}?"}]
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "raw_prompt": [{"role": "user", "content": content}],
            "reward_model": {"style": "rule", "ground_truth": sample.text},
            "pixels": picture["image"],
        }

    def batch(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if len(samples) == 3:
            raise SkipSample("no batch of three")
        noise = torch.rand(())  # of the batch, not of the process
        return {
            "keys": [sample["__key__"] for sample in samples],
            "pixels": torch.stack([sample["pixels"] for sample in samples]) + noise,
        }


def open_prompts(path: str, **options: Any) -> Any:
    return get_train_dataset(path, **{"batch_size": None, "task_encoder": Prompts(), "worker_config": ALONE} | options)


def open_once(path: str) -> Any:
    return open_prompts(path, repeat=False)


def open_batches(path: str) -> Any:
    return open_prompts(path, batch_size=4)


def open_rank(path: str) -> Any:
    return open_prompts(path, worker_config=WorkerConfig(rank=0, world_size=2))


def open_nothing(path: str) -> str:
    return path


def open_validation(path: str) -> Any:
    return get_val_dataset(path, batch_size=None, task_encoder=Prompts(), worker_config=ALONE)


def digest(samples: Any) -> str:
    """Of all values, bit for bit."""
    return hashlib.sha256(pickle.dumps(_plain(samples))).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def drive(
    ask: Callable[[list[SampleKey]], list[list[str]]], blend: str, folder: Path, size: int, steps: int, die_at: int = -1
) -> None:
    """A training: batches of keys dealt to workers; keys are written down, then the state, after each step.

    Args:
        ask: the keys of the samples that each worker has made of its part of a batch, the n-th of every n-th key.
    """
    keys = SampleKeys(PROMPTS, blend)
    if (folder / "state.json").exists():
        keys.load_state_dict(json.loads((folder / "state.json").read_text()))
    for step, batch in zip(range(steps), keys.batches(size), strict=False):
        answers = ask(batch)
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        workers = len(answers)
        with open(folder / "seen.txt", "a") as file:
            file.writelines(f"{answers[number % workers][number // workers]}\n" for number in range(len(batch)))
        (folder / "new.json").write_text(json.dumps(keys.state_dict()))
        (folder / "new.json").replace(folder / "state.json")
