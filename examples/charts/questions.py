"""Questions about a chart with answers of one word."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.charts.drawing import Chart

PLACES = ("first", "second", "third", "fourth", "fifth")
NUMBERS = ("zero", "one", "two", "three", "four", "five")
#: The kinds of questions about charts.
KINDS = ("how many", "highest", "lowest", "place", "compare")
#: For training, two questions about each chart, one of each group: harder ones come more often.
TRAINED = (("how many", "highest", "highest", "lowest", "lowest"), ("place", "compare"))


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Args:
        kind: one of :data:`KINDS`.
        text: the question.
        answer: one word.
    """

    kind: str
    text: str
    answer: str


def ask(chart: Chart, kind: str, random_: random.Random) -> Question:
    """A question of a kind about a chart.

    Example:
        >>> ask(Chart(("red", "blue"), (3, 7)), "highest", random.Random(0))
        Question(kind='highest', text='Which bar is highest?', answer='blue')
    """
    bars = dict(zip(chart.colours, chart.heights, strict=True))
    if kind == "how many":
        return Question(kind, "How many bars?", NUMBERS[len(bars)])
    if kind == "highest":
        return Question(kind, "Which bar is highest?", max(bars, key=bars.__getitem__))
    if kind == "lowest":
        return Question(kind, "Which bar is lowest?", min(bars, key=bars.__getitem__))
    if kind == "place":
        place = random_.randrange(len(bars))
        return Question(kind, f"Which bar is {PLACES[place]}?", chart.colours[place])
    one, other = random_.sample(chart.colours, 2)
    return Question(kind, f"Is {one} higher than {other}?", "yes" if bars[one] > bars[other] else "no")
