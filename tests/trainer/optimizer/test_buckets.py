"""Buckets: runs of neighbours, aligned, padded and cut evenly, whatever the sizes; and their update in one kernel."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from energon_lite.trainer import OptimizerConfig, OverlappedDistributedOptimizer, build_mesh
from energon_lite.trainer.optimizer.bucket_plan import plan_buckets
from energon_lite.trainer.optimizer.buckets import sum_of_squares
from energon_lite.trainer.optimizer.config import ParameterGroup
from tests.testing import examples, nightly_but

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 400)), st.tuples(st.integers(1, 30), st.integers(1, 30))), min_size=1, max_size=8
)


def named(shapes: Shapes) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]


@settings(max_examples=examples(100))
@given(SHAPES, st.integers(1, 2000), st.integers(1, 12), st.booleans())
def test_buckets_are_runs_of_neighbours_that_are_aligned_padded_and_cut_evenly(
    shapes: Shapes, bucket_size: int, ranks: int, muon: bool
) -> None:
    """Muon's buckets are cut between matrices, all others anywhere."""
    config = OptimizerConfig(algorithm="muon" if muon else "adamw")
    parameters = named([(*shape, 3)[:2] for shape in shapes] if muon else shapes)
    by_rank = [plan_buckets(parameters, bucket_size, ranks, rank, config) for rank in range(ranks)]
    left = [name for name, _ in parameters]
    for plan, *others in zip(*by_rank, strict=True):
        here, left = left[: len(plan.slots)], left[len(plan.slots) :]
        assert sorted(slot.name for slot in plan.slots) == here, "a bucket is a run of the order"
        taken = sum(slot.parameter.numel() for slot in plan.slots)
        end, share = 0, plan.size // ranks
        flat = torch.full((plan.size + 5,), torch.nan)  # borrowed memory may be longer
        for slot in plan.slots:
            assert slot.start % 64 == 0 and end <= slot.start
            assert slot.stop - slot.start == slot.parameter.numel()
            # No matrix is in two slices; of others, none is left out.
            assert slot.start // share == (slot.stop - 1) // share if muon else slot.start < end + 64
            end = slot.stop
            slot.of(flat).fill_(1.0)
        assert end <= plan.size and share % (128 if muon else 32) == 0
        if not muon:
            assert taken <= bucket_size or len(plan.slots) == 1
            assert plan.size % 128 == 0 and plan.size < end + math.lcm(32 * ranks, 128)
        plan.clear_padding(flat)
        assert flat[: plan.size].sum() == taken and flat[plan.size :].isnan().all()
        shares = [one.share for one in (plan, *others)]
        assert [one.start for one in shares] == [0, *(one.stop for one in shares[:-1])]
        assert shares[-1].stop == plan.size == share * ranks
        assert {one.stop - one.start for one in shares} == {share}
    assert not left
    # As few buckets as their size allows: no neighbour of a bucket would have fitted into it.
    for one, next_one in itertools.pairwise(() if muon else by_rank[0]):
        first = min(next_one.slots, key=lambda slot: int(slot.name[1:]))
        assert sum(slot.parameter.numel() for slot in one.slots) + first.parameter.numel() > bucket_size


@given(SHAPES, st.integers(1, 2000), st.integers(1, 6))
def test_matrices_are_one_run_and_nothing_else_is_in_it(shapes: Shapes, bucket_size: int, ranks: int) -> None:
    config = OptimizerConfig(weight_decay=0.5)
    by_rank = [plan_buckets(named(shapes), bucket_size, ranks, rank, config) for rank in range(ranks)]
    for plans in zip(*by_rank, strict=True):
        decay = torch.full((plans[0].size,), torch.nan)
        for plan in plans:
            assert len(plan.runs) <= 2
            for run, rule in plan.runs:
                assert decay[plan.share][run].isnan().all(), "no element is updated twice"
                decay[plan.share][run] = rule.weight_decay
        for slot in plans[0].slots:
            assert (decay[slot.start : slot.stop] == (0.5 if slot.parameter.dim() > 1 else 0.0)).all()


def test_groups_are_runs_of_their_own() -> None:
    groups = (ParameterGroup("p[02]", weight_decay=0.3), ParameterGroup("p?", lr_scale=0.5))
    config = OptimizerConfig(groups=groups)
    [plan] = plan_buckets(named([(70,), (3, 70), (3, 7), (5,)]), 1000, 1, 0, config)
    assert [slot.name for slot in plan.slots] == ["p1", "p2", "p3", "p0"]
    found = [(run.start, run.stop, *rule) for run, rule in plan.runs]
    assert found == [(0, 256, 0.1, 0.5), (256, 320, 0.3, 1.0), (320, 384, 0.0, 0.5), (384, 512, 0.3, 1.0)]


def test_buckets_of_whole_matrices_are_nearly_full() -> None:
    """Those of a Llama with 16 layers, on 8 ranks."""
    layer: Shapes = [(256, 256), (64, 256), (64, 256), (256, 256), (688, 256), (688, 256), (256, 688)]
    plans = plan_buckets(named(layer * 16), 100_000, 8, 0, OptimizerConfig(algorithm="muon"))
    assert len(plans) > 3 and sum(plan.size for plan in plans) <= 1.15 * 16 * sum(rows * n for rows, n in layer)


# -- clip, AdamW and the rounded values: the same numbers, and what is read and written for them -----------------------

CONFIG = OptimizerConfig(bucket_size=1700, clip=2.0, groups=(ParameterGroup("2.*", lr_scale=0.5),))


def run(dtype: torch.dtype, compiled: bool) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    """Norms; state; and the operations of the last update that touch a slice of a bucket. The third step is NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20)).to(dtype)
    told = OptimizerConfig(**{**vars(CONFIG), "compile": compiled})
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), told)
    norms = []
    for number in range(6):
        factor = math.nan if number == 2 else 1.0
        (net(torch.ones(3, 30, dtype=dtype) * (number + 1)).square().sum() * factor).backward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            norms.append(optimizer.step(lr=0.01))
    touching = {
        event.name
        for event in profiler.events() or ()
        if any(shape and math.prod(shape) >= 1000 for shape in event.input_shapes) or "adamw" in event.name
    }
    state = {f"{shard.name} {kind}": t.clone() for shard in optimizer.shards() for kind, t in shard.tensors.items()}
    state |= {name: p.detach().clone() for name, p in net.named_parameters()}
    return norms, state, touching


VIEWS = {"aten::slice", "aten::as_strided", "aten::view", "aten::to", "aten::detach"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.parametrize("dtype", nightly_but({0}, [torch.bfloat16, torch.float32, torch.float64]), ids=str)
def test_one_kernel_makes_the_same_numbers(dtype: torch.dtype) -> None:
    from torch._inductor import metrics

    norms, state, touching = run(dtype, compiled=False)
    assert {"aten::mul_", "aten::_fused_adamw_"} <= touching
    assert ("aten::copy_" in touching) == (dtype == torch.bfloat16)
    metrics.reset()
    torch._dynamo.reset()
    compiled_norms, compiled_state, touching = run(dtype, compiled=True)
    assert metrics.generated_kernel_count == 1, "one kernel, whatever the size of a slice"
    reading = {name for name in touching if name.startswith("aten::")} - VIEWS
    assert reading <= {"aten::_foreach_norm", "aten::linalg_vector_norm"}, "nothing else passes over a slice"
    close = 1e-14 if dtype == torch.float64 else 1e-6
    assert math.isnan(norms[2]) and math.isnan(compiled_norms[2])
    assert compiled_norms == pytest.approx(norms, rel=close if dtype != torch.bfloat16 else 1e-2, nan_ok=True)
    for name, value in state.items():
        allowed = 1e-2 if dtype == torch.bfloat16 else close
        torch.testing.assert_close(compiled_state[name], value, rtol=allowed, atol=allowed)


def test_a_norm_is_read_without_copies() -> None:
    grads = [torch.randn(5000, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        found = sum_of_squares([*grads, grads[0].double()], torch.device("cpu"))
    touching = [e.name for e in profiler.events() or () if [5000] in e.input_shapes]
    assert touching.count("aten::copy_") == 1, "the one made here"
    assert touching.count("aten::linalg_vector_norm") == 4
    exact = sum(float(grad.double().square().sum()) for grad in [*grads, grads[0]])
    assert float(found) == pytest.approx(exact, rel=1e-6)
    assert float(sum_of_squares([], torch.device("cpu"))) == 0.0
