"""Opening of files for reading that does not block if a pipe is in their place, and mapping of files into memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import weakref

__all__ = ["map_file", "open_file"]


def open_file(path: str, flags: int) -> int:
    """Open a file like ``os.open``, and return its descriptor; also an ``opener`` for ``open``. Folders open as usual.

    Raises:
        FileNotFoundError: there is only a pipe (which would block until it has a writer), a device or the like.
        OSError: as ``os.open``.

    Example:
        >>> with open("a.idx", "rb", opener=open_file) as file:
        ...     head = file.read(8)
    """
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "this is not a file, but a pipe, a device or the like", path)
    os.set_blocking(fd, True)  # some file systems (such as tape archives) restore contents only for blocking reads
    return fd


def map_file(fd: int) -> memoryview:
    """Map an open file, read-only and shared with all processes that map it; return its bytes.

    The mapping ends when the view (and every array over it) is gone; ``fd`` can be closed at once. ``mmap.mmap`` keeps
    a descriptor of its own as long as the mapping lives, though the system needs none. A blend of a thousand data sets
    would use a thousand descriptors for its indexes alone, which is the usual limit of a process.

    Raises:
        OSError: the file cannot be mapped.

    Example:
        >>> with open("data/.nv-meta/energon_lite.idx", "rb") as file:
        ...     view = map_file(file.fileno())
        >>> bytes(view[:8])
        b'ENRGLIDX'
    """
    size = os.fstat(fd).st_size
    if not size:  # the system maps no empty files
        return memoryview(b"")
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ, trackfd=False))
    return _map_by_libc(fd, size)


def _map_by_libc(fd: int, size: int) -> memoryview:
    """Map by libc, which Python does since 3.13 with ``trackfd=False``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit: other threads may still read it then, and the system frees it anyway.
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()
