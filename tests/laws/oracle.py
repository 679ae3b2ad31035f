"""A plain oracle for the law tests: what a run has to deliver, by plain loops over plain functions.

It knows one rank, no workers, no states and no jobs. It takes from a data set which addresses there are, in which
order, and how chunks are assigned to lanes, and goes through them: one sample, one pack, one batch after the other.

To extend it by another kind of batches, write a :class:`Run` for it.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from energon_lite import SkipSample, TaskEncoder
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset

#: Chunks of the same lane between which items are handed on.
HANDED_ON = 4
#: So many chunks in a row without a batch: there may never be one.
BARREN = 40


def chance(of: int, *what: object) -> int:
    """A number below ``of`` that looks random, and depends on ``what`` only."""
    return zlib.crc32(":".join(map(str, what)).encode()) % of


# -- the hooks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hooks:
    """Hooks as plain functions of names.

    Args:
        salt: another number, other choices.
        losses: in each hook, one of so many is skipped or fails; 0: none.
        yields: a sample yields 0 to 3 results.
        packing: samples of a buffer; None: no packs.
        groups: so many groups, with a ``batch_size``; 0: none.
        batch_yields: a batch is cut into 0 to 3.
        batch_size: None: no batches.
    """

    salt: int = 0
    losses: int = 0
    yields: bool = False
    packing: int | None = None
    groups: int = 0
    batch_yields: bool = False
    batch_size: int | None = 3

    @property
    def decide(self) -> bool:
        """Whether content decides how many batches there are."""
        return bool(self.yields or self.packing or self.groups or (self.batch_size and self.batch_yields))

    def fate(self, stage: str, name: str) -> str | None:
        """What becomes of something that does not get through. Batches that are planned all do."""
        if self.losses and (stage != "batch" or self.decide) and not chance(self.losses, self.salt, stage, name):
            return ("skipped", "failed")[chance(2, stage, name)]
        return None

    def samples(self, name: str) -> list[str]:
        if not self.yields:
            return [name]
        return [f"{name}.{part}" for part in range(chance(4, self.salt, "parts", name))]

    def packs(self, names: list[str]) -> list[list[str]]:
        """Packs of one to three, every second sample first; one of ten is left out."""
        packs: list[list[str]] = [[]]
        for name in names[::2] + names[1::2]:
            if chance(10, self.salt, "select", name):
                packs[-1].append(name)
                if len(packs[-1]) > chance(3, self.salt, "pack", name):
                    packs.append([])
        return [pack for pack in packs if pack]

    def group(self, name: str) -> int:
        return chance(self.groups, self.salt, "group", name)

    def batches(self, names: list[str]) -> list[list[str]]:
        if not self.batch_yields:
            return [names]
        parts = chance(4, self.salt, "batches", *names)
        return [names[part::parts] for part in range(parts) if names[part::parts]]


def encoder_of(hooks: Hooks) -> TaskEncoder:
    """The same hooks for the library."""

    def checked(stage: str, name: str) -> None:
        match hooks.fate(stage, name):
            case "skipped":
                raise SkipSample(stage)
            case "failed":
                raise ValueError(stage)

    def made(name: str, sample: Any = None) -> dict[str, Any]:
        return {"__key__": name, "__restore_key__": () if sample is None else sample.__restore_key__}

    def one(self: Any, sample: Any) -> Any:
        checked("sample", sample.text)
        return made(sample.text, sample)

    def several(self: Any, sample: Any) -> Any:
        checked("sample", sample.text)
        yield from (made(name, sample) for name in hooks.samples(sample.text))

    def select(self: Any, samples: list[Any]) -> list[list[Any]]:
        by_name: dict[str, list[Any]] = {}  # a buffer may have a sample of two epochs
        for sample in samples:
            by_name.setdefault(sample["__key__"], []).append(sample)
        return [[by_name[name].pop() for name in pack] for pack in hooks.packs([one["__key__"] for one in samples])]

    def pack(self: Any, samples: list[Any]) -> Any:
        name = "+".join(sample["__key__"] for sample in samples)
        checked("pack", name)
        return made(name)

    def criterion(self: Any, sample: Any) -> Any:
        return hooks.group(sample["__key__"]), None

    def batch(self: Any, samples: list[Any]) -> Any:
        names = [sample["__key__"] for sample in samples]
        checked("batch", " ".join(names))
        return {"__key__": names, "__restore_key__": (), "size": 3 * len(names)}

    def cut(self: Any, samples: list[Any]) -> Any:
        whole = batch(self, samples)
        for names in hooks.batches(whole["__key__"]):
            yield whole | {"__key__": names}

    used: dict[str, Any] = {"failure_tolerance": 0, "batch": cut if hooks.batch_yields else batch}
    used["encode_sample"] = several if hooks.yields else one
    if hooks.packing:
        used |= {"select_samples_to_pack": select, "pack_selected_samples": pack}
    if hooks.groups:
        used["batch_group_criterion"] = criterion
    cls: type[TaskEncoder] = type("OracleEncoder", (TaskEncoder,), used)
    return cls()


# -- what is expected -------------------------------------------------------------------------------------------------


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


class Run(Protocol):
    """One pass of a run."""

    def at(self, position: int) -> Batch | None:
        """The micro-batch at a position of the global sequence, if there is one."""

    def is_over(self, position: int) -> bool:
        """Whether none comes from a position on."""

    def left_over(self) -> Counter[str]:
        """What became of samples behind the last batches; at the end of the pass."""


class PlannedRun:
    """Batches that are planned: at each position there is one, until the plan ends."""

    def __init__(self, dataset: PlannedDataset, hooks: Hooks):
        self._plan, self._leaves, self._hooks = dataset.plan, dataset.leaves, hooks

    def at(self, position: int) -> Batch | None:
        if self.is_over(position):
            return None
        (addresses,) = self._plan.batches([(position,)])
        found = Batch([])
        for leaf, index, _ in addresses:
            name = _name(self._leaves[leaf], index)
            fate = self._hooks.fate("sample", name)
            found.counts[fate or "samples"] += 1
            found.names += [] if fate else [name]
        return found

    def is_over(self, position: int) -> bool:
        count = self._plan.count(0)
        return count is not None and position >= count

    def left_over(self) -> Counter[str]:
        return Counter()


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

    def is_over(self, position: int) -> bool:
        number = position // self._lanes
        return all(
            self.at(at * self._lanes + lane) is None for lane in range(self._lanes) for at in (number, number + 1)
        )

    def left_over(self) -> Counter[str]:
        for lane in self._coming:
            deque(lane, maxlen=0)  # to its end, where it is known
        return sum(self._counts, Counter())

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
        """What goes into a batch together. What is to be handed over stays in ``items``."""
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
        """What a hook gives: these results, unless it is lost, or there are none; which is counted."""
        fate = self._hooks.fate(stage, name)
        if fate or not results:
            counts[fate or "dropped"] += samples
            return []
        return results


def _name(leaf: Any, index: int) -> str:
    """The text of a sample, which is its key."""
    return str(leaf.source.key(index))


@dataclass
class Walker:
    """Goes through a run in steps, on any number of ranks.

    Args:
        run: see above.
        limit: positions of the pass at most; None: all.
        drop_last: a step in which a rank would have nothing does not exist.
    """

    run: Run
    limit: int | None = None
    drop_last: bool = False
    position: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def step(self, world: int) -> list[Batch | None] | None:
        """What each rank gets in the next step; None: the pass is over."""
        while not self._is_over(self.position):
            places = range(self.position, self.position + world)
            found = [None if self._is_beyond(place) else self.run.at(place) for place in places]
            if self.drop_last and None in found and found != [None] * world:
                return None
            if found != [None] * world:
                self.position += world
                for batch in found:
                    self.counts += batch.counts if batch is not None else Counter()
                return found
            self.position += world
        return None

    def _is_beyond(self, position: int) -> bool:
        return self.limit is not None and position >= self.limit

    def _is_over(self, position: int) -> bool:
        return self._is_beyond(position) or self.run.is_over(position)
