"""Wrappers around data sets, each twice: as the library has it, and as a few lines over lists of items."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

import numpy as np

from energon_lite import SavableDataset, SkipSample, WorkerConfig
from energon_lite.extras.energon import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from energon_lite.extras.energon.wrappers.datasets import _BLEND, _SHUFFLE
from energon_lite.order.blend import Blend
from energon_lite.order.hashing import hash_ints, mix64_array
from energon_lite.order.permutation import permute_array
from tests.core.laws.naive_hooks import chance
from tests.core.laws.naive_items import Item, Once, applied, names_in, plain


class Node(ABC):
    """A data set, wrapped or not.

    Attributes:
        inner: those inside.
        endless: there is one pass, without end.
        by_rank: on another number of ranks its items are others.
    """

    inner: Sequence[Node]
    endless: bool
    by_rank: bool

    @abstractmethod
    def build(self, config: WorkerConfig) -> SavableDataset:
        """The data set of the library."""

    @abstractmethod
    def items(self, number: int, world: int) -> Iterator[Item]:
        """The items of a pass, over all ranks together."""

    def flow(self, world: int) -> Iterator[Item]:
        """The items of all passes, one after the other."""
        if self.endless:
            return self.items(0, world)
        return chain.from_iterable(self.items(number, world) for number in count())

    @property
    def bases(self) -> list[Any]:
        """The data sets at the bottom."""
        return [base for one in self.inner for base in one.bases]

    @property
    def loses(self) -> bool:
        """A function loses some of its items."""
        return isinstance(self, (Mapped, Filtered)) or any(one.loses for one in self.inner)


@dataclass(frozen=True)
class _Wrapper(Node):
    inner: tuple[Node, ...]

    @property
    def only(self) -> Node:
        (one,) = self.inner
        return one

    @property
    def by_rank(self) -> bool:  # type: ignore[override]
        return any(one.by_rank for one in self.inner)

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return self.only.endless


@dataclass(frozen=True)
class Limit(_Wrapper):
    length: int
    endless = False
    by_rank = True

    def build(self, config: WorkerConfig) -> SavableDataset:
        return LimitDataset(self.only.build(config), self.length, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        return islice(self.only.items(0, world), self.length * world)


@dataclass(frozen=True)
class Repeat(_Wrapper):
    repeats: float | None

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return self.repeats is None or self.only.endless

    def build(self, config: WorkerConfig) -> SavableDataset:
        return RepeatDataset(self.only.build(config), repeats=self.repeats, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        if self.repeats is None or self.only.endless:
            return self.only.flow(world)
        first, length = number * int(np.ceil(self.repeats)), len(list(self.only.items(0, world)))
        passes = (self.only.items(first + one, world) for one in count())
        return islice(chain.from_iterable(passes), int(length * self.repeats))


@dataclass(frozen=True)
class Epochize(_Wrapper):
    length: int
    endless = False
    by_rank = True

    def build(self, config: WorkerConfig) -> SavableDataset:
        return EpochizeDataset(self.only.build(config), self.length, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        size = self.length * world
        return islice(self.only.flow(world), number * size, (number + 1) * size)


@dataclass(frozen=True)
class Mapped(_Wrapper):
    salt: int

    def lost(self, names: Sequence[str]) -> bool:
        return not chance(7, "map", self.salt, *names)

    def apply(self, item: Any) -> Any:
        names = names_in(plain(item))
        if self.lost(names):
            raise (SkipSample if self.salt % 2 else ValueError)("by its names")
        return {"__key__": names, "of": item, "drawn": random.random()}

    def build(self, config: WorkerConfig) -> SavableDataset:
        return MapDataset(self.only.build(config), self.apply, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        for item in self.only.items(number, world):
            yield applied(item, partial(self._mapped, item.name), self.lost, ("map", self.salt))

    def _mapped(self, name: Any, content: Any) -> Any:
        return {"__key__": names_in(content), "of": content, "drawn": Once(("drawn", name, self.salt))}


@dataclass(frozen=True)
class Filtered(_Wrapper):
    salt: int

    def lost(self, names: Sequence[str]) -> bool:
        return not chance(4, "filter", self.salt, *names)

    def keeps(self, item: Any) -> bool:
        return not self.lost(names_in(plain(item)))

    def build(self, config: WorkerConfig) -> SavableDataset:
        return FilterDataset(self.only.build(config), filter_fn=self.keeps, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        for item in self.only.items(number, world):
            yield applied(item, lambda one: one, self.lost, ("filter", self.salt))


@dataclass(frozen=True)
class Window(_Wrapper):
    size: int

    def build(self, config: WorkerConfig) -> SavableDataset:
        return ShuffleBufferDataset(self.only.build(config), self.size, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        items = self.only.items(number, world)
        for window in count():
            some = list(islice(items, self.size))
            if not some:
                return
            inside = mix64_array(np.array([window], dtype=np.uint64) ^ mix64_array(np.array([number], dtype=np.uint64)))
            key = mix64_array(np.uint64(hash_ints(0, _SHUFFLE)) ^ inside)
            places = np.arange(len(some))
            for place in permute_array(places, np.full_like(places, len(some)), key.repeat(len(some))).tolist():
                yield some[place]


@dataclass(frozen=True)
class Concat(_Wrapper):
    @property
    def endless(self) -> bool:  # type: ignore[override]
        return self.inner[-1].endless

    def build(self, config: WorkerConfig) -> SavableDataset:
        return ConcatDataset(*(one.build(config) for one in self.inner), worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        return chain.from_iterable(one.items(number, world) for one in self.inner)


@dataclass(frozen=True)
class Mixed(_Wrapper):
    """By weight; those that end drop out."""

    weights: tuple[float, ...]

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return any(one.endless for one in self.inner)

    def pairs(self, config: WorkerConfig) -> list[tuple[SavableDataset, float]]:
        return [(one.build(config), weight) for one, weight in zip(self.inner, self.weights, strict=True)]

    def build(self, config: WorkerConfig) -> SavableDataset:
        return BlendDataset(*self.pairs(config), worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        coming = [one.items(number, world) for one in self.inner]
        following = [next(one, None) for one in coming]
        for stage in count():
            left = [place for place, one in enumerate(following) if one is not None]
            for which in _turns([self.weights[place] for place in left], stage):
                place = left[which]
                item = following[place]
                assert item is not None
                following[place] = next(coming[place], None)
                yield item
                if following[place] is None:
                    break
            else:
                return


def _turns(weights: Sequence[float], stage: int) -> Iterator[int]:
    """The number of the stream whose turn it is, without end; of none there is none."""
    if len(weights) < 2:
        yield from repeat(0) if weights else ()
        return
    blend = Blend(list(weights), hash_ints(hash_ints(0, _BLEND), stage))
    for start in count(0, 64):
        yield from blend.lookup(np.arange(start, start + 64))[0].tolist()


@dataclass(frozen=True)
class Batched(_Wrapper):
    size: int
    drop_last: bool

    @staticmethod
    def join(items: list[Any]) -> Any:
        return {"__key__": [name for item in items for name in names_in(plain(item))], "parts": items}

    def build(self, config: WorkerConfig) -> SavableDataset:
        inner = self.only.build(config)
        return BatchDataset(inner, self.size, self.join, drop_last=self.drop_last, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        items = self.only.items(number, world)
        refills = all(base.refills for base in self.bases)
        while some := list(islice(items, self.size)):
            name = ("batch", *(one.name for one in some))
            if len(some) == self.size or not self.drop_last:
                yield Item(_joined([one.content for one in some if one.content is not None], name), name, refills)


def _joined(contents: list[Any], name: Any) -> Any:
    if not contents:
        return None
    if any(isinstance(one, Once) for one in contents):
        return {"__key__": Once((name, "names")), "parts": contents}
    return {"__key__": [key for one in contents for key in names_in(one)], "parts": contents}


@dataclass(frozen=True)
class MixedBatches(Mixed):
    """A batch of items of several, mixed by weight."""

    size: int

    def build(self, config: WorkerConfig) -> SavableDataset:
        pairs = self.pairs(config)
        return MixBatchDataset(*pairs, batch_size=self.size, batch_mix_fn=Batched.join, worker_config=config)

    def items(self, number: int, world: int) -> Iterator[Item]:
        return Batched((Mixed(self.inner, self.weights),), self.size, False).items(number, world)
