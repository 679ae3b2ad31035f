"""How long a checkpoint holds training up: saved at once, and saved while training goes on.

A model of about 200 MB of state (float32 values and two moments) is saved to a local folder, in turns by
``save_checkpoint``, which returns when all is on disk, and by ``CheckpointSaver.save``, which returns when it is
copied. Between two saves of the second kind the script waits until the first is on disk, as a training loop would that
saves less often than that takes. The mark: what is lost to the loop is below 5 % of the synchronous time.

How to read it: "held up" is the time that the loop was stopped; the ratio is of the medians. It is of this disk: on a
slower one, or over a network, what is saved at once takes longer, and copying does not.

    python tools/bench/checkpoint.py [--runs 7] [--megabytes 200] [--folder DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, spread, table

from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver, save_checkpoint
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--folder", help="where to save; a temporary folder if left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mesh = build_mesh()
    model, optimizer = make(arguments.megabytes, mesh)
    size = 12 * sum(p.numel() for p in model.parameters()) / 1e6
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        at_once, held_up = measure(Path(folder), model, optimizer, mesh, arguments.runs)
    ratio = statistics.median(held_up) / statistics.median(at_once)
    speed = f"{size / statistics.median(at_once):.0f}"
    print(f"{machine()}; {size:.0f} MB of state")
    header = ["saved at once, s", "MB/s", "held up by a save meanwhile, s", "ratio"]
    print(table(header, [[spread(at_once), speed, spread(held_up, 3), f"{100 * ratio:.1f} %"]]))


def make(megabytes: int, mesh: Any) -> tuple[LlamaModel, OverlappedDistributedOptimizer]:
    """A model with as much state, and its optimizer."""
    layers = max(1, round(megabytes * 1e6 / 12 / (16 * 512 * 512)))
    shape = ModelConfig(hidden_size=512, num_layers=layers, num_heads=8, ffn_size=2048, vocab_size=512)
    model = LlamaModel(shape, mesh)
    return model, OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())


def measure(folder: Path, model: Any, optimizer: Any, mesh: Any, runs: int) -> tuple[list[float], list[float]]:
    """Seconds that each way of saving held up its caller, in turns; a first save of each is not counted."""
    saver = CheckpointSaver(folder / "meanwhile", mesh, keep=1)
    at_once, held_up = [], []
    for step in range(runs + 1):
        began = time.perf_counter()
        save_checkpoint(folder / "at-once", step, model, optimizer, mesh, {}, keep=1)
        at_once.append(time.perf_counter() - began)
        saver.save(step, model, optimizer, {})
        held_up.append(saver.seconds_blocked)
        saver.finish()
    return at_once[1:], held_up[1:]


if __name__ == "__main__":
    main()
