"""Batches by tokens where nobody measured the samples: a chunk is encoded, then its lengths are known and planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_lite.batching.epochs import plan_epochs
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.strategy import Strategy
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.hooks import HookContext, hook_context
from energon_lite.loading.makers.chunk_job import ChunkJob, Item, Place
from energon_lite.loading.makers.chunk_log import BEHIND, ChunkLog
from energon_lite.loading.makers.chunk_pipeline import Bundle, ChunkPipeline
from energon_lite.loading.makers.chunk_samples import dropped
from energon_lite.loading.makers.pipeline import Mark, Rejected
from energon_lite.loading.makers.planned_sample import as_planned
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.order.hashing import hash_ints

__all__ = ["DEFAULT_CHUNK", "TokenBundling", "TokenChunkPipeline"]

#: Samples that are encoded and then planned together. A worker holds them all, and a run that goes on in the middle of
#: a chunk makes them again; with fewer, more of the last batches of chunks are not full.
DEFAULT_CHUNK = 1024

#: Tags that keep the hashes for different purposes apart.
_LENGTH, _PLAN = 19, 32


@dataclass(frozen=True)
class TokenBundling:
    """How the samples of a chunk become batches.

    Args:
        strategy: which samples go together.
        field: the field of an encoded sample that has its length; None: see
            :class:`~energon_lite.loading.makers.sample_length.SampleLength`.
    """

    strategy: Strategy
    field: str | None = None


class TokenChunkPipeline(ChunkPipeline):
    """Makes the batches of chunks by the lengths of their encoded samples.

    Args:
        bundling: how.
        arguments: those of :class:`~energon_lite.loading.makers.chunk_pipeline.ChunkPipeline`.
    """

    def __init__(self, *arguments: Any, bundling: TokenBundling, **more: Any):
        super().__init__(*arguments, by_tokens=True, **more)
        self._strategy = bundling.strategy
        self._length = SampleLength(self.encoder, bundling.field)
        self._length_is_seeded = bundling.field is None and "sample_length" in self.seeded_hooks
        key = getattr(bundling.strategy, "key", None)
        self._key_length = None if key is None else SampleLength(self.encoder, key)

    def _bundles(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        items, lengths = list[Item](), list[tuple[int, int]]()
        for item in self.items(job, log):
            measured = self._measured(item, log)
            if measured is not None:
                items.append(item)
                lengths.append(measured)
        if not items:
            return
        plan = self._plan(items, lengths, job)
        self._count_cuts(plan, items, log)
        log.at = BEHIND  # what goes wrong from here on goes wrong again when the chunk is gone through again
        for number in range(job.first.bundle, len(plan)):
            pieces = list(self._pieces(plan, number, items, lengths, log))
            if pieces:
                following = None if number + 1 == len(plan) else Place(*job.end, number + 1)
                yield Bundle(pieces, job.number, self._begin(number, job), following)

    def _measured(self, item: Item, log: ChunkLog) -> tuple[int, int] | None:
        """The lengths of a sample, the second one that of the strategy's key; None: it is skipped or fails."""
        leaf_number, index, epoch = item.origins[0] or (0, 0, 0)
        leaf = self.leaves[leaf_number]
        context = (self.seed, _LENGTH, leaf.key, epoch, index, item.result or 0)
        with hook_context(
            HookContext(*context, sample_index=epoch * len(leaf.source) + index), seeds=self._length_is_seeded
        ):
            try:
                name = _name(item.value) or f"sample {index}"
                return self._guarded("sample_length", leaf.name, name, item.value, self._lengths, item.value)
            except Rejected as rejected:
                log.fail(rejected.failure, item.origins)
                return None

    def _lengths(self, value: Any) -> tuple[int, int]:
        return self._length(value), 0 if self._key_length is None else self._key_length(value)

    def _plan(self, items: list[Item], lengths: list[tuple[int, int]], job: ChunkJob) -> MicroBatches:
        columns = np.array(lengths, dtype=np.int64).T
        seed = hash_ints(self.seed, _PLAN, job.pass_number, job.number)
        rows = [item.origins[0] or (0, place, 0) for place, item in enumerate(items)]
        leaf, index, epoch = np.array([row[:3] for row in rows], dtype=np.int64).T
        ascending = len(self.leaves) == 1 and bool((np.diff(epoch) >= 0).all())  # else epochs are mixed, or blended
        ends: list[int] = (np.flatnonzero(np.diff(epoch)) + 1).tolist() if ascending else []
        try:
            samples, keys = (leaf, index, epoch), None if self._key_length is None else columns[1]
            return plan_epochs(self._strategy, columns[0], samples, ends=ends, seed=seed, key_lengths=keys)[0]
        except UsageError as error:
            raise FatalSampleError(error.what, where=error.where or "batching", fix=error.fix) from None

    def _count_cuts(self, plan: MicroBatches, items: list[Item], log: ChunkLog) -> None:
        kept = np.zeros(len(items), dtype=bool)
        kept[plan.sample] = True
        for number in np.flatnonzero(~kept).tolist():
            why = dropped("plan", "it does not fit into a batch", name="a sample")
            log.fail(why, items[number].origins)
        log.mark(Mark.TRUNCATED, plan.counts.truncated_samples)
        log.mark(Mark.SPLIT, plan.counts.split_samples)

    def _pieces(
        self, plan: MicroBatches, number: int, items: list[Item], lengths: list[tuple[int, int]], log: ChunkLog
    ) -> Iterator[Item]:
        """The samples, or pieces of samples, of a micro-batch."""
        first, stop = plan.offsets[number : number + 2].tolist()
        columns = (column[first:stop].tolist() for column in (plan.sample, plan.start, plan.length))
        for sample, start, length in zip(*columns, strict=True):
            item = items[sample]
            if start == 0 and length == lengths[sample][0]:
                yield item
                continue
            try:
                value = self._guarded("plan", "*", "a sample", item.value, as_planned, item.value, start, length, 1)
            except Rejected as rejected:
                log.fail(rejected.failure, item.origins)
                continue
            # A sample counts once, with its first piece.
            counted, more_of = ((), item.origins) if start else (item.origins, item.more_of)
            yield replace(item, value=value, origins=counted, more_of=more_of)


def _name(value: Any) -> str | None:
    """What a sample calls itself."""
    name = value.get("__key__") if isinstance(value, dict) else getattr(value, "__key__", None)
    return name if isinstance(name, str) else None
