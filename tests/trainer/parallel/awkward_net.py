"""A small net with every kind of parameter that an optimizer may stumble over, and the run one process makes of it.

The run uses torch's own AdamW or SGD, and nothing of the trainer's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import ParameterLayout
from energon_lite.trainer.training.config import OptimizerConfig
from tests.trainer.parallel.plain_loop import PlainRun, plain_steps

WORDS, WIDTH = 13, 5
F32, F64 = torch.float32, torch.float64
# Adam divides by the size of the gradient: where that is rounding noise, eps keeps noise from becoming a step.
CONFIG = OptimizerConfig(weight_decay=0.1, eps=1e-6, clip=2.0, bucket_size=60)


class Scaled(nn.Module):
    """Its own parameter beside a child: not a leaf of the tree of modules."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=dtype))
        self.inner = nn.Linear(WIDTH, 7, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x * self.scale))


class AwkwardNet(nn.Module):
    """Odd sizes, a tied table, a matrix used twice, parameters that are frozen, unused, rarely used, used from outside
    their module, and made in another order than they are used in."""

    def __init__(self, dtype: torch.dtype = torch.float32, sum_over: tuple[str, ...] = ()):
        super().__init__()
        self.head_bias = nn.Parameter(torch.zeros(WORDS, dtype=dtype))
        self.table = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        self.last = nn.Linear(7, WIDTH, dtype=dtype)
        self.first = Scaled(dtype)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.rare = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = nn.Linear(3, 3, dtype=dtype)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, WORDS, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data.copy_(0.4 * drawn + (p.dim() == 1))
            p.parallel_layout = ParameterLayout(tuple(p.shape), sum_over=sum_over)  # type: ignore[attr-defined]

    def forward(self, words: torch.Tensor, rare: bool = False) -> torch.Tensor:
        x = self.twice(self.table(words))
        x = x + self.last(self.first(self.frozen(x)))
        if rare:
            x = x + self.rare(x)
        x = self.norm(self.twice(x))
        return F.linear(x, self.head.weight, self.head_bias)

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        losses = F.cross_entropy(self(batch.words, batch.rare), batch.labels, reduction="none")
        return (losses * batch.mask.to(losses.dtype)).sum()


def config(**changes: Any) -> OptimizerConfig:
    return dataclasses.replace(CONFIG, **changes)


def make(dtype: torch.dtype = F64, *, mesh: ParallelMesh | None = None, **changes: Any) -> Any:
    """A net, its overlapped optimizer and the mesh."""
    mesh = mesh or build_mesh()
    net = AwkwardNet(dtype)
    return net, OverlappedDistributedOptimizer(net, mesh, config(**changes)), mesh


@dataclass(frozen=True)
class Batch:
    words: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    rare: bool


def make_steps(steps: int, micro_batches: int, seed: int = 3) -> list[list[Batch]]:
    """Micro-batches of each step, over all ranks together: of unequal sizes, some without a label that counts."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        batches = []
        for number in range(micro_batches):
            rows = int(torch.randint(0, 6, (), generator=generator)) if number else 4
            words, labels = torch.randint(0, WORDS, (2, rows), generator=generator)
            mask = torch.randint(0, 2, (rows,), generator=generator) * (number % 5 != 3)
            mask[:2] = number == 0 or mask[:2]
            batches.append(Batch(words, labels, mask, rare=(step + number) % 3 == 0))
        made.append(batches)
    return made


def tokens_of(batches: list[Batch]) -> float:
    return max(1.0, float(sum(batch.mask.sum() for batch in batches)))


def rates(steps: int) -> list[float]:
    return [0.02 * (1 - step / (2 * steps)) for step in range(steps)]


def serial_run(steps: list[list[Batch]], dtype: torch.dtype, config: OptimizerConfig) -> PlainRun:
    """The run of one process with torch's own fused optimizer."""
    net = AwkwardNet(dtype)

    def loss(batch: Batch, tokens: float) -> torch.Tensor:
        return net.loss_sum(batch) / tokens

    made = [[partial(loss, batch, tokens_of(batches)) for batch in batches] for batches in steps]
    losses, norms = plain_steps(dict(net.named_parameters()), made, config, rates(len(steps)))
    return PlainRun(losses, norms, {name: p.detach().clone() for name, p in net.named_parameters()})


def train(
    net: AwkwardNet,
    optimizer: OverlappedDistributedOptimizer,
    mesh: ParallelMesh,
    steps: list[list[Batch]],
    spread: tuple[str, ...] = ("dp",),
) -> PlainRun:
    """This rank's part of the same run, with micro-batches spread over some axes of the mesh."""
    ranks, rank = 1, 0
    for axis in spread:
        ranks, rank = ranks * mesh.size(axis), rank * mesh.size(axis) + mesh.rank(axis)
    losses, norms = [], []
    for batches, lr in zip(steps, rates(len(steps)), strict=True):
        tokens = tokens_of(batches)
        mine = batches[rank::ranks]
        total = torch.zeros((), dtype=torch.float64)
        optimizer.begin_step(len(mine))
        for batch in mine:
            if len(batch.words):
                loss = net.loss_sum(batch) / tokens
                loss.backward()
                total += loss.detach()
            optimizer.end_micro_batch()
        for axis in spread:
            if (group := mesh.group(axis)) is not None:
                dist.all_reduce(total, group=group)
        losses.append(float(total))
        norms.append(optimizer.step(lr=lr))
    return PlainRun(losses, norms, {name: value.clone() for name, value in net.state_dict(keep_vars=False).items()})


def unlike(one: PlainRun, other: PlainRun) -> dict[str, float]:
    """The largest differences of losses (absolute), norms (relative) and parameters (absolute)."""
    return {
        "losses": max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)),
        "norms": max(abs(a - b) / b for a, b in zip(one.norms, other.norms, strict=True)),
        "parameters": max(float((one.weights[name] - w).abs().max()) for name, w in other.weights.items()),
    }
