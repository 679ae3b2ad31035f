"""What the overlapped optimizer may send, and what it may wait for: rules that no wrong number would show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.parallel.parameters import ParameterLayout
from energon_lite.trainer.training.step import train_step
from tests.testing import nightly_but
from tests.trainer.parallel.awkward_net import AwkwardNet, make_steps, train
from tests.trainer.parallel.late_collectives import watched_collectives
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE
from tests.trainer.parallel.test_parity import make_steps as make_llama_steps

CONFIG = OptimizerConfig(bucket_size=60)
BOTH = pytest.mark.parametrize("reduce", ["last", "every"])


READERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "nonzero")


@contextmanager
def patched(owner: Any, names: Sequence[str], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """``wrap(f)`` in the place of each function ``f`` of these names."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield


@BOTH
def test_no_number_is_read_from_the_device_before_all_its_work_is_launched(run_ranks: RunRanks, reduce: str) -> None:
    """Reading one waits for the device, which then has nothing to do until the next launch."""
    batch = dataclasses.replace(make_steps(1, 1)[0][0], rare=True)

    def job(rank: int) -> tuple[int, list[str]]:
        mesh, net = build_mesh(), AwkwardNet()
        optimizer = OverlappedDistributedOptimizer(net, mesh, dataclasses.replace(CONFIG, reduce=reduce))
        train(net, optimizer, mesh, make_steps(2, 4))
        with watched_collectives() as launched:

            def told(read: Any) -> Any:
                return lambda tensor, *how: (launched.append("read"), read(tensor, *how))[1]

            optimizer.begin_step(2)
            for _ in range(2):
                loss = net.loss_sum(batch)
                with patched(torch.Tensor, READERS, told):
                    loss.backward()
                    optimizer.end_micro_batch()
            with patched(torch.Tensor, READERS, told):
                optimizer.step(lr=0.1)
        return len(optimizer._queue), launched

    rounds = 1 if reduce == "last" else 2
    for buckets, launched in run_ranks(2, job):
        gathers = ["all_gather"] * buckets
        assert launched == ["reduce_scatter"] * buckets * rounds + gathers + ["read"]


@BOTH
def test_partial_sums_are_one_collective_over_slices(run_ranks: RunRanks, reduce: str) -> None:
    """Under sequence parallelism each norm's gradient is a partial sum: not one all-reduce for each, in each
    micro-batch, but one for all of them, of what data-parallel ranks have left of it."""

    def job(rank: int) -> tuple[list[tuple[bool, int]], int]:
        mesh, net = build_mesh(dp=2, tp=2), AwkwardNet(sum_over=("tp",))
        optimizer = OverlappedDistributedOptimizer(net, mesh, dataclasses.replace(CONFIG, reduce=reduce))
        train(net, optimizer, mesh, make_steps(2, 8), spread=("dp", "tp"))
        sent: list[tuple[bool, int]] = []

        def watch(all_reduce: Any) -> Any:
            def call(tensor: torch.Tensor, *args: Any, group: Any = None, **how: Any) -> Any:
                sent.append((group is mesh.group("tp"), tensor.numel()))
                return all_reduce(tensor, *args, group=group, **how)

            return call

        batches = make_steps(1, 8)[0][rank::4]
        with patched(dist, ["all_reduce"], watch):
            optimizer.begin_step(2)
            for batch in batches:
                net.loss_sum(batch).backward()
                optimizer.end_micro_batch()
            optimizer.step(lr=0.1)
        return sent, sum(bucket.values.numel() for bucket in optimizer._queue)

    for sent, size in run_ranks(4, job):
        counts = [(False, 2)] * (reduce == "every")  # of micro-batches, over the hosts
        assert sent == [*counts, (True, size // 2), (False, 1)], "the slices over tensor-parallel ranks, and the norm"


@BOTH
def test_bytes_on_the_wire_are_those_of_the_formula(run_ranks: RunRanks, reduce: str) -> None:
    """For each parameter in bfloat16: four bytes of gradient for each reduction, two of values; and no third thing."""
    config = dataclasses.replace(BASE, hidden_size=64, ffn_size=96, dtype="bfloat16", image_size=0, vocab_multiple=64)

    def job(rank: int) -> tuple[dict[str, int], int]:
        mesh = build_mesh()
        model = LlamaModel(config, mesh)
        settings = OptimizerConfig(reduce=reduce, bucket_size=9000)
        optimizer = OverlappedDistributedOptimizer(model, mesh, settings)
        steps = make_llama_steps(("text",) * 6)
        train_step(model, optimizer, steps[0][rank::2], mesh, lr=0.01)
        sent = {"gathered": 0, "reduced": 0}

        def watch(collective: Any) -> Any:
            def call(out: torch.Tensor, given: torch.Tensor, **how: Any) -> Any:
                sent["gathered" if out.nbytes > given.nbytes else "reduced"] += max(out.nbytes, given.nbytes)
                return collective(out, given, **how)

            return call

        with patched(collectives, ["reduce_scatter", "all_gather"], watch):
            train_step(model, optimizer, steps[1][rank::2], mesh, lr=0.01)
        return sent, sum(p.numel() for p in model.parameters())

    rounds = 1 if reduce == "last" else 3
    for sent, parameters in run_ranks(2, job):
        assert sent["reduced"] == pytest.approx(4 * rounds * parameters, rel=0.05)
        assert sent["gathered"] == pytest.approx(2 * parameters, rel=0.05)


@pytest.mark.parametrize(
    ("reduce", "grad_dtype", "added_up"),
    nightly_but(
        {0, 2, 3},
        [("last", "float32", 300), ("every", "float32", 300), ("last", "parameter", 256), ("every", "parameter", 300)],
    ),
)
def test_many_small_gradients_add_up(run_ranks: RunRanks, reduce: str, grad_dtype: str, added_up: int) -> None:
    """In bfloat16 256 + 1 is 256. Only who asks for it gets that; what is owned is added up in float32 even then."""

    def job(rank: int) -> float:
        net = AwkwardNet(torch.bfloat16)
        settings = dataclasses.replace(CONFIG, reduce=reduce, grad_dtype=grad_dtype)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), settings)
        for _ in range(2):  # the first step reduces all at once
            optimizer.begin_step(300)
            for _ in range(300):
                net.head_bias.sum().backward()
                optimizer.end_micro_batch()
            norm = optimizer.step(lr=0.0)
        return norm

    for norm in run_ranks(2, job):
        assert norm == pytest.approx(2 * added_up * 13**0.5, rel=1e-6)  # two ranks, thirteen ones


def test_optimizers_may_take_turns_within_a_step(run_ranks: RunRanks) -> None:
    """Several models in a process, as a teacher and a student: nothing of one is in the other."""
    steps = make_steps(3, 4)

    def job(rank: int) -> tuple[list[list[float]], list[float]]:
        mesh = build_mesh()

        def pair() -> tuple[AwkwardNet, OverlappedDistributedOptimizer]:
            net = AwkwardNet(torch.float64)
            return net, OverlappedDistributedOptimizer(net, mesh, dataclasses.replace(CONFIG, reduce="every"))

        def go(pairs: list[tuple[AwkwardNet, OverlappedDistributedOptimizer]]) -> list[list[float]]:
            norms = []
            for batches in steps:
                for _, optimizer in pairs:
                    optimizer.begin_step(2)
                for batch in batches[rank::2]:
                    for net, optimizer in pairs:
                        if len(batch.words):
                            net.loss_sum(batch).backward()
                        optimizer.end_micro_batch()
                norms.append([optimizer.step(lr=0.1) for _, optimizer in pairs])
            return norms

        together = go([pair(), pair()])
        return together, [norms[0] for norms in go([pair()])]

    for together, alone in run_ranks(2, job):
        assert together == [[norm, norm] for norm in alone]


@BOTH
def test_the_first_step_does_not_know_yet_how_many_gradients_come(run_ranks: RunRanks, reduce: str) -> None:
    """Nothing unused holds the buckets up here: only caution keeps the first gradient from leaving alone."""

    def job(rank: int) -> list[float]:
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        for p in net.parameters():
            p.data.fill_(0.5)
            p.parallel_layout = ParameterLayout(tuple(p.shape))  # type: ignore[attr-defined]
        settings = dataclasses.replace(CONFIG, reduce=reduce, bucket_size=4, clip=0.0)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), settings)
        norms = []
        for _ in range(2):
            optimizer.begin_step(2)
            for _ in range(2):
                for _ in range(3):
                    net(torch.ones(1, 3)).sum().backward()
                optimizer.end_micro_batch()
            norms.append(optimizer.step(lr=0.0))
        return norms

    # Of one pass: nine weights and three biases with 0.5, three weights with 2, a bias with 1. Two ranks, six passes.
    right = 12 * (12 * 0.25 + 3 * 4 + 1) ** 0.5
    assert run_ranks(2, job) == [[pytest.approx(right, rel=1e-6)] * 2] * 2
