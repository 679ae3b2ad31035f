"""Order and number of gradients, observed in the first step; and the agreed number of micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of


class AgreedCount:
    """Check that a step has equal numbers of micro-batches on all data-parallel ranks; otherwise they would deadlock.

    The ranks exchange it over the CPU when a step begins, and wait for the result before the first reduction, so no
    device waits.

    Args:
        mesh: the ranks. All of them must make one.
    """

    def __init__(self, mesh: ParallelMesh):
        self._group = mesh.data_group
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
                raise UsageError(what, fix="give each as many, empty ones where there are no more")


class FirstStep:
    """Record of the gradients of the first step.

    Attributes:
        uses: the most gradients that a parameter had in one micro-batch.
        position: latest position of a parameter's last gradient in a micro-batch: the number of its chunk of layers, in
            the order in which chunks first finish, and the number of the gradient within the chunk.
        entered: parameters whose modules were called.
    """

    def __init__(self) -> None:
        self.uses: dict[nn.Parameter, int] = {}
        self.position: dict[nn.Parameter, tuple[int, int]] = {}
        self.entered: set[nn.Parameter] = set()
        self._now: list[nn.Parameter] = []
        self._turns: dict[frozenset[nn.Parameter], int] = {}

    def saw(self, parameter: nn.Parameter) -> None:
        """Record the arrival of a gradient."""
        self._now.append(parameter)

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """Close a micro-batch, or the pass of one chunk of layers, whose parameters are ``of``."""
        turn = self._turns.setdefault(frozenset(of or ()), len(self._turns))
        for number, p in enumerate(self._now):
            self.position[p] = max((turn, number), self.position.get(p, (0, 0)))
        for p, count in Counter(self._now).items():
            self.uses[p] = max(count, self.uses.get(p, 0))
        self._now.clear()

    def order(self, expected: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the names in ``expected`` in the order of their gradients.

        Parameters without a gradient come last in their former order, where they delay no bucket.
        """
        last = (len(self._turns), 0)
        return sorted(expected, key=lambda name: self.position.get(parameters[name], last))


def agree_on_order(order: Sequence[str], parameters: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> list[str]:
    """Return the first rank's order on all ranks that must form equal buckets. Every rank must call it.

    Data-parallel ranks may have seen other micro-batches; tensor-parallel ranks sum slices of each other's buckets. The
    two ends of a pipeline sum only their shared parameters, so these keep their order of registration.

    Args:
        order: this rank's order of the names of all ``parameters``.
        parameters: the parameters by name; equal names on all data- and tensor-parallel ranks.
        mesh: the ranks.
    """
    names = list(parameters)
    number = {name: i for i, name in enumerate(names)}
    indices = torch.tensor([number[name] for name in order], dtype=torch.int64, device=mesh.device)
    for group in (mesh.data_group, mesh.group("tp")):
        if group is not None:
            dist.broadcast(indices, src=dist.get_global_rank(group, 0), group=group)
    shared = {name for name, p in parameters.items() if "ends" in layout_of(p).sum_over}
    in_turn = iter([name for name in reversed(names) if name in shared])
    return [next(in_turn) if names[i] in shared else names[i] for i in indices.tolist()]
