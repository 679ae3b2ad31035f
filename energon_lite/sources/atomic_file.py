"""Files that appear whole or not at all.

A reader on another rank, or a run that starts after a crash, must never see half an index: the bytes go to a file
with a name of its own in the same folder, which is then renamed over the final name (atomic on POSIX file systems).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

__all__ = ["remove_if_there", "replacing", "write_bytes"]


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Give a temporary path; rename it to ``path`` when the block ends well, remove it when it fails.

    Example:
        >>> with replacing("index.sqlite") as temporary:
        ...     build_database(temporary)
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        remove_if_there(temporary)
        raise


def write_bytes(path: str, *chunks: bytes | memoryview) -> None:
    """Write ``chunks`` one after the other as the file ``path``, atomically and flushed to the disk."""
    with replacing(path) as temporary:
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    # Without this a power cut after the rename may leave an empty file under the final name.
    os.fsync(file.fileno())


def remove_if_there(path: str) -> None:
    """Remove a file; it is fine if there is none."""
    with suppress(FileNotFoundError):
        os.unlink(path)
