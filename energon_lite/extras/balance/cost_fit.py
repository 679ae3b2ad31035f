"""Fit of a cost model's coefficients to measured micro-batches, and the files of measurements and of cost models."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.documents import load_yaml, located
from energon_lite.documents.node import Node
from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_model import MICRO_BATCH_NUMBERS, CostModel, Quadratic
from energon_lite.storage.files.atomic_file import write_bytes

Floats = NDArray[np.float64]

#: File in a run's output folder: a line for each measured step.
TIMES_FILE = "micro_batches.jsonl"
#: Least number of micro-batches for a fit.
_LEAST = 8
#: Least number of micro-batches for each coefficient.
_FOR_EACH = 2
#: Errors beyond this multiple of the median error get less weight: the machine was probably disturbed.
_FAR = 3.0
#: Bound on the rounds of reweighting.
_ROUNDS = 8


@dataclass(frozen=True)
class CostFit:
    """Fitted cost model, with its accuracy.

    Attributes:
        model: the cost model.
        micro_batches: number of micro-batches that it was fitted to.
        error: mean relative error of a prediction, ``|predicted - measured| / measured``, over micro-batches that were
            not part of the fit: each half is predicted by a fit to the other half.
        error_95: 95th percentile of the same errors.
    """

    model: CostModel
    micro_batches: int
    error: float
    error_95: float

    def __str__(self) -> str:
        return (
            f"fitted by {self.micro_batches:,} micro-batches; predictions of others are off by {self.error:.1%} on "
            f"average, 95 % of them by less than {self.error_95:.1%}"
        )


def fit_costs(sizes: Mapping[str, Any], seconds: Any, prior: CostModel | None = None) -> CostFit:
    """Fit a cost model to measured micro-batches: non-negative least squares of relative errors.

    If two sizes are proportional, as when each sample has one image of the same size, the times do not determine which
    of them causes the cost. Predictions for such micro-batches do not depend on it, but plans may. Then the prior
    decides.

    Args:
        sizes: sizes of each micro-batch by name, ``[micro-batches]`` each; the names are those of
            :meth:`CostModel.micro_batch_costs`.
        seconds: duration of each micro-batch, forward and backward, ``[micro-batches]``.
        prior: costs, in any unit, that the result stays near to as far as the times allow: those of the model's shape.
            None: costs of 0.

    Raises:
        UsageError: too few micro-batches, or invalid times.

    Example:
        >>> tokens = np.arange(1000, 3000, 100)
        >>> fit = fit_costs({"tokens": tokens, "images": tokens % 7}, 2e-6 * tokens + 1e-3 * (tokens % 7) + 5e-3)
        >>> model = fit.model
        >>> [round(cost, -9) for cost in (model.language.b, model.encoder.c, model.micro_batch)]  # attoseconds
        [2000000000000, 1000000000000000, 5000000000000000]
    """
    times = np.asarray(seconds, dtype=np.float64)
    columns = {name: np.asarray(sizes[name], dtype=np.float64) for name in _names(sizes)}
    if times.ndim != 1 or any(column.shape != times.shape for column in columns.values()):
        shapes = {name: list(column.shape) for name, column in columns.items()} | {"seconds": list(times.shape)}
        raise UsageError(
            f"sizes and times are not of the same micro-batches: {shapes}", fix="give seconds and all sizes for each"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise UsageError(
            "the seconds of a micro-batch are not a positive number", fix="leave out micro-batches without rows"
        )
    columns = {"micro_batches": np.ones(len(times)), **{name: size for name, size in columns.items() if size.any()}}
    if len(times) < max(_LEAST, _FOR_EACH * len(columns)):
        raise UsageError(
            f"{len(times)} micro-batches are too few to fit {len(columns)} coefficients",
            fix=f"measure at least {max(_LEAST, _FOR_EACH * len(columns))}, of different sizes",
        )
    table = np.stack(list(columns.values()), axis=1)
    expected = None
    if prior is not None:
        known = prior.by_feature()
        expected = np.array([float(known.get(name, 0)) for name in columns])
    halves = [np.arange(len(times)) % 2 == half for half in (0, 1)]
    errors = np.zeros(len(times))
    for half in halves:
        errors[half] = np.abs(table[half] @ _solve(table[~half], times[~half], expected) / times[half] - 1)
    coefficients = dict(zip(columns, _solve(table, times, expected).tolist(), strict=True))
    model = CostModel.from_features({name: round(value * 1e18) for name, value in coefficients.items()})
    return CostFit(model, len(times), float(errors.mean()), float(np.quantile(errors, 0.95)))


def relative_errors(model: CostModel, sizes: Mapping[str, Any], seconds: Any) -> Floats:
    """Relative errors of a model's predictions: ``predicted / measured - 1``, ``[micro-batches]``."""
    return model.micro_batch_costs(sizes) / 1e9 / np.asarray(seconds, dtype=np.float64) - 1


def _names(sizes: Mapping[str, Any]) -> list[str]:
    """Known size names in their fixed order, then the others, sorted."""
    known = [name for name in MICRO_BATCH_NUMBERS if name in sizes]
    return known + sorted(sizes.keys() - {*MICRO_BATCH_NUMBERS, "micro_batches"})


def _solve(table: Floats, times: Floats, expected: Floats | None) -> Floats:
    """Non-negative coefficients with the least relative errors; outliers get less weight."""
    weights = np.ones(len(times))
    rows = table / times[:, None]
    spread, towards = _expected(rows, expected)
    solution = np.zeros(table.shape[1])
    noise = 0.0
    for _ in range(_ROUNDS):
        root, pull = np.sqrt(weights), noise / spread
        drawn = np.concatenate([rows * root[:, None], np.diag(pull)])
        solution = _non_negative(drawn, np.concatenate([root, pull * towards]))
        errors = np.abs(rows @ solution - 1)
        noise = max(float(np.median(errors)), 1e-12)
        weights = np.minimum(1.0, _FAR * noise / np.maximum(errors, 1e-300))
    return solution


def _expected(rows: Floats, expected: Floats | None) -> tuple[Floats, Floats]:
    """Allowed deviation of each coefficient from its expected value, and that value, in the unit of the times.

    As in Bayesian regression, the noisier the times, the closer the coefficients stay. The deviation is the expected
    value itself; if that is 0, the value that would make a tenth of the time; without any prior, all of the time.
    """
    share = 1.0 if expected is None else 0.1
    expected = np.zeros(rows.shape[1]) if expected is None else expected
    predicted = rows @ expected
    towards = expected * float(predicted.sum() / max(float(predicted @ predicted), 1e-300))
    return np.where(towards > 0, towards, share / np.maximum(rows.mean(axis=0), 1e-300)), towards


def _non_negative(table: Floats, wanted: Floats) -> Floats:
    """``x >= 0`` with the least ``|table @ x - wanted|``, by the active set method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(table, axis=0)
    table = table / np.where(scale > 0, scale, 1.0)
    count = table.shape[1]
    chosen = np.zeros(count, dtype=bool)
    solution = np.zeros(count)
    for _ in range(10 * count):
        gradient = np.where(chosen | (scale == 0), -np.inf, table.T @ (wanted - table @ solution))
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * len(wanted):
            break
        chosen[best] = True
        while chosen.any():
            part = np.zeros(count)
            part[chosen] = np.linalg.lstsq(table[:, chosen], wanted, rcond=None)[0]
            below = chosen & (part <= 0)
            if not below.any():
                solution = part
                break
            # Move towards it as far as no coefficient gets negative; those that reach 0 leave the active set.
            step = float((solution[below] / np.maximum(solution[below] - part[below], 1e-300)).min())
            solution = np.maximum(solution + step * (part - solution), 0.0)
            solution[below & (solution <= 1e-15)] = 0.0
            chosen &= solution > 0
    return solution / np.where(scale > 0, scale, 1.0)


_FORMAT = 1


def write_cost_model(
    path: str | os.PathLike[str], model: CostModel | CostFit, about: Mapping[str, Any] | None = None
) -> None:
    """Write a cost model atomically.

    Args:
        path: the file.
        model: the model, or the result of a fit.
        about: further plain data for readers of the file; it has no effect.

    Example:
        >>> write_cost_model("costs.json", CostModel(Quadratic(a=2_000_000, b=5_000_000_000)), {"device": "H100"})
    """
    document: dict[str, Any] = {"format": _FORMAT, "unit": "attoseconds"}
    if isinstance(model, CostFit):
        document |= {"micro_batches": model.micro_batches, "error": model.error, "error_95": model.error_95}
        model = model.model
    document |= {"about": dict(about or {}), "coefficients": model.by_feature()}
    write_bytes(os.fspath(path), (json.dumps(document, indent=1) + "\n").encode())


def read_cost_model(path: str | os.PathLike[str]) -> CostModel:
    """Read a cost model that :func:`write_cost_model` or a person wrote; YAML is accepted, too.

    Raises:
        ConfigError: the file does not exist, or is not a cost model.
    """
    return cost_model(load_yaml(path))


def cost_model(node: Node | None) -> CostModel:
    """Return the cost model of a document; None: one in which nothing costs anything."""
    if node is None:
        return CostModel(Quadratic())
    entries = node.mapping(["format", "coefficients"], ["model", "unit", "about", "micro_batches", "error", "error_95"])
    if entries["format"].integer() != _FORMAT:
        raise entries["format"].error("costs of another format", f"this release reads format {_FORMAT}; fit them again")
    if "unit" in entries and entries["unit"].string() != "attoseconds":
        raise entries["unit"].error("coefficients are in attoseconds (10**-18 s)", "write unit: attoseconds")
    coefficients: Node = entries["coefficients"]
    with located(coefficients):
        return CostModel.from_features({name: node.integer() for name, node in coefficients.entries().items()})


class MeasuredMicroBatches(NamedTuple):
    """Measurements of a run: the arguments of :func:`fit_costs`.

    Attributes:
        sizes: sizes by name, ``[micro-batches]`` each.
        seconds: time of each micro-batch, ``[micro-batches]``.
        prior: cost model that the run expected from the shape of its model; None: not in the file.
    """

    sizes: dict[str, list[int]]
    seconds: list[float]
    prior: CostModel | None = None


def read_micro_batches(path: str | os.PathLike[str]) -> MeasuredMicroBatches:
    """Read the measured micro-batches of a run, for :func:`fit_costs`: sizes by name, and seconds.

    Each line is the JSON of a step: ``{"seconds": [0.5, ...], "sizes": {"tokens": [900, ...], ...}}``, optionally with
    ``"prior"``: coefficients by name. The reference trainer writes this file; other trainers may. Micro-batches without
    a positive time are left out, and so is a truncated last line. Lines may name their ``"place"``, a layout and a
    device: if there are several places, only lines of the last line's place are read.

    Args:
        path: the file.

    Raises:
        UsageError: the file does not exist, or a line has another form.
    """
    measured: list[tuple[dict[str, int], float]] = []
    last, prior = "", None
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith("\n"):
                    break
                place, prior, more = _micro_batches(line, f"{os.fspath(path)}, line {number}")
                if place != last:
                    measured.clear()
                measured += more
                last = place
    except OSError as error:
        raise UsageError(
            f"what a run has measured cannot be read: {error.strerror}",
            where=os.fspath(path),
            fix="measure some steps: train.measure_costs=10",
        ) from None
    names = sorted({name for sizes, _ in measured for name in sizes})
    columns = {name: [sizes.get(name, 0) for sizes, _ in measured] for name in names}
    return MeasuredMicroBatches(columns, [seconds for _, seconds in measured], prior)


def _micro_batches(line: str, where: str) -> tuple[str, CostModel | None, list[tuple[dict[str, int], float]]]:
    """The place of a line, its prior, and the sizes and seconds of its micro-batches."""
    try:
        step = json.loads(line)
        seconds = [float(value) for value in step["seconds"]]
        sizes = step["sizes"]
        place = str(step.get("place", ""))
        prior = CostModel.from_features(step["prior"]) if "prior" in step else None
        columns = {str(name): [int(value) for value in values] for name, values in sizes.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"not a measured step: {type(error).__name__}: {error}", where=where, fix=_LIKE) from None
    if any(len(values) != len(seconds) for values in columns.values()):
        raise UsageError("sizes and seconds differ in number", where=where, fix=_LIKE)
    micro_batches = [
        ({name: values[number] for name, values in columns.items()}, duration)
        for number, duration in enumerate(seconds)
        if duration > 0
    ]
    return place, prior, micro_batches


_LIKE = 'a line is like {"seconds": [0.5], "sizes": {"tokens": [900]}}'
