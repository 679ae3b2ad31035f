"""Differences between the configurations of a checkpoint and of the run that resumes from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Settings that change no step, by section.
HARMLESS = {
    "": "output mesh",
    "data.": "workers path val_path val share prefetch_factor",
    "model.": "recompute recompute_budget compile fuse_projections loss_chunk",
    "train.": "save_every keep keep_every checkpoints time_limit async_save save_timeout log_every eval_every "
    "eval_at_start eval_batches tensorboard wandb prometheus_port peak_tflops init_from init_from_ignore profile "
    "memory_snapshot gc_every flight_recorder nonfinite_limit measure_costs",
}


def changes(old: dict[str, Any], new: dict[str, Any], at: str = "") -> Iterator[str]:
    """Yield the differences between two configurations, except settings that change no step."""
    harmless = HARMLESS.get(at, "").split()
    for key in sorted(old.keys() | new.keys()):
        path = f"{at}{key}"
        before = old.get(key)
        now = new.get(key)
        if key in harmless or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            yield from changes(before, now, f"{path}.")
        else:
            yield f"{path} was {before!r}, is {now!r}"
