"""The parts of a demonstration: build data, train, kill, resume, compare."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from energon_lite.trainer import latest_checkpoint
from examples.demo import blend
from examples.demo.blend import DatasetRecipe
from examples.demo.errors import DemoError
from examples.demo.losses import Metrics, compare, read_metrics, table
from examples.demo.processes import KillWatcher
from examples.demo.report import Report
from examples.demo.run import RANKS, Run
from examples.demo.steps import Steps

#: The rank that is killed. Not the first one, which writes the metrics.
VICTIM = RANKS - 1


def make_room(config: Path, output: Path) -> tuple[Path, Path]:
    """Make empty folders for data and for runs.

    Raises:
        DemoError: the current folder is not the root of the repository.
    """
    if not config.is_file():
        raise DemoError("Start it in the root of the repository: there is no examples/ folder here.")
    # Four processes on the processor, also where there is a GPU: the run is the same everywhere.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    data, runs = output / "data", output / "runs"
    for old in (data, runs):
        shutil.rmtree(old, ignore_errors=True)
    return data, runs


def build(folder: Path, recipes: Iterable[DatasetRecipe], blended: str) -> None:
    """Write shards, prepare them, and write the blend.

    Args:
        folder: where.
        recipes: the data sets.
        blended: the metadataset that blends them.
    """
    for recipe in recipes:
        counts = blend.write_shards(recipe, folder)
        shown = " and ".join(f"{count} samples for {split}" for split, count in counts.items())
        print(f"  {folder / recipe.name}: wrote {shown} in {len(list((folder / recipe.name).glob('*.tar')))} shards")
        print(f"  $ {shlex.join(blend.prepare_command(recipe, folder))}", flush=True)
        said = blend.prepare(recipe, folder)
        print("".join(f"  {line}\n" for line in said.splitlines() if line.startswith(("Found", "Splits"))), end="")
    print(f"  {blend.write_blend(folder, blended)} blends them.")


def train(run: Run, steps: Steps) -> Metrics:
    """Run to the end, and read the metrics."""
    code = run.train()
    if code:
        raise DemoError(f"Training ended with exit code {code}. The end of {run.log}:\n{run.tail()}")
    metrics = read_metrics(run.metrics)
    if max(metrics, default=0) != steps.total:
        raise DemoError(f"{run.metrics} ends at step {max(metrics, default=0)} instead of {steps.total}.")
    return metrics


def train_until_kill(run: Run, steps: Steps) -> Metrics:
    """Run until a rank is killed, check that all processes end, and read the metrics."""
    watcher = KillWatcher(run.metrics, rank=VICTIM, after_step=steps.kill)
    code = run.train(meanwhile=watcher.look)
    kill = watcher.kill
    if kill is None:
        raise DemoError(f"Training ended before a rank could be killed. The end of {run.log}:\n{run.tail()}")
    print(f"  Killed rank {kill.rank} (process {kill.pid}) with SIGKILL when step {kill.step} was done.")
    if code == 0:
        raise DemoError("torchrun reported success although one of its ranks was killed.")
    survivors = kill.survivors()
    if survivors:
        raise DemoError(f"Processes of the killed run live on: {', '.join(map(str, survivors))}.")
    print(f"  torchrun ended with exit code {code}, and all of its processes are gone.")
    # A step or two may have been done between the look into the file and the kill.
    return read_metrics(run.metrics)


def start_again(run: Run, steps: Steps) -> Metrics:
    """Start the killed run again by the same command; return the steps that it runs now."""
    newest = latest_checkpoint(run.checkpoints)
    if newest is None or Path(newest).name != steps.checkpoint:
        raise DemoError(f"The killed run has left {newest} as its newest checkpoint instead of {steps.checkpoint}.")
    print(f"  Starting again. The newest checkpoint is {newest}; the steps after it are done twice.")
    return {step: values for step, values in train(run, steps).items() if step > steps.resume}


def check_equal(report: Report, reference: Metrics, before: Metrics, after: Metrics) -> None:
    """Compare the losses before the kill and after the new start with those of the uninterrupted run."""
    shown = {1, min(after) - 1, min(after), max(before), max(before) + 1, max(reference)}
    print(table({"uninterrupted": reference, "killed": before, "started again": after}, sorted(shown)))
    found = compare(reference, before, before)
    report.check("losses before the kill", str(found), found.identical)
    found = compare(reference, after, after)
    report.check("losses after the kill", str(found), found.identical)
