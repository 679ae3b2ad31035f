"""Assignment of parameters to buckets, and their offsets in them. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import nn

from energon_lite.trainer.optimizer.config import OptimizerConfig, Rule
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor
from energon_lite.trainer.parallel.shards import neighbours

#: Alignment of a parameter's start in elements, for fast kernels.
_ALIGNMENT = 64
#: Alignment of a rank's slice in elements.
_SLICE_ALIGNMENT = 32
#: The largest empty share of a bucket of whole matrices, if more matrices can fill it.
_MOST_EMPTY = 1 / 8

Named = tuple[str, nn.Parameter]


class Kind(NamedTuple):
    """Properties that all parameters of one bucket share.

    Args:
        dtype, grad_dtype: the type of the parameters, and the type in which their gradients are summed.
        algorithm: the update algorithm. Muon's slices are whole matrices.
        replicated_over: mesh axes along which ranks hold the same parameters.
        sum_over: mesh axes, besides the data-parallel ones, along which gradients are parts of a sum.
        counts_here: True on the rank whose copy of a parameter counts in the gradient norm.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    algorithm: str
    replicated_over: frozenset[str]
    sum_over: frozenset[str]
    counts_here: bool

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, mesh: ParallelMesh, config: OptimizerConfig) -> Kind:
        """Return the kind of a parameter.

        Args:
            name, parameter: the parameter; see :func:`layout_of`.
            mesh: the ranks.
            config: see :meth:`OptimizerConfig.algorithm_of`; by ``grad_dtype``, gradients are summed in at least
                float32, or in the parameter's type.
        """
        layout, dtype = layout_of(parameter), parameter.dtype
        sum_over = {axis for axis in layout.sum_over if mesh.group(axis) is not None}
        replicated = sum_over & {"ends"}
        if layout.sharded_dim is None and mesh.tp > 1:
            replicated.add("tp")
        counts = layout.counts_here(mesh) and ("tp" not in replicated or mesh.rank("tp") == 0)
        algorithm = config.algorithm_of(name, parameter.dim())
        summed_in = torch.float32 if dtype.itemsize < 4 and config.grad_dtype == "float32" else dtype
        return cls(dtype, summed_in, algorithm, frozenset(replicated), frozenset(sum_over), counts)


class Slot(NamedTuple):
    """The place ``[start, stop)`` of a parameter in its bucket, and its update rule."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    rule: Rule = Rule(0.0)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's part of a tensor laid out like the bucket, in the parameter's shape on this rank."""
        return flat[self.start : self.stop].view(local_tensor(self.parameter).shape)


class BucketPlan(NamedTuple):
    """Layout of a bucket: the places of its parameters.

    Args:
        slots: the slots, in order of place.
        size: number of elements with padding: a multiple of the number of ranks and of 128.
        share: the slice of one rank.
    """

    slots: list[Slot]
    size: int
    share: slice

    @property
    def runs(self) -> list[tuple[slice, Rule]]:
        """Return the rank's slice, counted from its own start, as the fewest runs of elements with one rule each."""
        runs, start = [], 0
        for rule, alike in groupby(self.slots, key=lambda slot: slot.rule):
            # The padding after a parameter stays zero under any update, so a run may include it and end aligned.
            stop = _round_up([slot.stop for slot in alike][-1], _ALIGNMENT)
            here = slice(max(start - self.share.start, 0), min(stop, self.share.stop) - self.share.start)
            runs += [(here, rule)] if here.start < here.stop else []
            start = stop
        return runs

    def clear_padding(self, flat: torch.Tensor) -> torch.Tensor:
        """Write zeros into the padding of ``flat``, which is laid out like the bucket; returns ``flat``."""
        edges = [0, *chain.from_iterable((slot.start, slot.stop) for slot in self.slots), self.size]
        for stop, start in zip(edges[::2], edges[1::2], strict=True):
            flat[stop:start].zero_()
        return flat


def plan_buckets(
    named: Sequence[Named], bucket_size: int, ranks: int, rank: int, config: OptimizerConfig | None = None
) -> list[BucketPlan]:
    """Divide parameters into buckets of neighbours.

    Args:
        named: names and parameters of one kind, in the order of their gradients.
        bucket_size: the most elements of a bucket, without padding; a larger parameter gets its own bucket. If slices
            are whole matrices, a bucket may be larger, as far as needed to leave little of it empty.
        ranks, rank: number of equal slices of each bucket, and the number of this rank's slice.
        config: source of each parameter's rule and algorithm.

    Example:
        >>> w, b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        >>> [(slot.name, slot.start) for slot in plan_buckets([("b", b), ("w", w)], 100, 2, 0)[0].slots]
        [('w', 0), ('b', 64)]
    """
    config = config or OptimizerConfig()
    slots = [Slot(name, p, 0, local_tensor(p).numel(), config.rule(name, p.dim())) for name, p in named]
    if slots and config.algorithm_of(slots[0].name, slots[0].parameter.dim()) == "muon":
        placed = _whole_slots(slots, bucket_size, ranks)
    else:
        runs = neighbours(((slot, slot.stop) for slot in slots), bucket_size)
        placed = [_place(sorted(run, key=lambda slot: (slot.parameter.dim() <= 1, slot.rule)), ranks) for run in runs]
    return [BucketPlan(slots, size, slice(rank * size // ranks, (rank + 1) * size // ranks)) for slots, size in placed]


def _place(run: list[Slot], ranks: int, start: int = 0) -> tuple[list[Slot], int]:
    """Place slots one after the other, regardless of slice boundaries. Returns the slots and the end."""
    slots = []
    for slot in run:
        start = _round_up(start, _ALIGNMENT)
        slots.append(slot._replace(start=start, stop=start + slot.stop - slot.start))
        start = slots[-1].stop
    return slots, _round_up(start, math.lcm(ranks * _SLICE_ALIGNMENT, 128))


def _whole_slots(slots: list[Slot], bucket_size: int, ranks: int) -> list[tuple[list[Slot], int]]:
    """Place slots into buckets in which each slice holds whole parameters.

    Slices are equal, so a bucket must be large enough to divide its matrices nearly evenly.
    """
    buckets: list[tuple[list[Slot], int]] = []
    begin = taken = 0
    for end, slot in enumerate(slots, 1):
        taken += slot.stop
        if taken >= bucket_size or end == len(slots):
            placed, size = _share_out(slots[begin:end], ranks)
            if end == len(slots) and size * (1 - _MOST_EMPTY) > taken and buckets:  # merge with the last bucket
                former = len(buckets.pop()[0])
                placed, size = _share_out(slots[begin - former :], ranks)
            if end == len(slots) or size * (1 - _MOST_EMPTY) <= taken:
                buckets.append((placed, size))
                begin, taken = end, 0
    return buckets


def _share_out(run: list[Slot], ranks: int) -> tuple[list[Slot], int]:
    """Give each slot to the rank with the fewest elements so far, the largest slot first."""
    shares: list[list[Slot]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for slot in sorted(run, key=lambda slot: -slot.stop):
        least = filled.index(min(filled))
        shares[least].append(slot)
        filled[least] += _round_up(slot.stop, _ALIGNMENT)
    size = _round_up(max(filled), 128)
    return [placed for rank, share in enumerate(shares) for placed in _place(share, 1, rank * size)[0]], size * ranks


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
