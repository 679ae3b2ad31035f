"""What the overlapped optimizer may send, and in which order: rules that no wrong number would show."""

from __future__ import annotations

import dataclasses
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
from energon_lite.trainer.training.guards import SpikeGuard
from energon_lite.trainer.training.step import launch_step, train_step
from tests.testing import nightly_but
from tests.trainer.parallel.late_collectives import noted
from tests.trainer.parallel.nets import make, make_net
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, EVERY, LAST, Layout, make_steps, own

CONFIG = OptimizerConfig(bucket_size=60)
BOTH = pytest.mark.parametrize("reduce", ["last", "every"])


@BOTH
def test_partial_sums_are_one_collective_over_slices(run_ranks: RunRanks, reduce: str) -> None:
    """Under sequence parallelism each norm's gradient is a partial sum: not one all-reduce for each, in each
    micro-batch, but one for all of them, of what data-parallel ranks have left of it."""

    def job(rank: int) -> tuple[list[tuple[bool, int]], int]:
        mesh, net = build_mesh(dp=2, tp=2), make_net("awkward")
        for p in net.parameters():
            p.parallel_layout = ParameterLayout(tuple(p.shape), sum_over=("tp",))  # type: ignore[attr-defined]
        optimizer = OverlappedDistributedOptimizer(net, mesh, dataclasses.replace(CONFIG, reduce=reduce))
        sent: list[tuple[bool, int]] = []

        def note(_: str, args: Any, how: Any) -> None:
            sent.append((how.get("group") is mesh.group("tp"), args[0].numel()))

        with noted(note, (dist, ["all_reduce"])):
            for step in range(3):
                sent.clear()
                optimizer.begin_step(2)
                for seed in range(8 * step, 8 * step + 8)[rank::4]:
                    net(seed).backward()
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
        steps = make_steps(("text",) * 6)
        train_step(model, optimizer, steps[0][rank::2], mesh, lr=0.01)
        sent = {"all_gather": 0, "reduce_scatter": 0}

        def note(name: str, args: Any, _: object) -> None:
            sent[name] += max(tensor.nbytes for tensor in args)

        with noted(note, (collectives, [*sent])):
            train_step(model, optimizer, steps[1][rank::2], mesh, lr=0.01)
        return sent, sum(p.numel() for p in model.parameters())

    rounds = 1 if reduce == "last" else 3
    for sent, parameters in run_ranks(2, job):
        assert sent["reduce_scatter"] == pytest.approx(4 * rounds * parameters, rel=0.05)
        assert sent["all_gather"] == pytest.approx(2 * parameters, rel=0.05)


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
        net, optimizer = make(torch.bfloat16, reduce=reduce, grad_dtype=grad_dtype)
        for _ in range(2):  # the first step reduces all at once
            optimizer.begin_step(300)
            for _ in range(300):
                net.head_bias.sum().backward()
                optimizer.end_micro_batch()
            norm = optimizer.step(lr=0.0)
        return norm

    for norm in run_ranks(2, job):
        assert norm == pytest.approx(2 * added_up * 29**0.5, rel=1e-6)  # two ranks, as many ones as words


def test_optimizers_may_take_turns_within_a_step(run_ranks: RunRanks) -> None:
    """Several models in a process, as a teacher and a student: nothing of one is in the other."""

    def job(rank: int) -> tuple[list[list[float]], list[float]]:
        def go(*pairs: tuple[Any, OverlappedDistributedOptimizer]) -> list[list[float]]:
            norms = []
            for step in range(3):
                for _, optimizer in pairs:
                    optimizer.begin_step(2)
                for seed in range(4 * step, 4 * step + 4)[rank::2]:
                    for net, optimizer in pairs:
                        net(seed).backward()
                        optimizer.end_micro_batch()
                norms.append([optimizer.step(lr=0.1) for _, optimizer in pairs])
            return norms

        together = go(make(reduce="every"), make(reduce="every"))
        return together, [norms[0] for norms in go(make(reduce="every"))]

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


# -- the collectives of a step, group by group -------------------------------------------------------------------------

#: Collectives, by the module in which the trainer finds them.
CALLS = (
    (dist, ("all_reduce", "broadcast", "all_gather", "isend", "recv", "all_gather_object", "broadcast_object_list")),
    (collectives, ("reduce_scatter", "all_gather")),
)
Logs = dict[str, list[str]]


def logs_of_steps(layout: Layout, settings: OptimizerConfig, *, apart: bool = True) -> tuple[Logs, int]:
    """Those of two steps behind the first, and the number of buckets; without ``apart``, all in the optimizer's group.

    A step with a guard of spikes, so that all that a step may send is sent.
    """
    mesh = layout.mesh()
    if not apart:
        data = mesh.data_group
        assert data is not None
        mesh = dataclasses.replace(mesh, process_groups={**mesh.process_groups, "numbers": data})
    model = LlamaModel(BASE, mesh, seed=5)
    optimizer = OverlappedDistributedOptimizer(model, mesh, settings)
    spikes = SpikeGuard(9.0, 4, mesh)
    names: dict[Any, str] = {None: "world"} | {group: name for name, group in mesh.process_groups.items()}
    names[mesh.data_group] = "optimizer"
    steps = [own(step, mesh) for step in make_steps(("text", "packed", "mixed", "packed image"))[:3]]
    launch_step(model, optimizer, steps[0], mesh, lr=1e-3, spikes=spikes)
    logs: Logs = {}

    def note(name: str, _: object, how: Any) -> None:
        logs.setdefault(names.get(how.get("group"), "?"), []).append(name)

    with noted(note, *CALLS):
        for step in steps[1:]:
            launch_step(model, optimizer, step, mesh, lr=1e-3, spikes=spikes)
    return logs, len(optimizer._queue)


LAYOUTS = (Layout(dp=2), Layout(dp=2, tp=2, sp=True), Layout(dp=2, cp=2), Layout(dp=2, pp=2, virtual=2))


@pytest.mark.parametrize("settings", [LAST, EVERY], ids=lambda settings: settings.reduce)
@pytest.mark.parametrize("layout", nightly_but({0, 3}, LAYOUTS), ids=str)
def test_none_stands_behind_a_gather(run_ranks: RunRanks, layout: Layout, settings: OptimizerConfig) -> None:
    """A communicator serves one collective after the other; a count there would wait until all values have come.

    In the optimizer's group there are reductions, then gathers, for each step; nothing that the forward pass waits for.
    """
    for logs, buckets in run_ranks(layout.world, lambda rank: logs_of_steps(layout, settings)):
        rounds = 4 // layout.dp if settings.reduce == "every" else 1
        assert logs["optimizer"] == 2 * (["reduce_scatter"] * buckets * rounds + ["all_gather"] * buckets)
        # Of each step, the number of tokens and the sums of losses; for ``every``, the number of micro-batches too.
        assert logs["numbers"] == ["all_reduce"] * (6 if settings.reduce == "every" else 4)
        assert logs["world"] == ["all_reduce"] * 4, "of each step, the guard's judgement and the norm"
        others = {name: log for name, log in logs.items() if name not in ("optimizer", "numbers", "world")}
        axes = {"tp", "cp", "pp", "ends"} | {name for name in others if name.startswith(("up", "down"))}
        assert others.keys() <= axes, "a group of its own for each axis: no gather of values is there"
        assert len(others) == 0 or layout.world > 2


def test_a_count_in_the_group_of_the_optimizer_would_be_seen(run_ranks: RunRanks) -> None:
    for logs, buckets in run_ranks(2, lambda rank: logs_of_steps(Layout(dp=2), LAST, apart=False)):
        first, second = (logs["optimizer"][at : at + 2 * buckets + 2] for at in (0, 2 * buckets + 2))
        assert first[-buckets:] == ["all_gather"] * buckets and second[0] == "all_reduce", "behind the gathers"
