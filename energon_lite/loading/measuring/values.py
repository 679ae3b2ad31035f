"""What measuring has found out about neighbouring samples: a length, a flag, and any number of other columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import FatalSampleError
from energon_lite.storage.index.column_file import Ragged
from energon_lite.storage.index.columns import LENGTH, SKIP, check_column_name

__all__ = ["Costs", "Shapes", "Values", "columns_of", "joined_shapes"]

#: By the name of a column: 0 for one with a number for each sample, and the width of a ragged one; -1 for one without
#: any row, which fits all of these.
Shapes = Mapping[str, int]

#: What a sample says of itself: numbers, and lists of numbers or of rows of them.
Costs = Mapping[str, Any]


@dataclass
class Values:
    """Of ``n`` samples.

    Args:
        lengths: int64 ``[n]``, 0 where there is none.
        flags: uint8 ``[n]``, see :mod:`energon_lite.storage.index.columns`.
        columns: by name, int64 ``[n]``.
        ragged: by name, any number of rows for each sample.
    """

    lengths: NDArray[Any]
    flags: NDArray[Any]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    ragged: dict[str, Ragged] = field(default_factory=dict)

    def shapes(self) -> dict[str, int]:
        """The columns beside lengths and flags."""
        return dict.fromkeys(self.columns, 0) | {name: one.values.shape[1] or -1 for name, one in self.ragged.items()}

    def column(self, name: str) -> NDArray[Any]:
        """A column by name; of one that is not known here, nothing but zeros."""
        return self.columns.get(name, np.zeros(len(self.lengths), dtype=np.int64))

    def rows(self, name: str, width: int) -> Ragged:
        """A ragged column by name; of one that is not known here, nothing for each sample."""
        nothing = Ragged(np.zeros(len(self.lengths), dtype=np.int64), np.zeros((0, 0), dtype=np.int64))
        one = self.ragged.get(name, nothing)
        return one if one.values.size else Ragged(one.counts, one.values.reshape(0, max(width, 0)))

    @classmethod
    def zeros(cls, samples: int) -> Values:
        """Of samples of which nothing is known."""
        return cls(np.zeros(samples, dtype=np.int64), np.zeros(samples, dtype=np.uint8))

    def replaced(self, parts: Sequence[tuple[int, Values]]) -> Values:
        """These values, with others, of samples from a number on, in their place; parts neither overlap nor go back."""
        pieces = list[Values]()
        stop = 0
        for start, part in parts:
            pieces += [self.cut(stop, start), part]
            stop = start + len(part.lengths)
        return joined([*pieces, self.cut(stop, len(self.lengths))])

    def cut(self, start: int, stop: int) -> Values:
        """The values of samples ``start`` to ``stop - 1``."""
        ragged = {}
        for name, rows in self.ragged.items():
            ends = np.concatenate([[0], np.cumsum(rows.counts)])
            ragged[name] = Ragged(rows.counts[start:stop], rows.values[ends[start] : ends[stop]])
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        return Values(self.lengths[start:stop], self.flags[start:stop], columns, ragged)


def joined(parts: Sequence[Values]) -> Values:
    """The values of some samples, and then those of others."""
    shapes = joined_shapes(part.shapes() for part in parts)
    columns = {}
    ragged = {}
    for name, width in shapes.items():
        if not width:
            columns[name] = np.concatenate([part.column(name) for part in parts])
            continue
        rows = [part.rows(name, width) for part in parts]
        ragged[name] = Ragged(
            np.concatenate([one.counts for one in rows]), np.concatenate([one.values for one in rows])
        )
    lengths, flags = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "flags"))
    return Values(lengths, flags, columns, ragged)


def joined_shapes(all_shapes: Iterable[Shapes]) -> dict[str, int]:
    """All columns there are.

    Raises:
        FatalSampleError: a column is a number of some samples, and a list of others.
    """
    found: dict[str, int] = {}
    for shapes in all_shapes:
        for name, width in shapes.items():
            before = found.setdefault(name, width)
            if before < 0 < width:
                found[name] = width
            elif before != width and not (width < 0 < before):
                kinds = " and ".join(sorted({_kind(width), _kind(found[name])}))
                raise FatalSampleError(
                    f"the column {name!r} is {kinds}",
                    where="sample_costs",
                    fix="return the same kind of value for all samples",
                )
    return found


def _kind(width: int) -> str:
    return f"a list of rows of {abs(width)} of some samples" if width else "a number of some samples"


def columns_of(costs: Sequence[Costs | None], where: str) -> tuple[dict[str, NDArray[Any]], dict[str, Ragged]]:
    """Columns of what samples say of themselves, and ragged ones.

    Args:
        costs: of each sample; None: it says nothing. A name that is missing is 0, or no row.
        where: who said it, for messages.

    Raises:
        FatalSampleError: a name or a value cannot be stored.
    """
    numbers: dict[str, NDArray[Any]] = {}
    lists: dict[str, list[NDArray[Any]]] = {}
    empty = np.zeros((0, 0), dtype=np.int64)
    for place, one in enumerate(costs):
        for name, value in ({} if one is None else one).items():
            array = _checked(name, value, where)
            if array.ndim == 0:
                numbers.setdefault(name, np.zeros(len(costs), dtype=np.int64))[place] = array
            else:
                lists.setdefault(name, [empty] * len(costs))[place] = (
                    array if array.ndim == 2 else array.reshape(len(array), min(len(array), 1))
                )
    if both := numbers.keys() & lists.keys():
        joined_shapes([{min(both): 0}, {min(both): 1}])  # which raises
    ragged = {}
    for name, rows in lists.items():
        width = joined_shapes({name: one.shape[1] or -1} for one in rows)[name]
        counts = np.array([len(one) for one in rows], dtype=np.int64)
        ragged[name] = Ragged(
            counts, np.concatenate([one if one.size else one.reshape(0, max(width, 0)) for one in rows])
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
            f"{name!r} is {value!r:.80}, which is no cost",
            where=where,
            fix="give a whole number, at least 0; a list of these; or a list of rows of equally many, as [[h, w], ...]",
        )
    return array.astype(np.int64)
