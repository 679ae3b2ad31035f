"""One rank's part of a training job, to be saved and read in tests of checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint, save_checkpoint
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.shards import whole_tensors
from energon_lite.trainer.training.step import train_step
from tests.trainer.parallel.test_parity import BASE, OPTIMIZER, Layout, gathered, make_steps, own

STATE = {"loader": {"position": 17, "leaves": ["a", "ß"]}, "config": {"lr": 0.1}}


class Part:
    """The training job of one rank: model, optimizer, and steps on the micro-batches of its place."""

    def __init__(self, layout: Layout, *, seed: int = 5, dtype: str = "float64", bucket_size: int = 1500, **shape: Any):
        self.mesh: ParallelMesh = layout.mesh()
        self.model = LlamaModel(dataclasses.replace(BASE, dtype=dtype, **shape), self.mesh, seed=seed)
        # Small buckets, so that slices begin and end inside of rows.
        settings = dataclasses.replace(OPTIMIZER, bucket_size=bucket_size)
        self.optimizer = OverlappedDistributedOptimizer(self.model, self.mesh, settings)

    def train(self, first: int, last: int) -> list[tuple[float, float]]:
        """Losses and gradient norms of steps ``first..last-1``."""
        results = []
        for micro_batches in make_steps()[first:last]:
            mine = own(micro_batches, self.mesh)
            results.append(train_step(self.model, self.optimizer, mine, self.mesh, lr=1e-2))
        return [(result.loss, result.grad_norm) for result in results]

    def save(self, root: Path | str, step: int, keep: int = 2) -> Any:
        return save_checkpoint(root, step, self.model, self.optimizer, self.mesh, STATE, keep=keep)

    def load(self, path: Path | str) -> tuple[int, dict[str, Any]]:
        return load_checkpoint(path, self.model, self.mesh, self.optimizer)

    def content(self) -> dict[str, torch.Tensor]:
        """All parameters and moments, whole."""
        self.optimizer.wait_parameters()
        found = gathered(self.model, self.mesh)
        parts = []
        for shard in self.optimizer.shards():
            for kind, tensor in whole_tensors(shard, self.mesh).items():
                name = f"{shard.name}.{kind}"
                parts += [(name, tensor.shape, box, tensor.read(box).clone()) for box in tensor.boxes]
        for name, shape, box, part in itertools.chain.from_iterable(self.of_all_ranks(parts)):
            whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
            whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] = part
        return found

    def of_all_ranks(self, value: Any) -> list[Any]:
        gathered: list[Any] = [value] * self.mesh.world_size
        if self.mesh.world_size > 1:
            dist.all_gather_object(gathered, value)
        return gathered


def die_before_publishing() -> None:
    """Let this (forked) process be killed when it has written a checkpoint that nobody knows yet."""
    CheckpointFiles.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
