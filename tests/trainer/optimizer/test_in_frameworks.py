"""The optimizer where frameworks want one of torch's: Accelerate prepares it, Lightning configures it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from energon_lite.errors import UsageError
from energon_lite.trainer import OptimizerConfig, OverlappedDistributedOptimizer, build_mesh


class Numbers(list):  # type: ignore[type-arg]
    """A loader of numbers; a plain list would be several loaders."""


CONFIG = OptimizerConfig(lr=0.05, clip=0.5)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def make_pair(net: nn.Module) -> tuple[OverlappedDistributedOptimizer, LambdaLR]:
    optimizer = OverlappedDistributedOptimizer(net, build_mesh(), CONFIG)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def batch(number: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def by_hand(steps: int, accumulated: int = 1) -> list[torch.Tensor]:
    net = make_net()
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
        net = make_net()
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
            self.net, self.automatic_optimization = make_net(), automatic

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
