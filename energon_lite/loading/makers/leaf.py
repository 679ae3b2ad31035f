"""A data set of a blend, ready to be read, the making of its samples' fields, and the names of its samples."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import listed
from energon_lite.hooks import Cooker
from energon_lite.loading.makers.outcomes import Address
from energon_lite.order.hashing import HashDomain, hash_ints, hash_text
from energon_lite.samples import BASE_FIELDS, Sample
from energon_lite.samples.sample import is_required
from energon_lite.storage.index.nv_meta import is_jsonl
from energon_lite.storage.read.opened_source import AnySource, OpenedSource
from energon_lite.storage.read.sample_reader import Reader
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import Access, Loader, SampleLoader
from energon_lite.storage.stores import FileStore

#: Tag that separates the hashes of this purpose from those of others.
_LEAF = HashDomain.LEAF.value


class LeafFields:
    """Plan for making the fields of a leaf's samples from their parts. Use :meth:`plan` to make one.

    Attributes:
        kind: type of the samples.
        labels: function that copies the subflavors, for a sample.
        parts: names of the parts that are needed.
        steps: by part, the function that decodes its bytes (None: no decoding), and the fields made from it, with the
            accesses into the decoded value (None: the whole value).
        absent: fields of a sample that keep their defaults.
        can_collate: a batch of such samples consists of their collated fields alone.
    """

    def __init__(self, kind: type[Sample], loader: SampleLoader, fields: Mapping[str, Access]):
        self.kind = kind
        self.labels = loader.labels
        self.parts = frozenset(access.part for access in fields.values())
        self.steps: dict[str, tuple[Callable[[bytes], Any] | None, list[tuple[str, Access | None]]]] = {
            part: (None if loader.decoder is None else loader.decoder.function(part), []) for part in self.parts
        }
        for name, access in fields.items():
            self.steps[access.part][1].append((name, access if access.steps else None))
        there = {field.name: field for field in dataclasses.fields(kind) if field.init}
        given = fields.keys() | set(BASE_FIELDS)
        self.absent = [field for name, field in there.items() if name not in given]
        is_plain = not hasattr(kind, "from_samples") and not hasattr(kind, "__post_init__")
        self.can_collate = is_plain and given <= there.keys() and not any(map(is_required, self.absent))

    @classmethod
    def plan(cls, loader: SampleLoader, *, only_bytes: bool = False) -> LeafFields | None:
        """Return the plan of a loader; None if it uses code of the user's, or if the fields depend on the sample.

        Args:
            only_bytes: parts may have values of other types than bytes, which are not decoded.
        """
        kind = loader.sample_type
        field_map = loader.field_map
        decoder = loader.decoder
        if kind is None or field_map is None or loader.sample_loader is not None:
            return None
        if decoder is not None and (type(decoder) is not SampleDecoder or decoder.handlers):
            return None
        if any(len(accesses) != 1 for _, accesses in field_map.fields):
            return None
        made = cls(kind, loader, {name: accesses[0] for name, accesses in field_map.fields})
        if only_bytes:
            made.steps = {
                part: (decode and partial(_of_bytes, decode), step) for part, (decode, step) in made.steps.items()
            }
        return made


@dataclass(frozen=True)
class Leaf:
    """One data set of a blend, ready to be read.

    Args:
        name: name in messages and counts.
        source: reader of the stored bytes.
        loader: loader that makes samples of the bytes.
        key: 64-bit key that differs for all leaves; it seeds the random numbers of its samples.
        cooker: hook that makes samples of crude samples, if needed.
        aux: stores that the cooker is given, by name.

    Attributes:
        open: returns the leaf with its files, which stay open as long as it is referenced; None: this leaf has them.
    """

    name: str
    source: AnySource
    loader: Loader
    key: int
    cooker: Cooker | None = None
    aux: Mapping[str, FileStore[Any]] = field(default_factory=dict)
    open: Callable[[], Leaf] | None = field(default=None, init=False, repr=False, compare=False)

    @cached_property
    def reader(self) -> Reader | OpenedSource:
        """Reader of the bytes of samples."""
        return self.source if isinstance(self.source, OpenedSource) else self.loader.reader(self.source)

    @cached_property
    def fields(self) -> LeafFields | None:
        """Plan for making fields from parts; None if code of the user's is involved."""
        if not isinstance(self.loader, SampleLoader):
            return None
        return LeafFields.plan(self.loader, only_bytes=isinstance(self.source, OpenedSource))

    @cached_property
    def length(self) -> int:
        """Samples in an epoch."""
        return len(self.source)

    @cached_property
    def mean_bytes(self) -> float:
        """Mean bytes of shard per sample."""
        return self.source.mean_bytes

    @property
    def path(self) -> str:
        """Path of the data set."""
        return self.source.path

    def apart(self) -> Leaf:
        """Return a copy for another thread that does not share open files and plans."""
        return replace(self, source=copy.copy(self.source))


def _of_bytes(decode: Callable[[bytes], Any], value: Any) -> Any:
    return decode(value) if isinstance(value, bytes) else value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field that has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def leaf_key(data: str, seen: int) -> int:
    """Return the 64-bit key of a leaf, from its data's digest and the number of earlier leaves of the same data."""
    return hash_ints(_LEAF, hash_text(data), seen)


def measure_arguments(spec: LeafSpec) -> list[str]:
    """Return the command line arguments of ``energon-lite measure`` for a leaf."""
    given = {"split-parts": spec.split_part, "dataset-config": spec.dataset_config, "split-config": spec.split_config}
    given = {"subflavors": json.dumps(spec.subflavors, default=str), **({} if is_jsonl(spec.path) else given)}
    usual = ("", "{}", "dataset.yaml", "split.yaml")
    return [spec.path, *(word for name, text in given.items() if text not in usual for word in (f"--{name}", text))]


def leaf_name(spec: LeafSpec) -> str:
    """Return the name of a leaf in messages and counts."""
    return "+".join(os.path.basename(path.rstrip("/")) or path for path in spec.folders) + f"[{spec.split_part}]"


def reads_ahead(leaves: Sequence[Leaf]) -> bool:
    """Return whether any of some leaves is on slow storage."""
    known: bool | None = getattr(leaves, "reads_ahead", None)
    return any(leaf.source.read_ahead is not None for leaf in leaves) if known is None else known


def largest_mean_bytes(leaves: Sequence[Leaf]) -> float:
    """Return the largest mean bytes of shard per sample over all leaves."""
    known: float | None = getattr(leaves, "largest", None)
    return max((leaf.mean_bytes for leaf in leaves), default=0) if known is None else known


def leaves_apart(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """Return the leaves for another thread; see :meth:`Leaf.apart`."""
    apart: Callable[[], Sequence[Leaf]] | None = getattr(leaves, "apart", None)
    return tuple(leaf.apart() for leaf in leaves) if apart is None else apart()


#: Largest number of samples that a message names.
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class SampleNames:
    """Text with the number of samples, and, if an error needs them, their names, which are looked up on request.

    Args:
        text: text such as "4 samples"; the format "short" is this text alone.
        addresses: addresses of the samples, as far as they are known.
        leaves: the leaves, in the order's numbering.

    Example:
        >>> str(SampleNames("2 samples", [(0, 3, 0), (0, 5, 0)], leaves))
        '2 samples (00003, 00005 of prose[train])'
    """

    text: str
    addresses: Sequence[Address | None]
    leaves: Sequence[Leaf]

    def __format__(self, how: str) -> str:
        return self.text if how == "short" else str(self)

    def __str__(self) -> str:
        known = [address for address in self.addresses if address is not None and address[0] >= 0]
        if not known:
            return self.text
        leaves = [f" of {self.leaves[address[0]].name}" for address in known[:_SHOWN]]
        is_one = len({address[0] for address in known}) == 1
        names = [self.key(address) + ("" if is_one else leaf) for address, leaf in zip(known, leaves, strict=False)]
        return f"{self.text} ({listed(names, _SHOWN, len(known))}{leaves[0] if is_one else ''})"

    def key(self, address: Address) -> str:
        """Return the key of a sample, or its index if its data set cannot be read."""
        try:
            return self.leaves[address[0]].source.key(address[1])
        except Exception:
            return f"sample {address[1]}"

    @property
    def keys(self) -> list[str] | None:
        """Keys of all samples; None: some addresses are not known."""
        known = [address for address in self.addresses if address is not None and address[0] >= 0]
        return [self.key(address) for address in known] if len(known) == len(self.addresses) else None


@dataclass(frozen=True)
class SampleAddress:
    """A sample of a micro-batch, as planned.

    Args:
        rank: data-parallel rank that gets the sample.
        dataset: folder of its data set.
        shard: name of its shard.
        key: its ``__key__``.
        index: its number in the data set.
        epoch: epoch of the data set.
        restore_key: key for :meth:`~energon_lite.DataLoader.restore_sample`, which makes the sample again.
        start, length: the tokens of it that are used; None: all of them, or not planned by tokens.
    """

    rank: int
    dataset: str
    shard: str
    key: str
    index: int
    epoch: int
    restore_key: tuple[Any, ...]
    start: int | None = None
    length: int | None = None


def sample_addresses(rank: int, addresses: Sequence[Address], leaves: Sequence[Leaf]) -> list[SampleAddress]:
    """Return the addresses of a job, with the names of their data sets, shards and samples."""
    named = []
    for leaf, index, epoch, *piece in addresses:
        source = leaves[leaf].source
        shard = source.shard_names[source.locate(index)[0]]
        restore_key = "sample", leaf, index, epoch, 0
        used = piece[:2] if piece and piece[2] else ()
        named.append(SampleAddress(rank, source.path, shard, source.key(index), index, epoch, restore_key, *used))
    return named
