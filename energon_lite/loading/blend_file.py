"""What is known of the leaves of a blend of very many, in a file of the user's cache, from one start to the next.

To open 100,000 data sets takes a minute. What a start needs of each (its length, the digest of its data, what the
documents say of it) changes rarely, so the first start writes it down. A later one reads that, if the documents are the
same byte for byte, and looks at a few files of each data set: one whose files have other sizes, times or numbers is
opened again. A file that is damaged, or older than a document, is made again. One process of a machine makes it; the
others wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.config.dataset import load_own_splits
from energon_lite.config.leaf_record import LeafRecords
from energon_lite.config.metadataset import LeafSpec
from energon_lite.documents.paths import is_url
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.forks import cores_to_fork, done_by_forks
from energon_lite.loading.leaf_signature import HASHING, NEVER, files_of, signature
from energon_lite.loading.leaf_table import LeafFacts, LeafOpener, leaf_keys
from energon_lite.loading.leaves import open_source
from energon_lite.loading.weight_units import by_samples
from energon_lite.storage.files.array_file import FileKind, read_arrays, write_arrays
from energon_lite.storage.files.stored_array import whole_or_none
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["BlendFile", "KnownBlend", "fits_table", "keyed"]

_log = logging.getLogger(__name__)

BLEND_FILE = FileKind(b"ENRGBLND", 1, "record of a blend", "remove the file: it is made again")

#: Leaves that are opened together, and closed again.
_TOGETHER = 64
#: What is known of them, the files of each, and the signatures of these.
_Opened = tuple[LeafFacts, list[tuple[str, ...]], list[int]]
#: So many times as many are worth a process.
_WORTH = 4
#: Nanoseconds that the clock of a file system may be late.
_LATE = 20_000_000


@dataclass(frozen=True)
class KnownBlend:
    """The leaves of a blend, as far as a start needs them.

    Args:
        specs: what the documents say; weights are shares of samples.
        facts: of each leaf.
        keys: ``[leaves]`` uint64.
        weights, repetitions: of each leaf, ``[leaves]`` float64; no repetitions in a blend by weight.
        multipliers: ``[leaves]`` int64, ``shuffle_over_epochs_multiplier``; 0 stands for None.
        changes: shares of some leaf change along the run.
    """

    specs: LeafRecords
    facts: LeafFacts
    keys: NDArray[np.uint64]
    weights: NDArray[np.float64]
    repetitions: NDArray[np.float64]
    multipliers: NDArray[np.int64]
    changes: bool


@dataclass(frozen=True)
class _Stored:
    """What is in a file: of the leaves, and by what they are known again."""

    blend: KnownBlend
    documents: list[list[str]]
    layouts: list[list[str]]
    layout_of: NDArray[np.int32]
    signatures: NDArray[np.int64]
    in_units: bool


def fits_table(specs: Sequence[LeafSpec]) -> bool:
    """Return whether all leaves are local folders or files, of which all samples are read as they are."""
    return all(
        not (spec.join is not None or spec.aux or spec.filters or is_url(spec.path))
        and (is_jsonl(spec.path) or os.path.isdir(os.path.join(spec.path, ".nv-meta")))
        and not any(is_url(step.path) for step in spec.trail)
        for spec in specs
    )


def keyed(encoder: TaskEncoder) -> list[Any]:
    """What of an encoder decides whether a leaf can be opened."""
    kind = type(encoder)
    cookers = [
        [getattr(one.cook, "__qualname__", str(type(one.cook))), repr(one.has_subflavors)] for one in encoder.cookers
    ]
    decoder = encoder.decoder
    handlers = sorted(map(str, getattr(decoder, "handlers", ()) or ()))
    return [kind.__module__, kind.__qualname__, cookers, str(type(decoder)), handlers]


class BlendFile:
    """The file of a blend.

    Args:
        document: the outermost document, absolute.
        asked: all else that decides which leaves there are, and whether they can be opened, as plain data.
        opener: opens leaves.
    """

    def __init__(self, document: str, asked: Any, opener: LeafOpener):
        self._document = document
        self._opener = opener
        text = json.dumps([document, asked, HASHING, os.path.expanduser("~")], default=repr)
        name = f"{os.path.basename(document)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.blend"
        self.path = os.path.join(cache_folder(), "blends", name)

    def can_be_written(self) -> bool:
        """Return whether there can be such a file; if not, that is told."""
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        except OSError as error:
            _tell_unwritten(self.path, error)
            return False
        return os.access(os.path.dirname(self.path), os.W_OK | os.X_OK)

    def read(self) -> KnownBlend | None:
        """What is known, after those leaves that changed were opened again; None: it has to be made.

        Raises:
            ConfigError, DatasetError, UsageError: a leaf that changed cannot be opened.
        """
        stored = whole_or_none(self._stored, self.path)
        if stored is None or any(_hash_of(path) != there for path, there in stored.documents):
            return None
        now = _signatures(stored.blend.specs, stored.layouts, stored.layout_of)
        changed = np.flatnonzero((now != stored.signatures) | (now == NEVER))
        return stored.blend if not len(changed) else self._renewed(stored, changed.tolist())

    def make(self, specs: Sequence[LeafSpec], began: int) -> KnownBlend:
        """Open all leaves once, and write down what they are.

        Args:
            specs: all leaves.
            began: when the documents were looked for, in ns.

        Raises:
            ConfigError, DatasetError, UsageError: a leaf cannot be opened.
            ValueError: a leaf cannot be written down.
        """
        if any(_has_own_splits(spec) for spec in specs):
            raise ValueError("own splits")
        records = LeafRecords.of(specs)
        opened = self._opened(specs, began)
        blend = self._weighed(specs, records, LeafFacts.joined([facts for facts, _, _ in opened]))
        files = [one for _, those, _ in opened for one in those]
        layouts = {those: number for number, those in enumerate(dict.fromkeys(files))}
        documents = dict.fromkeys([self._document, *(step.path for spec in specs for step in spec.trail)])
        stored = _Stored(
            blend,
            [[path, _hash_of(path)] for path in documents],
            [list(those) for those in layouts],
            np.array([layouts[one] for one in files], dtype=np.int32),
            np.array([one for *_, those in opened for one in those], dtype=np.int64),
            any(spec.units for spec in specs),
        )
        if signature("", list(documents), began - _LATE) != NEVER:  # else a document may have changed since it was read
            self._write(stored)
        return blend

    def _opened(
        self, specs: Sequence[LeafSpec], began: int
    ) -> list[tuple[LeafFacts, list[tuple[str, ...]], list[int]]]:
        """What is known of leaves, some at a time, their files, and the signatures of these."""
        told = time.monotonic()

        def open_some(number: int) -> _Opened:
            some = specs[number * _TOGETHER : (number + 1) * _TOGETHER]
            leaves, identities = self._opener.open(some)
            files = []
            for spec, leaf in zip(some, leaves, strict=True):
                assert isinstance(leaf.source, WebdatasetSource)
                files.append(files_of(spec, leaf.source))
            both = zip(some, files, strict=True)
            return LeafFacts.of(leaves, identities), files, [signature(one.path, f, began - _LATE) for one, f in both]

        def tell(done: int) -> None:
            nonlocal told
            if time.monotonic() - told > 10:
                told = time.monotonic()
                _log.warning("%s: %d of %d data sets opened", self._document, done * _TOGETHER, len(specs))

        portions = -(-len(specs) // _TOGETHER)
        return done_by_forks(open_some, portions, min(cores_to_fork(), portions // _WORTH or 1), tell)

    def _weighed(self, specs: Sequence[LeafSpec], records: LeafRecords, facts: LeafFacts) -> KnownBlend:
        """The blend of leaves of which all is known but their weights in samples."""
        if any(spec.units for spec in specs):
            specs = by_samples(specs, _Sources(specs))
            records = LeafRecords.of(specs)
        every = [
            (one.weight, one.repetitions, one.shuffle_over_epochs_multiplier or 0, bool(one.segments)) for one in specs
        ]
        weights, repetitions, multipliers, segments = zip(*every, strict=True)
        return KnownBlend(
            records,
            facts,
            leaf_keys(facts.digests),
            np.array(weights, dtype=np.float64),
            np.array([one for one in repetitions if one is not None], dtype=np.float64),  # of all or of none
            np.array(multipliers, dtype=np.int64),
            any(segments),
        )

    def _renewed(self, stored: _Stored, changed: Sequence[int]) -> KnownBlend | None:
        """The blend after some leaves were opened again; None: all of it has to be made again."""
        began = time.time_ns()
        blend = stored.blend
        old = [blend.specs[number] for number in changed]
        # Who reads the documents again says where in them a leaf stands that is gone.
        gone = not all(os.path.exists(spec.path) for spec in old)
        if stored.in_units or gone or any(map(_has_own_splits, old)):
            return None
        _log.info("%s: %d data sets have changed, and are opened again", self._document, len(changed))
        opened = self._opened(old, began)
        new = LeafFacts.joined([one for one, _, _ in opened])
        facts = {}
        for name, values in vars(blend.facts).items():
            facts[name] = values.copy()
            facts[name][changed] = vars(new)[name]
        layouts = [tuple(one) for one in stored.layouts]
        layout_of = stored.layout_of.copy()
        for number, files in zip(changed, (one for _, those, _ in opened for one in those), strict=True):
            layouts += [] if files in layouts else [files]
            layout_of[number] = layouts.index(files)
        signatures = stored.signatures.copy()
        signatures[changed] = [one for *_, those in opened for one in those]
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
            "sizes": np.array([len(one) for one in blend.specs.packed], dtype=np.int64),
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


class _Sources(Sequence[Any]):
    """The samples of leaves, opened each time that they are asked for."""

    def __init__(self, specs: Sequence[LeafSpec]):
        self._specs = specs

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, number: Any) -> Any:
        return open_source(self._specs[number])


def _has_own_splits(spec: LeafSpec) -> bool:
    """Return whether a leaf has a say in which of its splits is read."""
    return not is_jsonl(spec.path) and any(load_own_splits(meta_path(spec.path, spec.dataset_config)))


def _signatures(
    specs: LeafRecords, layouts: Sequence[Sequence[str]], layout_of: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The signatures of all leaves as they are now."""
    found: Iterable[int] = (
        signature(path, layouts[number]) for path, number in zip(specs.paths(), layout_of.tolist(), strict=True)
    )
    return np.fromiter(found, dtype=np.int64, count=len(layout_of))


def _hash_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
