"""Functions for fields and tensors in nested structures, and for stacking tensors of different sizes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from energon_lite.errors import UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dict, a dataclass (those with a value) or a named tuple by name; None for other values."""
    if isinstance(value, dict):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(value._asdict()) if isinstance(value, tuple) and hasattr(value, "_asdict") else None


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: T) -> T:
    """Copy a nested structure with each tensor replaced by ``fn(tensor)``; everything else is shared.

    Supported are lists, tuples, dicts, dataclasses (slotted and frozen ones too), named tuples, and types registered
    with ``torch.utils._pytree``.

    Example:
        >>> map_tensors(lambda tensor: tensor + 1, {"a": [torch.zeros(2)], "b": "text"})
        {'a': [tensor([1., 1.])], 'b': 'text'}
    """
    import torch

    def visit(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return fn(value)
        if isinstance(value, (str, bytes, int, float)) or value is None:
            return value
        if isinstance(value, dict):
            # A copy first: a subclass keeps its attributes (such as a default factory) in addition to its entries.
            copied: Any = copy.copy(value)
            for key, item in value.items():
                copied[key] = visit(item)
            return copied
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind._make(map(visit, value))  # nor is __new__ run again
        if kind in (list, tuple):
            return kind(visit(item) for item in value)
        if (fields := fields_of(value)) is not None:
            copied = copy.copy(value)  # not replace(), which would run the checks of __post_init__ again
            for name, item in fields.items():
                object.__setattr__(copied, name, visit(item))
            return copied
        if kind in pytree.SUPPORTED_NODES:
            leaves, structure = pytree.tree_flatten(value)
            return pytree.tree_unflatten([visit(leaf) for leaf in leaves], structure)
        return value

    import torch.utils._pytree as pytree

    return visit(value)


def pad_stack(values: Sequence[torch.Tensor], pad: float = 0) -> torch.Tensor:
    """Stack tensors of equal rank, each dimension padded at its end with ``pad`` to the largest among them.

    Raises:
        UsageError: their ranks differ.
    """
    import torch

    first = values[0]
    if all(value.shape == first.shape for value in values):
        return torch.stack(list(values))
    if any(value.dim() != first.dim() for value in values):
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(value.shape for value in values))
        raise UsageError(f"tensors of unequal rank cannot be padded to one: {shapes}", fix="bring them to one rank")
    largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    out = first.new_full((len(values), *largest), pad) if pad else first.new_zeros((len(values), *largest))
    for number, value in enumerate(values):
        place: Any = (number, *map(slice, value.shape))
        out[place] = value
    return out
