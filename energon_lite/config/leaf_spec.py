"""Leaves: the data sets of a metadataset, with all settings of the documents on the path to them, and their subsets.

A subset, ``subset: {range: [a, b]}``, is a range of consecutive samples of a data set. Percentages are allowed at every
level of a tree of metadatasets; an outer range applies to the result of the inner one. Sample numbers are allowed only
at a data set's own reference, and are applied before all percentages.

The sets equal Energon's: a percentage cuts at sample ``int(samples * ratio)``, in floating point, with the same ratios
as in Energon. Ranges are composed as exact fractions, while Energon rounds after each step. So ranges that are adjacent
in the document are adjacent in the data at every depth; in nested ranges a cut may differ from Energon's by one sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from energon_lite.documents import Node
from energon_lite.errors import ConfigError

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


#: Treatment of a sample of the first data set without a counterpart in another one.
Nonmatch = Literal["error", "skip", "none"]


class Step(NamedTuple):
    """Reference to a metadataset on the path to a leaf.

    Attributes:
        path: path of the document.
        split_part: its split.
        origin: the reference to it, as ``file:line``.
        at: the path of the reference inside its document; one line may have two references.
    """

    path: str
    split_part: str
    origin: str
    at: str


class WeightSchedule(Protocol):
    """Weight, or share, that changes during the run; it comes from the guest of the key ``weight``. False if it is zero
    at all positions."""

    @property
    def start(self) -> float:
        """Its value at position 0."""

    def shares(self, weights: Sequence[Weight], blend: Node) -> list[Weight]:
        """Shares of the entries of a blend with these weights, of which it is one.

        Raises:
            ConfigError: all weights are zero at some position.
        """

    def times(self, other: Weight, reference: Node) -> Weight:
        """Product with the share of an entry of a nested blend, or with that of the blend around it.

        Raises:
            ConfigError: both change at the same time.
        """

    def __bool__(self) -> bool: ...


#: A weight, or a share of a blend.
Weight: TypeAlias = float | WeightSchedule


class WeightUnit(NamedTuple):
    """Blend on the path to a leaf whose weights are not shares of samples.

    Attributes:
        unit: the unit of which the weights are shares.
        blend: number of the blend, unique over all paths.
        entry: number of its entry that leads to the leaf.
        origin: place of the blend in its document.
    """

    unit: str
    blend: int
    entry: int
    origin: str


@dataclass(frozen=True)
class AuxReference:
    """One entry of ``aux``.

    Args:
        kind: ``dataset``: a prepared one; ``filesystem``: the files of a folder; ``byterange``: byte ranges of these.
        path: absolute, or a URL.
        origin: ``file:line``, for messages.
    """

    kind: str
    path: str
    origin: str = ""


@dataclass(frozen=True)
class JoinSpec:
    """Join with resolved data sets.

    Args:
        members: the data sets, the first one first; of their fields only those that select samples matter.
        nonmatch: for each of them, the treatment of samples of the first one without a counterpart in it.
        names: the joiner gets samples by these names; None: in order.
        joiner: module and name of the joiner, for messages and comparisons.
        node: the node that names it.
    """

    members: tuple[LeafSpec, ...]
    nonmatch: tuple[Nonmatch, ...]
    names: tuple[str, ...] | None
    joiner: str
    node: Node = field(compare=False, repr=False)


@dataclass(frozen=True)
class LeafSpec:
    """One data set of a blend, with all settings of the documents on the path to it.

    Args:
        path: absolute path of the prepared folder, or a URL.
        split_part: the split to read.
        weight: its share of the whole blend; the leaves of one blend sum to 1. Unused with repetitions. If shares
            change during the run, the share at its start.
        schedule: the share along the run, if it changes; None: it is constant.
        repetitions: number of times that an epoch of the blend has each of its samples (``blend_epochized``); None in a
            blend by weight.
        subset: the part of the split to read; None: all of it.
        subflavors: labels for its samples; they take precedence over those in its own ``dataset.yaml``.
        shuffle_over_epochs_multiplier: as in Energon: product along the path; None takes precedence over -1, and -1
            over other numbers.
        dataset_config: name of the file in ``.nv-meta`` that maps parts to fields.
        split_config: name of the file in ``.nv-meta`` that lists the splits.
        join: the data sets whose samples are joined, of which this is the first; None: no join.
        aux: data sets and folders from which its cooker reads files, by name.
        origin: ``file:line`` of the reference, for messages.
        trail: the nested metadatasets on the path, the outermost first.
        filters: conditions that its samples must all meet.
        units: blends on the path whose weights are not shares of samples, the outermost first. ``weight`` and
            ``schedule`` are computed as if they were.
    """

    path: str
    split_part: str
    weight: float = 1.0
    schedule: WeightSchedule | None = None
    repetitions: float | None = None
    subset: Subset | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    join: JoinSpec | None = None
    aux: dict[str, AuxReference] = field(default_factory=dict)
    origin: str = ""
    trail: tuple[Step, ...] = field(default=(), compare=False)
    filters: tuple[str, ...] = ()
    units: tuple[WeightUnit, ...] = ()

    @property
    def paths(self) -> list[str]:
        """Path of its data, as a list, by Energon's name."""
        return [self.path]

    @property
    def folders(self) -> tuple[str, ...]:
        """Paths of all data sets that its samples are read from."""
        return (self.path,) if self.join is None else tuple(member.path for member in self.join.members)

    def labelled(self, subflavors: Mapping[str, Any]) -> LeafSpec:
        """Return the leaf with additional labels, which take precedence over its own."""
        if not subflavors:
            return self
        join = self.join
        if join is not None:
            join = replace(join, members=tuple(member.labelled(subflavors) for member in join.members))
        return replace(self, subflavors=self.subflavors | dict(subflavors), join=join)


@dataclass(frozen=True)
class FoundLeaves:
    """Result of :func:`~energon_lite.loading.leaves.find_leaves`, used in place of the path, so that a caller can
    inspect the leaves and make a data set of them without reading all documents twice.

    Args:
        specs: the leaves as the documents describe them.
    """

    specs: Sequence[LeafSpec]
