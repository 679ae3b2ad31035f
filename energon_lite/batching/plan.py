"""Which samples make up which micro-batch. Integers only: no torch, no I/O.

A run is a sequence of *passes* (what one ``for`` loop over the loader yields), a pass is a sequence of micro-batches,
numbered from 0, and a micro-batch is a list of sample addresses. The plan is the same on every rank; micro-batch ``m``
of a pass goes to the data-parallel rank ``m % world_size`` (counted from the last restore), so all ranks together walk
through one global sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from energon_lite.batching.address_list import AddressList
from energon_lite.errors import UsageError
from energon_lite.order import Order

__all__ = ["FixedPlan"]


@dataclass(frozen=True)
class FixedPlan:
    """Micro-batches of a fixed number of samples.

    Args:
        order: the order of the samples. If it ends, so does each pass.
        batch_size: samples in a micro-batch; None: single samples, not batched.
        drop_last: leave out a last micro-batch that is not full.

    Example:
        >>> plan = FixedPlan(ConcatOrder([5]), batch_size=2)
        >>> plan.count(0), plan.batches([0, 2])
        (3, [[(0, 0, 0), (0, 1, 0)], [(0, 4, 0)]])
    """

    order: Order
    batch_size: int | None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}", fix="give at least 1, or None for single samples")

    @property
    def rows(self) -> int:
        """Samples in a full micro-batch."""
        return self.batch_size or 1

    def count(self, pass_number: int) -> int | None:
        """Micro-batches in a pass, over all ranks together; None: it never ends."""
        bounds = self.order.bounds(pass_number)
        if bounds is None:
            return None
        length = bounds[1] - bounds[0]
        return length // self.rows if self.drop_last else -(-length // self.rows)

    def batches(self, numbers: Sequence[int], pass_number: int = 0) -> list[AddressList]:
        """For each micro-batch of ``numbers`` its addresses ``(leaf, index, epoch)``. One look-up for all of them."""
        if not len(numbers):
            return []
        bounds = self.order.bounds(pass_number)
        first = 0 if bounds is None else bounds[0]
        starts = np.asarray(numbers, dtype=np.int64) * self.rows + first
        sizes = np.full(len(starts), self.rows) if bounds is None else np.minimum(self.rows, bounds[1] - starts)
        edges = np.r_[0, np.cumsum(sizes)]
        inside = np.arange(edges[-1]) - np.repeat(edges[:-1], sizes)
        found = self.order.lookup(np.repeat(starts, sizes) + inside)
        leaf, index, epoch = (column.tolist() for column in found.columns())
        places = [slice(begin, end) for begin, end in pairwise(edges.tolist())]
        return [AddressList(leaf[here], index[here], epoch[here]) for here in places]
