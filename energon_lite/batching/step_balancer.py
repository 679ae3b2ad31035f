"""Door for cost models: balance of the steps of a plan in all costs of its samples, and limits of images.

Without a cost model, steps are balanced in tokens and attention (:mod:`energon_lite.batching.steps`). Implementations
are in :mod:`energon_lite.extras.balance`; guests name theirs in their table ``COST_MODELS``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.micro_batches import MicroBatches

__all__ = ["IMAGES", "TOKENS", "CostColumns", "Lengths", "StepBalancer", "StepCostModel"]


class Lengths(Protocol):
    """Lengths of a leaf's samples: an array, or an object that is indexed like one."""

    def __len__(self) -> int:
        """Number of samples of the leaf."""

    def __getitem__(self, key: Any) -> Any:
        """Lengths of samples ``key`` in tokens, an int64 array."""


#: Names of sizes of a sample: its length, which the plan knows, and the number of its images, a column.
TOKENS = "tokens"
IMAGES = "images"


class StepBalancer(Protocol):
    """Balancer of the micro-batches of one plan chunk. Its methods are functions of their arguments alone, because all
    ranks call them."""

    def sizes(self, batches: MicroBatches, capacity: Capacity) -> tuple[Ints, list[int]]:
        """Return sizes of entries, ``[limits, entries]``, and the limit of a micro-batch for each row.

        The first row is the one of the capacity; images may follow.
        """

    def within_limits(self, batches: MicroBatches, capacity: Capacity, edges: Sequence[int]) -> MicroBatches:
        """Return micro-batches of the same samples that keep all limits; a sample that exceeds one is alone.

        Args:
            batches: the micro-batches of the chunk.
            capacity: capacity of a micro-batch.
            edges: boundaries of the chunk's stretches (:class:`~energon_lite.batching.epochs.Stretches`), which stay
                apart.
        """

    def even(self, batches: MicroBatches, capacity: Capacity | None, sample: Ints | None) -> MicroBatches:
        """Return the same number of micro-batches of the same samples, balanced in all costs, in the order of ranks: in
        turn ``t``, rank ``r`` of ``w`` takes micro-batch ``t * w + r``.

        Args:
            batches: the micro-batches of one step.
            capacity: capacity of a packed micro-batch; None: no samples are swapped.
            sample: the number of the sample at each position of the chunk; None: no sample repeats.
        """


class StepCostModel(Protocol):
    """Cost model of a step: the argument ``costs`` of :class:`~energon_lite.ByTokens`."""

    @property
    def needs(self) -> Sequence[str]:
        """Names of the sizes of a sample that the model needs: :data:`TOKENS`, and columns."""

    def by_feature(self) -> Mapping[str, int]:
        """Return the coefficients: plain data for states, equal for equal models only."""

    def balancer(self, sizes: Mapping[str, Ints], max_images: int | None) -> StepBalancer:
        """Return the balancer of a chunk.

        Args:
            sizes: by name, of each sample of the chunk, ``[samples]``: :data:`TOKENS`, the needed ones, and
                :data:`IMAGES` if they are limited.
            max_images: limit of images in a micro-batch; None: there is none.
        """


class CostColumns(NamedTuple):
    """Cost model of a plan, with the stored sizes of the samples.

    Args:
        model: the cost model.
        leaves: columns of each leaf's samples, by name of the size; tokens are the plan's lengths.
        max_images: limit of images in a micro-batch; None: there is none.
    """

    model: StepCostModel
    leaves: Sequence[Mapping[str, Lengths]]
    max_images: int | None = None
