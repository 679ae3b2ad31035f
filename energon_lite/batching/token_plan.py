"""Plan by tokens: the micro-batches of a run, planned chunk by chunk, each chunk a function of its number."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.digests import AddressList, UInt64, address_hashes, set_digest
from energon_lite.batching.epochs import Stretches, plan_epochs
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.plan import Counts, Place, Plan
from energon_lite.batching.steps import TOKENS, CostColumns, Lengths, StepBalancer, even_step, rank_slot, whole_steps
from energon_lite.batching.strategy import CHUNK, Strategy, describe, packing_capacity
from energon_lite.errors import UsageError, at_least_one
from energon_lite.order.hashing import HashDomain, hash_ints
from energon_lite.order.orders import Addresses, Order

T = TypeVar("T")

#: Most cached plans: the one from which batches are delivered, and those whose jobs are already submitted.
_KEPT = 4


class PlansAhead(Generic[T]):
    """Thread-safe cache of plans, which are made one at a time.

    Args:
        make: function that makes a plan from its numbers, such as pass and chunk.
    """

    def __init__(self, make: Callable[..., T]):
        self._make = make
        self._made: dict[tuple[int, ...], T] = {}
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None

    def get(self, *numbers: int) -> T:
        """Return a plan; make it first, or wait for it, if necessary."""
        # Reads need no lock, and must not wait while another plan is made.
        plan = self._made.get(numbers)
        if plan is not None:
            return plan
        with self._making:
            plan = self._made.get(numbers)
            if plan is None:
                plan = self._make(*numbers)
                self._made[numbers] = plan
                while len(self._made) > _KEPT:
                    self._made.pop(next(iter(self._made)))
        return plan

    def prepare(self, *numbers: int) -> None:
        """Start to make a plan in the background, unless one is being made already."""
        if numbers in self._made or (self._thread is not None and self._thread.is_alive()):
            return
        # One thread for each plan: between plans, a process that forks workers has no such thread.
        self._thread = threading.Thread(target=self._make_quietly, args=numbers, daemon=True)
        self._thread.start()

    def _make_quietly(self, *numbers: int) -> None:
        # An error is suppressed here; it occurs again when the plan is requested.
        with contextlib.suppress(Exception):
            self.get(*numbers)


#: A sample, or a part of it: ``(leaf, index, epoch, first token, tokens, 1 for a part or 0 for a whole sample)``.
Span = tuple[int, ...]

#: Tag of the hashes for plans, which keeps them apart from hashes for other purposes.
_PLAN = HashDomain.PLAN.value
#: Consecutive chunks of an endless stream without any micro-batch, after which planning fails.
_PATIENCE = 16


@dataclass(frozen=True)
class PlannedChunk:
    """The micro-batches of one plan chunk.

    Args:
        batches: micro-batches of samples ``0 .. len(lengths) - 1`` of the chunk.
        addresses: addresses of these samples.
        lengths: lengths of these samples, as planned.
        capacity: capacity of packed micro-batches that are balanced; None: no samples are swapped between them.
        stretches: the stretches of these samples that are kept apart.
        balancer: balancer by the costs of these samples; None: steps are balanced in tokens and attention.
    """

    batches: MicroBatches
    addresses: Addresses
    lengths: Ints
    capacity: Capacity | None
    stretches: Stretches
    balancer: StepBalancer | None

    def __len__(self) -> int:
        return len(self.batches)

    def step_spans(self, first: int, count: int) -> list[list[Span]]:
        """Samples of each of ``count`` micro-batches from ``first`` on, which form a step, after balancing."""
        step = self.batches.select(np.arange(first, first + count))
        if self.balancer is None:
            even = even_step(step, self.capacity, self.stretches.sample)
        else:
            even = self.balancer.even(step, self.capacity, self.stretches.sample)
        return [self.spans(number, even) for number in range(count)]

    def spans(self, number: int, step: MicroBatches | None = None) -> list[Span]:
        """Samples, or parts of samples, of micro-batch ``number`` of the chunk, or of a balanced step of it."""
        batches = self.batches if step is None else step
        first, last = batches.offsets[number : number + 2]
        sample, start, length = (column[first:last] for column in (batches.sample, batches.start, batches.length))
        columns = [column[sample] for column in self.addresses.columns()]
        is_cut = length != self.lengths[sample]
        rows = (column.tolist() for column in (*columns, start, length, is_cut.astype(np.int64)))
        spans = list(zip(*rows, strict=True))
        digest = set_digest(spans) if is_cut.any() else int(self.hashes[sample].sum())
        return AddressList(spans, digest)

    @cached_property
    def hashes(self) -> UInt64:
        """Hash of each sample's address, ``[samples]``."""
        return address_hashes(*self.addresses.columns())


@dataclass(frozen=True)
class TokenPlan(Plan):
    """Plan that cuts an order into chunks of positions, and each of them into micro-batches.

    An epoch that ends inside a chunk ends between micro-batches (:func:`~energon_lite.batching.epochs.plan_epochs`).

    The micro-batches of a pass are those of chunk 0, then those of chunk 1, and so on. The sequence is the same on
    every rank, and a place in it is ``(chunk, micro-batch in the chunk)``.

    With ``step``, each chunk has whole steps: the samples of its last step are divided among a full number of
    micro-batches.

    Args:
        order: the order of the samples.
        strategy: the strategy that groups samples.
        lengths: tokens of each leaf's samples.
        key_lengths: tokens of the key field, for strategies that need them.
        seed: 64 bits.
        chunk: positions that are planned together.
        step: micro-batches in a step; None: unknown, so steps are not balanced.
        costs: cost model, and columns of each leaf's samples; all costs are balanced if there is a step. None: tokens
            and attention.

    Example:
        >>> plan = TokenPlan(ConcatOrder([4]), Fixed(2), [np.array([5, 6, 7, 8])], seed=0)
        >>> plan.count(0), plan.make(0, 0).spans(1)
        (1, [(0, 2, 0, 0, 7, 0), (0, 3, 0, 0, 8, 0)])
    """

    order: Order
    strategy: Strategy
    lengths: Sequence[Lengths]
    key_lengths: Sequence[Lengths] | None = None
    seed: int = 0
    chunk: int = CHUNK
    step: int | None = None
    costs: CostColumns | None = None

    def __post_init__(self) -> None:
        at_least_one("give at least 1 sample", plan_chunk=self.chunk)
        at_least_one("give at least 1, or None", micro_batches_per_step=self.step)

    start: ClassVar[Place] = (0, 0)

    @cached_property
    def chunks(self) -> PlansAhead[PlannedChunk]:
        """The chunks that are in use, by pass and number."""
        return PlansAhead(self.make)

    @cached_property
    def steps(self) -> PlansAhead[list[list[Span]]]:
        """Micro-batches of balanced steps, by pass, chunk, and number of the step in the chunk."""
        return PlansAhead(self._make_step)

    def _make_step(self, pass_number: int, chunk: int, number: int) -> list[list[Span]]:
        size = self.step or 1
        return self.chunks.get(pass_number, chunk).step_spans(number * size, size)

    def has(self, pass_number: int, place: Place) -> bool:
        if len(place) != 2 or not self.reaches(pass_number, place[0]):
            return False
        count, (chunk, batch) = self.count(pass_number), place
        if count is not None and chunk >= count:
            return place == (count, 0)
        return batch == 0 or batch < len(self.chunks.get(pass_number, chunk))

    def ahead(self, pass_number: int, place: Place, batches: int) -> tuple[Place, int]:
        """See :class:`~energon_lite.batching.plan.Plan`. The chunks in between are planned.

        Raises:
            UsageError: several consecutive chunks have no micro-batch, because all their samples are dropped.
        """
        count = self.count(pass_number)
        chunk = place[0]
        batch = place[1] + batches
        empty = 0
        while batch < 0 < chunk:
            chunk -= 1
            batch += len(self.chunks.get(pass_number, chunk))
        if batch < 0:
            return self.start, batches - batch
        while count is None or chunk < count:
            size = len(self.chunks.get(pass_number, chunk))
            if batch < size:
                return (chunk, batch), batches
            chunk = chunk + 1
            batch = batch - size
            empty = 0 if size else empty + 1
            if empty >= _PATIENCE:
                raise UsageError(
                    f"the strategy drops {empty * self.chunk} samples in a row, such as those above its capacity",
                    fix="raise the capacity, choose another `oversize`, or see what the strategy's `plan` returns",
                )
        return (chunk, 0), batches - batch

    def batches(self, places: Sequence[Place], pass_number: int = 0) -> list[Sequence[Span]]:
        return [self._batch(pass_number, *place) for place in places]

    def _batch(self, pass_number: int, chunk: int, batch: int) -> list[Span]:
        if chunk == self.count(pass_number):
            return []
        planned = self.chunks.get(pass_number, chunk)
        if self.step is None:
            return planned.spans(batch)
        number, inside = divmod(batch, self.step)
        spans = self.steps.get(pass_number, chunk, number)[inside]
        if (number + 1) * self.step < len(planned):
            self.steps.prepare(pass_number, chunk, number + 1)
        return spans

    def batches_in(self, pass_number: int, chunks: int) -> int:
        return sum(len(self.chunks.get(pass_number, chunk)) for chunk in range(chunks))

    def rank_slot(self, place: Place, rank: int, world_size: int) -> int:
        if self.step is None or self.costs is not None:  # steps balanced by costs are in the order of ranks
            return rank
        return rank_slot(rank, world_size, place[1] % self.step // world_size)

    def left_out(self, pass_number: int, first: int, stop: int) -> Counts:
        """Counts of samples omitted from chunks ``first`` to ``stop - 1``.

        The call also says that these chunks are now in use: the following ones are planned soon.
        """
        count = self.count(pass_number)
        counts = sum((self.chunks.get(pass_number, number).batches.counts for number in range(first, stop)), Counts())
        if count is None or stop < count:
            self.chunks.prepare(pass_number, stop)
        return counts

    def undelivered(self, pass_number: int, place: Place) -> int:
        batches = self.chunks.get(pass_number, place[0]).batches
        return len(np.unique(batches.sample[batches.offsets[place[1]] :]))

    def describe(self) -> str:
        steps = "" if self.step is None else f", steps of {self.step} micro-batches"
        steps += "" if self.costs is None or self.step is None else ", even in all costs"
        return f"batches by {describe(self.strategy)}{steps}"

    def make(self, pass_number: int, number: int) -> PlannedChunk:
        """Plan chunk ``number`` of a pass.

        Raises:
            UsageError: a sample does not fit, and the strategy treats that as an error.
        """
        first, last = self.positions(pass_number, number)
        addresses = self.order.lookup(np.arange(first, last, dtype=np.int64))
        lengths = _lengths_at(addresses, self.lengths)
        batches, stretches = plan_epochs(
            self.strategy,
            lengths,
            (addresses.leaf, addresses.index, self.order.cycles(addresses)),
            ends=[end - first for end in self.order.epoch_ends(first, last)],
            seed=hash_ints(self.seed, _PLAN, pass_number, number),
            key_lengths=None if self.key_lengths is None else _lengths_at(addresses, self.key_lengths),
        )
        balancer = None
        if self.costs is not None:
            sizes = {TOKENS: lengths}
            for name in self.costs.leaves[0]:
                sizes[name] = _lengths_at(addresses, [columns[name] for columns in self.costs.leaves], name)
            balancer = self.costs.model.balancer(sizes, self.costs.max_images)
        capacity = packing_capacity(self.strategy)
        if balancer is not None and capacity is not None:
            batches = balancer.within_limits(batches, capacity, stretches.edges)
        if self.step is not None:
            batches = whole_steps(batches, self.step, capacity, stretches.sample, balancer)
        return PlannedChunk(batches, addresses, lengths, capacity, stretches, balancer)


def _lengths_at(addresses: Addresses, lengths: Sequence[Lengths], name: str = "") -> Ints:
    """Lengths of the samples at the addresses, or values of another column of that name, ``[k]``."""
    values_at = np.empty(len(addresses.leaf), dtype=np.int64)
    by_leaf = np.argsort(addresses.leaf, kind="stable")
    edges = np.searchsorted(addresses.leaf[by_leaf], np.arange(len(lengths) + 1))
    for leaf, values in enumerate(lengths):
        here = by_leaf[edges[leaf] : edges[leaf + 1]]
        if len(here):
            values_at[here] = checked_lengths(values[addresses.index[here]], name or f"the lengths of data set {leaf}")
    return values_at
