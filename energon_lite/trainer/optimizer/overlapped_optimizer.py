"""AdamW or SGD whose state is cut over the data-parallel ranks, and whose communication hides behind computation.

    forward    layer 0   layer 1   layer 2  |  backward   layer 2   layer 1   layer 0  |  step
    gather   █ bucket 2  █ 1       █ 0      |  reduce               █ 0       █ 1      | █ 2    update 2, 1, 0

Parameters live in flat buffers, in the order in which their gradients come: about the reverse of that in which they
are used. A buffer is a row of *buckets*, and each bucket is cut into equal *slices*, one per data-parallel rank:

    bucket 0                   bucket 1
    | rank 0 | rank 1 |        | rank 0     | rank 1     |     a collective moves a bucket
    | w5   ·   w4  b5 |        | w3      ·    w2   b3 b2 |     a rank updates its slice of each

A slice does not care where parameters begin, so no size must divide by any other. Matrices come first in a bucket,
because only they are decayed: a slice is then at most two runs of numbers for the fused kernel.

``reduce="last"`` (ZeRO-1) adds gradients up on each rank and reduces the sum, behind the last backward pass;
``reduce="every"`` (ZeRO-2) reduces behind each pass, so that a rank holds whole gradients of a few buckets only.

The scheme is Megatron-LLaMA's OverlappedDistributedOptimizer, after ZeRO (Rajbhandari et al., arXiv:1910.02054), with
Megatron-Core's padded buckets, reduced in place. ``docs/optimizer.md`` says what differs, and why.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.bucket_plan import BucketPlan, Kind, Named, Slot, plan_buckets
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.gradient_order import FirstStep, agree_on_order
from energon_lite.trainer.optimizer.optimizer import Optimizer, sum_partial
from energon_lite.trainer.optimizer.parameter_hooks import hook_parameters
from energon_lite.trainer.optimizer.partition import Partition
from energon_lite.trainer.parallel import single_tensor
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.shards import reshard

_IN_FLIGHT = 3  # reductions under way before their memory is waited for: one on the wire, others if it is late


class Bucket:
    """Parameters whose gradients one collective reduces, and whose values one collective gathers.

    ``values`` and ``grads`` are laid out by ``slots``, and this rank owns ``share`` of them; ``grads`` is None while no
    gradient has come (ZeRO-2). The parameters move into ``values``.
    """

    def __init__(self, plan: BucketPlan, kind: Kind, values: Tensor, grads: Tensor | None, config: OptimizerConfig):
        self.plan, self.slots, self.share = plan, plan.slots, plan.share
        self.kind, self.values, self.grads, self.in_place = kind, values, grads, grads is not None
        for slot in self.slots:
            slot.of(values).copy_(slot.parameter.data)
            slot.parameter.data = slot.of(values)
        wide = torch.promote_types(kind.grad_dtype, torch.float32)
        total = torch.zeros_like(values[self.share], dtype=wide) if grads is None else grads[self.share]
        self.owned = Partition(values[self.share], total, self.share.start, plan.decayed, config)
        self.filled: set[nn.Parameter] = set()  # those whose gradients are in ``grads``
        self.arrived = 0  # how many slots are known to be ready for the next reduction
        self.reduced = self.collected = 0  # reductions of this step that were launched, and that are done
        self.gathering: dist.Work | None = None

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Begin to fetch the values of all slices."""
        if group is not None:
            self.gathering = single_tensor.all_gather(self.values, self.values[self.share], group=group, async_op=True)

    def wait(self) -> None:
        """Until they are there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


class ParameterBuffer:
    """One tensor for all parameters of a kind, in the order of their gradients, and the buckets it is cut into."""

    def __init__(self, named: list[Named], kind: Kind, ranks: int, rank: int, config: OptimizerConfig):
        plans = plan_buckets(named, config.bucket_size or max(40_000_000, 1_000_000 * ranks), ranks, rank)
        sizes = [plan.size for plan in plans]
        self.values = torch.zeros(sum(sizes), dtype=kind.dtype, device=named[0][1].device)
        in_place = config.reduce == "last" or ranks == 1  # who is alone has no reason to reduce often
        self.grads = torch.zeros_like(self.values, dtype=kind.grad_dtype) if in_place else None
        grads = [None] * len(sizes) if self.grads is None else self.grads.split(sizes)
        parts = zip(plans, self.values.split(sizes), grads, strict=True)
        self.buckets = [Bucket(plan, kind, values, grad, config) for plan, values, grad in parts]


class OverlappedDistributedOptimizer(Optimizer):
    """AdamW or SGD over slices of buckets, with its communication behind the model's computation.

    Gradients are summed over ranks, never averaged: divide the loss by the tokens of the whole step. A parameter's
    ``grad`` is None after a backward pass, for it has moved into a bucket; a parameter without one counts as zeros.
    Freeze parameters before making the optimizer. Forward passes and state dicts wait for current values by
    themselves; who reads parameters in another way calls :meth:`wait_parameters` first.

    Args:
        model: its trainable parameters have layouts (:func:`layout_of`); their memory moves into the buffers.
        mesh: the ranks. All of them call the same methods in the same order.
        config: the constants, ``bucket_size``, ``reduce`` and ``grad_dtype``.

    Example:
        >>> optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(reduce="every"))
        >>> optimizer.begin_step(len(micro_batches))
        >>> for batch in micro_batches:
        ...     loss(batch).backward()
        ...     optimizer.end_micro_batch()
        >>> grad_norm = optimizer.step(lr=1e-3)
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh, config: OptimizerConfig):
        super().__init__(model, mesh, config)
        self._group = mesh.data_group
        self._at: dict[nn.Parameter, tuple[Bucket, Slot]] = {}
        self._queue: list[Bucket] = []  # in the order of reduction; gathered in reverse
        self._uses = dict.fromkeys(self.parameters.values(), 1)  # gradients in a micro-batch
        self._outsiders: set[nn.Parameter] = set()  # those that are used although their modules are not called
        self._first_step: FirstStep | None = FirstStep()
        self._in_flight: deque[tuple[Bucket, Tensor, dist.Work | None]] = deque()
        self._lay_out(self.order[::-1])  # in which gradients are expected; the first step shows the true one
        self._start_step(None)
        self._unhook = hook_parameters(model, self._at, self._take_grad, self._enter, self._wait_for, self._take_values)

    def begin_step(self, micro_batches: int) -> None:
        """Say how many micro-batches the next :meth:`step` has, on each data-parallel rank; call
        :meth:`end_micro_batch` after each. Without these two, gradients are reduced in :meth:`step`, behind nothing.
        """
        if self._first_step:
            self._first_step.expects(micro_batches, self.mesh)
        self._start_step(micro_batches)

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """Say that a micro-batch's gradients are all there, or those ``of`` one chunk of a pipeline stage's layers."""
        for p in self._uses if of is None else self._uses.keys() & of:
            self._passed[p] += 1
            self._fired[p] = max(self._fired[p], self._passed[p] * self._uses[p])
        if self._first_step:
            self._first_step.end_micro_batch(of)
        self._advance(complete=min(self._passed.values(), default=0) // self._per_round)

    def _launch(self, lr: float) -> Tensor:
        """Finish the reductions, clip, update, and begin to gather the new values in the order of the forward pass."""
        if self._promised is not None and (wrong := set(self._passed.values()) - {self._promised}):
            raise UsageError(f"{wrong.pop()} of {self._promised} micro-batches ended", fix="end empty ones too")
        self.wait_parameters()
        self._advance(complete=self._rounds)
        # The first step allows for parameters that give several gradients per micro-batch, and counts them.
        if self._first_step and self.mesh.any_rank(any(bucket.filled for bucket in self._queue)):
            self._rounds += 1
            self._advance(complete=self._rounds)
        while self._in_flight:
            self._collect()
        sum_partial([(bucket.owned.grad, bucket.kind.sum_over) for bucket in self._queue], self.mesh)
        norm = self._norm()
        scale, skip = self._judge(norm)
        for bucket in reversed(self._queue):
            bucket.owned.update(lr, scale, skip)
            bucket.gather(self._group)
        self._start_step(None)
        if self._first_step:
            self._learn(self._first_step)
        self._wait_for(self._outsiders)
        return norm

    def wait_parameters(self) -> None:
        """Until all parameters have the values of the last step."""
        for bucket in self._queue:
            bucket.wait()

    def _partitions(self) -> Iterator[tuple[Partition, list[Slot]]]:
        return ((bucket.owned, bucket.slots) for bucket in self._queue)

    def set_order(self, order: Sequence[str]) -> None:
        """Expect gradients in the :attr:`order` of a former run, to repeat it bit by bit, if it had all parameters."""
        mine = [name for name in order if name in self.parameters]
        if mine != self.order and len(mine) == len(self.order):
            self._lay_out(mine)

    def close(self) -> None:
        """Let go of the model, so that another optimizer may be made for it. It keeps the values of the last step."""
        self.wait_parameters()
        self._unhook()

    # -- gradients: from autograd into buckets, from buckets into slices ---------------------------------------------

    def _start_step(self, micro_batches: int | None) -> None:
        """Buckets are reduced in rounds, a round for each micro-batch or one for all of them."""
        self._promised, self._launched = micro_batches, 0
        self._rounds, self._per_round = 1, micro_batches or 2**63
        if self.config.reduce == "every" and self._group is not None and micro_batches:
            self._rounds, self._per_round = micro_batches, 1
        self._fired = dict.fromkeys(self._uses, 0)  # gradients of each parameter that came
        self._passed = self._fired.copy()  # micro-batches of each that ended
        for bucket in self._queue:
            bucket.arrived = bucket.reduced = bucket.collected = 0

    def _take_grad(self, p: nn.Parameter, grad: Tensor) -> None:
        bucket, slot = self._at[p]
        if bucket.reduced == self._rounds and (bucket.in_place or not self._first_step):
            what = f"{slot.name} got a gradient after its bucket was reduced: it got fewer in the first step"
            raise UsageError(what, fix="leave out begin_step() in such steps; gradients are then reduced at the end")
        if bucket.grads is None:
            bucket.grads = self._borrow(bucket)
        sum_here = slot.of(bucket.grads)
        sum_here.add_(grad) if p in bucket.filled else sum_here.copy_(grad)
        bucket.filled.add(p)
        self._fired[p] += 1
        if self._first_step:
            self._first_step.saw(p)
        self._advance()

    def _advance(self, complete: int = 0) -> None:
        """Launch what can be reduced. All ranks keep one order, round by round and bucket by bucket, whatever order
        their gradients come in; a bucket that is not ready holds up the others, until its round is ``complete``."""
        while self._launched < self._rounds * len(self._queue):
            done, number = divmod(self._launched, len(self._queue))
            bucket = self._queue[number]
            if done >= complete and not self._is_ready(bucket, (done + 1) * self._per_round):
                return
            self._reduce(bucket)
            self._launched += 1

    def _is_ready(self, bucket: Bucket, micro_batches: int) -> bool:
        while bucket.arrived < len(bucket.slots):
            p = bucket.slots[bucket.arrived].parameter
            if self._fired[p] < micro_batches * self._uses[p]:
                return False
            bucket.arrived += 1
        # What is reduced in place must be complete, and the first step does not know yet how many gradients come.
        return not (self._first_step and bucket.in_place)

    def _reduce(self, bucket: Bucket) -> None:
        grads = self._borrow(bucket) if bucket.grads is None else bucket.grads
        for slot in [slot for slot in bucket.slots if slot.parameter not in bucket.filled]:
            slot.of(grads).zero_()
        work = None
        if self._group is not None:
            whole = grads[: bucket.values.numel()]
            work = single_tensor.reduce_scatter(whole[bucket.share], whole, group=self._group, async_op=True)
        self._in_flight.append((bucket, grads, work))
        bucket.grads = grads if bucket.in_place else None
        bucket.filled.clear()
        bucket.arrived, bucket.reduced = 0, bucket.reduced + 1

    def _collect(self) -> None:
        """Wait for the oldest reduction under way. Its memory is then free for another bucket."""
        bucket, grads, work = self._in_flight.popleft()
        if work is not None:
            work.wait()
        if not bucket.in_place:
            total, part = bucket.owned.grad, grads[bucket.share]
            total.add_(part) if bucket.collected else total.copy_(part)
            self._free[grads.dtype].append(grads)
        bucket.collected += 1

    def _borrow(self, bucket: Bucket) -> Tensor:
        """Memory for a bucket's gradients, which buckets use in turn; only its padding is zero."""
        dtype = bucket.kind.grad_dtype
        while not self._free[dtype] and len(self._in_flight) >= _IN_FLIGHT:
            self._collect()
        if not self._free[dtype]:
            largest = max(other.values.numel() for other in self._queue if other.kind.grad_dtype == dtype)
            self._free[dtype].append(torch.empty(largest, dtype=dtype, device=bucket.values.device))
        return bucket.plan.clear_padding(self._free[dtype].pop())

    def _norm(self) -> Tensor:
        """Of the whole gradient. A slice is on one data-parallel rank only; of copies along other axes, one counts."""
        square = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for bucket in self._queue:
            if bucket.kind.counts_here:
                square += torch.linalg.vector_norm(bucket.owned.grad, dtype=torch.float64).square()
        if self.mesh.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    # -- the layout, and what the first step teaches -----------------------------------------------------------------

    def _lay_out(self, order: list[str]) -> None:
        """Make buffers for the parameters in another :attr:`order`, and move their values and state there."""
        self.wait_parameters()
        self.order = order
        by_kind: defaultdict[Kind, list[Named]] = defaultdict(list)
        for name in self.order:
            p = self.parameters[name]
            by_kind[Kind.of(p, self.mesh, self.config.grad_dtype)].append((name, p))
        ranks, rank = (1, 0) if self._group is None else (dist.get_world_size(self._group), dist.get_rank(self._group))
        self.buffers = [ParameterBuffer(named, kind, ranks, rank, self.config) for kind, named in by_kind.items()]
        number = {name: i for i, name in enumerate(self.order)}
        self._queue = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        self._queue.sort(key=lambda bucket: max(number[slot.name] for slot in bucket.slots))
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        former, self._at = self._at, {slot.parameter: (b, slot) for b in self._queue for slot in b.slots}
        for p, (bucket, slot) in former.items():
            new, place = self._at[p]
            reshard(p, bucket.owned.shard(slot), new.owned.shard(place), bucket.owned.tensors, self._group)
        self.set_updates(self.updates)

    def _learn(self, seen: FirstStep) -> None:
        """Compare what was expected with the first step, and expect from now on what it showed."""
        seen.end_micro_batch()
        self._first_step = None
        self._uses |= seen.uses
        self._outsiders = seen.position.keys() - seen.entered
        true = agree_on_order(seen.order(self.order, self.parameters), self.parameters, self.mesh)
        if self.mesh.any_rank(true != self.order):
            logging.getLogger(__name__).info("gradients come in another order than expected; buckets now follow it")
            self._lay_out(true)

    def _enter(self, parameters: list[nn.Parameter]) -> None:
        if self._first_step:
            self._first_step.entered.update(parameters)
        self._wait_for(parameters)

    def _wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            self._at[p][0].wait()

    def _take_values(self, parameters: list[nn.Parameter]) -> None:
        """The model was given other values: they are the master values from now on."""
        for bucket, slot in map(self._at.__getitem__, parameters):
            if shard := bucket.owned.shard(slot):
                shard.take_values()
