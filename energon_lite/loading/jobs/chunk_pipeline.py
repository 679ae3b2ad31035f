"""From a chunk to its batches, where hooks decide how many samples there are: pure, the same in every process.

    positions --sample hooks--> samples --(packs)--> items --(groups)--> bundles --batch, encode_batch--> batches

Any hook may make less or more of what it gets; what is left at the chunk's end becomes smaller batches. Nothing goes
over from one chunk to the next, so any batch can be made again from the number of its chunk and its :class:`Place` in
it. Where neither packs nor groups mix samples, that takes no more than the samples of the batch; a pack takes the
samples of its buffer (up to the selection), a batch of a group the whole chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from energon_lite.errors import FatalSampleError
from energon_lite.loading.jobs.chunk_job import START, ChunkJob, Made, Place
from energon_lite.loading.jobs.chunk_log import ChunkLog, Origins, Reading
from energon_lite.loading.jobs.chunk_samples import ChunkSamples, Item, dropped, numbered
from energon_lite.loading.jobs.pipeline import Result, set_restore_key
from energon_lite.task_encoder import HookContext, hook_context

__all__ = ["ChunkPipeline"]

#: Tags that keep the hashes for different purposes apart.
_BUNDLE, _GROUP = 14, 15


@dataclass(frozen=True)
class Bundle:
    """Items that make up a batch.

    Args:
        items: at least one.
        number: of the bundle in its chunk.
        after: what has been read of the chunk up to here.
        is_last: no other comes in this chunk.
    """

    items: list[Item]
    number: int
    after: Reading
    is_last: bool = False


class ChunkPipeline(ChunkSamples):
    """Makes the batches of chunks.

    Args:
        keep_remainder: what is left at a chunk's end becomes smaller batches; else it is dropped, and counted.
        arguments: those of :class:`~energon_lite.loading.jobs.chunk_samples.ChunkSamples`.
    """

    def __init__(self, *arguments: Any, keep_remainder: bool = True, **more: Any):
        super().__init__(*arguments, **more)
        self.keep_remainder = keep_remainder
        self._likeness: Made | None = None

    def run(self, job: ChunkJob) -> Result:  # type: ignore[override]  # the loader pairs jobs and pipelines
        """All batches of a job: a result whose ``batch`` is a list of :class:`Made`."""
        return Result(self._empty_batch(job) if job.empty else list(self.batches(job)))

    def batches(self, job: ChunkJob) -> Iterator[Made]:
        """The batches of a job, each made when it is asked for. The last one's ``after`` is None.

        Raises:
            FatalSampleError: a hook asked for the end, or broke a rule.
        """
        log = ChunkLog(job.first.reading)
        after: Place | None = START
        for made in self._single(job, log) if not self.hooks.batched else self._batched(job, log):
            yield made
            after = made.after
        if log or after is not None:
            yield Made(None, log.take(), is_batch=False)

    # -- batches --------------------------------------------------------------------------------------------------

    def _single(self, job: ChunkJob, log: ChunkLog) -> Iterator[Made]:
        """Items as they are."""
        for item in self.items(job, log):
            if self.hooks.packs:
                set_restore_key(item.value, _key(job, Place(*item.start)))
            yield Made(item.value, log.take(item.origins), Place(*item.after))

    def _batched(self, job: ChunkJob, log: ChunkLog) -> Iterator[Made]:
        first = job.first
        for bundle in self._bundles(job, log):
            if bundle.number < first.bundle:
                continue  # only with groups: delivered, and needed only to know what is in the others
            reading = (0, 0, 0, 0) if self.hooks.whole_chunks else bundle.items[0].start
            batches = self._batches_of(bundle, job, log)
            origins = _origins(bundle.items)
            for sub, batch in enumerate(batches):
                if bundle.number == first.bundle and sub < first.sub:
                    origins = ()
                    continue
                set_restore_key(batch, _key(job, Place(*reading, bundle.number, sub)))
                yield Made(batch, log.take(origins), _after(bundle, reading, sub, len(batches)), rows=len(bundle.items))
                origins = ()

    def _bundles(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        """What makes up each batch."""
        return self._grouped(job, log) if self.hooks.groups else self._counted(job, log)

    def _batches_of(self, bundle: Bundle, job: ChunkJob, log: ChunkLog) -> list[Any]:
        """What ``batch`` and ``encode_batch`` make of a bundle: usually one batch."""
        origins = _origins(bundle.items)
        name = f"{len(bundle.items)} samples"
        origin = (self.seed, _BUNDLE, job.pass_number, job.number, bundle.number)
        index = numbered(job, bundle.number)
        with hook_context(HookContext(*origin, batch_index=index), seeds=False):
            raw = self.apply("batch", [item.value for item in bundle.items], log, name=name, origins=origins)
        batches = []
        for number, one in enumerate(raw):
            # A context of its own for each hook: what one draws must not depend on how much the other drew.
            with hook_context(HookContext(*origin, 1, number, batch_index=index), seeds=False):
                batches += self.apply("encode_batch", one, log, name=name, origins=origins)
        return batches

    def _counted(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        """Bundles of ``batch_size`` items, one after the other."""
        number, items = job.first.bundle, list[Item]()
        for item in self.items(job, log):
            items.append(item)
            if len(items) == self.batch_size:
                yield Bundle(items, number, item.after)
                number, items = number + 1, []
        yield from self._remainder([items] if items else [], number, log)

    def _grouped(self, job: ChunkJob, log: ChunkLog) -> Iterator[Bundle]:
        """Bundles of items of the same group."""
        number = 0
        groups: dict[Hashable, tuple[int, list[Item]]] = {}
        for item in self.items(job, log):
            context = HookContext(
                self.seed, _GROUP, job.pass_number, job.number, *item.start, sample_index=numbered(job, item.start[0])
            )
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
                yield Bundle(list(items), number, item.after)
                items.clear()
                number += 1
        yield from self._remainder([items for _, items in groups.values() if items], number, log)

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

    def _remainder(self, rest: list[list[Item]], number: int, log: ChunkLog) -> Iterator[Bundle]:
        """What is left at the chunk's end."""
        if self.keep_remainder:
            for place, items in enumerate(rest):
                yield Bundle(items, number + place, items[-1].after, is_last=place + 1 == len(rest))
            return
        for items in rest:
            why = dropped("batch", "too few for a batch were left at the end of a chunk", name="a sample")
            log.fail(why, _origins(items))

    def _empty_batch(self, job: ChunkJob) -> list[Made]:
        """A batch without samples, or nothing if the chunk has no batch to show what one looks like."""
        if not self.batched:
            return [Made(None)]
        if self._likeness is None:
            self._likeness = next((made for made in self.batches(replace(job, empty=False)) if made.is_batch), None)
        if self._likeness is None:
            return []
        batch = self._empty_like(self._likeness.batch, self._likeness.rows, _BUNDLE, job.pass_number, job.number)
        set_restore_key(batch, ("empty",))
        return [Made(batch)]


def _origins(items: Sequence[Item]) -> Origins:
    """The addresses of all samples that items stand for."""
    return [origin for item in items for origin in item.origins]


def _after(bundle: Bundle, reading: Reading, sub: int, count: int) -> Place | None:
    """Where the batch after the ``sub``-th of ``count`` of a bundle begins."""
    if sub + 1 < count:
        return Place(*reading, bundle.number, sub + 1)
    return None if bundle.is_last else Place(*bundle.after, bundle.number + 1)


def _key(job: ChunkJob, place: Place) -> tuple[Any, ...]:
    return ("chunk", job.pass_number, job.number, *place)
