"""Costs of the samples of a plan chunk, and steps whose micro-batches are balanced in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.epochs import keep_apart
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.extras.balance.even_costs import arrange_costs, even_costs, fit_limits

__all__ = ["StepCosts"]

#: Micro-batches among which images are swapped, so that none exceeds the limit of images.
_WINDOW = 128


@dataclass(frozen=True)
class StepCosts:
    """Costs of each sample of a chunk.

    Args:
        rows: costs by kind of work, each in its own unit, ``[rows, samples]``.
        lengths: lengths of the samples in tokens, ``[samples]``; a piece of a sample costs its share by length.
        images: images of each sample, ``[samples]``; None: their number is not limited.
        max_images: limit of images in a micro-batch.
    """

    rows: Ints
    lengths: Ints
    images: Ints | None = None
    max_images: int | None = None

    def of(self, batches: MicroBatches, multiple: int = 1) -> Ints:
        """Costs of the entries of micro-batches, ``[1 + rows, entries]``; the first row is attention.

        Each entry is padded to a multiple, and with context parallelism cut into parts of equal cost: a balance of the
        whole entries is a balance of the parts.
        """
        whole = np.maximum(self.lengths[batches.sample], 1)
        length = batches.length
        rows = self.rows[:, batches.sample]
        part = np.where(length == whole, rows, rows // whole * length + rows % whole * length // whole)
        padded = -(-length // multiple) * multiple
        return np.concatenate([(padded * padded)[None], part])

    def of_batches(self, batches: MicroBatches) -> Ints:
        """Costs of micro-batches, ``[2 + rows, micro-batches]``; the first two are tokens and attention, padded."""
        costs = self.of(batches)[1:]
        ends = np.concatenate([np.zeros((len(costs), 1), dtype=np.int64), np.cumsum(costs, axis=1)], axis=1)
        return np.concatenate([batches.space()[None], batches.attention()[None], np.diff(ends[:, batches.offsets])])

    def sizes(self, batches: MicroBatches, capacity: Capacity) -> tuple[Ints, list[int]]:
        """Sizes of entries, ``[limits, entries]``, and the limit of a micro-batch for each row."""
        sizes, limits = [capacity.sizes(batches.length)], [capacity.limit]
        if self.images is not None and self.max_images is not None:
            sizes.append(self.images[batches.sample])
            limits.append(self.max_images)
        return np.stack(sizes), limits

    def even(self, batches: MicroBatches, capacity: Capacity | None, sample: Ints | None) -> MicroBatches:
        """See :class:`~energon_lite.batching.step_balancer.StepBalancer`. The samples of packed micro-batches are
        redistributed (:func:`~energon_lite.extras.balance.even_costs.even_costs`); padded ones are only reordered."""
        if batches.packed and capacity is not None and len(batches.sample):
            even = _evened(batches, capacity, self, sample)
            if even is not None:
                return even
        return batches.select(np.argsort(arrange_costs(self.of_batches(batches)), kind="stable"))

    def within_limits(self, batches: MicroBatches, capacity: Capacity, edges: Sequence[int] = (0,)) -> MicroBatches:
        """See :class:`~energon_lite.batching.step_balancer.StepBalancer`. Images are swapped for text with neighbours
        of the same epoch, which stay within the capacity. If all of them have many images, the number of micro-batches
        grows."""
        sizes, limits = self.sizes(batches, capacity)
        if len(limits) < 2 or not batches.packed or not len(batches):
            return batches
        home = np.repeat(np.arange(len(batches)), batches.rows())
        images = np.bincount(home, weights=sizes[1], minlength=len(batches)).astype(np.int64)
        crowded = (images > limits[1]) & (batches.rows() > 1)
        stretch = np.searchsorted(edges, batches.sample[batches.offsets[:-1]], side="right")
        begins = [*np.flatnonzero(np.diff(stretch, prepend=-1)).tolist(), len(batches)]
        windows = [first for begin, stop in pairwise(begins) for first in range(begin, stop, _WINDOW)]
        parts = []
        for first, stop in pairwise([*windows, len(batches)]):
            part = batches.select(np.arange(first, stop))
            if crowded[first:stop].any():
                sizes, limits = self.sizes(part, capacity)
                home = np.repeat(np.arange(len(part)), part.rows())
                place = fit_limits(sizes, limits, home, len(part))
                part = _put(part, place, int(place.max()) + 1)
            parts.append(part)
        return replace(concatenate(parts, [0] * len(parts)), counts=batches.counts)


def _evened(batches: MicroBatches, capacity: Capacity, costs: StepCosts, sample: Ints | None) -> MicroBatches | None:
    """Balanced micro-batches, in the order of their places; None if copies of a sample cannot be kept apart."""
    sizes, limits = costs.sizes(batches, capacity)
    home = np.repeat(np.arange(len(batches)), batches.rows())
    owner = None if sample is None else np.unique(sample[batches.sample], return_inverse=True)[1]
    if owner is not None and int(owner.max()) + 1 == len(owner):
        owner = None  # no sample repeats in this step
    place = even_costs(costs.of(batches, capacity.multiple), sizes, limits, home, len(batches), owner)
    even = _put(batches, place, len(batches))
    if sample is None or owner is None:
        return even
    sizes, _ = costs.sizes(even, capacity)
    images = sizes[-1] if len(limits) > 1 else np.zeros_like(sizes[0])
    most = limits[-1] if len(limits) > 1 else 0

    def fits(sizes: list[int], images: list[int]) -> bool:
        return sum(sizes) <= limits[0] and sum(images) <= most

    apart = keep_apart(even, sample, sizes[0], images, fits)
    return apart if len(apart) == len(batches) else None


def _put(batches: MicroBatches, place: Ints, count: int) -> MicroBatches:
    """Micro-batches with the entries moved to the given places, ``[entries]``."""
    return batches.regrouped(
        np.argsort(place, kind="stable"), np.bincount(place, minlength=count), later=len(batches.sample)
    )
