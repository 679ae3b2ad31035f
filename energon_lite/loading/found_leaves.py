"""The leaves of a path, found already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from energon_lite.config.metadataset import LeafSpec

__all__ = ["FoundLeaves"]


@dataclass(frozen=True)
class FoundLeaves:
    """What :func:`~energon_lite.loading.leaves.find_leaves` found, in place of the path, for who wants to know the
    leaves, and to make a data set of them, without reading all documents twice.

    Args:
        specs: what the documents say of each.
    """

    specs: Sequence[LeafSpec]
