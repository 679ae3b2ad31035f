"""Which parameters share a bucket, and where in it each begins. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import nn

from energon_lite.trainer.optimizer.config import OptimizerConfig, Rule
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.neighbours import neighbours
from energon_lite.trainer.parallel.parameters import layout_of, local_tensor

#: A parameter begins at a multiple of this many elements, as fast kernels like it.
_ALIGNMENT = 64
#: And the slice of each rank at a multiple of this many.
_SLICE_ALIGNMENT = 32
#: More than this share of a bucket of whole matrices is not left empty, if more matrices can fill it.
_MOST_EMPTY = 1 / 8

Named = tuple[str, nn.Parameter]


def sum_dtype(dtype: torch.dtype, grad_dtype: str) -> torch.dtype:
    """In which type to add up gradients of this one; ``float32`` means at least that, ``parameter`` the same."""
    return torch.float32 if dtype.itemsize < 4 and grad_dtype == "float32" else dtype


class Kind(NamedTuple):
    """What the parameters of one bucket have in common.

    Args:
        dtype, grad_dtype: their type, and that in which their gradients are added up.
        algorithm: what updates them. Muon's slices are whole matrices.
        replicated_over: mesh axes along which ranks hold the same parameters.
        sum_over: mesh axes, besides the data-parallel ones, along which gradients are parts of a sum.
        counts_here: of the copies of a parameter, this rank's is the one that counts in the gradient norm.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    algorithm: str
    replicated_over: frozenset[str]
    sum_over: frozenset[str]
    counts_here: bool

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, mesh: ParallelMesh, config: OptimizerConfig) -> Kind:
        """The kind of a parameter.

        Args:
            name, parameter: the parameter; see :func:`layout_of`.
            mesh: the ranks.
            config: see :func:`sum_dtype` and :meth:`OptimizerConfig.algorithm_of`.
        """
        layout, dtype = layout_of(parameter), parameter.dtype
        sum_over = {axis for axis in layout.sum_over if mesh.group(axis) is not None}
        replicated = sum_over & {"ends"}
        if layout.sharded_dim is None and mesh.tp > 1:
            replicated.add("tp")
        counts = layout.counts_here(mesh) and ("tp" not in replicated or mesh.rank("tp") == 0)
        algorithm = config.algorithm_of(name, parameter.dim())
        summed_in = sum_dtype(dtype, config.grad_dtype)
        return cls(dtype, summed_in, algorithm, frozenset(replicated), frozenset(sum_over), counts)


class Slot(NamedTuple):
    """The place ``[start, stop)`` of a parameter in its bucket, and what it is updated with."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    rule: Rule = Rule(0.0)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part, in the shape that it has on this rank, of a tensor laid out like the bucket."""
        return flat[self.start : self.stop].view(local_tensor(self.parameter).shape)


class BucketPlan(NamedTuple):
    """The places of a bucket's parameters.

    Args:
        slots: by their places.
        size: elements with padding: a multiple of the number of ranks and of 128.
        share: the slice of one rank.
    """

    slots: list[Slot]
    size: int
    share: slice

    @property
    def runs(self) -> list[tuple[slice, Rule]]:
        """The rank's slice, counted from its own beginning, as few runs of elements with one rule each."""
        runs, start = [], 0
        for rule, alike in groupby(self.slots, key=lambda slot: slot.rule):
            # The padding after a parameter is zero, whatever is done to it: a run begins where fast kernels like it.
            stop = _round_up([slot.stop for slot in alike][-1], _ALIGNMENT)
            here = slice(max(start - self.share.start, 0), min(stop, self.share.stop) - self.share.start)
            runs += [(here, rule)] if here.start < here.stop else []
            start = stop
        return runs

    def clear_padding(self, flat: torch.Tensor) -> torch.Tensor:
        """Write zeros where ``flat``, which is laid out like the bucket, is of no parameter; returns it."""
        edges = [0, *chain.from_iterable((slot.start, slot.stop) for slot in self.slots), self.size]
        for stop, start in zip(edges[::2], edges[1::2], strict=True):
            if stop < start:
                flat[stop:start].zero_()
        return flat


def plan_buckets(
    named: Sequence[Named], bucket_size: int, ranks: int, rank: int, config: OptimizerConfig | None = None
) -> list[BucketPlan]:
    """Cut parameters into buckets of neighbours.

    Args:
        named: names and parameters of one kind, in the order in which their gradients come.
        bucket_size: the most elements of a bucket, padding aside; a larger parameter gets one of its own. Where slices
            are whole matrices, as few as leave little of a bucket empty may be more.
        ranks, rank: number of equal slices that each bucket is cut into, and which of them is this rank's.
        config: gives each parameter its rule and its algorithm.

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
    """One after the other; a slice may begin and end in the midst of one. Returns the places, and where they end."""
    slots = []
    for slot in run:
        start = _round_up(start, _ALIGNMENT)
        slots.append(slot._replace(start=start, stop=start + slot.stop - slot.start))
        start = slots[-1].stop
    return slots, _round_up(start, math.lcm(ranks * _SLICE_ALIGNMENT, 128))


def _whole_slots(slots: list[Slot], bucket_size: int, ranks: int) -> list[tuple[list[Slot], int]]:
    """Buckets in which each slice is of whole parameters. Slices are equal, so a bucket must be large enough for its
    matrices to be shared out nearly evenly."""
    buckets: list[tuple[list[Slot], int]] = []
    begin = taken = 0
    for end, slot in enumerate(slots, 1):
        taken += slot.stop
        if taken >= bucket_size or end == len(slots):
            placed, size = _share_out(slots[begin:end], ranks)
            if end == len(slots) and size * (1 - _MOST_EMPTY) > taken and buckets:  # too few are left: with the last
                former = len(buckets.pop()[0])
                placed, size = _share_out(slots[begin - former :], ranks)
            if end == len(slots) or size * (1 - _MOST_EMPTY) <= taken:
                buckets.append((placed, size))
                begin, taken = end, 0
    return buckets


def _share_out(run: list[Slot], ranks: int) -> tuple[list[Slot], int]:
    """Each to the rank that has least so far, the largest first."""
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
