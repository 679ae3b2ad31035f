"""The functions that make data sets, as callers of Energon call them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from energon_lite import recipes
from energon_lite.compat.task_encoder import DefaultTaskEncoder
from energon_lite.worker_config import WorkerConfig

__all__ = ["get_train_dataset", "get_val_dataset", "get_val_datasets"]


def _as_there(function: Callable[..., Any], *, is_validation: bool = True) -> Callable[..., Any]:
    """With Energon's default task encoder. Validation that packs has as many lanes as there are workers, so that its
    packs come in the order in which Energon's workers make them."""

    @functools.wraps(function)
    def call(path: Any, **kwargs: Any) -> Any:
        if kwargs.get("task_encoder") is None:
            kwargs["task_encoder"] = DefaultTaskEncoder()
        config: WorkerConfig | None = kwargs.get("worker_config")
        packs = kwargs.get("packing_buffer_size") is not None and "chunks" not in kwargs
        if is_validation and packs and config is not None:
            kwargs.setdefault("lanes", config.world_size * max(config.num_workers, 1))
        return function(path, **kwargs)

    return call


get_train_dataset = _as_there(recipes.get_train_dataset, is_validation=False)
get_val_dataset = _as_there(recipes.get_val_dataset)
get_val_datasets = _as_there(recipes.get_val_datasets)
