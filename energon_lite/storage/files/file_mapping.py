"""Mapping a file into memory without keeping it open.

``mmap.mmap`` holds a descriptor of its own for as long as the mapping lives, though the system needs none. A blend of a
thousand data sets would use up a thousand descriptors for its indexes alone, which is where most systems draw the line.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

__all__ = ["map_file"]


def map_file(fd: int) -> memoryview:
    """The bytes of an open file, read-only and shared with all processes that map it.

    The mapping goes when nothing refers to the view (or to an array over it) any more; ``fd`` can be closed at once.

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
    """What ``trackfd=False`` does since Python 3.13."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit: then other threads may still read it, and the system takes it back anyway.
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()
