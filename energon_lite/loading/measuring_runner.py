"""Runner whose jobs return measured values of neighbouring samples in place of batches: a flag, and any number of
columns; and these values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.hooks import HookContext, TaskEncoder, hooks_of
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Outcome, Rejected, Result
from energon_lite.order.hashing import HashDomain
from energon_lite.storage.index.column_file import LENGTH, Ragged, check_column_name
from energon_lite.storage.index.columns import FAILED, SKIP, SKIPPED

#: Tag that separates the randomness of lengths from that of samples.
_LENGTH = HashDomain.MEASURED_LENGTH.value


#: By name of a column: 0 for a column with one number per sample, the width of a ragged column, or -1 for a ragged
#: column without any row, which is compatible with every width.
Shapes = Mapping[str, int]

#: Values that the encoder returns for a sample, by name: numbers, lists of numbers, or lists of rows of numbers.
Costs = Mapping[str, Any]

#: One number for each sample, int64 ``[n]``; or any number of rows of numbers for each.
Column = NDArray[Any] | Ragged


@dataclass
class Values:
    """Measured values of ``n`` samples.

    Args:
        flags: uint8 ``[n]``, see :mod:`energon_lite.storage.index.columns`.
        columns: the columns, by name; that of lengths is 0 for samples without a length.
    """

    flags: NDArray[Any]
    columns: dict[str, Column] = field(default_factory=dict)

    def shapes(self) -> dict[str, int]:
        """Return the shapes of the columns."""
        return {
            name: (column.values.shape[1] or -1) if isinstance(column, Ragged) else 0
            for name, column in self.columns.items()
        }

    def column(self, name: str, width: int = 0) -> Column:
        """Return a column by name, with its width in :data:`Shapes`; without values if it does not exist."""
        nothing = np.zeros(len(self.flags), dtype=np.int64)
        column = self.columns.get(name, Ragged(nothing, np.zeros((0, 0), dtype=np.int64)) if width else nothing)
        if isinstance(column, Ragged) and not column.values.size:
            return Ragged(column.counts, column.values.reshape(0, max(width, 0)))
        return column

    @classmethod
    def zeros(cls, samples: int) -> Values:
        """Return values of samples that have not been measured."""
        return cls(np.zeros(samples, dtype=np.uint8))

    def replaced(self, parts: Sequence[tuple[int, Values]]) -> Values:
        """Return these values with parts of them replaced, from a sample number on; parts ascend and are disjoint."""
        pieces = list[Values]()
        stop = 0
        for start, part in parts:
            pieces += [self.cut(stop, start), part]
            stop = start + len(part.flags)
        return joined([*pieces, self.cut(stop, len(self.flags))])

    def cut(self, start: int, stop: int) -> Values:
        """Return the values of samples ``start`` to ``stop - 1``."""
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                ends = np.concatenate([[0], np.cumsum(column.counts)])
                columns[name] = Ragged(column.counts[start:stop], column.values[ends[start] : ends[stop]])
            else:
                columns[name] = column[start:stop]
        return Values(self.flags[start:stop], columns)


class ColumnReader(Protocol):
    """Reader of columns of one data set. Workers have copies of it."""

    def add(self, first: int, stop: int, values: Values, broken: dict[int, Exception]) -> None:
        """Add the columns of samples ``first`` to ``stop - 1``, all in one shard.

        Args:
            values: get the columns: int64 ``[stop - first]``, or ragged ones.
            broken: gets the error of each sample without values, by its place among them, unless it has one.
        """


class MeasuringRunner(JobRunner):
    """Runner of chunks: each sample goes through the user's hooks up to ``encode_sample``. The result is its length,
    and the values of the encoder's ``sample_costs``, if it has such a method.

    Args:
        leaf: the leaf.
        encoder: the user's hooks.
        length: function that returns the length of an encoded sample; None: there is no column of lengths.
        parts: further columns, made of stored parts.

    Attributes:
        length: the function.

    Raises:
        UsageError: a hook is a generator.
    """

    def __init__(
        self, leaf: Leaf, encoder: TaskEncoder, length: Callable[[Any], int] | None, parts: ColumnReader | None = None
    ):
        hooks = hooks_of(encoder, packing=False, batched=False)
        if hooks.content_decides:
            raise UsageError(
                f"a hook of {type(encoder).__name__} is a generator: a sample has no length of its own then",
                fix="measure with an encoder whose hooks return one sample for each",
            )
        super().__init__([leaf], encoder, hooks, seed=0)
        self.length = length
        self._parts = parts
        self._costs: Callable[[Any], Costs] | None = getattr(encoder, "sample_costs", None)

    def run(self, job: Job) -> Result:
        """Return the values of a chunk, as :class:`Values`, with its failures."""
        measured = Values.zeros(len(job.addresses))
        lengths = np.zeros(len(job.addresses), dtype=np.int64)
        costs = list[Costs | None]()
        failures: dict[int, Outcome] = {}
        with HookContext() as context:
            outcomes = repeat((0, None)) if self.length is None else self._measured(self.length, job.addresses, context)
            for place, outcome in zip(range(len(job.addresses)), outcomes, strict=False):
                costs.append(None)
                if isinstance(outcome, Rejected):
                    measured.flags[place] = SKIPPED if outcome.failure.skipped else FAILED
                    failures[place] = outcome.failure.at(job.addresses[place])
                else:
                    lengths[place], costs[place] = outcome
        measured.columns = columns_of(costs, type(self.encoder).__name__)
        if self.length is not None:
            measured.columns[LENGTH] = lengths
        if self._parts is not None:
            self._add_parts(job, self._parts, measured, failures)
        return Result(measured, [failures[place] for place in sorted(failures)])

    def _add_parts(self, job: Job, parts: ColumnReader, measured: Values, failures: dict[int, Outcome]) -> None:
        (leaf,) = self.leaves
        first = job.addresses[0][1]
        broken: dict[int, Exception] = {}
        parts.add(first, first + len(job.addresses), measured, broken)
        for place, error in broken.items():
            if place in failures:
                continue
            try:
                self.guarded("read", leaf.name, leaf.source.key(first + place), None, _raise, error)
            except Rejected as rejected:
                measured.flags[place] = FAILED
                failures[place] = rejected.failure.at(job.addresses[place])

    def _measured(
        self, length: Callable[[Any], int], addresses: Sequence[Address], context: HookContext
    ) -> Iterator[tuple[int, Costs | None] | Rejected]:
        """Yield the length of each sample, with its costs, or its failure."""
        (leaf,) = self.leaves
        for address, encoded in zip(addresses, self.make(addresses, context), strict=True):
            if type(encoded) is Rejected:
                yield encoded
                continue
            name = leaf.source.key(address[1])
            context.move(self.seed, _LENGTH, leaf.key, *address[1:])
            try:
                number = self.guarded("sample_length", leaf.name, name, encoded, length, encoded)
                costs = None
                if self._costs is not None:
                    costs = self.guarded("sample_costs", leaf.name, name, encoded, self._costs, encoded)
                yield number, costs
            except Rejected as rejected:
                yield rejected


def _raise(error: Exception) -> None:
    raise error


def joined(parts: Sequence[Values]) -> Values:
    """Return the values of several groups of samples, one after the other."""
    columns: dict[str, Column] = {}
    for name, width in joined_shapes(part.shapes() for part in parts).items():
        some: list[Any] = [part.column(name, width) for part in parts]
        columns[name] = Ragged(*map(np.concatenate, zip(*some, strict=True))) if width else np.concatenate(some)
    return Values(np.concatenate([part.flags for part in parts]), columns)


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
                kinds = [f"a list of rows of {abs(one)}" if one else "a number" for one in sorted((before, width))]
                raise FatalSampleError(
                    f"the column {name!r} is {kinds[0]} for some samples, and {kinds[1]} for others",
                    where="sample_costs",
                    fix="return the same kind of value for all samples",
                )
    return widths


def columns_of(costs: Sequence[Costs | None], where: str) -> dict[str, Column]:
    """Return columns of the values that the encoder returns for samples.

    Args:
        costs: values of each sample; None: there are none. A missing name counts as 0, or as no row.
        where: name of the encoder, for messages.

    Raises:
        FatalSampleError: a name or a value cannot be stored.
    """
    if not any(costs):
        return {}
    samples = [Values.zeros(1) for _ in costs]
    for values, own in zip(samples, costs, strict=True):
        values.columns = {name: _checked(name, value, where) for name, value in (own or {}).items()}
    return joined([Values.zeros(0), *samples]).columns


def _checked(name: str, value: Any, where: str) -> Column:
    """Return the column of one sample."""
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
    array = array.astype(np.int64)
    if array.ndim == 0:
        return array[None]
    rows = array if array.ndim == 2 else array[:, None]
    return Ragged(np.array([len(rows) if rows.size else 0]), rows if rows.size else rows.reshape(0, 0))
