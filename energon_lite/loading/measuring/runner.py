"""Runner whose jobs return lengths, and other numbers, in place of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.hooks import HookContext, TaskEncoder, hooks_of
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Outcome, Rejected, Result
from energon_lite.loading.measuring.values import ColumnReader, Costs, Values, columns_of
from energon_lite.order.hashing import HashDomain
from energon_lite.storage.index.columns import FAILED, LENGTH, SKIPPED

__all__ = ["MeasuringRunner"]

#: Tag that separates the randomness of lengths from that of samples.
_LENGTH = HashDomain.MEASURED_LENGTH.value


class MeasuringRunner(JobRunner):
    """Runner of chunks: each sample goes through the user's hooks up to ``encode_sample``. The result is its length,
    and the values of the encoder's ``sample_costs``, if it has such a method.

    Args:
        leaf: the leaf.
        encoder: the user's hooks.
        length: function that returns the length of an encoded sample; None: there is no column of lengths.
        parts: further columns, made of stored parts.

    Attributes:
        length: the function.

    Raises:
        UsageError: a hook is a generator.
    """

    def __init__(
        self, leaf: Leaf, encoder: TaskEncoder, length: Callable[[Any], int] | None, parts: ColumnReader | None = None
    ):
        hooks = hooks_of(encoder, packing=False, batched=False)
        if hooks.content_decides:
            raise UsageError(
                f"a hook of {type(encoder).__name__} is a generator: a sample has no length of its own then",
                fix="measure with an encoder whose hooks return one sample for each",
            )
        super().__init__([leaf], encoder, hooks, seed=0)
        self.length = length
        self._parts = parts
        self._costs: Callable[[Any], Costs] | None = getattr(encoder, "sample_costs", None)

    def run(self, job: Job) -> Result:
        """Return the values of a chunk, as :class:`Values`, with its failures."""
        measured = Values.zeros(len(job.addresses))
        lengths = np.zeros(len(job.addresses), dtype=np.int64)
        costs = list[Costs | None]()
        failures: dict[int, Outcome] = {}
        with HookContext() as context:
            outcomes = repeat((0, None)) if self.length is None else self._measured(self.length, job.addresses, context)
            for place, outcome in zip(range(len(job.addresses)), outcomes, strict=False):
                costs.append(None)
                if isinstance(outcome, Rejected):
                    measured.flags[place] = SKIPPED if outcome.failure.skipped else FAILED
                    failures[place] = outcome.failure.at(job.addresses[place])
                else:
                    lengths[place], costs[place] = outcome
        measured.columns = columns_of(costs, type(self.encoder).__name__)
        if self.length is not None:
            measured.columns[LENGTH] = lengths
        if self._parts is not None:
            self._add_parts(job, self._parts, measured, failures)
        return Result(measured, [failures[place] for place in sorted(failures)])

    def _add_parts(self, job: Job, parts: ColumnReader, measured: Values, failures: dict[int, Outcome]) -> None:
        (leaf,) = self.leaves
        first = job.addresses[0][1]
        broken: dict[int, Exception] = {}
        parts.add(first, first + len(job.addresses), measured, broken)
        for place, error in broken.items():
            if place in failures:
                continue
            try:
                self.guarded("read", leaf.name, leaf.source.key(first + place), None, _raise, error)
            except Rejected as rejected:
                measured.flags[place] = FAILED
                failures[place] = rejected.failure.at(job.addresses[place])

    def _measured(
        self, length: Callable[[Any], int], addresses: Sequence[Address], context: HookContext
    ) -> Iterator[tuple[int, Costs | None] | Rejected]:
        """Yield the length of each sample, with its costs, or its failure."""
        (leaf,) = self.leaves
        for address, encoded in zip(addresses, self.make(addresses, context), strict=True):
            if type(encoded) is Rejected:
                yield encoded
                continue
            name = leaf.source.key(address[1])
            context.move(self.seed, _LENGTH, leaf.key, *address[1:])
            try:
                number = self.guarded("sample_length", leaf.name, name, encoded, length, encoded)
                costs = None
                if self._costs is not None:
                    costs = self.guarded("sample_costs", leaf.name, name, encoded, self._costs, encoded)
                yield number, costs
            except Rejected as rejected:
                yield rejected


def _raise(error: Exception) -> None:
    raise error
