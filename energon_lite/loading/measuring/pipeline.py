"""Runs jobs that leave lengths, and other numbers, instead of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.part_columns.part_columns import PartColumns
from energon_lite.hooks import HookContext, TaskEncoder, hooks_of
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Outcome, Rejected, Result
from energon_lite.loading.makers.pipeline import Job
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.makers.sample_maker import SampleMaker
from energon_lite.loading.measuring.values import Costs, Values, columns_of
from energon_lite.storage.index.columns import FAILED, SKIPPED

__all__ = ["MeasuringPipeline"]

#: Keeps the randomness of lengths apart from that of samples.
_LENGTH = 33


class MeasuringPipeline:
    """Runs a chunk: each sample goes through the user's hooks up to ``encode_sample``, and leaves its length, and what
    the encoder's ``sample_costs`` says of it, if it has such a method.

    Args:
        leaf: the data set.
        encoder: the user's hooks.
        length: from an encoded sample to its length.
        parts: columns that are made of parts as they are stored, beside these.

    Raises:
        UsageError: a hook yields any number of samples for one.
    """

    def __init__(self, leaf: Leaf, encoder: TaskEncoder, length: SampleLength, parts: PartColumns | None = None):
        hooks = hooks_of(encoder, packing=False, batched=False)
        if hooks.content_decides:
            raise UsageError(
                f"a hook of {type(encoder).__name__} is a generator: a sample has no length of its own then",
                fix="measure with an encoder whose hooks return one sample for each",
            )
        self.samples = SampleMaker([leaf], encoder, hooks, seed=0)
        self.leaves = (leaf,)
        self.encoder = encoder
        self._length = length
        self._parts = parts
        self._costs: Callable[[Any], Costs] | None = getattr(encoder, "sample_costs", None)

    def run(self, job: Job) -> Result:
        """What was measured of a chunk, as :class:`Values`, with the failures in it."""
        measured = Values.zeros(len(job.addresses))
        costs = list[Costs | None]()
        failures: dict[int, Outcome] = {}
        with HookContext() as context:
            for place, found in enumerate(self._measured(job.addresses, context)):
                costs.append(None)
                if isinstance(found, Rejected):
                    measured.flags[place] = SKIPPED if found.failure.skipped else FAILED
                    failures[place] = found.failure.at(job.addresses[place])
                else:
                    measured.lengths[place], costs[place] = found
        measured.columns, measured.ragged = columns_of(costs, type(self.encoder).__name__)
        if self._parts is not None:
            self._add_parts(job, self._parts, measured, failures)
        return Result(measured, [failures[place] for place in sorted(failures)])

    def _add_parts(self, job: Job, parts: PartColumns, measured: Values, failures: dict[int, Outcome]) -> None:
        (leaf,), first = self.leaves, job.addresses[0][1]
        found = parts.values(first, first + len(job.addresses))
        measured.columns |= found.columns
        measured.ragged |= found.ragged
        for place, error in found.broken.items():
            if place in failures:
                continue
            try:
                self.samples.guarded("read", leaf.name, leaf.source.key(first + place), None, _raise, error)
            except Rejected as rejected:
                measured.flags[place] = FAILED
                failures[place] = rejected.failure.at(job.addresses[place])

    def _measured(
        self, addresses: Sequence[Address], context: HookContext
    ) -> Iterator[tuple[int, Costs | None] | Rejected]:
        """The length of each sample, with its costs, or why there is none."""
        (leaf,) = self.leaves
        for address, encoded in zip(addresses, self.samples.make(addresses, context), strict=True):
            if type(encoded) is Rejected:
                yield encoded
                continue
            name = leaf.source.key(address[1])
            context.move(self.samples.seed, _LENGTH, leaf.key, *address[1:])
            try:
                length = self.samples.guarded("sample_length", leaf.name, name, encoded, self._length, encoded)
                costs = None
                if self._costs is not None:
                    costs = self.samples.guarded("sample_costs", leaf.name, name, encoded, self._costs, encoded)
                yield length, costs
            except Rejected as rejected:
                yield rejected


def _raise(error: Exception) -> None:
    raise error
