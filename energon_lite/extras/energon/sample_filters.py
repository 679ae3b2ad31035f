"""Filters of samples, written as a comparison of their columns: ``tokens <= 4096 and quality > 0.5``.

The text is Python's notation for numbers, names of columns, arithmetic (``+ - * / // %``), comparisons, ``in`` with a
list of numbers, ``and``, ``or`` and ``not``. It is parsed and then evaluated node by node; no code is executed.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.documents import load_yaml
from energon_lite.errors import DataIndexError, UsageError
from energon_lite.storage.files.atomic_file import write_bytes
from energon_lite.storage.index.column_file import check_column_name
from energon_lite.storage.index.columns import length_column
from energon_lite.storage.index.index_cache import open_index
from energon_lite.storage.index.nv_meta import is_jsonl, meta_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_members import Int64

Values = Mapping[str, NDArray[Any]]

_INDEX = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
#: Most characters of a filter.
_LONGEST = 1000
#: Upper bound of the numbers in a filter, exclusive.
_LARGEST = 1 << 62
_FIX = "write a comparison of columns, such as tokens <= 4096, or the name of a filter index"

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: np.isin,
    ast.NotIn: lambda one, others: ~np.isin(one, others),
}
#: Version of the files of filter indexes.
_INDEX_VERSION = 1


@dataclass(frozen=True)
class SampleFilter:
    """A condition on samples: a comparison of columns, or a filter index.

    Args:
        text: a comparison, or the name of a filter index.

    Attributes:
        index: the name of a filter index; None for a comparison.
        columns: the columns that a comparison reads.

    Raises:
        UsageError: the text is neither.

    Example:
        >>> SampleFilter("tokens <= 4096").keep({"length": np.array([5000, 12])})
        array([False,  True])
    """

    text: str

    def __post_init__(self) -> None:
        if self.index is None:
            self._parsed  # noqa: B018  # for its errors

    @property
    def index(self) -> str | None:
        return self.text.strip() if _INDEX.match(self.text.strip()) else None

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.index is not None else self._parsed[1]

    def keep(self, values: Values) -> NDArray[np.bool_]:
        """Return a mask of the kept samples, ``[n]``, from the values of the columns.

        Raises:
            UsageError: the text is not a condition on each sample.
        """
        try:
            with np.errstate(all="ignore"):
                kept = np.asarray(_value(self._parsed[0], values))
        except (TypeError, ArithmeticError, ValueError) as error:
            raise UsageError(f"the filter {self.text!r} cannot be computed: {error}", fix=_FIX) from None
        if kept.dtype != bool or kept.ndim != 1:
            raise UsageError(f"the filter {self.text!r} is not a condition on each sample", fix=_FIX)
        return kept

    def opened(
        self, path: str, index: PackedIndex | None, column: Callable[[str], Any]
    ) -> Callable[[int, int], NDArray[np.bool_]]:
        """Return a mask of samples; see :class:`~energon_lite.storage.read.source.SampleFilter`."""
        if self.index is None:
            columns = {name: column(name) for name in self.columns}

            def compared(first: int, stop: int) -> NDArray[np.bool_]:
                values = {name: np.asarray(every[first:stop]) for name, every in columns.items()}
                # Products of small integer types would overflow.
                return self.keep(
                    {name: here.astype(np.int64) if here.dtype.kind in "iu" else here for name, here in values.items()}
                )

            return compared
        if index is None:
            raise UsageError(
                f"a source of your own has no filter index {self.index!r}",
                where=path,
                fix="write a comparison of its columns, such as tokens <= 4096",
            )
        numbers = read_filter_index(path, index, self.index)

        def listed(first: int, stop: int) -> NDArray[np.bool_]:
            mask = np.zeros(stop - first, dtype=bool)
            mask[numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, stop)] - first] = True
            return mask

        return listed

    @cached_property
    def _parsed(self) -> tuple[ast.expr, tuple[str, ...]]:
        """The comparison, and the columns that it reads: those that its value for no samples depends on."""
        columns = defaultdict[str, NDArray[Any]](lambda: np.zeros(0))
        try:
            if len(self.text) > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST} characters")
            comparison = ast.parse(self.text.strip(), mode="eval").body
            _value(comparison, columns)
        except (SyntaxError, TypeError, ArithmeticError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
            raise UsageError(f"this is not a filter: {self.text[:80]!r}: {why}", fix=_FIX) from None
        if not columns:
            raise UsageError(f"the filter {self.text!r} names no column", fix=_FIX)
        return comparison, tuple(sorted(columns))

    def __reduce__(self) -> Any:
        return SampleFilter, (self.text,)


def _value(node: ast.AST, values: Values) -> Any:
    """Compute a node of a filter from the values of columns.

    Raises:
        ValueError: the node contains something that is not allowed.
    """
    match node:
        case ast.Constant(value=bool() | int() | float() as number) if abs(number) < _LARGEST:
            return number
        case ast.Name() | ast.Attribute():
            return values[length_column(_name(node))]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_value(operand, values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_value(left, values), _value(right, values))
        case ast.BoolOp(op=op, values=parts):
            combine = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return reduce(combine, [_value(part, values) for part in parts])
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            sides = [_value(left, values)]  # such as 1 < a <= b, or a in [1, 2]
            for kind, other in zip(ops, others, strict=True):
                sides.append(_numbers(other) if isinstance(kind, (ast.In, ast.NotIn)) else _value(other, values))
            pairs = zip(ops, pairwise(sides), strict=True)
            return reduce(np.logical_and, [_COMPARISONS[type(kind)](*pair) for kind, pair in pairs])
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not allowed in it")


def _numbers(node: ast.AST) -> list[float]:
    """The values of a list of numbers.

    Raises:
        ValueError: it is no such list.
    """
    with suppress(ValueError):  # of what is no constant
        numbers = ast.literal_eval(node)
        if isinstance(node, (ast.List, ast.Tuple)) and all(
            isinstance(number, (int, float)) and abs(number) < _LARGEST for number in numbers
        ):
            return list(numbers)
    raise ValueError("'in' needs a list of numbers")


def _name(node: ast.AST) -> str:
    """The name of a column, which may contain dots.

    Raises:
        ValueError: the node is no name.
    """
    match node:
        case ast.Name(id=name):
            return check_column_name(name)
        case ast.Attribute(value=value, attr=name):
            return check_column_name(f"{_name(value)}.{name}")
    raise ValueError("a column is a name")


# -- filter indexes -------------------------------------------------------------------------------------------------
#
# Named lists of the samples that are kept, next to a data set. Their form is that of Megatron-Energon 8, so either
# library reads the files of the other: ``filter_<name>.json`` (number of kept samples of each shard) and
# ``filter_<name>.idx`` (their numbers over all shards, ascending, as unsigned 64-bit numbers, little endian), both in
# ``.nv-meta``; for a file such as ``chats.jsonl``, ``chats.jsonl.<name>.json`` and ``chats.jsonl.<name>.idx`` next to
# it.


def filter_paths(root: str, name: str) -> tuple[str, str]:
    """Paths of the two files of a filter index: the counts and the numbers."""
    stem = f"{root}.{name}" if is_jsonl(root) else meta_path(root, f"filter_{name}")
    return f"{stem}.json", f"{stem}.idx"


def build_filter_index(
    dataset_path: str | os.PathLike[str], filter_name: str, indexes: Iterable[int], *, overwrite: bool = False
) -> None:
    """Store a list of kept samples of a prepared data set under a name, for ``filter:`` in a metadataset.

    Args:
        dataset_path: the prepared folder, or a JSONL file.
        filter_name: such as ``quality_v1``.
        indexes: numbers of the samples, ascending, counted over all shards in the order of ``.nv-meta/.info.json``.
        overwrite: replace an existing index of that name.

    Raises:
        UsageError: the numbers do not ascend, or exceed the samples; or the index exists already.
        DatasetError: the path is not a prepared data set.

    Example:
        >>> lengths = source.column("length")
        >>> build_filter_index("data/coco", "short", np.flatnonzero(lengths[:] <= 4096))
    """
    root = os.path.abspath(os.fspath(dataset_path))
    json_path, index_path = filter_paths(root, check_column_name(filter_name))
    index, _ = open_index(root)
    given = np.asarray(indexes if isinstance(indexes, (Sequence, np.ndarray)) else list(indexes))
    kept = given.astype(np.int64) if given.dtype.kind in "iu" else np.zeros(0, dtype=np.int64)
    ascends = not len(kept) or (kept[0] >= 0 and kept[-1] < len(index) and (np.diff(kept) > 0).all())
    if len(kept) != len(given) or not ascends:
        raise UsageError(
            f"the numbers for the filter {filter_name!r} are not sample numbers in ascending order",
            where=root,
            fix=f"give ascending integers from 0 to {len(index) - 1}",
        )
    if not overwrite and (os.path.exists(json_path) or os.path.exists(index_path)):
        raise UsageError(
            f"the filter {filter_name!r} exists already",
            where=json_path,
            fix="give overwrite=True, or --force-overwrite",
        )
    bounds = index.shards[:, 3].astype(np.int64)
    counts = np.diff(np.searchsorted(kept, bounds))
    document = {
        "version": _INDEX_VERSION,
        "filtered_shard_counts": dict(zip(index.shard_names, counts.tolist(), strict=True)),
    }
    write_bytes(index_path, kept.astype("<u8").tobytes())
    write_bytes(json_path, json.dumps(document, indent=2, sort_keys=True).encode() + b"\n")


def build_filter_index_from_shard_indexes(
    dataset_path: str | os.PathLike[str],
    filter_name: str,
    indexes_by_shard: Mapping[str, Iterable[int]],
    *,
    overwrite: bool = False,
) -> None:
    """Store a filter index from numbers that are counted within each shard; see :func:`build_filter_index`.

    Raises:
        UsageError, DatasetError: as there; or a shard is unknown.
    """
    root = os.path.abspath(os.fspath(dataset_path))
    index, _ = open_index(root)
    unknown = indexes_by_shard.keys() - set(index.shard_names)
    if unknown:
        raise UsageError(f"the data set has no shard {sorted(unknown)[0]!r}", where=root, fix="correct its name")
    starts, kept = index.shards[:, 3].tolist(), list[int]()
    for name, (start, stop) in zip(index.shard_names, pairwise(starts), strict=True):
        numbers = [int(number) for number in indexes_by_shard.get(name, ())]
        if any(not 0 <= number < stop - start for number in numbers):
            raise UsageError(
                f"a number beyond the {stop - start} samples of {name}", where=root, fix="count in the shard, from 0"
            )
        kept += [start + number for number in numbers]
    build_filter_index(dataset_path, filter_name, kept, overwrite=overwrite)


def read_filter_index(root: str, index: PackedIndex, name: str) -> Int64:
    """Read the numbers of the samples that a filter index keeps, ascending.

    Raises:
        DataIndexError: the index does not exist, is damaged, or belongs to another data set.
    """
    json_path, index_path = filter_paths(root, name)
    if not (os.path.isfile(json_path) and os.path.isfile(index_path)):
        raise DataIndexError(
            f"the data set has no filter index {name!r}",
            where=json_path,
            fix="make it with energon_lite.extras.energon.build_filter_index, correct the name, or write a comparison "
            "of columns (tokens <= 4096)",
        )
    counts = _counts(json_path)
    numbers = np.fromfile(index_path, dtype="<i8")
    wanted = [0, *accumulate(counts.get(shard, 0) for shard in index.shard_names)]
    ascends = bool((numbers[1:] > numbers[:-1]).all())
    good = counts.keys() <= set(index.shard_names) and len(numbers) == wanted[-1] and ascends
    # The bounds of the shards begin with 0 and end with the number of samples.
    if not good or np.searchsorted(numbers, index.shards[:, 3].astype(np.int64)).tolist() != wanted:
        raise DataIndexError(
            f"the filter index {name!r} is damaged, or was made for another state of the data set",
            where=index_path,
            fix="make it again: energon_lite.extras.energon.build_filter_index(..., overwrite=True)",
        )
    return numbers


def _counts(path: str) -> dict[str, int]:
    """Number of kept samples of each shard."""
    document: Any = load_yaml(path).plain()
    counts = document.get("filtered_shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or document.get("version") != _INDEX_VERSION:
        raise DataIndexError(
            f"this is not a filter index of version {_INDEX_VERSION}",
            where=path,
            fix="make it again with build_filter_index",
        )
    good = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts.values())
    if not good:
        raise DataIndexError("the counts of a filter index are damaged", where=path, fix="make it again")
    return counts
