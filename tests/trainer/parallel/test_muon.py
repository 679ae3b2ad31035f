"""Muon on whole matrices, wherever they are: the run of one process that knows nothing of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from energon_lite.errors import ConfigError
from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint, save_checkpoint
from energon_lite.trainer.optimizer.buckets import orthogonalize
from energon_lite.trainer.optimizer.config import OptimizerConfig, ParameterGroup
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from tests.testing import nightly_but
from tests.trainer.parallel.foreign_nets import CONFIG, Found, make_net, run_steps, serial, train, unlike
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout, PlainRun, assert_same, make_steps, train_on
from tests.trainer.parallel.test_parity import Run as LlamaRun

pytestmark = pytest.mark.usefixtures("models")
STEPS, MICRO_BATCHES = 3, 4
LAST = dataclasses.replace(CONFIG, algorithm="muon", momentum=0.95, bucket_size=1500)
GROUPS = (ParameterGroup("*attn*", lr_scale=0.5, weight_decay=0.0), ParameterGroup("*mlp*", algorithm="adamw"))
EVERY = dataclasses.replace(LAST, reduce="every", bucket_size=300, muon_scale="spectral", groups=GROUPS)


@pytest.mark.parametrize("shape", [(5, 5), (3, 17), (40, 4), (1, 6)])
def test_singular_values_become_nearly_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonalize(matrix) @ v.T
    values = inside.diagonal()
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    torch.testing.assert_close(inside, torch.diag(values))
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("world", nightly_but({0, 2}, [1, 2, 4]))
def test_run_is_that_of_a_serial_reference(run_ranks: RunRanks, world: int) -> None:
    def job(rank: int) -> list[tuple[Found, set[str]]]:
        runs = []
        for config in (LAST, EVERY):
            found, optimizer = train(make_net("gpt2"), build_mesh(), STEPS, MICRO_BATCHES, config)
            kinds = {shard.name for shard in optimizer.shards() if "momentum_buffer" in shard.tensors}
            assert all(s.values.numel() == s.parameter.numel() for s in optimizer.shards() if s.name in kinds), "cut"
            runs.append((found, kinds))
        return runs

    results = run_ranks(world, job)
    for number, (config, matrices) in enumerate(((LAST, 8), (EVERY, 4))):
        expected = serial(make_net("gpt2"), STEPS, MICRO_BATCHES, config)
        assert len(set.union(*(runs[number][1] for runs in results))) == matrices, "attention and mlp, of two layers"
        assert sum(len(runs[number][1]) for runs in results) == matrices, "each on one rank"
        assert all(unlike(runs[number][0], expected) <= 1e-9 for runs in results)


@pytest.mark.parametrize("layout", nightly_but({1}, [Layout(tp=2, sp=True), Layout(pp=2, tp=2, dp=2)]), ids=str)
def test_runs_are_the_same_on_any_layout(run_ranks: RunRanks, layout: Layout) -> None:
    config = dataclasses.replace(BASE, tie_embeddings=True)
    settings = OptimizerConfig(algorithm="muon", bucket_size=3000)

    def run(layout: Layout) -> list[LlamaRun]:
        return run_ranks(layout.world, lambda rank: train_on(config, make_steps()[:4], layout, settings=settings))

    alone = run(Layout())[0]
    assert_same(run(layout), PlainRun(alone.losses, alone.norms, alone.end), 1e-9)


def test_a_run_is_resumed_on_other_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    def begin(rank: int) -> None:
        mesh, net = build_mesh(), make_net("gpt2")
        save_checkpoint(tmp_path, 2, net, train(net, mesh, 2, MICRO_BATCHES, LAST)[1], mesh, {})

    def go_on(rank: int) -> Found:
        mesh, net = build_mesh(), make_net("gpt2", seed=1)
        optimizer = OverlappedDistributedOptimizer(net, mesh, LAST)
        load_checkpoint(tmp_path / "step-00000002", net, mesh, optimizer)
        norms = run_steps(net, optimizer, range(2, 4), MICRO_BATCHES)
        return norms, {name: p.detach().clone() for name, p in net.named_parameters()}

    run_ranks(2, begin)
    norms, weights = serial(make_net("gpt2"), 4, MICRO_BATCHES, LAST)
    assert all(unlike(found, (norms[2:], weights)) <= 1e-9 for found in run_ranks(4, go_on))


def test_a_gradient_that_is_not_finite_changes_nothing(run_ranks: RunRanks) -> None:
    def job(rank: int) -> bool:
        net = make_net("gpt2")
        _, optimizer = train(net, build_mesh(), 2, 2, LAST)
        before = [t.clone() for shard in optimizer.shards() for t in (shard.values, *shard.tensors.values())]
        (net(0) * float("nan")).backward()
        optimizer.step(lr=0.1)
        optimizer.wait_parameters()
        now = [t for shard in optimizer.shards() for t in (shard.values, *shard.tensors.values())]
        return all(map(torch.equal, before, now))

    assert run_ranks(2, job) == [True, True]


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
