"""A cost model as a file: its coefficients, and how they were found. JSON, to be read, compared and kept with a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from energon_lite.batching.cost_fit import CostFit
from energon_lite.batching.cost_model import CostModel
from energon_lite.documents import load_yaml, located
from energon_lite.documents.node import Node
from energon_lite.storage.files.atomic_file import write_bytes

__all__ = ["COSTS_FILE", "read_cost_model", "write_cost_model"]

#: What a run calls the file that it writes.
COSTS_FILE = "costs.json"
_FORMAT = 1


def write_cost_model(
    path: str | os.PathLike[str], model: CostModel | CostFit, about: Mapping[str, Any] | None = None
) -> None:
    """Write a cost model, whole or not at all.

    Args:
        path: the file.
        model: the model, or what a fit has found.
        about: further plain data for who reads the file; it decides nothing.

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
    """The cost model that :func:`write_cost_model` wrote, or somebody by hand: YAML will do, too.

    Raises:
        ConfigError: there is no such file, or it is none of these.
    """
    node = load_yaml(path)
    entries = node.mapping(["format", "coefficients"], ["unit", "about", "micro_batches", "error", "error_95"])
    if entries["format"].integer() != _FORMAT:
        raise entries["format"].error("costs of another format", f"this release reads format {_FORMAT}; fit them again")
    if "unit" in entries and entries["unit"].string() != "attoseconds":
        raise entries["unit"].error("coefficients are in attoseconds (10**-18 s)", "write unit: attoseconds")
    coefficients: Node = entries["coefficients"]
    with located(coefficients):
        return CostModel.from_features({name: one.integer() for name, one in coefficients.entries().items()})
