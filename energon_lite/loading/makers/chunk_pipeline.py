"""From a chunk to its batches, where hooks decide how many samples there are: pure, the same in every process.

    positions --sample hooks--> samples --(packs)--> items --(groups)--> bundles --batch, encode_batch--> batches

Any hook may make less or more of what it gets. Items that do not fill a batch at a chunk's end are handed over to a
later chunk (with groups, or if the user says so, they become smaller batches, or are dropped). A batch can be made
again from the number of the chunk and the :class:`Place` in it at which it begins. Where neither packs nor groups mix
samples, that takes no more than the samples of the batch; a pack takes the samples of its buffer (up to the selection),
a batch of a group the whole chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon_lite.errors import FatalSampleError
from energon_lite.hooks import HookContext, hook_context
from energon_lite.loading.makers.chunk_job import START, Carried, ChunkJob, Item, Made, Place, Tail
from energon_lite.loading.makers.chunk_log import BEHIND, ChunkLog, Origins
from energon_lite.loading.makers.chunk_samples import ChunkSamples, dropped, numbered
from energon_lite.loading.makers.empty_batch import rows_of
from energon_lite.loading.makers.pipeline import Result, set_restore_key

__all__ = ["ChunkPipeline"]

#: Tags that keep the hashes for different purposes apart.
_BUNDLE, _GROUP = 14, 15


@dataclass(frozen=True)
class Bundle:
    """Items that make up a batch.

    Args:
        items: at least one.
        chunk: the one in which it begins.
        begin: where in it; ``sub`` batches of the bundle were delivered before.
        following: where the next bundle begins in the job's chunk; None: no other comes.
        is_filled: False: there are too few items, to be handed over.
    """

    items: list[Item]
    chunk: int
    begin: Place
    following: Place | None
    is_filled: bool = True


class ChunkPipeline(ChunkSamples):
    """Makes the batches of chunks.

    Args:
        keep_remainder: what is left at a chunk's end, and not handed over, becomes smaller batches; else it is dropped,
            and counted.
        arguments: those of :class:`~energon_lite.loading.makers.chunk_samples.ChunkSamples`.
    """

    def __init__(self, *arguments: Any, keep_remainder: bool = True, **more: Any):
        super().__init__(*arguments, **more)
        self.keep_remainder = keep_remainder
        self._likeness: Made | None = None

    def run(self, job: ChunkJob) -> Result:  # type: ignore[override]  # the loader pairs jobs and pipelines
        """All batches of a job: a result whose ``batch`` is a list of :class:`Made`."""
        return Result(self._empty_batch(job) if job.empty else list(self.batches(job)))

    def batches(self, job: ChunkJob) -> Iterator[Made]:
        """The batches of a job, each made when it is asked for, then what is handed over. The last one's ``after`` is
        None.

        Raises:
            FatalSampleError: a hook asked for the end, or broke a rule.
        """
        return self._made(job)

    def _made(self, job: ChunkJob) -> Iterator[Made]:
        if isinstance(job.carried, ChunkJob):
            job = replace(job, carried=next((made.carried for made in self._made(job.carried) if made.carried), None))
        log = ChunkLog(job.first.reading, job.carried.outcomes if isinstance(job.carried, Carried) else ())
        after: Place | None = START
        for made in self._single(job, log) if not self.hooks.batched else self._batched(job, log):
            yield made
            after = made.after
        if log or after is not None:
            yield Made(None, log.take(), is_batch=False, rows=0)

    # -- batches --------------------------------------------------------------------------------------------------

    def _single(self, job: ChunkJob, log: ChunkLog) -> Iterator[Made]:
        """Items as they are."""
        for item in self.items(job, log):
            if self.hooks.packs:
                set_restore_key(item.value, ("chunk", job.pass_number, job.number, *Place(*item.start)))
            yield Made(item.value, log.take(item.origins), Place(*item.after))

    def _batched(self, job: ChunkJob, log: ChunkLog) -> Iterator[Made]:
        told = job.carried.tail if isinstance(job.carried, Carried) else Tail(job.number, job.first)
        for bundle in self._bundles(job, log):
            begin, own = bundle.begin, bundle.chunk == job.number
            if own and begin.bundle < job.first.bundle:
                continue  # only with groups: delivered, and needed only to know what is in the others
            if not bundle.is_filled:
                handed_over = Carried(told, Tail(bundle.chunk, begin), bundle.items, log.take())
                added = len(bundle.items) - len(_carried_items(job))
                yield Made(None, is_batch=False, rows=added, carried=handed_over)
                continue
            batches = self._batches_of(bundle, job, log)
            origins = _origins(bundle.items)
            if begin.sub:  # what happened on the way to the bundle was told with its first batch
                log.take()
                origins = ()
            start = (0, 0, 0, 0) if self.hooks.whole_chunks else bundle.items[0].start
            key = ("chunk", job.pass_number, bundle.chunk, *start, begin.bundle)
            for sub, batch in enumerate(batches[begin.sub :], begin.sub):
                # A batch that goes on in another chunk can be made again only if it is known which one that is.
                set_restore_key(batch, (*key, sub) if own else (*key, sub, job.stride))
                after, tail = bundle.following, None
                if sub + 1 < len(batches):
                    after = begin._replace(sub=sub + 1)
                    if not own:
                        after, tail = START, Tail(bundle.chunk, after)
                rows = rows_of(batch, len(bundle.items)) if self._batches_yield else len(bundle.items)
                yield Made(batch, log.take(origins), after, rows=rows, tail=tail)
                origins, told = (), tail or Tail(job.number, after or START)

    @property
    def _batches_yield(self) -> bool:
        return not self.hooks.generators.isdisjoint(("batch", "encode_batch"))

    def _bundles(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        """What makes up each batch."""
        return self._grouped(job, log) if self.hooks.groups else self._counted(job, log)

    def _batches_of(self, bundle: Bundle, job: ChunkJob, log: ChunkLog) -> list[Any]:
        """What ``batch`` and ``encode_batch`` make of a bundle: usually one batch."""
        origins = _origins(bundle.items)
        read, log.at = log.at, BEHIND  # what becomes of a bundle was not told before
        name = f"{len(bundle.items)} samples"
        origin = (self.seed, _BUNDLE, job.pass_number, bundle.chunk, bundle.begin.bundle)
        index = numbered(bundle.chunk, bundle.begin.bundle)
        with hook_context(HookContext(*origin, batch_index=index), seeds=False):
            raw = self.apply("batch", [item.value for item in bundle.items], log, name=name, origins=origins)
        batches = []
        for number, one in enumerate(raw):
            # A context of its own for each hook: what one draws must not depend on how much the other drew.
            with hook_context(HookContext(*origin, 1, number, batch_index=index), seeds=False):
                batches += self.apply("encode_batch", one, log, name=name, origins=origins)
        log.at = read
        return batches

    def _counted(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        """Bundles of ``batch_size`` items, one after the other; first the one that was handed over is filled."""
        items = _carried_items(job)
        tail = job.carried.begin if isinstance(job.carried, Carried) else None
        begin = job.first
        for item in self.items(job, log):
            items.append(item)
            if len(items) == self.batch_size:
                following = Place(*item.after, begin.bundle + (tail is None))
                yield Bundle(items, *(tail or (job.number, begin)), following)
                items, begin, tail = [], following, None
        chunk, place = tail or (job.number, begin)
        if items and job.stride and not job.is_last:
            yield Bundle(items, chunk, place, None, is_filled=False)
        elif items:
            yield from self._remainder([items], place, job, log, chunk=chunk)

    def _grouped(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        """Bundles of items of the same group."""
        number = 0
        groups: dict[Hashable, tuple[int, list[Item]]] = {}
        for item in self.items(job, log):
            log.at = item.start
            index = numbered(job.number, item.start[0])
            context = HookContext(self.seed, _GROUP, job.pass_number, job.number, *item.start, sample_index=index)
            with hook_context(context, seeds=False):
                found = self.apply("batch_group_criterion", item.value, log, name="a sample", origins=item.origins)
            if not found:
                continue
            key, size = self._group(found[0])
            known, items = groups.setdefault(key, (size, []))
            if known != size:
                raise FatalSampleError(
                    f"batch_group_criterion gave group {key!r} batches of {known} samples, and now of {size}",
                    fix="return the same size for each sample of a group",
                )
            items.append(item)
            if len(items) >= size:
                yield Bundle(list(items), job.number, self._begin(number, job), Place(*item.after, number + 1))
                items.clear()
                number += 1
        rest = [items for _, items in groups.values() if items]
        yield from self._remainder(rest, self._begin(number, job), job, log)

    def _group(self, criterion: Any) -> tuple[Hashable, int]:
        """Key and batch size of a group."""
        try:
            key, size = criterion
            hash(key)
        except (TypeError, ValueError):
            raise FatalSampleError(
                f"batch_group_criterion returned {criterion!r}",
                fix="return (key, batch size or None), with a key that can be hashed",
            ) from None
        if (size is None) == (self.batch_size is None):
            raise FatalSampleError(
                f"batch_group_criterion gave group {key!r} batches of {size} samples, and the data set has "
                f"batch_size={self.batch_size}",
                fix="let one of the two say it, and the other be None",
            )
        size = self.batch_size if size is None else size
        if not isinstance(size, int) or size < 1:
            raise FatalSampleError(
                f"batch_group_criterion gave group {key!r} batches of {size!r} samples", fix="give at least 1"
            )
        return key, size

    def _begin(self, number: int, job: ChunkJob) -> Place:
        """Where a bundle begins, if whole chunks are needed."""
        return Place(bundle=number, sub=job.first.sub if number == job.first.bundle else 0)

    def _remainder(
        self, rest: list[list[Item]], first: Place, job: ChunkJob, log: ChunkLog, *, chunk: int | None = None
    ) -> Iterator[Bundle]:
        """What is left at the chunk's end; the first of these bundles begins at ``first``."""
        log.at = BEHIND  # what happens from here on was not told before
        if not self.keep_remainder:
            for items in rest:
                why = dropped("batch", "too few for a batch were left at the end of a chunk", name="a sample")
                log.fail(why, _origins(items))
            return
        for place, items in enumerate(rest):
            number = first.bundle + place
            begin = self._begin(number, job) if place else first
            following = None if place + 1 == len(rest) else Place(*job.end, number + 1)
            yield Bundle(items, job.number if chunk is None else chunk, begin, following)

    def _empty_batch(self, job: ChunkJob) -> list[Made]:
        """A batch without samples, or nothing if the chunk has no batch to show what one looks like."""
        if not self.batched:
            return [Made(None)]
        if self._likeness is None:
            whole, keeps = replace(job, empty=False, stride=0, carried=None), self.keep_remainder
            self.keep_remainder = True
            try:
                self._likeness = next((made for made in self._made(whole) if made.is_batch), None)
            finally:
                self.keep_remainder = keeps
        if self._likeness is None:
            return []
        batch = self._empty_like(self._likeness.batch, self._likeness.rows, _BUNDLE, job.pass_number, job.number)
        set_restore_key(batch, ("empty",))
        return [Made(batch)]


def _carried_items(job: ChunkJob) -> list[Item]:
    return [*job.carried.items] if isinstance(job.carried, Carried) else []


def _origins(items: Sequence[Item]) -> Origins:
    """The addresses of all samples that items stand for."""
    return [origin for item in items for origin in item.origins]
