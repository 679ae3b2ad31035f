"""The batches of hooks that decide how many there are, by plain loops over plain functions.

It knows one rank, no workers, no states and no jobs. It takes from a data set which samples each chunk has, and goes
through them: one sample, one pack, one batch after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from energon_lite.loading.iterators.lane_dataset import LaneDataset
from tests.core.laws.naive_hooks import Hooks

#: Chunks of the same lane between which items are handed on.
HANDED_ON = 4
#: After this number of chunks in a row without a batch there may never be one.
BARREN = 40


@dataclass
class Batch:
    """A micro-batch.

    Args:
        names: of its samples.
        counts: what became of samples on the way to it, ``"samples"`` being those in it.
    """

    names: list[str]
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Item:
    """A sample or a pack, and how many samples it stands for."""

    name: str
    samples: int = 1


class NoBatches(Exception):
    """Too many chunks in a row have none."""


class LaneRun:
    """Batches of which content decides how many there are: lane ``l`` has those at ``l``, ``l + lanes``, and so on."""

    def __init__(self, dataset: LaneDataset, hooks: Hooks, lanes: int):
        self._dataset, self._hooks, self._lanes = dataset, hooks, lanes
        self._counts = [Counter[str]() for _ in range(lanes)]  # of what no batch has told yet, by lane
        self._made: list[list[Batch]] = [[] for _ in range(lanes)]
        self._coming = [self._lane(lane) for lane in range(lanes)]

    def at(self, position: int) -> Batch | None:
        number, lane = divmod(position, self._lanes)
        while len(self._made[lane]) <= number:
            batch = next(self._coming[lane], None)
            if batch is None:
                return None
            self._made[lane].append(batch)
        return self._made[lane][number]

    def _lane(self, lane: int) -> Iterator[Batch]:
        plan, told = self._dataset.plan, self._counts[lane]
        handed_over: dict[int, tuple[list[Item], Counter[str]]] = {}
        chunk, count, barren = lane, plan.count(0), 0
        while count is None or chunk < count:
            counts = Counter[str]()  # since the last batch of this chunk
            items, before = handed_over.pop(chunk, ([], Counter()))
            counts += before
            # A pass that packs and ends is handed on to the very next chunk: only its last ones keep what they have.
            later = chunk + self._lanes * (1 if plan.pushback and count is not None else HANDED_ON)
            may_hand_over = plan.carries and (count is None or later < count)
            had = len(items)
            for bundle in self._bundles(chunk, counts, items, may_hand_over):
                for batch in self._batches(bundle, counts):
                    batch.counts += counts + told
                    counts.clear()
                    told.clear()
                    barren = had = 0
                    yield batch
            if may_hand_over and items:
                handed_over[later] = items, counts
            else:
                told += counts
            barren = 0 if len(items) > had else barren + 1
            if barren > BARREN:
                raise NoBatches
            chunk += self._lanes

    def _samples(self, chunk: int, counts: Counter[str]) -> Iterator[Item]:
        for leaf, index, _ in self._dataset.plan.addresses(chunk, 0).rows():
            name = _name(self._dataset.leaves[leaf], index)
            yield from (Item(one) for one in self._got("sample", name, 1, self._hooks.samples(name), counts))

    def _items(self, chunk: int, counts: Counter[str]) -> Iterator[Item]:
        size, buffer = self._hooks.packing, list[Item]()
        if not size:
            yield from self._samples(chunk, counts)
            return
        for sample in self._samples(chunk, counts):
            buffer.append(sample)
            if len(buffer) == size:
                yield from self._packs(buffer, counts)
                buffer = []
        yield from self._packs(buffer, counts)

    def _packs(self, buffer: list[Item], counts: Counter[str]) -> Iterator[Item]:
        packs = self._hooks.packs([sample.name for sample in buffer])
        counts["dropped"] += len(buffer) - sum(map(len, packs))
        for pack in packs:
            name, size = "+".join(pack), len(pack)
            yield from (Item(one, size) for one in self._got("pack", name, size, [name], counts))

    def _bundles(
        self, chunk: int, counts: Counter[str], items: list[Item], may_hand_over: bool
    ) -> Iterator[list[Item]]:
        """The items of each batch. Those to be handed over stay in ``items``."""
        size = self._hooks.batch_size or 1
        groups: dict[int, list[Item]] = {} if self._hooks.groups else {0: items}
        for item in self._items(chunk, counts):
            group = groups.setdefault(self._hooks.group(item.name) if self._hooks.groups else 0, [])
            group.append(item)
            if len(group) == size:
                yield group[:]
                group.clear()
        if may_hand_over:
            return
        for group in groups.values():
            if group and self._dataset.plan.keep_remainder:
                yield group[:]
            elif group:
                counts["dropped"] += sum(item.samples for item in group)
            group.clear()

    def _batches(self, bundle: list[Item], counts: Counter[str]) -> Iterator[Batch]:
        names, samples = [item.name for item in bundle], sum(item.samples for item in bundle)
        if self._hooks.batch_size is None:
            yield Batch(names, Counter(samples=samples))
            return
        made = self._got("batch", " ".join(names), samples, self._hooks.batches(names), counts)
        for number, cut in enumerate(made):
            yield Batch(cut, Counter(samples=0 if number else samples))

    def _got(self, stage: str, name: str, samples: int, results: list[Any], counts: Counter[str]) -> list[Any]:
        """The results of a hook, unless it is lost, or there are none; which is counted."""
        fate = self._hooks.fate(stage, name)
        if fate or not results:
            counts[fate or "dropped"] += samples
            return []
        return results


def _name(leaf: Any, index: int) -> str:
    """The text of a sample, which is its key."""
    return str(leaf.source.key(index))
