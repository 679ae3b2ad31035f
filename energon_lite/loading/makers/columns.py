"""Samples of one read: made into objects on request, or collated into a batch field by field if no hook sees single
samples.

Both ways give the same values. Any irregularity (a part that cannot be decoded, parts that differ from sample to
sample) gives None, or is left to :class:`~energon_lite.storage.samples.field_map.SampleLoader`, which reports the
sample and the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import add
from typing import Any

from energon_lite.batching.collate import Padding, collate_entry
from energon_lite.hooks import TaskEncoder, is_overridden, returns_its_argument
from energon_lite.loading.makers.leaf import Leaf, default_of
from energon_lite.loading.makers.outcomes import FailureLog
from energon_lite.samples import SourceInfo
from energon_lite.samples.sample import SourceList
from energon_lite.storage.read.webdataset import Columns, RawSample
from energon_lite.storage.samples.field_map import Access


class Rows:
    """Samples of one leaf that are read together, unless they have different parts, or one of them is damaged. Bytes
    come from :meth:`SampleReader.read <energon_lite.storage.read.sample_reader.SampleReader.read>`.

    Args:
        leaf: the leaf.
        indices: indices of the samples.
        log: log that counts the errors that are not raised here; None: they are not counted.

    Attributes:
        columns: the parts that were read; None: each sample has to be read by itself.
    """

    def __init__(self, leaf: Leaf, indices: Sequence[int], log: FailureLog | None = None):
        self.leaf = leaf
        self._log = log
        self.indices = indices
        self.columns: Columns | None = None
        self._steps: list[tuple[list[bytes], Callable[[bytes], Any] | None, list[tuple[str, Access | None]]]] = []
        self._sources: list[SourceInfo] = []
        try:
            if leaf.open is not None:
                self.leaf = leaf = leaf.open()
            self.columns = columns = leaf.reader.read(indices)
        except Exception as error:
            if log is not None:
                log.fell_back("read_together", (leaf.name,), error)
            return  # the error is raised again, and reported, when each sample is read by itself
        fields = leaf.fields
        if fields is not None and columns is not None and fields.parts.issubset(columns.names):
            self._steps = [(columns.parts[part], *step) for part, step in fields.steps.items()]

    def raw(self, at: int) -> RawSample:
        """Return one sample as it is stored in its shard.

        Raises:
            DatasetError: it could be read neither with the others nor by itself.
        """
        columns = self.columns
        if columns is None:
            return self.leaf.reader.sample(self.indices[at])
        parts = {name: column[at] for name, column in columns.parts.items()}
        return RawSample(columns.keys[at], parts, (self._sources or self._all_sources(columns))[at])

    def sample(self, at: int, restore_key: tuple[Any, ...]) -> Any | None:
        """Return one sample as an object, decoded now; None: it needs a sample loader."""
        if not self._steps:
            return None
        fields = self.leaf.fields
        columns = self.columns
        assert fields is not None and columns is not None
        try:
            values = {}
            for column, decode, named in self._steps:
                value = column[at] if decode is None else decode(column[at])
                for name, access in named:
                    values[name] = value if access is None else access.follow({access.part: value})
            return fields.kind(
                __key__=columns.keys[at],
                __restore_key__=restore_key,
                __subflavors__=fields.labels(),
                __sources__=((self._sources or self._all_sources(columns))[at],),
                **values,
            )
        except Exception as error:
            if self._log is not None:
                self._log.fell_back("decode", (self.leaf.name,), error)
            return None  # the sample loader runs into the same error and reports it

    def fields(self) -> dict[str, list[Any]]:
        """Return the fields of all samples, by name; empty if they cannot be made from columns."""
        fields: dict[str, list[Any]] = {}
        for column, decode, named in self._steps:
            values = column if decode is None else [decode(value) for value in column]
            for name, access in named:
                fields[name] = values if access is None else [access.follow({access.part: value}) for value in values]
        return fields

    def _all_sources(self, found: Columns) -> list[SourceInfo]:
        """Return the source of each sample; made for all samples on the first request."""
        path = self.leaf.source.path
        files = zip(*[map(add, found.keys, repeat(f".{name}")) for name in found.names], strict=True)
        names = files if found.names else repeat(())
        self._sources = list(map(SourceInfo, repeat(path), self.indices, found.shards, names))
        return self._sources


def batch_of_rows(
    rows: Mapping[int, Rows],
    fields: Mapping[int, dict[str, list[Any]]],
    places: Mapping[int, Sequence[int]],
    restore_key: tuple[Any, ...],
    padding: Padding,
) -> Any | None:
    """Return the batch of samples as the default hooks make it; None: it cannot be made field by field.

    Args:
        rows: the samples, by leaf.
        fields: the fields of the samples, by leaf.
        places: the place of each sample in the batch, by leaf.
        restore_key: restore key of the batch.
        padding: padding of the task encoder.
    """
    plans = [None if leaf_rows.leaf.cooker else leaf_rows.leaf.fields for leaf_rows in rows.values()]
    first = plans[0]
    columns = next(iter(fields.values()))
    if first is None or any(plan is None or plan.kind is not first.kind or not plan.can_collate for plan in plans):
        return None
    if not columns or any(leaf_fields.keys() != columns.keys() for leaf_fields in fields.values()):
        return None
    if len(rows) == 1:
        ((leaf_rows, stored),) = _found(rows)
        keys = stored.keys
        subflavors = [first.labels() for _ in keys]
        sources = SourceList(leaf_rows.leaf.source.path, leaf_rows.indices, stored.shards, [*keys], stored.names)
    else:
        keys, sources, subflavors = _merged(rows, places)
        columns = {name: in_order([values[name] for values in fields.values()], places) for name in columns}
    entries = {name: collate_entry(name, column, padding) for name, column in columns.items()}
    for field in first.absent:
        entries[field.name] = collate_entry(field.name, [default_of(field) for _ in keys], padding)
    kind: Any = first.kind  # its fields hold columns here
    return kind(__key__=keys, __restore_key__=restore_key, __subflavors__=subflavors, __sources__=sources, **entries)


def _merged(
    rows: Mapping[int, Rows], places: Mapping[int, Sequence[int]]
) -> tuple[list[str], SourceList, list[dict[str, Any]]]:
    """Return keys, sources and subflavors of the samples of several leaves, in the order of the batch."""
    of_leaves = _found(rows)
    keys = in_order([columns.keys for _, columns in of_leaves], places)
    sources = SourceList(
        in_order([[leaf_rows.leaf.source.path] * len(columns.keys) for leaf_rows, columns in of_leaves], places),
        in_order([leaf_rows.indices for leaf_rows, _ in of_leaves], places),
        in_order([columns.shards for _, columns in of_leaves], places),
        [*keys],
        in_order([[columns.names] * len(columns.keys) for _, columns in of_leaves], places),
    )
    plans = [leaf_rows.leaf.fields for leaf_rows in rows.values()]
    copies = [[plan.labels() for _ in mine] for plan, mine in zip(plans, places.values(), strict=True) if plan]
    return keys, sources, in_order(copies, places)


def _found(rows: Mapping[int, Rows]) -> list[tuple[Rows, Columns]]:
    return [(leaf_rows, leaf_rows.columns) for leaf_rows in rows.values() if leaf_rows.columns is not None]


def in_order(of_leaves: Sequence[Sequence[Any]], places: Mapping[int, Sequence[int]]) -> list[Any]:
    """Return one list of the values of all leaves, each at its place in the batch."""
    merged: list[Any] = [None] * sum(map(len, of_leaves))
    for values, mine in zip(of_leaves, places.values(), strict=True):
        for value, place in zip(values, mine, strict=True):
            merged[place] = value
    return merged


def columns_of(addresses: Sequence[tuple[int, ...]]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the leaves and the indices of addresses."""
    leaf, index, *_ = zip(*addresses, strict=True)
    return leaf, index


def has_default_hooks(encoder: TaskEncoder) -> bool:
    """Return whether an encoder leaves samples as they are, and collates them as the base class does."""
    if not (returns_its_argument(encoder, "encode_sample") and returns_its_argument(encoder, "encode_batch")):
        return False
    own = any(is_overridden(encoder, name) for name in ("batch", "_batch", "preencode_sample", "postencode_sample"))
    return not own and getattr(encoder, "raw_batch_type", None) is None
