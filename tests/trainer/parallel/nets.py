"""Modules that know nothing of this library, and their runs: of one process with torch's own optimizer, and of ranks.

A micro-batch is a seed, of which a net makes data and a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from tests.trainer.parallel.plain_loop import PlainRun, plain_steps

VOCAB, LENGTH, WIDTH = 29, 8, 5
F32, F64 = torch.float32, torch.float64


class LanguageModel(nn.Module):
    """One of transformers' as it is, and its own loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, seed: int) -> torch.Tensor:
        words = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = self.model(input_ids=words, labels=words, use_cache=False).loss
        return loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LanguageModel(LlamaForCausalLM(LlamaConfig(**shape, **heads)))


def gpt2() -> nn.Module:
    """Tied embeddings, biases, and matrices that stand the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return LanguageModel(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB, **none)))


class Residual(nn.Module):
    def __init__(self, channels: int, more: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, more, 3, padding=1, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(more)
        self.conv2 = nn.Conv2d(more, more, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(more)
        self.downsample = nn.Sequential(nn.Conv2d(channels, more, 1, stride=2, bias=False), nn.BatchNorm2d(more))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """Running statistics, and weights whose memory is not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1, self.layer2 = Residual(4, 6), Residual(6, 8)
        self.fc = nn.Linear(8, 5)
        for p in self.parameters():
            p.data = p.data.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p.data

    def forward(self, seed: int) -> torch.Tensor:
        images = noise(seed, 4, 3, 8, 8, like=self.fc.weight)
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(images)))))
        return F.cross_entropy(self.fc(x.mean((2, 3))), torch.arange(4))


class Recurrent(nn.Module):
    """Its weights are also known by a flat list; one of its parameters is never used, one only at times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 6, sparse=True)
        self.gru = nn.GRU(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.rare, self.unused = nn.Linear(10, 10), nn.Linear(3, 3)
        self.head = nn.Linear(10, VOCAB)

    def forward(self, seed: int) -> torch.Tensor:
        words = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        hidden = self.gru(self.table(words))[0] * self.scale
        hidden = self.rare(hidden) if seed % 3 == 0 else hidden
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


class Scaled(nn.Module):
    """Its own parameter beside a child: not a leaf of the tree of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x * self.scale))


class Awkward(nn.Module):
    """Odd sizes, a tied table, a matrix used twice, parameters that are frozen, unused, rarely used, used from outside
    their module, and made in another order than they are used in. Of its micro-batches some have nothing, or nothing
    that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head_bias = nn.Parameter(torch.zeros(VOCAB))
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.last = nn.Linear(7, WIDTH)
        self.first = Scaled()
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rare, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        for p in self.parameters():
            p.data.copy_(0.4 * torch.randn(p.shape) + (p.dim() == 1))

    def forward(self, seed: int) -> torch.Tensor:
        rows = (4, 2, 5, 1, 0, 3)[seed % 6]
        if not rows:
            return torch.zeros((), requires_grad=True)
        words, labels = torch.randint(0, VOCAB, (2, rows), generator=torch.Generator().manual_seed(seed))
        x = self.twice(self.table(words))
        x = x + self.last(self.first(self.frozen(x)))
        if seed % 3 == 0:
            x = x + self.rare(x)
        x = self.norm(self.twice(x))
        losses = F.cross_entropy(F.linear(x, self.head.weight, self.head_bias), labels, reduction="none")
        return losses.sum() * (seed % 5 != 3)


class Autoencoder(nn.Module):
    """The decoder's weights are the encoder's, used outside of it; one parameter is used from outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(12, 9), nn.Linear(9, 4)])
        self.biases = nn.ParameterList([torch.zeros(9), torch.zeros(12)])
        self.holder = nn.Linear(4, 4, bias=False)

    def forward(self, seed: int) -> torch.Tensor:
        x = hidden = noise(seed, 6, 12, like=self.biases[0])
        for layer in self.encoder:
            hidden = torch.tanh(layer(hidden))
        hidden = hidden @ self.holder.weight
        for layer, bias in zip(reversed(self.encoder), self.biases, strict=True):
            assert isinstance(layer, nn.Linear)
            hidden = torch.tanh(F.linear(hidden, layer.weight.T, bias))
        return F.mse_loss(hidden, x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "resnet": ResNet,
    "gru": Recurrent,
    "awkward": Awkward,
    "autoencoder": Autoencoder,
}


def noise(seed: int, *shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like.dtype)


def make_net(name: str, seed: int = 0, dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name]().to(dtype).train()


#: Of the awkward net. Adam divides by the size of the gradient: where that is rounding noise, eps keeps noise from
#: becoming a step.
CONFIG = OptimizerConfig(weight_decay=0.1, eps=1e-6, clip=3.0, bucket_size=60)


def make(dtype: torch.dtype = F64, **changes: Any) -> tuple[Any, OverlappedDistributedOptimizer]:
    """The awkward net and its overlapped optimizer."""
    net = make_net("awkward", dtype=dtype)
    return net, OverlappedDistributedOptimizer(net, build_mesh(), dataclasses.replace(CONFIG, **changes))


def seeds_of(step: int, micro_batches: int) -> range:
    """The micro-batches of a step, over all ranks."""
    return range(step * micro_batches, (step + 1) * micro_batches)


def rate_of(step: int) -> float:
    return 0.01 / (1 + step / 20)


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, put together where they are cut."""
    named = net.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def serial(net: nn.Module, steps: int, micro_batches: int, config: OptimizerConfig) -> PlainRun:
    """The run of one process, with torch's optimizer."""

    def loss(seed: int) -> torch.Tensor:
        made: torch.Tensor = net(seed) / micro_batches
        return made

    made = [[partial(loss, seed) for seed in seeds_of(step, micro_batches)] for step in range(steps)]
    losses, norms = plain_steps(dict(net.named_parameters()), made, config, [*map(rate_of, range(steps))])
    return PlainRun(losses, norms, weights_of(net))


def train(net: nn.Module, optimizer: OverlappedDistributedOptimizer, steps: range, micro_batches: int) -> PlainRun:
    """This rank's part of the same run: the steps of these numbers, of so many micro-batches over all ranks."""
    losses, norms, mesh = [], [], optimizer.mesh
    for step in steps:
        mine = seeds_of(step, micro_batches)[mesh.rank("dp") :: mesh.dp]
        total = torch.zeros((), dtype=F64)
        optimizer.begin_step(len(mine))
        for seed in mine:
            loss = net(seed) / micro_batches
            loss.backward()
            total += loss.detach()
            optimizer.end_micro_batch()
        norms.append(optimizer.step(lr=rate_of(step)))
        losses.append(float(mesh.sum_over_data(total)) / mesh.cp)
    optimizer.wait_parameters()
    return PlainRun(losses, norms, weights_of(net))
