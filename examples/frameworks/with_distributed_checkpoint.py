"""torch's distributed checkpoint, as in torchtitan: one dict of all objects with a state, the loader included.

``torch.distributed.checkpoint`` calls ``state_dict`` and ``load_state_dict`` of whatever has them. The loader's state
is the same on all ranks that are in step, so one entry is enough, and it loads on any number of ranks:

    torchrun --nproc-per-node 2 -m examples.frameworks.with_distributed_checkpoint DATASET OUTPUT --steps 20
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from examples.frameworks.bytes_model import loss_of, make_loader, make_model


class Progress:
    """The number of finished steps."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(path: Path, output: Path, steps: int, *, save_every: int = 5) -> list[str]:
    """Train up to step ``steps``, from the newest checkpoint in ``output`` if there is one.

    Returns:
        The keys of the samples that this rank saw, in order.
    """
    running = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    progress = Progress()
    seen: list[str] = []
    with make_loader(path, rank=rank, world_size=world_size) as loader:
        everything = {"model": model, "loader": loader, "progress": progress}
        newest = max(output.glob("step-*"), key=lambda folder: int(folder.name[5:]), default=None)
        if newest is not None:
            dcp.load(everything, checkpoint_id=newest)
        for batch in loader:
            seen += batch["key"]
            loss = loss_of(model, batch) / world_size
            loss.backward()
            for parameter in model.parameters():
                if running:
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % save_every == 0:
                dcp.save(everything, checkpoint_id=output / f"step-{progress.step}")
            if progress.step == steps:
                break
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model, with torch's distributed checkpoint.")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    print("\n".join(train(arguments.dataset, arguments.output, arguments.steps)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
