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
``passed``, its finished micro-batches; ``per_round``, micro-batches between two reductions of a bucket. It learns the
order of buckets and the counts in the first step. ``bucket_plan.py`` places parameters.

The scheme is Megatron-LLaMA's OverlappedDistributedOptimizer, after ZeRO (Rajbhandari et al., arXiv:1910.02054), with
Megatron-Core's padded buckets, reduced in place. ``docs/optimizer.md`` explains the differences.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from energon_lite.errors import UsageError
from energon_lite.trainer.optimizer.bucket_plan import Kind, Named, plan_buckets
from energon_lite.trainer.optimizer.buckets import (
    Bucket,
    check_memory,
    gradient_norm,
    gradients_of_assumed,
    sum_partial,
)
from energon_lite.trainer.optimizer.config import OptimizerConfig, Rule
from energon_lite.trainer.optimizer.parameter_hooks import allow_reading, hook_parameters, refuse_reading
from energon_lite.trainer.optimizer.rounds import AgreedCount, FirstStep, Rounds
from energon_lite.trainer.parallel import collectives
from energon_lite.trainer.parallel.mesh import ParallelMesh, parallel_mesh
from energon_lite.trainer.parallel.parameters import adopt_module, check_copies
from energon_lite.trainer.parallel.shards import Shard

#: Most reductions in flight, before the oldest is waited for and its memory reused.
_IN_FLIGHT = 3


class OverlappedDistributedOptimizer(torch.optim.Optimizer):
    """AdamW, SGD or Muon over slices of buckets, with communication that overlaps the model's computation.

    Gradients are summed over ranks, never averaged: divide the loss by the tokens of the whole step. After a backward
    pass, a parameter's ``grad`` has moved into a bucket, and reading it raises an error. A parameter without a gradient
    counts as zeros. Freeze parameters before making the optimizer. Forward passes and state dicts wait for current
    values; code that reads parameters in another way must call :meth:`wait_parameters` first.

    ``param_groups`` has a group for each learning rate and weight decay, which schedulers may change between steps. The
    moments are not in ``state``, but in :meth:`state_dict` and :meth:`shards`.

    Args:
        model: any module; its trainable parameters' memory moves into the buckets. Parameters without a layout
            (:func:`layout_of`) are treated as copies on all ranks, and start with the first data-parallel rank's
            values.
        mesh: the ranks, from :func:`build_mesh` or torch. All of them call the same methods in the same order.
        config: the settings.

    Attributes:
        parameters: the trained parameters, by name.

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
        self.mesh = parallel_mesh(mesh)
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        adopt_module(model, self.parameters, self.mesh)
        for group in config.groups:
            if not self.mesh.any_rank(any(config.group(name) is group for name in self.parameters)):
                what = f"no parameter that is trained is in the group {group.match!r}"
                raise UsageError(what, fix="see dict(model.named_parameters()); the first pattern that fits counts")
        groups: dict[Rule, dict[str, Any]] = {}
        for name, p in self.parameters.items():
            rule = config.rule(name, p.dim())
            start = {"params": [], "lr": config.lr * rule.lr_scale, "weight_decay": rule.weight_decay}
            groups.setdefault(rule, start)["params"].append(p)
        self._rules = list(groups)
        super().__init__([*groups.values()] or [{"params": []}], {"lr": config.lr, "weight_decay": config.weight_decay})
        self._updates = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        self._group = self.mesh.data_group
        self._buckets = self._lay_out()
        self._queue = self._buckets  # in the order of reduction; gathered in reverse
        self._at = {slot.parameter: (bucket, slot) for bucket in self._buckets for slot in bucket.slots}
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        self._rounds = Rounds(self.parameters.values())
        self._outsiders: set[nn.Parameter] = set()  # parameters used without a call of their modules
        self._first_step: FirstStep | None = FirstStep()
        self._count = AgreedCount(self.mesh)
        self._in_flight: deque[tuple[Bucket, Tensor, dist.Work | None]] = deque()
        self._start_step(None)
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

    def step(  # type: ignore[override]
        self, closure: Callable[[], object] | None = None, *, lr: float | None = None
    ) -> float:
        """Update the parameters; return the norm of the whole model's gradient before clipping.

        A step whose gradient is not finite changes nothing; all ranks see the same norm, so all skip it.

        Args:
            closure: called first, to compute the gradients; None if they are there.
            lr: the learning rate, which each group multiplies by its ``lr_scale``; None for those of ``param_groups``.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self.launch_step(lr)[0].item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step; they are never in ``grad``, so ``set_to_none`` has no effect.

        Raises:
            UsageError: gradients of a step that :meth:`begin_step` announced are there, and may be on their way.
        """
        rounds = self._rounds
        if rounds.promised is None:
            for bucket in self._buckets:
                bucket.filled.clear()
                bucket.waiting.clear()
            if self._first_step:
                self._first_step.forget()
            self._start_step(None)
        elif any(rounds.fired.values()):
            what = "zero_grad() amid a step that begin_step() announced"
            raise UsageError(what, fix="call it before begin_step(), or not at all: step() begins with new gradients")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made; refuse others: they have no place in the buckets."""
        if "_updates" in vars(self):
            raise UsageError("a group of parameters came after the optimizer was made", fix="make it with all of them")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's part of the model, as torch's AdamW does. Every rank must call it.

        It is the same on all data-parallel ranks, and fits any number of them.
        """
        updates = self.updates
        for bucket in self._buckets if updates else ():
            whole = bucket.whole_state(self._group)
            for slot in bucket.slots:
                tensors = {kind: slot.of(flat).clone() for kind, flat in whole.items()}
                self.state[slot.parameter] = {"step": torch.tensor(float(updates)), **tensors}
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that :meth:`state_dict` returns, or that of torch's AdamW with the same groups."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = {parameters[number]: tensors for number, tensors in state_dict["state"].items()}
        for shard in self.shards():
            for kind, here in shard.tensors.items():
                if not states and kind != "master":  # from before the first step
                    here.zero_()
                elif states and (kind != "master" or kind in states[shard.parameter]):
                    here.copy_(states[shard.parameter][kind].flatten()[shard.start : shard.stop])
        self.set_updates(max((int(tensors["step"]) for tensors in states.values()), default=0))

    def launch_step(self, lr: float | None = None, leave_out: Tensor | None = None) -> Tensor:
        """Launch :meth:`step` without waiting for the device; returns float64 ``[2]`` on the device.

        Finish the reductions, clip, update, and start to gather the new values in the order of the forward pass. The
        numbers are the norm of the gradient before clipping, and the :attr:`updates` after the step. If ``leave_out``
        is true (a scalar on the device, equal on all ranks), nothing is updated.
        """
        self._count.check()
        rounds = self._rounds
        if rounds.promised is not None and (wrong := set(rounds.passed.values()) - {rounds.promised}):
            raise UsageError(f"{wrong.pop()} of {rounds.promised} micro-batches ended", fix="end empty ones too")
        check_memory(self._at)
        self.wait_parameters()
        self._advance(rounds.count)
        # Parameters may have several gradients per micro-batch; the first step counts them, and so reduces at its end.
        if self._first_step and self.mesh.any_rank(any(bucket.filled or bucket.waiting for bucket in self._queue)):
            rounds.count += 1
            self._advance(rounds.count)
        while self._in_flight:
            self._collect()
        sum_partial([(bucket.owned.grad, bucket.kind.sum_over) for bucket in self._buckets], self.mesh)
        if self._first_step:
            check_copies(gradients_of_assumed(self._queue), self.mesh, "gradients")
        norm = gradient_norm(self._buckets, self.mesh)
        scale, skip = self._judge(norm, leave_out)
        rules, shared = {}, dict[Any, Any]()
        for rule, group in zip(self._rules, self.param_groups, strict=False):
            group["lr"] = group["lr"] if lr is None else lr * rule.lr_scale
            rules[rule] = {name: float(group[name]) for name in ("lr", "weight_decay")}
        for bucket in reversed(self._queue):
            bucket.owned.update(rules, scale, skip, self._updates, shared)
            bucket.gather(self._group)
        if self._first_step:
            self._learn(self._first_step)
        self._start_step(None)
        self._wait_for(self._outsiders)
        return torch.stack([norm, self._updates])

    def wait_parameters(self) -> None:
        """Wait until all parameters have the values of the last step."""
        for bucket in self._queue:
            bucket.wait()

    @property
    def updates(self) -> int:
        """Number of updates that the moments include; reading it waits for the device."""
        return int(self._updates.item())

    def set_updates(self, updates: int) -> None:
        """Set the number of updates that the moments include, after reading a checkpoint."""
        self._updates.fill_(updates)

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's shards of each parameter's state, to save or fill: master values and moments, as views."""
        for bucket in self._buckets:
            yield from filter(None, map(bucket.owned.shard, bucket.slots))

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
        if p in bucket.waiting:
            self._fill(bucket)
        bucket.waiting[p] = grad
        if len(bucket.waiting) == len(bucket.slots):
            self._fill(bucket)
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
        grads = self._fill(bucket)
        for slot in [slot for slot in bucket.slots if slot.parameter not in bucket.filled]:
            slot.of(grads).zero_()
        work = None
        if self._group is not None:
            whole = grads[: bucket.values.numel()]
            work = collectives.reduce_scatter(whole[bucket.share], whole, group=self._group, async_op=True)
        self._in_flight.append((bucket, grads, work))
        bucket.grads = grads if bucket.in_place else None
        bucket.filled.clear()

    def _fill(self, bucket: Bucket) -> Tensor:
        """Move the gradients that wait into the bucket, all at once: of single ones, each would be a kernel."""
        if bucket.grads is None:
            bucket.grads = self._borrow(bucket)
        bucket.fill(bucket.grads)
        return bucket.grads

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

    def _judge(self, norm: Tensor, leave_out: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return the clipping factor, and 1 if the update is left out, else 0; count the update if it is made."""
        good = norm.isfinite() if leave_out is None else norm.isfinite() & ~leave_out
        self._updates += good
        # NaN times padding would stay in the padding.
        scale = (self.config.clip / norm).nan_to_num(nan=0.0).clamp(max=1.0) if self.config.clip else None
        return scale, good.logical_not().to(torch.float32)

    # -- the layout, and the observations of the first step ----------------------------------------------------------

    def _lay_out(self) -> list[Bucket]:
        """Make the buckets in the expected order of gradients: the reverse of the parameters'."""
        by_kind: defaultdict[Kind, list[Named]] = defaultdict(list)
        number: dict[str, int] = {}
        for name, p in reversed(self.parameters.items()):
            by_kind[Kind.of(name, p, self.mesh, self.config)].append((name, p))
            number[name] = len(number)
        ranks, rank = (1, 0) if self._group is None else (dist.get_world_size(self._group), dist.get_rank(self._group))
        size = self.config.bucket_size or max(40_000_000, 1_000_000 * ranks)
        plans = [
            (kind, plan)
            for kind, named in by_kind.items()
            for plan in plan_buckets(named, size, ranks, rank, self.config)
        ]
        plans.sort(key=lambda planned: max(number[slot.name] for slot in planned[1].slots))
        return [Bucket(plan, kind, self.mesh, self.config) for kind, plan in plans]

    def _learn(self, seen: FirstStep) -> None:
        """Adopt the order and the counts of gradients that the first step has shown."""
        seen.end_micro_batch()
        self._first_step = None
        self._rounds.learning = False
        self._rounds.uses |= seen.uses
        self._outsiders = seen.position.keys() - seen.entered
        order = torch.tensor(seen.order(self._buckets), dtype=torch.int64, device=self.mesh.device)
        if self._group is not None:  # data-parallel ranks may have seen other micro-batches
            dist.broadcast(order, src=dist.get_global_rank(self._group, 0), group=self._group)
        self._queue = [self._buckets[number] for number in order.tolist()]

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
