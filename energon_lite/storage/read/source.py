"""Samples from anywhere: a source of the user's own, opened by the scheme of its URL, and seen as a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from energon_lite.errors import DataIndexError, DatasetError, EmptyDatasetError, UsageError
from energon_lite.samples import SourceInfo
from energon_lite.storage.read.joined_source import JoinedSource
from energon_lite.storage.read.webdataset import RawSample, SampleRange, WebdatasetSource

__all__ = ["AnySource", "OpenSource", "OpenedSource", "Source", "register_source", "source_opener"]


class Source(Protocol):
    """A numbered list of samples, which does not change while it is used.

    Attributes:
        identity: tells its samples from others: a name with a version, or a digest. The order comes from it, and a
            saved state of another identity is refused.

    With a method ``column(name)``, which returns an integer for each sample as an array, it has measured lengths.
    """

    @property
    def identity(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Mapping[str, Any]:
        """The parts of a sample by name, ``{"txt": b"a red bicycle", "n": 7}``. Bytes are decoded by the name's
        extension, as those of a tar are; other values stay as they are. Any process may ask for any sample."""


#: ``(url, split_part) -> source``
OpenSource = Callable[[str, str], Source]

_openers: dict[str, OpenSource] = {}


def register_source(scheme: str, open: OpenSource) -> None:
    """Have paths that begin with ``scheme://`` opened by a function, in YAML too. Their samples are crude ones.

    Args:
        scheme: such as ``rows``; not one of a file system.
        open: gets the whole path and the name of the split; called in each process that reads. With the start methods
            ``spawn`` and ``forkserver`` it has to be a function that can be imported.

    Raises:
        UsageError: the scheme is none, or another function has it.

    Example:
        >>> register_source("rows", lambda url, split_part: Rows(url.removeprefix("rows://"), split_part))
        >>> dataset = get_train_dataset("rows://chats.db", batch_size=4, worker_config=config)
    """
    if not scheme.isidentifier() or scheme == "file":
        raise UsageError(f"{scheme!r} is no scheme of a source", fix="give a word, such as 'rows'")
    if _openers.setdefault(scheme, open) is not open:
        raise UsageError(f"the scheme {scheme!r} is registered already", fix="give another one")


def source_opener(path: str) -> OpenSource | None:
    """The function that opens what is at ``path``; None: it is no source of a user's."""
    scheme, separator, _ = path.partition("://")
    return _openers.get(scheme) if separator else None


class OpenedSource:
    """A user's source as a data set, in the shape of :class:`~energon_lite.storage.read.webdataset.WebdatasetSource`
    and of what reads that. Each process opens the source for itself: connections do not survive a fork.

    Args:
        path: its URL.
        open: what opens it.
        split_part: the split.
        subset: the part of it that is read.

    Raises:
        EmptyDatasetError: there is no sample.
        ConfigError: the subset does not fit.
    """

    read_ahead = runs = ahead = None
    part_names: frozenset[str] = frozenset()
    shard_names = ("",)
    skipped, mean_bytes = 0, 0.0

    def __init__(self, path: str, open: OpenSource, split_part: str, subset: SampleRange | None = None):
        self._arguments = (path, open, split_part, subset)
        self.path, self.split_part, self._open = path, split_part, open
        self._source, self._process = open(path, split_part), os.getpid()
        self._start, self._stop = (0, len(self._source)) if subset is None else subset.bounds(len(self._source))
        if self._start >= self._stop:
            raise EmptyDatasetError(
                f"the source has no samples in {split_part!r}", where=path, fix="leave it out, or give another split"
            )
        self.fingerprint = f"{self._source.identity} {self._start}:{self._stop}"
        self.contents = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenedSource, self._arguments

    def __len__(self) -> int:
        return self._stop - self._start

    def __str__(self) -> str:
        return f"{self.path} [{self.split_part}]: {len(self)} samples"

    def key(self, index: int) -> str:
        return str(self._start + index)

    def locate(self, index: int) -> tuple[int, int]:
        return 0, self._start + index

    def sample(self, index: int) -> RawSample:
        """One sample.

        Raises:
            DatasetError: the source does not return parts.
        """
        if self._process != os.getpid():
            self._source, self._process = self._open(self.path, self.split_part), os.getpid()
        parts = self._source.read(self._start + index)
        if not isinstance(parts, Mapping):
            raise DatasetError(
                f"read returned a {type(parts).__name__}", where=self.path, fix="return a dict of parts by name"
            )
        info = SourceInfo(dataset_path=self.path, index=index, shard_name="", file_names=tuple(parts))
        return RawSample(self.key(index), dict(parts), info)

    def read(self, indices: Sequence[int]) -> None:
        """Many at once, by columns: none are, they are read one by one."""

    def column(self, name: str) -> Any:
        """A measured column, where the source has any.

        Raises:
            DataIndexError: it has none.
        """
        column = getattr(self._source, "column", None)
        if column is None:
            raise DataIndexError(
                f"the source has no column {name!r}", where=self.path, fix="give it a method column(name)"
            )
        return column(name)[self._start : self._stop]


#: What a leaf reads from.
AnySource = WebdatasetSource | OpenedSource | JoinedSource
