"""Measured values of neighbouring samples: a length, a flag, and any number of other columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import FatalSampleError
from energon_lite.storage.index.column_file import Ragged, check_column_name
from energon_lite.storage.index.columns import LENGTH, SKIP

__all__ = ["Costs", "Shapes", "Values", "columns_of", "joined_shapes"]

#: By name of a column: 0 for a column with one number per sample, the width of a ragged column, or -1 for a ragged
#: column without any row, which is compatible with every width.
Shapes = Mapping[str, int]

#: Values that the encoder returns for a sample, by name: numbers, lists of numbers, or lists of rows of numbers.
Costs = Mapping[str, Any]


@dataclass
class Values:
    """Measured values of ``n`` samples.

    Args:
        lengths: int64 ``[n]``, 0 for samples without a length.
        flags: uint8 ``[n]``, see :mod:`energon_lite.storage.index.columns`.
        columns: by name, int64 ``[n]``.
        ragged: by name, any number of rows for each sample.
    """

    lengths: NDArray[Any]
    flags: NDArray[Any]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    ragged: dict[str, Ragged] = field(default_factory=dict)

    def shapes(self) -> dict[str, int]:
        """Return the shapes of the columns in addition to lengths and flags."""
        return dict.fromkeys(self.columns, 0) | {name: rows.values.shape[1] or -1 for name, rows in self.ragged.items()}

    def column(self, name: str) -> NDArray[Any]:
        """Return a column by name; zeros if it does not exist."""
        return self.columns.get(name, np.zeros(len(self.lengths), dtype=np.int64))

    def rows(self, name: str, width: int) -> Ragged:
        """Return a ragged column by name; without rows if it does not exist."""
        nothing = Ragged(np.zeros(len(self.lengths), dtype=np.int64), np.zeros((0, 0), dtype=np.int64))
        column = self.ragged.get(name, nothing)
        return column if column.values.size else Ragged(column.counts, column.values.reshape(0, max(width, 0)))

    @classmethod
    def zeros(cls, samples: int) -> Values:
        """Return values of samples that have not been measured."""
        return cls(np.zeros(samples, dtype=np.int64), np.zeros(samples, dtype=np.uint8))

    def replaced(self, parts: Sequence[tuple[int, Values]]) -> Values:
        """Return these values with parts of them replaced, from a sample number on; parts ascend and are disjoint."""
        pieces = list[Values]()
        stop = 0
        for start, part in parts:
            pieces += [self.cut(stop, start), part]
            stop = start + len(part.lengths)
        return joined([*pieces, self.cut(stop, len(self.lengths))])

    def cut(self, start: int, stop: int) -> Values:
        """Return the values of samples ``start`` to ``stop - 1``."""
        ragged = {}
        for name, rows in self.ragged.items():
            ends = np.concatenate([[0], np.cumsum(rows.counts)])
            ragged[name] = Ragged(rows.counts[start:stop], rows.values[ends[start] : ends[stop]])
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        return Values(self.lengths[start:stop], self.flags[start:stop], columns, ragged)


def joined(parts: Sequence[Values]) -> Values:
    """Return the values of several groups of samples, one after the other."""
    shapes = joined_shapes(part.shapes() for part in parts)
    columns = {}
    ragged = {}
    for name, width in shapes.items():
        if not width:
            columns[name] = np.concatenate([part.column(name) for part in parts])
            continue
        rows = [part.rows(name, width) for part in parts]
        ragged[name] = Ragged(
            np.concatenate([part.counts for part in rows]), np.concatenate([part.values for part in rows])
        )
    lengths, flags = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "flags"))
    return Values(lengths, flags, columns, ragged)


def joined_shapes(all_shapes: Iterable[Shapes]) -> dict[str, int]:
    """Return the shapes of all columns.

    Raises:
        FatalSampleError: a column is a number for some samples, and a list for others.
    """
    widths: dict[str, int] = {}
    for shapes in all_shapes:
        for name, width in shapes.items():
            before = widths.setdefault(name, width)
            if before < 0 < width:
                widths[name] = width
            elif before != width and not (width < 0 < before):
                kinds = " and ".join(sorted({_kind(width), _kind(widths[name])}))
                raise FatalSampleError(
                    f"the column {name!r} is {kinds}",
                    where="sample_costs",
                    fix="return the same kind of value for all samples",
                )
    return widths


def _kind(width: int) -> str:
    return f"a list of rows of {abs(width)} of some samples" if width else "a number of some samples"


def columns_of(costs: Sequence[Costs | None], where: str) -> tuple[dict[str, NDArray[Any]], dict[str, Ragged]]:
    """Return columns, and ragged columns, of the values that the encoder returns for samples.

    Args:
        costs: values of each sample; None: there are none. A missing name counts as 0, or as no row.
        where: name of the encoder, for messages.

    Raises:
        FatalSampleError: a name or a value cannot be stored.
    """
    numbers: dict[str, NDArray[Any]] = {}
    lists: dict[str, list[NDArray[Any]]] = {}
    empty = np.zeros((0, 0), dtype=np.int64)
    for place, sample_costs in enumerate(costs):
        for name, value in ({} if sample_costs is None else sample_costs).items():
            array = _checked(name, value, where)
            if array.ndim == 0:
                numbers.setdefault(name, np.zeros(len(costs), dtype=np.int64))[place] = array
            else:
                lists.setdefault(name, [empty] * len(costs))[place] = (
                    array if array.ndim == 2 else array.reshape(len(array), min(len(array), 1))
                )
    if both := numbers.keys() & lists.keys():
        joined_shapes([{min(both): 0}, {min(both): 1}])  # raises the error
    ragged = {}
    for name, rows in lists.items():
        width = joined_shapes({name: array.shape[1] or -1} for array in rows)[name]
        counts = np.array([len(array) for array in rows], dtype=np.int64)
        ragged[name] = Ragged(
            counts, np.concatenate([array if array.size else array.reshape(0, max(width, 0)) for array in rows])
        )
    return numbers, ragged


def _checked(name: str, value: Any, where: str) -> NDArray[Any]:
    if not isinstance(name, str) or name in (LENGTH, SKIP) or "." in name:
        raise FatalSampleError(f"a column cannot be called {name!r}", where=where, fix="use another name, without dots")
    check_column_name(name)
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim > 2 or array.dtype.kind not in "iu" or (array.size and int(array.min()) < 0):
        raise FatalSampleError(
            f"{name!r} is {value!r:.80}, which is not a cost",
            where=where,
            fix="give a whole number, at least 0; a list of these; or a list of rows of equally many, as [[h, w], ...]",
        )
    return array.astype(np.int64)
