"""Files opened for reading, where a pipe in their place holds nobody up."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_file"]


def open_file(path: str, flags: int) -> int:
    """A descriptor of a file, as from ``os.open``; also the ``opener`` of ``open``. Folders open as ever.

    Raises:
        FileNotFoundError: nothing is there but a pipe, for whose writer one would wait, a device or the like.
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
    os.set_blocking(fd, True)  # some file systems (of tapes, say) bring contents back only if they may be waited for
    return fd
