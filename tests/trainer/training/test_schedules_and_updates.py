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
    schedule=st.sampled_from(SCHEDULES),
    total=st.integers(1, 60),
    warmup=st.integers(0, 70),
    share=st.floats(0.01, 1.0),
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(alone: ParallelMesh, bad: float) -> None:
    model = Tiny(alone)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig())
    give(model, bad, 1.0)
    assert not math.isfinite(optimizer.step(lr=0.1))
    assert torch.equal(model.weight.detach(), torch.ones(2, 2)) and optimizer.updates == 0
    give(model, 1.0, 1.0)
    assert math.isfinite(optimizer.step(lr=0.1)) and optimizer.updates == 1


def test_frozen_parameters_stay(alone: ParallelMesh) -> None:
    model = Tiny(alone)
    model.weight.requires_grad_(False)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig())
    assert [shard.name for shard in optimizer.shards()] == ["bias"]
    optimizer.step(lr=1.0)
    assert torch.equal(model.weight.detach(), torch.ones(2, 2))


def test_a_module_that_knows_nothing_of_layouts_is_trained(alone: ParallelMesh) -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    twin.load_state_dict(model.state_dict())
    optimizer, torchs = (
        OverlappedDistributedOptimizer(model, alone, OptimizerConfig(weight_decay=0.0, clip=0.0)),
        torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0),
    )
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        twin(torch.ones(1, 2)).sum().backward()
        optimizer.step(lr=0.1)
        torchs.step()
        torchs.zero_grad()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_how_a_parameter_without_layout_begins_is_not_guessed(alone: ParallelMesh) -> None:
    with pytest.raises(UsageError, match=r"weight of shape \(2, 2\) does not say what it is a part of"):
        initialize_parameters(nn.Linear(2, 2), seed=0, mesh=alone)


class Small(nn.Module):
    """A matrix in bfloat16, of values as at the start of a training run, and a bias."""

    def __init__(self, mesh: ParallelMesh):
        super().__init__()
        self.weight = new_parameter(ParameterLayout((64, 64), std=0.02), mesh, torch.bfloat16)
        self.bias = new_parameter(ParameterLayout((64,)), mesh, torch.bfloat16)
        initialize_parameters(self, seed=3, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def run_small(model: Small, optimizer: OverlappedDistributedOptimizer, steps: int, lr: float = 3e-5) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(steps):
        model(x).sum().backward()
        optimizer.step(lr=lr)
    optimizer.wait_parameters()


def test_small_updates_of_a_model_in_bfloat16_add_up(alone: ParallelMesh) -> None:
    """A step of 3e-5 is less than half of what separates two numbers of bfloat16 near 0.02: rounded off each time."""
    model = Small(alone)
    before = model.weight.detach().clone()
    run_small(model, OverlappedDistributedOptimizer(model, alone, OptimizerConfig(weight_decay=0.0)), 20)
    assert (model.weight != before).float().mean() > 0.95


def test_master_values_follow_values_that_are_loaded(alone: ParallelMesh) -> None:
    model, other = Small(alone), Small(alone)
    with torch.no_grad():
        other.weight.mul_(-1)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig())
    model.load_state_dict(other.state_dict())
    optimizer.step(lr=0.0)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(("grad_dtype", "total"), [("float32", 257.0), ("parameter", 256.0)])
def test_gradients_of_micro_batches_are_summed_in_the_type_asked_for(
    alone: ParallelMesh, grad_dtype: str, total: float
) -> None:
    """In bfloat16 256 + 1 is 256."""
    model = Small(alone)
    optimizer = OverlappedDistributedOptimizer(model, alone, OptimizerConfig(grad_dtype=grad_dtype))
    for value in (256.0, 1.0):
        (model.bias[0] * value).backward()
    assert optimizer.step(lr=0.0) == total
    assert optimizer.step(lr=0.0) == 0.0, "gradients start from zero again"
