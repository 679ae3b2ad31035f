"""Data sets as plain lists of their items: those of one rank without workers, and what wrappers make of them.

An item is what a data set hands to a rank in one step. What cannot be known beforehand, such as a number that a
function draws, must be the same whenever it is seen again: that is what :class:`Once` stands for.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from energon_lite import SavableDataset, get_savable_loader

KINDS = ("samples", "skipped", "failed", "dropped")


@dataclass(frozen=True)
class Once:
    """A value that is not known, but always the same."""

    what: Hashable


@dataclass(frozen=True)
class Item:
    """An item of a data set.

    Args:
        content: as :func:`plain` has it; None: it was lost.
        name: tells it from all others.
        refills: if a function loses it, another one stands in its place.
        counts: what became of samples on the way to it.
    """

    content: Any
    name: Hashable
    refills: bool = False
    counts: Counter[str] = field(default_factory=Counter)


def plain(value: Any) -> Any:
    """A batch, or a sample, as plain data that can be compared; without keys by which it can be made again."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in ("__restore_key__", "__sources__")}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def names_in(content: Any) -> list[Any]:
    """The names of the samples in a plain item; those in a batch of items come one after the other."""
    keys = [] if content is None else content["__key__"]
    return keys if isinstance(keys, list) else [keys]


class Tape:
    """A list that is made as far as it was asked for; None where nothing is."""

    def __init__(self, coming: Iterator[Item | None]):
        self._coming, self.made = coming, list[Item | None]()

    def reaches(self, place: int) -> bool:
        """True if there is something at a place, or behind it."""
        while len(self.made) <= place:
            try:
                self.made.append(next(self._coming))
            except StopIteration:
                return False
        return True

    def at(self, place: int) -> Item | None:
        return self.made[place] if self.reaches(place) else None


class Reference:
    """The items of a data set, as one rank without workers gets them, at their positions in each pass.

    Args:
        refills: whether the data set replaces what is lost.
        name: tells its items from those of others.
    """

    def __init__(self, dataset: SavableDataset, *, refills: bool, name: Hashable):
        self.dataset = dataset
        self._loader = get_savable_loader(dataset)
        self._refills, self._name = refills, name
        self.passes: list[Tape] = []
        self.ends: list[Counter[str]] = []

    def tape(self, number: int) -> Tape:
        """The items of a pass."""
        while len(self.passes) <= number:
            if self.passes:
                self.to_end(len(self.passes) - 1)
            self.passes.append(Tape(self._pass(len(self.passes))))
        return self.passes[number]

    def to_end(self, number: int) -> None:
        """Go to the end of a pass, which has one."""
        tape = self.tape(number)
        while tape.reaches(len(tape.made)):
            pass

    def _pass(self, number: int) -> Iterator[Item | None]:
        made, before = 0, self._counts()
        for batch in self._loader:
            while made < self._loader.state_dict()["position"] - 1:
                yield None
                made += 1
            counts, before = self._counts() - before, self._counts()
            yield Item(plain(batch), (self._name, number, made), self._refills, counts)
            made += 1
        self.ends.append(self._counts() - before)

    def _counts(self) -> Counter[str]:
        stats = self._loader.stats()
        return Counter({kind: stats[kind] for kind in KINDS})


class Memory:
    """The values that :class:`Once` stood for, in all runs of a pipeline."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Any] = {}

    def matches(self, expected: Any, found: Any) -> bool:
        """Compare a plain item with the expected one."""
        if isinstance(expected, Once):
            return bool(self._seen.setdefault(expected.what, found) == found)
        if isinstance(expected, dict) and isinstance(found, dict):
            return expected.keys() == found.keys() and all(self.matches(expected[key], found[key]) for key in expected)
        if isinstance(expected, list) and isinstance(found, list):
            return len(expected) == len(found) and all(map(self.matches, expected, found))
        return bool(expected == found)


def applied(item: Item, function: Callable[[Any], Any], lost: Callable[[list[str]], bool], name: Hashable) -> Item:
    """An item behind a function.

    Args:
        function: ``(content) -> content``.
        lost: whether the function loses an item of these names.
    """
    name = (item.name, name)
    if item.content is None:
        return item
    unknown = Item(Once(name), name, item.refills)
    if isinstance(item.content, Once):
        return unknown
    names = names_in(item.content)
    if any(isinstance(one, Once) for one in names):
        return unknown
    if lost(names):
        return unknown if item.refills else Item(None, name)
    return Item(function(item.content), name, item.refills)
