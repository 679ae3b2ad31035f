"""Hugging Face Accelerate: the loader goes through ``prepare`` like any other, and nothing is skipped after a load.

``save_state`` stores its position in the data with model and optimizer, for any number of processes:

    torchrun --nproc-per-node 2 -m examples.frameworks.with_accelerate DATASET OUTPUT --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from energon_lite.extras.frameworks.accelerate import AccelerateLoader
from examples.frameworks.bytes_model import loss_of, make_loader, make_model


def train(path: Path, output: Path, steps: int, *, save_every: int = 5) -> list[str]:
    """Train up to step ``steps``, from the newest checkpoint in ``output`` if there is one.

    Returns:
        The keys of the samples that this rank saw, in order.
    """
    project = ProjectConfiguration(str(output), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), project_config=project)
    model = make_model()
    loader = make_loader(path, rank=accelerator.process_index, world_size=accelerator.num_processes)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), AccelerateLoader(loader)
    )

    done = 0
    folder = output / "checkpoints"
    if checkpoints := sorted(folder.glob("checkpoint_*"), key=lambda found: int(found.name.rpartition("_")[2])):
        accelerator.load_state(str(checkpoints[-1]))
        # Accelerate numbers its checkpoints from 0 again in each process.
        done = (int(checkpoints[-1].name.rpartition("_")[2]) + 1) * save_every
        project.iteration = done // save_every

    seen: list[str] = []
    with loader:
        for step, batch in enumerate(batches, start=done + 1):
            if step > steps:
                break
            seen += batch["key"]
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if step % save_every == 0:
                accelerator.save_state()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model with Accelerate.")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    print("\n".join(train(arguments.dataset, arguments.output, arguments.steps)))


if __name__ == "__main__":
    main()
