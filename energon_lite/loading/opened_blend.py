"""Leaves of a blend for training, and the properties that its order depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.blend_weights import by_samples, find_stages
from energon_lite.loading.iterators.identity import LeafIdentity
from energon_lite.loading.leaves import PathOrDict
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.options import Reading
from energon_lite.order.stages import WeightStage

__all__ = ["BlendRequest", "OpenedBlend", "Settings", "blend_of_leaves"]

#: Function that returns the settings of a leaf for its identity, by its number.
Settings = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class OpenedBlend:
    """Leaves of a blend, and the properties that its order depends on.

    Args:
        leaves: the leaves, ready for reading.
        lengths, keys: ``[leaves]`` int64 and uint64, of each leaf.
        multipliers: ``shuffle_over_epochs_multiplier`` of each leaf.
        repetitions: repetitions of each leaf; empty in a blend by weight.
        stages: stages with their shares of samples.
        identities: returns the identity of each leaf, given their settings.
    """

    leaves: Sequence[Leaf]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]
    multipliers: Sequence[int | None]
    repetitions: tuple[float, ...]
    stages: tuple[WeightStage, ...]
    identities: Callable[[Settings], Sequence[LeafIdentity]]


class BlendRequest(NamedTuple):
    """Arguments of a guest that opens blends (table ``BLEND_OPENERS``).

    Attributes:
        path: path of the document, or another argument for leaves.
        encoder: the user's hooks.
        reading, split_part: settings that decide the leaves and their samples.
        run, window: see :func:`~energon_lite.storage.read.run_reader.read_in_runs`.
        find: function that finds the leaves; it reads the documents at its first call only.
    """

    path: PathOrDict
    encoder: TaskEncoder
    reading: Reading
    split_part: str
    run: int | None
    window: int | None
    find: Callable[[], Sequence[LeafSpec]]


def blend_of_leaves(
    specs: Sequence[LeafSpec], leaves: Sequence[Leaf], identities: Sequence[LeafIdentity]
) -> OpenedBlend:
    """Return the blend of open leaves.

    Raises:
        ConfigError, DataIndexError: as :func:`~energon_lite.loading.blend_weights.by_samples`.
    """
    specs = by_samples(specs, [leaf.source for leaf in leaves])
    return OpenedBlend(
        leaves,
        np.array([leaf.length for leaf in leaves], dtype=np.int64),
        np.array([leaf.key for leaf in leaves], dtype=np.uint64),
        [spec.shuffle_over_epochs_multiplier for spec in specs],
        tuple(spec.repetitions for spec in specs if spec.repetitions is not None),  # set for all leaves or none
        find_stages(specs),
        lambda settings: tuple(
            replace(identity, settings=settings(number)) for number, identity in enumerate(identities)
        ),
    )
