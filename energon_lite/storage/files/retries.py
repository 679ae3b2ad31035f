"""Retries of reads that fail in a way that may pass.

The kind of an error decides how long it pays to wait. File descriptors and memory are needed by all samples: their
number at some moment must not decide which samples are trained on, so a shortage is waited out for seconds, and then
ends the run.
"""

from __future__ import annotations

import errno
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

from energon_lite.errors import FatalStorageError

T = TypeVar("T")

#: ``missing``: there is no such file; ``refused``: credentials or request are wrong, waiting does not help;
#: ``passing``: the storage, or the way to it, is overloaded or down; ``short``: descriptors or memory ran out;
#: ``unknown``: anything else.
Kind = Literal["missing", "refused", "passing", "short", "unknown"]

#: Too many open files in this process; on this machine; no memory in the kernel.
SHORTAGES = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOMEM])
#: Source of random waits: the global generator belongs to the user.
RANDOM = random.SystemRandom()
#: Seconds to wait before each retry: during a shortage; of a local read.
_SHORT = (0.05, 0.2, 0.5, 1.0, 2.0)
_LOCAL = (0.0, 0.1, 0.5, 2.0)
#: Seconds after a wait in vain during which other requests to the same server do not wait either.
_GIVEN_UP = 30.0

_PASSING_NAMES = """EAGAIN EBUSY EINTR EIO EREMOTEIO ETIMEDOUT ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTDOWN
EHOSTUNREACH ESTALE ENETUNREACH ENETDOWN ENETRESET ESHUTDOWN"""
_PASSING_NUMBERS = {number for number, name in errno.errorcode.items() if name in _PASSING_NAMES.split()}


def kind_of(error: BaseException) -> Kind:
    """Return the kind of failure that an error of the operating system means.

    Example:
        >>> kind_of(OSError(errno.EIO, "")), kind_of(OSError(errno.EMFILE, "")), kind_of(OSError(errno.EACCES, ""))
        ('passing', 'short', 'unknown')
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in SHORTAGES:
        return "short"
    is_passing = isinstance(error, (TimeoutError, ConnectionError)) or number in _PASSING_NUMBERS
    return "passing" if is_passing else "unknown"


#: By server: when the last request was given up, the first one began to wait, and its patience.
GaveUp = dict[str, tuple[float, float, float]]


class Tries:
    """The tries of one read or request. After a wait in vain, others of the same server wait no more for 30 s: a loader
    reads a sample in several ways before it is given up.

    Args:
        gave_up: the waits in vain of all reads that fail together.
        server: what fails together among these.
        patience: seconds to wait, all together.
        waits: seconds before each retry, by kind of error, except for shortages; None: those of local reads.
        kind_of: returns the kind of an error.

    Attributes:
        kind: kind of the last error.
        seconds: seconds since the first try, or since the first one of an earlier wait in vain.
        is_reported: free for the caller.
    """

    def __init__(
        self,
        gave_up: GaveUp,
        server: str = "",
        patience: float = math.inf,
        waits: Mapping[Kind, Iterable[float]] | None = None,
        kind_of: Callable[[BaseException], Kind] = kind_of,
    ):
        if waits is None:
            waits = {"passing": [wait * RANDOM.uniform(0.5, 1.5) for wait in _LOCAL]}
        self._server = server
        self._patience = patience
        self._gave_up = gave_up
        self._kind_of = kind_of
        self._began = time.monotonic()
        self._waits = {kind: iter(seconds) for kind, seconds in {"short": _SHORT, **waits}.items()}
        self.kind: Kind = "unknown"
        self.seconds = 0.0
        self.is_reported = False

    def wait_after(self, error: BaseException) -> float | None:
        """Return the seconds to wait before the next try; None: there is none."""
        self.kind, now = self._kind_of(error), time.monotonic()
        wait = next(self._waits.get(self.kind, iter(())), None)
        last, began, patience = self._gave_up.get(self._server, (-math.inf, now, 0.0))
        given_up = self.kind == "passing" and now - last <= _GIVEN_UP and patience >= self._patience
        began = min(began, self._began) if given_up else self._began
        self.seconds = now - began
        if wait is not None and self.seconds <= self._patience and not (given_up and wait):
            return wait
        if self.kind == "passing":
            self._gave_up[self._server] = now, began, self._patience
        return None


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
    tries = Tries({})
    while True:
        try:
            return step()
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            wait = tries.wait_after(error)
            if wait is None:
                raise out_of(error, where) from error
        time.sleep(wait)


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
