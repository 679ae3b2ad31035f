"""Which items of a chunk make up each of its batches: so many in a row, or so many of the same group."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from energon_lite.errors import FatalSampleError
from energon_lite.loading.makers.chunk_job import Carried, Item, Place
from energon_lite.loading.makers.chunk_run import BEHIND, ChunkRun, dropped, origins_of

__all__ = ["Bundle", "Bundler", "BundlesByCount", "BundlesByGroup", "begin_of"]

#: Keeps the hashes for different purposes apart.
_GROUP = 15


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


class Bundler(Protocol):
    """Puts the items of a chunk together."""

    def bundles(self, items: Iterator[Item], run: ChunkRun) -> Iterator[Bundle]:
        """What makes up each batch, from the job's first one on."""


@dataclass(frozen=True)
class BundlesByCount:
    """Bundles of ``size`` items, one after the other; first the one that was handed over is filled."""

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
    """Bundles of items of the same group, as ``batch_group_criterion`` says.

    Args:
        size: items in each; None: as the criterion says.
    """

    size: int | None

    def bundles(self, items: Iterator[Item], run: ChunkRun) -> Iterator[Bundle]:
        job = run.job
        number = 0
        groups: dict[Hashable, tuple[int, list[Item]]] = {}
        for item in items:
            run.at = item.start
            with run.of_chunk(_GROUP, *item.start, number=item.start[0]):
                found = run.apply("batch_group_criterion", item.value, name="a sample", origins=item.origins)
            if not found:
                continue
            key, size = self._group(found[0])
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
        """Key and batch size of a group."""
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
    """Where a bundle begins, if whole chunks are needed."""
    first = run.job.first
    return Place(bundle=number, sub=first.sub if number == first.bundle else 0)


def _remainder(rest: list[list[Item]], first: Place, run: ChunkRun, chunk: int) -> Iterator[Bundle]:
    """What is left at the end of ``chunk``; the first of these bundles begins at ``first``."""
    run.at = BEHIND  # what happens from here on was not told before
    if not run.keep_remainder:
        for items in rest:
            why = dropped("batch", "too few for a batch were left at the end of a chunk", name="a sample")
            run.fail(why, origins_of(items))
        return
    for place, items in enumerate(rest):
        number = first.bundle + place
        begin = begin_of(number, run) if place else first
        yield Bundle(items, chunk, begin, None if place + 1 == len(rest) else Place(*run.job.end, number + 1))
