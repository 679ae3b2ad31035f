"""Leaves of a path that have already been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from energon_lite.config.leaf_spec import LeafSpec

__all__ = ["FoundLeaves"]


@dataclass(frozen=True)
class FoundLeaves:
    """Result of :func:`~energon_lite.loading.leaves.find_leaves`, used in place of the path, so that a caller can
    inspect the leaves and make a data set of them without reading all documents twice.

    Args:
        specs: the leaves as the documents describe them.
    """

    specs: Sequence[LeafSpec]
