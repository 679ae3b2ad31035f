"""The schedule, and what an update does with groups, clipping and gradients that are not finite, on one rank."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.config import SCHEDULES, OptimizerConfig, learning_rate
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, initialize_parameters, new_parameter


class Tiny(nn.Module):
    """A matrix of ones and a bias of zeros."""

    def __init__(self, mesh: ParallelMesh):
        super().__init__()
        self.weight = new_parameter(ParameterLayout((2, 2), mean=1.0), mesh, torch.float32)
        self.bias = new_parameter(ParameterLayout((2,)), mesh, torch.float32)
        with torch.no_grad():
            self.weight.fill_(1.0)
            self.bias.fill_(0.0)


def give(model: Tiny, weight: float, bias: float) -> None:
    """Run a backward pass with these gradients."""
    (model.weight.sum() * weight + model.bias.sum() * bias).backward()


def test_warm_up_then_half_a_cosine() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup=4)
    rates = [learning_rate(step, 9, config) for step in range(9)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.6) and rates[8] == pytest.approx(0.2)
    assert all(later <= sooner for sooner, later in itertools.pairwise(rates[4:]))
    assert learning_rate(50, 9, config) == pytest.approx(0.2), "past the end it stays"
    assert learning_rate(0, 1, OptimizerConfig(lr=1.0, warmup=0)) == 1.0


def rates(schedule: str, total: int = 11, **more: float) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, warmup=2, schedule=schedule, **more)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


def test_other_schedules_by_hand() -> None:
    assert rates("constant") == [0.5] + [1.0] * 10
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    # A fifth of ten steps, rounded up, is the way down.
    assert rates("wsd", 10) == pytest.approx([0.5] + [1.0] * 7 + [0.6, 0.2])
    assert rates("wsd", 11, decay_share=1.0) == pytest.approx(rates("linear"))


@given(
    schedule=st.sampled_from(SCHEDULES), total=st.integers(1, 60), warmup=st.integers(0, 70), share=st.floats(0.01, 1.0)
)
def test_every_schedule_rises_falls_and_ends_at_its_least(schedule: str, total: int, warmup: int, share: float) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.25, warmup=warmup, schedule=schedule, decay_share=share)
    found = [learning_rate(step, total, config) for step in range(total)]
    assert all(0 < rate <= 1.0 for rate in found)
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)
    if total > warmup + 1:
        assert found[warmup] == 1.0
        assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.25)


def test_only_matrices_decay(alone: ParallelMesh) -> None:
    model = Tiny(alone)
    with torch.no_grad():
        model.bias.fill_(1.0)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig(weight_decay=0.5))
    assert optimizer.step(lr=0.1) == 0.0
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(model.bias.detach(), torch.ones(2))


def test_first_step_goes_against_the_gradient_by_the_learning_rate(alone: ParallelMesh) -> None:
    model = Tiny(alone)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig(weight_decay=0.0, clip=0.0))
    give(model, 3.0, -4.0)
    assert optimizer.step(lr=0.1) == pytest.approx(math.sqrt(4 * 9 + 2 * 16))
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), 0.9))
    torch.testing.assert_close(model.bias.detach(), torch.full((2,), 0.1))
    assert optimizer.step(lr=0.0) == 0.0, "gradients start from zero again"


def test_clipping_scales_all_gradients_alike(alone: ParallelMesh) -> None:
    model = Tiny(alone)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig(clip=1.0, betas=(0.0, 0.0)))
    give(model, 3.0, 4.0)
    norm = optimizer.step(lr=0.0)
    moments = {shard.name: shard.tensors["exp_avg"].view(shard.parameter.shape) for shard in optimizer.shards()}
    torch.testing.assert_close(moments["weight"], torch.full((2, 2), 3.0 / norm))
    torch.testing.assert_close(moments["bias"], torch.full((2,), 4.0 / norm))


def test_frozen_parameters_stay(alone: ParallelMesh) -> None:
    model = Tiny(alone)
    model.weight.requires_grad_(False)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig())
    assert [shard.name for shard in optimizer.shards()] == ["bias"]
    optimizer.step(lr=1.0)
    assert torch.equal(model.weight.detach(), torch.ones(2, 2))


def test_how_a_parameter_without_layout_begins_is_not_guessed(alone: ParallelMesh) -> None:
    with pytest.raises(UsageError, match=r"weight of shape \(2, 2\) does not say what it is a part of"):
        initialize_parameters(nn.Linear(2, 2), seed=0, mesh=alone)
