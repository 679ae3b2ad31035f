"""Runs jobs that leave lengths instead of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.hooks import HookContext, TaskEncoder, hooks_of
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address, Outcome, Rejected, Result
from energon_lite.loading.makers.pipeline import Job
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.loading.makers.sample_maker import SampleMaker
from energon_lite.storage.index.columns import FAILED, SKIPPED

__all__ = ["MeasuringPipeline"]

#: Keeps the randomness of lengths apart from that of samples.
_LENGTH = 33


class MeasuringPipeline:
    """Runs a chunk: each sample goes through the user's hooks up to ``encode_sample``, and leaves its length.

    Args:
        leaf: the data set.
        encoder: the user's hooks.
        length: from an encoded sample to its length.

    Raises:
        UsageError: a hook yields any number of samples for one.
    """

    def __init__(self, leaf: Leaf, encoder: TaskEncoder, length: SampleLength):
        hooks = hooks_of(encoder, packing=False, batched=False)
        if hooks.content_decides:
            raise UsageError(
                f"a hook of {type(encoder).__name__} is a generator: a sample has no length of its own then",
                fix="measure with an encoder whose hooks return one sample for each",
            )
        self.samples = SampleMaker([leaf], encoder, hooks, seed=0)
        self.leaves, self.encoder = (leaf,), encoder
        self._length = length

    def run(self, job: Job) -> Result:
        """The lengths and flags of a chunk as arrays, with the failures in it."""
        lengths, flags = np.zeros(len(job.addresses), dtype=np.int64), np.zeros(len(job.addresses), dtype=np.uint8)
        failures: list[Outcome] = []
        with HookContext() as context:
            for place, found in enumerate(self._lengths(job.addresses, context)):
                if isinstance(found, Rejected):
                    flags[place] = SKIPPED if found.failure.skipped else FAILED
                    failures.append(found.failure.at(job.addresses[place]))
                else:
                    lengths[place] = found
        return Result((lengths, flags), failures)

    def _lengths(self, addresses: Sequence[Address], context: HookContext) -> Iterator[int | Rejected]:
        """The length of each sample, or why there is none."""
        (leaf,) = self.leaves
        for address, encoded in zip(addresses, self.samples.make(addresses, context), strict=True):
            if type(encoded) is Rejected:
                yield encoded
                continue
            name = leaf.source.key(address[1])
            context.move(self.samples.seed, _LENGTH, leaf.key, *address[1:])
            try:
                yield self.samples.guarded("sample_length", leaf.name, name, encoded, self._length, encoded)
            except Rejected as rejected:
                yield rejected
