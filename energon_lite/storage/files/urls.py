"""Files behind URLs, such as ``s3://bucket/a.tar``: the door of the guest that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from energon_lite.entry_points import storage_guest

#: The store's records of its files, by path.
Listing = Mapping[str, Mapping[str, Any]]


class OpenFile(Protocol):
    """A file that is read by position."""

    def size(self) -> int:
        """Return its bytes."""

    def read(self, size: int, offset: int, /) -> bytes:
        """Read up to ``size`` bytes at ``offset``, fewer only at the end of the file.

        Raises:
            OSError, DatasetError: the storage failed.
        """


class UrlFiles(NamedTuple):
    """Functions of the guest that reads files behind URLs: entry ``url_files`` of the table ``STORAGE_GUESTS``.

    They raise FileNotFoundError if there is no such file, and DatasetError if the store does not answer.

    Attributes:
        found: returns the store's current record of a file, whose version is expected from now on.
        size: returns the bytes of a file; with the record, if that is known.
        version: returns the number of the version that a record names; 0: it names none.
        list_files: returns the record of each file in a folder of a URL, by its path relative to that folder.
        read_file: reads a small file as a whole.
        read_range: reads the ``size`` bytes at ``offset``: ``(url, offset, size) -> bytes``.
        copy_file: copies the file ``name`` below a URL to a local one, and compares its size, if that is known:
            ``(url, name, target, size)``.
        open: returns a file of a known size and version, each of whose reads is a request.
    """

    found: Callable[[str], Mapping[str, Any]]
    size: Callable[[str, Mapping[str, Any] | None], int]
    version: Callable[[Mapping[str, Any]], int]
    list_files: Callable[[str, str], Listing]
    read_file: Callable[[str], bytes]
    read_range: Callable[[str, int, int], bytes]
    copy_file: Callable[[str, str, str, int | None], None]
    open: Callable[[str, int, int], OpenFile]


def is_remote(path: str) -> bool:
    """Return True for the URL of a store that is not mounted here."""
    return "://" in path and not path.startswith("file://")


def url_files(url: str = "") -> UrlFiles:
    """Return the guest that reads files behind URLs.

    Raises:
        UsageError: it is not installed.
    """
    guest: UrlFiles = remote_guest("url_files", "files behind URLs are read", url)
    return guest


def remote_guest(name: str, what: str, where: str, fix: str = "copy the files to a local disk") -> Any:
    """Return an entry of ``STORAGE_GUESTS`` that the extra ``remote`` has.

    Args:
        name: the entry.
        what: the task, for messages.
        where: the data set or file.
        fix: the way without the extra.

    Raises:
        UsageError: the extra is not installed.
    """
    return storage_guest(name, what, "remote", where, fix)
