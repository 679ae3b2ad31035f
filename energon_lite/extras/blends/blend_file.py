"""Cache of the properties of a very large blend's leaves, in a file of the user's cache folder, between starts.

To open 100,000 data sets takes a minute. The properties that a start needs of each (its length, the digest of its data,
its entries in the documents) change rarely, so the first start writes them to a file. A later start reads the file, if
the documents are the same byte for byte, and checks a few files of each data set: if their sizes, times or inode
numbers have changed, the data set is opened again. A file that is damaged, or older than a document, is made again. One
process of a machine makes it; the others wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.dataset import load_own_splits
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.documents.paths import is_url
from energon_lite.extras.blends.forks import cores_to_fork, done_by_forks
from energon_lite.extras.blends.leaf_table import LeafFacts, LeafOpener, LeafRecords, MadeOnAccess, leaf_keys
from energon_lite.extras.blends.token_weights import by_samples
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.leaves import open_source
from energon_lite.storage.files.array_file import FileKind, read_arrays, write_arrays
from energon_lite.storage.files.stored_array import whole_or_none
from energon_lite.storage.index.column_file import column_folders
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.nv_meta import is_jsonl, meta_path
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.webdataset import WebdatasetSource

_log = logging.getLogger(__name__)

#: Value that is never a signature: files are missing, or may still change.
NEVER = 0
#: Signatures are Python's hashes of integers, which are the same in all processes with the same values of these.
HASHING = [sys.implementation.name, sys.hash_info.width, sys.hash_info.modulus, *sys.version_info[:2]]
#: Most shards of a data set that are checked. Changes of others are detected when they are read.
_SHARDS = 4


def files_of(spec: LeafSpec, source: WebdatasetSource) -> tuple[str, ...]:
    """Return the files that show whether a leaf has changed, relative to its path, or absolute: the index, the
    documents, some shards, and, if shares depend on them, the folders of measured columns."""
    shards = [path for path, _ in source.choice.shards]
    files = [source.index_path, *(shards[len(shards) * n // _SHARDS] for n in range(_SHARDS))]
    if not is_jsonl(spec.path):
        files += [meta_path(spec.path, name) for name in (spec.dataset_config, spec.split_config)]
    if spec.units:
        files += [folder for folder in column_folders(spec.path) if os.path.isdir(folder)]
    below = spec.path + "/"
    return tuple(dict.fromkeys(file.removeprefix(below) for file in files))


def signature(path: str, files: Sequence[str], before: int | None = None) -> int:
    """Return a 64-bit hash of size, modification time and inode number of each file of a leaf; :data:`NEVER` if a file
    is missing.

    Args:
        path: path of the leaf.
        files: see :func:`files_of`.
        before: a time in ns; a file that was changed after it might change again within the same time stamp, so the
            result is :data:`NEVER`.
    """
    numbers: list[int] = []
    try:
        for file in files:
            status = os.stat(os.path.join(path, file))
            if before is not None and status.st_mtime_ns >= before:
                return NEVER
            numbers += (status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError:
        return NEVER
    return hash(tuple(numbers)) or 1


BLEND_FILE = FileKind(b"ENRGBLND", 1, "record of a blend", "remove the file: it is made again")

#: Most leaves that are opened together, and closed again.
_TOGETHER = 64
#: Fewest such groups for which another process is worthwhile.
_WORTH = 4
#: Nanoseconds that the clock of a file system may lag behind.
_LATE = 20_000_000


@dataclass(frozen=True)
class KnownBlend:
    """Properties of the leaves of a blend that a start needs.

    Args:
        specs: the leaves as the documents describe them; weights are shares of samples.
        facts: facts of each leaf.
        keys: ``[leaves]`` uint64, key of each leaf.
        weights, repetitions: ``[leaves]`` float64, of each leaf; ``repetitions`` is empty in a blend by weight.
        multipliers: ``[leaves]`` int64, ``shuffle_over_epochs_multiplier``; 0 stands for None.
        changes: shares of at least one leaf change along the run.
    """

    specs: LeafRecords
    facts: LeafFacts
    keys: NDArray[np.uint64]
    weights: NDArray[np.float64]
    repetitions: NDArray[np.float64]
    multipliers: NDArray[np.int64]
    changes: bool


class _Opened(NamedTuple):
    """Facts of leaves, the files of each, and the signatures of these files."""

    facts: LeafFacts
    files: list[tuple[str, ...]]
    signatures: list[int]


@dataclass(frozen=True)
class _Stored:
    """Contents of a file: the blend, and the data for checking that nothing has changed."""

    blend: KnownBlend
    documents: list[list[str]]
    layouts: list[list[str]]
    layout_of: NDArray[np.int32]
    signatures: NDArray[np.int64]
    in_units: bool


def fits_table(specs: Sequence[LeafSpec]) -> bool:
    """Return whether all leaves are local folders or files without filters, joins and auxiliary stores."""
    return all(
        not (spec.join is not None or spec.aux or spec.filters or is_url(spec.path))
        and (is_jsonl(spec.path) or os.path.isdir(os.path.join(spec.path, ".nv-meta")))
        and not any(is_url(step.path) for step in spec.trail)
        for spec in specs
    )


def keyed(encoder: TaskEncoder) -> list[Any]:
    """Return the properties of an encoder that decide whether a leaf can be opened, as plain data."""
    kind = type(encoder)
    cookers = [
        [getattr(cooker.cook, "__qualname__", str(type(cooker.cook))), repr(cooker.has_subflavors or cooker.has_tags)]
        for cooker in encoder.cookers
    ]
    decoder = encoder.decoder
    handlers = sorted(map(str, getattr(decoder, "handlers", ()) or ()))
    return [kind.__module__, kind.__qualname__, cookers, str(type(decoder)), handlers]


class BlendFile:
    """Cache file of a blend.

    Args:
        document: absolute path of the outermost document.
        asked: all other inputs that decide which leaves there are, and whether they can be opened, as plain data.
        opener: opener of leaves.
    """

    def __init__(self, document: str, asked: Any, opener: LeafOpener):
        self._document = document
        self._opener = opener
        text = json.dumps([document, asked, HASHING, os.path.expanduser("~")], default=repr)
        name = f"{os.path.basename(document)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.blend"
        self.path = os.path.join(cache_folder(), "blends", name)

    def can_be_written(self) -> bool:
        """Return whether the file can be written; warn if its folder cannot be made."""
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        except OSError as error:
            _tell_unwritten(self.path, error)
            return False
        return os.access(os.path.dirname(self.path), os.W_OK | os.X_OK)

    def read(self) -> KnownBlend | None:
        """Return the blend, after leaves that changed were opened again; None: the file has to be made.

        Raises:
            ConfigError, DatasetError, UsageError: a leaf that changed cannot be opened.
        """
        stored = whole_or_none(self._stored, self.path)
        if stored is None or any(_hash_of(path) != there for path, there in stored.documents):
            return None
        paths = zip(stored.blend.specs.paths(), stored.layout_of.tolist(), strict=True)
        now = np.array([signature(path, stored.layouts[number]) for path, number in paths], dtype=np.int64)
        changed = np.flatnonzero((now != stored.signatures) | (now == NEVER))
        return stored.blend if not len(changed) else self._renewed(stored, changed.tolist())

    def make(self, specs: Sequence[LeafSpec], began: int) -> KnownBlend:
        """Open all leaves once, and write the file.

        Args:
            specs: all leaves.
            began: time before the documents were looked up, in ns.

        Raises:
            ConfigError, DatasetError, UsageError: a leaf cannot be opened.
            ValueError: a leaf cannot be stored.
        """
        if any(_has_own_splits(spec) for spec in specs):
            raise ValueError("own splits")
        records = LeafRecords.of(specs)
        opened = self._opened(specs, began)
        blend = self._weighed(specs, records, opened.facts)
        files = opened.files
        layouts = {names: number for number, names in enumerate(dict.fromkeys(files))}
        documents = dict.fromkeys([self._document, *(step.path for spec in specs for step in spec.trail)])
        stored = _Stored(
            blend,
            [[path, _hash_of(path)] for path in documents],
            [list(names) for names in layouts],
            np.array([layouts[names] for names in files], dtype=np.int32),
            np.array(opened.signatures, dtype=np.int64),
            any(spec.units for spec in specs),
        )
        if signature("", list(documents), began - _LATE) != NEVER:  # else a document may have changed since the reading
            self._write(stored)
        return blend

    def _opened(self, specs: Sequence[LeafSpec], began: int) -> _Opened:
        """Open leaves, in groups."""
        told = time.monotonic()

        def open_some(number: int) -> _Opened:
            some = specs[number * _TOGETHER : (number + 1) * _TOGETHER]
            leaves, identities = self._opener(some)
            files = []
            for spec, leaf in zip(some, leaves, strict=True):
                assert isinstance(leaf.source, WebdatasetSource)
                files.append(files_of(spec, leaf.source))
            both = zip(some, files, strict=True)
            signatures = [signature(spec.path, names, began - _LATE) for spec, names in both]
            return _Opened(LeafFacts.of(leaves, identities), files, signatures)

        def tell(done: int) -> None:
            nonlocal told
            if time.monotonic() - told > 10:
                told = time.monotonic()
                _log.warning("%s: %d of %d data sets opened", self._document, done * _TOGETHER, len(specs))

        portions = -(-len(specs) // _TOGETHER)
        groups = done_by_forks(open_some, portions, min(cores_to_fork(), portions // _WORTH or 1), tell)
        facts, files, signatures = zip(*groups, strict=True)
        return _Opened(LeafFacts.joined(facts), [*chain(*files)], [*chain(*signatures)])

    def _weighed(self, specs: Sequence[LeafSpec], records: LeafRecords, facts: LeafFacts) -> KnownBlend:
        """Return the blend of opened leaves, with weights converted to shares of samples."""
        if any(spec.units for spec in specs):
            specs = by_samples(specs, _Sources(specs))
            records = LeafRecords.of(specs)
        return KnownBlend(
            records,
            facts,
            leaf_keys(facts.digests),
            np.array([spec.weight for spec in specs], dtype=np.float64),
            np.array([spec.repetitions for spec in specs if spec.repetitions is not None], dtype=np.float64),
            np.array([spec.shuffle_over_epochs_multiplier or 0 for spec in specs], dtype=np.int64),
            any(spec.schedule is not None for spec in specs),
        )

    def _renewed(self, stored: _Stored, changed: Sequence[int]) -> KnownBlend | None:
        """Return the blend after some leaves were opened again; None: the whole file has to be made again."""
        began = time.time_ns()
        blend = stored.blend
        old = [blend.specs[number] for number in changed]
        # If a leaf is gone, the documents are read again, for an error that names the leaf's place in them.
        gone = not all(os.path.exists(spec.path) for spec in old)
        if stored.in_units or gone or any(map(_has_own_splits, old)):
            return None
        _log.info("%s: %d data sets have changed, and are opened again", self._document, len(changed))
        opened = self._opened(old, began)
        new = opened.facts
        facts = {}
        for name, values in vars(blend.facts).items():
            facts[name] = values.copy()
            facts[name][changed] = vars(new)[name]
        layouts = [tuple(names) for names in stored.layouts]
        layout_of = stored.layout_of.copy()
        for number, files in zip(changed, opened.files, strict=True):
            layouts += [] if files in layouts else [files]
            layout_of[number] = layouts.index(files)
        signatures = stored.signatures.copy()
        signatures[changed] = opened.signatures
        digests = facts["digests"]
        blend = replace(blend, facts=LeafFacts(**facts), keys=leaf_keys(digests))
        changes: dict[str, Any] = {"layouts": layouts, "layout_of": layout_of, "signatures": signatures}
        self._write(replace(stored, blend=blend, **changes))
        return blend

    # -- the file -------------------------------------------------------------------------------------------------

    def _write(self, stored: _Stored) -> None:
        blend = stored.blend
        arrays = {
            **vars(blend.facts),
            **{name: getattr(blend, name) for name in ("keys", "weights", "repetitions", "multipliers")},
            "layout_of": stored.layout_of,
            "signatures": stored.signatures,
            "specs": np.frombuffer(b"".join(blend.specs.packed), dtype=np.uint8),
            "sizes": np.array([len(record) for record in blend.specs.packed], dtype=np.int64),
        }
        meta = {
            **{"documents": stored.documents, "layouts": stored.layouts},
            **{"changes": blend.changes, "in_units": stored.in_units},
        }
        try:
            write_arrays(self.path, BLEND_FILE, arrays, meta)
        except OSError as error:
            _tell_unwritten(self.path, error)

    @staticmethod
    def _stored(path: str) -> _Stored:
        arrays, meta = read_arrays(path, BLEND_FILE)
        packed = []
        start = 0
        data = arrays.pop("specs").tobytes()
        for size in arrays.pop("sizes").tolist():
            packed.append(data[start : start + size])
            start += size
        facts = LeafFacts(*(arrays[name].copy() for name in ("lengths", "mean_bytes", "digests", "contents")))
        columns = {name: arrays[name].copy() for name in ("keys", "weights", "repetitions", "multipliers")}
        specs = LeafRecords(packed, len(columns["keys"]))
        blend = KnownBlend(specs, facts, **columns, changes=meta["changes"])
        others = arrays["layout_of"], arrays["signatures"], meta["in_units"]
        return _Stored(blend, meta["documents"], meta["layouts"], *others)


def _tell_unwritten(path: str, error: OSError) -> None:
    _log.warning(
        "%s cannot be written (%s): all data sets of the blend are opened at each start (ENERGON_LITE_CACHE names "
        "another folder)",
        *(path, error.strerror or error),
    )


class _Sources(MadeOnAccess[AnySource]):
    """Sources of leaves, each opened again on every access."""

    def __init__(self, specs: Sequence[LeafSpec]):
        self._specs = specs

    def __len__(self) -> int:
        return len(self._specs)

    def element(self, number: int) -> AnySource:
        return open_source(self._specs[number])


def _has_own_splits(spec: LeafSpec) -> bool:
    """Return whether a leaf's own document chooses its split."""
    return not is_jsonl(spec.path) and any(load_own_splits(meta_path(spec.path, spec.dataset_config)))


def _hash_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
