"""Versions of objects: numbers that differ for earlier and later contents, compared with every answer of a store.

An object can be replaced while a run reads it, by one of the same size and first block. A store names the version of an
object in its record of it, and most stores also in each answer: its ETag, or the time of its last change. Where answers
name no version (gcsfs, adlfs and others do not pass it on), the record is requested again, for a sixteenth of the
reads at most, so a replacement is detected some seconds later there. Of a store that has no versions at all, only sizes
and first blocks are compared.

RFC 9110 (HTTP semantics), section 8.8.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from energon_lite.errors import ShardChangedError
from energon_lite.storage.files.byte_ranges import uncompared, version_number
from energon_lite.storage.files.shard_store import drop_oldest

#: Kinds of numbers, in their last two bits: of an ETag; of the time that HTTP names; of anything else.
_ETAG, _MODIFIED, _OTHER = 1, 3, 0
_KIND = 3
#: Most URLs whose versions are known.
_KNOWN = 1 << 14
#: Seconds after which the record of an object is requested again.
_RECHECK = 10.0
#: Such requests that may come in a burst, and further ones for each read.
_SPARE, _SHARE = 64.0, 1 / 16


class Answer(NamedTuple):
    """Bytes of an object, with the version that the store names.

    Attributes:
        data: the bytes.
        etag, modified: ETag and time of last change; empty: not named.
    """

    data: bytes
    etag: str = ""
    modified: str = ""

    @property
    def versions(self) -> list[int]:
        """Numbers of the version; none if the store does not name it."""
        return [number for number in (_numbered(_ETAG, self.etag), _numbered(_MODIFIED, self.modified)) if number]


def version_of(info: Mapping[str, Any]) -> list[str]:
    """Return the version of a remote file by the fields of the store's record; all are empty if it has none."""
    names = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created", "Last-Modified")
    return ["" if info.get(name) is None else str(info[name]) for name in names]


@lru_cache(_KNOWN)
def _numbered(kind: int, text: str) -> int:
    plain = text.removeprefix("W/").strip('"')  # some servers quote it in answers only, or weaken it
    return version_number(plain) & ~_KIND | kind if plain else 0


def numbers_of(info: Mapping[str, Any]) -> list[int]:
    """Return the numbers of a file's version by the store's record of it, the best one first; none if it has none."""
    etag, modified = (str(info.get(name) or "") for name in ("ETag", "Last-Modified"))
    told = Answer(b"", etag or str(info.get("etag") or ""), modified).versions
    fields = version_of(info)
    return [*told, uncompared(version_number(*fields))] if any(fields[1:]) else told


def version_in(info: Mapping[str, Any]) -> int:
    """Return the number of the current version of an object by the store's record of it; 0: the store names none."""
    return next(iter(numbers_of(info)), 0)


#: By URL: number of the version that this process reads, where none was given.
_known: dict[str, int] = {}
#: By URL: the time of the last comparison with a record; -inf: it was another version.
_compared: dict[str, float] = {}
_spare = [_SPARE]


def expect_version(url: str, info: Mapping[str, Any] | None) -> None:
    """Expect the version of this record from now on, because the file, or all below the URL, is opened anew.

    Args:
        info: None: any version, of all files below the URL.
    """
    for known in (_known, _compared):
        for old in [url] if info is not None else [name for name in [*known] if name.startswith(url)]:
            known.pop(old, None)
    if info is not None and (number := version_in(info)):
        _learn(url, number)


def _learn(url: str, version: int) -> None:
    _known[url] = version
    drop_oldest(_known, _KNOWN)


def are_current(url: str, told: Sequence[int], version: int) -> bool:
    """Compare what a store names as the version of an object with the expected one.

    Args:
        url: the object.
        told: numbers of the version, from an answer or a record.
        version: the expected one; if it is not to be compared, that of the first answer is.

    Returns:
        False: the version was not named.

    Raises:
        ShardChangedError: it is another one.
    """
    expected = version if version & 1 else _known.get(url, 0)
    if not expected and told:
        _learn(url, told[0])
        return True
    same = [number for number in told if number & _KIND == expected & _KIND]
    if same and same[0] != expected:
        _compared[url] = -math.inf  # each further read is compared too
        raise ShardChangedError(
            "the object was replaced while it was in use: it has another ETag, or time of change, than when it was "
            "opened",
            where=url,
            fix="restore it, or prepare the data set again, and start the run again; if it was not replaced, "
            "give all servers behind this address the same ETags",
        )
    return bool(same)


def is_check_due(url: str) -> bool:
    """Return True if the record of an object, whose version was not named by an answer, has to be compared now."""
    _spare[0] = min(_SPARE, _spare[0] + _SHARE)
    now, last = time.monotonic(), _compared.get(url)
    if last == -math.inf:
        return True
    if _spare[0] < 1.0 or (last is not None and now - last < _RECHECK):
        return False
    _spare[0] -= 1.0
    _compared[url] = now
    drop_oldest(_compared, _KNOWN)
    return True
