"""The steps of a run as plain code has them: which item each rank gets, and where a loop ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.core.laws.naive_items import Item, Tape
from tests.core.laws.naive_wrappers import Epochize, Limit, Node, Repeat
from tests.core.laws.pipelines import Base

#: In place of a step: the loop was over.
END = "end"


class Refused(Exception):
    """The library says that it does not do this."""


class Starved(Exception):
    """Hooks lose too much, on one rank without workers already; or a pass has no step."""


@dataclass(frozen=True)
class Part:
    """A part of a run: steps on these ranks and workers; and ``again``, restored to the first of them."""

    world: int
    workers: int
    method: str
    steps: int
    again: bool = False


Step = list[Item | None]


class Walker(Protocol):
    """Goes through a data set in steps, on any number of ranks."""

    def begin(self, world: int) -> None:
        """These are the ranks from here on."""

    def step(self, world: int) -> Step | None:
        """The item of each rank in the next step; None: the loop is over."""

    def next_loop(self, world: int) -> None:
        """The next loop begins."""


class ItemWalker:
    """Through items that have numbers, or positions: each step has the next ones."""

    def __init__(self, node: Node, world: int):
        self.limit: int | None = None
        self.loop, self.drop_last = 0, False
        self._tapes: dict[int, Tape] = {}
        self._items: Callable[[int], Any] = lambda number: node.items(number, world)
        if isinstance(node, Base):
            self.limit, self.loop, self.drop_last = node.limit, node.loop, node.drop_last
        elif isinstance(node, Limit):
            self.limit = node.length
            self._items = lambda number: node.only.items(0, world)
        elif isinstance(node, Epochize):
            self.loop = node.length
            self._items = lambda number: node.only.flow(world)
        self._base = node if isinstance(node, Base) else None
        self.number = self.position = self._loop_start = 0
        self.taken, self._world = 0, 0  # since the pass began, and the ranks on which it did

    @property
    def _tape(self) -> Tape:
        if self._base is not None:
            return self._base.reference.tape(self.number)
        if self.number not in self._tapes:
            self._tapes[self.number] = Tape(self._items(self.number))
        return self._tapes[self.number]

    def begin(self, world: int) -> None:
        return

    def step(self, world: int) -> Step | None:
        if self.loop and self.position - self._loop_start >= self.loop * world:
            return None
        tape, left = self._tape, world if self.limit is None else self.limit * (self._world or world) - self.taken
        while left > 0 and tape.reaches(self.position):
            found = [tape.at(self.position + rank) if rank < left else None for rank in range(world)]
            if self.drop_last and None in found and any(found):
                return None
            self.position += world
            if any(found):
                self.taken, self._world = self.taken + world, self._world or world
                return found
        return None

    def next_loop(self, world: int) -> None:
        if self.loop:
            self._loop_start = self.position
        else:
            self.number, self.position, self.taken, self._world = self.number + 1, 0, 0, 0


class LoopWalker:
    """Through the loops of a data set whose number of items is not known, made into other loops."""

    def __init__(self, node: Limit | Repeat | Epochize, world: int):
        self._node, self._inner = node, walker_of(node.only, world)
        self._taken, self._left = 0, node.length * world if isinstance(node, Limit) else 0

    def begin(self, world: int) -> None:
        if self._left % world:
            raise Refused(f"{self._left} micro-batches are left of a limit, for {world} ranks")

    def step(self, world: int) -> Step | None:
        if isinstance(self._node, Epochize) and self._taken >= self._node.length * world:
            return None
        if isinstance(self._node, Limit):
            found = self._next(world) if self._left else None
            self._left -= 0 if found is None else world
            return found
        while (found := self._next(world)) is None:
            if isinstance(self._node, Repeat):
                self._taken += 1
                if self._taken == self._node.repeats:
                    return None
            self._inner.next_loop(world)
        if isinstance(self._node, Epochize):
            self._taken += world
        return found

    def _next(self, world: int) -> Step | None:
        found = self._inner.step(world)
        if found is None and isinstance(self._inner, ItemWalker) and not self._inner.taken:
            raise Starved("a pass has no step")
        return found

    def next_loop(self, world: int) -> None:
        self._taken = 0
        if isinstance(self._node, Limit):  # each loop is the first one
            self._inner, self._left = walker_of(self._node.only, world), self._node.length * world
        elif isinstance(self._node, Repeat):
            self._inner.next_loop(world)


def walker_of(node: Node, world: int) -> Walker:
    if isinstance(node, (Limit, Repeat, Epochize)) and any(base.decides for base in node.bases):
        return LoopWalker(node, world)
    return ItemWalker(node, world)


Events = list[Any]


def expected_of(walker: Walker, part: Part) -> Events:
    """The steps of a part, and the ends of loops among them."""
    events, is_first = Events(), True
    walker.begin(part.world)
    while is_wanted(events, part.steps):
        step = walker.step(part.world)
        if step is not None:
            events.append(step)
        else:
            if not is_first:  # where a part begins at the end of a loop, the next one is gone through at once
                events.append(END)
            if events[-2:] == [END, END]:
                raise Starved("a pass has no step")
            walker.next_loop(part.world)
        is_first = False
    return events


def is_wanted(events: Events, steps: int) -> bool:
    """True if more is to be asked for: not after all steps, nor after a loop that has none."""
    return events[-2:] != [END, END] and sum(event is not END for event in events) < steps
