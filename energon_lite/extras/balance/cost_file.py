"""Files of cost models (coefficients and their origin) and of measured micro-batches."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from energon_lite.documents import load_yaml, located
from energon_lite.documents.node import Node
from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_fit import CostFit
from energon_lite.extras.balance.cost_model import CostModel, Quadratic
from energon_lite.storage.files.atomic_file import write_bytes

__all__ = ["MeasuredMicroBatches", "cost_model", "read_cost_model", "read_micro_batches", "write_cost_model"]

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
        ConfigError: the file does not exist, or is no cost model.
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
        raise UsageError(f"that is no measured step: {type(error).__name__}: {error}", where=where, fix=_LIKE) from None
    if any(len(values) != len(seconds) for values in columns.values()):
        raise UsageError("there are not as many sizes as seconds", where=where, fix=_LIKE)
    return (
        place,
        prior,
        [
            ({name: values[number] for name, values in columns.items()}, duration)
            for number, duration in enumerate(seconds)
            if duration > 0
        ],
    )


_LIKE = 'a line is like {"seconds": [0.5], "sizes": {"tokens": [900]}}'
