"""Files that appear whole or not at all.

A reader on another rank, or a run that starts after a crash, must never see half an index: the bytes go to a file
with a name of its own in the same folder, which is then renamed over the final name (atomic on POSIX file systems).
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

__all__ = ["flush_files", "remove_if_there", "remove_leftovers", "replacing", "temporary_path", "write_bytes"]

_TEMPORARY = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})\.(?P<process>\d+)\.[0-9a-f]{8}\.tmp")
#: Seconds after which the temporary file of another machine, whose processes cannot be asked, is taken for left over.
_LONG_AGO = 86_400.0
_FLUSHING_THREADS = 8


def temporary_path(path: str) -> str:
    """A name in the same folder that no other process uses, and that tells who does."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{_host()}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _host() -> str:
    """Those processes that can ask the system about each other: of a machine, or of a container on it."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{os.uname().nodename} {namespace}'.encode()):08x}"


@contextmanager
def replacing(path: str, *, flush: bool = False) -> Iterator[str]:
    """Give a temporary path; rename it to ``path`` when the block ends well, remove it when it fails.

    Args:
        path: the file.
        flush: also flush it to the disk. Without that a power cut after the rename may leave an empty file under the
            final name; many files are flushed faster together, by :func:`flush_files`.

    Example:
        >>> with replacing("index.sqlite") as temporary:
        ...     build_database(temporary)
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        if flush:
            _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        remove_if_there(temporary)
        raise


def write_bytes(path: str, *chunks: bytes | memoryview, flush: bool = True) -> None:
    """Write ``chunks`` one after the other as the file ``path``, atomically.

    Args:
        path: the file.
        chunks: its contents.
        flush: see :func:`replacing`.
    """
    with replacing(path, flush=flush) as temporary, open(temporary, "xb") as file:
        file.writelines(chunks)


def flush_files(paths: Sequence[str]) -> None:
    """Flush files to the disk, several at once, so that the file system writes its journal once for many of them."""
    with ThreadPoolExecutor(_FLUSHING_THREADS) as pool:
        for _ in pool.map(_flush, paths):
            pass


def _flush(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_if_there(path: str) -> None:
    """Remove a file; it is fine if there is none."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_leftovers(folder: str) -> list[str]:
    """Remove the temporary files of processes that are dead from a folder (not from those in it); returns their paths.

    Those of other machines are removed when they are a day old.
    """
    removed = []
    with os.scandir(folder or ".") as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name) if entry.name.endswith(".tmp") else None
            with suppress(FileNotFoundError):
                if match and _is_left_over(entry, match["host"], int(match["process"])):
                    os.unlink(entry.path)
                    removed.append(entry.path)
    return removed


def _is_left_over(entry: os.DirEntry[str], host: str, process: int) -> bool:
    if host != _host():
        return time.time() - entry.stat().st_mtime > _LONG_AGO
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, as somebody else
        return False
    return False
