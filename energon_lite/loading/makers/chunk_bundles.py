"""Bundles: the items of a chunk that make up each of its batches, by a fixed number or by group."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from energon_lite.errors import FatalSampleError
from energon_lite.loading.makers.chunk_job import Carried, Item, Place
from energon_lite.loading.makers.chunk_run import BEHIND, ChunkRun, dropped, origins_of

__all__ = ["Bundle", "Bundler", "BundlesByCount", "BundlesByGroup", "begin_of"]

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
    begin: Place
    following: Place | None
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
                following = Place(*item.after, begin.bundle + (tail is None))
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
                yield Bundle(list(some), job.number, begin_of(number, run), Place(*item.after, number + 1))
                some.clear()
                number += 1
        rest = [some for _, some in groups.values() if some]
        yield from _remainder(rest, begin_of(number, run), run, job.number)

    def _group(self, criterion: Any) -> tuple[Hashable, int]:
        """Return the key and the batch size of a group."""
        try:
            key, size = criterion
            hash(key)
        except (TypeError, ValueError):
            raise FatalSampleError(
                f"batch_group_criterion returned {criterion!r}",
                fix="return (key, batch size or None), with a key that can be hashed",
            ) from None
        if (size is None) == (self.size is None):
            raise FatalSampleError(
                f"batch_group_criterion gave group {key!r} batches of {size} samples, and the data set has "
                f"batch_size={self.size}",
                fix="let one of the two say it, and the other be None",
            )
        size = self.size if size is None else size
        if not isinstance(size, int) or size < 1:
            raise FatalSampleError(
                f"batch_group_criterion gave group {key!r} batches of {size!r} samples", fix="give at least 1"
            )
        return key, size


def begin_of(number: int, run: ChunkRun) -> Place:
    """Return the place at which a bundle begins, if whole chunks are needed."""
    first = run.job.first
    return Place(bundle=number, sub=first.sub if number == first.bundle else 0)


def _remainder(rest: list[list[Item]], first: Place, run: ChunkRun, chunk: int) -> Iterator[Bundle]:
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
        yield Bundle(items, chunk, begin, None if place + 1 == len(rest) else Place(*run.job.end, number + 1))
