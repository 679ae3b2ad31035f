"""Modules that nobody here wrote, on any ranks, whole or cut by torch's own tensor parallelism: the run of one process
with torch's AdamW, or with Muon on whole matrices; and what is refused about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from energon_lite.errors import TopologyError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint, save_checkpoint
from energon_lite.trainer.optimizer.buckets import orthogonalize
from energon_lite.trainer.optimizer.config import OptimizerConfig, ParameterGroup
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.parallel.parameters import layout_of
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.nets import NETS, make_net, serial, train, weights_of
from tests.trainer.parallel.plain_loop import PlainRun
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout, Run, assert_same, make_steps, train_on

pytestmark = pytest.mark.usefixtures("models")
STEPS, MICRO_BATCHES = 4, 4
CONFIG = OptimizerConfig(clip=0.1, bucket_size=2000, eps=1e-8)
GROUPS = (ParameterGroup("*1*", weight_decay=0.3, lr_scale=0.5), ParameterGroup("*w*", lr_scale=2.0))
MUON = dataclasses.replace(CONFIG, algorithm="muon", momentum=0.95, bucket_size=1500)
MUON_GROUPS = (ParameterGroup("*attn*", lr_scale=0.5, weight_decay=0.0), ParameterGroup("*mlp*", algorithm="adamw"))
MUON_EVERY = dataclasses.replace(MUON, reduce="every", bucket_size=300, muon_scale="spectral", groups=MUON_GROUPS)
#: Settings of runs, and the matrices of GPT-2 that Muon updates in each: attention and mlp, of two layers.
SETTINGS = {
    "last": (dataclasses.replace(CONFIG, bucket_size=700), 0),
    "every": (dataclasses.replace(CONFIG, reduce="every", bucket_size=100, groups=GROUPS), 0),
    "muon": (MUON, 8),
    "muon, every": (MUON_EVERY, 4),
}


def optimizer_of(net: nn.Module, mesh: Any = None, config: OptimizerConfig = CONFIG) -> OverlappedDistributedOptimizer:
    return OverlappedDistributedOptimizer(net, mesh or build_mesh(), config)


@pytest.mark.parametrize("world", nightly_but({0, 2}, [1, 2, 4]))
def test_run_is_that_of_one_process(run_ranks: RunRanks, world: int) -> None:
    others = [net for net in NETS if net != "awkward"]  # which has tests of its own
    cases = [(name, net) for name in SETTINGS for net in (["gpt2"] if "muon" in name else others)]

    def job(rank: int) -> list[tuple[PlainRun, set[str]]]:
        runs = []
        for name, kind in cases:
            # Ranks begin with other weights, as a script without a seed does: the first rank's count.
            net = make_net(kind, seed=rank)
            optimizer = optimizer_of(net, config=SETTINGS[name][0])
            found = train(net, optimizer, range(STEPS), MICRO_BATCHES)
            kinds = {shard.name for shard in optimizer.shards() if "momentum_buffer" in shard.tensors}
            assert all(s.values.numel() == s.parameter.numel() for s in optimizer.shards() if s.name in kinds), "cut"
            runs.append((found, kinds))
        return runs

    for (name, net), runs in zip(cases, zip(*run_ranks(world, job), strict=True), strict=True):
        config, matrices = SETTINGS[name]
        expected = serial(make_net(net), STEPS, MICRO_BATCHES, config)
        assert name != "last" or max(expected.norms) > CONFIG.clip, "clipping was not tested"
        assert_same([found for found, _ in runs], expected, 1e-10)
        assert len(set.union(*(kinds for _, kinds in runs))) == matrices
        assert sum(len(kinds) for _, kinds in runs) == matrices, "each on one rank"


# -- Muon --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 5), (3, 17), (40, 4), (1, 6)])
def test_singular_values_become_nearly_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonalize(matrix) @ v.T
    values = inside.diagonal()
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    torch.testing.assert_close(inside, torch.diag(values))
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("layout", nightly_but({1}, [Layout(tp=2, sp=True), Layout(pp=2, tp=2, dp=2)]), ids=str)
def test_runs_are_the_same_on_any_layout(run_ranks: RunRanks, layout: Layout) -> None:
    config = dataclasses.replace(BASE, tie_embeddings=True)
    settings = OptimizerConfig(algorithm="muon", bucket_size=3000)

    def run(layout: Layout) -> list[Run]:
        return run_ranks(layout.world, lambda rank: train_on(config, make_steps()[:4], layout, settings=settings))

    alone = run(Layout())[0]
    assert_same(run(layout), alone, 1e-9)


# -- modules that torch has cut, and torch's meshes --------------------------------------------------------------------


def cut_llama(tp_mesh: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """transformers' Llama, its feed-forward layers cut by torch; the norm before them sees a part of the sequence."""
    net: Any = make_net("llama", dtype=dtype)
    for layer in net.model.model.layers:
        cut: Any = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
        norm = PrepareModuleInput(**cut, use_local_output=False)
        for style in (norm, SequenceParallel()):
            parallelize_module(layer.post_attention_layernorm, tp_mesh, style)
        plan = {
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, tp_mesh, plan)
    whole_net: nn.Module = net
    return whole_net


@pytest.mark.parametrize(
    ("reduce", "algorithm"), nightly_but({1, 2}, [("last", "adamw"), ("every", "adamw"), ("last", "muon")])
)
def test_a_model_cut_by_torch_makes_the_same_run(run_ranks: RunRanks, reduce: str, algorithm: str) -> None:
    config = dataclasses.replace(CONFIG, reduce=reduce, bucket_size=500, algorithm=algorithm)

    def job(rank: int) -> tuple[PlainRun, int]:
        mesh = build_mesh(dp=2, tp=2)
        assert mesh.device_mesh is not None
        net = cut_llama(mesh.device_mesh["tp"])
        cut = sum(layout_of(p).sharded_dim is not None for p in net.parameters())
        return train(net, optimizer_of(net, mesh, config), range(4), MICRO_BATCHES), cut

    runs, cut = zip(*run_ranks(4, job), strict=True)
    assert cut == (6,) * 4
    assert_same(runs, serial(make_net("llama"), 4, MICRO_BATCHES, config), 1e-10)


@pytest.mark.parametrize(("config", "worlds"), [(CONFIG, (1, 2)), (MUON, (4,))], ids=["adamw", "muon"])
def test_checkpoints_of_a_cut_model_are_read_by_a_whole_one(
    run_ranks: RunRanks, tmp_path: Path, config: OptimizerConfig, worlds: tuple[int, ...]
) -> None:
    def begin(rank: int) -> None:
        mesh = build_mesh(dp=2, tp=2)
        assert mesh.device_mesh is not None
        net = cut_llama(mesh.device_mesh["tp"])
        optimizer = optimizer_of(net, mesh, config)
        train(net, optimizer, range(2), MICRO_BATCHES)
        save_checkpoint(tmp_path, 2, net, optimizer, mesh, {})

    def go_on(rank: int) -> PlainRun:
        mesh, net = build_mesh(), make_net("llama", seed=1)
        optimizer = optimizer_of(net, mesh, config)
        assert load_checkpoint(tmp_path / "step-00000002", net, mesh, optimizer)[0] == 2
        return train(net, optimizer, range(2, 4), MICRO_BATCHES)

    run_ranks(4, begin)
    run = serial(make_net("llama"), 4, MICRO_BATCHES, config)
    for world in worlds:
        assert_same(run_ranks(world, go_on), PlainRun(run.losses[2:], run.norms[2:], run.weights), 1e-10)


def test_running_statistics_are_in_the_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    """So is a parameter without elements, which has no file."""

    def job(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        mesh, net, fresh = build_mesh(), make_net("resnet"), make_net("resnet", seed=1)
        for one in (net, fresh):
            one.none = nn.Parameter(torch.zeros(0, 3))
        optimizer = optimizer_of(net, mesh)
        train(net, optimizer, range(2), MICRO_BATCHES)
        path = save_checkpoint(tmp_path, 2, net, optimizer, mesh, {})
        load_checkpoint(path, fresh, mesh)
        return net.state_dict(), fresh.state_dict()

    saved, read = run_ranks(1, job)[0]
    assert saved["bn1.num_batches_tracked"] == 8
    torch.testing.assert_close(read, saved, rtol=0, atol=0)


@pytest.mark.parametrize("names", [None, ("dp",), ("dp", "cp")])
def test_torchs_device_mesh_will_do(run_ranks: RunRanks, names: tuple[str, ...] | None) -> None:
    """Context-parallel ranks get the same micro-batches here, so each gradient counts twice."""

    def job(rank: int) -> tuple[PlainRun, int]:
        shape = (2, 2) if names == ("dp", "cp") else (4,)
        net = make_net("autoencoder")
        optimizer = optimizer_of(net, init_device_mesh("cpu", shape, mesh_dim_names=names))
        return train(net, optimizer, range(2), 4 * optimizer.mesh.cp), optimizer.mesh.cp

    for found, cp in run_ranks(4, job):
        expected = serial(make_net("autoencoder"), 2, 4 * cp, CONFIG)
        if cp == 1:
            assert_same([found], expected, 1e-10)
        assert found.norms[0] == pytest.approx(cp * expected.norms[0], rel=1e-12)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("when", nightly_but({0}, ["before", "after", "inside"]))
def test_a_compiled_module_makes_the_same_run(run_ranks: RunRanks, when: str) -> None:
    def job(rank: int) -> tuple[PlainRun, int]:
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        inner = make_net("autoencoder")
        net: Any = torch.compile(inner, backend=counter) if when == "before" else inner
        if when == "inside":
            inner.compile(backend=counter)
        optimizer = optimizer_of(net)
        run = train(torch.compile(inner, backend=counter) if when == "after" else net, optimizer, range(3), 2)
        return dataclasses.replace(run, weights=weights_of(inner)), counter.frame_count

    runs, graphs = zip(*run_ranks(2, job), strict=True)
    assert_same(runs, serial(make_net("autoencoder"), 3, 2, CONFIG), 1e-10)
    assert max(graphs) <= 3, "waiting for values cuts no graph in pieces"


# -- what is refused ---------------------------------------------------------------------------------------------------


class HandMade(nn.Module):
    """The first matrix of a feed-forward layer, cut by somebody's own code that tells nobody."""

    def __init__(self, rank: int, weight: bool):
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.full((3, 4), 1.0 + rank if weight else 1.0, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return ((self.weight.sum(1) + self.bias) * (1.0 + self.rank)).sum()


def first_step(rank: int) -> None:
    net = HandMade(rank, weight=False)
    optimizer = optimizer_of(net, build_mesh(tp=2))
    net().backward()
    optimizer.step(lr=0.1)


def moved_later(rank: int) -> None:
    """It would be trained no more, and nobody would see it."""
    net: Any = make_net("gru")
    optimizer = optimizer_of(net)
    net.head.weight.data = net.head.weight.data.clone()
    train(net, optimizer, range(1), 2)


#: Ranks, what they do, and what all of them are told. Parts that are taken for copies are found by their values or, if
#: they all begin as zeros or ones, by the gradients of the first step.
REFUSED: dict[str, tuple[int, Callable[[int], object], str]] = {
    "other axes": (
        2,
        lambda rank: optimizer_of(make_net("autoencoder"), init_device_mesh("cpu", (2,), mesh_dim_names=("replicas",))),
        "name its axes pp, dp, cp, tp",
    ),
    "cut over others": (
        2,
        lambda rank: optimizer_of(cut_llama(init_device_mesh("cpu", (2,)))),
        "is cut over 2 ranks that are not the mesh's 1",
    ),
    "other values": (
        2,
        lambda rank: optimizer_of(HandMade(rank, weight=True), build_mesh(tp=2)),
        "values differ among tensor-parallel ranks: weight\n",
    ),
    "other gradients": (2, first_step, "gradients differ among tensor-parallel ranks: weight, bias\n"),
    "moved later": (1, moved_later, "head.weight was moved after the optimizer was made"),
    "meta": (1, lambda rank: optimizer_of(nn.Linear(2, 2, device="meta")), "weight is torch.float32 on meta"),
}


@pytest.mark.parametrize(("world", "job", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_trained_wrongly_is_refused(
    run_ranks: RunRanks, world: int, job: Callable[[int], object], words: str
) -> None:
    (message,) = set(errors_of(run_ranks, world, (UsageError, TopologyError), job))
    assert words in message
