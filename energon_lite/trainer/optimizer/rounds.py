"""Decision which bucket is reduced next, by local counts of gradients and micro-batches.

A step consists of *rounds*: one for each micro-batch, or one for all of them. In each round, each bucket is reduced
once, in the order of the queue on all ranks: the collectives match in any order of gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from energon_lite.trainer.optimizer.overlapped_optimizer import Bucket


class Rounds:
    """Counts of gradients and micro-batches of one step.

    Args:
        parameters: the parameters of all buckets.

    Attributes:
        uses: number of gradients of a parameter in one micro-batch, as observed in the first step.
        learning: True in the first step. Buckets that are reduced in place then wait until their round is complete.
        promised: announced number of micro-batches of the step; None if not announced.
        count: number of rounds of the step.
        fired: number of gradients of each parameter in this step.
        passed: number of finished micro-batches of each parameter. A gradient missing in a finished one will not come.
        per_round: micro-batches per round. So a parameter is ready for round ``r``, counted from 0, if
            ``fired >= (r + 1) * per_round * uses``, and the round is complete when ``passed >= (r + 1) * per_round``.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.uses = dict.fromkeys(parameters, 1)
        self.learning = True

    def start(self, micro_batches: int | None, queue: Sequence[Bucket], *, every: bool) -> None:
        """Start a step with ``micro_batches`` micro-batches; with ``every``, each is a round."""
        self.promised = micro_batches
        self._queue = queue
        self._launched = 0
        self.count, self.per_round = (micro_batches, 1) if every and micro_batches else (1, micro_batches or 2**63)
        self.fired = dict.fromkeys(self.uses, 0)
        self.passed = self.fired.copy()
        for bucket in queue:
            bucket.arrived = bucket.reduced = 0

    def end_micro_batch(self, of: Collection[nn.Parameter] | None) -> None:
        """Count a finished micro-batch for all parameters, or ``of`` these."""
        for p in self.uses if of is None else self.uses.keys() & of:
            self.passed[p] += 1
            self.fired[p] = max(self.fired[p], self.passed[p] * self.uses[p])

    @property
    def complete(self) -> int:
        """Number of rounds in which no gradient can come any more."""
        return min(self.passed.values(), default=0) // self.per_round

    def next(self, complete: int = 0) -> int | None:
        """Return the queue number of the next bucket, and count it as reduced; None if it is not ready or none is left.

        A bucket is also ready if its round is below ``complete``.
        """
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
        # A reduction in place needs complete gradients, and the first step does not know yet how many gradients come.
        return not (self.learning and bucket.in_place)
