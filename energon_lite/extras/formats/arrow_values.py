"""Conversion of Arrow columns to lists of Python values, one for each row.

Numbers, texts, bytes and times become Python objects, structs become dicts, lists become lists. Lists of numbers, such
as tokens, become numpy arrays (writable, with their own memory), which is a hundred times faster.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["lengths_of", "values_of"]


def values_of(column: Any) -> list[Any]:
    """Return the values of a ``ChunkedArray`` or ``Array``.

    Example:
        >>> values_of(pyarrow.array([[1, 2], [3]]))
        [array([1, 2]), array([3])]
    """
    chunks = getattr(column, "chunks", None)
    if chunks is not None:
        return [value for chunk in chunks for value in values_of(chunk)]
    column = _plain(column)
    arrays = _number_lists(column)
    values: list[Any] = column.to_pylist() if arrays is None else arrays
    return values


def lengths_of(column: Any) -> Any:
    """Return the lengths in a column as int64: its integers, or the lengths of its lists; None: it has neither."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = pc.list_value_length(column)
    elif not pa.types.is_integer(kind):
        return None
    return None if column.null_count else np.asarray(column.to_numpy(), np.int64)


def _plain(column: Any) -> Any:
    """The values of a column inside Arrow's extension types and dictionaries."""
    import pyarrow as pa

    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _number_lists(column: Any) -> list[Any] | None:
    """The rows of a column of lists of numbers; None: it has another type, or missing numbers or lists."""
    import pyarrow as pa

    kind = column.type
    if column.null_count or not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or _is_fixed(kind)):
        return None
    if not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    numbers = column.flatten()
    if numbers.null_count:
        return None
    values = numbers.to_numpy(zero_copy_only=False).copy()
    if _is_fixed(kind):
        return list(values.reshape(len(column), kind.list_size))
    offsets = column.offsets.to_numpy()
    bounds = (offsets - offsets[0]).tolist()
    return [values[start:stop] for start, stop in pairwise(bounds)]


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind))
