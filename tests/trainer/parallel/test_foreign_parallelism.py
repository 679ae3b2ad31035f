"""Modules that torch's own tensor parallelism has cut, torch's meshes, and what is refused about foreign modules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from energon_lite.errors import TopologyError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.parallel.parameters import layout_of
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.foreign_nets import CONFIG, Found, make_net, run_steps, serial, train, unlike
from tests.trainer.parallel.rank_processes import RunRanks

pytestmark = pytest.mark.usefixtures("models")
MICRO_BATCHES = 4


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


def whole(found: Found, net: nn.Module) -> Found:
    """The parameters put together."""
    made = {}
    for name, p in net.named_parameters():
        made[name] = p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach().clone()
    return found[0], made


@pytest.mark.parametrize(
    ("reduce", "algorithm"), nightly_but({1, 2}, [("last", "adamw"), ("every", "adamw"), ("last", "muon")])
)
def test_a_model_cut_by_torch_makes_the_same_run(run_ranks: RunRanks, reduce: str, algorithm: str) -> None:
    config = dataclasses.replace(CONFIG, reduce=reduce, bucket_size=500, algorithm=algorithm)

    def job(rank: int) -> tuple[Found, list[str]]:
        mesh = build_mesh(dp=2, tp=2)
        assert mesh.device_mesh is not None
        net = cut_llama(mesh.device_mesh["tp"])
        cut = [name for name, p in net.named_parameters() if layout_of(p).sharded_dim is not None]
        return whole(train(net, mesh, 4, MICRO_BATCHES, config)[0], net), cut

    expected = serial(make_net("llama"), 4, MICRO_BATCHES, config)
    for found, cut in run_ranks(4, job):
        assert len(cut) == 6 and unlike(found, expected) <= 1e-9


def test_checkpoints_of_a_cut_model_are_read_by_a_whole_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    steps = range(2, 4)

    def begin(rank: int) -> None:
        mesh = build_mesh(dp=2, tp=2)
        assert mesh.device_mesh is not None
        net = cut_llama(mesh.device_mesh["tp"])
        _, optimizer = train(net, mesh, 2, MICRO_BATCHES)
        save_checkpoint(tmp_path, 2, net, optimizer, mesh, {})

    def go_on(rank: int) -> Found:
        mesh, net = build_mesh(), make_net("llama", seed=1)
        optimizer = OverlappedDistributedOptimizer(net, mesh, CONFIG)
        path = latest_checkpoint(tmp_path)
        assert path is not None and load_checkpoint(path, net, mesh, optimizer)[0] == 2
        norms = run_steps(net, optimizer, steps, MICRO_BATCHES)
        return whole((norms, {}), net)

    run_ranks(4, begin)
    norms, weights = serial(make_net("llama"), 4, MICRO_BATCHES)
    for world in (1, 2):
        assert all(unlike(found, (norms[2:], weights)) <= 1e-9 for found in run_ranks(world, go_on))


def test_running_statistics_are_in_the_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    def job(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        mesh, net = build_mesh(), make_net("resnet")
        _, optimizer = train(net, mesh, 2, MICRO_BATCHES)
        path = save_checkpoint(tmp_path, 2, net, optimizer, mesh, {})
        fresh = make_net("resnet", seed=1)
        load_checkpoint(path, fresh, mesh)
        return net.state_dict(), fresh.state_dict()

    saved, read = run_ranks(1, job)[0]
    assert saved["bn1.num_batches_tracked"] == 8
    torch.testing.assert_close(read, saved, rtol=0, atol=0)


@pytest.mark.parametrize("names", [None, ("dp",), ("dp", "cp")])
def test_torchs_device_mesh_will_do(run_ranks: RunRanks, names: tuple[str, ...] | None) -> None:
    """Context-parallel ranks get the same micro-batches here, so each gradient counts twice."""

    def job(rank: int) -> tuple[Found, int]:
        shape = (2, 2) if names == ("dp", "cp") else (4,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        net = make_net("autoencoder")
        optimizer = OverlappedDistributedOptimizer(net, mesh, CONFIG)
        norms = run_steps(net, optimizer, range(2), 4 * optimizer.mesh.cp)
        return whole((norms, {}), net), optimizer.mesh.cp

    for found, cp in run_ranks(4, job):
        expected = serial(make_net("autoencoder"), 2, 4 * cp)
        if cp == 1:
            assert unlike(found, expected) <= 1e-9
        assert found[0][0] == pytest.approx(cp * expected[0][0], rel=1e-12)


def refused(run_ranks: RunRanks, world: int, job: Any) -> str:
    (message,) = set(errors_of(run_ranks, world, (UsageError, TopologyError), job))
    return message


def test_other_axes_of_a_device_mesh_are_refused(run_ranks: RunRanks) -> None:
    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicas",))
        OverlappedDistributedOptimizer(make_net("autoencoder"), mesh, CONFIG)

    assert "name its axes pp, dp, cp, tp" in refused(run_ranks, 2, job)


def test_a_cut_over_ranks_that_are_not_tensor_parallel_is_refused(run_ranks: RunRanks) -> None:
    def job(rank: int) -> None:
        net = cut_llama(init_device_mesh("cpu", (2,)))
        OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)

    assert "is cut over 2 ranks that are not the mesh's 1" in refused(run_ranks, 2, job)


class HandMade(nn.Module):
    """The first matrix of a feed-forward layer, cut by somebody's own code that tells nobody."""

    def __init__(self, rank: int, weight: bool):
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.full((3, 4), 1.0 + rank if weight else 1.0, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return ((self.weight.sum(1) + self.bias) * (1.0 + self.rank)).sum()


def test_parts_that_are_taken_for_copies_are_found(run_ranks: RunRanks) -> None:
    """By their values; or, if they all begin as zeros or ones, by the gradients of the first step."""

    def at_once(rank: int) -> None:
        OverlappedDistributedOptimizer(HandMade(rank, weight=True), build_mesh(tp=2), CONFIG)

    def first_step(rank: int) -> None:
        net = HandMade(rank, weight=False)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(tp=2), CONFIG)
        net().backward()
        optimizer.step(lr=0.1)

    assert "values differ among tensor-parallel ranks: weight\n" in refused(run_ranks, 2, at_once)
    assert "gradients differ among tensor-parallel ranks: weight, bias\n" in refused(run_ranks, 2, first_step)


def test_parameters_that_are_moved_later_are_noticed(run_ranks: RunRanks) -> None:
    """They would be trained no more, and nobody would see it."""

    def job(rank: int) -> None:
        net: Any = make_net("gru")
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)
        net.head.weight.data = net.head.weight.data.clone()
        run_steps(net, optimizer, range(1), 2)

    assert "head.weight was moved after the optimizer was made" in refused(run_ranks, 1, job)


def test_what_cannot_be_trained_is_refused(run_ranks: RunRanks) -> None:
    def job(rank: int) -> None:
        OverlappedDistributedOptimizer(nn.Linear(2, 2, device="meta"), build_mesh(), CONFIG)

    assert "weight is torch.float32 on meta" in refused(run_ranks, 1, job)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("when", nightly_but({0}, ["before", "after", "inside"]))
def test_a_compiled_module_makes_the_same_run(run_ranks: RunRanks, when: str) -> None:
    def job(rank: int) -> tuple[Found, int]:
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        inner = make_net("autoencoder")
        net: Any = torch.compile(inner, backend=counter) if when == "before" else inner
        if when == "inside":
            inner.compile(backend=counter)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)
        net = torch.compile(inner, backend=counter) if when == "after" else net
        norms = run_steps(net, optimizer, range(3), 2)
        return whole((norms, {}), inner), counter.frame_count

    for found, graphs in run_ranks(2, job):
        assert unlike(found, serial(make_net("autoencoder"), 3, 2)) <= 1e-9
        assert graphs <= 3, "waiting for values cuts no graph in pieces"
