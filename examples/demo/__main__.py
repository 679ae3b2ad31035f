"""The whole way on real data, in some minutes on two cores: ``python -m examples.demo`` in the repository's root.

1. Write two data sets as tar shards, prepare them with ``energon-lite prepare``, blend them.
2. Train on four processes, as tensor parallel 2 x data parallel 2.
3. Train again, kill one of the processes in the middle, start again: every loss is the same, to the last bit.
4. Go on from a checkpoint of the first run as tensor parallel 1 x data parallel 4: the losses agree.
5. Do the first steps again in five other layouts, one for each axis and one with all: the losses agree.
6. Read the held-out digits with the trained model.
7. Draw the losses and the digits.

Everything is made anew in ``demo-output``. The exit code is 1 if something is not as it should be.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from energon_lite.errors import EnergonLiteError
from energon_lite.trainer.training import latest_checkpoint
from examples.demo import blend, layout_picture, layouts, pictures, reading
from examples.demo.errors import DemoError
from examples.demo.losses import Metrics, compare, read_metrics, table
from examples.demo.processes import KillWatcher
from examples.demo.report import Report
from examples.demo.run import RANKS, Run
from examples.demo.steps import Steps

OUTPUT = Path("demo-output")
CONFIG = Path("examples/configs/digits.yaml")
LAYOUT, OTHER_LAYOUT = "TP 2 x DP 2", "TP 1 x DP 4"
#: The rank that is killed. Not the first one, which writes the metrics: the others have to notice by themselves.
VICTIM = RANKS - 1
#: How far losses in another layout may be off, in nats per token: sums in another order are rounded otherwise.
TOLERANCE = 1e-5
#: The share of held-out captions that has to be right, letter for letter.
WANTED_ACCURACY = 0.90


def main() -> int:
    """Run the demo.

    Returns:
        The exit code.

    Raises:
        DemoError: it cannot go on.
    """
    if not CONFIG.is_file():
        raise DemoError("Start it in the root of the repository: there is no examples/ folder here.")
    # Four processes on the processor, also where there is a GPU: the demo is the same everywhere.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    steps, report = Steps.of(CONFIG), Report()
    data, runs = OUTPUT / "data", OUTPUT / "runs"
    for old in (data, runs):
        shutil.rmtree(old, ignore_errors=True)
    first = Run(CONFIG, runs / "uninterrupted", tp=2)
    killed = Run(CONFIG, runs / "killed", tp=2)
    moved = Run(CONFIG, runs / "other-layout", tp=1)
    print(f"A demo of energon_lite. All that it makes is in {OUTPUT}; what training prints, in {runs}/*/log.txt.")

    with report.part("Write two data sets as tar shards, prepare and blend them"):
        build(data)
    with report.part(f"Train without interruption ({LAYOUT})"):
        reference = train(first, steps)
    with report.part(f"Train again, kill a rank in the middle, start again ({LAYOUT})"):
        before = train_until_kill(killed, steps)
        after = start_again(killed, steps)
        check_equal(report, reference, before, after)
    with report.part(f"Go on from step {steps.resume} in another layout ({OTHER_LAYOUT})"):
        elsewhere = go_on_elsewhere(first, moved, steps)
        check_close(report, reference, elsewhere)
    with report.part(f"Do the first {layouts.STEPS} steps in {len(layouts.LAYOUTS)} more layouts"):
        beginnings = begin_in_layouts(report, reference, runs / "layouts")
    with report.part("Read the held-out digits"):
        readings = read(report, data / "digits", first)
    with report.part("Draw"):
        report.pictures += [OUTPUT / "losses.png", OUTPUT / "digits.png", OUTPUT / "layouts.png"]
        curves = pictures.Curves(
            reference, before, after, elsewhere, max(before), steps.resume, (LAYOUT, OTHER_LAYOUT), TOLERANCE
        )
        pictures.draw_losses(report.pictures[0], curves)
        pictures.draw_digits(report.pictures[1], readings)
        layout_picture.draw_layouts(report.pictures[2], (LAYOUT, reference), beginnings, TOLERANCE)
    print(f"\n{report}")
    for failure in report.failures:
        print(f"The demo failed. {failure}", file=sys.stderr)
    return 1 if report.failures else 0


def build(folder: Path) -> None:
    """Part 1: shards, indexes and the blend."""
    for recipe in blend.recipes():
        counts = blend.write_shards(recipe, folder)
        shown = " and ".join(f"{count} samples for {split}" for split, count in counts.items())
        print(f"  {folder / recipe.name}: wrote {shown} in {len(list((folder / recipe.name).glob('*.tar')))} shards")
        print(f"  $ {shlex.join(blend.prepare_command(recipe, folder))}", flush=True)
        said = blend.prepare(recipe, folder)
        print("".join(f"  {line}\n" for line in said.splitlines() if line.startswith(("Found", "Splits"))), end="")
    print(f"  {blend.write_blend(folder)} blends them.")


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
    """Part 3: run until a rank is killed, see that everything ends, and read the metrics as they were left."""
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
    """Start the killed run again, by the very same command; returns the steps that it does now."""
    newest = latest_checkpoint(run.checkpoints)
    if newest is None or Path(newest).name != steps.checkpoint:
        raise DemoError(f"The killed run has left {newest} as its newest checkpoint instead of {steps.checkpoint}.")
    print(f"  Starting again. The newest checkpoint is {newest}; the steps after it are done twice.")
    return {step: values for step, values in train(run, steps).items() if step > steps.resume}


def check_equal(report: Report, reference: Metrics, before: Metrics, after: Metrics) -> None:
    """Part 3: compare the losses before the kill and after the new start with those of the uninterrupted run."""
    shown = {1, min(after) - 1, min(after), max(before), max(before) + 1, max(reference)}
    print(table({"uninterrupted": reference, "killed": before, "started again": after}, sorted(shown)))
    found = compare(reference, before, before)
    report.check("losses before the kill", str(found), found.identical)
    found = compare(reference, after, after)
    report.check("losses after the kill", str(found), found.identical)


def go_on_elsewhere(first: Run, run: Run, steps: Steps) -> Metrics:
    """Part 4: go on from a copy of a checkpoint of the first run; returns the steps that are done here."""
    shutil.copytree(first.checkpoints / steps.checkpoint, run.checkpoints / steps.checkpoint)
    print(f"  Copied {first.checkpoints / steps.checkpoint} to {run.checkpoints}.")
    return train(run, steps)


def check_close(report: Report, reference: Metrics, elsewhere: Metrics) -> None:
    """Part 4: compare the losses in another layout with the first run's."""
    found = compare(reference, elsewhere, elsewhere)
    shown = {found.first, (found.first + found.last) // 2, found.at, found.last}
    print(table({LAYOUT: reference, OTHER_LAYOUT: elsewhere}, sorted(shown)))
    text = f"largest difference of {found.steps} steps {found.largest:.1e}, allowed {TOLERANCE:.0e}"
    report.check("losses in another layout", text, found.largest <= TOLERANCE)


def begin_in_layouts(report: Report, reference: Metrics, folder: Path) -> dict[str, Metrics]:
    """Part 5: the first steps in other layouts, compared with the first run's."""
    found: dict[str, Metrics] = {}
    for number, layout in enumerate(layouts.LAYOUTS):
        metrics = layouts.train_in(layout, CONFIG, folder / str(number))
        found[str(layout)] = metrics
        same = compare(reference, metrics, metrics)
        text = f"{layout.ranks} ranks, largest difference of {same.steps} steps {same.largest:.1e}"
        report.check(f"losses as {layout}", f"{text}, allowed {TOLERANCE:.0e}", same.largest <= TOLERANCE)
    print(table({LAYOUT: reference} | found, [1, layouts.STEPS // 2, layouts.STEPS]))
    return found


def read(report: Report, data: Path, run: Run) -> list[reading.Reading]:
    """Part 6: let the trained model read."""
    newest = latest_checkpoint(run.checkpoints)
    if newest is None:
        raise DemoError(f"There is no checkpoint in {run.checkpoints}.")
    readings = reading.read_held_out(data, newest)
    share, right = reading.accuracy(readings), sum(one.right for one in readings)
    text = f"{share:.1%} right ({right} of {len(readings)}), wanted {WANTED_ACCURACY:.0%}"
    report.check("captions of held-out digits", text, share >= WANTED_ACCURACY)
    return readings


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DemoError, EnergonLiteError) as error:
        sys.exit(f"The demo failed. {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped.")
