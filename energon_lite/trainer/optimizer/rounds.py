"""Which bucket may be reduced next: counting of gradients and micro-batches, without a word to other ranks.

A step is made of *rounds*: one for each micro-batch, or one for all of them. In each round each bucket is reduced once,
and always in the order of the queue, on all ranks: whatever order their gradients come in, their collectives match.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from energon_lite.trainer.optimizer.overlapped_optimizer import Bucket


class Rounds:
    """The counts of one step.

    Args:
        parameters: of all buckets.

    Attributes:
        uses: how many gradients a parameter gives in one micro-batch, as the first step has shown.
        learning: it is the first step. Nothing that is reduced in place leaves then before its round is complete.
        promised: micro-batches of the step; None if nobody has said.
        count: rounds of the step.
        fired: gradients of each parameter that came in this step.
        passed: micro-batches of each parameter that have ended. A gradient that did not come in one will not come.
        per_round: micro-batches that a round is made of. So a parameter is ready for round ``r``, counted from 0, when
            ``fired >= (r + 1) * per_round * uses``, and the round is complete when ``passed >= (r + 1) * per_round``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.uses = dict.fromkeys(parameters, 1)
        self.learning = True

    def start(self, micro_batches: int | None, queue: Sequence[Bucket], *, every: bool) -> None:
        """A step begins, with so many micro-batches; with ``every``, each is a round."""
        self.promised, self._queue, self._launched = micro_batches, queue, 0
        self.count, self.per_round = (micro_batches, 1) if every and micro_batches else (1, micro_batches or 2**63)
        self.fired = dict.fromkeys(self.uses, 0)
        self.passed = self.fired.copy()
        for bucket in queue:
            bucket.arrived = bucket.reduced = 0

    def end_micro_batch(self, of: Collection[nn.Parameter] | None) -> None:
        """One has ended, for all parameters or ``of`` these."""
        for p in self.uses if of is None else self.uses.keys() & of:
            self.passed[p] += 1
            self.fired[p] = max(self.fired[p], self.passed[p] * self.uses[p])

    @property
    def complete(self) -> int:
        """Rounds in which no gradient can come any more."""
        return min(self.passed.values(), default=0) // self.per_round

    def next(self, complete: int = 0) -> int | None:
        """The bucket whose turn it is, by its number in the queue, if it is ready or its round is ``complete``; None
        if that has to be waited for, or if there is none left. It counts as reduced."""
        done, number = divmod(self._launched, max(len(self._queue), 1))
        if self._launched >= self.count * len(self._queue):
            return None
        bucket = self._queue[number]
        if done >= complete and not self._is_ready(bucket, (done + 1) * self.per_round):
            return None
        self._launched += 1
        bucket.arrived, bucket.reduced = 0, bucket.reduced + 1
        return number

    def _is_ready(self, bucket: Bucket, micro_batches: int) -> bool:
        while bucket.arrived < len(bucket.slots):
            p = bucket.slots[bucket.arrived].parameter
            if self.fired[p] < micro_batches * self.uses[p]:
                return False
            bucket.arrived += 1
        # What is reduced in place must be complete, and the first step does not know yet how many gradients come.
        return not (self.learning and bucket.in_place)
