"""A picture of charts with questions and the model's answers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from examples.charts.answering import Answer, accuracy, by_question
from examples.demo.pictures import pyplot

_GREEN, _RED = "#1a7f37", "#d11f1f"
#: Charts side by side, for each kind of question.
COLUMNS = 8


def draw_answers(path: Path, answers: Sequence[Answer]) -> None:
    """A row for each kind of question: its first charts, wrong answers among them as often as among all.

    Args:
        path: of the PNG file.
        answers: about charts.
    """
    plt = pyplot()
    kinds = by_question(answers)
    figure, rows = plt.subplots(
        len(kinds), COLUMNS, figsize=(1.45 * COLUMNS, 2.0 * len(kinds)), squeeze=False, layout="constrained"
    )
    for row, (kind, those) in zip(rows, kinds.items(), strict=True):
        for axes, answer in zip(row, typical(those, COLUMNS), strict=False):
            axes.imshow(answer.image.permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set_title("\n".join(textwrap.wrap(answer.question, 18)), fontsize=8)
            said = answer.said if answer.right else f"{answer.said} (not {answer.wanted})"
            axes.set_xlabel(said, fontsize=9, color=_GREEN if answer.right else _RED, weight="bold")
        for axes in row:
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(f"{kind}: {accuracy(those):.0%}", fontsize=10, weight="bold")
    right = f"{sum(answer.right for answer in answers)} of {len(answers)} right ({accuracy(answers):.1%})"
    figure.suptitle(f"Charts that the model has not seen, and its answers: {right}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def typical(answers: Sequence[Answer], number: int) -> list[Answer]:
    """Some of the answers, the first ones, of which the share that is wrong is that of all, rounded."""
    wrong = [answer for answer in answers if not answer.right]
    right = [answer for answer in answers if answer.right]
    few = round(number * len(wrong) / len(answers))
    return right[: number - few] + wrong[:few]
