"""Making the batches of one chunk: where the work is, what happened to samples so far, and how hooks are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from energon_lite.batching.set_digest import address_hash, address_hashes, part_hash
from energon_lite.errors import UnlikeError
from energon_lite.hooks import HookContext
from energon_lite.loading.makers.chunk_job import Carried, ChunkJob, Item, Origins, Reading
from energon_lite.loading.makers.hook_errors import returned_beside_yield, returned_nothing
from energon_lite.loading.makers.outcomes import Address, Failure, Mark, Outcome, Rejected, of_each
from energon_lite.loading.makers.sample_maker import SampleMaker
from energon_lite.loading.makers.sample_names import SampleNames
from energon_lite.order.hashing import MASK64

__all__ = ["BEHIND", "ChunkRun", "dropped", "origins_of"]

#: Behind all that any chunk has.
BEHIND: Reading = (1 << 62, 0, 0, 0)
#: Before all of them.
_BEFORE: Reading = (-1 << 62, 0, 0, 0)


class ChunkRun:
    """One run of a job. It collects outcomes until the next batch takes them along.

    Where a chunk is gone through a second time to get to its undelivered part, what happened before that part was
    told already.

    Args:
        job: the chunk, and where in it the run begins.
        samples: makes its samples.
        keep_remainder: what is left at the end becomes smaller batches.

    Attributes:
        context: of the hooks.
        at: where the work is.
        buffer: where the running buffer of packing began, or the first of those that push samples back into the next;
            None: there are no buffers.
        packs: packs that were made since there, before the running buffer.
        items: what the batch was made of that was made last.
        left: samples at the chunk's end that are in no pack, and go on to another chunk.
        is_end: what a selection pushed back is the end of what it was given, or nothing.
    """

    def __init__(self, job: ChunkJob, samples: SampleMaker, *, keep_remainder: bool = True):
        self.job = job
        self.samples = samples
        self.keep_remainder = keep_remainder
        self.context = samples.context()
        self.at: Reading = (0, 0, 0, 0)
        self.buffer: tuple[int, int] | None = None
        self.packs = 0
        self.items: Sequence[Item] = ()
        self.left: list[Item] = []
        self.is_end = True
        self._unit: int | None = None  # the position that is read for a buffer
        self._read: list[tuple[int, Outcome]] = []  # what happened while it was filled, by position
        self._hashes: dict[Address | None, int] | None = None  # of the addresses of the chunk's samples
        self._told: Reading = job.first.reading
        self._outcomes: list[Outcome] = [*job.carried.outcomes] if isinstance(job.carried, Carried) else []

    # -- hooks ----------------------------------------------------------------------------------------------------

    def of_chunk(self, tag: int, *origin: int, number: int) -> HookContext:
        """The context, moved to something of the chunk.

        Args:
            tag: keeps the hashes for different purposes apart.
            origin: tells it from others of the chunk.
            number: of the thing, for the index that hooks can ask for.
        """
        job = self.job
        index = (self.job.number << 20) + number
        return self.context.move(self.samples.seed, tag, job.pass_number, job.number, *origin, sample_index=index)

    def of_batch(self, tag: int, chunk: int, number: int, *origin: int) -> HookContext:
        """The context, moved to a batch: one of so many that begin in a chunk."""
        of_pass = self.job.pass_number
        index = chunk << 20 | number
        return self.context.move(self.samples.seed, tag, of_pass, chunk, number, *origin, batch_index=index)

    def of_sample(self, tag: int, address: Address, *origin: int) -> HookContext:
        """The context, moved to a sample."""
        leaf = self.samples.leaves[address[0]]
        index = address[1]
        epoch = address[2]
        sample_index = epoch * leaf.length + index
        return self.context.move(self.samples.seed, tag, leaf.key, epoch, index, *origin, sample_index=sample_index)

    def apply(self, hook: str, argument: Any, *, leaf: str = "*", name: str, origins: Origins) -> list[Any]:
        """The results of a hook: one, or none if it fails, or as many as it yields.

        Args:
            leaf, name: for messages: where the argument comes from, and what it is called.
            origins: addresses of the samples that the argument stands for.
        """
        function = getattr(self.samples.encoder, hook)
        guarded = self.samples.guarded
        names = name if leaf != "*" else SampleNames(name, origins, self.samples.leaves)
        results: list[Any] = []
        try:
            if hook in self.samples.hooks.generators:
                guarded(hook, leaf, names, argument, _drain, function, hook, argument, results)
            else:
                results.append(guarded(hook, leaf, names, argument, function, argument))
        except UnlikeError as unlike:
            raise unlike.named(names.keys if isinstance(names, SampleNames) else None) from None
        except Rejected as rejected:
            if not results:
                self.fail(rejected.failure, origins)
            elif not rejected.failure.skipped:  # a part of the sample is lost; it is delivered all the same
                self.fail(rejected.failure)
            return results
        if not results:
            self.fail(dropped(hook, "it yielded nothing", leaf=leaf, name=name), origins)
        return results

    # -- outcomes -------------------------------------------------------------------------------------------------

    def reads(self, unit: int) -> None:
        """A position of the chunk is read now."""
        if unit < 0:  # what is wrong with samples of an earlier chunk was told there
            self.at = _BEFORE
        elif self.buffer is None:
            self.at = (unit, 0, 0, 0)
        else:
            self.at = self._in_buffer(unit)
            self._unit = unit

    def _in_buffer(self, unit: int) -> Reading:
        """Where a position is read. One whose results began in the buffer before this one belongs to that buffer."""
        begin, item = self.buffer or (0, 0)
        return begin, item if unit > begin else 0, self.packs, 0

    def selects(self) -> int:
        """A buffer is filled: what happens from here on happens to its packs. Returns where :meth:`filled` has to put
        what happened before."""
        self._unit = None
        return len(self._outcomes)

    def filled(self, place: int, following: Sequence[int] | None = None) -> None:
        """What happened while the buffer was filled is told now; but what happened behind the place at which the
        following buffer begins is told with that one, since who goes on there reads it again.

        Args:
            place: what :meth:`selects` returned.
            following: position, and result of it, at which the following buffer begins; None: all is told.
        """
        end = 1 << 62 if following is None else following[0] + (following[1] > 0)
        self._outcomes[place:place] = [
            outcome for unit, outcome in self._read if unit < end and self._in_buffer(unit) >= self._told
        ]
        self._read = [(unit, outcome) for unit, outcome in self._read if unit >= end]

    def fail(self, failure: Failure, origins: Origins = (None,)) -> None:
        """These samples were skipped, failed, or were dropped."""
        if self._unit is not None:
            self._read += [(self._unit, outcome) for outcome in of_each(failure, origins)]
        elif self.at >= self._told:
            self._outcomes += of_each(failure, origins)

    def mark(self, mark: Mark, times: int) -> None:
        """Something befell so many samples that are delivered all the same."""
        if self.at >= self._told:
            self._outcomes += [mark] * times

    def fine(self) -> None:
        """A sample went well: failures are not in a row any more."""
        last = self._read[-1][1] if self._read else self._outcomes[-1] if self._outcomes else None
        if isinstance(last, Failure) and self._unit is not None:
            self._read.append((self._unit, Mark.FINE))
        elif isinstance(last, Failure):
            self._outcomes.append(Mark.FINE)

    def take(self, origins: Origins = ()) -> list[Outcome]:
        """All outcomes since the last time, and those of the samples that are delivered now."""
        outcomes = self._outcomes
        self._outcomes = []
        return outcomes + [None if origin is None else origin[0] for origin in origins]

    def has_outcomes(self) -> bool:
        """Whether there are any that were not taken."""
        return bool(self._outcomes)

    def digest(self, items: Sequence[Item], sub: int = 0) -> int:
        """That of a batch of items.

        Args:
            sub: its number, of the batches that were made of these items.
        """
        if (known := self._hashes) is None:
            found = address_hashes(*self.job.samples.columns()).tolist()
            known = self._hashes = dict(zip(self.job.samples.rows(), found, strict=True))
        total = 0
        get = known.get
        for item in items:  # quickly, as there are some for each batch
            part = item.result
            if part is None:
                part = item.start[3]
            if part or sub or item.more_of:
                wholes = [get(origin) or _hash_of(origin) for origin in (*item.origins, *item.more_of)]
                total += sum(part_hash(whole, part, sub) for whole in wholes if whole) if part or sub else sum(wholes)
                continue
            for origin in item.origins:
                total += get(origin) or _hash_of(origin)
        return total & MASK64


def _hash_of(address: Address | None) -> int:
    """Of a sample that is not the chunk's own; 0 for one that is not known, or counted elsewhere."""
    return 0 if address is None or address[0] < 0 else address_hash(*address[:3])


def origins_of(items: Sequence[Item]) -> Origins:
    """The addresses of all samples that items stand for."""
    return [origin for item in items for origin in item.origins]


def dropped(stage: str, reason: str, *, leaf: str = "*", name: str) -> Failure:
    """The outcome of a sample with which nothing is wrong, but which goes nowhere."""
    return Failure(leaf, name, stage, reason, skipped=True, dropped=True)


def _drain(function: Callable[[Any], Iterator[Any]], hook: str, argument: Any, results: list[Any]) -> int:
    made = function(argument)
    while True:
        try:
            result = next(made)
        except StopIteration as end:
            if end.value is not None:
                raise returned_beside_yield(hook, function, end.value) from None
            return len(results)
        if result is None:
            raise returned_nothing(hook, function, verb="yielded")
        results.append(result)  # kept even if the next one fails
