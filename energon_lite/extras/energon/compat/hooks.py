"""Energon's task encoders with its padding, its error handling, and its helper functions for samples."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Generic, TypedDict

import numpy as np
import torch
import yaml

from energon_lite.batching.collate import generic_batch as _generic_batch
from energon_lite.errors import FatalSampleError, SkipSample, field_of
from energon_lite.hooks import DefaultTaskEncoder as _DefaultTaskEncoder
from energon_lite.hooks import TaskEncoder as _TaskEncoder
from energon_lite.hooks.base import BatchT, EncodedT, RawBatchT, SampleT
from energon_lite.hooks.global_generators import failure_tolerance_of
from energon_lite.loading.makers.hook_errors import FATAL
from energon_lite.samples import Sample, SourceInfo
from energon_lite.tensors import fields_of


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


def generic_batch(batch: Sequence[Any]) -> Any:
    """Collate samples field by field; tensors are padded with zeros and stacked."""
    return _generic_batch(batch, 0)


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


_log = logging.getLogger(__name__)

#: Errors that are never caused by a sample.
SYSTEM_EXCEPTIONS = (*FATAL, MemoryError, ReferenceError)


@dataclasses.dataclass
class ErrorContext:
    """Counter of consecutive failures of one processing step.

    Args:
        name: name of the step, for messages.
        handler: function ``(error, sample, sources)`` called for each failure; None to raise it.
        tolerance: number of consecutive failures that end the iteration; 0 for no limit.
    """

    name: str
    handler: Callable[..., None] | None
    tolerance: int = 100
    _failures: int = dataclasses.field(default=0, init=False)

    def reset(self) -> None:
        """Reset the counter."""
        self._failures = 0

    @contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        """Surround the processing of one sample.

        Raises:
            FatalSampleError: too many consecutive failures, or an error that is not caused by a sample.
        """
        try:
            yield
        except SkipSample:
            return
        except SYSTEM_EXCEPTIONS as error:
            raise FatalSampleError.from_sample(sample, f"{self.name}: {error}") from error
        except Exception as error:
            self._failures += 1
            if self.handler is None:
                raise
            self.handler(error, sample, get_source_info(sample))
            if 0 < self.tolerance <= self._failures:
                what = f"{self.name} failed {self._failures} times in a row; the last time: {error}"
                raise FatalSampleError.from_sample(sample, what) from error
        else:
            self._failures = 0


def log_exception(e: Exception, sample: Any, sources: Sequence[Any] | None = None) -> None:
    """Log each failure with its traceback and its sources; without a handler, only the first of a kind is logged.

    Args:
        e: the exception.
        sample: the argument of the hook.
        sources: the sample's :class:`~energon_lite.SourceInfo`, if they are known.

    Example:
        >>> config = WorkerConfig(rank=0, world_size=1, global_error_handler=log_exception)
    """
    places = [
        f"{source.dataset_path}[{source.index}] {source.shard_name} {list(source.file_names)}"
        for source in sources or ()
    ]
    _log.error("a %s failed: %s", type(sample).__name__, "; ".join(places) or "unknown source", exc_info=e)


def reraise_exception(e: Exception, sample: Any, sources: Sequence[Any] | None = None) -> None:
    """End the run at the first failure.

    Example:
        >>> config = WorkerConfig(rank=0, world_size=1, global_error_handler=reraise_exception)
    """
    raise e


def legacy_handler(handler: Callable[..., None]) -> Callable[..., None]:
    """Return a handler of ``(error, sample, sources)`` for one that may take ``(error, sample)`` only."""
    if len(inspect.signature(handler).parameters) != 2:
        return handler
    return lambda error, sample, sources=None: handler(error, sample)


@contextmanager
def handle_restore_errors(error_handler: Callable[..., None], sample: Any) -> Iterator[None]:
    """Surround the restoration of a sample: the handler decides about errors."""
    try:
        yield
    except (SkipSample, *SYSTEM_EXCEPTIONS):
        raise
    except Exception as error:
        error_handler(error, sample, get_source_info(sample))


#: Base class of Sample and Batch; both can be pinned and extended.
PinMemoryMixin = ExtendableDataclassMixin = Sample.__mro__[1]


class FilteredSample(TypedDict):
    """Argument of ``load_sample`` of a data set class: these keys, and the parts by name."""

    __key__: str
    __shard__: str
    __restore_key__: tuple[Any, ...]
    __sources__: tuple[SourceInfo, ...]


def get_source_info(sample: Any) -> list[SourceInfo] | None:
    """Return the sources of a sample, or of each sample of a list; None if unknown."""
    samples = sample if isinstance(sample, list) else [sample]
    return [source for item in samples for source in field_of(item, "__sources__") or ()] or None


def set_sample_restore_key(sample: Any, *key: Any, src: Any = None, fail_otherwise: bool = False) -> Any:
    """Return the sample unchanged: restore keys are the loader's."""
    return sample


def get_sample_restore_key(sample: Any) -> Any:
    """Return the restore key of a sample or a batch; None if it has none."""
    return field_of(sample, "__restore_key__")


def default_get_batch_keys(batch: Any) -> list[str] | None:
    """Return the keys of the samples in a batch, from any of the usual fields; None if there are none."""
    first = batch[0] if isinstance(batch, list) and batch else batch
    for name in ("__key__", "__keys__", "keys"):
        if name == "keys" and not isinstance(first, dict):
            continue
        keys = field_of(first, name)
        if isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys):
            return list(keys)
    return None


def format_sample_compact(sample: Any, depth: int = 3, max_items: int = 10, max_str_len: int = 50) -> str:
    """Format a sample in one line.

    Example:
        >>> format_sample_compact({"text": "a" * 60, "n": [1, 2]}, max_str_len=4)
        "{text: 'aaaa...', n: [1, 2]}"
    """
    inner = {"depth": depth - 1, "max_items": max_items, "max_str_len": max_str_len}
    shown = _leaf(sample, max_str_len)
    if shown is not None:
        return shown
    fields = _fields(sample)
    if fields is not None:
        name = "" if isinstance(sample, Mapping) else type(sample).__name__
        begin, between, end = ("{", ": ", "}") if isinstance(sample, Mapping) else (f"{name}(", "=", ")")
        parts = [
            f"{key}{between}{format_sample_compact(value, **inner)}" for key, value in islice(fields.items(), max_items)
        ]
    else:
        begin, end = "[]" if isinstance(sample, list) else "()"
        parts = [format_sample_compact(value, **inner) for value in sample[:max_items]]
    return f"{begin}{', '.join(parts) if depth > 0 else '...'}{end}"


def format_sample_detailed(sample: Any, indent: str = "") -> str:
    """Format a sample as YAML, with shapes, ranges and first values of tensors and arrays.

    Example:
        >>> print(format_sample_detailed({"text": "a", "n": [1]}))
        text: a
        n:
        - 1
    """
    text = yaml.safe_dump(_plain(sample), sort_keys=False, default_flow_style=False, width=120).rstrip()
    lines = text.removesuffix("\n...").split("\n")
    return "\n".join(indent + line if line else line for line in lines)


def _plain(value: Any) -> Any:
    """Convert a value to types that YAML supports; long values are truncated."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _array_line(value)
    if isinstance(value, (int, float, bool, type(None))):
        return value
    if isinstance(value, str):
        return value if len(value) <= 1000 else f"{value[:1000]}... (and {len(value) - 1000} more characters)"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [*map(_plain, value[:10]), *([f"... and {len(value) - 10} more items"] if len(value) > 10 else [])]
    fields = _fields(value)
    if fields is None:
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    shown = {name: _plain(entry) for name, entry in islice(fields.items(), 25)}
    if len(fields) > len(shown):
        shown["..."] = f"and {len(fields) - len(shown)} more items"
    return shown if isinstance(value, Mapping) else {type(value).__name__: shown}


def _array_line(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    facts = [f"shape={value.shape}", f"dtype={value.dtype}", *([f"device={value.device}"] if is_tensor else [])]
    with suppress(RuntimeError, ValueError, TypeError):  # an empty array, or values without an order
        low = value.min()
        high = value.max()
        flat = value.reshape(-1)
        ends = [flat] if len(flat) <= 6 else [flat[:3], flat[-3:]]
        listed = ", ..., ".join(", ".join(map(repr, part.tolist() if is_tensor else part)) for part in ends)
        facts += [f"min={low}", f"max={high}", f"values=[{listed}]"]
    return f"{'Tensor' if is_tensor else 'np.ndarray'}({', '.join(facts)})"


def _leaf(value: Any, longest: int) -> str | None:
    """Format a value without fields or items; None for others."""
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= longest else repr(value[:longest])[:-1] + "..." + repr(value)[-1]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
    if isinstance(value, (list, tuple)) or _fields(value) is not None:
        return None
    text = repr(value)
    return text if len(text) <= max(longest, 80) else text[:longest] + "..."


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    return fields_of(value)
