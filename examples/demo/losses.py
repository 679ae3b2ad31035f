"""Metrics of runs, read and compared step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.errors import DemoError

#: Metrics of a run by step, as they stand in its file.
Metrics = dict[int, dict[str, Any]]

#: Values that must agree between runs: the loss, and the norm of the whole gradient.
COMPARED = ("loss", "grad_norm")


def read_metrics(path: Path) -> Metrics:
    """The lines of a metrics file by step, without a truncated last line."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return {values["step"]: values for values in map(json.loads, lines)}


def last_step(path: Path) -> int:
    """The newest step in a metrics file that a run is writing; 0 if there is none yet."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 4096))
            lines = stream.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


@dataclass(frozen=True)
class Comparison:
    """Differences between two runs on the compared steps.

    Args:
        first, last: the range of steps.
        steps: how many were compared.
        equal: on how many all values are equal to the last bit.
        largest: the largest difference of two losses, in nats per token.
        at: the step where it is.
    """

    first: int
    last: int
    steps: int
    equal: int
    largest: float
    at: int

    @property
    def identical(self) -> bool:
        """Every value of every step is equal to the last bit."""
        return self.equal == self.steps

    def __str__(self) -> str:
        if self.identical:
            return f"steps {self.first} to {self.last}: all {self.steps} equal to the last bit"
        return (
            f"steps {self.first} to {self.last}: {self.equal} of {self.steps} equal to the last bit, "
            f"largest difference {self.largest:.1e} at step {self.at}"
        )


def compare(reference: Metrics, other: Metrics, steps: Iterable[int], names: Iterable[str] = COMPARED) -> Comparison:
    """Compare two runs on some steps.

    Args:
        reference, other: the runs.
        steps: which steps; at least one.
        names: the values that must be equal for a step to count as equal.

    Raises:
        DemoError: a run lacks one of the steps, or its value is not a number.
    """
    wanted, names = sorted(steps), list(names)
    if not wanted:
        raise DemoError("There are no steps to compare.")
    differences: dict[int, float] = {}
    equal = 0
    for step in wanted:
        mine, yours = (_values(run, step, names) for run in (reference, other))
        equal += mine == yours
        differences[step] = abs(mine["loss"] - yours["loss"])
    at = max(wanted, key=lambda step: differences[step])
    return Comparison(wanted[0], wanted[-1], len(wanted), equal, differences[at], at)


def table(runs: Mapping[str, Metrics], steps: Iterable[int]) -> str:
    """Losses side by side with all their digits; a dash for a missing step."""
    width = 21
    lines = ["  step" + "".join(f"  {name:>{width}}" for name in runs)]
    for step in steps:
        cells = [repr(run[step]["loss"]) if step in run else "-" for run in runs.values()]
        lines.append(f"{step:6d}" + "".join(f"  {cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def _values(run: Metrics, step: int, names: list[str]) -> dict[str, float]:
    if step not in run:
        raise DemoError(f"Step {step} is missing in one of the runs.")
    values = {name: run[step].get(name) for name in {*names, "loss"}}
    for name, value in values.items():
        if not isinstance(value, float) or value != value:
            raise DemoError(f"The {name} of step {step} is {value!r}.")
    return {name: float(run[step][name]) for name in values}
