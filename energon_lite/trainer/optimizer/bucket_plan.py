"""Which parameters share a buffer, which of them a bucket, and where in it each begins. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.neighbours import neighbours
from energon_lite.trainer.parallel.parameters import layout_of

#: A parameter begins at a multiple of this many elements, as fast kernels like it.
_ALIGNMENT = 64

Named = tuple[str, nn.Parameter]


def sum_dtype(dtype: torch.dtype, grad_dtype: str) -> torch.dtype:
    """In which type to add up gradients of this one; ``float32`` means at least that, ``parameter`` the same."""
    return torch.float32 if dtype.itemsize < 4 and grad_dtype == "float32" else dtype


class Kind(NamedTuple):
    """What the parameters of one buffer have in common.

    Args:
        dtype, grad_dtype: their type, and that in which their gradients are added up.
        replicated_over: mesh axes along which ranks hold the same parameters.
        sum_over: mesh axes, besides the data-parallel ones, along which gradients are parts of a sum.
        counts_here: of the copies of a parameter, this rank's is the one that counts in the gradient norm.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    replicated_over: frozenset[str]
    sum_over: frozenset[str]
    counts_here: bool

    @classmethod
    def of(cls, parameter: nn.Parameter, mesh: ParallelMesh, grad_dtype: str) -> Kind:
        """The kind of a parameter.

        Args:
            parameter: it has a layout (:func:`layout_of`).
            mesh: the ranks.
            grad_dtype: see :func:`sum_dtype`.
        """
        layout, dtype = layout_of(parameter), parameter.dtype
        sum_over = {axis for axis in layout.sum_over if mesh.group(axis) is not None}
        replicated = sum_over & {"ends"}
        if layout.sharded_dim is None and mesh.tp > 1:
            replicated.add("tp")
        counts = layout.counts_here(mesh) and ("tp" not in replicated or mesh.rank("tp") == 0)
        return cls(dtype, sum_dtype(dtype, grad_dtype), frozenset(replicated), frozenset(sum_over), counts)


class Slot(NamedTuple):
    """The place ``[start, stop)`` of a parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part, in its shape, of a tensor that is laid out like the bucket."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class BucketPlan(NamedTuple):
    """The places of a bucket's parameters.

    Args:
        slots: matrices first.
        decayed: elements before this one belong to matrices, which are decayed; the others do not.
        size: elements with padding: a multiple of the number of ranks and of 128.
        share: the slice of one rank.
    """

    slots: list[Slot]
    decayed: int
    size: int
    share: slice

    def clear_padding(self, flat: torch.Tensor) -> torch.Tensor:
        """Write zeros where ``flat``, which is laid out like the bucket, is of no parameter; returns it."""
        edges = [*chain.from_iterable((slot.start, slot.stop) for slot in self.slots), self.size]
        for stop, start in zip(edges[1::2], edges[2::2], strict=True):
            if stop < start:
                flat[stop:start].zero_()
        return flat


def plan_buckets(named: Sequence[Named], bucket_size: int, ranks: int, rank: int) -> list[BucketPlan]:
    """Cut parameters into buckets of neighbours.

    Args:
        named: names and parameters, in the order in which their gradients come.
        bucket_size: the most elements of a bucket, padding aside; a larger parameter gets one of its own.
        ranks, rank: number of equal slices that each bucket is cut into, and which of them is this rank's.

    Example:
        >>> w, b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        >>> [(slot.name, slot.start) for slot in plan_buckets([("b", b), ("w", w)], 100, 2, 0)[0].slots]
        [('w', 0), ('b', 64)]
    """
    runs = neighbours(((one, one[1].numel()) for one in named), bucket_size)
    return [_place(run, ranks, rank) for run in runs]


def _place(run: list[Named], ranks: int, rank: int) -> BucketPlan:
    slots: list[Slot] = []
    start = 0
    for name, p in sorted(run, key=lambda named: named[1].dim() <= 1):
        slots.append(Slot(name, p, start, start + p.numel()))
        start = _round_up(slots[-1].stop, _ALIGNMENT)
    decayed = max((slot.stop for slot in slots if slot.parameter.dim() > 1), default=0)
    size = _round_up(slots[-1].stop, math.lcm(ranks, 128))
    return BucketPlan(slots, decayed, size, slice(rank * size // ranks, (rank + 1) * size // ranks))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
