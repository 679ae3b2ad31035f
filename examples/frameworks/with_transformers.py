"""Hugging Face's Trainer: a mixin, and the loader as its training data.

Each checkpoint has the position in the data, and a run resumes there, on any number of processes:

    torchrun --nproc-per-node 2 -m examples.frameworks.with_transformers DATASET OUTPUT --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from energon_lite.extras.frameworks.transformers import EnergonTrainerMixin
from examples.frameworks.bytes_model import loss_of, make_loader, make_model


class Reconstruct(nn.Module):
    """The example's model, with the loss that Trainer expects of it, and a list of the samples it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.seen: list[str] = []

    def forward(self, counts: torch.Tensor, key: list[str]) -> dict[str, Any]:
        self.seen += key
        return {"loss": loss_of(self.model, {"counts": counts})}


class SavableTrainer(EnergonTrainerMixin, Trainer):
    """Trainer that saves its position in the data."""


def train(path: Path, output: Path, steps: int, *, save_every: int = 5) -> list[str]:
    """Train up to step ``steps``, from the newest checkpoint in ``output`` if there is one.

    Returns:
        The keys of the samples that this rank saw, in order.
    """
    arguments = TrainingArguments(
        str(output),
        max_steps=steps,
        save_steps=save_every,
        per_device_train_batch_size=2,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    model = Reconstruct()
    with make_loader(path, rank=arguments.process_index, world_size=arguments.world_size) as loader:
        trainer = SavableTrainer(model, arguments, train_dataset=loader)
        trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*")))
    return model.seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model with Hugging Face's Trainer.")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    print("\n".join(train(arguments.dataset, arguments.output, arguments.steps)))


if __name__ == "__main__":
    main()
