"""A pipeline whose jobs leave lengths instead of batches."""

from __future__ import annotations

import numpy as np

from energon_lite.errors import UsageError
from energon_lite.hooks import HookContext, TaskEncoder, hook_context
from energon_lite.loading.makers.pipeline import Address, Failure, Job, Leaf, Outcome, Pipeline, Result
from energon_lite.loading.makers.sample_length import SampleLength
from energon_lite.storage.index.columns import FAILED, SKIPPED

__all__ = ["MeasuringPipeline"]

#: Keeps the randomness of lengths apart from that of samples.
_LENGTH = 33


class MeasuringPipeline(Pipeline):
    """Runs a chunk: each sample goes through the user's hooks up to ``encode_sample``, and leaves its length.

    Args:
        leaf: the data set.
        encoder: the user's hooks.
        length: from an encoded sample to its length.

    Raises:
        UsageError: a hook yields any number of samples for one.
    """

    def __init__(self, leaf: Leaf, encoder: TaskEncoder, length: SampleLength):
        super().__init__([leaf], encoder, seed=0, refill=False, batched=False)
        if self.hooks.content_decides:
            raise UsageError(
                f"a hook of {type(encoder).__name__} is a generator: a sample has no length of its own then",
                fix="measure with an encoder whose hooks return one sample for each",
            )
        self._length = length

    def sample(self, address: Address, attempt: int = 0) -> int:
        """The length of a sample."""
        encoded = super().sample(address, attempt)
        leaf = self.leaves[address[0]]
        name = leaf.source.key(address[1])
        with hook_context(HookContext(self.seed, _LENGTH, leaf.key, *address[1:]), seeds=False):
            length: int = self._guarded("sample_length", leaf.name, name, encoded, self._length, encoded)
        return length

    def run(self, job: Job) -> Result:
        """The lengths and flags of a chunk as arrays, with the failures in it."""
        lengths, flags = np.zeros(len(job.addresses), dtype=np.int64), np.zeros(len(job.addresses), dtype=np.uint8)
        failures: list[Outcome] = []
        for place, address in enumerate(job.addresses):
            one = super().run(Job(0, address[1], (address,)))
            failure = one.outcomes[0]
            if isinstance(failure, Failure):
                flags[place] = SKIPPED if failure.skipped else FAILED
                failures.append(failure)
            else:
                lengths[place] = one.batch
        return Result((lengths, flags), failures)
