"""Putting encoded samples together: the collation that is used where a task encoder has no ``batch`` of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from energon_lite.samples import pad_stack

__all__ = ["batch_list", "batch_pad_stack", "batch_stack", "collate_entry", "empty_like", "generic_batch"]

#: What is as common as it is easy to tell.
_SCALARS = frozenset({bytes, str, int, float, bool, type(None)})


def batch_stack(values: Sequence[Any]) -> torch.Tensor:
    """Stack tensors (or numbers) of equal shape: n x ``[...]`` -> ``[n, ...]``."""
    return torch.stack([torch.as_tensor(value) for value in values])


def batch_pad_stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of equal rank, each dimension padded at its end with zeros to the largest of the batch.

    Example:
        >>> batch_pad_stack([torch.ones(2), torch.ones(3)])
        tensor([[1., 1., 0.],
                [1., 1., 1.]])
    """
    return pad_stack(values)


def batch_list(values: Sequence[Any]) -> list[Any]:
    """Keep the values as a list."""
    return list(values)


def generic_batch(values: Sequence[Any]) -> Any:
    """Collate by type: tensors are padded and stacked; dicts, dataclasses and named tuples field by field, into one of
    the same type (a dataclass that has ``from_samples`` makes its own batch); everything else becomes a list.

    Args:
        values: encoded samples of one type, at least one.
    """
    first = values[0]
    if type(first) in _SCALARS:
        return list(values)
    if isinstance(first, torch.Tensor):
        same_rank = all(isinstance(value, torch.Tensor) and value.dim() == first.dim() for value in values)
        return batch_pad_stack(values) if same_rank else list(values)
    if isinstance(first, dict):
        return {key: collate_entry(key, [value[key] for value in values]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        if hasattr(first, "from_samples"):
            return type(first).from_samples(values)
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: collate_entry(name, [*map(attrgetter(name), values)]) for name in names})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(generic_batch(column) for column in zip(*values, strict=True)))
    return list(values)


def collate_entry(name: str, values: list[Any]) -> Any:
    """One field of a batch out of its samples' values, as :func:`generic_batch` makes it."""
    if name == "__sources__":
        return tuple(source for value in values for source in value or ())
    if name == "__restore_key__":
        return tuple(values)
    if name in ("__key__", "__subflavors__"):
        return values
    return generic_batch(values)


def empty_like(batch: Any, rows: int) -> Any:
    """``batch``, which holds ``rows`` samples, without any of them.

    Tensors whose first dimension is ``rows`` and lists (or tuples) of that length lose all their rows; everything else
    stays. A task encoder whose batches are not of this form overrides ``TaskEncoder.empty_batch``.
    """
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, dict):
        return {key: empty_like(value, rows) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        changed = {name: empty_like(getattr(batch, name), rows) for name in names}
        if "__sources__" in changed:
            changed["__sources__"] = ()
        return dataclasses.replace(batch, **changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(empty_like(value, rows) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)() if len(batch) == rows else batch
    return batch
