"""Samples from anywhere: what a source is, and how one is opened by the path that names it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from energon_lite.documents.paths import add_data_endings, is_url
from energon_lite.entry_points import load, source_formats
from energon_lite.errors import UsageError
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.index.nv_meta import META_FOLDER

__all__ = ["OpenSource", "Source", "has_own_scheme", "register_source", "source_opener"]


class Source(Protocol):
    """A numbered list of samples, which does not change while it is used.

    Attributes:
        identity: tells its samples from others: a name with a version, or a digest. The order comes from it, and a
            saved state of another identity is refused.

    That is all it has to have. What it may have beside that:

    * ``read_many(indices)``: the parts of many samples by columns, ``{"txt": ["a", "b"], "n": [7, 9]}``, a value for
      each index. Samples of a batch are then read together. If it raises, they are read one by one.
    * ``column(name)``: an integer for each sample as an array: measured lengths.
    * ``part_names``: the names of the parts that samples have. Field maps are checked against them.
    * ``select(names)``: the same samples with these parts only, as another source. Its identity does not count.
    * ``mean_bytes``: bytes of a sample on the average. Large samples are read in smaller portions.
    * ``shard_names`` and ``locate(index)``: the names of its files, and in which of them (by number) and where in it a
      sample is, for messages.
    * ``portable = True``: it may be used after a fork, and be pickled. Others are opened by each process for itself.
    """

    @property
    def identity(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Mapping[str, Any]:
        """The parts of a sample by name, ``{"txt": b"a red bicycle", "n": 7}``. Bytes are decoded by the name's
        extension, as those of a tar are; other values stay as they are. Any process may ask for any sample."""


#: ``(path, split_part) -> source``
OpenSource = Callable[[str, str], Source]


@dataclass(frozen=True)
class _Kind:
    """What is known of a kind of source: what opens it, and the paths that mean it."""

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
        scheme: _Kind(_OpenedBy(entry.target), entry.extensions, entry.marker)
        for scheme, entry in source_formats().items()
    }


@dataclass(frozen=True)
class _OpenedBy:
    """Function that is imported when a data set is opened.

    Args:
        target: ``module:function``.
    """

    target: str

    def __call__(self, path: str, split_part: str) -> Source:
        source: Source = load(self.target)(path, split_part)
        return source


def register_source(scheme: str, open: OpenSource, *, extensions: tuple[str, ...] = (), marker: str = "") -> None:
    """Have paths that begin with ``scheme://`` opened by a function, in YAML too. Their samples are crude ones, unless
    a ``dataset.yaml`` in the ``.nv-meta`` beside the files says otherwise.

    Args:
        scheme: such as ``rows``; not one of a file system.
        open: gets the whole path and the name of the split; called in each process that reads, unless the source is
            ``portable``. With the start methods ``spawn`` and ``forkserver`` it has to be a function that can be
            imported.
        extensions: such as ``(".rows",)``: paths, URLs and patterns that end so are opened by it, too; and folders on
            local disks in which there is such a file, if they are no prepared data sets.
        marker: the name of a file; a folder on a local disk in which it is, is opened by it, too.

    Raises:
        UsageError: the scheme is none, or another function has it.

    Example:
        >>> register_source("rows", lambda url, split_part: Rows(url.removeprefix("rows://"), split_part))
        >>> dataset = get_train_dataset("rows://chats.db", batch_size=4, worker_config=config)
    """
    if not scheme.isidentifier() or scheme == "file":
        raise UsageError(f"{scheme!r} is no scheme of a source", fix="give a word, such as 'rows'")
    if any(not extension.startswith(".") or extension in (".tar", ".yaml") for extension in extensions):
        raise UsageError(f"{extensions} are no extensions of a source", fix="write them with a dot: ('.rows',)")
    kind = _Kind(open, tuple(extensions), marker)
    if scheme in _kinds_of_guests() or _registered.setdefault(scheme, kind) != kind:
        raise UsageError(f"the scheme {scheme!r} is registered already", fix="give another one")
    add_data_endings(*extensions, *([f"/{marker}"] if marker else []))


def has_own_scheme(path: str) -> bool:
    """Whether a URL's scheme is that of a registered source, so that it leads to no file."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in _kinds()


def source_opener(path: str) -> OpenSource | None:
    """The function that opens what is at ``path``; None: it is a data set of tar shards, or a JSONL file."""
    if has_own_scheme(path):
        return _kinds()[path.partition("://")[0]].open
    if is_jsonl(path):
        return None  # also where its .idx, which is not Megatron's, lies beside it
    if os.path.exists(os.path.join(path, META_FOLDER, ".info.json")):
        return None  # prepared, whatever else lies there
    name = path.rstrip("/")
    for kind in _kinds().values():
        if kind.extensions and name.endswith(kind.extensions):
            return kind.open
        if kind.marker and name.endswith(f"/{kind.marker}"):
            return kind.open
    return None if is_url(path) else _opener_of_folder(path)


def _opener_of_folder(path: str) -> OpenSource | None:
    """By what is in a folder, or in one folder in it; or by files that begin with the path."""
    if not os.path.isdir(path):
        for kind in _kinds().values():  # of several files, as Megatron's; a JSONL file has an .idx beside it, too
            if len(kind.extensions) > 1 and all(os.path.isfile(path + ending) for ending in kind.extensions):
                return kind.open
        return None
    names = {entry.name for entry in os.scandir(path)}
    if any(name.endswith(".tar") for name in names):
        return None
    for kind in _kinds().values():
        if kind.marker in names or (kind.extensions and any(name.endswith(kind.extensions) for name in names)):
            return kind.open
    for name in sorted(names):
        folder = os.path.join(path, name)
        if not name.startswith(".") and os.path.isdir(folder):
            inside = {entry.name for entry in os.scandir(folder)}
            for kind in _kinds().values():
                if kind.extensions and any(one.endswith(kind.extensions) for one in inside):
                    return kind.open
    return None
