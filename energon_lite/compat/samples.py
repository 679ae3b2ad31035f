"""Helpers around samples: where they come from, what they look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypedDict

from energon_lite.errors import field_of
from energon_lite.samples import Batch, Sample, SourceInfo

__all__ = [
    "ExtendableDataclassMixin",
    "FilteredSample",
    "PinMemoryMixin",
    "add_source_info",
    "default_get_batch_keys",
    "format_sample_compact",
    "format_sample_detailed",
    "get_sample_restore_key",
    "get_source_info",
    "set_sample_restore_key",
]

#: What Sample and Batch are derived from; both can be pinned and extended.
PinMemoryMixin = ExtendableDataclassMixin = Sample.__mro__[1]


class FilteredSample(TypedDict):
    """What ``load_sample`` of a data set class is given: these, and the parts by name."""

    __key__: str
    __shard__: str
    __restore_key__: tuple[Any, ...]
    __sources__: tuple[SourceInfo, ...]


def add_source_info(sample: Any, *source_infos: SourceInfo) -> Any:
    """Note on a sample that more was read for it."""
    if isinstance(sample, dict):
        sample["__sources__"] = (*(sample.get("__sources__") or ()), *source_infos)
    elif hasattr(sample, "__sources__"):
        sample.__sources__ = (*(sample.__sources__ or ()), *source_infos)
    return sample


def get_source_info(sample: Any) -> list[SourceInfo] | None:
    """Where a sample, or each of a list of them, was read; None: nobody knows."""
    samples = sample if isinstance(sample, list) else [sample]
    return [source for one in samples for source in field_of(one, "__sources__") or ()] or None


def set_sample_restore_key(sample: Any, *key: Any, src: Any = None, fail_otherwise: bool = False) -> Any:
    """The sample as it is: the loader says how it is made again."""
    return sample


def get_sample_restore_key(sample: Any) -> Any:
    """The key by which the loader makes a sample, or a batch, again; None: it has none."""
    return field_of(sample, "__restore_key__")


def default_get_batch_keys(batch: Any) -> list[str] | None:
    """The keys of the samples in a batch, wherever it has them; None: it has none."""
    one = batch[0] if isinstance(batch, list) and batch else batch
    for name in ("__key__", "__keys__", "keys"):
        if name == "keys" and not isinstance(one, dict):
            continue
        found = field_of(one, name)
        if isinstance(found, (list, tuple)) and all(isinstance(key, str) for key in found):
            return list(found)
    return None


def format_sample_compact(sample: Any, depth: int = 3, max_items: int = 10, max_str_len: int = 50) -> str:
    """A sample in one line.

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
        parts = [f"{key}{between}{format_sample_compact(value, **inner)}" for key, value in _some(fields, max_items)]
    else:
        begin, end = "[]" if isinstance(sample, list) else "()"
        parts = [format_sample_compact(value, **inner) for value in sample[:max_items]]
    return f"{begin}{', '.join(parts) if depth > 0 else '...'}{end}"


def format_sample_detailed(sample: Any, indent: str = "") -> str:
    """A sample in several lines, a line for each field.

    Example:
        >>> print(format_sample_detailed({"text": "a", "n": [1]}))
        text: 'a'
        n:
          - 1
    """
    return "\n".join(indent + line for line in _lines(sample, 6))


def _lines(value: Any, depth: int) -> list[str]:
    shown = _leaf(value, 1000)
    if shown is not None or depth == 0:
        return [shown if shown is not None else "..."]
    fields = _fields(value)
    pairs = (
        [("- ", one) for one in value[:20]] if fields is None else [(f"{key}: ", one) for key, one in fields.items()]
    )
    lines = []
    for label, one in pairs:
        inside = _lines(one, depth - 1)
        if len(inside) == 1 and (_leaf(one, 1) is not None or not inside[0]):
            lines.append(label + inside[0])
        else:
            lines += [label.rstrip(), *(f"  {line}" for line in inside)]
    return lines or ["(empty)"]


def _leaf(value: Any, longest: int) -> str | None:
    """What has no parts worth showing; None: it has."""
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
        return {str(key): one for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(value._asdict()) if hasattr(value, "_asdict") else None


def _some(fields: dict[str, Any], most: int) -> list[tuple[str, Any]]:
    return list(islice(fields.items(), most))


assert issubclass(Batch, PinMemoryMixin)
