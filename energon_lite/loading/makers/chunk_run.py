"""A run of a chunk's job: its progress, the outcomes of samples so far, and the calls of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from energon_lite.batching.digests import address_hash, address_hashes, part_hash
from energon_lite.errors import UnlikeError
from energon_lite.hooks import HookContext
from energon_lite.loading.makers.chunk_job import Carried, ChunkJob, Item, Origins, Reading
from energon_lite.loading.makers.hook_errors import NEVER_A_RESULT, check_result, returned_beside_yield
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import SampleNames
from energon_lite.loading.makers.outcomes import Address, Failure, Mark, Outcome, Rejected, of_each
from energon_lite.order.hashing import MASK64

#: Place after all places of any chunk.
BEHIND: Reading = (1 << 62, 0, 0, 0)
#: Place before all places of any chunk.
_BEFORE: Reading = (-1 << 62, 0, 0, 0)


class ChunkRun:
    """One run of a job. It collects outcomes until they are taken with the next batch.

    If a chunk is run a second time to reach its undelivered part, the outcomes before that part have been reported.

    Args:
        job: the chunk, and the place in it at which the run begins.
        runner: the runner of the job.
        keep_remainder: the remainder at the chunk's end becomes smaller batches.

    Attributes:
        context: context of the hooks.
        at: the current place.
        buffer: place of the running buffer of packing, or of the first buffer that pushed samples back into the next;
            None: there are no buffers.
        packs: packs that were made since that place, before the running buffer.
        items: items of the batch that was made last.
        outcomes: outcomes that were not taken yet.
        left: samples at the chunk's end that are in no pack and are handed over.
        is_end: the samples that a selection pushed back are the last ones of its buffer, or there are none.
    """

    def __init__(self, job: ChunkJob, runner: JobRunner, *, keep_remainder: bool = True):
        self.job = job
        self.runner = runner
        self.keep_remainder = keep_remainder
        self.context = runner.context()
        self.at: Reading = (0, 0, 0, 0)
        self.buffer: tuple[int, int] | None = None
        self.packs = 0
        self.items: Sequence[Item] = ()
        self.left: list[Item] = []
        self.is_end = True
        self._unit: int | None = None  # the position that is being read for a buffer
        self._read: list[tuple[int, Outcome]] = []  # outcomes while the buffer was filled, with their positions
        self._hashes: dict[Address | None, int] | None = None  # hash of each address of the chunk's samples
        self._told: Reading = job.first.reading
        self.outcomes: list[Outcome] = [*job.carried.outcomes] if isinstance(job.carried, Carried) else []

    # -- hooks ----------------------------------------------------------------------------------------------------

    def of_chunk(self, tag: int, *origin: int, number: int) -> HookContext:
        """Move the context to an object of the chunk.

        Args:
            tag: tag that separates the hashes of different purposes.
            origin: numbers that identify the object in the chunk.
            number: number of the object, for the sample index of the hooks.
        """
        job = self.job
        index = (self.job.number << 20) + number
        return self.context.move(self.runner.seed, tag, job.pass_number, job.number, *origin, sample_index=index)

    def of_batch(self, tag: int, chunk: int, number: int, *origin: int) -> HookContext:
        """Move the context to a batch, given the chunk in which it begins and its number there."""
        of_pass = self.job.pass_number
        index = chunk << 20 | number
        return self.context.move(self.runner.seed, tag, of_pass, chunk, number, *origin, batch_index=index)

    def of_sample(self, tag: int, address: Address, *origin: int) -> HookContext:
        """Move the context to a sample."""
        return self.runner.move(self.context, address[:3], *origin, tag=tag)

    def apply(self, hook: str, argument: Any, *, leaf: str = "*", name: str, origins: Origins) -> list[Any]:
        """Return the results of a hook: one, none if it fails, or any number if it is a generator.

        Args:
            leaf, name: for messages: the leaf of the argument, and its name.
            origins: addresses of the samples that the argument consists of.
        """
        function = getattr(self.runner.encoder, hook)
        guarded = self.runner.guarded
        names = name if leaf != "*" else SampleNames(name, origins, self.runner.leaves)
        results: list[Any] = []
        try:
            if hook in self.runner.hooks.generators:
                guarded(hook, leaf, names, argument, _drain, function, hook, argument, results, names)
            else:
                results.append(guarded(hook, leaf, names, argument, function, argument))
        except UnlikeError as unlike:
            raise unlike.named(names.keys if isinstance(names, SampleNames) else None) from None
        except Rejected as rejected:
            if not results:
                self.fail(rejected.failure, origins)
            elif not rejected.failure.skipped:  # a part of the sample is lost; the rest is delivered
                self.fail(rejected.failure)
            return results
        if not results:
            self.fail(dropped(hook, "it yielded nothing", leaf=leaf, name=name), origins)
        return results

    # -- outcomes -------------------------------------------------------------------------------------------------

    def reads(self, unit: int) -> None:
        """Note that a position of the chunk is read."""
        if unit < 0:  # outcomes of samples of an earlier chunk were reported there
            self.at = _BEFORE
        elif self.buffer is None:
            self.at = (unit, 0, 0, 0)
        else:
            self.at = self._in_buffer(unit)
            self._unit = unit

    def _in_buffer(self, unit: int) -> Reading:
        """Return the place, in the running buffer, of a position that is read; in the buffer before it, if that one has
        the first results of the position."""
        begin, item = self.buffer or (0, 0)
        return begin, item if unit > begin else 0, self.packs, 0

    def selects(self) -> int:
        """Note that a buffer is full: outcomes from here on are those of its packs. Return the index at which
        :meth:`filled` inserts the outcomes of filling it."""
        self._unit = None
        return len(self.outcomes)

    def filled(self, place: int, following: Sequence[int] | None = None) -> None:
        """Report the outcomes of filling a buffer. Outcomes after the place at which the next buffer begins are
        reported with that one, because a run that is resumed there reads their samples again.

        Args:
            place: the return value of :meth:`selects`.
            following: position, and result of it, at which the next buffer begins; None: report all outcomes.
        """
        end = 1 << 62 if following is None else following[0] + (following[1] > 0)
        self.outcomes[place:place] = [
            outcome for unit, outcome in self._read if unit < end and self._in_buffer(unit) >= self._told
        ]
        self._read = [(unit, outcome) for unit, outcome in self._read if unit >= end]

    def fail(self, failure: Failure, origins: Origins = (None,)) -> None:
        """Record that samples were skipped, failed, or were dropped."""
        if self._unit is not None:
            self._read += [(self._unit, outcome) for outcome in of_each(failure, origins)]
        elif self.at >= self._told:
            self.outcomes += of_each(failure, origins)

    def mark(self, mark: Mark, times: int) -> None:
        """Record a mark for a number of samples that are delivered nevertheless."""
        if self.at >= self._told:
            self.outcomes += [mark] * times

    def reset(self) -> None:
        """Record that a sample went well, which ends a row of failures."""
        last = self._read[-1][1] if self._read else self.outcomes[-1] if self.outcomes else None
        if isinstance(last, Failure) and self._unit is not None:
            self._read.append((self._unit, Mark.FINE))
        elif isinstance(last, Failure):
            self.outcomes.append(Mark.FINE)

    def take(self, origins: Origins = ()) -> list[Outcome]:
        """Return all outcomes since the last call, and those of the samples that are delivered now."""
        outcomes = self.outcomes
        self.outcomes = []
        return outcomes + [None if origin is None else origin[0] for origin in origins]

    def digest(self, items: Sequence[Item], sub: int = 0) -> int:
        """Return the digest of a batch of items.

        Args:
            sub: number of the batch among those that were made of these items.
        """
        if (known := self._hashes) is None:
            hashes = address_hashes(*self.job.samples.columns()).tolist()
            known = self._hashes = dict(zip(self.job.samples.rows(), hashes, strict=True))
        total = 0
        get = known.get
        for item in items:  # this loop is run for every batch, so it must be fast
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
    """Return the hash of a sample outside the chunk; 0 if its address is not known, or if it is counted elsewhere."""
    return 0 if address is None or address[0] < 0 else address_hash(*address[:3])


def origins_of(items: Sequence[Item]) -> Origins:
    """Return the addresses of all samples that items consist of."""
    return [origin for item in items for origin in item.origins]


def dropped(stage: str, reason: str, *, leaf: str = "*", name: str) -> Failure:
    """Return the outcome of a valid sample that gets into no batch."""
    return Failure(leaf, name, stage, reason, skipped=True, dropped=True)


def _drain(
    function: Callable[[Any], Iterator[Any]], hook: str, argument: Any, results: list[Any], names: SampleNames | str
) -> int:
    made = function(argument)
    while True:
        try:
            result = next(made)
        except StopIteration as end:
            if end.value is not None:
                raise returned_beside_yield(hook, function, end.value) from None
            return len(results)
        if type(result) in NEVER_A_RESULT or isinstance(result, BaseException):
            check_result(result, hook, function, f"{names}", verb="yielded")
        results.append(result)  # kept even if the next one fails
