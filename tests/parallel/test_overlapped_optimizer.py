"""The overlapped optimizer makes the run that one process makes with torch's own, and none of its kind's mistakes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_net import AwkwardNet, Batch, Run, make_steps, serial_run, train, unlike
from late_collectives import watched_collectives
from rank_processes import RunRanks
from test_parity import BASE, EVERY, LAST, Layout, assert_same, plain_run_in_child, train_on
from test_parity import Run as LlamaRun
from test_parity import make_steps as make_llama_steps

from energon_lite.errors import UsageError
from energon_lite.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.training.config import OptimizerConfig
from energon_lite.training.llama import LlamaModel
from energon_lite.training.step import train_step

# Adam divides by the size of the gradient: where that is rounding noise, eps keeps noise from becoming a step.
CONFIG = OptimizerConfig(weight_decay=0.1, eps=1e-6, clip=1.5, bucket_size=60)
STEPS = 20


def config(**changes: Any) -> OptimizerConfig:
    return dataclasses.replace(CONFIG, **changes)


def make(dtype: torch.dtype = torch.float64, *, mesh: ParallelMesh | None = None, **changes: Any) -> Any:
    """A net, its optimizer and the mesh."""
    mesh = mesh or build_mesh()
    net = AwkwardNet(dtype)
    return net, OverlappedDistributedOptimizer(net, mesh, config(**changes)), mesh


def assert_close(run: Run, serial: Run, dtype: torch.dtype) -> None:
    found = unlike(run, serial)
    limits = {"losses": 1e-6, "norms": 1e-6, "parameters": 1e-5}
    for what, difference in found.items():
        assert difference <= (1e-12 if dtype == torch.float64 else limits[what]), (what, found)


# -- equal to one process ----------------------------------------------------------------------------------------------

Case = tuple[torch.dtype, str, int | None, str, int]
F32, F64 = torch.float32, torch.float64
#: By number of ranks: type, when gradients are reduced, bucket size, algorithm, micro-batches of a rank.
CASES: dict[int, list[Case]] = {
    1: [(F64, "last", None, "adamw", 8), (F32, "every", 60, "sgd", 3)],
    2: [(F64, "every", 1, "adamw", 2), (F32, "last", 60, "adamw", 8), (F64, "last", 60, "sgd", 1)],
    3: [(F64, "every", 60, "adamw", 4), (F32, "last", None, "adamw", 1)],
    4: [(F64, "last", 1, "adamw", 1), (F32, "every", None, "sgd", 2)],
    5: [(F32, "every", 60, "adamw", 1)],
    6: [(F64, "last", 60, "sgd", 1)],
    7: [(F64, "every", 60, "adamw", 1)],
    8: [(F64, "every", None, "adamw", 1)],
}
ALL_CASES = list(itertools.product([F32, F64], ["last", "every"], [1, 60, None], ["adamw", "sgd"], [1, 2, 8]))


def run_cases(world: int, cases: list[Case], run_ranks: RunRanks) -> None:
    def job(rank: int) -> list[Run]:
        runs = []
        for dtype, reduce, bucket_size, algorithm, micro_batches in cases:
            net, optimizer, mesh = make(dtype, reduce=reduce, bucket_size=bucket_size, algorithm=algorithm)
            runs.append(train(net, optimizer, mesh, make_steps(STEPS, world * micro_batches)))
        return runs

    by_rank = run_ranks(world, job, timeout=900.0)
    for runs in by_rank:
        for run, first, case in zip(runs, by_rank[0], cases, strict=True):
            serial = serial_run(make_steps(STEPS, world * case[4]), case[0], config(algorithm=case[3]))
            assert max(serial.norms) > CONFIG.clip > min(serial.norms), "clipping was not tested"
            assert_close(run, serial, case[0])
            assert run.losses == first.losses and run.norms == first.norms
            assert all(torch.equal(run.weights[name], first.weights[name]) for name in run.weights)


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


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_two_runs_have_the_same_bits(run_ranks: RunRanks, reduce: str) -> None:
    def job(rank: int) -> Run:
        net, optimizer, mesh = make(F32, reduce=reduce)
        return train(net, optimizer, mesh, make_steps(6, 6))

    one, two = run_ranks(3, job)[0], run_ranks(3, job)[0]
    assert one.losses == two.losses and one.norms == two.norms
    assert all(torch.equal(weight, two.weights[name]) for name, weight in one.weights.items())


@pytest.mark.parametrize("reduce", ["last", "every"])
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 1, "tp": 3}], ids=str)
def test_partial_sums_are_summed_over_their_axis_and_counted_once(
    run_ranks: RunRanks, sizes: dict[str, int], reduce: str
) -> None:
    """Each tensor-parallel rank (or end of a pipeline) sees a part of the tokens, and has all of each parameter."""
    other = "tp" if "tp" in sizes else "pp"
    sum_over = ("tp",) if other == "tp" else ("ends",)
    world = sizes["dp"] * sizes[other]
    steps = make_steps(8, world * 2)

    def job(rank: int) -> Run:
        mesh = build_mesh(**sizes)
        net = AwkwardNet(F64, sum_over=sum_over)
        optimizer = OverlappedDistributedOptimizer(net, mesh, config(reduce=reduce))
        return train(net, optimizer, mesh, steps, spread=("dp", other))

    for run in run_ranks(world, job):
        assert_close(run, serial_run(steps, F64, CONFIG), F64)


def test_copies_on_tensor_parallel_ranks_count_once(run_ranks: RunRanks) -> None:
    steps = make_steps(8, 4)

    def job(rank: int) -> Run:
        net, optimizer, mesh = make(mesh=build_mesh(dp=2, tp=2))
        return train(net, optimizer, mesh, steps)

    for run in run_ranks(4, job):
        assert_close(run, serial_run(steps, F64, CONFIG), F64)


@pytest.mark.parametrize("grad_dtype", ["float32", "parameter"])
@pytest.mark.parametrize("reduce", ["last", "every"])
def test_bfloat16_has_master_values_in_float32(run_ranks: RunRanks, reduce: str, grad_dtype: str) -> None:
    """Updates far below the precision of bfloat16 add up."""

    def job(rank: int) -> tuple[float, float]:
        net, optimizer, _mesh = make(torch.bfloat16, reduce=reduce, grad_dtype=grad_dtype, weight_decay=0.0, clip=0.0)
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


@pytest.mark.parametrize("layout", [Layout(pp=2, virtual=2, dp=2), Layout(tp=2, cp=2, pp=2, sp=True)], ids=str)
@pytest.mark.parametrize("settings", [LAST, EVERY], ids=["last", "every"])
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


@pytest.mark.parametrize("settings", [LAST, EVERY], ids=["last", "every"])
def test_chunks_with_empty_micro_batches_make_the_plain_run(run_ranks: RunRanks, settings: OptimizerConfig) -> None:
    """Each replica's empty micro-batches are at other places, so their chunks are done in other orders."""
    layout = Layout(pp=2, virtual=2, dp=2)
    kinds = ("mixed", "text", "empty", "mixed", "text", "empty", "mixed", "text", "empty", "empty", "image", "mixed")
    steps = make_llama_steps(kinds)[:3]
    small = dataclasses.replace(settings, bucket_size=1)
    runs = run_ranks(4, lambda rank: train_on(BASE, steps, layout, settings=small))
    assert_same(runs, plain_run_in_child(run_ranks, BASE, runs[0].start, steps), 1e-12)


@pytest.mark.parametrize(("reduce", "times"), [("last", 1), ("every", 4)])
def test_gradients_leave_behind_the_backward_pass(run_ranks: RunRanks, reduce: str, times: int) -> None:
    batch = make_steps(1, 1)[0][0]

    def job(rank: int) -> tuple[int, list[int], list[str]]:
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
        return len(optimizer._queue), [*counts, before], launched[before:]

    for buckets, counts, after in run_ranks(2, job):
        assert buckets > 5
        # The bucket of what is never used is last, and waits for the end of the micro-batch; no other does.
        inside = [buckets * number + buckets - 1 for number in range(4)] if times == 4 else [0, 0, 0, buckets - 1]
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


# -- gradients that come otherwise than expected -----------------------------------------------------------------------


def test_the_first_step_shows_the_true_order(run_ranks: RunRanks) -> None:
    def job(rank: int) -> tuple[list[str], list[str], list[list[str]]]:
        net, optimizer, mesh = make()
        expected = list(optimizer.order)
        # Only the second rank uses what is rare, and only in its first micro-batch.
        batches = [dataclasses.replace(batch, rare=number == 1) for number, batch in enumerate(make_steps(1, 4)[0])]
        train(net, optimizer, mesh, [batches])
        return expected, optimizer.order, [[slot.name for slot in bucket.slots] for bucket in optimizer._queue]

    runs = run_ranks(2, job)
    for expected, order, in_buckets in runs:
        assert order == runs[0][1] != expected
        trained = ["head_bias", "norm", "last", "first", "table"]
        places = [min(i for i, name in enumerate(order) if name.startswith(start)) for start in trained]
        assert places == sorted(places)
        assert {name.partition(".")[0] for name in order[-4:]} == {"unused", "rare"}
        # Each bucket is a run of that order.
        left = list(order)
        for names in in_buckets:
            assert sorted(left[: len(names)]) == sorted(names)
            del left[: len(names)]
        assert not left


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_ranks_may_use_different_parameters(run_ranks: RunRanks, reduce: str) -> None:
    """Gradients come in another order on each rank; collectives must not."""
    steps = [
        [dataclasses.replace(b, rare=n % 2 == s % 2) for n, b in enumerate(step)]
        for s, step in enumerate(make_steps(6, 4))
    ]

    def job(rank: int) -> Run:
        net, optimizer, mesh = make(reduce=reduce, bucket_size=1)
        return train(net, optimizer, mesh, steps)

    for run in run_ranks(2, job):
        assert_close(run, serial_run(steps, F64, CONFIG), F64)


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_a_micro_batch_may_have_several_backward_passes(run_ranks: RunRanks, reduce: str) -> None:
    batches = make_steps(4, 4)

    def job(rank: int) -> list[float]:
        net, optimizer, _mesh = make(reduce=reduce, clip=0.0)
        norms = []
        for step in batches:
            mine = step[rank::2]
            optimizer.begin_step(len(mine))
            for batch in mine:
                for row in (slice(0, 2), slice(2, None)):
                    part = Batch(batch.words[row], batch.labels[row], batch.mask[row], rare=False)
                    net.loss_sum(part).backward()
                optimizer.end_micro_batch()
            norms.append(optimizer.step(lr=0.01))
        return norms

    def whole(rank: int) -> list[float]:
        net, optimizer, _mesh = make(reduce=reduce, clip=0.0)
        norms = []
        for step in batches:
            for batch in step[rank::2]:
                net.loss_sum(dataclasses.replace(batch, rare=False)).backward()
            norms.append(optimizer.step(lr=0.01))
        return norms

    assert run_ranks(2, job)[0] == pytest.approx(run_ranks(2, whole)[0], rel=1e-12)


@pytest.mark.parametrize("reduce", ["last", "every"])
def test_a_gradient_too_many_is_an_error_and_not_lost(run_ranks: RunRanks, reduce: str) -> None:
    batch = make_steps(1, 1)[0][0]

    def job(rank: int) -> str:
        net, optimizer, mesh = make(reduce=reduce)
        train(net, optimizer, mesh, make_steps(1, 2))
        optimizer.begin_step(1)
        net.loss_sum(batch).backward()
        with pytest.raises(UsageError) as caught:
            net.loss_sum(batch).backward()
        return str(caught.value)

    assert all("after its bucket was reduced" in text for text in run_ranks(2, job))


def test_a_micro_batch_too_few_is_an_error(run_ranks: RunRanks) -> None:
    def job(rank: int) -> None:
        _net, optimizer, _mesh = make()
        optimizer.begin_step(2)
        optimizer.end_micro_batch()
        with pytest.raises(UsageError, match="1 of 2 micro-batches ended"):
            optimizer.step(lr=0.1)

    run_ranks(1, job)


def test_ranks_with_unequal_numbers_of_micro_batches_are_told(run_ranks: RunRanks) -> None:
    def job(rank: int) -> str:
        _net, optimizer, _mesh = make(reduce="every")
        with pytest.raises(UsageError) as caught:
            optimizer.begin_step(2 + rank)
        return str(caught.value)

    assert all("2 micro-batches on one data-parallel rank and 3 on" in text for text in run_ranks(2, job))


def test_a_loop_that_says_nothing_gets_the_same(run_ranks: RunRanks) -> None:
    steps = make_steps(4, 4)

    def job(rank: int) -> list[float]:
        net, optimizer, _mesh = make(reduce="every")
        norms = []
        for batches in steps:
            tokens = float(sum(batch.mask.sum() for batch in batches))
            for batch in batches[rank::2]:
                (net.loss_sum(batch) / tokens).backward()
            norms.append(optimizer.step(lr=0.0))
        return norms

    def said(rank: int) -> list[float]:
        norms = []
        for batches in steps:
            net, optimizer, mesh = make(reduce="last")
            norms += train(net, optimizer, mesh, [batches]).norms
        return norms

    assert run_ranks(2, job)[0] == pytest.approx(run_ranks(2, said)[0], rel=1e-12)


# -- what else went wrong elsewhere ------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(run_ranks: RunRanks) -> None:
    def job(rank: int) -> tuple[float, int, bool, float]:
        net, optimizer, mesh = make(F32, clip=1.0)
        train(net, optimizer, mesh, make_steps(2, 2))
        before = {name: value.clone() for name, value in net.state_dict().items()}
        state = [tensor.clone() for piece in optimizer.pieces() for tensor in piece.tensors.values()]
        (net.head_bias.sum() * (float("inf") if rank == 1 else 1.0)).backward()
        norm = optimizer.step(lr=0.1)
        kept = all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        now = [tensor for piece in optimizer.pieces() for tensor in piece.tensors.values()]
        kept = kept and all(map(torch.equal, state, now))
        updates = optimizer.updates
        net.head_bias.sum().backward()
        return norm, updates, kept, optimizer.step(lr=0.1)

    for norm, updates, kept, following in run_ranks(2, job):
        assert norm == float("inf") and updates == 2 and kept
        assert following == pytest.approx(2 * 13**0.5, rel=1e-6)  # two ranks, thirteen ones


def test_several_models_in_one_process(run_ranks: RunRanks) -> None:
    def job(rank: int) -> tuple[list[Run], Run]:
        steps = make_steps(3, 4)
        mesh = build_mesh()
        pairs = [make(mesh=mesh) for _ in range(2)]
        runs: list[list[Run]] = [[], []]
        for step in steps:
            for which, (net, optimizer, _) in enumerate(pairs):
                runs[which].append(train(net, optimizer, mesh, [step]))
        alone = make(mesh=mesh)
        expected = [train(alone[0], alone[1], mesh, [step]) for step in steps]
        return [runs[0][-1], runs[1][-1]], expected[-1]

    for pair, alone in run_ranks(2, job):
        assert all(run.losses == alone.losses and run.norms == alone.norms for run in pair)


def test_hooks_outlive_the_garbage_collector(run_ranks: RunRanks) -> None:
    def job(rank: int) -> float:
        net, optimizer, _mesh = make()
        gc.collect()
        net.head_bias.sum().backward()
        gc.collect()
        net.head_bias.sum().backward()
        return optimizer.step(lr=0.0)

    assert run_ranks(1, job) == [pytest.approx(2 * 13**0.5, rel=1e-12)]


def test_frozen_parameters_are_left_alone(run_ranks: RunRanks) -> None:
    def job(rank: int) -> tuple[bool, bool]:
        net, optimizer, mesh = make()
        before, memory = net.frozen.weight.clone(), net.frozen.weight.data_ptr()
        train(net, optimizer, mesh, make_steps(2, 1))
        named = {piece.name for piece in optimizer.pieces()}
        unchanged = torch.equal(before, net.frozen.weight) and memory == net.frozen.weight.data_ptr()
        return unchanged, any(name.startswith("frozen") for name in named)

    assert run_ranks(1, job) == [(True, False)]


def test_model_of_frozen_parameters_only(run_ranks: RunRanks) -> None:
    def job(rank: int) -> float:
        net = AwkwardNet()
        net.requires_grad_(False)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)
        return optimizer.step(lr=0.1)

    assert run_ranks(2, job) == [0.0, 0.0]


# -- memory ------------------------------------------------------------------------------------------------------------


def held(optimizer: OverlappedDistributedOptimizer) -> int:
    """Bytes of all tensors that the optimizer or the model holds, each storage once."""
    tensors = [buffer.values for buffer in optimizer.buffers]
    tensors += [buffer.grads for buffer in optimizer.buffers if buffer.grads is not None]
    tensors += [buffer for free in optimizer._free.values() for buffer in free]
    for bucket in optimizer._queue:
        tensors += [bucket.owned.grad, *bucket.owned.tensors.values()]
        tensors += [bucket.grads] if bucket.grads is not None else []
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("reduce", ["last", "every"])
def test_memory_is_what_the_formula_says(run_ranks: RunRanks, reduce: str, world: int) -> None:
    """In bytes for each parameter in bfloat16: 2 + 4 + 12/dp, or 2 + 16/dp and a pool of buckets."""
    model_config = dataclasses.replace(
        BASE, hidden_size=64, ffn_size=96, num_layers=4, dtype="bfloat16", image_size=0, vocab_multiple=64
    )

    def job(rank: int) -> tuple[int, int, int, int]:
        mesh = build_mesh()
        model = LlamaModel(model_config, mesh)
        settings = dataclasses.replace(CONFIG, reduce=reduce, bucket_size=9000)
        optimizer = OverlappedDistributedOptimizer(model, mesh, settings)
        most = 0
        for micro_batches in make_llama_steps(("text",) * 2 * world)[:3]:
            train_step(model, optimizer, micro_batches[rank::world], mesh, lr=0.01)
            most = max(most, held(optimizer))
        assert all(p.grad is None for p in model.parameters())
        largest = max(bucket.values.numel() for bucket in optimizer._queue)
        pool = sum(tensor.numel() for free in optimizer._free.values() for tensor in free)
        return most, sum(p.numel() for p in model.parameters()), largest, pool

    for most, parameters, largest, pool in run_ranks(world, job):
        if reduce == "last" or world == 1:
            formula = parameters * (2 + 4 + 12 / world)
            assert pool == 0
        else:
            formula = parameters * (2 + 16 / world) + 4 * pool
            assert largest <= pool <= 5 * largest, "three under way, one being filled, one begun"
        assert most == pytest.approx(formula, rel=0.05)
