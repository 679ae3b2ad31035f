"""The overlapped optimizer sends when it should, nobody sees values of the step before, and memory is what is said."""

from __future__ import annotations

import dataclasses
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.config import OptimizerConfig
from energon_lite.trainer.training.step import train_step
from tests.testing import nightly_but
from tests.trainer.parallel.late_collectives import noted, watched_collectives
from tests.trainer.parallel.nets import F64, make, train, weights_of
from tests.trainer.parallel.plain_loop import PlainRun
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, EVERY, LAST, Layout, make_steps, train_on
from tests.trainer.parallel.training_part import Part

# -- when collectives happen -------------------------------------------------------------------------------------------


def assert_equal_when_late(run_ranks: RunRanks, world: int, run: Callable[[], PlainRun]) -> None:
    def job(rank: int) -> tuple[PlainRun, PlainRun]:
        now = run()
        with watched_collectives(late=True):
            return now, run()

    for now, late in run_ranks(world, job):
        assert now.losses == late.losses and now.norms == late.norms
        assert all(torch.equal(weight, late.weights[name]) for name, weight in now.weights.items())


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_results_do_not_depend_on_when_collectives_run(run_ranks: RunRanks, reduce: str) -> None:
    """Memory of gradients is used again only when it was sent, and values only when they have come."""

    def run() -> PlainRun:
        net, optimizer = make(reduce=reduce, bucket_size=20)
        return train(net, optimizer, range(5), 6)

    assert_equal_when_late(run_ranks, 2, run)


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
    config, steps = dataclasses.replace(BASE, tie_embeddings=True), make_steps()[:3]
    assert_equal_when_late(run_ranks, layout.world, lambda: train_on(config, steps, layout, settings=settings))


def test_gradients_leave_a_pipeline_chunk_by_chunk(run_ranks: RunRanks) -> None:
    """With several chunks of layers, the last chunk's gradients are on their way before the first chunk is done."""
    steps = make_steps(("mixed",) * 4)

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


READERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "nonzero")


@pytest.mark.parametrize(("reduce", "times"), [("last", 1), ("every", 4)])
def test_gradients_leave_behind_the_backward_pass(run_ranks: RunRanks, reduce: str, times: int) -> None:
    """No number is read before all work is launched: who reads waits for the device, which then has nothing to do."""

    def job(rank: int) -> tuple[int, int, list[int], list[str]]:
        net, optimizer = make(reduce=reduce, bucket_size=20)
        train(net, optimizer, range(2), 8)
        counts = []
        with watched_collectives() as launched:
            optimizer.begin_step(4)
            for _ in range(4):
                loss = net(0)
                with noted(lambda *_: launched.append("read"), (torch.Tensor, READERS)):
                    loss.backward()
                    counts.append(len(launched))
                    optimizer.end_micro_batch()
            counts.append(len(launched))
            with noted(lambda *_: launched.append("read"), (torch.Tensor, READERS)):
                optimizer.step(lr=0.1)
        assert all(bucket.gathering is not None for bucket in optimizer._queue), "step waits for no value"
        full = sum(not any("unused" in slot.name for slot in bucket.slots) for bucket in optimizer._queue)
        return len(optimizer._queue), full, counts, launched

    for buckets, full, counts, launched in run_ranks(2, job):
        assert buckets > full > 5
        # Buckets with a parameter that is never used are last, and wait for the end of the micro-batch; no other does.
        inside = [buckets * number + full for number in range(4)] if times == 4 else [0, 0, 0, full]
        assert counts == [*inside, buckets * times]
        assert launched == ["reduce_scatter"] * buckets * times + ["all_gather"] * buckets + ["read"]


# -- stale values ------------------------------------------------------------------------------------------------------


def after_a_step(rank: int, read: Callable[[Any, OverlappedDistributedOptimizer], Any]) -> tuple[Any, Any]:
    """What is read right after a step on a slow network, and what is right."""
    with watched_collectives(late=True):
        net, optimizer = make()
        train(net, optimizer, range(2), 2)
        optimizer.begin_step(1)
        net(0).backward()
        optimizer.end_micro_batch()
        optimizer.step(lr=0.1)
        found = read(net, optimizer)
        optimizer.wait_parameters()
        return found, read(net, optimizer)


def all_values(net: Any) -> torch.Tensor:
    return torch.cat([value.flatten() for value in weights_of(net).values()])


READ: dict[str, Callable[..., torch.Tensor]] = {
    "evaluation": torch.no_grad()(lambda net, _: net.eval()(0)),
    "state dict": lambda net, _: torch.cat([value.flatten() for value in net.state_dict().values()]).clone(),
    "part of a state dict": lambda net, _: net.first.state_dict()["scale"].clone(),
    "parameter of a module with children": lambda net, _: net.first(torch.ones(1, 5, dtype=F64)).detach(),
    "export": lambda net, optimizer: (optimizer.wait_parameters(), all_values(net))[1],
    "without a wait": lambda net, _: all_values(net),  # the slow network would show stale values
}


@pytest.mark.parametrize("name", READ)
def test_nobody_reads_stale_values(run_ranks: RunRanks, name: str) -> None:
    for found, right in run_ranks(2, lambda rank: after_a_step(rank, READ[name])):
        assert torch.equal(found, right) == (name != "without a wait")


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


def test_a_parameter_used_from_outside_its_module_is_never_stale(run_ranks: RunRanks) -> None:
    """No hook can tell when it is used, so the first step finds out that it is."""

    def job(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        net, optimizer = make()
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
        net, optimizer = make(torch.bfloat16)
        train(net, optimizer, range(2), 2)
        net.load_state_dict({name: torch.full_like(value, 3.0) for name, value in net.state_dict().items()})
        optimizer.step(lr=0.0)
        optimizer.wait_parameters()
        return all_values(net)

    assert all(torch.all(values == 3.0) for values in run_ranks(2, job))


# -- memory ------------------------------------------------------------------------------------------------------------

WIDTH = 64


class Shuffled(nn.Module):
    """Layers that are used in another order than they are made in."""

    def __init__(self, order: str, dtype: torch.dtype, layers: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)])
        self.order = list(range(layers))
        if order == "reversed":
            self.order.reverse()
        elif order == "swapped":
            self.order = [number ^ 1 for number in self.order]
        elif order == "shuffled":
            random.Random(0).shuffle(self.order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = x + torch.tanh(self.layers[number](x))
        return x


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, from when they are made until nothing has them any more.

    Not those that gloo makes for itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                size = tensor.untyped_storage().nbytes()
                self._seen.add(key)
                self.held += size
                self.peak = max(self.peak, self.held)
                weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.held -= size

    def part(self) -> int:
        """The peak since the last call."""
        found, self.peak = self.peak, self.held
        return found


def run(
    order: str, dtype: torch.dtype, config: OptimizerConfig, layers: int = 32
) -> tuple[list[int], OverlappedDistributedOptimizer]:
    """Peaks of making the optimizer and of each step."""
    mesh = build_mesh()
    x = torch.ones(2, WIDTH, dtype=dtype)
    with Allocated() as allocated:
        net = Shuffled(order, dtype, layers)
        optimizer = OverlappedDistributedOptimizer(net, mesh, config)
        peaks = [allocated.part()]
        for _ in range(4):
            optimizer.begin_step(1)
            net(x).sum().backward()
            optimizer.end_micro_batch()
            optimizer.step(lr=0.01)
            optimizer.wait_parameters()
            peaks.append(allocated.part())
    return peaks, optimizer


@pytest.mark.parametrize(
    ("world", "dtype"), nightly_but({1, 2}, itertools.product([1, 2, 4], [torch.bfloat16, torch.float32])), ids=str
)
def test_no_peak_is_above_that_of_a_later_step(run_ranks: RunRanks, world: int, dtype: torch.dtype) -> None:
    # Under "every", gradients that come in a wholly other order are held until it is known.
    cases = [("reversed", "last"), ("shuffled", "last"), ("swapped", "last"), ("swapped", "every")]

    def job(rank: int) -> list[list[int]]:
        return [run(order, dtype, OptimizerConfig(reduce=reduce, bucket_size=6000))[0] for order, reduce in cases]

    for results in run_ranks(world, job):
        for peaks, case in zip(results, cases, strict=True):
            assert max(peaks[:2]) <= 1.1 * peaks[-1], case


@pytest.mark.parametrize("world", nightly_but({1}, [1, 2, 4]))
def test_allocated_bytes_are_those_of_the_formula(run_ranks: RunRanks, world: int) -> None:
    """For each parameter in bfloat16, padding included; and the activations and gradients of a layer."""

    def job(rank: int) -> list[tuple[int, float]]:
        measured: list[tuple[int, float]] = []
        for algorithm, state, reduce in (("adamw", 12, "last"), ("adamw", 12, "every"), ("muon", 8, "last")):
            config = OptimizerConfig(algorithm=algorithm, bucket_size=6000, reduce=reduce)
            peaks, optimizer = run("forward", torch.bfloat16, config, layers=80)
            padded = sum(bucket.values.numel() for bucket in optimizer._queue)
            shared = [memory.numel() for free in optimizer._free.values() for memory in free]
            pool = sum(shared)
            assert len(shared) <= 4 < len(optimizer._queue), "three are in flight, and one is filled"
            grads = 4 * padded if world == 1 or reduce == "last" else 4 * padded / world + 4 * pool
            measured.append((peaks[-1], 2 * padded + grads + padded * state / world))
        return measured

    for measured in run_ranks(world, job):
        for most, formula in measured:
            assert most == pytest.approx(formula, rel=0.05)
