"""A demonstration on real data, in minutes on two cores: ``python -m examples.demo`` in the repository's root.

1. Write two data sets as tar shards, prepare them with ``energon-lite prepare``, blend them.
2. Train on four processes, as tensor parallel 2 x data parallel 2.
3. Train again, kill one of the processes, resume: every loss is the same, to the last bit.
4. Resume a checkpoint of the first run as tensor parallel 1 x data parallel 4: the losses agree.
5. Repeat the first steps in five other layouts, one for each axis and one with all: the losses agree.
6. Read the held-out digits with the trained model.
7. Draw the losses and the digits.

The results are in ``demo-output``, which is replaced. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from energon_lite.errors import EnergonLiteError
from energon_lite.trainer import latest_checkpoint
from examples.demo import blend, layout_picture, layouts, pictures, reading
from examples.demo.errors import DemoError
from examples.demo.losses import Metrics, compare, table
from examples.demo.parts import build, check_equal, make_room, start_again, train, train_until_kill
from examples.demo.report import Report
from examples.demo.run import Run
from examples.demo.steps import Steps

OUTPUT = Path("demo-output")
CONFIG = Path("examples/configs/digits.yaml")
LAYOUT, OTHER_LAYOUT = "TP 2 x DP 2", "TP 1 x DP 4"
#: Largest difference of losses in another layout, in nats per token: sums in another order are rounded differently.
TOLERANCE = 1e-5
#: Least share of held-out captions that are exactly right.
WANTED_ACCURACY = 0.90


def main() -> int:
    """Run the demo.

    Returns:
        The exit code.

    Raises:
        DemoError: a part fails.
    """
    data, runs = make_room(CONFIG, OUTPUT)
    steps, report = Steps.of(CONFIG), Report()
    first = Run(CONFIG, runs / "uninterrupted", tp=2)
    killed = Run(CONFIG, runs / "killed", tp=2)
    moved = Run(CONFIG, runs / "other-layout", tp=1)
    print(f"A demo of energon_lite. All that it makes is in {OUTPUT}; what training prints, in {runs}/*/log.txt.")

    with report.part("Write two data sets as tar shards, prepare and blend them"):
        build(data, blend.recipes(), blend.BLEND)
    with report.part(f"Train without interruption ({LAYOUT})"):
        reference = train(first, steps)
    with report.part(f"Train again, kill a rank, start again ({LAYOUT})"):
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


def go_on_elsewhere(first: Run, run: Run, steps: Steps) -> Metrics:
    """Part 4: resume a copy of a checkpoint of the first run; return the steps of this part."""
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
    """Part 6: read digits with the trained model."""
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
