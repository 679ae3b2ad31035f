"""Report of ``energon-lite profile`` on costs that are fitted to the measurements of a run."""

from __future__ import annotations

import json
import os
from typing import Any

import click
import numpy as np

from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_file import read_cost_model, read_micro_batches, write_cost_model
from energon_lite.extras.balance.cost_fit import CostFit, fit_costs, relative_errors
from energon_lite.extras.balance.cost_model import CostModel

__all__ = ["is_measured", "report_costs"]

#: Name of the file of a run's measurements.
_TIMES = "micro_batches.jsonl"


def is_measured(path: str) -> bool:
    """True for the folder of a run or a file of measurements; False for a function's name."""
    return path.endswith(".jsonl") or os.path.isdir(path)


def report_costs(path: str, output: str | None, compared: str | None, *, as_json: bool) -> None:
    """Fit costs to the measurements of a run, and report the accuracy of their predictions.

    Args:
        path: the run's folder, or its file of measurements.
        output: file to write the costs to; None: none.
        compared: a file of costs whose predictions are evaluated as well.
        as_json: report as JSON.

    Raises:
        UsageError: there are no measurements, or too few.
    """
    file = os.path.join(path, _TIMES) if os.path.isdir(path) else path
    other = None if compared is None else read_cost_model(compared)
    sizes, seconds, prior = read_micro_batches(file)
    if not seconds:
        raise UsageError("no micro-batch was measured", where=file, fix="let the run go on: train.measure_costs=10")
    fit = fit_costs(sizes, seconds, prior)
    if output is not None:
        write_cost_model(output, fit, {"measured": os.path.abspath(file)})
    shares, error = _shares(fit.model, sizes), None
    if other is not None:
        error = float(np.abs(_scaled(other, sizes, seconds)).mean())
    if as_json:
        coefficients = fit.model.by_feature()
        accuracy = {"micro_batches": fit.micro_batches, "error": fit.error, "error_95": fit.error_95}
        click.echo(json.dumps({**accuracy, "error_of_compared": error, "shares": shares, "coefficients": coefficients}))
        return
    _say(file, fit, shares)
    if error is not None:
        click.echo(f"{compared}, scaled to the same sum, is off by {error:.1%} on average")
    if output is not None:
        click.echo(f"written to {output}: plans of new runs can use it; it changes none by itself")


def _say(file: str, fit: CostFit, shares: dict[str, float]) -> None:
    click.echo(f"{file}: {fit}")
    for name, coefficient in fit.model.by_feature().items():
        if coefficient:
            each = "each" if name == "micro_batches" else f"for each of {name}"
            click.echo(f"  {shares[name]:6.1%} of the time   {_time(coefficient):>9} {each}")


def _shares(model: CostModel, sizes: dict[str, Any]) -> dict[str, float]:
    """Share of the predicted time that each coefficient causes, by name."""
    count = len(next(iter(sizes.values())))
    times = {
        name: coefficient * (count if name == "micro_batches" else sum(sizes.get(name, ())))
        for name, coefficient in model.by_feature().items()
    }
    total = max(1, sum(times.values()))
    return {name: value / total for name, value in times.items()}


def _scaled(model: CostModel, sizes: dict[str, Any], seconds: list[float]) -> Any:
    """Relative errors of a model, scaled to the measured sum, since it may be by shape or for another device."""
    predicted = model.micro_batch_costs(sizes).sum() / 1e9
    return relative_errors(model, sizes, np.asarray(seconds) * predicted / sum(seconds))


def _time(attoseconds: int) -> str:
    for unit, size in (("s", 10**18), ("ms", 10**15), ("us", 10**12), ("ns", 10**9), ("ps", 10**6)):
        if attoseconds >= size:
            return f"{attoseconds / size:.3g} {unit}"
    return f"{attoseconds} as"
