"""The bytes that are allocated, one by one: a formula says how many, and the first step needs no more than others."""

from __future__ import annotations

import itertools
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks

WIDTH = 64


class Shuffled(nn.Module):
    """Layers that are used in another order than they are made in."""

    def __init__(self, order: str, dtype: torch.dtype, layers: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)])
        self.order = list(range(layers))
        if order == "reversed":
            self.order.reverse()
        elif order == "swapped":
            self.order = [number ^ 1 for number in self.order]
        elif order == "shuffled":
            random.Random(0).shuffle(self.order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = x + torch.tanh(self.layers[number](x))
        return x


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, from when they are made until nothing has them any more.

    Not those that gloo makes for itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                size = tensor.untyped_storage().nbytes()
                self._seen.add(key)
                self.held += size
                self.peak = max(self.peak, self.held)
                weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.held -= size

    def part(self) -> int:
        """The peak since the last call."""
        found, self.peak = self.peak, self.held
        return found


def run(
    order: str, dtype: torch.dtype, config: OptimizerConfig, layers: int = 32
) -> tuple[list[int], OverlappedDistributedOptimizer]:
    """Peaks of making the optimizer and of each step."""
    mesh = build_mesh()
    x = torch.ones(2, WIDTH, dtype=dtype)
    with Allocated() as allocated:
        net = Shuffled(order, dtype, layers)
        optimizer = OverlappedDistributedOptimizer(net, mesh, config)
        peaks = [allocated.part()]
        for _ in range(4):
            optimizer.begin_step(1)
            net(x).sum().backward()
            optimizer.end_micro_batch()
            optimizer.step(lr=0.01)
            optimizer.wait_parameters()
            peaks.append(allocated.part())
    return peaks, optimizer


@pytest.mark.parametrize(
    ("world", "dtype"), nightly_but({1, 2}, itertools.product([1, 2, 4], [torch.bfloat16, torch.float32])), ids=str
)
def test_no_peak_is_above_that_of_a_later_step(run_ranks: RunRanks, world: int, dtype: torch.dtype) -> None:
    # Under "every", gradients that come in a wholly other order are held until it is known.
    cases = [("reversed", "last"), ("shuffled", "last"), ("swapped", "last"), ("swapped", "every")]

    def job(rank: int) -> list[list[int]]:
        return [run(order, dtype, OptimizerConfig(reduce=reduce, bucket_size=6000))[0] for order, reduce in cases]

    for results in run_ranks(world, job):
        for peaks, case in zip(results, cases, strict=True):
            assert max(peaks[:2]) <= 1.1 * peaks[-1], case


@pytest.mark.parametrize("world", nightly_but({1}, [1, 2, 4]))
def test_allocated_bytes_are_those_of_the_formula(run_ranks: RunRanks, world: int) -> None:
    """For each parameter in bfloat16, padding included; and the activations and gradients of a layer."""

    def job(rank: int) -> list[tuple[int, float]]:
        measured: list[tuple[int, float]] = []
        for algorithm, state, reduce in (("adamw", 12, "last"), ("adamw", 12, "every"), ("muon", 8, "last")):
            config = OptimizerConfig(algorithm=algorithm, bucket_size=6000, reduce=reduce)
            peaks, optimizer = run("forward", torch.bfloat16, config, layers=80)
            padded = sum(bucket.values.numel() for bucket in optimizer._queue)
            pool = sum(memory.numel() for free in optimizer._free.values() for memory in free)
            grads = 4 * padded if world == 1 or reduce == "last" else 4 * padded / world + 4 * pool
            measured.append((peaks[-1], 2 * padded + grads + padded * state / world))
        return measured

    for measured in run_ranks(world, job):
        for most, formula in measured:
            assert most == pytest.approx(formula, rel=0.05)
