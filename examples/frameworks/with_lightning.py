"""Lightning: a data module of savable loaders, whose position in the data is part of every checkpoint.

Batches are dealt to devices by the loader. An epoch is as many batches as the data sets hold samples for; with
``virtual_epoch_length`` it has that length.

    python -m examples.frameworks.with_lightning DATASET OUTPUT --steps 20 --devices 2
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from energon_lite.extras.frameworks.lightning import EnergonDataModule
from examples.frameworks.bytes_model import loss_of, make_loader, make_model


class Reconstruct(LightningModule):
    """The example's model, with a list of the samples it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.seen: list[str] = []

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        self.seen += batch["key"]
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(path: Path, output: Path, steps: int, *, save_every: int = 5, devices: int = 1) -> list[str]:
    """Train up to step ``steps``, from the newest checkpoint in ``output`` if there is one.

    Returns:
        The keys of the samples that this rank saw, in order.
    """
    module = Reconstruct()
    trainer = Trainer(
        accelerator="auto",
        devices=devices,
        max_steps=steps,
        default_root_dir=output,
        callbacks=[ModelCheckpoint(output, filename="{step}", every_n_train_steps=save_every, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = max(output.glob("step=*.ckpt"), key=lambda file: int(file.stem.partition("=")[2]), default=None)
    data = EnergonDataModule(lambda config: make_loader(path, rank=config.rank, world_size=config.world_size))
    with quiet():
        trainer.fit(module, data, ckpt_path=newest)
    return module.seen


class quiet(warnings.catch_warnings):
    """Without Lightning's advice to add workers to a loader of a few texts."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model with Lightning.")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    print("\n".join(train(arguments.dataset, arguments.output, arguments.steps, devices=arguments.devices)))


if __name__ == "__main__":
    main()
