"""Shortages of file descriptors and memory, which all samples need: waited out for seconds, then an error of the run.

The number of descriptors that a machine has left at some moment must not decide which samples are trained on.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from energon_lite.errors import FatalStorageError

__all__ = ["SHORTAGES", "out_of", "retry_on_exhaustion"]

T = TypeVar("T")

#: Too many open files in this process; on this machine; no memory in the kernel.
SHORTAGES = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOMEM])
#: Seconds to wait before the next try.
_RETRIES = (0.05, 0.2, 0.5, 1.0, 2.0)


def retry_on_exhaustion(step: Callable[[], T], where: str) -> T:
    """Return the result of ``step``; retry it for some seconds while descriptors or memory are short.

    Args:
        step: may raise OSError.
        where: place that the error names.

    Raises:
        FatalStorageError: the shortage lasts.

    Example:
        >>> file = retry_on_exhaustion(lambda: open("a.tar", "rb"), "a.tar")
    """
    for wait in (*_RETRIES, None):
        try:
            return step()
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            if wait is None:
                raise out_of(error, where) from error
        time.sleep(wait)
    raise AssertionError("not reached")


def out_of(error: OSError, where: str) -> FatalStorageError:
    """Return the error for a shortage that lasts."""
    files = error.errno != errno.ENOMEM
    return FatalStorageError(
        f"the {'file descriptors' if files else 'memory'} of the process or the machine ran out, for seconds: "
        f"{error.strerror or error}",
        where=where,
        fix="raise the limit of open files (`ulimit -n 65536`, or LimitNOFILE of the service), or close what your "
        "code leaves open"
        if files
        else "use fewer workers or smaller batches, or give the job more memory",
    )
