"""A whole micro-batch by columns, where no hook asks to see its samples one by one.

What the per-sample path does sample by sample (read, decode, map to fields, collate) is done here field by field. The
batch is the same. Anything out of the ordinary (a sample that fails, parts that differ from sample to sample) is
answered with None, and the job takes the per-sample path, which knows how to tell, count and replace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from energon_lite.batching.address_list import AddressList
from energon_lite.batching.collate import Padding, collate_entry
from energon_lite.hooks import DefaultTaskEncoder, TaskEncoder
from energon_lite.samples import BASE_FIELDS, Sample
from energon_lite.storage.read.sample_reader import Columns, SampleReader
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import Access
from energon_lite.storage.samples.sample_loader import SampleLoader
from energon_lite.storage.samples.source_list import SourceList

__all__ = ["ColumnBatches", "LeafColumns", "columns_of", "has_default_hooks"]


class LeafColumns:
    """The fields of many samples of one leaf. Make one with :meth:`plan`.

    Attributes:
        sample_type: what the samples would be.
        path: of the data set.
        labels: its subflavors.
        absent: fields of the sample type that are left to their defaults.
        reader: brings the bytes.
    """

    def __init__(self, reader: SampleReader, loader: SampleLoader, fields: Sequence[tuple[str, Access]]):
        assert loader.sample_type is not None
        self.reader, self.sample_type = reader, loader.sample_type
        self.path, self.labels = reader.source.path, dict(loader.subflavors)
        given = {name for name, _ in fields} | set(BASE_FIELDS)
        self.absent = [one for one in dataclasses.fields(self.sample_type) if one.name not in given]
        self._parts = len({access.part for _, access in fields})
        self._decoder, self._fields = loader.decoder, tuple(fields)

    @classmethod
    def plan(cls, reader: SampleReader, loader: SampleLoader) -> LeafColumns | None:
        """How a leaf's samples are read by columns; None: they have to be made one by one."""
        kind, field_map, decoder = loader.sample_type, loader.field_map, loader.decoder
        if kind is None or field_map is None or loader.sample_loader is not None or not _is_plain(kind):
            return None
        if decoder is not None and (type(decoder) is not SampleDecoder or decoder.handlers):
            return None  # code of the user's, which may want to know which sample it works on
        if any(len(accesses) != 1 for _, accesses in field_map.fields):
            return None
        there = {field.name: field for field in dataclasses.fields(kind) if field.init}
        given = {name for name, _ in field_map.fields} | set(BASE_FIELDS)
        required = {name for name, field in there.items() if _has_no_default(field)}
        if not given <= there.keys() or not required <= given:
            return None
        return cls(reader, loader, [(name, accesses[0]) for name, accesses in field_map.fields])

    def read(self, indices: Sequence[int]) -> tuple[Columns, dict[str, list[Any]]] | None:
        """Samples, and their fields; None: they are not alike."""
        found = self.reader.read(indices)
        if found is None or len(found.names) < self._parts:
            return None
        parts: dict[str, list[Any]] = dict(found.parts)
        if self._decoder is not None:
            for name, values in found.parts.items():
                decode = self._decoder.function(name)
                if decode is not None:
                    parts[name] = [decode(value) for value in values]
        fields = {}
        for name, access in self._fields:
            column = parts[access.part]
            if access.steps:
                column = [access.follow({access.part: value}) for value in column]
            fields[name] = column
        return found, fields

    def subflavors(self) -> dict[str, Any]:
        """A sample's own copy of the labels of its data set."""
        return dict(self.labels)


class ColumnBatches:
    """Micro-batches of leaves that can all be read by columns.

    Args:
        leaves: one per leaf of the data set; None for leaves that cannot.
        padding: of the task encoder.
    """

    def __init__(self, leaves: Sequence[LeafColumns | None], padding: Padding = None):
        self.leaves, self.padding = leaves, padding

    def batch(self, addresses: Sequence[tuple[int, ...]], restore_key: tuple[Any, ...]) -> Any | None:
        """The batch of the samples at ``addresses``, as the default hooks make it; None: it cannot be made this way.

        Args:
            addresses: ``(leaf, index, epoch)``, at least one.
            restore_key: of the batch.
        """
        try:
            return self._batch(addresses, restore_key)
        except Exception:
            return None  # whatever it is, the per-sample path finds it again and says which sample it was

    def _batch(self, addresses: Sequence[tuple[int, ...]], restore_key: tuple[Any, ...]) -> Any | None:
        numbers, indices = columns_of(addresses)
        first = self.leaves[numbers[0]]
        if first is None:
            return None
        if numbers.count(numbers[0]) == len(numbers):
            found = first.read(indices)
            if found is None:
                return None
            columns, fields = found
            keys, sources = columns.keys, SourceList(first.path, indices, columns.shards, columns.keys, columns.names)
            subflavors = [first.subflavors() for _ in keys] if first.labels else [{} for _ in keys]
        else:
            merged = self._merged(first.sample_type, numbers, indices)
            if merged is None:
                return None
            keys, sources, fields, subflavors = merged
        kind: Any = first.sample_type  # its fields hold columns here
        entries = {name: collate_entry(name, column, self.padding) for name, column in fields.items()}
        for field in first.absent:
            entries[field.name] = collate_entry(field.name, [_default(field) for _ in keys], self.padding)
        return kind(
            __key__=keys,
            __restore_key__=restore_key,
            __subflavors__=subflavors,
            __sources__=sources,
            **entries,
        )

    def _merged(
        self, kind: type[Sample], numbers: Sequence[int], indices: Sequence[int]
    ) -> tuple[list[str], SourceList, dict[str, list[Any]], list[dict[str, Any]]] | None:
        """The samples of several leaves in the order of the batch."""
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number, []).append(place)
        order: list[int] = []  # where in the batch the samples go, leaf by leaf
        keys, paths, shards, names = list[str](), list[str](), list[str](), list[tuple[str, ...]]()
        fields: dict[str, list[Any]] = {}
        subflavors: list[dict[str, Any]] = []
        for number, mine in places.items():
            leaf = self.leaves[number]
            if leaf is None or leaf.sample_type is not kind:
                return None
            found = leaf.read([indices[place] for place in mine])
            if found is None or (fields and found[1].keys() != fields.keys()):
                return None
            columns, values = found
            order += mine
            keys += columns.keys
            shards += columns.shards
            paths += [leaf.path] * len(mine)
            names += [columns.names] * len(mine)
            subflavors += [leaf.subflavors() for _ in mine]
            for name, column in values.items():
                fields.setdefault(name, []).extend(column)
        back = sorted(range(len(order)), key=order.__getitem__)
        keys = [keys[at] for at in back]
        sources = SourceList(
            [paths[at] for at in back], indices, [shards[at] for at in back], keys, [names[at] for at in back]
        )
        return keys, sources, {n: [c[at] for at in back] for n, c in fields.items()}, [subflavors[at] for at in back]


def columns_of(addresses: Sequence[tuple[int, ...]]) -> tuple[Sequence[int], Sequence[int]]:
    """The leaves and the indices of addresses."""
    if isinstance(addresses, AddressList):
        return addresses.leaves, addresses.indices
    leaf, index, _ = zip(*addresses, strict=True)
    return leaf, index


def _is_plain(kind: type[Sample]) -> bool:
    """Whether a batch of such samples is just their fields, collated."""
    return not hasattr(kind, "from_samples") and not hasattr(kind, "__post_init__")


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def has_default_hooks(encoder: TaskEncoder) -> bool:
    """Whether an encoder leaves samples as they are, and collates them as the base class does."""
    cls, own = type(encoder), (TaskEncoder, DefaultTaskEncoder)
    names = ("encode_sample", "batch", "encode_batch", "_batch")
    plain = all(any(getattr(cls, name) is getattr(one, name) for one in own) for name in names)
    types = ("encoded_sample_type", "raw_batch_type", "batch_type")
    return plain and all(getattr(encoder, name, None) is None for name in types)
