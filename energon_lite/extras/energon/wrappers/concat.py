"""Concatenation of batches along their first dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from energon_lite.errors import UsageError

__all__ = ["concat_pad", "generic_concat", "homogeneous_concat_mix"]


def concat_pad(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dimension; the other dimensions are padded with zeros to the largest size.

    Args:
        batch: tensors ``[rows, ...]`` of the same number of dimensions.

    Example:
        >>> concat_pad([torch.ones(1, 2), torch.ones(2, 1)])
        tensor([[1., 1.],
                [1., 0.],
                [1., 0.]])
    """
    sizes = [max(tensor.shape[axis] for tensor in batch) for axis in range(1, batch[0].dim())]
    made = batch[0].new_zeros((sum(len(tensor) for tensor in batch), *sizes))
    row = 0
    for tensor in batch:
        made[(slice(row, row + len(tensor)), *(slice(size) for size in tensor.shape[1:]))] = tensor
        row += len(tensor)
    return made


def generic_concat(batch: Sequence[Any]) -> Any:
    """Concatenate batches: tensors by :func:`concat_pad`; dicts, dataclasses and named tuples field by field; other
    values as a list of the values in the batches."""
    first = batch[0]
    if isinstance(first, torch.Tensor):
        return concat_pad(batch)
    if isinstance(first, dict):
        return {key: generic_concat([part[key] for part in batch]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: generic_concat([getattr(part, name) for part in batch]) for name in names})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(generic_concat(values) for values in zip(*batch, strict=True)))
    return batch


def homogeneous_concat_mix(samples: Sequence[Any]) -> Any:
    """Apply :func:`generic_concat` to batches of one type, for ``MixBatchDataset``.

    Raises:
        UsageError: the batches have different types.
    """
    kinds = {type(sample).__name__ for sample in samples}
    if len(kinds) > 1:
        raise UsageError(f"batches of different types: {', '.join(sorted(kinds))}", fix="give a batch_mix_fn of yours")
    return generic_concat(samples)
