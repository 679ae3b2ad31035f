"""Opening of files for reading that does not block if a pipe is in their place."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_file"]


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
        raise FileNotFoundError(errno.ENOENT, "there is no file, but a pipe, a device or the like", path)
    os.set_blocking(fd, True)  # some file systems (such as tape archives) restore contents only for blocking reads
    return fd
