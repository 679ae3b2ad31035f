"""Table of the leaves of a very large blend: packed entries of the documents, properties as arrays, a few open leaves.

An open leaf takes some twenty kilobytes, and to open it takes a millisecond; a blend of 100,000 leaves has 4,096
samples, or more, between two samples of the same leaf. So leaves are opened when one of their samples is read, and only
those used last stay open.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import LeafSpec, Step, Subset, WeightUnit
from energon_lite.errors import DataIndexError
from energon_lite.extras.blends.weight_schedule import Schedule, Segment
from energon_lite.loading.iterators.dataset import LeafIdentity
from energon_lite.loading.makers.leaf import Leaf, leaf_key, leaf_name
from energon_lite.storage.files.shard_store import drop_oldest
from energon_lite.storage.read.runs import runs_that_fit
from energon_lite.storage.read.webdataset import Runs, WebdatasetSource

T = TypeVar("T")

#: Leaves that are packed together: a look-up of one unpacks all of them. Part of the format of files.
_TOGETHER = 32
#: Names of the fields of a leaf that are plain values.
_PLAIN = (
    *("path", "split_part", "weight", "repetitions", "subflavors", "shuffle_over_epochs_multiplier"),
    *("dataset_config", "split_config", "origin"),
)


def to_record(spec: LeafSpec) -> list[Any]:
    """Convert a leaf to a list of plain values.

    Raises:
        ValueError: it has a field that is not plain: a join, or stores for a cooker.
    """
    if spec.join is not None or spec.aux:
        raise ValueError(spec.origin)
    part = spec.subset
    subset = None if part is None else [str(part.start), str(part.stop), part.first, part.last, part.origin]
    segments = spec.schedule.segments if isinstance(spec.schedule, Schedule) else ()
    others = [segments, subset, spec.trail, spec.filters, spec.units]
    return [*(getattr(spec, name) for name in _PLAIN), *(others if any(others) else ())]


def from_record(record: Sequence[Any]) -> LeafSpec:
    """Convert a list made by :func:`to_record` back to a leaf."""
    spec = LeafSpec(**dict(zip(_PLAIN, record, strict=False)))
    if len(record) == len(_PLAIN):
        return spec
    segments, subset, trail, filters, units = record[len(_PLAIN) :]
    return replace(
        spec,
        schedule=Schedule(tuple(Segment(*values) for values in segments)) if segments else None,
        subset=None if subset is None else Subset(Fraction(subset[0]), Fraction(subset[1]), *subset[2:]),
        trail=tuple(Step(*values) for values in trail),
        filters=tuple(filters),
        units=tuple(WeightUnit(*values) for values in units),
    )


class MadeOnAccess(Sequence[T]):
    """Sequence whose elements are made when they are read."""

    @abstractmethod
    def element(self, number: int) -> T:
        """Return an element.

        Raises:
            IndexError: there is no such element.
        """

    @overload
    def __getitem__(self, number: int) -> T: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...

    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        if isinstance(number, slice):
            return [self.element(place) for place in range(*number.indices(len(self)))]
        return self.element(number)

    def __iter__(self) -> Iterator[T]:
        return map(self.element, range(len(self)))


class LeafRecords(MadeOnAccess[LeafSpec]):
    """Sequence of leaves in packed form, unpacked on access.

    Args:
        packed: packed groups of leaves.
        count: total number of leaves.

    Example:
        >>> records = LeafRecords.of(specs)
        >>> records[7] == specs[7]
        True
    """

    def __init__(self, packed: Sequence[bytes], count: int):
        self.packed = tuple(packed)
        self._count = count
        self._last: tuple[int, list[list[Any]]] = -1, []

    @classmethod
    def of(cls, specs: Iterable[LeafSpec]) -> LeafRecords:
        """Pack leaves.

        Raises:
            ValueError: as :func:`to_record`; or a label is not a plain value.
        """
        records = map(to_record, specs)
        packed = list[bytes]()
        count = 0
        while some := list(islice(records, _TOGETHER)):
            try:
                data = msgpack.packb(some, unicode_errors="surrogateescape")
            except (TypeError, OverflowError) as error:
                raise ValueError(str(error)) from error
            packed.append(zlib.compress(data, 1))
            count += len(some)
        return cls(packed, count)

    def __len__(self) -> int:
        return self._count

    def element(self, number: int) -> LeafSpec:
        if not 0 <= number < self._count:
            raise IndexError(number)
        place, within = divmod(number, _TOGETHER)
        last = self._last
        if last[0] != place:
            self._last = last = place, _unpacked(self.packed[place])
        return from_record(last[1][within])

    def __iter__(self) -> Iterator[LeafSpec]:
        return map(from_record, self._records())

    def paths(self) -> Iterator[str]:
        """Paths of all leaves, in order."""
        return (record[0] for record in self._records())

    def _records(self) -> Iterator[list[Any]]:
        return chain.from_iterable(map(_unpacked, self.packed))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": (-1, [])}


def _unpacked(data: bytes) -> list[list[Any]]:
    return msgpack.unpackb(zlib.decompress(data), unicode_errors="surrogateescape", strict_map_key=False)


#: Number of leaves that a process keeps open.
KEPT = 512

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LeafFacts:
    """Properties of leaves that are known without opening them.

    Args:
        lengths: ``[leaves]`` int64, number of samples of each.
        mean_bytes: ``[leaves]`` float64, mean bytes of a sample of each.
        digests: ``[leaves, 32]`` uint8, digest of the data of each.
        contents: ``[leaves, 32]`` uint8, more specific digest of the data of each.
    """

    lengths: Ints
    mean_bytes: NDArray[np.float64]
    digests: NDArray[np.uint8]
    contents: NDArray[np.uint8]

    @classmethod
    def of(cls, leaves: Sequence[Leaf], identities: Sequence[LeafIdentity]) -> LeafFacts:
        """Return the facts of open leaves."""
        return cls(
            np.array([identity.samples for identity in identities], dtype=np.int64),
            np.array([leaf.mean_bytes for leaf in leaves], dtype=np.float64),
            _from_hex([identity.fingerprint for identity in identities]),
            _from_hex([leaf.source.contents for leaf in leaves]),
        )

    @classmethod
    def joined(cls, parts: Sequence[LeafFacts]) -> LeafFacts:
        """Return the facts of several groups of leaves, one after the other."""
        return cls(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))

    def identity(self, name: str, number: int) -> LeafIdentity:
        """Return the identity of a leaf, without settings."""
        data = self.digests[number].tobytes().hex()
        contents = f"{data} {self.contents[number].tobytes().hex()}"
        return LeafIdentity(name, int(self.lengths[number]), data, contents=contents)


def leaf_keys(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the keys of leaves with these digests of their data, ``[leaves]`` uint64."""
    seen: Counter[bytes] = Counter()
    keys = np.empty(len(digests), dtype=np.uint64)
    for number, row in enumerate(digests):
        data = row.tobytes()
        keys[number] = leaf_key(data.hex(), seen[data])
        seen[data] += 1
    return keys


#: :func:`~energon_lite.loading.leaves.open_leaves` with the settings of a run; called with leaves, and the digests of
#: their data if they are known.
LeafOpener = Callable[..., tuple[Sequence[Leaf], Sequence[LeafIdentity]]]


class KnownLeaf(Leaf):
    """A leaf that is opened when one of its samples is read; the properties that all leaves need are known before.

    Args:
        name, path, key, length, mean_bytes: as those of :class:`Leaf`.
        open: returns the leaf with its files; they may be closed when the leaf is not referenced any more.
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


#: Attributes that only a leaf with its files has.
_OF_OPEN = frozenset({"source", "loader", "cooker", "aux", "parts", "reader", "fields"})


class LeafTable(MadeOnAccess[Leaf]):
    """Sequence of leaves, each of which is opened when it is read.

    Args:
        specs: the leaves as the documents describe them.
        facts: facts of each leaf.
        keys: ``[leaves]`` uint64, key of each leaf.
        opener: opener of a leaf.
        run, window: see :func:`~energon_lite.storage.read.runs.read_in_runs`.
    """

    reads_ahead = False

    def __init__(
        self,
        specs: LeafRecords,
        facts: LeafFacts,
        keys: NDArray[np.uint64],
        opener: LeafOpener,
        *,
        run: int | None,
        window: int | None,
    ):
        self.specs = specs
        self.facts = facts
        self.keys = keys
        self._opener = opener
        self.lengths = facts.lengths
        self.largest = float(facts.mean_bytes.max())
        runs = Runs(run or 1, window or 0)
        self._runs = runs if runs_that_fit(runs, facts.lengths, facts.mean_bytes) else None
        #: The open leaves by number, least recently used first.
        self._open: dict[int, Leaf] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def element(self, number: int) -> Leaf:
        leaf = self._open.get(number)
        if leaf is None:
            spec = self.specs[number]  # raises IndexError if there is no such leaf
            length = int(self.lengths[number])
            mean = float(self.facts.mean_bytes[number])
            return KnownLeaf(
                leaf_name(spec), spec.path, int(self.keys[number]), length, mean, partial(self.open, number)
            )
        return leaf

    def apart(self) -> LeafTable:
        """Return the same leaves for another thread, which does not share open leaves."""
        other = object.__new__(LeafTable)
        vars(other).update(self.__getstate__())
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}}

    def open(self, number: int) -> Leaf:
        """Return a leaf with its files.

        Raises:
            ConfigError, DatasetError, UsageError: as :func:`~energon_lite.loading.leaves.open_leaves`.
            DataIndexError: its data differ from the known facts.
        """
        leaf = self._open.pop(number, None)
        if leaf is None:
            leaf = self._newly_open(number)
            drop_oldest(self._open, KEPT - 1)
        self._open[number] = leaf
        return leaf

    def _newly_open(self, number: int) -> Leaf:
        spec = self.specs[number]
        known = self.facts.identity("", number)
        (leaf,), (identity,) = self._opener([spec], digests=[known.fingerprint])
        if (identity.samples, identity.contents) != (known.samples, known.contents):
            what = "the data set was changed after the run began"
            raise DataIndexError(what, where=spec.path, fix="start the run again")
        assert isinstance(leaf.source, WebdatasetSource)
        leaf.source.runs = self._runs
        return replace(leaf, key=int(self.keys[number]))


@dataclass(frozen=True, eq=False)
class LeafIdentities(MadeOnAccess[LeafIdentity]):
    """Identities of the leaves of a table, made on request.

    Args:
        specs, facts: as those of :class:`LeafTable`.
        settings: returns the settings of a leaf, by its number.
    """

    specs: LeafRecords
    facts: LeafFacts
    settings: Callable[[int], tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def samples(self) -> int:
        """Number of samples of all leaves together."""
        return int(self.facts.lengths.sum())

    def element(self, number: int) -> LeafIdentity:
        return self._of(self.specs[number].path, number)

    def __iter__(self) -> Iterator[LeafIdentity]:
        return map(self._of, self.specs.paths(), range(len(self)))

    def _of(self, path: str, number: int) -> LeafIdentity:
        return replace(self.facts.identity(path, number), settings=self.settings(number))


def _from_hex(texts: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer(bytes.fromhex("".join(texts)), dtype=np.uint8).reshape(len(texts), 32)
