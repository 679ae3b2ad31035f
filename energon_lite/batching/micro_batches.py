"""Micro-batches as the result of planning: three flat arrays and their boundaries; and samples that none can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.plan import Counts
from energon_lite.errors import UsageError
from energon_lite.order.hashing import HashDomain, hash_ints, mix64_array

Oversize = Literal["error", "drop", "truncate", "split", "own_batch"]
POLICIES: tuple[Oversize, ...] = get_args(Oversize)
#: The choices, for messages. The name of the option is the same in Python, in YAML and on the command line.
_CHOICES = (
    'oversize="drop" (leave them out), "truncate" (keep their first tokens), "split" (cut them into pieces that '
    'fit, each of which is trained on) or "own_batch" (leave them whole, in a micro-batch above the capacity)'
)


@dataclass(frozen=True)
class Pieces:
    """The samples after treatment of oversized ones, in stream order.

    Args:
        sample: index of the sample that each piece belongs to, ``[pieces]``.
        start: first token of the piece within the sample, ``[pieces]``.
        length: tokens of the piece, ``[pieces]``.
        counts: numbers of oversized samples, by their treatment.
    """

    sample: Ints
    start: Ints
    length: Ints
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, lengths: Ints) -> Pieces:
        """Build one piece for each sample, uncut."""
        return cls(np.arange(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64), lengths)


def cut_to_fit(lengths: Ints, capacity: Capacity, policy: Oversize) -> Pieces:
    """Treat oversized samples, so that each piece fits into the capacity.

    Args:
        lengths: tokens of each sample, ``[samples]``.
        capacity: what a micro-batch may hold.
        policy: treatment of a longer sample: ``error``, ``drop`` it, ``truncate`` its end, ``split`` it into full
            pieces and a rest, or ``own_batch``: leave it whole, for a micro-batch of its own that exceeds the capacity.

    Raises:
        UsageError: a sample is too long and the policy is ``error``; or the policy is unknown.

    Example:
        >>> pieces = cut_to_fit(np.array([3, 25]), Capacity(10), "split")
        >>> pieces.sample.tolist(), pieces.start.tolist(), pieces.length.tolist()
        ([0, 1, 1, 1], [0, 0, 10, 20], [3, 10, 10, 5])
    """
    if policy not in POLICIES:
        raise UsageError(f"there is no rule {policy!r} for samples that are too long", fix=f"use one of {POLICIES}")
    whole = Pieces.of(lengths)
    too_long = capacity.sizes(lengths) > capacity.limit
    oversized = int(too_long.sum())
    if not oversized:
        return whole
    limit = capacity.largest_length()
    if policy == "error":
        first = int(np.argmax(too_long))
        raise UsageError(
            f"{oversized} of {len(lengths)} samples are longer than the {limit} tokens that fit into {capacity.limit} "
            f"{capacity.unit}; the first of them in the plan has {int(lengths[first])} tokens",
            fix=f"raise the capacity, or say in the strategy what to do with them: {_CHOICES}",
        )
    if policy == "own_batch":
        return replace(whole, counts=Counts(own_batches=oversized))
    if policy == "drop":
        kept = ~too_long
        counts = Counts(dropped_samples=oversized, dropped_tokens=int(lengths[too_long].sum()))
        return Pieces(whole.sample[kept], whole.start[kept], lengths[kept], counts)
    if policy == "truncate":
        counts = Counts(truncated_samples=oversized, truncated_tokens=int((lengths[too_long] - limit).sum()))
        return replace(whole, length=np.where(too_long, limit, lengths), counts=counts)
    return _split(lengths, too_long, limit)


def _split(lengths: Ints, too_long: np.ndarray, limit: int) -> Pieces:
    parts = np.where(too_long, -(-lengths // limit), 1)
    sample = np.repeat(np.arange(len(lengths), dtype=np.int64), parts)
    first = np.cumsum(parts) - parts
    start = (np.arange(len(sample), dtype=np.int64) - first[sample]) * limit
    # Pieces of whole samples are as long as the sample, even above `limit` in odd cost functions.
    length = np.where(too_long[sample], np.minimum(limit, lengths[sample] - start), lengths[sample])
    return Pieces(sample, start, length, Counts(split_samples=int(too_long.sum())))


#: DynamiCat's orders, with its names. ``bs``: samples in a micro-batch; ``pc``: tokens in it, padding included.
PlanOrder = Literal["none", "random", "bs_asc", "bs_desc", "pc_asc", "pc_desc"]
PLAN_ORDERS: tuple[PlanOrder, ...] = get_args(PlanOrder)
_ORDER_TAG = HashDomain.SHUFFLED_BATCHES.value


@dataclass(frozen=True)
class MicroBatches:
    """Assignment of samples, or pieces of samples, to micro-batches.

    Micro-batch ``m`` has the entries ``offsets[m]:offsets[m + 1]`` of the other arrays.

    Args:
        sample: index of the sample in the lengths that were planned, ``[entries]``.
        start: first token of the sample that is used, ``[entries]``; above 0 only for pieces of a split sample.
        length: number of its tokens that are used, ``[entries]``.
        offsets: boundaries of the micro-batches, ``[micro-batches + 1]``.
        packed: True: the entries of a micro-batch are concatenated into one row; False: they are padded rows.
        limit: the limit of the capacity, None if there is none.
        lateness_bound: upper bound on the number of places by which an entry comes after its place in the stream.
        counts: numbers of dropped, truncated and split samples.

    Example:
        >>> batches = BestFit(Capacity(10)).plan(np.array([6, 7, 4, 3]), seed=0)
        >>> [part.tolist() for part in batches]
        [[0, 2], [1, 3]]
    """

    sample: Ints
    start: Ints
    length: Ints
    offsets: Ints
    packed: bool
    limit: int | None = None
    lateness_bound: int = 0
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, groups: Sequence[Sequence[int] | Ints], lengths: Ints, *, packed: bool) -> MicroBatches:
        """Build micro-batches of whole samples; samples that are in none are counted as dropped.

        Args:
            groups: the indices of each micro-batch's samples; no group is empty, and no sample is in two.
            lengths: tokens of each sample, ``[samples]``.
            packed: see :class:`MicroBatches`.

        Raises:
            UsageError: a sample is in two micro-batches or in none of the plan, or a micro-batch is empty.

        Example:
            >>> MicroBatches.of([[2, 0], [1]], np.array([5, 7, 1]), packed=True).tokens()
            array([6, 7])
        """
        sizes = [len(group) for group in groups]
        sample = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(group, np.int64) for group in groups)])
        if 0 in sizes or len(np.unique(sample)) < len(sample):
            raise UsageError("a micro-batch is empty, or a sample is in two", fix="put each sample into only one")
        if len(sample) and not 0 <= sample.min() <= sample.max() < len(lengths):
            raise UsageError(
                f"a micro-batch has a sample that is not one of the {len(lengths)} of the plan",
                fix=f"give indices from 0 to {len(lengths) - 1}",
            )
        left_out = np.delete(lengths, sample)
        return cls(
            sample,
            np.zeros_like(sample),
            lengths[sample],
            np.cumsum([0, *sizes]),
            packed,
            lateness_bound=len(lengths),
            counts=Counts(dropped_samples=len(left_out), dropped_tokens=int(left_out.sum())),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ints:
        """Indices of the samples of micro-batch ``number``, ``[rows]``."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"micro-batch {number} of {len(self)}")
        number %= len(self)
        return self.sample[self.offsets[number] : self.offsets[number + 1]]

    def rows(self) -> Ints:
        """Entries in each micro-batch, ``[micro-batches]``."""
        return np.diff(self.offsets)

    def tokens(self) -> Ints:
        """Tokens in each micro-batch, without padding, ``[micro-batches]``."""
        return np.diff(np.concatenate([[0], np.cumsum(self.length)])[self.offsets])

    def longest(self) -> Ints:
        """Length of the longest entry of each micro-batch, ``[micro-batches]``; 0 for an empty one."""
        longest = np.zeros(len(self), dtype=np.int64)
        filled = np.flatnonzero(self.rows())
        if len(filled):
            longest[filled] = np.maximum.reduceat(self.length, self.offsets[filled])
        return longest

    def attention(self) -> Ints:
        """Attention cost: sum of squared lengths in each micro-batch, ``[micro-batches]``.

        Samples do not attend to each other. Rows of padded micro-batches count in full.
        """
        if not self.packed:
            return self.rows() * self.longest() ** 2
        return np.diff(np.concatenate([[0], np.cumsum(self.length * self.length)])[self.offsets])

    def space(self) -> Ints:
        """Size of each micro-batch in tokens, padding included, ``[micro-batches]``."""
        return self.tokens() if self.packed else self.rows() * self.longest()

    def digest(self) -> str:
        """SHA-256 of the whole plan, in hexadecimal: equal plans have equal digests on all ranks and machines."""
        state = hashlib.sha256(b"packed" if self.packed else b"padded")
        for column in (self.sample, self.start, self.length, self.offsets):
            state.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return state.hexdigest()

    def select(self, numbers: Ints) -> MicroBatches:
        """Return the micro-batches ``numbers``, in this order, with the same settings and counts."""
        rows = self.rows()[numbers]
        before = np.cumsum(rows) - rows
        return self.regrouped(np.repeat(self.offsets[:-1][numbers] - before, rows) + np.arange(rows.sum()), rows)

    def regrouped(self, entries: Ints, rows: Ints | Sequence[int], *, later: int = 0) -> MicroBatches:
        """Return the same samples in other micro-batches, with the same settings and counts.

        Args:
            entries: indices of entries, micro-batch by micro-batch.
            rows: number of entries of each micro-batch.
            later: largest number of places by which an entry may be delayed; added to the lateness bound.
        """
        return replace(
            self,
            sample=self.sample[entries],
            start=self.start[entries],
            length=self.length[entries],
            offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
            lateness_bound=self.lateness_bound + later,
        )


def arrange(
    pieces: Pieces,
    entries: Ints | Sequence[int],
    offsets: Ints | Sequence[int],
    capacity: Capacity | None,
    lateness_bound: int,
    *,
    order: PlanOrder = "none",
    seed: int = 0,
    groups: Ints | None = None,
) -> MicroBatches:
    """Build micro-batches from pieces, in a plan order.

    Args:
        pieces: the samples after treatment of oversized ones.
        entries: indices of pieces, micro-batch by micro-batch, ``[pieces]``.
        offsets: first index of each micro-batch in ``entries``, ``[micro-batches + 1]``.
        capacity: capacity of a micro-batch, which also says if it is packed; None: padded rows without a limit.
        lateness_bound: see :class:`MicroBatches`; the order must not break it.
        order: order of the micro-batches inside each group.
        seed: for the order ``random``.
        groups: ascending group numbers ``[micro-batches]``; None: one group.
    """
    entries = np.asarray(entries, dtype=np.int64)
    batches = MicroBatches(
        pieces.sample[entries],
        pieces.start[entries],
        pieces.length[entries],
        np.asarray(offsets, dtype=np.int64),
        capacity is not None and capacity.adds_up,
        None if capacity is None else capacity.limit,
        lateness_bound,
        pieces.counts,
    )
    if order == "none" or len(batches) < 2:
        return batches
    key = _order_key(batches, order, seed)
    return batches.select(np.argsort(key, kind="stable") if groups is None else np.lexsort((key, groups)))


def _order_key(batches: MicroBatches, order: PlanOrder, seed: int) -> np.ndarray:
    if order == "random":
        return mix64_array(np.arange(len(batches), dtype=np.uint64) ^ np.uint64(hash_ints(seed, _ORDER_TAG)))
    if order not in PLAN_ORDERS:
        raise UsageError(f"there is no plan order {order!r}", fix=f"use one of {', '.join(PLAN_ORDERS)}")
    key = batches.rows() if order.startswith("bs") else batches.rows() * batches.longest()
    return -key if order.endswith("desc") else key


def concatenate(parts: Sequence[MicroBatches], firsts: Sequence[int]) -> MicroBatches:
    """Concatenate the plans of consecutive chunks into one.

    Args:
        parts: the plans, at least one.
        firsts: the number of each chunk's first sample, which is added to its sample indices.
    """
    edges = np.cumsum([0, *(len(part.sample) for part in parts)])
    return replace(
        parts[0],
        sample=np.concatenate([part.sample + first for part, first in zip(parts, firsts, strict=True)]),
        start=np.concatenate([part.start for part in parts]),
        length=np.concatenate([part.length for part in parts]),
        offsets=np.concatenate([[0], *(part.offsets[1:] + edge for part, edge in zip(parts, edges, strict=False))]),
        lateness_bound=max(part.lateness_bound for part in parts),
        counts=sum((part.counts for part in parts), Counts()),
    )
