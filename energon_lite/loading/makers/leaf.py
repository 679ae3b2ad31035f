"""A data set of a blend, ready to be read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from energon_lite.hooks import Cooker
from energon_lite.loading.makers.columns import LeafFields
from energon_lite.storage.read.opened_source import AnySource, OpenedSource
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.samples.sample_loader import SampleLoader

__all__ = ["Leaf"]


@dataclass(frozen=True)
class Leaf:
    """One data set of a blend, ready to be read.

    Args:
        name: what it is called in messages and counts.
        source: where the bytes are.
        loader: how they become a sample.
        key: 64 bits that tell it from all other leaves; the randomness of its samples comes from it.
        cooker: how a crude sample becomes a sample, if it has to.
    """

    name: str
    source: AnySource
    loader: SampleLoader
    key: int
    cooker: Cooker | None = None

    @cached_property
    def parts(self) -> frozenset[str] | None:
        """The parts of a sample to be read; None: all."""
        return self.loader.parts

    @cached_property
    def reader(self) -> SampleReader | OpenedSource:
        """Brings the bytes."""
        return self.source if isinstance(self.source, OpenedSource) else SampleReader(self.source, self.parts)

    @cached_property
    def fields(self) -> LeafFields | None:
        """How parts become the fields of samples, where no code of the user's has a say in it."""
        return LeafFields.plan(self.loader, only_bytes=isinstance(self.source, OpenedSource))

    @cached_property
    def length(self) -> int:
        """Samples in an epoch."""
        return len(self.source)

    @cached_property
    def mean_bytes(self) -> float:
        """Bytes of shard per sample."""
        return self.source.mean_bytes
