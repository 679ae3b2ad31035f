"""The functions that make data sets, as callers of Energon call them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from energon_lite import recipes
from energon_lite.compat.task_encoder import DefaultTaskEncoder

__all__ = ["get_train_dataset", "get_val_dataset", "get_val_datasets"]


def _as_there(function: Callable[..., Any]) -> Callable[..., Any]:
    """With Energon's default task encoder."""

    @functools.wraps(function)
    def call(path: Any, **kwargs: Any) -> Any:
        if kwargs.get("task_encoder") is None:
            kwargs["task_encoder"] = DefaultTaskEncoder()
        return function(path, **kwargs)

    return call


get_train_dataset = _as_there(recipes.get_train_dataset)
get_val_dataset = _as_there(recipes.get_val_dataset)
get_val_datasets = _as_there(recipes.get_val_datasets)
