"""Functions that make data sets, with Energon's signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from energon_lite.batching.plan import FixedPlan
from energon_lite.extras.energon.compat.dealt_plan import DealtChunkPlan, DealtPlan, Shares
from energon_lite.extras.energon.compat.task_encoder import DefaultTaskEncoder
from energon_lite.loading import recipes
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset

__all__ = ["get_train_dataset", "get_val_dataset", "get_val_datasets"]

#: Arguments about chunks.
_OF_CHUNKS = {"chunks", "chunk_size", "chunk_remainder", "lanes"}


def _as_there(function: Callable[..., Any], *, is_validation: bool = True) -> Callable[..., Any]:
    """Wrap a function so that it uses Energon's default task encoder and order of validation.

    Validation has the batches of Energon's workers, in their order: data is dealt to as many shares as there are
    workers, unless the caller gives arguments about chunks.
    """

    @functools.wraps(function)
    def call(path: Any, **kwargs: Any) -> Any:
        if kwargs.get("task_encoder") is None:
            kwargs["task_encoder"] = DefaultTaskEncoder()
        made = function(path, **kwargs)
        if not is_validation or not _OF_CHUNKS.isdisjoint(kwargs):
            return made
        return [(_dealt(dataset), spec) for dataset, spec in made] if isinstance(made, list) else _dealt(made)

    return call


def _dealt(dataset: Any) -> Any:
    """Return a data set dealt to workers like Energon's; batches by tokens, which Energon lacks, are unchanged."""
    world, workers = dataset.worker_config.world_size, max(dataset.worker_config.num_workers, 1)
    shares = Shares(tuple(leaf.length for leaf in dataset.leaves), world, workers)
    old, more = dataset.plan, dict[str, Any]()
    if isinstance(dataset, PlannedDataset) and isinstance(old, FixedPlan):
        plan: DealtPlan | DealtChunkPlan = DealtPlan(old.order, old.batch_size, old.drop_last, shares=shares)
        if world * workers == 1 or not plan.count(0):
            return dataset
    elif isinstance(dataset, LaneDataset) and dataset.bundling is None:
        kept = {field.name: getattr(old, field.name) for field in fields(old) if field.init}
        # A group with few samples may need all of a share.
        size = max(old.packing_buffer_size or 1, int(shares.sizes.max())) if dataset.hooks.groups else old.chunk
        plan, more = DealtChunkPlan(**{**kept, "chunk": size, "shares": shares}), {"lanes": world * workers}
    else:
        return dataset
    identity = replace(dataset.identity, settings={**dataset.identity.settings, "dealt_to": [world, workers]})
    return replace(dataset, plan=plan, identity=identity, **more)


get_train_dataset = _as_there(recipes.get_train_dataset, is_validation=False)
get_val_dataset = _as_there(recipes.get_val_dataset)
get_val_datasets = _as_there(recipes.get_val_datasets)
