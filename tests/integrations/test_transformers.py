"""Hugging Face's own Trainer with the mixin: what is seen after a kill, on other processes, and in evaluation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from framework_ranks import log_line, logged, run_processes
from transformers import Trainer, TrainingArguments

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset, stateless
from energon_lite.hooks import TaskEncoder
from energon_lite.integrations.transformers import EnergonTrainerMixin

SAMPLES = 26


class Lengths(TaskEncoder):
    """A sample is its number, as the one feature there is."""

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        number = int(sample.__key__.rpartition("-")[2])
        return {"number": torch.tensor(float(number)), "labels": torch.tensor(number), "unused": "text"}


class Model(nn.Module):
    """Says for each sample which one it was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, number: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * number / 100).mean(), "logits": number[:, None] * self.weight.detach().sign()}


class Seen(EnergonTrainerMixin, Trainer):
    """Writes down which samples each step saw."""

    seen_file: Path

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        assert set(inputs) == {"number", "labels"}
        log_line(
            self.seen_file, step=self.state.global_step, rank=self.args.process_index, numbers=inputs["labels"].tolist()
        )
        return super().training_step(model, inputs, *args, **kwargs)


def train(leaf: Path, folder: Path, tag: str, *, repeat: bool = True, evaluate: bool = False, **given: Any) -> Any:
    given = {"max_steps": 12, "save_steps": 2, "per_device_train_batch_size": 2} | given
    resume = given.pop("resume", None)
    arguments = TrainingArguments(
        str(folder / "out"), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1000, **given
    )
    config = WorkerConfig.default_worker_config(num_workers=0)
    options = {"worker_config": config, "task_encoder": Lengths()}
    data = get_train_dataset(
        leaf, batch_size=2, shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=repeat, **options
    )
    val = get_val_dataset(leaf, batch_size=arguments.per_device_eval_batch_size, **options) if evaluate else None
    trainer = Seen(Model(), arguments, train_dataset=get_savable_loader(data), eval_dataset=val)
    trainer.seen_file = folder / f"{tag}-{arguments.process_index}"
    trainer.train(resume_from_checkpoint=resume)
    return [trainer.state.global_step, trainer.state.epoch, trainer.state.log_history]


def micro_batches(folder: Path, tag: str, first: int = 0) -> list[list[int]]:
    """Micro-batches in the order of the run: of each step those of all ranks, accumulated ones one after the other."""
    lines = [line for line in logged(folder, f"{tag}-*") if line["step"] >= first]
    numbered: dict[tuple[int, int], int] = {}
    ordered = []
    for line in lines:
        place = (line["step"], line["rank"])
        numbered[place] = numbered.get(place, -1) + 1
        ordered.append((line["step"], numbered[place], line["rank"], line["numbers"]))
    return [numbers for *_, numbers in sorted(ordered, key=lambda line: line[:3])]


def test_x(tmp_path, leaf_of):
    leaf = leaf_of(SAMPLES, "hf")
    print(run_processes(1, partial(train, leaf, tmp_path, "one"), tmp_path))
    print(micro_batches(tmp_path, "one"))
    (tmp_path / "b").mkdir()
    a = run_processes(
        2, partial(train, leaf, tmp_path / "b", "two", max_steps=6, gradient_accumulation_steps=2), tmp_path
    )
    print(a)
    print(micro_batches(tmp_path / "b", "two"))
    a = run_processes(
        3,
        partial(train, leaf, tmp_path / "b", "three", max_steps=10, gradient_accumulation_steps=2, resume=True),
        tmp_path,
    )
    print(a)
    print(micro_batches(tmp_path / "b", "three"))
