"""Train a model that answers questions about charts: ``python -m examples.charts``, half an hour on two cores.

1. Draw charts, cut crops out of pictures, write them with questions and answers as tar shards, prepare and blend them.
2. Train a small vision-language model on four processes, as tensor parallel 2 x pipeline parallel 2.
3. Train again, kill one of the processes, resume: every loss is the same, to the last bit.
4. Ask about held-out charts, digits and crops.
5. Draw some of the charts with questions and answers, and the losses.

The results are in ``charts-output``, which is replaced. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

from energon_lite.errors import EnergonLiteError
from energon_lite.trainer import latest_checkpoint
from examples.charts import answering, figure
from examples.charts.recipes import BLEND, recipes
from examples.demo import pictures
from examples.demo.errors import DemoError
from examples.demo.parts import build, check_equal, make_room, start_again, train, train_until_kill
from examples.demo.report import Report
from examples.demo.run import Run
from examples.demo.steps import Steps

OUTPUT = Path("charts-output")
CONFIG = Path("examples/configs/charts.yaml")
LAYOUT, PIPELINE = "TP 2 x PP 2", "mesh.pp=2"
#: Least share of questions about held-out charts with exactly the right answer.
WANTED_ACCURACY = 0.80


def main() -> int:
    """Run all parts.

    Returns:
        The exit code.

    Raises:
        DemoError: a part fails.
    """
    data, runs = make_room(CONFIG, OUTPUT)
    steps, report = Steps.of(CONFIG), Report()
    first = Run(CONFIG, runs / "uninterrupted", tp=2, overrides=[PIPELINE])
    killed = Run(CONFIG, runs / "killed", tp=2, overrides=[PIPELINE])
    print(f"Questions about charts. All that is made is in {OUTPUT}; what training prints, in {runs}/*/log.txt.")

    with report.part("Draw charts, cut pictures, write them with questions as tar shards, prepare and blend them"):
        build(data, recipes(), BLEND)
    with report.part(f"Train without interruption ({LAYOUT})"):
        reference = train(first, steps)
    with report.part(f"Train again, kill a rank in the middle, start again ({LAYOUT})"):
        before = train_until_kill(killed, steps)
        after = start_again(killed, steps)
        check_equal(report, reference, before, after)
    with report.part("Ask about what was held out"):
        answers = ask(report, data, killed)
    with report.part("Draw"):
        report.pictures += [OUTPUT / "losses.png", OUTPUT / "charts.png"]
        curves = pictures.Curves(reference, before, after, None, max(before), steps.resume, (LAYOUT, ""), 1e-16)
        pictures.draw_losses(report.pictures[0], curves)
        figure.draw_answers(report.pictures[1], answers)
    print(f"\n{report}")
    for failure in report.failures:
        print(f"The run failed. {failure}", file=sys.stderr)
    return 1 if report.failures else 0


def ask(report: Report, data: Path, run: Run) -> list[answering.Answer]:
    """Part 4: answer with the model of the resumed run; return its answers about charts."""
    newest = latest_checkpoint(run.checkpoints)
    if newest is None:
        raise DemoError(f"There is no checkpoint in {run.checkpoints}.")
    charts = answering.answer_held_out(data / "charts", Path(newest))
    others = {name: answering.answer_held_out(data / name, Path(newest)) for name in ("digits", "pictures")}
    print(answering.table(answering.by_question(charts) | others))
    share, right = answering.accuracy(charts), sum(one.right for one in charts)
    text = f"{share:.1%} right ({right} of {len(charts)}), wanted {WANTED_ACCURACY:.0%}"
    report.check("answers about held-out charts", text, share >= WANTED_ACCURACY)
    return charts


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DemoError, EnergonLiteError) as error:
        sys.exit(f"The run failed. {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped.")
