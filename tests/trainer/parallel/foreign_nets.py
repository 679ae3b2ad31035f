"""Modules that know nothing of this library, and the run that one process with torch's AdamW makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from tests.trainer.parallel.plain_loop import plain_steps

CONFIG = OptimizerConfig(clip=0.1, bucket_size=2000, eps=1e-8)
VOCAB, LENGTH, LR = 29, 8, 0.01


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
    "autoencoder": Autoencoder,
}


def noise(seed: int, *shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like.dtype)


def make_net(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name]().to(dtype).train()


def seeds_of(step: int, micro_batches: int) -> range:
    """The micro-batches of a step, over all ranks."""
    return range(step * micro_batches, (step + 1) * micro_batches)


Found = tuple[list[float], dict[str, torch.Tensor]]


def serial(net: nn.Module, steps: int, micro_batches: int, config: OptimizerConfig = CONFIG) -> Found:
    """Norms, and the parameters at the end."""

    def loss(seed: int) -> torch.Tensor:
        made: torch.Tensor = net(seed) / micro_batches
        return made

    made = [[partial(loss, seed) for seed in seeds_of(step, micro_batches)] for step in range(steps)]
    _, norms = plain_steps(dict(net.named_parameters()), made, config, [LR] * steps)
    return norms, {name: p.detach().clone() for name, p in net.named_parameters()}


def train(
    net: nn.Module, mesh: ParallelMesh, steps: int, micro_batches: int, config: OptimizerConfig = CONFIG
) -> tuple[Found, OverlappedDistributedOptimizer]:
    """This rank's part of the same run."""
    optimizer = OverlappedDistributedOptimizer(net, mesh, config)
    norms = run_steps(net, optimizer, range(steps), micro_batches)
    return (norms, {name: p.detach().clone() for name, p in net.named_parameters()}), optimizer


def run_steps(
    net: nn.Module, optimizer: OverlappedDistributedOptimizer, steps: range, micro_batches: int
) -> list[float]:
    norms, mesh = [], optimizer.mesh
    for step in steps:
        mine = seeds_of(step, micro_batches)[mesh.rank("dp") :: mesh.dp]
        optimizer.begin_step(len(mine))
        for seed in mine:
            (net(seed) / micro_batches).backward()
            optimizer.end_micro_batch()
        norms.append(optimizer.step(lr=LR))
    optimizer.wait_parameters()
    return norms


def unlike(found: Found, expected: Found) -> float:
    """The largest difference of norms and parameters."""
    norms = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    return max(norms, max(float((found[1][name] - p).abs().max()) for name, p in expected[1].items()))
