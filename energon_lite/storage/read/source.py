"""The protocols of sources and of conditions on their samples, and the registry that opens sources by their path."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon_lite.documents.paths import add_data_endings, is_url
from energon_lite.entry_points import load, source_formats
from energon_lite.errors import UsageError
from energon_lite.storage.index.nv_meta import META_FOLDER, is_jsonl
from energon_lite.storage.index.packed_index import PackedIndex


class Source(Protocol):
    """A numbered list of samples that does not change while it is used.

    Attributes:
        identity: distinguishes its samples from others: a name with a version, or a digest. The order comes from it,
            and a saved state of another identity is refused.

    No more than this is required. Optional attributes and methods:

    * ``read_many(indices)``: the parts of many samples by columns, ``{"txt": ["a", "b"], "n": [7, 9]}``, a value for
      each index. The samples of a batch are then read together. If it raises, they are read one by one.
    * ``column(name)``: an integer for each sample as an array: measured lengths.
    * ``part_names``: the names of the parts that samples have. Field maps are checked against them.
    * ``select(names)``: another source of the same samples with these parts only. Its identity is ignored.
    * ``mean_bytes``: bytes of a sample on the average. Large samples are read in smaller portions.
    * ``shard_names`` and ``locate(index)``: the names of its files; and, for messages, the number of a sample's file
      with the position of the sample in it.
    * ``portable = True``: it may be used after a fork, and be pickled. Others are opened by each process for itself.
    """

    @property
    def identity(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the parts of a sample by name, ``{"txt": b"a red bicycle", "n": 7}``. Bytes are decoded by the name's
        extension, like those of a tar; other values stay as they are. Any process may request any sample."""


class SampleFilter(Protocol):
    """A condition on samples, as a guest makes it of a text: entry ``filter`` of the table ``METADATASET_KEYS``.

    Attributes:
        text: the text.
    """

    text: str

    def opened(
        self, path: str, index: PackedIndex | None, column: Callable[[str], Any]
    ) -> Callable[[int, int], NDArray[np.bool_]]:
        """Return ``keep(first, stop)``: a mask of the samples ``first..stop-1``, counted over all shards.

        Args:
            path: the data set.
            index: its packed index; None: a source of another format.
            column: returns the values of a column for all samples, to be cut into slices.

        Raises:
            DataIndexError: the filter needs a file that does not exist, or is damaged.
            UsageError: it is no condition on such a data set.
        """


#: ``(path, split_part) -> source``
OpenSource = Callable[[str, str], Source]


@dataclass(frozen=True)
class _Kind:
    """A kind of source: the function that opens it, and the paths that it applies to."""

    open: OpenSource
    extensions: tuple[str, ...] = ()
    marker: str = ""


_registered: dict[str, _Kind] = {}


def _kinds() -> dict[str, _Kind]:
    """Return the kinds of sources by scheme: those of guests, and registered ones."""
    return _kinds_of_guests() | _registered


@cache
def _kinds_of_guests() -> dict[str, _Kind]:
    return {
        scheme: _Kind(partial(_open_by_guest, entry.target), entry.extensions, entry.marker)
        for scheme, entry in source_formats().items()
    }


def _open_by_guest(target: str, path: str, split_part: str) -> Source:
    """Open a source by ``module:function``, which is imported now."""
    return load(target)(path, split_part)


def register_source(scheme: str, open: OpenSource, *, extensions: tuple[str, ...] = (), marker: str = "") -> None:
    """Register the function that opens paths with ``scheme://``, in YAML too. Their samples are crude samples, unless a
    ``dataset.yaml`` in the ``.nv-meta`` next to the files declares a sample type.

    Args:
        scheme: such as ``rows``; not the scheme of a file system.
        open: gets the whole path and the name of the split; called in each process that reads, unless the source is
            ``portable``. With the start methods ``spawn`` and ``forkserver`` it has to be a function that can be
            imported.
        extensions: such as ``(".rows",)``. The function also opens paths, URLs and patterns with these endings, and
            folders on local disks that hold such a file and are not prepared data sets.
        marker: the name of a file. The function also opens folders on local disks that hold this file.

    Raises:
        UsageError: the scheme is invalid, or another function has it or one of the extensions.

    Example:
        >>> register_source("rows", lambda url, split_part: Rows(url.removeprefix("rows://"), split_part))
        >>> dataset = get_train_dataset("rows://chats.db", batch_size=4, worker_config=config)
    """
    if not scheme.isidentifier() or scheme == "file":
        raise UsageError(f"{scheme!r} is not a scheme of a source", fix="give a word, such as 'rows'")
    if any(not extension.startswith(".") or extension in (".tar", ".yaml") for extension in extensions):
        raise UsageError(f"{extensions} are not extensions of a source", fix="write them with a dot: ('.rows',)")
    others = {ending for name, known in _kinds().items() if name != scheme for ending in known.extensions}
    if not others.isdisjoint(extensions):
        taken = sorted(others.intersection(extensions))
        raise UsageError(f"another source has the extensions {taken}", fix="leave them out; give paths with the scheme")
    kind = _Kind(open, tuple(extensions), marker)
    if scheme in _kinds_of_guests() or _registered.setdefault(scheme, kind) != kind:
        raise UsageError(f"the scheme {scheme!r} is registered already", fix="give another one")
    add_data_endings(*extensions, *([f"/{marker}"] if marker else []))


def has_own_scheme(path: str) -> bool:
    """Return True if a URL has the scheme of a registered source, so that it names no file."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in _kinds()


def source_opener(path: str) -> OpenSource | None:
    """Return the function that opens ``path``; None for a data set of tar shards or a JSONL file."""
    if has_own_scheme(path):
        return _kinds()[path.partition("://")[0]].open
    if is_jsonl(path):
        return None  # its .idx is not Megatron's
    if os.path.exists(os.path.join(path, META_FOLDER, ".info.json")):
        return None  # a prepared data set, whatever other files are there
    name = path.rstrip("/")
    named = _first(
        lambda kind: name.endswith(kind.extensions) or bool(kind.marker and name.endswith(f"/{kind.marker}"))
    )
    return named if named is not None or is_url(path) else _opener_of_folder(path)


def _first(fits: Callable[[_Kind], bool]) -> OpenSource | None:
    """The function of the first kind that fits."""
    return next((kind.open for kind in _kinds().values() if fits(kind)), None)


def _opener_of_folder(path: str) -> OpenSource | None:
    """The opener for the files in a folder or in one of its folders, or for files that begin with the path."""
    if not os.path.isdir(path):  # kinds of several files, like Megatron's; JSONL files have an .idx too
        return _first(
            lambda kind: len(kind.extensions) > 1 and all(os.path.isfile(path + ending) for ending in kind.extensions)
        )
    names = _names_in(path)
    if any(name.endswith(".tar") for name in names):
        return None
    folders = (os.path.join(path, name) for name in sorted(names) if not name.startswith("."))
    inside = (_names_in(folder) for folder in folders if os.path.isdir(folder))
    return _opener_of_files(names) or next(filter(None, map(_opener_of_files, inside)), None)


def _names_in(folder: str) -> set[str]:
    """Names in a folder, without the indexes of tars and JSONL files, which end as Megatron's do."""
    return {entry.name for entry in os.scandir(folder) if not entry.name.endswith((".tar.idx", ".jsonl.idx"))}


def _opener_of_files(names: Collection[str]) -> OpenSource | None:
    return _first(lambda kind: kind.marker in names or any(name.endswith(kind.extensions) for name in names))
