"""Leaves of a blend for training: opened, or, for a very large blend, taken from the cache of the user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import is_url, local_path
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.blend_file import BlendFile, KnownBlend, fits_table, keyed
from energon_lite.loading.blend_weights import by_samples, find_stages
from energon_lite.loading.found_leaves import FoundLeaves
from energon_lite.loading.iterators.identity import LeafIdentity
from energon_lite.loading.leaf_table import LeafIdentities, LeafOpener, LeafTable
from energon_lite.loading.leaves import PathOrDict
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.options import Reading
from energon_lite.order.stages import WeightStage
from energon_lite.storage.files.file_lock import only_one
from energon_lite.trust import trusts

__all__ = ["MANY", "OpenedBlend", "blend_of_leaves", "blend_of_many"]

#: Number of leaves from which on they are opened when they are read, and the user's cache has their properties.
MANY = 2000
#: Size in bytes of a document that may have so many leaves: one process of a machine reads it, and the others wait.
_LARGE = 1 << 18

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


def blend_of_many(
    path: PathOrDict,
    encoder: TaskEncoder,
    reading: Reading,
    split_part: str,
    find: Callable[[], Sequence[LeafSpec]],
    *,
    run: int | None,
    window: int | None,
) -> OpenedBlend | Sequence[LeafSpec]:
    """Return the blend of a document if it has very many leaves; otherwise return its leaves, to be opened.

    Args:
        path: path of the document, or another argument for leaves.
        encoder: the user's hooks.
        reading, split_part: settings that decide the leaves and their samples.
        find: function that finds the leaves.
        run, window: see :class:`~energon_lite.loading.leaf_table.LeafTable`.

    Raises:
        ConfigError, DatasetError, UsageError: a leaf cannot be opened.
    """
    document = _local_document(path)
    trust_code = trusts(reading.trust_code)
    kind = reading.sample_type
    chosen = reading.use_measured_skips or reading.filter is not None  # needs the files of all leaves
    if document is None or chosen or reading.read_ahead is not None:
        return find()
    opener = LeafOpener(encoder, trust_code, kind)
    asked = [split_part, reading.dataset_config, reading.split_config, reading.labels, trust_code, keyed(encoder)]
    file = BlendFile(document, [*asked, kind and [kind.__module__, kind.__qualname__]], opener)
    known = file.read() if os.path.exists(file.path) else None
    if known is None:
        blend = _found_or_made(document, file, find)
        if not isinstance(blend, KnownBlend):
            return blend
        known = blend
    return _of_known(known, opener, run, window)


def _found_or_made(
    document: str, file: BlendFile, find: Callable[[], Sequence[LeafSpec]]
) -> KnownBlend | Sequence[LeafSpec]:
    """Return the blend, made by this process or another one; or its leaves, if they are few."""
    is_large = os.path.getsize(document) > _LARGE
    began = time.time_ns()
    specs = None if is_large else find()
    if specs is not None and not _are_many(specs):
        return specs
    with only_one(file.path) if file.can_be_written() else nullcontext():
        known = file.read()
        if known is not None:
            return known
        if specs is None:
            began = time.time_ns()
            specs = find()
        if _are_many(specs):
            try:
                return file.make(specs, began)
            except ValueError:  # a leaf that is not plain data
                return specs
    return specs


def _of_known(known: KnownBlend, opener: LeafOpener, run: int | None, window: int | None) -> OpenedBlend:
    stages = find_stages(known.specs) if known.changes else (WeightStage(0, tuple(known.weights.tolist())),)
    return OpenedBlend(
        LeafTable(known.specs, known.facts, known.keys, opener, run=run, window=window),
        known.facts.lengths,
        known.keys,
        [multiplier or None for multiplier in known.multipliers.tolist()],
        tuple(known.repetitions.tolist()),
        stages,
        lambda settings: LeafIdentities(known.specs, known.facts, settings),
    )


def _are_many(specs: Sequence[LeafSpec]) -> bool:
    return len(specs) >= MANY and fits_table(specs)


def _local_document(path: PathOrDict) -> str | None:
    """Return the absolute path of a document on a local disk; None for other paths."""
    if isinstance(path, FoundLeaves) or not isinstance(path, (str, os.PathLike)):
        return None
    text = local_path(os.fspath(path))
    return os.path.abspath(text) if not is_url(text) and is_metadataset(text) and os.path.isfile(text) else None
