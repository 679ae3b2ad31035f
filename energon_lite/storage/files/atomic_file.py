"""Files that are replaced atomically: they appear complete or not at all.

A reader on another rank, or a run that starts after a crash, must never see half an index: the bytes are written to a
temporary file in the same folder, which is then renamed to the final name (atomic on POSIX file systems).
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
#: Seconds after which the temporary file of another machine, whose processes cannot be checked, counts as left over.
_LONG_AGO = 86_400.0
#: Threads that flush files at the same time.
_FLUSHING_THREADS = 8


def temporary_path(path: str) -> str:
    """Return a name in the same folder that no other process uses, and that identifies this process."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{_host()}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _host() -> str:
    """Identify the machine, or the container on it, whose processes can check each other, in 8 hexadecimal digits."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{os.uname().nodename} {namespace}'.encode()):08x}"


@contextmanager
def replacing(path: str, *, flush: bool = False) -> Iterator[str]:
    """Give a temporary path; rename it to ``path`` when the block succeeds, remove it when the block fails.

    Args:
        path: the file.
        flush: also flush it to the disk. Without that a power failure after the rename may leave an empty file under
            the final name; many files are flushed faster together, by :func:`flush_files`.

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
    """Flush files to the disk in parallel, so that the file system writes its journal once for many of them."""
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
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_leftovers(folder: str) -> list[str]:
    """Remove temporary files of dead processes from a folder (not from its subfolders); return their paths.

    Files of other machines are removed when they are a day old.
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
    except PermissionError:  # the process lives, under another user
        return False
    return False
