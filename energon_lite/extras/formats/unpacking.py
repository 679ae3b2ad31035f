"""Unpacking of compressed shards: gzip and bz2 by the standard library, other formats by pyarrow."""

from __future__ import annotations

import bz2
import zlib
from typing import Any

from energon_lite.errors import FatalSampleError, ShardFormatError, UsageError

__all__ = ["unpacked"]

#: Compressions with pyarrow's names for them.
_ARROW = {"zstd": "zstd", "br": "brotli", "snappy": "snappy", "lz4": "lz4"}


def unpacked(data: bytes, how: str, size: int, path: str) -> bytes:
    """Return the contents of a compressed file.

    Args:
        data: bytes of the file.
        how: ``gz``, ``bz2``, ``zstd``, ``br`` or ``snappy``; a level behind a colon is ignored.
        size: size that the contents must have in bytes. No more is unpacked.
        path: path of the file, for messages.

    Raises:
        ShardFormatError: the file is damaged.
        UsageError: the compression is unknown.
        FatalSampleError: its package is not installed.
    """
    how = how.partition(":")[0]
    try:
        if how == "gz":
            contents = zlib.decompressobj(wbits=31).decompress(data, size + 1)
        elif how == "bz2":
            contents = bz2.BZ2Decompressor().decompress(data, size + 1)
        elif how in _ARROW:
            contents = _by_arrow(data, _ARROW[how], size, path)
        else:
            raise UsageError(f"compression {how!r} is unknown", where=path, fix="unpack the shards, or convert them")
    except (UsageError, FatalSampleError):
        raise
    except Exception as error:  # each decompressor raises its own exceptions
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if len(contents) != size:
        raise _damaged(path, f"it unpacks to other than {size} bytes")
    return contents


def _by_arrow(data: bytes, codec: str, size: int, path: str) -> bytes:
    try:
        import pyarrow
    except ImportError as error:
        raise FatalSampleError(
            f"shards compressed by {codec} are unpacked by the package pyarrow: {error}",
            where=path,
            fix="pip install 'energon-lite[parquet]'",
        ) from error
    contents: Any = pyarrow.Codec(codec).decompress(data, decompressed_size=size, asbytes=True)
    return bytes(contents)


def _damaged(path: str, what: str) -> ShardFormatError:
    return ShardFormatError(f"the file cannot be unpacked: {what}", where=path, fix="restore or download it again")
