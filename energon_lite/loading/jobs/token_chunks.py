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
from energon_lite.loading.jobs.chunk_job import ChunkJob
from energon_lite.loading.jobs.chunk_log import ChunkLog
from energon_lite.loading.jobs.chunk_pipeline import Bundle, ChunkPipeline
from energon_lite.loading.jobs.chunk_samples import Item, dropped
from energon_lite.loading.jobs.pipeline import Mark, Rejected
from energon_lite.loading.jobs.sample_length import SampleLength
from energon_lite.loading.jobs.token_pipeline import as_planned
from energon_lite.order.hashing import hash_ints
from energon_lite.task_encoder import HookContext, hook_context

__all__ = ["DEFAULT_CHUNK", "TokenBundling", "TokenChunkPipeline"]

#: Samples that are encoded and then planned together. A worker holds them all, and a run that goes on in the middle of
#: a chunk makes them again; with fewer, more of the last batches of chunks are not full.
DEFAULT_CHUNK = 1024

_PLAN, _LENGTH = 32, 33


@dataclass(frozen=True)
class TokenBundling:
    """How the samples of a chunk become batches.

    Args:
        strategy: which samples go together.
        field: the field of an encoded sample that has its length; None: see
            :class:`~energon_lite.loading.jobs.sample_length.SampleLength`.
    """

    strategy: Strategy
    field: str | None = None


class TokenChunkPipeline(ChunkPipeline):
    """Makes the batches of chunks by the lengths of their encoded samples.

    Args:
        bundling: how.
        arguments: those of :class:`~energon_lite.loading.jobs.chunk_pipeline.ChunkPipeline`.
    """

    def __init__(self, *arguments: Any, bundling: TokenBundling, **more: Any):
        super().__init__(*arguments, by_tokens=True, **more)
        self._strategy = bundling.strategy
        self._length = SampleLength(self.encoder, bundling.field)
        self._length_is_seeded = bundling.field is None and "sample_length" in self.seeded_hooks
        key = getattr(bundling.strategy, "key", None)
        self._key_length = None if key is None else SampleLength(self.encoder, key)

    def _bundles(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        items = list(self.items(job, log))
        if not items:
            return
        plan = self._plan(items, job)
        self._count_cuts(plan, items, log)
        last = len(plan) - 1
        log.at = items[-1].after  # what goes wrong from here on goes wrong again when the chunk is gone through again
        for number in range(job.first.bundle, len(plan)):
            pieces = list(self._pieces(plan, number, items, job, log))
            if pieces:
                yield Bundle(pieces, number, items[-1].after, is_last=number == last)

    def _plan(self, items: list[Item], job: ChunkJob) -> MicroBatches:
        lengths = np.array([self._length_of(item, job) for item in items], dtype=np.int64)
        keys = None
        if self._key_length is not None:
            keys = np.array([self._key_length(item.value) for item in items], dtype=np.int64)
        seed = hash_ints(self.seed, _PLAN, job.pass_number, job.number)
        rows = [item.origins[0] or (0, place, 0) for place, item in enumerate(items)]
        leaf, index, epoch = np.array([row[:3] for row in rows], dtype=np.int64).T
        ascending = len(self.leaves) == 1 and bool((np.diff(epoch) >= 0).all())  # else epochs are mixed, or blended
        ends: list[int] = (np.flatnonzero(np.diff(epoch)) + 1).tolist() if ascending else []
        try:
            samples = (leaf, index, epoch)
            return plan_epochs(self._strategy, lengths, samples, ends=ends, seed=seed, key_lengths=keys)[0]
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

    def _length_of(self, item: Item, job: ChunkJob) -> int:
        """The length of a sample, or of a result of a sample: the same whenever it is asked for."""
        with hook_context(HookContext(self.seed, _LENGTH, *self._own_place(item, job)), seeds=self._length_is_seeded):
            return self._length(item.value)

    def _own_place(self, item: Item, job: ChunkJob) -> tuple[int, ...]:
        if item.result is None or item.origins[0] is None:
            return job.pass_number, job.number, *item.start
        leaf, index, epoch = item.origins[0]
        return self.leaves[leaf].key, epoch, index, item.result

    def _pieces(
        self, plan: MicroBatches, number: int, items: list[Item], job: ChunkJob, log: ChunkLog
    ) -> Iterator[Item]:
        """The samples, or pieces of samples, of a micro-batch."""
        first, stop = plan.offsets[number : number + 2].tolist()
        columns = (column[first:stop].tolist() for column in (plan.sample, plan.start, plan.length))
        for sample, start, length in zip(*columns, strict=True):
            item = items[sample]
            whole = self._length_of(item, job)
            if start == 0 and length == whole:
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
