"""Decision which bucket is reduced next, by local counts of gradients and micro-batches.

A step consists of *rounds*: one for each micro-batch, or one for all of them. In each round, each bucket is reduced
once, in the order of the queue on all ranks: the collectives match in any order of gradients. The first step shows the
order of the queue, and the number of gradients of each parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.buckets import Bucket
from energon_lite.trainer.parallel.mesh import ParallelMesh


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
        if self._launched >= self.count * len(self._queue):
            return None
        done, number = divmod(self._launched, len(self._queue))
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


class AgreedCount:
    """Check that a step has equal numbers of micro-batches on all data-parallel ranks; otherwise they would deadlock.

    The ranks exchange it over the CPU when a step begins, and wait for the result before the first reduction, so no
    device waits.

    Args:
        mesh: the ranks. All of them must make one.
    """

    def __init__(self, mesh: ParallelMesh):
        self._group = mesh.group("numbers")
        if self._group is not None and mesh.device.type == "cuda":
            ranks = mesh.groups("dp", "cp")
            self._group = dist.new_subgroups_by_enumeration(ranks, timeout=mesh.timeout, backend="gloo")[0]
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, micro_batches: int) -> None:
        """Start to compare the number of micro-batches of a step. Every data-parallel rank must call it."""
        if self._group is not None:
            most = torch.tensor([micro_batches, -micro_batches])
            self._asked = most, dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def check(self) -> None:
        """Wait for the result of a comparison, if one was started.

        Raises:
            UsageError: on all data-parallel ranks: their numbers differ.
        """
        if self._asked is not None:
            most, work = self._asked
            self._asked = None
            work.wait()
            counts = most.numpy()  # in host memory: no device is involved
            high, low = int(counts[0]), -int(counts[1])
            if high != low:
                what = f"a step has {low} micro-batches on one data-parallel rank and {high} on another"
                raise UsageError(what, fix="give each as many; add empty ones where data has ended")


class FirstStep:
    """Record of the gradients of the first step.

    Attributes:
        uses: the most gradients that a parameter had in one micro-batch.
        position: latest position of a parameter's last gradient in a micro-batch; with several chunks of layers, in the
            step.
        entered: parameters whose modules were called.
    """

    def __init__(self) -> None:
        self.uses: dict[nn.Parameter, int] = {}
        self.position: dict[nn.Parameter, int] = {}
        self.entered: set[nn.Parameter] = set()
        self._now: Counter[nn.Parameter] = Counter()
        self._number = 0

    def saw(self, parameter: nn.Parameter) -> None:
        """Record the arrival of a gradient."""
        self._now[parameter] += 1
        self._number += 1
        self.position[parameter] = max(self._number, self.position.get(parameter, 0))

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """Close a micro-batch, or the pass of one chunk of layers, whose parameters are ``of``."""
        self.uses |= {p: max(count, self.uses.get(p, 0)) for p, count in self._now.items()}
        self.forget()
        self._number = 0 if of is None else self._number

    def forget(self) -> None:
        """Drop the gradients of the micro-batch that has not ended."""
        self._now.clear()

    def order(self, buckets: Sequence[Bucket]) -> list[int]:
        """Return the numbers of the buckets in the order in which their last gradients come.

        Buckets with a parameter that had no gradient come last, where they delay no other.
        """
        latest = [max(self.position.get(slot.parameter, 2**63) for slot in bucket.slots) for bucket in buckets]
        return sorted(range(len(buckets)), key=latest.__getitem__)
