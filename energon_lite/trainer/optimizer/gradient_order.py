"""In which order gradients come, and how many of each: read off the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of


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

    def expects(self, micro_batches: int, mesh: ParallelMesh) -> None:
        """It has so many micro-batches on this rank.

        Raises:
            UsageError: not on all data-parallel ranks. They would wait for each other for ever in some later step.
        """
        if mesh.data_group is not None:
            most = torch.tensor([micro_batches, -micro_batches], device=mesh.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.data_group)
            high, low = most[0].item(), -most[1].item()
            if high != low:
                what = f"a step has {low} micro-batches on one data-parallel rank and {high} on another"
                raise UsageError(what, fix="give each as many, empty ones where there are no more")

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
