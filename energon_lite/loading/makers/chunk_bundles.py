"""Bundles: the items of a chunk that make up each of its batches, by a fixed number, by group or by tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from energon_lite.batching.epochs import plan_epochs
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.sequence_batches import as_planned
from energon_lite.batching.strategy import Strategy
from energon_lite.errors import FatalSampleError, UsageError, field_of
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.makers.chunk_job import Carried, ChunkPlace, Item
from energon_lite.loading.makers.chunk_run import BEHIND, ChunkRun, dropped, origins_of
from energon_lite.loading.makers.outcomes import Mark, Rejected
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.order.hashing import HashDomain, hash_ints

#: Tag that separates the hashes of this purpose from those of others.
_GROUP = 15


@dataclass(frozen=True)
class Bundle:
    """Items that make up a batch.

    Args:
        items: the items, at least one.
        chunk: the chunk in which the bundle begins.
        begin: its place in that chunk; the first ``sub`` batches of the bundle were delivered before.
        following: the place of the next bundle in the job's chunk; None: this is the last bundle.
        is_filled: False: there are too few items, so they are handed over.
    """

    items: list[Item]
    chunk: int
    begin: ChunkPlace
    following: ChunkPlace | None
    is_filled: bool = True


class Bundler(Protocol):
    """A rule that groups the items of a chunk into bundles."""

    def bundles(self, items: Iterator[Item], run: ChunkRun) -> Iterator[Bundle]:
        """Yield the bundle of each batch, from the job's first batch on."""


@dataclass(frozen=True)
class BundlesByCount:
    """Bundles of ``size`` items, one after the other, beginning with the items that were handed over."""

    size: int

    def bundles(self, items: Iterator[Item], run: ChunkRun) -> Iterator[Bundle]:
        job = run.job
        some = job.carried_items
        tail = job.carried.begin if isinstance(job.carried, Carried) else None
        begin = job.first
        for item in items:
            some.append(item)
            if len(some) == self.size:
                following = ChunkPlace(*item.after, begin.bundle + (tail is None))
                yield Bundle(some, *(tail or (job.number, begin)), following)
                some = []
                begin = following
                tail = None
        chunk, place = tail or (job.number, begin)
        if some and job.hands_over:
            yield Bundle(some, chunk, place, None, is_filled=False)
        elif some:
            yield from _remainder([some], place, run, chunk)


@dataclass(frozen=True)
class BundlesByGroup:
    """Bundles of items of the same group, given by ``batch_group_criterion``.

    Args:
        size: items in each; None: the criterion gives the size.
    """

    size: int | None

    def bundles(self, items: Iterator[Item], run: ChunkRun) -> Iterator[Bundle]:
        job = run.job
        number = 0
        groups: dict[Hashable, tuple[int, list[Item]]] = {}
        for item in items:
            run.at = item.start
            with run.of_chunk(_GROUP, *item.start, number=item.start[0]):
                criteria = run.apply("batch_group_criterion", item.value, name="a sample", origins=item.origins)
            if not criteria:
                continue
            key, size = self._group(criteria[0])
            known, some = groups.setdefault(key, (size, []))
            if known != size:
                raise FatalSampleError(
                    f"batch_group_criterion gave group {key!r} batches of {known} samples, and now of {size}",
                    fix="return the same size for each sample of a group",
                )
            some.append(item)
            if len(some) >= size:
                yield Bundle(list(some), job.number, begin_of(number, run), ChunkPlace(*item.after, number + 1))
                some.clear()
                number += 1
        rest = [some for _, some in groups.values() if some]
        yield from _remainder(rest, begin_of(number, run), run, job.number)

    def _group(self, criterion: Any) -> tuple[Hashable, int]:
        """Return the key and the batch size of a group."""
        try:
            key, size = criterion
            hash(key)
            if isinstance(key, torch.Tensor):  # its hash is that of the object: each sample would be a group
                raise TypeError
        except (TypeError, ValueError):
            raise FatalSampleError(
                f"batch_group_criterion returned {criterion!r}",
                fix="return (key, batch size or None), with a key that can be hashed; of a tensor, its item()",
            ) from None
        if (size is None) == (self.size is None):
            raise FatalSampleError(
                f"batch_group_criterion gave group {key!r} batches of {size} samples, and the data set has "
                f"batch_size={self.size}",
                fix="let one of the two say it, and the other be None",
            )
        given: Any = self.size if size is None else size
        if not hasattr(given, "__index__") or given < 1:
            raise FatalSampleError(
                f"batch_group_criterion gave group {key!r} batches of {given!r} samples",
                fix="give an integer, at least 1",
            )
        return key, int(given)


def begin_of(number: int, run: ChunkRun) -> ChunkPlace:
    """Return the place of a bundle, by its number in the chunk, for rules that need whole chunks."""
    first = run.job.first
    return ChunkPlace(bundle=number, sub=first.sub if number == first.bundle else 0)


def _remainder(rest: list[list[Item]], first: ChunkPlace, run: ChunkRun, chunk: int) -> Iterator[Bundle]:
    """Yield the remainder at the end of ``chunk`` as bundles, or drop it; the first bundle begins at ``first``."""
    run.at = BEHIND  # outcomes from here on have not been reported before
    if not run.keep_remainder:
        for items in rest:
            why = dropped("batch", "too few for a batch were left at the end of a chunk", name="a sample")
            run.fail(why, origins_of(items))
        return
    for place, items in enumerate(rest):
        number = first.bundle + place
        begin = begin_of(number, run) if place else first
        yield Bundle(items, chunk, begin, None if place + 1 == len(rest) else ChunkPlace(*run.job.end, number + 1))


#: Samples that are encoded and then planned together. A worker holds them all in memory, and a run that is resumed in
#: the middle of a chunk makes them again; with fewer samples, more of the last batches of chunks are not full.
DEFAULT_CHUNK = 1024

#: Randomness of ``sample_length``.
_LENGTH = HashDomain.LENGTH_HOOK.value
#: Randomness of the plan.
_PLAN = HashDomain.ENCODED_PLAN.value


class BundlesByTokens:
    """Bundles by the lengths of encoded samples.

    Args:
        strategy: rule that groups the samples.
        encoder: the user's hooks.
        field: the field of an encoded sample that has its length; None: see
            :class:`~energon_lite.loading.makers.sample_length.SampleLength`.
    """

    def __init__(self, strategy: Strategy, encoder: TaskEncoder, field: str | None = None):
        self.strategy = strategy
        self._length = SampleLength(encoder, field)
        key = getattr(strategy, "key", None)
        self._key_length = None if key is None else SampleLength(encoder, key)

    def bundles(self, items: Iterator[Item], run: ChunkRun) -> Iterator[Bundle]:
        kept = list[Item]()
        lengths = list[tuple[int, int]]()
        for item in items:
            measured = self._measured(item, run)
            if measured is not None:
                kept.append(item)
                lengths.append(measured)
        if not kept:
            return
        plan = self._plan(kept, lengths, run)
        _count_cuts(plan, kept, run)
        run.at = BEHIND  # errors from here on are raised again if the chunk is run again
        for number in range(run.job.first.bundle, len(plan)):
            pieces = list(_pieces(plan, number, kept, lengths, run))
            if pieces:
                following = None if number + 1 == len(plan) else ChunkPlace(*run.job.end, number + 1)
                yield Bundle(pieces, run.job.number, begin_of(number, run), following)

    def _measured(self, item: Item, run: ChunkRun) -> tuple[int, int] | None:
        """Return the length of a sample, and that by the strategy's key; None: it is skipped or fails."""
        address = item.origins[0] or (0, 0, 0)
        key = field_of(item.value, "__key__")
        name = key if isinstance(key, str) and key else f"sample {address[1]}"
        with run.of_sample(_LENGTH, address, item.result or 0):
            try:
                leaf = run.runner.leaves[address[0]].name
                return run.runner.guarded("sample_length", leaf, name, item.value, self._lengths, item.value)
            except Rejected as rejected:
                run.fail(rejected.failure, item.origins)
                return None

    def _lengths(self, value: Any) -> tuple[int, int]:
        return self._length(value), 0 if self._key_length is None else self._key_length(value)

    def _plan(self, items: list[Item], lengths: list[tuple[int, int]], run: ChunkRun) -> MicroBatches:
        columns = np.array(lengths, dtype=np.int64).T
        seed = hash_ints(run.runner.seed, _PLAN, run.job.pass_number, run.job.number)
        rows = [item.origins[0] or (0, place, 0) for place, item in enumerate(items)]
        leaf, index, epoch = np.array([row[:3] for row in rows], dtype=np.int64).T
        # Without ends, epochs are mixed within batches; so is a blend of leaves.
        ascending = len(run.runner.leaves) == 1 and bool((np.diff(epoch) >= 0).all())
        ends: list[int] = (np.flatnonzero(np.diff(epoch)) + 1).tolist() if ascending else []
        try:
            samples = (leaf, index, epoch)
            keys = None if self._key_length is None else columns[1]
            return plan_epochs(self.strategy, columns[0], samples, ends=ends, seed=seed, key_lengths=keys)[0]
        except UsageError as error:
            raise FatalSampleError(error.what, where=error.where or "batching", fix=error.fix) from None


def _count_cuts(plan: MicroBatches, items: list[Item], run: ChunkRun) -> None:
    kept = np.zeros(len(items), dtype=bool)
    kept[plan.sample] = True
    for number in np.flatnonzero(~kept).tolist():
        run.fail(dropped("plan", "it does not fit into a batch", name="a sample"), items[number].origins)
    run.mark(Mark.TRUNCATED, plan.counts.truncated_samples)
    run.mark(Mark.SPLIT, plan.counts.split_samples)


def _pieces(
    plan: MicroBatches, number: int, items: list[Item], lengths: list[tuple[int, int]], run: ChunkRun
) -> Iterator[Item]:
    """Yield the samples, or pieces of samples, of a micro-batch."""
    first, stop = plan.offsets[number : number + 2].tolist()
    columns = (column[first:stop].tolist() for column in (plan.sample, plan.start, plan.length))
    for sample, start, length in zip(*columns, strict=True):
        item = items[sample]
        if start == 0 and length == lengths[sample][0]:
            yield item
            continue
        try:
            value = run.runner.guarded("plan", "*", "a sample", item.value, as_planned, item.value, start, length, 1)
        except Rejected as rejected:
            run.fail(rejected.failure, item.origins)
            continue
        # A sample counts once, with its first piece.
        counted, more_of = ((), item.origins) if start else (item.origins, item.more_of)
        yield replace(item, value=value, origins=counted, more_of=more_of)
