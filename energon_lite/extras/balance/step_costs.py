"""Costs of the samples of a plan chunk, and steps whose micro-batches are balanced in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.copies import keep_apart
from energon_lite.batching.micro_batches import MicroBatches, concatenate
from energon_lite.batching.token_lengths import Lengths
from energon_lite.extras.balance.cost_model import IMAGES, TOKENS, CostModel
from energon_lite.extras.balance.even_costs import arrange_costs, even_costs, fit_limits

__all__ = ["CostColumns", "StepCosts", "even_step_costs", "within_image_limit"]

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


@dataclass(frozen=True)
class CostColumns:
    """Source of the costs of a leaf's samples.

    Args:
        model: the cost model; None: only the number of images is limited.
        columns: values of the leaf's samples, by the size names of the model; tokens are the plan's lengths.
        max_images: limit of images in a micro-batch.

    Example:
        >>> model = CostModel.from_features({"tokens": 10**9, "images": 5 * 10**9})
        >>> columns = CostColumns(model, {"images": np.array([2, 0])})
        >>> columns.rows(np.array([1, 0]), lengths=np.array([30, 40])).tolist()
        [[30, 40], [0, 10], [0, 0]]
    """

    model: CostModel | None
    columns: Mapping[str, Lengths] = field(default_factory=dict)
    max_images: int | None = None

    def rows(self, index: Ints, lengths: Ints) -> Ints:
        """Costs of samples ``index`` with these lengths, by kind of work: ``[rows, samples]``."""
        if self.model is None:
            return np.zeros((0, len(index)), dtype=np.int64)
        needed = {name: self.values(name, index) for name in self.model.needs if name != TOKENS}
        return self.model.costs({TOKENS: lengths, **needed})

    def values(self, name: str, index: Ints) -> Ints:
        """Values of a column for samples ``index``, ``[samples]``."""
        return checked_lengths(self.columns[name][index], name)

    def images(self, index: Ints) -> Ints | None:
        """Numbers of images of samples ``index``, ``[samples]``; None: they are not limited."""
        return None if self.max_images is None else self.values(IMAGES, index)


def even_step_costs(
    batches: MicroBatches, capacity: Capacity | None, costs: StepCosts, sample: Ints | None = None
) -> MicroBatches:
    """Balance all costs over the micro-batches of one step, in an order in which the sums of ranks are balanced, too.

    In turn ``t``, rank ``r`` of ``w`` takes micro-batch ``t * w + r``. The samples of packed micro-batches are
    redistributed (:func:`~energon_lite.extras.balance.even_costs.even_costs`); padded micro-batches are only reordered.

    Args:
        batches: the micro-batches of one step.
        capacity: capacity of a packed micro-batch; None: no samples are swapped.
        costs: costs of the chunk that the step belongs to.
        sample: the number of the sample at each position of the chunk; None: no sample repeats.
    """
    if batches.packed and capacity is not None and len(batches.sample):
        even = _evened(batches, capacity, costs, sample)
        if even is not None:
            return even
    return batches.select(np.argsort(arrange_costs(costs.of_batches(batches)), kind="stable"))


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


def within_image_limit(
    batches: MicroBatches, capacity: Capacity, costs: StepCosts, edges: Sequence[int] = (0,)
) -> MicroBatches:
    """Micro-batches that keep the limit of images; a sample that exceeds it by itself is alone.

    Images are swapped for text with neighbours of the same epoch, which stay within the capacity. If all of them have
    many images, the number of micro-batches grows.

    Args:
        batches: the micro-batches of a chunk.
        capacity: capacity of a micro-batch.
        costs: costs of the chunk; without a limit of images, the micro-batches are returned unchanged.
        edges: boundaries of the chunk's stretches (:class:`~energon_lite.batching.epochs.Stretches`), which stay apart.
    """
    sizes, limits = costs.sizes(batches, capacity)
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
            sizes, limits = costs.sizes(part, capacity)
            home = np.repeat(np.arange(len(part)), part.rows())
            place = fit_limits(sizes, limits, home, len(part))
            part = _put(part, place, int(place.max()) + 1)
        parts.append(part)
    return replace(concatenate(parts, [0] * len(parts)), counts=batches.counts)


def _put(batches: MicroBatches, place: Ints, count: int) -> MicroBatches:
    """Micro-batches with the entries moved to the given places, ``[entries]``."""
    return batches.regrouped(
        np.argsort(place, kind="stable"), np.bincount(place, minlength=count), later=len(batches.sample)
    )
