"""Table of the leaves of a very large blend: common properties of all leaves as arrays, and a few open leaves.

An open leaf takes some twenty kilobytes, and to open it takes a millisecond; a blend of 100,000 leaves has 4,096
samples, or more, between two samples of the same leaf. So leaves are opened when one of their samples is read, and only
those used last stay open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import DataIndexError
from energon_lite.extras.many_leaves.leaf_records import LeafRecords
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.iterators.identity import LeafIdentity
from energon_lite.loading.leaves import open_leaves
from energon_lite.loading.makers.leaf import Leaf, leaf_key, leaf_name
from energon_lite.storage.read.run_reader import runs_that_fit
from energon_lite.storage.read.webdataset import Runs, WebdatasetSource

__all__ = ["LeafFacts", "LeafIdentities", "LeafOpener", "LeafTable", "leaf_keys"]

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

    def digest(self, number: int) -> str:
        """Return the digest of a leaf's data, as hexadecimal text."""
        return self.digests[number].tobytes().hex()

    def identity(self, name: str, number: int) -> LeafIdentity:
        """Return the identity of a leaf, without settings."""
        data = self.digest(number)
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


@dataclass(frozen=True)
class LeafOpener:
    """Settings for opening leaves; arguments as those of :func:`~energon_lite.loading.leaves.open_leaves`."""

    encoder: TaskEncoder
    trust_code: bool
    sample_type: type | None = None

    def open(
        self, specs: Sequence[LeafSpec], digests: Sequence[str] | None = None
    ) -> tuple[Sequence[Leaf], Sequence[LeafIdentity]]:
        """Open leaves; the digests of their data may be given if they are known."""
        return open_leaves(specs, self.encoder, self.trust_code, None, self.sample_type, digests=digests)


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


class LeafTable(Sequence[Leaf]):
    """Sequence of leaves, each of which is opened when it is read.

    Args:
        specs: the leaves as the documents describe them.
        facts: facts of each leaf.
        keys: ``[leaves]`` uint64, key of each leaf.
        opener: opener of a leaf.
        run, window: see :func:`~energon_lite.storage.read.run_reader.read_in_runs`.
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

    @overload
    def __getitem__(self, number: int) -> Leaf: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Leaf]: ...

    def __getitem__(self, number: int | slice) -> Leaf | Sequence[Leaf]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        leaf = self._open.get(number)
        if leaf is None:
            spec = self.specs[number]  # raises IndexError if there is no such leaf
            length = int(self.lengths[number])
            mean = float(self.facts.mean_bytes[number])
            return KnownLeaf(leaf_name(spec), spec.path, int(self.keys[number]), length, mean, self._opener_of(number))
        return leaf

    def __iter__(self) -> Iterator[Leaf]:
        return map(self.__getitem__, range(len(self)))

    def apart(self) -> LeafTable:
        """Return the same leaves for another thread, which does not share open leaves."""
        other = object.__new__(LeafTable)
        vars(other).update(self.__getstate__())
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}}

    def _opener_of(self, number: int) -> Callable[[], Leaf]:
        return partial(self.open, number)

    def open(self, number: int) -> Leaf:
        """Return a leaf with its files.

        Raises:
            ConfigError, DatasetError, UsageError: as :func:`~energon_lite.loading.leaves.open_leaves`.
            DataIndexError: its data differ from the known facts.
        """
        leaf = self._open.pop(number, None)
        if leaf is None:
            leaf = self._newly_open(number)
            while len(self._open) >= KEPT:
                self._open.pop(next(iter(self._open)), None)
        self._open[number] = leaf
        return leaf

    def _newly_open(self, number: int) -> Leaf:
        spec = self.specs[number]
        known = self.facts.identity("", number)
        (leaf,), (identity,) = self._opener.open([spec], [known.fingerprint])
        if (identity.samples, identity.contents) != (known.samples, known.contents):
            what = "the data set was changed after the run began"
            raise DataIndexError(what, where=spec.path, fix="start the run again")
        assert isinstance(leaf.source, WebdatasetSource)
        leaf.source.runs = self._runs
        return replace(leaf, key=int(self.keys[number]))


class LeafIdentities(Sequence[LeafIdentity]):
    """Identities of the leaves of a table, made on request.

    Args:
        specs, facts: as those of :class:`LeafTable`.
        settings: returns the settings of a leaf, by its number.
    """

    def __init__(self, specs: LeafRecords, facts: LeafFacts, settings: Callable[[int], tuple[Any, ...]]):
        self._specs = specs
        self._facts = facts
        self._settings = settings

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def samples(self) -> int:
        """Number of samples of all leaves together."""
        return int(self._facts.lengths.sum())

    @overload
    def __getitem__(self, number: int) -> LeafIdentity: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[LeafIdentity]: ...

    def __getitem__(self, number: int | slice) -> LeafIdentity | Sequence[LeafIdentity]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        return self._of(self._specs.path(number), number)

    def __iter__(self) -> Iterator[LeafIdentity]:
        return map(self._of, self._specs.paths(), range(len(self)))

    def _of(self, path: str, number: int) -> LeafIdentity:
        return replace(self._facts.identity(path, number), settings=self._settings(number))


def _from_hex(texts: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer(bytes.fromhex("".join(texts)), dtype=np.uint8).reshape(len(texts), 32)
