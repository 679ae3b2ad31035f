"""The overlapped optimizer sends when it should, nobody sees values of the step before, and memory is what is said."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.config import OptimizerConfig
from energon_lite.trainer.training.step import train_step
from tests.testing import nightly_but
from tests.trainer.parallel.awkward_net import F64, AwkwardNet, Batch, Run, make, make_steps, train
from tests.trainer.parallel.late_collectives import watched_collectives
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, EVERY, LAST, Layout, train_on
from tests.trainer.parallel.test_parity import Run as LlamaRun
from tests.trainer.parallel.test_parity import make_steps as make_llama_steps
from tests.trainer.parallel.training_part import Part

# -- when collectives happen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_results_do_not_depend_on_when_collectives_run(run_ranks: RunRanks, reduce: str) -> None:
    """Memory of gradients is used again only when it was sent, and values only when they have come."""

    def job(rank: int) -> tuple[Run, Run]:
        net, optimizer, mesh = make(reduce=reduce, bucket_size=20)
        now = train(net, optimizer, mesh, make_steps(5, 6))
        net, optimizer, mesh = make(reduce=reduce, bucket_size=20)
        with watched_collectives(late=True):
            return now, train(net, optimizer, mesh, make_steps(5, 6))

    for now, late in run_ranks(2, job):
        assert now.losses == late.losses and now.norms == late.norms
        assert all(torch.equal(weight, late.weights[name]) for name, weight in now.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    nightly_but(
        {1}, itertools.product([Layout(pp=2, virtual=2, dp=2), Layout(tp=2, cp=2, pp=2, sp=True)], [LAST, EVERY])
    ),
    ids=lambda case: str(case) if isinstance(case, Layout) else case.reduce,
)
def test_pipelines_do_not_depend_on_when_collectives_run(
    run_ranks: RunRanks, layout: Layout, settings: OptimizerConfig
) -> None:
    config, steps = dataclasses.replace(BASE, tie_embeddings=True), make_llama_steps()[:3]

    def job(rank: int) -> tuple[LlamaRun, LlamaRun]:
        now = train_on(config, steps, layout, settings=settings)
        with watched_collectives(late=True):
            return now, train_on(config, steps, layout, settings=settings)

    for now, late in run_ranks(layout.world, job):
        assert now.losses == late.losses and now.norms == late.norms
        assert all(torch.equal(weight, late.end[name]) for name, weight in now.end.items())


def test_gradients_leave_a_pipeline_chunk_by_chunk(run_ranks: RunRanks) -> None:
    """With several chunks of layers, the last chunk's gradients are on their way before the first chunk is done."""
    steps = make_llama_steps(("mixed",) * 4)

    def job(rank: int) -> tuple[list[tuple[int, int]], int, int]:
        mesh = build_mesh(pp=2, dp=2, virtual=2)
        model = LlamaModel(BASE, mesh, seed=5)
        optimizer = OverlappedDistributedOptimizer(model, mesh, LAST)
        train_step(model, optimizer, steps[0][mesh.rank("dp") :: 2], mesh, lr=0.01)
        ended, launched_by = optimizer.end_micro_batch, []
        with watched_collectives() as launched:

            def end_micro_batch(of: Any) -> None:
                ended(of)
                launched_by.append((int(any(p in first for p in of)), len(launched)))

            first = set(model.parameters_of_chunk(0))
            optimizer.end_micro_batch = end_micro_batch  # type: ignore[method-assign]
            train_step(model, optimizer, steps[1][mesh.rank("dp") :: 2], mesh, lr=0.01)
        of_last = sum({slot.parameter for slot in b.slots}.isdisjoint(first) for b in optimizer._queue)
        return launched_by, of_last, len(optimizer._queue)

    for launched_by, of_last, buckets in run_ranks(4, job):
        # Two micro-batches, through both chunks each: backward first twice through the last one.
        assert [chunk_0 for chunk_0, _ in launched_by] == [0, 0, 1, 1]
        assert [count for _, count in launched_by][:2] == [0, of_last] and launched_by[3][1] == buckets > of_last > 1


@pytest.mark.parametrize(("reduce", "times"), [("last", 1), ("every", 4)])
def test_gradients_leave_behind_the_backward_pass(run_ranks: RunRanks, reduce: str, times: int) -> None:
    batch = make_steps(1, 1)[0][0]

    def job(rank: int) -> tuple[int, int, list[int], list[str]]:
        net, optimizer, mesh = make(reduce=reduce, bucket_size=20)
        train(net, optimizer, mesh, make_steps(2, 8))
        counts = []
        with watched_collectives() as launched:
            optimizer.begin_step(4)
            for _ in range(4):
                net.loss_sum(dataclasses.replace(batch, rare=True)).backward()
                counts.append(len(launched))
                optimizer.end_micro_batch()
            before = len(launched)
            optimizer.step(lr=0.1)
        assert all(bucket.gathering is not None for bucket in optimizer._queue), "step waits for no value"
        full = sum(not any("unused" in slot.name for slot in bucket.slots) for bucket in optimizer._queue)
        return len(optimizer._queue), full, [*counts, before], launched[before:]

    for buckets, full, counts, after in run_ranks(2, job):
        assert buckets > full > 5
        # Buckets with a parameter that is never used are last, and wait for the end of the micro-batch; no other does.
        inside = [buckets * number + full for number in range(4)] if times == 4 else [0, 0, 0, full]
        assert counts == [*inside, buckets * times]
        assert after == ["all_gather"] * buckets


# -- stale values ------------------------------------------------------------------------------------------------------


def after_a_step(
    rank: int, read: Callable[[AwkwardNet, OverlappedDistributedOptimizer, Batch], Any]
) -> tuple[Any, Any]:
    """What is read right after a step on a slow network, and what is right."""
    batch = dataclasses.replace(make_steps(1, 1)[0][0], rare=True)
    with watched_collectives(late=True):
        net, optimizer, mesh = make()
        train(net, optimizer, mesh, make_steps(2, 2))
        optimizer.begin_step(1)
        net.loss_sum(batch).backward()
        optimizer.end_micro_batch()
        optimizer.step(lr=0.1)
        found = read(net, optimizer, batch)
        optimizer.wait_parameters()
        return found, read(net, optimizer, batch)


def evaluated(net: AwkwardNet, _: object, batch: Batch) -> torch.Tensor:
    net.eval()
    with torch.no_grad():
        return net(batch.words, rare=True)


READERS: dict[str, Callable[..., torch.Tensor]] = {
    "evaluation": evaluated,
    "state dict": lambda net, *_: torch.cat([value.flatten() for value in net.state_dict().values()]).clone(),
    "part of a state dict": lambda net, *_: net.first.state_dict()["scale"].clone(),
    "parameter of a module with children": lambda net, *_: net.first(torch.ones(1, 5, dtype=F64)).detach(),
    "export": lambda net, optimizer, _: (
        optimizer.wait_parameters(),
        torch.cat([p.detach().flatten() for p in net.parameters()]),
    )[1],
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_nobody_reads_stale_values(run_ranks: RunRanks, reader: Callable[..., torch.Tensor]) -> None:
    for found, right in run_ranks(2, lambda rank: after_a_step(rank, reader)):
        assert torch.equal(found, right)


def test_sharded_layers_wait_for_their_weights_when_they_need_them(run_ranks: RunRanks) -> None:
    """Products that overlap with collectives use the weights of layers that nobody calls."""
    layout = Layout(dp=2, tp=2)

    def job(rank: int) -> tuple[list[bool], torch.Tensor, torch.Tensor]:
        tokens = torch.arange(12).reshape(2, 6)
        with watched_collectives(late=True):
            part = Part(layout, bucket_size=20)
            part.train(0, 2)
            with torch.no_grad():
                sharded = [value for name, value in part.model.named_parameters() if "_proj.weight" in name]
                come = [not value.isnan().any() for value in sharded]
                found = part.model(tokens)
                part.optimizer.wait_parameters()
                return come, found, part.model(tokens)

    for come, found, right in run_ranks(layout.world, job):
        assert come and not any(come) and torch.equal(found, right)


def test_the_slow_network_would_show_stale_values(run_ranks: RunRanks) -> None:
    def peek(net: AwkwardNet, *_: object) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert not any(torch.equal(*pair) for pair in run_ranks(2, lambda rank: after_a_step(rank, peek)))


def test_a_parameter_used_from_outside_its_module_is_never_stale(run_ranks: RunRanks) -> None:
    """No hook can tell when it is used, so the first step finds out that it is."""

    def job(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        net, optimizer, _mesh = make()
        with watched_collectives(late=True):
            for _ in range(2):
                (net.unused.weight.sum() + net.last(torch.ones(1, 7, dtype=F64)).sum()).backward()
                optimizer.step(lr=0.1)
            found = net.unused.weight.detach().clone()
            optimizer.wait_parameters()
        return found, net.unused.weight.detach().clone()

    assert all(torch.equal(*pair) for pair in run_ranks(2, job))


def test_values_that_the_model_is_given_are_those_that_are_trained(run_ranks: RunRanks) -> None:
    def job(rank: int) -> torch.Tensor:
        net, optimizer, mesh = make(torch.bfloat16)
        train(net, optimizer, mesh, make_steps(2, 2))
        net.load_state_dict({name: torch.full_like(value, 3.0) for name, value in net.state_dict().items()})
        optimizer.step(lr=0.0)
        optimizer.wait_parameters()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert all(torch.all(values == 3.0) for values in run_ranks(2, job))


# -- memory ------------------------------------------------------------------------------------------------------------
