"""What the samples of a plan chunk cost, and steps whose micro-batches are even in all of it."""

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

#: Micro-batches among which images are exchanged so that none has too many.
_WINDOW = 128


@dataclass(frozen=True)
class StepCosts:
    """What each sample of a chunk costs.

    Args:
        rows: by kind of work, whatever the unit of each, ``[rows, samples]``.
        lengths: of the samples in tokens, ``[samples]``; a piece of a sample costs that part of it.
        images: of each sample, ``[samples]``; None: their number is not limited.
        max_images: in a micro-batch.
    """

    rows: Ints
    lengths: Ints
    images: Ints | None = None
    max_images: int | None = None

    def of(self, batches: MicroBatches, multiple: int = 1) -> Ints:
        """The costs of the entries of micro-batches, those of their attention first, ``[1 + rows, entries]``.

        Each is padded to a multiple, and with context parallelism cut into parts that cost the same: what is even for
        all of it is even for the parts.
        """
        whole, length = np.maximum(self.lengths[batches.sample], 1), batches.length
        rows = self.rows[:, batches.sample]
        part = np.where(length == whole, rows, rows // whole * length + rows % whole * length // whole)
        padded = -(-length // multiple) * multiple
        return np.concatenate([(padded * padded)[None], part])

    def of_batches(self, batches: MicroBatches) -> Ints:
        """The costs of micro-batches, tokens and attention with padding first, ``[2 + rows, micro-batches]``."""
        costs = self.of(batches)[1:]
        ends = np.concatenate([np.zeros((len(costs), 1), dtype=np.int64), np.cumsum(costs, axis=1)], axis=1)
        return np.concatenate([batches.space()[None], batches.attention()[None], np.diff(ends[:, batches.offsets])])

    def sizes(self, batches: MicroBatches, capacity: Capacity) -> tuple[Ints, list[int]]:
        """What entries take up, ``[limits, entries]``, and what a micro-batch may hold of each."""
        sizes, limits = [capacity.sizes(batches.length)], [capacity.limit]
        if self.images is not None and self.max_images is not None:
            sizes.append(self.images[batches.sample])
            limits.append(self.max_images)
        return np.stack(sizes), limits


@dataclass(frozen=True)
class CostColumns:
    """Where the costs of a leaf's samples come from.

    Args:
        model: what makes costs of the columns; None: the number of images is limited, and that is all.
        columns: values of the leaf's samples, by the names that the model knows; tokens are the plan's lengths.
        max_images: images of a micro-batch.

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
        """The costs of samples ``index``, which have these lengths, by kind of work: ``[rows, samples]``."""
        if self.model is None:
            return np.zeros((0, len(index)), dtype=np.int64)
        needed = {name: self.values(name, index) for name in self.model.needs if name != TOKENS}
        return self.model.costs({TOKENS: lengths, **needed})

    def values(self, name: str, index: Ints) -> Ints:
        """A column's values of samples, ``[samples]``."""
        return checked_lengths(self.columns[name][index], name)

    def images(self, index: Ints) -> Ints | None:
        """The images of samples, ``[samples]``; None: their number is not limited."""
        return None if self.max_images is None else self.values(IMAGES, index)


def even_step_costs(
    batches: MicroBatches, capacity: Capacity | None, costs: StepCosts, sample: Ints | None = None
) -> MicroBatches:
    """The micro-batches of one step with all costs as even as can be found, in an order in which the sums of ranks are
    even, too: in turn ``t``, rank ``r`` of ``w`` takes number ``t * w + r``.

    The samples of packed micro-batches are put together anew
    (:func:`~energon_lite.extras.balance.even_costs.even_costs`); padded ones are only brought into order.

    Args:
        batches: those of one step.
        capacity: what a packed micro-batch may hold; None: nothing is exchanged.
        costs: of the chunk that they are from.
        sample: the number of the sample at each position of the chunk; None: none comes twice.
    """
    if batches.packed and capacity is not None and len(batches.sample):
        even = _evened(batches, capacity, costs, sample)
        if even is not None:
            return even
    return batches.select(np.argsort(arrange_costs(costs.of_batches(batches)), kind="stable"))


def _evened(batches: MicroBatches, capacity: Capacity, costs: StepCosts, sample: Ints | None) -> MicroBatches | None:
    """Micro-batches evened out, in the order of their places; None if copies of a sample cannot be kept apart then."""
    sizes, limits = costs.sizes(batches, capacity)
    home = np.repeat(np.arange(len(batches)), batches.rows())
    owner = None if sample is None else np.unique(sample[batches.sample], return_inverse=True)[1]
    if owner is not None and int(owner.max()) + 1 == len(owner):
        owner = None  # no sample comes twice in this step
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
    """Micro-batches none of which has too many images; a sample that has too many by itself is alone.

    Images are exchanged for text with neighbours of the same epoch, which stay within the capacity. Where all of them
    have many, there are more micro-batches than before.

    Args:
        batches: of a chunk.
        capacity: what they may hold.
        costs: of the chunk; they limit images, or nothing is done.
        edges: of the chunk's stretches (:class:`~energon_lite.batching.epochs.Stretches`), which stay apart.
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
    """The entries in other micro-batches."""
    return batches.regrouped(
        np.argsort(place, kind="stable"), np.bincount(place, minlength=count), later=len(batches.sample)
    )
