"""Leaves of a blend as plain lists, a compact form for very many of them: a few hundred kilobytes for thousands."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, islice
from typing import Any, overload

import msgpack

from energon_lite.config.leaf_spec import LeafSpec, Step, Subset, WeightUnit
from energon_lite.config.weight_schedule import Segment

__all__ = ["LeafRecords", "from_record", "to_record"]

#: Leaves that are packed together: a look-up of one unpacks all of them. Part of the format of files.
_TOGETHER = 32
#: Names of the fields of a leaf that are plain values.
_PLAIN = (
    *("path", "split_part", "weight", "repetitions", "subflavors", "shuffle_over_epochs_multiplier"),
    *("dataset_config", "split_config", "origin"),
)


def to_record(spec: LeafSpec) -> list[Any]:
    """Convert a leaf to a list of plain values.

    Raises:
        ValueError: it has a field that is not plain: a join, or stores for a cooker.
    """
    if spec.join is not None or spec.aux:
        raise ValueError(spec.origin)
    part = spec.subset
    subset = None if part is None else [str(part.start), str(part.stop), part.first, part.last, part.origin]
    others = [spec.segments, subset, spec.trail, spec.filters, spec.units]
    return [*(getattr(spec, name) for name in _PLAIN), *(others if any(others) else ())]


def from_record(record: Sequence[Any]) -> LeafSpec:
    """Convert a list made by :func:`to_record` back to a leaf."""
    spec = LeafSpec(**dict(zip(_PLAIN, record, strict=False)))
    if len(record) == len(_PLAIN):
        return spec
    segments, subset, trail, filters, units = record[len(_PLAIN) :]
    return replace(
        spec,
        segments=tuple(Segment(*values) for values in segments),
        subset=None if subset is None else Subset(Fraction(subset[0]), Fraction(subset[1]), *subset[2:]),
        trail=tuple(Step(*values) for values in trail),
        filters=tuple(filters),
        units=tuple(WeightUnit(*values) for values in units),
    )


class LeafRecords(Sequence[LeafSpec]):
    """Sequence of leaves in packed form, unpacked on access.

    Args:
        packed: packed groups of leaves.
        count: total number of leaves.

    Example:
        >>> records = LeafRecords.of(specs)
        >>> records[7] == specs[7]
        True
    """

    def __init__(self, packed: Sequence[bytes], count: int):
        self.packed = tuple(packed)
        self._count = count
        self._last: tuple[int, list[list[Any]]] = -1, []

    @classmethod
    def of(cls, specs: Iterable[LeafSpec]) -> LeafRecords:
        """Pack leaves.

        Raises:
            ValueError: as :func:`to_record`; or a label is not a plain value.
        """
        records = map(to_record, specs)
        packed = list[bytes]()
        count = 0
        while some := list(islice(records, _TOGETHER)):
            try:
                data = msgpack.packb(some, unicode_errors="surrogateescape")
            except (TypeError, OverflowError) as error:
                raise ValueError(str(error)) from error
            packed.append(zlib.compress(data, 1))
            count += len(some)
        return cls(packed, count)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> LeafSpec: ...

    @overload
    def __getitem__(self, number: slice) -> list[LeafSpec]: ...

    def __getitem__(self, number: int | slice) -> LeafSpec | list[LeafSpec]:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(self._count))]
        return from_record(self._record(number))

    def __iter__(self) -> Iterator[LeafSpec]:
        return map(from_record, self._records())

    def path(self, number: int) -> str:
        """Path of a leaf."""
        return str(self._record(number)[0])

    def paths(self) -> Iterator[str]:
        """Paths of all leaves, in order."""
        return (record[0] for record in self._records())

    def _records(self) -> Iterator[list[Any]]:
        return chain.from_iterable(map(_unpacked, self.packed))

    def _record(self, number: int) -> list[Any]:
        if not 0 <= number < self._count:
            raise IndexError(number)
        place, within = divmod(number, _TOGETHER)
        last = self._last
        if last[0] != place:
            self._last = last = place, _unpacked(self.packed[place])
        return last[1][within]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": (-1, [])}


def _unpacked(data: bytes) -> list[list[Any]]:
    records: list[list[Any]] = msgpack.unpackb(
        zlib.decompress(data), unicode_errors="surrogateescape", strict_map_key=False
    )
    return records
