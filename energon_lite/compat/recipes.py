"""The functions that make data sets, as callers of Energon call them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from energon_lite import recipes
from energon_lite.batching.dealt_plan import DealtPlan
from energon_lite.batching.plan import FixedPlan
from energon_lite.compat.task_encoder import DefaultTaskEncoder
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.worker_config import WorkerConfig

__all__ = ["get_train_dataset", "get_val_dataset", "get_val_datasets"]


def _as_there(function: Callable[..., Any], *, is_validation: bool = True) -> Callable[..., Any]:
    """With Energon's default task encoder. Validation has the batches that Energon's workers make, in their order: it
    is dealt to as many shares, or, where it packs, has as many lanes, as there are workers."""

    @functools.wraps(function)
    def call(path: Any, **kwargs: Any) -> Any:
        if kwargs.get("task_encoder") is None:
            kwargs["task_encoder"] = DefaultTaskEncoder()
        config: WorkerConfig | None = kwargs.get("worker_config")
        packs = kwargs.get("packing_buffer_size") is not None and "chunks" not in kwargs
        if is_validation and packs and config is not None:
            kwargs.setdefault("lanes", config.world_size * max(config.num_workers, 1))
        made = function(path, **kwargs)
        if not is_validation:
            return made
        return [(_dealt(one), spec) for one, spec in made] if isinstance(made, list) else _dealt(made)

    return call


def _dealt(dataset: Any) -> Any:
    """A data set of planned batches, dealt to workers as Energon deals it."""
    if not isinstance(dataset, PlannedDataset) or not isinstance(dataset.plan, FixedPlan) or not dataset.batched:
        return dataset
    world, workers = dataset.worker_config.world_size, max(dataset.worker_config.num_workers, 1)
    lengths = tuple(leaf.length for leaf in dataset.leaves)
    old = dataset.plan
    plan = DealtPlan(old.order, old.batch_size, old.drop_last, lengths=lengths, world_size=world, workers=workers)
    if world * workers == 1 or not plan.count(0):
        return dataset
    identity = replace(dataset.identity, settings={**dataset.identity.settings, "dealt_to": [world, workers]})
    return replace(dataset, plan=plan, identity=identity)


get_train_dataset = _as_there(recipes.get_train_dataset, is_validation=False)
get_val_dataset = _as_there(recipes.get_val_dataset)
get_val_datasets = _as_there(recipes.get_val_datasets)
