"""The coefficients of a cost model by what a run has measured: how long micro-batches took, and what was in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_model import MICRO_BATCH_NUMBERS, CostModel

__all__ = ["CostFit", "fit_costs", "relative_errors"]

Floats = NDArray[np.float64]

#: Micro-batches that are needed, at least; and for each coefficient.
_LEAST, _FOR_EACH = 8, 2
#: Errors beyond so many times the median one count less and less: a micro-batch during which the machine did else.
_FAR, _ROUNDS = 3.0, 8


@dataclass(frozen=True)
class CostFit:
    """A fitted cost model, and how far it is to be trusted.

    Attributes:
        model: the cost model.
        micro_batches: by how many it was fitted.
        error: mean relative error of a prediction, ``|predicted - measured| / measured``, over micro-batches that it
            was not fitted by: of two halves, each was predicted by a fit of the other.
        error_95: the one that 95 % of these are below.
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
    """Fit a cost model by measured micro-batches: non-negative least squares of relative errors.

    Where numbers come together, as when each sample has one image of the same size, the times do not tell which of them
    makes the cost: predictions of such micro-batches do not depend on it, and plans may. The prior decides it then.

    Args:
        sizes: what is in each micro-batch, by name: ``[micro-batches]`` each; names as
            :meth:`CostModel.micro_batch_costs` has them.
        seconds: how long each took, forward and backward, ``[micro-batches]``.
        prior: costs, in any unit, to which it comes as near as the times allow: those by the model's shape. None: costs
            of 0.

    Raises:
        UsageError: too few micro-batches, or times that are none.

    Example:
        >>> tokens = np.arange(1000, 3000, 100)
        >>> fit = fit_costs({"tokens": tokens, "images": tokens % 7}, 2e-6 * tokens + 1e-3 * (tokens % 7) + 5e-3)
        >>> model = fit.model
        >>> [round(one, -9) for one in (model.language.b, model.encoder.c, model.micro_batch)]  # attoseconds
        [2000000000000, 1000000000000000, 5000000000000000]
    """
    times = np.asarray(seconds, dtype=np.float64)
    columns = {name: np.asarray(sizes[name], dtype=np.float64) for name in _names(sizes)}
    if times.ndim != 1 or any(column.shape != times.shape for column in columns.values()):
        shapes = {name: list(column.shape) for name, column in columns.items()} | {"seconds": list(times.shape)}
        raise UsageError(
            f"sizes and times are not of the same micro-batches: {shapes}", fix="give one of each for each"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise UsageError(
            "a micro-batch took no time, or no number of seconds", fix="leave out micro-batches without rows"
        )
    columns = {"micro_batches": np.ones(len(times)), **{name: one for name, one in columns.items() if one.any()}}
    if len(times) < max(_LEAST, _FOR_EACH * len(columns)):
        raise UsageError(
            f"{len(times)} micro-batches are too few to tell {len(columns)} coefficients",
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
    found = dict(zip(columns, _solve(table, times, expected).tolist(), strict=True))
    model = CostModel.from_features({name: round(value * 1e18) for name, value in found.items()})
    return CostFit(model, len(times), float(errors.mean()), float(np.quantile(errors, 0.95)))


def relative_errors(model: CostModel, sizes: Mapping[str, Any], seconds: Any) -> Floats:
    """How far a model's predictions are off: ``predicted / measured - 1``, ``[micro-batches]``."""
    errors: Floats = model.micro_batch_costs(sizes) / 1e9 / np.asarray(seconds, dtype=np.float64) - 1
    return errors


def _names(sizes: Mapping[str, Any]) -> list[str]:
    """Known numbers in their order, then others."""
    known = [name for name in MICRO_BATCH_NUMBERS if name in sizes]
    return known + sorted(sizes.keys() - {*MICRO_BATCH_NUMBERS, "micro_batches"})


def _solve(table: Floats, times: Floats, expected: Floats | None) -> Floats:
    """Coefficients of at least 0 with the least relative errors, in which far ones count less."""
    weights, rows = np.ones(len(times)), table / times[:, None]
    spread, towards = _expected(rows, expected)
    found, noise = np.zeros(table.shape[1]), 0.0
    for _ in range(_ROUNDS):
        root, pull = np.sqrt(weights), noise / spread
        drawn = np.concatenate([rows * root[:, None], np.diag(pull)])
        found = _non_negative(drawn, np.concatenate([root, pull * towards]))
        errors = np.abs(rows @ found - 1)
        noise = max(float(np.median(errors)), 1e-12)
        weights = np.minimum(1.0, _FAR * noise / np.maximum(errors, 1e-300))
    return found


def _expected(rows: Floats, expected: Floats | None) -> tuple[Floats, Floats]:
    """How far a coefficient may be from the one that is expected, and that one, in the unit of the times.

    As in Bayesian regression, the noisier the times are, the nearer coefficients stay: by as much as what is expected;
    where that is 0, by what would make a tenth of the time, and, where nothing is expected of any, all of it.
    """
    share = 1.0 if expected is None else 0.1
    expected = np.zeros(rows.shape[1]) if expected is None else expected
    predicted = rows @ expected
    towards = expected * float(predicted.sum() / max(float(predicted @ predicted), 1e-300))
    return np.where(towards > 0, towards, share / np.maximum(rows.mean(axis=0), 1e-300)), towards


def _non_negative(table: Floats, wanted: Floats) -> Floats:
    """``x >= 0`` with the least ``|table @ x - wanted|``: the active set method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(table, axis=0)
    table = table / np.where(scale > 0, scale, 1.0)
    count = table.shape[1]
    chosen, found = np.zeros(count, dtype=bool), np.zeros(count)
    for _ in range(10 * count):
        gradient = np.where(chosen | (scale == 0), -np.inf, table.T @ (wanted - table @ found))
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * len(wanted):
            break
        chosen[best] = True
        while chosen.any():
            part = np.zeros(count)
            part[chosen] = np.linalg.lstsq(table[:, chosen], wanted, rcond=None)[0]
            below = chosen & (part <= 0)
            if not below.any():
                found = part
                break
            # As far towards it as nothing gets negative; what is 0 then is given up.
            step = float((found[below] / np.maximum(found[below] - part[below], 1e-300)).min())
            found = np.maximum(found + step * (part - found), 0.0)
            found[below & (found <= 1e-15)] = 0.0
            chosen &= found > 0
    solution: Floats = found / np.where(scale > 0, scale, 1.0)
    return solution
