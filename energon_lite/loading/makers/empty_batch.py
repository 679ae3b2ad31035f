"""Batches without samples, for ranks that have none left at the end of a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from energon_lite.errors import FatalSampleError
from energon_lite.hooks import TaskEncoder, is_overridden

__all__ = ["empty_batch", "rows_of"]


def empty_batch(encoder: TaskEncoder, like: Any, rows: int) -> Any:
    """Return a batch without samples.

    Args:
        encoder: the task encoder whose ``empty_batch`` makes it.
        like: a batch of this data.
        rows: number of samples in ``like``.

    Raises:
        FatalSampleError: it is not clear which parts of a batch belong to its samples.
    """
    if is_overridden(encoder, "empty_batch"):
        return encoder.empty_batch(like, rows)
    if rows not in _sizes(like):
        rows = rows_of(like, 0)
    if not rows:
        raise FatalSampleError(
            f"a rank has no samples left, and what an empty batch looks like is not clear: this {type(like).__name__} "
            "has no tensors or lists of one and the same length",
            where=type(encoder).__name__,
            fix="write empty_batch(self, like, rows) in the task encoder: the batch `like` without its samples",
        )
    return encoder.empty_batch(like, rows)


def rows_of(batch: Any, otherwise: int) -> int:
    """Return the number of samples in a batch, from the batch alone: the length of ``__key__``, or else the common
    first dimension of all its tensors and lists; ``otherwise`` if there is none."""
    keys = batch.get("__key__") if isinstance(batch, dict) else getattr(batch, "__key__", None)
    if isinstance(keys, (list, tuple)):
        return len(keys)
    sizes = set(_sizes(batch))
    return sizes.pop() if len(sizes) == 1 else otherwise


def _sizes(value: Any) -> Iterator[int]:
    """Yield the first dimensions of the tensors and lists in a batch."""
    if isinstance(value, dict):
        parts = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = list(value)
    else:
        shape = getattr(value, "shape", None)
        if shape:
            yield int(shape[0])
        elif isinstance(value, (list, tuple)):
            yield len(value)
        return
    for part in parts:
        yield from _sizes(part)
