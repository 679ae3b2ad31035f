"""Subsets, ``subset: {range: [a, b]}``: ranges of consecutive samples of a data set.

Percentages are allowed at every level of a tree of metadatasets; an outer range applies to the result of the inner one.
Sample numbers are allowed only at a data set's own reference, and are applied before all percentages.

The sets equal Energon's: a percentage cuts at sample ``int(samples * ratio)``, in floating point, with the same ratios
as in Energon. Ranges are composed as exact fractions, while Energon rounds after each step. So ranges that are adjacent
in the document are adjacent in the data at every depth; in nested ranges a cut may differ from Energon's by one sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from energon_lite.documents import Node
from energon_lite.errors import ConfigError

__all__ = ["Subset", "read_subset"]

_PERCENTAGE = re.compile(r"\s*(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*%\Z", re.ASCII)
_BOUND = "a percentage such as 25%, or the number of a sample"


@dataclass(frozen=True)
class Subset:
    """Range of consecutive samples.

    Args:
        start, stop: ratios of the samples selected by ``first`` and ``last``, 0 <= start <= stop <= 1.
        first: number of the first sample, counted from 0; None: no sample numbers are given.
        last: number of the sample after the last one; None: to the end.
        origin: place in the document, for messages.

    Example:
        >>> Subset(Fraction(1, 4), Fraction(3, 4)).bounds(10)
        (2, 7)
        >>> Subset(Fraction(1, 2), Fraction(1), first=10).bounds(30)
        (20, 30)
    """

    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)
    first: int | None = None
    last: int | None = None
    origin: str = field(default="", compare=False)

    def bounds(self, samples: int) -> tuple[int, int]:
        """First sample and end, exclusive, of the range in a data set of ``samples``. May be empty.

        Raises:
            ConfigError: a sample number is beyond the end of the data set.
        """
        first, last = self.first or 0, samples if self.last is None else self.last
        if max(first, last) > samples:
            raise ConfigError(
                "the subset goes beyond the end of the data set",
                file=self.origin or None,
                expected=f"sample numbers up to {samples}",
                found=f"the range [{first}, {'end' if self.last is None else last}]",
                fix=f"write 'end' for the last number, or at most {samples}",
            )
        return first + _cut(self.start, last - first), first + _cut(self.stop, last - first)

    def of(self, inner: Subset | None) -> Subset:
        """Compose this range with ``inner``, the range of a reference further down in the tree."""
        if inner is None:
            return self
        length = inner.stop - inner.start
        origin = ", ".join(filter(None, [inner.origin, self.origin]))
        return Subset(
            inner.start + self.start * length, inner.start + self.stop * length, inner.first, inner.last, origin
        )

    def __str__(self) -> str:
        numbers = "" if self.first is None else f"samples {self.first}:{'end' if self.last is None else self.last}"
        if numbers and (self.start, self.stop) == (0, 1):
            return numbers
        ratios = f"{float(self.start * 100):.6g}% to {float(self.stop * 100):.6g}%"
        return f"{ratios} of {numbers}" if numbers else ratios


def _cut(ratio: Fraction, samples: int) -> int:
    return samples if ratio == 1 else min(samples, int(samples * float(ratio)))


def read_subset(node: Node) -> Subset:
    """Read the value of a ``subset`` key.

    Raises:
        ConfigError: the value has a mistake.
    """
    range_ = node.mapping(required={"range"})["range"]
    pair = range_.sequence("two: start and end")
    if len(pair) != 2:
        expected = "a list of two, such as [0%, 80%] or [100, end]"
        raise range_.error("a range has a start and an end", "write 'range: [start, end]'", expected=expected)
    start, stop = _bound(pair[0]), _bound(pair[1])
    if start is None:
        what = "a range cannot start at its end"
        raise pair[0].error(what, "write 0 or 0% for the first sample", expected=_BOUND)
    if isinstance(start, int) != (stop is None or isinstance(stop, int)):
        expected = "a sample's number, or end" if isinstance(start, int) else "a percentage"
        fix = "write '100%' for the end" if stop is None else "use percentages for both, or numbers for both"
        raise pair[1].error("a percentage and a sample's number in one range", fix, expected=expected)
    if stop is not None and stop <= start:
        empty = start == stop
        what = "the range is empty" if empty else "the range ends before it starts"
        fix = "remove the entry if it is not to be used" if empty else "exchange the two"
        found = f"[{pair[0].value}, {pair[1].value}]"
        raise range_.error(what, fix, expected="a start below the end", found=found)
    if isinstance(start, int):
        return Subset(first=start, last=None if stop is None else int(stop), origin=node.origin)
    return Subset(start, Fraction(stop or 0), origin=node.origin)


def _bound(node: Node) -> int | Fraction | None:
    """Read a sample's number, a ratio, or ``end``, which is None."""
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            fix = "count from the start of the data set, from 0"
            raise node.error("a sample's number is below zero", fix, expected="a number from 0 on")
        return value
    if not isinstance(value, str):
        ratio = isinstance(value, float) and 0 <= value <= 1
        raise node.wrong(_BOUND, f"write '{value * 100:g}%' if a ratio is meant" if ratio else None)
    if value.strip() == "end":
        return None
    if not _PERCENTAGE.match(value):
        quoted = value.strip().isdigit()
        raise node.wrong(_BOUND, "remove the quotes, or add %" if quoted else "write it like 25% or like 100")
    percentage = float(value.rstrip("%"))
    if percentage > 100:
        fix = "write at most 100%; to show samples more often use weights or repetitions"
        raise node.error("a percentage is above 100", fix, expected="a percentage from 0% to 100%")
    return Fraction(percentage / 100.0)
