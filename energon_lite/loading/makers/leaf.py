"""A data set of a blend, ready to be read."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from energon_lite.config.metadataset import LeafSpec
from energon_lite.extras.energon.joins.joined_loader import JoinedLoader
from energon_lite.extras.energon.joins.joined_reader import JoinedReader
from energon_lite.extras.energon.joins.joined_source import JoinedSource
from energon_lite.hooks import Cooker
from energon_lite.loading.makers.columns import LeafFields
from energon_lite.order.hashing import hash_ints, hash_text
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.read.opened_source import AnySource, OpenedSource
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.sample_loader import SampleLoader
from energon_lite.storage.stores.file_store import FileStore

__all__ = [
    *("KnownLeaf", "Leaf", "largest_mean_bytes", "leaf_key", "leaf_name"),
    *("leaves_apart", "measure_arguments", "reads_ahead"),
]

#: Keeps the hashes for different purposes apart.
_LEAF = 21


@dataclass(frozen=True)
class Leaf:
    """One data set of a blend, ready to be read.

    Args:
        name: what it is called in messages and counts.
        source: where the bytes are.
        loader: how they become a sample.
        key: 64 bits that tell it from all other leaves; the randomness of its samples comes from it.
        cooker: how a crude sample becomes a sample, if it has to.
        aux: stores that the cooker is given, by name.

    Attributes:
        open: gives the leaf with its files, which stay open as long as somebody has it; None: this one has them.
    """

    name: str
    source: AnySource
    loader: SampleLoader | JoinedLoader
    key: int
    cooker: Cooker | None = None
    aux: Mapping[str, FileStore[Any]] = field(default_factory=dict)
    open: Callable[[], Leaf] | None = field(default=None, init=False, repr=False, compare=False)

    @cached_property
    def parts(self) -> frozenset[str] | None:
        """The parts of a sample to be read; None: all."""
        return self.loader.parts

    @cached_property
    def reader(self) -> SampleReader | OpenedSource | JoinedReader:
        """Brings the bytes."""
        if isinstance(self.source, OpenedSource):
            return self.source
        if isinstance(self.source, JoinedSource) and isinstance(self.loader, JoinedLoader):
            both = zip(self.source.members, self.loader.members, strict=True)
            return JoinedReader(self.source, [_sample_reader(source, loader) for source, loader in both])
        assert isinstance(self.source, WebdatasetSource) and isinstance(self.loader, SampleLoader)
        return _sample_reader(self.source, self.loader)

    @cached_property
    def fields(self) -> LeafFields | None:
        """How parts become the fields of samples, where no code of the user's has a say in it."""
        if not isinstance(self.loader, SampleLoader):
            return None
        return LeafFields.plan(self.loader, only_bytes=isinstance(self.source, OpenedSource))

    @cached_property
    def length(self) -> int:
        """Samples in an epoch."""
        return len(self.source)

    @cached_property
    def mean_bytes(self) -> float:
        """Bytes of shard per sample."""
        return self.source.mean_bytes

    @property
    def path(self) -> str:
        """Where it is."""
        return self.source.path

    def apart(self) -> Leaf:
        """The same for another thread: open files, and what is planned, are not shared."""
        return replace(self, source=copy.copy(self.source))


class KnownLeaf(Leaf):
    """A leaf that is opened when one of its samples is read; what is asked of all leaves is known before.

    Args:
        name, path, key, length, mean_bytes: as those of :class:`Leaf`.
        open: gives the leaf with its files, which it may close when nobody has it any more.
    """

    def __init__(self, name: str, path: str, key: int, length: int, mean_bytes: float, open: Callable[[], Leaf]):
        vars(self).update(name=name, key=key, length=length, mean_bytes=mean_bytes, _path=path, open=open)

    @property
    def path(self) -> str:
        return str(vars(self)["_path"])

    def apart(self) -> Leaf:
        open = vars(self)["open"]
        return KnownLeaf(self.name, self.path, self.key, self.length, self.mean_bytes, lambda: open().apart())

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_OPEN:
            return getattr(vars(self)["open"](), name)
        return super().__getattribute__(name)


#: What only a leaf with its files has.
_OF_OPEN = frozenset({"source", "loader", "cooker", "aux", "parts", "reader", "fields"})


def leaf_key(data: str, seen: int) -> int:
    """64 bits for a leaf of data with this digest, before which there were so many of the same data."""
    return hash_ints(_LEAF, hash_text(data), seen)


def measure_arguments(spec: LeafSpec) -> list[str]:
    """What ``energon-lite measure`` is given for a leaf."""
    given = {"split-parts": spec.split_part, "dataset-config": spec.dataset_config, "split-config": spec.split_config}
    given = {"subflavors": json.dumps(spec.subflavors, default=str), **({} if is_jsonl(spec.path) else given)}
    usual = ("", "{}", "dataset.yaml", "split.yaml")
    return [spec.path, *(word for name, one in given.items() if one not in usual for word in (f"--{name}", one))]


def leaf_name(spec: LeafSpec) -> str:
    """What a leaf is called in messages and counts."""
    return "+".join(os.path.basename(path.rstrip("/")) or path for path in spec.folders) + f"[{spec.split_part}]"


def reads_ahead(leaves: Sequence[Leaf]) -> bool:
    """Whether any of some leaves is on slow storage."""
    known: bool | None = getattr(leaves, "reads_ahead", None)
    return any(leaf.source.read_ahead is not None for leaf in leaves) if known is None else known


def largest_mean_bytes(leaves: Sequence[Leaf]) -> float:
    """Bytes of shard per sample of the leaf that has the most."""
    known: float | None = getattr(leaves, "largest", None)
    return max((leaf.mean_bytes for leaf in leaves), default=0) if known is None else known


def leaves_apart(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """The same leaves for another thread; see :meth:`Leaf.apart`."""
    apart: Callable[[], Sequence[Leaf]] | None = getattr(leaves, "apart", None)
    return tuple(leaf.apart() for leaf in leaves) if apart is None else apart()


def _sample_reader(source: WebdatasetSource, loader: SampleLoader) -> SampleReader:
    return SampleReader(source, loader.parts, loader.streamed(source.part_names))
