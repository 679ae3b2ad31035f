"""Samples of one read: made into objects on request, or collated into a batch field by field if no hook sees single
samples.

Both ways give the same values. Any irregularity (a part that cannot be decoded, parts that differ from sample to
sample) gives None, or is left to :class:`~energon_lite.storage.samples.sample_loader.SampleLoader`, which reports the
sample and the error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING, Any

from energon_lite.batching.collate import Padding, collate_entry
from energon_lite.batching.digests import AddressList
from energon_lite.hooks import TaskEncoder, is_overridden, returns_its_argument
from energon_lite.loading.makers.outcomes import FailureLog
from energon_lite.samples import BASE_FIELDS, Sample, SourceInfo
from energon_lite.samples.sample import SourceList
from energon_lite.storage.read.webdataset import Columns, RawSample
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import Access
from energon_lite.storage.samples.sample_loader import SampleLoader

if TYPE_CHECKING:
    from energon_lite.loading.makers.leaf import Leaf


class LeafFields:
    """Plan for making the fields of a leaf's samples from their parts. Use :meth:`plan` to make one.

    Attributes:
        kind: type of the samples.
        labels: subflavors, which are copied into each sample.
        parts: names of the parts that are needed.
        steps: by part, the function that decodes its bytes (None: no decoding), and the fields made from it, with the
            accesses into the decoded value (None: the whole value).
        decodes: the bytes of at least one part are decoded.
        order: names of the fields, in the order of ``steps``.
        make: function that makes samples of columns: of the base fields, and of these fields.
        absent: fields of a sample that keep their defaults.
        can_collate: a batch of such samples consists of their collated fields alone.
    """

    def __init__(self, kind: type[Sample], loader: SampleLoader, fields: Mapping[str, Access]):
        self.kind = kind
        self.labels = dict(loader.subflavors)
        self.parts = frozenset(access.part for access in fields.values())
        self.steps: dict[str, tuple[Callable[[bytes], Any] | None, list[tuple[str, Access | None]]]] = {
            part: (None if loader.decoder is None else loader.decoder.function(part), []) for part in self.parts
        }
        for name, access in fields.items():
            self.steps[access.part][1].append((name, access if access.steps else None))
        self.decodes = any(function is not None for function, _ in self.steps.values())
        there = {field.name: field for field in dataclasses.fields(kind) if field.init}
        self.order = [name for _, named in self.steps.values() for name, _ in named]
        self.make = _maker(kind, [*BASE_FIELDS, *self.order])
        given = fields.keys() | set(BASE_FIELDS)
        self.absent = [field for name, field in there.items() if name not in given]
        is_plain = not hasattr(kind, "from_samples") and not hasattr(kind, "__post_init__")
        self.can_collate = is_plain and given <= there.keys() and not any(map(_has_no_default, self.absent))

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


class Rows:
    """Samples of one leaf that are read together, unless they have different parts, or one of them is damaged.

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
            values = []
            for column, decode, named in self._steps:
                value = column[at] if decode is None else decode(column[at])
                for _, access in named:
                    values.append(value if access is None else access.follow({access.part: value}))
            sources = ((self._sources or self._all_sources(columns))[at],)
            base = columns.keys[at], restore_key, fields.labels.copy(), sources
            return fields.make(*zip((*base, *values), strict=True))[0]
        except Exception as error:
            if self._log is not None:
                self._log.fell_back("decode", (self.leaf.name,), error)
            return None  # the sample loader runs into the same error and reports it

    def samples(self, restore_keys: Iterable[tuple[Any, ...]]) -> list[Any] | None:
        """Return all samples as objects, decoded now; None: they need a sample loader.

        Raises:
            Exception: the sample loader runs into the same error and reports it.
        """
        fields = self.leaf.fields
        columns = self.columns
        values = self.fields().values()
        if fields is None or columns is None or not values:
            return None
        sources = zip(self._sources or self._all_sources(columns), strict=True)  # a tuple of length 1 for each sample
        labels = map(dict.copy, repeat(fields.labels))
        return fields.make(columns.keys, restore_keys, labels, sources, *values)

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
        subflavors = [first.labels.copy() for _ in stored.keys]
        sources = SourceList(leaf_rows.leaf.source.path, leaf_rows.indices, stored.shards, keys, stored.names)
    else:
        keys, sources, subflavors = _merged(rows, places)
        columns = {name: in_order([values[name] for values in fields.values()], places) for name in columns}
    entries = {name: collate_entry(name, column, padding) for name, column in columns.items()}
    for field in first.absent:
        entries[field.name] = collate_entry(field.name, [_default(field) for _ in keys], padding)
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
        keys,
        in_order([[columns.names] * len(columns.keys) for _, columns in of_leaves], places),
    )
    labels = [leaf_rows.leaf.loader.subflavors for leaf_rows, _ in of_leaves]
    copies = [[dict(subflavors) for _ in mine] for subflavors, mine in zip(labels, places.values(), strict=True)]
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
    if isinstance(addresses, AddressList):
        return addresses.leaves, addresses.indices
    leaf, index, *_ = zip(*addresses, strict=True)
    return leaf, index


def _maker(kind: type[Any], names: Sequence[str]) -> Callable[..., list[Any]]:
    """Return a function of columns that makes objects of a dataclass with these fields.

    Where making an object only assigns its fields, this is compiled, and takes half the time of ``kind(**fields)``.
    """
    absent = [field for field in dataclasses.fields(kind) if field.name not in names]
    if not _only_assigns(kind, {*names, *(field.name for field in absent)}) or any(map(_has_no_default, absent)):
        return lambda *columns: [kind(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=False)]
    values = [map(_default, repeat(field)) for field in absent]
    targets = ", ".join(["made", *(f"made.{name}" for name in [*names, *(field.name for field in absent)])])
    known = {"new": object.__new__, "kind": kind, "repeat": repeat, "values": values}
    made: Callable[..., list[Any]] = eval(
        f"lambda *columns: [made for {targets} in zip(map(new, repeat(kind)), *columns, *values)]", known
    )
    return made


def _only_assigns(kind: type[Any], fields: set[str]) -> bool:
    """Return whether objects of a dataclass are made by assigning these fields, all that it has, and nothing else."""
    code = getattr(kind.__init__, "__code__", None)
    if code is None or code.co_filename != "<string>":  # the user's, not that of ``dataclass``
        return False
    is_plain = kind.__new__ is object.__new__ and type(kind).__call__ is type.__call__
    return is_plain and {*code.co_varnames[1:]} == fields == {*code.co_names}


def _of_bytes(decode: Callable[[bytes], Any], value: Any) -> Any:
    return decode(value) if isinstance(value, bytes) else value


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def has_default_hooks(encoder: TaskEncoder) -> bool:
    """Return whether an encoder leaves samples as they are, and collates them as the base class does."""
    if not (returns_its_argument(encoder, "encode_sample") and returns_its_argument(encoder, "encode_batch")):
        return False
    own = any(is_overridden(encoder, name) for name in ("batch", "_batch", "preencode_sample", "postencode_sample"))
    return not own and getattr(encoder, "raw_batch_type", None) is None
