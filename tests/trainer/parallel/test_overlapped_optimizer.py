"""The overlapped optimizer makes the run that one process makes with torch's own, and none of its kind's mistakes.

Loops that it would train wrongly are refused: other counts on other ranks, torch's own clipping.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.config import OptimizerConfig
from tests.testing import nightly_but
from tests.trainer.optimizer import test_as_torchs
from tests.trainer.optimizer.test_as_torchs import backward
from tests.trainer.parallel.nets import CONFIG, F32, F64, make, make_net, serial, train, weights_of
from tests.trainer.parallel.plain_loop import PlainRun
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import assert_same

STEPS = 20


# -- equal to one process ----------------------------------------------------------------------------------------------

Case = tuple[torch.dtype, str, int | None, str, int]
#: By number of ranks: type, when gradients are reduced, bucket size, algorithm, micro-batches of a rank. Each rank uses
#: other parameters in a step, so gradients come in another order; collectives must not. All others: at night.
CASES: dict[int, list[Case]] = {
    1: [(F64, "last", None, "adamw", 8), (F32, "every", 60, "sgd", 3)],
    2: [(F64, "every", 1, "adamw", 2), (F32, "last", 60, "adamw", 8), (F64, "last", 1, "sgd", 1)],
    3: [(F64, "every", 60, "adamw", 4), (F32, "last", None, "adamw", 1)],
}
ALL_CASES = list(itertools.product([F32, F64], ["last", "every"], [1, 60, None], ["adamw", "sgd"], [1, 2, 8]))


def run_cases(world: int, cases: list[Case], run_ranks: RunRanks) -> None:
    def job(rank: int) -> list[PlainRun]:
        runs = []
        for dtype, reduce, bucket_size, algorithm, micro_batches in cases:
            net, optimizer = make(dtype, reduce=reduce, bucket_size=bucket_size, algorithm=algorithm)
            runs.append(train(net, optimizer, range(STEPS), world * micro_batches))
        return runs

    for (dtype, _, _, algorithm, micro_batches), runs in zip(
        cases, zip(*run_ranks(world, job, timeout=900.0), strict=True), strict=True
    ):
        settings = dataclasses.replace(CONFIG, algorithm=algorithm)
        expected = serial(make_net("awkward", dtype=dtype), STEPS, world * micro_batches, settings)
        assert max(expected.norms) > CONFIG.clip > min(expected.norms), "clipping was not tested"
        assert_same(runs, expected, 1e-13 if dtype == F64 else 1e-6)


@pytest.mark.parametrize("world", CASES)
def test_run_is_that_of_one_process(run_ranks: RunRanks, world: int) -> None:
    run_cases(world, CASES[world], run_ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("bucket_size", [1, 60, None])
@pytest.mark.parametrize("reduce", ["last", "every"])
@pytest.mark.parametrize("world", range(1, 9))
def test_every_run_is_that_of_one_process(
    run_ranks: RunRanks, world: int, reduce: str, bucket_size: int | None
) -> None:
    run_cases(world, [case for case in ALL_CASES if case[1:3] == (reduce, bucket_size)], run_ranks)


@pytest.mark.parametrize(
    ("reduce", "grad_dtype"), nightly_but({0, 3}, itertools.product(["last", "every"], ["float32", "parameter"]))
)
def test_bfloat16_has_master_values_in_float32(run_ranks: RunRanks, reduce: str, grad_dtype: str) -> None:
    """Updates far below the precision of bfloat16 add up."""

    def job(rank: int) -> tuple[float, float]:
        net, optimizer = make(torch.bfloat16, reduce=reduce, grad_dtype=grad_dtype, weight_decay=0.0, clip=0.0)
        start = net.head_bias.detach().clone()
        for _ in range(64):
            optimizer.begin_step(1)
            net.head_bias.sum().backward()  # the sign of the gradient never changes, so Adam steps by lr
            optimizer.end_micro_batch()
            optimizer.step(lr=1e-3)
        optimizer.wait_parameters()
        moved = start.float() - net.head_bias.float()
        return float(moved.min()), float(moved.max())

    for low, high in run_ranks(2, job):
        assert low == pytest.approx(0.064, abs=0.01) and high == pytest.approx(0.064, abs=0.01)


# -- gradients that come otherwise than expected -----------------------------------------------------------------------


def test_the_first_step_shows_the_true_order(run_ranks: RunRanks) -> None:
    """Buckets leave in the order of their last gradients; those with a parameter without any are the last."""

    def job(rank: int) -> tuple[list[list[str]], list[list[str]]]:
        net, optimizer = make(bucket_size=30)
        expected = [[slot.name for slot in bucket.slots] for bucket in optimizer._queue]
        train(net, optimizer, range(2, 3), 4)  # only the second rank uses what is rare: in micro-batch 9, its first
        return expected, [[slot.name for slot in bucket.slots] for bucket in optimizer._queue]

    runs = run_ranks(2, job)
    without = ("unused", "rare")  # on the first rank, whose order counts
    for expected, found in runs:
        assert found == runs[0][1] != expected and sorted(found) == sorted(expected)
        assert any(len(names) > 1 for names in found), "no bucket has several parameters"
        complete = [names for names in found if not any(name.startswith(without) for name in names)]
        assert found[: len(complete)] == complete
        order = ["head_bias", "norm", "last", "first", "table"]
        places = [
            max(order.index(start) for name in names for start in order if name.startswith(start))
            for names in complete
            if not any(name.startswith("twice") for name in names)
        ]
        assert places == sorted(places)


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_a_gradient_too_many_is_an_error_and_not_lost(run_ranks: RunRanks, reduce: str) -> None:
    def job(rank: int) -> str:
        net, optimizer = make(reduce=reduce)
        train(net, optimizer, range(1), 2)
        optimizer.begin_step(1)
        net(0).backward()
        with pytest.raises(UsageError) as caught:
            net(0).backward()
        return str(caught.value)

    assert all("after its bucket was reduced" in text for text in run_ranks(2, job))


def test_a_micro_batch_too_few_is_an_error(run_ranks: RunRanks) -> None:
    def job(rank: int) -> None:
        _, optimizer = make()
        optimizer.begin_step(2)
        optimizer.end_micro_batch()
        with pytest.raises(UsageError, match="1 of 2 micro-batches ended"):
            optimizer.step(lr=0.1)

    run_ranks(1, job)


@pytest.mark.parametrize(("at", "fewer"), [(2, 1), (3, 0)])
def test_with_reduce_every_they_are_told_in_any_step(run_ranks: RunRanks, at: int, fewer: int) -> None:
    """A rank that has one more would reduce it together with what the others do next."""

    def job(rank: int) -> tuple[str, int]:
        net, optimizer = make(reduce="every")
        with pytest.raises(UsageError) as caught:
            for number in range(1, 5):
                mine = range(2)[: fewer if number == at and rank == 0 else 2]
                optimizer.begin_step(len(mine))
                for seed in mine:
                    net(seed).backward()
                    optimizer.end_micro_batch()
                optimizer.step(lr=0.0)
        return str(caught.value), number

    for text, number in run_ranks(2, job):
        assert number == at and f"{fewer} micro-batches on one data-parallel rank and 2 on" in text


CLIPS: dict[str, Callable[[torch.nn.Module], object]] = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm without foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "by hand": lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_are_not_there_are_not_clipped_in_silence(run_ranks: RunRanks, world: int) -> None:
    """Whoever asks for them is told; whoever does not, trains as ever."""

    def norms(rank: int, reduce: str, promised: bool, clip: Callable[[torch.nn.Module], object] | None) -> list[float]:
        net, optimizer = make(reduce=reduce)
        found = []
        for step in range(4):
            mine = range(4 * step, 4 * step + 4)[rank::world]
            if promised:
                optimizer.begin_step(len(mine))
            for seed in mine:
                net(seed).backward()
                if promised:
                    optimizer.end_micro_batch()
            if clip is not None:
                with pytest.raises(UsageError, match=r"step\(\) returns the norm") as caught:
                    clip(net)
                assert "OptimizerConfig(clip=" in str(caught.value)
            found.append(optimizer.step(lr=1e-2))
            assert all(p.grad is None for p in net.parameters())
        return found

    def job(rank: int) -> None:
        expected = norms(rank, "last", True, None)
        for reduce, promised in itertools.product(["last", "every"], [True, False]):
            silent = norms(rank, reduce, promised, None)
            assert silent == pytest.approx(expected, rel=1e-12), "a loop that says nothing gets the same"
            for name, clip in CLIPS.items():
                assert norms(rank, reduce, promised, clip) == silent, (reduce, promised, name)

    run_ranks(world, job)


# -- what else went wrong elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(run_ranks: RunRanks, algorithm: str) -> None:
    def job(rank: int) -> tuple[float, int, bool, float]:
        net, optimizer = make(F32, clip=1.0, algorithm=algorithm)
        before = train(net, optimizer, range(2), 2).weights
        state = [tensor.clone() for shard in optimizer.shards() for tensor in shard.tensors.values()]
        (net.head_bias.sum() * (float("inf") if rank == 1 else 1.0)).backward()
        norm = optimizer.step(lr=0.1)
        now = [tensor for shard in optimizer.shards() for tensor in shard.tensors.values()]
        kept = all(map(torch.equal, [*before.values(), *state], [*weights_of(net).values(), *now]))
        updates = optimizer.updates
        net.head_bias.sum().backward()
        return norm, updates, kept, optimizer.step(lr=0.1)

    for norm, updates, kept, following in run_ranks(2, job):
        assert norm == float("inf") and updates == 2 and kept
        assert following == pytest.approx(2 * 29**0.5, rel=1e-6)  # two ranks, as many ones as words


def test_a_model_has_one_optimizer_at_a_time(run_ranks: RunRanks) -> None:
    """Of two, one would get no gradients. When one is closed, the next goes on with the values that it left."""

    def job(rank: int) -> tuple[PlainRun, PlainRun, bool]:
        net, first = make()
        train(net, first, range(2), 2)
        second = OverlappedDistributedOptimizer(net, first.mesh, CONFIG)
        with pytest.raises(UsageError, match="another optimizer has the same parameters"):
            train(net, second, range(2), 2)
        second.close()
        first.close()
        gone = weakref.ref(first)
        del first
        gc.collect()
        fresh, optimizer = make()
        fresh.load_state_dict(net.state_dict())
        expected = train(fresh, optimizer, range(2, 5), 2)
        again = OverlappedDistributedOptimizer(net, optimizer.mesh, CONFIG)
        return train(net, again, range(2, 5), 2), expected, gone() is None

    for run, expected, freed in run_ranks(2, job):
        assert run.losses == expected.losses and run.norms == expected.norms and run.losses[0] != run.losses[1]
        assert freed


def test_hooks_outlive_the_garbage_collector(run_ranks: RunRanks) -> None:
    def job(rank: int) -> float:
        net, optimizer = make()
        gc.collect()
        net.head_bias.sum().backward()
        gc.collect()
        net.head_bias.sum().backward()
        return optimizer.step(lr=0.0)

    assert run_ranks(1, job) == [pytest.approx(2 * 29**0.5, rel=1e-12)]


def test_model_of_frozen_parameters_only(run_ranks: RunRanks) -> None:
    def job(rank: int) -> float:
        net = make_net("awkward").requires_grad_(False)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)
        return optimizer.step(lr=0.1)

    assert run_ranks(2, job) == [0.0, 0.0]


# -- its state in torch's form, whole on each rank, and for any number of ranks ----------------------------------------


def test_the_state_of_two_ranks_is_that_of_one(run_ranks: RunRanks) -> None:
    config = OptimizerConfig(clip=0.5, bucket_size=30)

    def train(rank: int, world: int, state: Any, numbers: range) -> Any:
        net = test_as_torchs.make_net([5, 7, 3], torch.bfloat16)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), config)
        if state is not None:
            net.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for number in numbers:
            for part in range(2)[rank::world]:
                backward(net, 2 * number + part)
            optimizer.step(lr=0.01)
        return net.state_dict(), optimizer.state_dict()

    halves = run_ranks(2, lambda rank: train(rank, 2, None, range(3)))
    for (weights, state), kind in zip(halves, ("same", "on both"), strict=True):
        assert state["state"].keys() == halves[0][1]["state"].keys(), kind
        assert {"step", "exp_avg", "exp_avg_sq", "master"} == state["state"][0].keys()
        for number, tensors in state["state"].items():
            assert all(torch.equal(tensor, halves[0][1]["state"][number][name]) for name, tensor in tensors.items())
            assert tensors["master"].dtype == torch.float32
        assert all(torch.equal(value, halves[0][0][name]) for name, value in weights.items())
    onward = run_ranks(2, lambda rank: train(rank, 2, halves[0], range(3, 5)))[0]
    whole = run_ranks(2, lambda rank: train(rank, 2, None, range(5)))[0]
    alone = train(0, 1, halves[0], range(3, 5))
    for number, tensors in whole[1]["state"].items():
        for kind, tensor in tensors.items():
            assert torch.equal(tensor, onward[1]["state"][number][kind]), "nothing is rounded on the way"
            torch.testing.assert_close(tensor, alone[1]["state"][number][kind], rtol=2e-2, atol=2e-3)
