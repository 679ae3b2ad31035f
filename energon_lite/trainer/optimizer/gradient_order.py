"""In which order gradients come, and how many of each: read off the first step. And of how many micro-batches."""

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
    """How many micro-batches a step has: as many on each data-parallel rank, or they would wait for ever.

    Asked when a step begins, over the hosts; the answer is waited for before the first reduction, so no device waits.

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
        """The step has so many on this rank. Every data-parallel rank must call it."""
        if self._group is not None:
            most = torch.tensor([micro_batches, -micro_batches])
            self._asked = most, dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def check(self) -> None:
        """Wait for the answer, if it was asked.

        Raises:
            UsageError: on all data-parallel ranks: they have not equally many.
        """
        if self._asked is not None:
            most, work = self._asked
            self._asked = None
            work.wait()
            counts = most.numpy()  # in the host's memory: no device is asked
            high, low = int(counts[0]), -int(counts[1])
            if high != low:
                what = f"a step has {low} micro-batches on one data-parallel rank and {high} on another"
                raise UsageError(what, fix="give each as many, empty ones where there are no more")


class FirstStep:
    """The gradients of the first step, as they come.

    Attributes:
        uses: most gradients that a parameter had in one micro-batch.
        position: of a parameter's last gradient in a micro-batch, the latest: which turn of a chunk of layers it is in,
            counted in the order in which chunks are first done, and which gradient of that turn.
        entered: parameters whose modules were called.
    """

    def __init__(self) -> None:
        self.uses: dict[nn.Parameter, int] = {}
        self.position: dict[nn.Parameter, tuple[int, int]] = {}
        self.entered: set[nn.Parameter] = set()
        self._now: list[nn.Parameter] = []
        self._turns: dict[frozenset[nn.Parameter], int] = {}

    def saw(self, parameter: nn.Parameter) -> None:
        """A gradient has come."""
        self._now.append(parameter)

    def end_micro_batch(self, of: Collection[nn.Parameter] | None = None) -> None:
        """What comes next belongs to another micro-batch, or to another chunk of layers than ``of`` these."""
        turn = self._turns.setdefault(frozenset(of or ()), len(self._turns))
        for number, p in enumerate(self._now):
            self.position[p] = max((turn, number), self.position.get(p, (0, 0)))
        for p, count in Counter(self._now).items():
            self.uses[p] = max(count, self.uses.get(p, 0))
        self._now.clear()

    def order(self, expected: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """The names in ``expected`` in the order of their gradients.

        What had no gradient comes last, where it holds up nobody; it keeps its order.
        """
        last = (len(self._turns), 0)
        return sorted(expected, key=lambda name: self.position.get(parameters[name], last))


def agree_on_order(order: Sequence[str], parameters: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> list[str]:
    """The first rank's order, on all ranks that must cut the same buckets. Every rank must call it.

    Data-parallel ranks may have seen other micro-batches; tensor-parallel ranks add up slices of each other's buckets.
    The two ends of a pipeline do so for what they share and for nothing else, so that keeps its order of registration.

    Args:
        order: what this rank would have, of the names of all ``parameters``.
        parameters: by name; the same names on all data- and tensor-parallel ranks.
        mesh: the ranks.
    """
    names = list(parameters)
    number = {name: i for i, name in enumerate(names)}
    told = torch.tensor([number[name] for name in order], dtype=torch.int64, device=mesh.device)
    for group in (mesh.data_group, mesh.group("tp")):
        if group is not None:
            dist.broadcast(told, src=dist.get_global_rank(group, 0), group=group)
    shared = {name for name, p in parameters.items() if "ends" in layout_of(p).sum_over}
    in_turn = iter([name for name in reversed(names) if name in shared])
    return [next(in_turn) if names[i] in shared else names[i] for i in told.tolist()]
