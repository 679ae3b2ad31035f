"""Batches put together along their first dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from energon_lite.errors import UsageError

__all__ = ["concat_pad", "generic_concat", "homogeneous_concat_mix"]


def concat_pad(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other along the first dimension; the others are padded with zeros to the largest.

    Args:
        batch: tensors ``[rows, ...]`` of the same number of dimensions.

    Example:
        >>> concat_pad([torch.ones(1, 2), torch.ones(2, 1)])
        tensor([[1., 1.],
                [1., 0.],
                [1., 0.]])
    """
    sizes = [max(one.shape[axis] for one in batch) for axis in range(1, batch[0].dim())]
    made = batch[0].new_zeros((sum(len(one) for one in batch), *sizes))
    row = 0
    for one in batch:
        made[(slice(row, row + len(one)), *(slice(size) for size in one.shape[1:]))] = one
        row += len(one)
    return made


def generic_concat(batch: Sequence[Any]) -> Any:
    """Batches as one: tensors by :func:`concat_pad`, the fields of dicts, dataclasses and named tuples each by itself,
    anything else as the list of what the batches have."""
    first = batch[0]
    if isinstance(first, torch.Tensor):
        return concat_pad(batch)
    if isinstance(first, dict):
        return {key: generic_concat([one[key] for one in batch]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: generic_concat([getattr(one, name) for one in batch]) for name in names})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(generic_concat(values) for values in zip(*batch, strict=True)))
    return batch


def homogeneous_concat_mix(samples: Sequence[Any]) -> Any:
    """:func:`generic_concat` of batches that are all of the same type, for ``MixBatchDataset``.

    Raises:
        UsageError: they are not.
    """
    kinds = {type(one).__name__ for one in samples}
    if len(kinds) > 1:
        raise UsageError(f"batches of different types: {', '.join(sorted(kinds))}", fix="give a batch_mix_fn of yours")
    return generic_concat(samples)
