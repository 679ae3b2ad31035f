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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

from energon_lite.errors import ConfigError, TopologyError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint, save_checkpoint
from energon_lite.trainer.optimizer.buckets import orthogonalize
from energon_lite.trainer.optimizer.config import OptimizerConfig, ParameterGroup
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.parallel.parameters import layout_of
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.foreign_nets import CONFIG, NETS, Found, make_net, run_steps, serial, train, unlike
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout, Run, assert_same, make_steps, train_on

pytestmark = pytest.mark.usefixtures("models")
STEPS, MICRO_BATCHES = 4, 4
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


@pytest.mark.parametrize("world", nightly_but({0, 2}, [1, 2, 4]))
def test_run_is_that_of_one_process(run_ranks: RunRanks, world: int) -> None:
    cases = [(name, net) for name in SETTINGS for net in (["gpt2"] if "muon" in name else NETS)]

    def job(rank: int) -> list[tuple[Found, set[str]]]:
        runs = []
        for name, net in cases:
            # Ranks begin with other weights, as a script without a seed does: the first rank's count.
            found, optimizer = train(make_net(net, seed=rank), build_mesh(), STEPS, MICRO_BATCHES, SETTINGS[name][0])
            kinds = {shard.name for shard in optimizer.shards() if "momentum_buffer" in shard.tensors}
            assert all(s.values.numel() == s.parameter.numel() for s in optimizer.shards() if s.name in kinds), "cut"
            runs.append((found, kinds))
        return runs

    for (name, net), runs in zip(cases, zip(*run_ranks(world, job), strict=True), strict=True):
        config, matrices = SETTINGS[name]
        expected = serial(make_net(net), STEPS, MICRO_BATCHES, config)
        assert name != "last" or max(expected[0]) > CONFIG.clip, "clipping was not tested"
        assert all(unlike(found, expected) <= 1e-9 for found, _ in runs), (name, net)
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


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong, word in [
        ({"groups": (ParameterGroup("*", algorithm="muon"),)}, "algorithms of their own under muon only"),
        ({"algorithm": "muon", "muon_scale": "big"}, "unknown muon_scale"),
    ]:
        with pytest.raises(ConfigError, match=word):
            OptimizerConfig(**wrong)  # type: ignore[arg-type]
    for group in ({"lr_scale": -1.0}, {"weight_decay": -0.1}, {"algorithm": "sgd"}):
        with pytest.raises(ConfigError):
            ParameterGroup("*", **group)


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


@pytest.mark.parametrize(("config", "worlds"), [(CONFIG, (1, 2)), (MUON, (4,))], ids=["adamw", "muon"])
def test_checkpoints_of_a_cut_model_are_read_by_a_whole_one(
    run_ranks: RunRanks, tmp_path: Path, config: OptimizerConfig, worlds: tuple[int, ...]
) -> None:
    def begin(rank: int) -> None:
        mesh = build_mesh(dp=2, tp=2)
        assert mesh.device_mesh is not None
        net = cut_llama(mesh.device_mesh["tp"])
        save_checkpoint(tmp_path, 2, net, train(net, mesh, 2, MICRO_BATCHES, config)[1], mesh, {})

    def go_on(rank: int) -> Found:
        mesh, net = build_mesh(), make_net("llama", seed=1)
        optimizer = OverlappedDistributedOptimizer(net, mesh, config)
        assert load_checkpoint(tmp_path / "step-00000002", net, mesh, optimizer)[0] == 2
        return whole((run_steps(net, optimizer, range(2, 4), MICRO_BATCHES), {}), net)

    run_ranks(4, begin)
    norms, weights = serial(make_net("llama"), 4, MICRO_BATCHES, config)
    for world in worlds:
        assert all(unlike(found, (norms[2:], weights)) <= 1e-9 for found in run_ranks(world, go_on))


def test_running_statistics_are_in_the_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    """So is a parameter without elements, which has no file."""

    def job(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        mesh, net, fresh = build_mesh(), make_net("resnet"), make_net("resnet", seed=1)
        for one in (net, fresh):
            one.none = nn.Parameter(torch.zeros(0, 3))
        _, optimizer = train(net, mesh, 2, MICRO_BATCHES)
        path = save_checkpoint(tmp_path, 2, net, optimizer, mesh, {})
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
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(tp=2), CONFIG)
    net().backward()
    optimizer.step(lr=0.1)


def moved_later(rank: int) -> None:
    """It would be trained no more, and nobody would see it."""
    net: Any = make_net("gru")
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)
    net.head.weight.data = net.head.weight.data.clone()
    run_steps(net, optimizer, range(1), 2)


def optimizer_of(net: nn.Module, mesh: Any = None) -> OverlappedDistributedOptimizer:
    return OverlappedDistributedOptimizer(net, mesh or build_mesh(), CONFIG)


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
