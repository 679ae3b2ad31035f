"""Opening of very large blends: their leaves are opened when they are read, and a cache has their properties."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from energon_lite.config.leaf_spec import FoundLeaves, LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import is_url, local_path
from energon_lite.extras.blends.blend_file import BlendFile, KnownBlend, fits_table, keyed
from energon_lite.extras.blends.leaf_table import LeafIdentities, LeafOpener, LeafTable
from energon_lite.loading.assembly import BlendRequest
from energon_lite.loading.leaves import PathOrDict, open_leaves
from energon_lite.loading.metadataset_keys import OpenedBlend, find_schedule
from energon_lite.storage.files.atomic_file import only_one
from energon_lite.trust import trusts

#: Number of leaves from which on they are opened when they are read, and the user's cache has their properties.
MANY = 2000
#: Smallest document, in bytes, that may have so many leaves: one process of a machine reads it, and the others wait.
_LARGE = 1 << 18


def open_blend(request: BlendRequest) -> OpenedBlend | None:
    """Return the blend of a document if it has very many leaves, and all of them are plain local data sets.

    Raises:
        ConfigError, DatasetError, UsageError: a leaf cannot be opened.
    """
    document, reading = _local_document(request.path), request.reading
    chosen = reading.use_measured_skips or reading.filter is not None  # needs the files of all leaves
    if document is None or chosen or reading.read_ahead is not None:
        return None
    trust_code, kind = trusts(reading.trust_code), reading.sample_type
    opener = partial(open_leaves, encoder=request.encoder, trust_code=trust_code, sample_type=kind)
    options = [request.split_part, reading.dataset_config, reading.split_config, reading.labels, trust_code]
    asked = [*options, keyed(request.encoder), kind and [kind.__module__, kind.__qualname__]]
    file = BlendFile(document, asked, opener)
    known = file.read() or _made(document, file, request.find)
    return None if known is None else _of_known(known, opener, request.run, request.window)


def _made(document: str, file: BlendFile, find: Callable[[], Sequence[LeafSpec]]) -> KnownBlend | None:
    """Return the blend, made by this process or another one; None: its leaves are few, or not plain data."""
    is_large = os.path.getsize(document) > _LARGE
    began = time.time_ns()
    if not is_large and not _are_many(find()):
        return None
    with only_one(file.path) if file.can_be_written() else nullcontext():
        known = file.read()
        if known is not None:
            return known
        specs = find()
        if _are_many(specs):
            with suppress(ValueError):  # a leaf that is not plain data
                return file.make(specs, began)
    return None


def _of_known(known: KnownBlend, opener: LeafOpener, run: int | None, window: int | None) -> OpenedBlend:
    return OpenedBlend(
        LeafTable(known.specs, known.facts, known.keys, opener, run=run, window=window),
        known.facts.lengths,
        known.keys,
        [multiplier or None for multiplier in known.multipliers.tolist()],
        tuple(known.repetitions.tolist()),
        tuple(known.weights.tolist()),
        find_schedule(known.specs) if known.changes else None,
        lambda settings: LeafIdentities(known.specs, known.facts, settings),
    )


def _are_many(specs: Sequence[LeafSpec]) -> bool:
    return len(specs) >= MANY and fits_table(specs)


def _local_document(path: PathOrDict) -> str | None:
    """Return the absolute path of a document on a local disk; None for other paths."""
    if isinstance(path, FoundLeaves) or not isinstance(path, (str, os.PathLike)):
        return None
    text = local_path(os.fspath(path))
    return os.path.abspath(text) if not is_url(text) and is_metadataset(text) and os.path.isfile(text) else None
