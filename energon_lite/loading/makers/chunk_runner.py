"""From a chunk to its content-decided batches: pure, the same in every process.

    positions --sample hooks--> samples --(packs)--> items --(groups)--> bundles --batch, encode_batch--> batches

Any hook may make fewer or more results of its input. Items that do not fill a batch at a chunk's end are handed over to
a later chunk (with groups, or by request, they become smaller batches, or are dropped). A batch can be made again from
the number of the chunk and the :class:`ChunkPlace` in it at which the batch begins. If neither packs nor groups mix
samples, this reads no more than the samples of the batch; a pack needs the samples of its buffer (up to the selection),
a batch of a group the whole chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from energon_lite.batching.collate import rows_of
from energon_lite.hooks import TaskEncoder, hooks_of
from energon_lite.loading.makers.chunk_bundles import Bundle, Bundler, BundlesByCount, BundlesByGroup
from energon_lite.loading.makers.chunk_items import ChunkItems
from energon_lite.loading.makers.chunk_job import START, Carried, ChunkJob, ChunkPlace, Item, Made, Tail
from energon_lite.loading.makers.chunk_run import BEHIND, ChunkRun, origins_of
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Failure, Result, set_restore_key
from energon_lite.loading.makers.sample_length import pack_selection
from energon_lite.order.orders import Addresses
from energon_lite.worker_config import ErrorHandler

#: Tag that separates the hashes of this purpose from those of others.
_BUNDLE = 14


class ChunkRunner(JobRunner):
    """Maker of the batches of chunks.

    Args:
        leaves, encoder, seed, error_handler: as for :class:`~energon_lite.loading.makers.job_runner.JobRunner`.
        batch_size: samples in a batch; None: the groups give it, or batches are single samples.
        packing_buffer_size: samples in a buffer of packing; None: no packing.
        keep_remainder: the remainder of a chunk, unless it is handed over, becomes smaller batches; if False, it is
            dropped and counted.
        bundler: rule for batches by the lengths of all samples of a chunk; None: batches by number, or by groups.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        encoder: TaskEncoder,
        *,
        seed: int,
        batch_size: int | None,
        packing_buffer_size: int | None = None,
        error_handler: ErrorHandler | None = None,
        keep_remainder: bool = True,
        bundler: Bundler | None = None,
    ):
        packing = packing_buffer_size is not None
        batched = batch_size is not None
        hooks = hooks_of(encoder, packing=packing, batched=batched, by_tokens=bundler is not None)
        super().__init__(leaves, encoder, hooks, seed=seed, error_handler=error_handler)
        self.keep_remainder = keep_remainder
        self._items = ChunkItems(hooks, packing_buffer_size, pack_selection(encoder))
        self._bundler = bundler or (BundlesByGroup(batch_size) if hooks.groups else BundlesByCount(batch_size or 1))
        self._batches_yield = not hooks.generators.isdisjoint(("batch", "encode_batch"))
        self._likeness: Made | None = None

    def run(self, job: ChunkJob) -> Result:
        """Make all batches of a job; the ``batch`` of the result is a list of :class:`Made`."""
        return Result(self._empty_batch(job) if job.empty else list(self.batches(job)))

    def batches(self, job: ChunkJob) -> Iterator[Made]:
        """Yield the batches of a job, each made on request, then the remainder. The ``after`` of the last one is None.

        Raises:
            FatalSampleError: a hook asked to end the run, or broke a rule.
        """
        run = self._run(job)
        made = self._made(run)
        while True:
            for observer in self.services.observers:
                observer.begin()
            result = next(made, None)
            if result is None:
                return
            result.trace = self.end([origin for item in run.items for origin in (*item.origins, *item.more_of)])
            yield result

    def results(self, address: Address, attempt: int = 0) -> tuple[list[Any], list[Failure]]:
        """Return all results of the sample hooks for an address, and the failures; there are no replacements."""
        nothing = np.empty(0, dtype=np.int64)
        return self._items.results(address, self._run(ChunkJob(0, 0, Addresses(nothing, nothing, nothing))))

    def _run(self, job: ChunkJob, *, keep_remainder: bool | None = None) -> ChunkRun:
        if isinstance(job.carried, ChunkJob):
            before = self._made(self._run(job.carried))
            job = replace(job, carried=next((made.carried for made in before if made.carried), None))
        if job.carried_samples and isinstance(job.carried, Carried):
            job = replace(job, first=job.carried.begins_at)
        keeps = self.keep_remainder if keep_remainder is None else keep_remainder
        return ChunkRun(job, self, keep_remainder=keeps)

    def _made(self, run: ChunkRun) -> Iterator[Made]:
        after: ChunkPlace | None = START
        for made in self._batched(run) if self.hooks.batched else self._single(run):
            yield made
            after = made.after
        if run.outcomes or after is not None:
            yield Made(None, run.take(), is_batch=False, rows=0)

    # -- batches --------------------------------------------------------------------------------------------------

    def _single(self, run: ChunkRun) -> Iterator[Made]:
        """Yield each item as a batch."""
        for item in self._items.of(run):
            if self.hooks.packs:
                key = ("chunk", run.job.pass_number, run.job.number, *ChunkPlace(*item.start))
                set_restore_key(item.value, key if item.start[0] >= 0 else (*key, run.job.stride))
            run.items = [item]
            after = ChunkPlace(*item.after)
            yield Made(item.value, run.take(item.origins), after=after, digest=run.digest([item]))
        if run.left:
            yield self._handed_over(run)

    def _batched(self, run: ChunkRun) -> Iterator[Made]:
        job = run.job
        tail = job.carried.tail if isinstance(job.carried, Carried) else None
        reported = tail or Tail(job.number, job.first)
        for bundle in self._bundler.bundles(self._items.of(run), run):
            begin = bundle.begin
            own = bundle.chunk == job.number
            if own and begin.bundle < job.first.bundle:
                continue  # only with groups: delivered before, but needed to fill the other groups
            if not bundle.is_filled:
                items = bundle.items
                outcomes = run.take()
                left = _moved(run.left, job.end[0])
                handed_over = Carried(reported, Tail(bundle.chunk, begin), items, outcomes, left)
                added = len(items) - len(job.carried_items) + len(left)
                yield Made(None, is_batch=False, rows=added, carried=handed_over)
                return
            batches = self._batches_of(bundle, run)
            origins = origins_of(bundle.items)
            if begin.sub:  # outcomes before the bundle were reported with its first batch
                run.take()
                origins = ()
            start = (0, 0, 0, 0) if self.hooks.whole_chunks else bundle.items[0].start
            key = ("chunk", job.pass_number, bundle.chunk, *start, begin.bundle)
            for sub, batch in enumerate(batches[begin.sub :], begin.sub):
                # A batch that ends in another chunk can only be made again if the key has the stride to that chunk.
                set_restore_key(batch, (*key, sub) if own and start[0] >= 0 else (*key, sub, job.stride))
                after = bundle.following
                tail = None
                if sub + 1 < len(batches):
                    after = begin._replace(sub=sub + 1)
                    if not own:
                        after = START
                        tail = Tail(bundle.chunk, begin._replace(sub=sub + 1))
                rows = rows_of(batch, len(bundle.items)) if self._batches_yield else len(bundle.items)
                digest = run.digest(bundle.items, sub)
                yield Made(batch, run.take(origins), after=after, rows=rows, tail=tail, digest=digest)
                origins = ()
                reported = Tail(job.number, after or START)
        if run.left:
            yield self._handed_over(run)

    def _handed_over(self, run: ChunkRun) -> Made:
        """Return the remainder if it has only samples that are in no pack, and no items."""
        carried = Carried(None, None, [], [], _moved(run.left, run.job.end[0]))
        return Made(None, run.take(), is_batch=False, rows=len(run.left), carried=carried)

    def _batches_of(self, bundle: Bundle, run: ChunkRun) -> list[Any]:
        """Return the results of ``batch`` and ``encode_batch`` for a bundle: usually one batch."""
        run.items = bundle.items
        origins = origins_of(bundle.items)
        read = run.at
        run.at = BEHIND  # outcomes of a bundle have not been reported before
        name = f"{len(bundle.items)} samples"
        number = bundle.begin.bundle
        with run.of_batch(_BUNDLE, bundle.chunk, number):
            raw = run.apply("batch", [item.value for item in bundle.items], name=name, origins=origins)
        batches = []
        for part, raw_batch in enumerate(raw):
            # Each hook has its own seed, so that its random numbers do not depend on how many another hook drew.
            with run.of_batch(_BUNDLE, bundle.chunk, number, 1, part):
                batches += run.apply("encode_batch", raw_batch, name=name, origins=origins)
        run.at = read
        return batches

    def _empty_batch(self, job: ChunkJob) -> list[Made]:
        """Return a batch without samples; an empty list if the chunk has no batch that could serve as a template."""
        if not self.hooks.batched:
            return [Made(None)]
        if self._likeness is None:
            whole = self._run(replace(job, empty=False, stride=0, carried=None), keep_remainder=True)
            self._likeness = next((made for made in self._made(whole) if made.is_batch), None)
        if self._likeness is None:
            return []
        like = self._likeness
        with self.context() as context:
            batch = self.empty_batch(like.batch, like.rows, context, _BUNDLE, job.pass_number, job.number)
        set_restore_key(batch, ("empty",))
        return [Made(batch)]


def _moved(samples: list[Item], units: int) -> list[Item]:
    """Return samples with their places in a chunk that begins ``units`` positions later."""
    return [
        replace(item, start=(item.start[0] - units, *item.start[1:]), after=(item.after[0] - units, *item.after[1:]))
        for item in samples
    ]
