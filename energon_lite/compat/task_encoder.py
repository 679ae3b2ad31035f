"""Task encoders by Energon's rules: tensors of unequal shape are padded with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

from energon_lite.batching.collate import generic_batch as _generic_batch
from energon_lite.hooks import DefaultTaskEncoder as _DefaultTaskEncoder
from energon_lite.hooks import TaskEncoder as _TaskEncoder
from energon_lite.hooks.base import BatchT, EncodedT, RawBatchT, SampleT
from energon_lite.hooks.stateless import failure_tolerance_of

__all__ = [
    "DefaultTaskEncoder",
    "TaskEncoder",
    "generic_batch",
    "get_cooker_need_cache",
    "get_cooker_need_primary",
    "get_failure_tolerance",
    "get_stateless",
]


class TaskEncoder(_TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT], Generic[SampleT, EncodedT, RawBatchT, BatchT]):
    """:class:`energon_lite.TaskEncoder` with ``padding = 0``."""

    padding = 0


class DefaultTaskEncoder(
    _DefaultTaskEncoder[SampleT, EncodedT, RawBatchT, BatchT],
    TaskEncoder[SampleT, EncodedT, RawBatchT, BatchT],
    Generic[SampleT, EncodedT, RawBatchT, BatchT],
):
    """:class:`energon_lite.DefaultTaskEncoder` with ``padding = 0``."""

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
    """Samples put together field by field; tensors are padded with zeros and stacked."""
    return _generic_batch(batch, 0)


def get_stateless(fn: Callable[..., Any]) -> bool:
    """Whether a hook is marked as stateless; those without the mark are taken for it, too."""
    return bool(getattr(fn, "__stateless__", False))


def get_failure_tolerance(fn: Callable[..., Any], default_failure_tolerance: int | None = None) -> int:
    """So many failures of a hook in a row are too many; 0: any number may fail."""
    own = failure_tolerance_of(fn)
    return (default_failure_tolerance if own is None else own) or 0


def get_cooker_need_cache(fn: Callable[..., Any]) -> bool:
    """Whether a cooker wants the cache."""
    return "need_cache" in getattr(fn, "__cooker_needs__", ())


def get_cooker_need_primary(fn: Callable[..., Any]) -> bool:
    """Whether a cooker wants the other samples of its data set."""
    return "need_primary" in getattr(fn, "__cooker_needs__", ())
