"""AdamW or SGD with state sharded over the data-parallel ranks, and communication that overlaps computation.

    forward    layer 0   layer 1   layer 2  |  backward   layer 2   layer 1   layer 0  |  step
    gather   █ bucket 2  █ 1       █ 0      |  reduce               █ 0       █ 1      | █ 2    update 2, 1, 0

Parameters live in flat tensors, *buckets*, in the order of their gradients: about the reverse of the order of use. Each
bucket is divided into equal *slices*, one per data-parallel rank:

    bucket 0                   bucket 1
    | rank 0 | rank 1 |        | rank 0     | rank 1     |     a collective moves a bucket
    | w5   ·   w4  b5 |        | w3      ·    w2   b3 b2 |     a rank updates its slice of each

Slices are independent of where parameters begin, so no size must be divisible by another. Matrices come first in a
bucket, because only they are decayed: a slice is then at most two runs of elements for the fused kernel. Muon needs
whole matrices: the slices of its buckets end at ends of matrices.
``reduce="last"`` (ZeRO-1) sums gradients on each rank and reduces the sum after the last backward pass;
``reduce="every"`` (ZeRO-2) reduces after each pass, so that a rank holds whole gradients of a few buckets only.

``rounds.py`` decides by counts when a bucket is reduced: ``fired``, the gradients of each parameter in this step;
``passed``, its finished micro-batches; ``per_round``, micro-batches between two reductions of a bucket.
``gradient_order.py`` observes order and counts in the first step; ``bucket_plan.py`` places parameters.

The scheme is Megatron-LLaMA's OverlappedDistributedOptimizer, after ZeRO (Rajbhandari et al., arXiv:1910.02054), with
Megatron-Core's padded buckets, reduced in place. ``docs/optimizer.md`` explains the differences.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.bucket_plan import BucketPlan, Kind, Named, Slot, plan_buckets
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.foreign_modules import check_copies
from energon_lite.trainer.optimizer.gradient_order import AgreedCount, FirstStep, agree_on_order
from energon_lite.trainer.optimizer.muon import MuonPartition
from energon_lite.trainer.optimizer.optimizer import Optimizer, sum_of_squares, sum_partial
from energon_lite.trainer.optimizer.parameter_hooks import allow_reading, hook_parameters, refuse_reading
from energon_lite.trainer.optimizer.partition import Partition, shard_of
from energon_lite.trainer.optimizer.rounds import Rounds
from energon_lite.trainer.parallel import single_tensor
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor
from energon_lite.trainer.parallel.shards import reshard

#: Reductions in flight before the oldest is waited for and its memory reused.
_IN_FLIGHT = 3


class Bucket:
    """Parameters whose gradients are reduced by one collective, and whose values are gathered by one.

    ``values`` and ``grads`` are laid out by ``slots``, and this rank owns ``share`` of them; ``grads`` is None as long
    as there is no gradient (ZeRO-2). The parameters move into ``values``. If ``state`` of this rank's share is given,
    they get their values from it when they are gathered.
    """

    def __init__(
        self, plan: BucketPlan, kind: Kind, mesh: ParallelMesh, config: OptimizerConfig, state: dict[str, Tensor] | None
    ):
        self.plan = plan
        self.slots = plan.slots
        self.share = plan.share
        self.kind = kind
        self.values = torch.zeros(plan.size, dtype=kind.dtype, device=mesh.device)
        for slot in self.slots:
            here = local_tensor(slot.parameter)
            if state is None:
                slot.of(self.values).copy_(here.detach())
            here.data = slot.of(self.values)
        # A single data-parallel rank has no reason to reduce often.
        self.in_place = config.reduce == "last" or mesh.data_group is None
        self.grads = torch.zeros_like(self.values, dtype=kind.grad_dtype) if self.in_place else None
        wide = torch.promote_types(kind.grad_dtype, torch.float32)
        mine = self.values[self.share]
        total = torch.zeros_like(mine, dtype=wide) if self.grads is None else self.grads[self.share]
        if kind.algorithm == "muon":
            self.owned: Partition = MuonPartition(mine, total, self.share.start, self.slots, mesh, config, state)
        else:
            self.owned = Partition(mine, total, self.share.start, plan.runs, kind.algorithm, config, state)
        self.filled: set[nn.Parameter] = set()  # parameters whose gradients are in ``grads``
        self.arrived = 0  # number of slots known to be ready for the next reduction
        self.reduced = self.collected = 0  # launched and finished reductions of this step
        self.gathering: dist.Work | None = None

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Start to gather the values of all slices."""
        if group is not None:
            self.gathering = single_tensor.all_gather(self.values, self.values[self.share], group=group, async_op=True)

    def wait(self) -> None:
        """Wait until the values are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def keep_state_only(self) -> None:
        """Free the memory of values and gradients. The parameters are empty until another bucket takes them."""
        self.owned.keep_state_only()
        self.values, self.grads = self.values.new_empty(0), None
        for slot in self.slots:
            here = local_tensor(slot.parameter)
            here.data = here.new_empty(()).expand(here.shape)


class OverlappedDistributedOptimizer(Optimizer):
    """AdamW, SGD or Muon over slices of buckets, with communication that overlaps the model's computation.

    Gradients are summed over ranks, never averaged: divide the loss by the tokens of the whole step. After a backward
    pass, a parameter's ``grad`` has moved into a bucket, and reading it raises an error. A parameter without a gradient
    counts as zeros. Freeze parameters before making the optimizer. Forward passes and state dicts wait for current
    values; code that reads parameters in another way must call :meth:`wait_parameters` first.

    Args:
        model: any module; its trainable parameters' memory moves into the buckets. Parameters without a layout
            (:func:`layout_of`) are treated as copies on all ranks, and start with the first data-parallel rank's
            values.
        mesh: the ranks, from :func:`build_mesh` or torch. All of them call the same methods in the same order.
        config: the settings.

    Raises:
        UsageError: a parameter cannot be trained, or one without a layout differs between tensor-parallel ranks.

    Example:
        >>> optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(reduce="every"))
        >>> optimizer.begin_step(len(micro_batches))
        >>> for batch in micro_batches:
        ...     loss(batch).backward()
        ...     optimizer.end_micro_batch()
        >>> grad_norm = optimizer.step(lr=1e-3)
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh | DeviceMesh, config: OptimizerConfig):
        super().__init__(model, mesh, config)
        self._group = self.mesh.data_group
        self._at: dict[nn.Parameter, tuple[Bucket, Slot]] = {}
        self._queue: list[Bucket] = []  # in the order of reduction; gathered in reverse
        self._rounds = Rounds(self.parameters.values())
        self._outsiders: set[nn.Parameter] = set()  # parameters used without a call of their modules
        self._first_step: FirstStep | None = FirstStep()
        self._count = AgreedCount(self.mesh)
        self._in_flight: deque[tuple[Bucket, Tensor, dist.Work | None]] = deque()
        self._lay_out(self.order[::-1])  # the expected order of gradients; the first step shows the true one
        self._unhook = hook_parameters(model, self._at, self._take_grad, self._enter, self._wait_for, self._take_values)

    def begin_step(self, micro_batches: int) -> None:
        """Announce the number of micro-batches of the next :meth:`step`, equal on all data-parallel ranks.

        Call :meth:`end_micro_batch` after each. Without these two calls, gradients are reduced in :meth:`step`, without
        overlap. Unequal numbers are an error on all ranks: in the first step; with ``reduce="every"``, in each step.
        """
        if self._first_step or self.config.reduce == "every":
            self._count.ask(micro_batches)
        if self._first_step:
            self._count.check()
        self._start_step(micro_batches)

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """Announce that the gradients of a micro-batch are complete, or those ``of`` one chunk of a stage's layers."""
        self._rounds.end_micro_batch(of)
        if self._first_step:
            self._first_step.end_micro_batch(of)
        self._advance(self._rounds.complete)
        if self._rounds.promised is not None and min(self._rounds.passed.values(), default=0) >= self._rounds.promised:
            refuse_reading(self._at)

    def _launch(self, lr: float) -> Tensor:
        """Finish the reductions, clip, update, and start to gather the new values in the order of the forward pass."""
        self._count.check()
        rounds = self._rounds
        if rounds.promised is not None and (wrong := set(rounds.passed.values()) - {rounds.promised}):
            raise UsageError(f"{wrong.pop()} of {rounds.promised} micro-batches ended", fix="end empty ones too")
        self._check_memory()
        self.wait_parameters()
        self._advance(rounds.count)
        # Parameters may have several gradients per micro-batch; the first step counts them, and so reduces at its end.
        if self._first_step and self.mesh.any_rank(any(bucket.filled for bucket in self._queue)):
            rounds.count += 1
            self._advance(rounds.count)
        while self._in_flight:
            self._collect()
        sum_partial([(bucket.owned.grad, bucket.kind.sum_over) for bucket in self._queue], self.mesh)
        if self._first_step:
            self._check_copies()
        norm = self._norm()
        scale, skip = self._judge(norm)
        shared: dict[Any, Any] = {}
        for bucket in reversed(self._queue):
            bucket.owned.update(lr, scale, skip, shared)
            bucket.gather(self._group)
        self._start_step(None)
        if self._first_step:
            self._learn(self._first_step)
        self._wait_for(self._outsiders)
        return norm

    def wait_parameters(self) -> None:
        """Wait until all parameters have the values of the last step."""
        for bucket in self._queue:
            bucket.wait()

    def _partitions(self) -> Iterator[tuple[Partition, list[Slot]]]:
        return ((bucket.owned, bucket.slots) for bucket in self._queue)

    def set_order(self, order: Sequence[str]) -> None:
        """Expect gradients in the :attr:`order` of a former run with the same parameters, to repeat it bit by bit."""
        mine = [name for name in order if name in self.parameters]
        if mine != self.order and len(mine) == len(self.order):
            self._lay_out(mine)

    def close(self) -> None:
        """Release the model for another optimizer. It keeps the values of the last step."""
        self.wait_parameters()
        self._unhook()

    # -- gradients: from autograd into buckets, from buckets into slices ---------------------------------------------

    def _start_step(self, micro_batches: int | None) -> None:
        every = self.config.reduce == "every" and self._group is not None
        self._rounds.start(micro_batches, self._queue, every=every)
        allow_reading(self._at)
        for bucket in self._queue:
            bucket.collected = 0

    def _take_grad(self, p: nn.Parameter, grad: Tensor) -> None:
        bucket, slot = self._at[p]
        if bucket.reduced == self._rounds.count and (bucket.in_place or not self._first_step):
            what = f"{slot.name} got a gradient after its bucket was reduced: it got fewer in the first step"
            raise UsageError(what, fix="leave out begin_step() in such steps; gradients are then reduced at the end")
        if bucket.grads is None:
            bucket.grads = self._borrow(bucket)
        sum_here = slot.of(bucket.grads)
        sum_here.add_(grad) if p in bucket.filled else sum_here.copy_(grad)
        bucket.filled.add(p)
        self._rounds.fired[p] += 1
        if self._rounds.promised is None:  # this may be the last micro-batch
            refuse_reading([p])
        if self._first_step:
            self._first_step.saw(p)
        self._advance()

    def _advance(self, complete: int = 0) -> None:
        """Launch the reductions of buckets that are ready, or whose round is ``complete``."""
        while (number := self._rounds.next(complete)) is not None:
            self._reduce(self._queue[number])

    def _reduce(self, bucket: Bucket) -> None:
        self._count.check()
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

    def _collect(self) -> None:
        """Wait for the oldest reduction in flight. Its memory is then free for another bucket."""
        bucket, grads, work = self._in_flight.popleft()
        if work is not None:
            work.wait()
        if not bucket.in_place:
            total, part = bucket.owned.grad, grads[bucket.share]
            total.add_(part) if bucket.collected else total.copy_(part)
            self._free[grads.dtype].append(grads)
        bucket.collected += 1

    def _borrow(self, bucket: Bucket) -> Tensor:
        """Return shared memory for a bucket's gradients; only its padding is zero."""
        dtype = bucket.kind.grad_dtype
        while not self._free[dtype] and len(self._in_flight) >= _IN_FLIGHT:
            self._collect()
        if not self._free[dtype]:
            largest = max(other.values.numel() for other in self._queue if other.kind.grad_dtype == dtype)
            self._free[dtype].append(torch.empty(largest, dtype=dtype, device=bucket.values.device))
        return bucket.plan.clear_padding(self._free[dtype].pop())

    def _norm(self) -> Tensor:
        """Return the norm of the whole gradient: one data-parallel rank has a slice; of other copies, one counts."""
        counted = [bucket.owned.grad for bucket in self._queue if bucket.kind.counts_here]
        square = sum_of_squares(counted, self.mesh.device)
        if self.mesh.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    # -- the layout, and the observations of the first step ----------------------------------------------------------

    def _lay_out(self, order: list[str]) -> None:
        """Make buckets for the parameters in another :attr:`order`, and move their values and state there.

        Values and gradients are freed first, so that the peak of memory does not rise.
        """
        self.wait_parameters()
        self.order = order
        by_kind: defaultdict[Kind, list[Named]] = defaultdict(list)
        for name in self.order:
            p = self.parameters[name]
            by_kind[Kind.of(name, p, self.mesh, self.config)].append((name, p))
        ranks, rank = (1, 0) if self._group is None else (dist.get_world_size(self._group), dist.get_rank(self._group))
        size = self.config.bucket_size or max(40_000_000, 1_000_000 * ranks)
        number = {name: i for i, name in enumerate(self.order)}
        plans = [
            (kind, plan)
            for kind, named in by_kind.items()
            for plan in plan_buckets(named, size, ranks, rank, self.config)
        ]
        plans.sort(key=lambda planned: max(number[slot.name] for slot in planned[1].slots))
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        states = self._move_state([plan for _, plan in plans]) if self._queue else [None] * len(plans)
        self._queue = []
        for (kind, plan), state in zip(plans, states, strict=True):
            self._queue.append(bucket := Bucket(plan, kind, self.mesh, self.config, state))
            if state is not None:
                bucket.gather(self._group)
                state.clear()
        self._at = {slot.parameter: (b, slot) for b in self._queue for slot in b.slots}
        self.set_updates(self.updates)
        self._start_step(None)

    def _move_state(self, plans: list[BucketPlan]) -> list[dict[str, Tensor] | None]:
        """Return this rank's state under other plans; one kind of tensor is moved after the other."""
        for bucket in self._queue:
            bucket.keep_state_only()
        states: list[dict[str, Tensor] | None] = [{} for _ in plans]
        for kind in dict.fromkeys(kind for bucket in self._queue for kind in bucket.owned.tensors):
            for plan, state in zip(plans, states, strict=True):
                like = self._at[plan.slots[0].parameter][0].owned.tensors.get(kind)
                if like is None or state is None:
                    continue
                state[kind] = like.new_zeros(plan.share.stop - plan.share.start)
                for slot in plan.slots:
                    bucket, former = self._at[slot.parameter]
                    source, target = bucket.owned.shard(former), shard_of(slot, plan.share.start, state)
                    reshard(kind, source, target, like.new_empty(slot.stop - slot.start), self._group)
            for bucket in self._queue:
                bucket.owned.tensors.pop(kind, None)
        return states

    def _check_memory(self) -> None:
        for p, (bucket, slot) in self._at.items():
            there = bucket.values.data_ptr() + slot.start * bucket.values.itemsize
            if local_tensor(p).data_ptr() != there and slot.start < slot.stop:
                what = f"{slot.name} was moved after the optimizer was made, which cannot train it any more"
                raise UsageError(what, fix="call model.to(), .half() or flatten_parameters() before that")

    def _check_copies(self) -> None:
        """Check by first-step gradients that parameters without a layout are copies on tensor-parallel ranks."""
        gradients = {}
        for bucket in self._queue:
            for slot in bucket.slots if layout_of(bucket.slots[0].parameter).sharded_dim is None else ():
                if layout_of(slot.parameter).assumed and (shard := bucket.owned.shard(slot)):
                    start = slot.start + shard.start - bucket.owned.start
                    gradients[slot.name] = bucket.owned.grad[start : start + shard.stop - shard.start]
        check_copies(gradients, self.mesh, "gradients")

    def _learn(self, seen: FirstStep) -> None:
        """Adopt the order and the counts of gradients that the first step has shown."""
        seen.end_micro_batch()
        self._first_step = None
        self._rounds.learning = False
        self._rounds.uses |= seen.uses
        self._outsiders = seen.position.keys() - seen.entered
        true = agree_on_order(seen.order(self.order, self.parameters), self.parameters, self.mesh)
        if self.mesh.any_rank(true != self.order):
            if self.mesh.global_rank == 0:
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
        """Take the values that were loaded into the model as master values."""
        for bucket, slot in map(self._at.__getitem__, parameters):
            if shard := bucket.owned.shard(slot):
                shard.take_values()
