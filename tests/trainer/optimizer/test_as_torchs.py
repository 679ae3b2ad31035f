"""The optimizer in the place of one of torch's: groups, schedulers, states, clipping, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from energon_lite.errors import UsageError
from energon_lite.trainer import OptimizerConfig, OverlappedDistributedOptimizer, build_mesh, learning_rate
from energon_lite.trainer.optimizer.config import SCHEDULES, ParameterGroup
from tests.testing import examples

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False),
    "warm-up, then steps": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.StepLR(optimizer, 1)], [2]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0),
}


def make_net(widths: list[int], dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for n, m in itertools.pairwise(widths) for layer in (nn.Linear(n, m), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def theirs(net: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with a group for each rule, in the order in which they come."""
    groups: dict[object, dict[str, Any]] = {}
    for name, p in net.named_parameters():
        rule = config.rule(name, p.dim())
        group = {"params": [], "lr": config.lr * rule.lr_scale, "weight_decay": rule.weight_decay}
        groups.setdefault(rule, group)["params"].append(p)
    return torch.optim.AdamW([*groups.values()], lr=config.lr, betas=config.betas, eps=config.eps)


def backward(net: nn.Module, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    first = next(net.parameters())
    x = torch.randn(5, first.shape[1], generator=generator, dtype=torch.float64).to(first.dtype)
    loss = net(x).square().sum()
    loss.backward()
    return float(loss.detach())


def clip_exactly(net: nn.Module, most: float) -> None:
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((most / norm).clamp(max=1.0))


@settings(max_examples=examples(25), deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    schedule=st.sampled_from([*SCHEDULERS]),
    clip=st.sampled_from([0.0, 0.3, 1e9]),
    bucket_size=st.sampled_from([1, 40, None]),
    grouped=st.booleans(),
)
def test_a_schedule_trains_as_it_trains_torchs_adamw(
    widths: list[int], schedule: str, clip: float, bucket_size: int | None, grouped: bool
) -> None:
    groups = [ParameterGroup("0.weight", lr_scale=0.5), ParameterGroup("*.bias", weight_decay=0.3)] if grouped else []
    config = OptimizerConfig(lr=0.05, clip=clip, bucket_size=bucket_size, groups=tuple(groups))
    ours, other = make_net(widths), make_net(widths)
    pairs: list[tuple[Any, Any, Any]] = []
    for net, optimizer in (
        (ours, OverlappedDistributedOptimizer(ours, build_mesh(), config)),
        (other, theirs(other, config)),
    ):
        pairs.append((net, optimizer, SCHEDULERS[schedule](optimizer)))
    assert pairs[0][1].state_dict()["state"] == {}, "as torch's before the first step"
    for number in range(6):
        for net, optimizer, scheduler in pairs:
            optimizer.zero_grad()
            loss = backward(net, number)
            if net is other and clip:
                clip_exactly(net, clip)
            optimizer.step()
            scheduler.step(loss) if schedule == "plateau" else scheduler.step()
        assert [group["lr"] for group in pairs[0][1].param_groups] == [
            group["lr"] for group in pairs[1][1].param_groups
        ]
    for mine, their in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-11, atol=1e-13)
    mine, their = (optimizer.state_dict()["state"] for _, optimizer, _ in pairs)
    assert not pairs[0][1].state, "the copies are not kept"
    assert mine.keys() == their.keys() and mine[0].keys() == their[0].keys()
    for number, tensors in their.items():
        for kind, tensor in tensors.items():
            torch.testing.assert_close(mine[number][kind], tensor, rtol=1e-10, atol=1e-13)


def test_dropped_gradients_are_gone() -> None:
    kept, clean = make_net([4, 3]), make_net([4, 3])
    for net in (kept, clean):
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), OptimizerConfig(clip=0.0))
        for number in range(3):
            if net is kept:
                backward(net, 7 + number)
                optimizer.zero_grad(set_to_none=False)
                assert all(p.grad is None for p in net.parameters())
            backward(net, number)
            optimizer.step(lr=0.1)
    assert all(map(torch.equal, kept.parameters(), clean.parameters()))


def test_a_state_from_before_the_first_step_has_no_moments() -> None:
    net = make_net([4, 3])
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), OptimizerConfig())
    start, values = optimizer.state_dict(), {name: value.clone() for name, value in net.state_dict().items()}
    backward(net, 0)
    optimizer.step(lr=0.1)
    optimizer.load_state_dict(start)
    net.load_state_dict(values)
    backward(net, 1)
    optimizer.step(lr=0.1)
    other = make_net([4, 3])
    anew = OverlappedDistributedOptimizer(other, build_mesh(), OptimizerConfig())
    backward(other, 1)
    anew.step(lr=0.1)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_what_it_cannot_do_it_says() -> None:
    net = make_net([4, 3])
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), OptimizerConfig())
    with pytest.raises(UsageError, match="after the optimizer was made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    optimizer.begin_step(1)
    optimizer.zero_grad()  # there is nothing to drop yet
    backward(net, 0)
    with pytest.raises(UsageError, match="amid a step"):
        optimizer.zero_grad()
    optimizer.end_micro_batch()
    assert optimizer.step() > 0


def test_weight_decay_of_a_group_may_change() -> None:
    for algorithm in ("adamw", "sgd", "muon"):
        net = make_net([4, 3])
        weight = next(net.parameters())
        before = weight.detach().clone()
        config = OptimizerConfig(weight_decay=0.0, algorithm=algorithm)
        optimizer = OverlappedDistributedOptimizer(net, build_mesh(), config)
        for group in optimizer.param_groups:
            group["weight_decay"], group["lr"] = 0.5, 0.1
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before * 0.95, msg=algorithm)


# -- schedules of its own ----------------------------------------------------------------------------------------------


def rates(schedule: str, total: int = 11, **more: float) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.2, "warmup": 2, "schedule": schedule} | more)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


def test_schedules_by_hand() -> None:
    assert rates("constant") == [0.5] + [1.0] * 10
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    cosine = [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2]
    assert rates("cosine", 9, warmup=4) == pytest.approx(cosine) and rates("cosine", 1, warmup=0) == [1.0]
    # A fifth of ten steps, rounded up, is the way down.
    assert rates("wsd", 10) == pytest.approx([0.5] + [1.0] * 7 + [0.6, 0.2])
    assert rates("wsd", 11, decay_share=1.0) == pytest.approx(rates("linear"))
    assert learning_rate(50, 9, OptimizerConfig(lr=1.0, min_lr=0.2)) == pytest.approx(0.2), "past the end it stays"


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


# -- where frameworks want one of torch's: Accelerate prepares it, Lightning configures it ----------------------------


class Numbers(list):  # type: ignore[type-arg]
    """A loader of numbers; a plain list would be several loaders."""


def make_pair(net: nn.Module) -> tuple[OverlappedDistributedOptimizer, lr_scheduler.LambdaLR]:
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), OptimizerConfig(lr=0.05, clip=0.5))
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def batch(number: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def by_hand(steps: int, accumulated: int = 1) -> list[torch.Tensor]:
    net = make_net([4, 6, 1])
    optimizer, scheduler = make_pair(net)
    for step in range(steps):
        for number in range(accumulated):
            (net(batch(step * accumulated + number)).square().mean() / accumulated).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in net.parameters()]


def test_accelerate_prepares_saves_and_loads_it(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(first: int, last: int) -> list[torch.Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = make_net([4, 6, 1])
        optimizer, scheduler = make_pair(net)
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        if first:
            accelerator.load_state(str(tmp_path))
        for number in range(2 * first, 2 * last):
            with accelerator.accumulate(net):
                accelerator.backward(net(batch(number)).square().mean())
                if accelerator.sync_gradients:
                    with pytest.raises(UsageError, match=r"OptimizerConfig\(clip="):
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(str(tmp_path), safe_serialization=False)  # buckets share memory
        accelerator.free_memory()
        return [p.detach() for p in net.parameters()]

    train(0, 3)
    assert all(map(torch.equal, train(3, 5), by_hand(5, accumulated=2)))


def test_lightning_configures_saves_and_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning import pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self, automatic: bool):
            super().__init__()
            self.net, self.automatic_optimization = make_net([4, 6, 1]), automatic

        def training_step(self, _: Any) -> Any:
            loss = self.net(batch(self.global_step)).square().mean()
            if self.automatic_optimization:
                return loss
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[union-attr, call-arg]
            return None

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = make_pair(self.net)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train(steps: int, *, automatic: bool, path: str | None = None, **more: Any) -> Any:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", devices=1, enable_checkpointing=False, **quiet, **more
        )
        module = Module(automatic)
        trainer.fit(module, Numbers(range(9)), ckpt_path=path)
        return trainer, [p.detach() for p in module.net.parameters()]

    for automatic in (True, False):
        path = str(tmp_path / f"{automatic}.ckpt")
        train(3, automatic=automatic)[0].save_checkpoint(path)
        saved = torch.load(path, weights_only=False)["optimizer_states"][0]
        assert {"step", "exp_avg", "exp_avg_sq"} == saved["state"][0].keys()
        _, found = train(6, automatic=automatic, path=path)
        assert all(map(torch.equal, found, by_hand(6))), automatic
    with pytest.raises(UsageError, match=r"OptimizerConfig\(clip="):
        train(1, automatic=True, gradient_clip_val=0.5)


def test_a_parameter_without_elements_is_no_obstacle() -> None:
    net = make_net([3, 2])
    net[0].none = nn.Parameter(torch.zeros(0, dtype=torch.float64))
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), OptimizerConfig())
    before = net[0].weight.detach().clone()
    backward(net, 0)
    assert optimizer.step(lr=0.1) > 0 and not torch.equal(before, net[0].weight)
