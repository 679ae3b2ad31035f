"""The first steps of the run in other layouts of ranks: one for each axis, and one with all."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

from examples.demo.errors import DemoError
from examples.demo.losses import Metrics, read_metrics

#: Optimizer steps that are compared: enough for an error to grow, and few enough to be fast.
STEPS = 10
#: Seconds after which a group of ranks counts as stuck.
PATIENCE = 300.0


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes.

    Args:
        tp, pp, cp, dp: tensor, pipeline, context and data parallel.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def overrides(self) -> list[str]:
        """The settings that ask for it; data parallelism takes the remaining ranks."""
        return [f"mesh.tp={self.tp}", f"mesh.pp={self.pp}", f"mesh.cp={self.cp}"]

    def __str__(self) -> str:
        sizes = ((axis, getattr(self, axis)) for axis in ("tp", "pp", "cp", "dp"))
        return " x ".join(f"{axis.upper()} {size}" for axis, size in sizes if size > 1)


LAYOUTS = (Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(tp=2, pp=2, cp=2, dp=2))


def train_in(layout: Layout, config: Path, output: Path, steps: int = STEPS, overrides: Sequence[str] = ()) -> Metrics:
    """Run the first steps in a layout, with forked processes, which need no imports.

    Args:
        layout: of the ranks.
        config: the YAML file; its number of steps, and so its learning rates, stay.
        output: a folder for metrics and what the ranks print.
        steps: their number.
        overrides: more settings, ``section.key=value``.

    Returns:
        The metrics of these steps.

    Raises:
        DemoError: a rank failed, or all took too long.
    """
    import torch

    torch.set_num_threads(1)  # a forked process cannot use the threads that this one has started
    # The first optimizer of a process imports torch's compiler, which takes seconds: here once, not in each rank.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    output.mkdir(parents=True, exist_ok=True)
    log = output / "log.txt"
    settings = [f"output={output}", "data.workers=0", *layout.overrides, *overrides]
    room = Path(tempfile.mkdtemp(prefix="ranks-"))
    context = multiprocessing.get_context("fork")
    ranks: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, layout.ranks, room, log, config, settings, steps))
        for rank in range(layout.ranks)
    ]
    for process in ranks:
        process.start()
    try:
        good = _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        shutil.rmtree(room)
    if not good:
        raise DemoError(f"Training as {layout} failed. The end of {log}:\n{log.read_text(errors='replace')[-3000:]}")
    return read_metrics(output / "metrics.jsonl")


def _wait(ranks: Sequence[BaseProcess]) -> bool:
    """Wait until all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in ranks]
        if any(code not in (0, None) for code in codes):
            time.sleep(0.5)  # other ranks may still write messages
            return False
        if None not in codes:
            return True
        time.sleep(0.02)
    return False


def _rank(rank: int, world: int, room: Path, log: Path, config: Path, settings: Sequence[str], steps: int) -> None:
    """Run one rank. It never returns, so that the rest of the parent's program does not run here."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with open(log, "ab", buffering=0) as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        _train(rank, world, room, config, settings, steps)
        code = 0
    except BaseException:
        os.write(2, f"rank {rank}:\n{traceback.format_exc()}".encode())
    finally:
        os._exit(code)


def _train(rank: int, world: int, room: Path, config: Path, settings: Sequence[str], steps: int) -> None:
    import torch.distributed as dist

    from energon_lite.extras.inspect import MetricsFile
    from energon_lite.trainer import Trainer, load_config

    store = dist.FileStore(str(room / "meeting"), world)
    limit = timedelta(seconds=PATIENCE / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    loaded = load_config(config, settings)
    with Trainer(loaded) as trainer:
        metrics = MetricsFile(Path(loaded.output) / "metrics.jsonl", after=0) if rank == 0 else None
        batches = iter(trainer.loader)
        for step in range(1, steps + 1):
            values = trainer.step(step, batches)
            if metrics is not None:
                metrics.write(values)
        dist.barrier()  # other ranks may still need messages of this one
