"""Compressed shards, unpacked: gzip and bz2 by Python's own modules, others by what is installed."""

from __future__ import annotations

import bz2
import zlib
from typing import Any

from energon_lite.errors import FatalSampleError, ShardFormatError, UsageError

__all__ = ["unpacked"]

#: What pyarrow calls them.
_ARROW = {"zstd": "zstd", "br": "brotli", "snappy": "snappy", "lz4": "lz4"}


def unpacked(data: bytes, how: str, size: int, path: str) -> bytes:
    """The contents of a compressed file.

    Args:
        data: of the file.
        how: ``gz``, ``bz2``, ``zstd``, ``br`` or ``snappy``; a level behind a colon does not count.
        size: that the contents must have. More is never unpacked.
        path: of the file, for messages.

    Raises:
        ShardFormatError: it is damaged.
        UsageError: the compression is unknown.
        FatalSampleError: its package is not installed.
    """
    how = how.partition(":")[0]
    try:
        if how == "gz":
            found = zlib.decompressobj(wbits=31).decompress(data, size + 1)
        elif how == "bz2":
            found = bz2.BZ2Decompressor().decompress(data, size + 1)
        elif how in _ARROW:
            found = _by_arrow(data, _ARROW[how], size, path)
        else:
            raise UsageError(f"compression {how!r} is unknown", where=path, fix="unpack the shards, or convert them")
    except (UsageError, FatalSampleError):
        raise
    except Exception as error:  # each decompressor raises its own
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if len(found) != size:
        raise _damaged(path, f"it unpacks to other than {size} bytes")
    return found


def _by_arrow(data: bytes, codec: str, size: int, path: str) -> bytes:
    try:
        import pyarrow
    except ImportError as error:
        raise FatalSampleError(
            f"shards compressed by {codec} are unpacked by the package pyarrow: {error}",
            where=path,
            fix="pip install 'energon-lite[parquet]'",
        ) from error
    found: Any = pyarrow.Codec(codec).decompress(data, decompressed_size=size, asbytes=True)
    return bytes(found)


def _damaged(path: str, what: str) -> ShardFormatError:
    return ShardFormatError(f"the file cannot be unpacked: {what}", where=path, fix="restore or download it again")
