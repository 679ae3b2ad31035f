"""Filters of samples, written as a comparison of their columns: ``tokens <= 4096 and quality > 0.5``.

The text is Python's notation for numbers, names of columns, arithmetic (``+ - * / // %``), comparisons, ``in`` with a
list of numbers, ``and``, ``or`` and ``not``. It is parsed and then evaluated node by node; no code is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.storage.index.columns import LENGTH, check_column_name

__all__ = ["SampleFilter", "length_column"]

Values = Mapping[str, NDArray[Any]]
_Computed = Callable[[Values], Any]

#: Other names of the column of lengths.
_LENGTHS = ("tokens", "num_tokens")
_INDEX = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
#: Characters of a filter, at most.
_LONGEST = 1000
#: Numbers in a filter are smaller than this.
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


def length_column(name: str) -> str:
    """Return the column that a name stands for: ``tokens`` and ``num_tokens`` are aliases of the measured length."""
    return LENGTH if name in _LENGTHS else name


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
            UsageError: the text is no condition on each sample.
        """
        try:
            with np.errstate(all="ignore"):
                kept = np.asarray(self._parsed[0](values))
        except (TypeError, OverflowError, ZeroDivisionError, ValueError) as error:
            raise UsageError(f"the filter {self.text!r} cannot be computed: {error}", fix=_FIX) from None
        if kept.dtype != bool or kept.ndim != 1:
            raise UsageError(f"the filter {self.text!r} is no condition on each sample", fix=_FIX)
        return kept

    @cached_property
    def _parsed(self) -> tuple[_Computed, tuple[str, ...]]:
        names: set[str] = set()
        try:
            if len(self.text) > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST} characters")
            computed = _compiled(ast.parse(self.text.strip(), mode="eval").body, names)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
            raise UsageError(f"this is no filter: {self.text[:80]!r}: {why}", fix=_FIX) from None
        if not names:
            raise UsageError(f"the filter {self.text!r} names no column", fix=_FIX)
        return computed, tuple(sorted(names))

    def __reduce__(self) -> Any:
        return SampleFilter, (self.text,)


def _compiled(node: ast.AST, names: set[str]) -> _Computed:
    """Return the function that computes a node of a filter; add the columns that it reads to ``names``.

    Raises:
        ValueError: the node contains something that is not allowed.
    """
    match node:
        case ast.Constant(value=bool() | int() | float() as number) if abs(number) < _LARGEST:
            return lambda values: number
        case ast.Name() | ast.Attribute():
            name = length_column(_name(node))
            names.add(name)
            return lambda values: values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _compiled(operand, names)
            return lambda values: -inner(values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compiled(operand, names)
            return lambda values: np.logical_not(inner(values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            function = _ARITHMETIC[type(op)]
            first = _compiled(left, names)
            second = _compiled(right, names)
            return lambda values: function(first(values), second(values))
        case ast.BoolOp(op=op, values=parts):
            combine = np.logical_and if isinstance(op, ast.And) else np.logical_or
            several = [_compiled(part, names) for part in parts]
            return lambda values: combine.reduce([np.asarray(part(values), dtype=bool) for part in several])
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            return _comparison([left, *others], ops, names)
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not allowed in it")


def _comparison(operands: list[ast.expr], ops: list[ast.cmpop], names: set[str]) -> _Computed:
    """Return the function of a comparison such as ``1 < a <= b`` or ``a in [1, 2]``."""
    sides: list[_Computed] = []
    for place, operand in enumerate(operands):
        if place and isinstance(ops[place - 1], (ast.In, ast.NotIn)):
            if not isinstance(operand, (ast.List, ast.Tuple)):
                raise ValueError("'in' needs a list of numbers")
            sides.append(_always([_number(element) for element in operand.elts]))
        else:
            sides.append(_compiled(operand, names))
    functions = [_COMPARISONS[type(op)] for op in ops]

    def compare(values: Values) -> Any:
        computed = [side(values) for side in sides]
        pairs = zip(functions, computed[:-1], computed[1:], strict=True)
        return np.logical_and.reduce([np.asarray(function(left, right)) for function, left, right in pairs])

    return compare


def _always(value: Any) -> _Computed:
    return lambda values: value


def _number(node: ast.AST) -> float:
    """The value of a node that is a number, perhaps with a minus sign.

    Raises:
        ValueError: it is no number.
    """
    match node:
        case ast.Constant(value=bool() | int() | float() as number) if abs(number) < _LARGEST:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
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
