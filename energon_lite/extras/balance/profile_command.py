"""``energon-lite profile``: find the largest capacity that fits into memory, or the costs of a run."""

from __future__ import annotations

import json
import os
from typing import Any

import click
import numpy as np

from energon_lite.cli import parse_bytes
from energon_lite.errors import UsageError, counted
from energon_lite.extras.balance.capacity_trial import Outcome, Trial, device_memory, largest_fitting, run_trial
from energon_lite.extras.balance.cost_fit import (
    TIMES_FILE,
    CostFit,
    fit_costs,
    read_cost_model,
    read_micro_batches,
    relative_errors,
    write_cost_model,
)
from energon_lite.extras.balance.cost_model import CostModel


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
    file = os.path.join(path, TIMES_FILE) if os.path.isdir(path) else path
    other = None if compared is None else read_cost_model(compared)
    sizes, seconds, prior = read_micro_batches(file)
    if not seconds:
        raise UsageError("no micro-batch was measured", where=file, fix="continue with train.measure_costs=10")
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
        if attoseconds >= 0.9995 * size:  # else it is rounded to 1000 of the next unit
            return f"{attoseconds / size:.3g} {unit}"
    return f"{attoseconds} as"


@click.command(name="profile", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("function")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--memory-limit", help="Memory limit, such as 6G; required on cpu.  [default: the device's memory]")
@click.option(
    "--headroom",
    type=click.FloatRange(0, 0.9),
    default=0.05,
    show_default=True,
    help="Share of the memory to leave free, for fragments, communication, and worse batches than those tried.",
)
@click.option("--start", type=click.IntRange(min=1), default=1024, show_default=True, help="First capacity to try.")
@click.option("--most", type=click.IntRange(min=1), default=1 << 20, show_default=True, help="Largest capacity to try.")
@click.option("--multiple", type=click.IntRange(min=1), default=64, show_default=True, help="Try multiples of this.")
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Steps in each trial.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Time limit of a trial in seconds.")
@click.option("--output", "-o", metavar="FILE", help="For a run: file for its costs, for plans of new runs.")
@click.option("--compare", metavar="FILE", help="For a run: file of costs whose predictions are compared.")
@click.option("--json", "as_json", is_flag=True, help="For a run: report as JSON.")
def command(
    function: str,
    device: str,
    memory_limit: str | None,
    headroom: float,
    start: int,
    most: int,
    multiple: int,
    steps: int,
    timeout: float,
    output: str | None,
    compare: str | None,
    as_json: bool,
) -> None:
    """Find the largest capacity with which FUNCTION, written module:name, fits into memory; or, if FUNCTION is the
    folder of a run, fit costs to its measurements.

    FUNCTION is called with a capacity, and makes one training step with a batch that fills it: model, loss, backward
    pass, optimizer. It should use the worst batch that your data can give: with attention that is a single sample of
    the largest length. It may return a function instead, which is then called for each step, so that the model is built
    only once.

    Each trial is a separate process with real steps: the second step has the optimizer's state in memory. Capacities
    are doubled until one does not fit, then bisected.

    A run measures its micro-batches with train.measure_costs, into micro_batches.jsonl (other trainers may write such a
    file). From these, the times of a token, of a pair of tokens, of a patch etc. are fitted, which can balance plans.

    \b
    Examples:
      energon-lite profile train:step
      energon-lite profile train:step --device cpu --memory-limit 6G --multiple 256
      energon-lite profile output/run -o costs.json
    """
    if function.endswith(".jsonl") or os.path.isdir(function):
        report_costs(function, output, compare, as_json=as_json)
        return
    if output is not None or compare is not None or as_json:
        raise UsageError(
            "--output, --compare and --json apply to a run's costs only",
            where=function,
            fix="give the run's folder, or its micro_batches.jsonl",
        )
    device = _device() if device == "auto" else device
    whole = device_memory(device) if memory_limit is None else parse_bytes(memory_limit)
    if whole is None:
        raise UsageError(
            f"the memory of {device} is unknown" if device == "cuda" else "cpu needs a limit",
            fix="give --memory-limit, such as 6G",
        )
    limit = int(whole * (1 - headroom))
    click.echo(f"{function} on {device}, {_gib(limit)} of {_gib(whole)} GiB; {counted(steps, 'step')} a try")
    outcomes: dict[int, Outcome] = {}

    def fits(capacity: int) -> bool:
        outcome = run_trial(Trial(function, capacity, steps, device, limit), timeout)
        outcomes[capacity] = outcome
        click.echo(_line(capacity, outcome))
        return outcome.fits

    best = largest_fitting(fits, start=start, most=most, multiple=multiple)
    if not best:
        smallest = min(outcomes)
        raise UsageError(
            f"not even a capacity of {smallest} fits into {_gib(limit)} GiB",
            where=function,
            fix="use a smaller model, more ranks, or activation checkpointing; or give more memory",
        )
    largest = outcomes[best]
    click.echo(f"\nThe largest capacity that fits is {best:,}: {_gib(largest.peak)} GiB, {_speed(best, largest)}.")
    if best + multiple > most:
        click.echo("Nothing larger was tried: see --most.")
    candidates = [capacity for capacity, outcome in outcomes.items() if outcome.fits]
    fastest = max(candidates, key=lambda capacity: capacity / outcomes[capacity].seconds)
    if fastest / outcomes[fastest].seconds > 1.05 * best / largest.seconds:
        click.echo(f"Faster, token for token, is {fastest:,}: {_speed(fastest, outcomes[fastest])}.")


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _line(capacity: int, found: Outcome) -> str:
    peak = f"{_gib(found.peak):>8} GiB" if found.peak else " " * 12
    return f"{capacity:>10,}  {peak}  " + (_speed(capacity, found) if found.fits else "does not fit")


def _speed(capacity: int, found: Outcome) -> str:
    return f"{found.seconds:.3g} s a step, {capacity / found.seconds:,.0f} tokens/s"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f}"
