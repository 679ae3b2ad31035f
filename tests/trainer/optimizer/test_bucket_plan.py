"""Buckets are runs of neighbours, aligned, padded and cut evenly, whatever the sizes."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from energon_lite.trainer.optimizer.bucket_plan import plan_buckets
from energon_lite.trainer.optimizer.config import OptimizerConfig, ParameterGroup

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 400)), st.tuples(st.integers(1, 30), st.integers(1, 30))), min_size=1, max_size=8
)


def named(shapes: Shapes) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]


@given(SHAPES, st.integers(1, 2000), st.integers(1, 12))
def test_buckets_are_runs_of_neighbours_that_are_aligned_padded_and_cut_evenly(
    shapes: Shapes, bucket_size: int, ranks: int
) -> None:
    parameters = named(shapes)
    by_rank = [plan_buckets(parameters, bucket_size, ranks, rank) for rank in range(ranks)]
    left = [name for name, _ in parameters]
    for plan, *others in zip(*by_rank, strict=True):
        here, left = left[: len(plan.slots)], left[len(plan.slots) :]
        assert sorted(slot.name for slot in plan.slots) == here, "a bucket is a run of the order"
        taken = sum(slot.parameter.numel() for slot in plan.slots)
        assert taken <= bucket_size or len(plan.slots) == 1
        end = 0
        flat = torch.full((plan.size + 5,), torch.nan)  # borrowed memory may be longer
        for slot in plan.slots:
            assert slot.start % 64 == 0 and end <= slot.start < end + 64
            assert slot.stop - slot.start == slot.parameter.numel()
            end = slot.stop
            slot.of(flat).fill_(1.0)
        assert plan.size % math.lcm(32 * ranks, 128) == 0 and end <= plan.size < end + math.lcm(32 * ranks, 128)
        plan.clear_padding(flat)
        assert flat[: plan.size].sum() == taken and flat[plan.size :].isnan().all()
        shares = [one.share for one in (plan, *others)]
        assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
        assert shares[-1].stop == plan.size
        assert {share.stop - share.start for share in shares} == {plan.size // ranks}
    assert not left
    # As few buckets as their size allows: no neighbour of a bucket would have fitted into it.
    for one, next_one in itertools.pairwise(by_rank[0]):
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


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1), st.integers(1, 2000), st.integers(1, 9))
def test_slices_of_muon_are_whole_matrices(shapes: Shapes, bucket_size: int, ranks: int) -> None:
    plans = plan_buckets(named(shapes), bucket_size, ranks, 0, OptimizerConfig(algorithm="muon"))
    left = [f"p{number}" for number in range(len(shapes))]
    for plan in plans:
        here, left = left[: len(plan.slots)], left[len(plan.slots) :]
        assert sorted(slot.name for slot in plan.slots) == sorted(here), "a bucket is a run of the order"
        share, end = plan.size // ranks, 0
        assert share * ranks == plan.size and share % 128 == 0
        for slot in plan.slots:
            assert slot.start >= end and slot.start % 64 == 0
            assert slot.start // share == (slot.stop - 1) // share, "no matrix is in two slices"
            end = slot.stop
        assert end <= plan.size
        flat = torch.full((plan.size,), torch.nan)
        for slot in plan.slots:
            slot.of(flat).fill_(1.0)
        assert plan.clear_padding(flat).sum() == sum(slot.parameter.numel() for slot in plan.slots)
    assert not left


def test_buckets_of_whole_matrices_are_nearly_full() -> None:
    """Those of a Llama with 16 layers, on 8 ranks."""
    layer: Shapes = [(256, 256), (64, 256), (64, 256), (256, 256), (688, 256), (688, 256), (256, 688)]
    plans = plan_buckets(named(layer * 16), 100_000, 8, 0, OptimizerConfig(algorithm="muon"))
    assert len(plans) > 3 and sum(plan.size for plan in plans) <= 1.15 * 16 * sum(rows * n for rows, n in layer)
