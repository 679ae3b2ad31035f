"""Task encoders with Energon's padding: tensors of unequal shape are padded with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch

from energon_lite.batching.collate import batch_pad_stack as _batch_pad_stack
from energon_lite.batching.collate import batch_stack as _batch_stack
from energon_lite.batching.collate import generic_batch as _generic_batch
from energon_lite.hooks import DefaultTaskEncoder as _DefaultTaskEncoder
from energon_lite.hooks import TaskEncoder as _TaskEncoder
from energon_lite.hooks import basic_sample_keys as _basic_sample_keys
from energon_lite.hooks.base import BatchT, EncodedT, RawBatchT, SampleT
from energon_lite.hooks.stateless import failure_tolerance_of
from energon_lite.samples import SourceInfo

__all__ = [
    "DefaultTaskEncoder",
    "TaskEncoder",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "generic_batch",
    "get_cooker_need_cache",
    "get_cooker_need_primary",
    "get_failure_tolerance",
    "get_stateless",
]


class TaskEncoder(_TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT], Generic[SampleT, EncodedT, RawBatchT, BatchT]):
    """Task encoder :class:`energon_lite.TaskEncoder` with ``padding = 0``."""

    padding = 0


class DefaultTaskEncoder(
    _DefaultTaskEncoder[SampleT, EncodedT, RawBatchT, BatchT],
    TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT],
    Generic[SampleT, EncodedT, RawBatchT, BatchT],
):
    """Task encoder :class:`energon_lite.DefaultTaskEncoder` with ``padding = 0``."""

    padding = 0

    def __init__(
        self,
        *,
        encoded_sample_type: type | None = None,
        raw_batch_type: type | None = None,
        batch_type: type | None = None,
    ):
        super().__init__(encoded_sample_type=encoded_sample_type, raw_batch_type=raw_batch_type, batch_type=batch_type)


def generic_batch(batch: Sequence[Any]) -> Any:
    """Collate samples field by field; tensors are padded with zeros and stacked."""
    return _generic_batch(batch, 0)


def batch_list(batch: Sequence[Any]) -> list[Any]:
    """Return the values as a list."""
    return list(batch)


def batch_stack(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of equal shape."""
    return _batch_stack(batch)


def batch_pad_stack(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pad tensors with zeros, and stack them."""
    return _batch_pad_stack(batch)


def basic_sample_keys(crude_sample: Any, additional_source_info: tuple[SourceInfo, ...] = ()) -> dict[str, Any]:
    """Return the fields that a sample takes over from the sample it is made of.

    Args:
        additional_source_info: sources of further data read for it.
    """
    keys = _basic_sample_keys(crude_sample)
    if additional_source_info:
        keys["__sources__"] = (*(keys["__sources__"] or ()), *additional_source_info)
    return keys


def get_stateless(fn: Callable[..., Any]) -> bool:
    """Return whether a hook has the mark ``stateless``; hooks without the mark are treated as stateless, too."""
    return bool(getattr(fn, "__stateless__", False))


def get_failure_tolerance(fn: Callable[..., Any], default_failure_tolerance: int | None = None) -> int:
    """Return the tolerated number of consecutive failures of a hook; 0 for no limit."""
    own = failure_tolerance_of(fn)
    return (default_failure_tolerance if own is None else own) or 0


def get_cooker_need_cache(fn: Callable[..., Any]) -> bool:
    """Return whether a cooker needs the cache."""
    return bool(getattr(fn, "__cooker_need_cache__", "need_cache" in getattr(fn, "__cooker_needs__", ())))


def get_cooker_need_primary(fn: Callable[..., Any]) -> bool:
    """Return whether a cooker needs the other samples of its data set."""
    return bool(getattr(fn, "__cooker_need_primary__", "need_primary" in getattr(fn, "__cooker_needs__", ())))
