"""Retries of storage: one policy for all reads and requests, local and remote, that fail in a way that may pass.

Clients of stores raise exceptions of all kinds, so an error is classified by its HTTP status, by the code of the store,
by its number, or by its class, in this order; then in the same way by its causes. The kind decides how long it pays to
wait. File descriptors and memory are needed by all samples: their number at some moment must not decide which samples
are trained on, so a shortage is waited out for seconds, and then ends the run.
"""

from __future__ import annotations

import errno
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from energon_lite.errors import FatalStorageError

__all__ = ["SHORTAGES", "GaveUp", "Kind", "Tries", "kind_of", "out_of", "pauses", "retry_on_exhaustion"]

T = TypeVar("T")

#: ``missing``: there is no such file; ``refused``: credentials or request are wrong, waiting does not help;
#: ``passing``: the storage, or the way to it, is overloaded or down; ``short``: descriptors or memory ran out;
#: ``unknown``: anything else.
Kind = Literal["missing", "refused", "passing", "short", "unknown"]

#: Too many open files in this process; on this machine; no memory in the kernel.
SHORTAGES = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOMEM])
#: Seconds to wait before each retry: during a shortage; of a local read; after an unknown error of a store.
_SHORT = (0.05, 0.2, 0.5, 1.0, 2.0)
_LOCAL = (0.0, 0.1, 0.5, 2.0)
_UNKNOWN = (0.2, 1.0, 3.0)
#: Seconds after a wait in vain during which other requests to the same server do not wait either.
_GIVEN_UP = 30.0

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_PASSING_NAMES = """EAGAIN EBUSY EINTR EIO EREMOTEIO ETIMEDOUT ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTDOWN
EHOSTUNREACH ESTALE ENETUNREACH ENETDOWN ENETRESET ESHUTDOWN"""
_PASSING_NUMBERS = {number for number, name in errno.errorcode.items() if name in _PASSING_NAMES.split()}
#: Names of exception classes that come without a status or number.
_REFUSED_CLASSES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "ProfileNotFound",
    "NoRegionError",
    "DefaultCredentialsError",
    "RefreshError",
    "SSLCertVerificationError",
    "ClientConnectorCertificateError",
    "InvalidURL",
    "ParamValidationError",
}
_PASSING_CLASSES = {
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "HTTPClientError",
    "ClientConnectionError",
    "ClientConnectorError",
    "ClientOSError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ServerTimeoutError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "FSTimeoutError",
    "RetryableError",
}
_REFUSED_CODES = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "AuthorizationHeaderMalformed",
    "RequestTimeTooSkewed",
}


def kind_of(error: BaseException) -> Kind:
    """Return the kind of failure that an error of a store's client means.

    Example:
        >>> kind_of(ConnectionRefusedError()), kind_of(PermissionError()), kind_of(FileNotFoundError())
        ('passing', 'refused', 'missing')
    """
    kinds = [_kind_of_one(link) for link in _chain(error)]
    return next((kind for kind in kinds if kind != "unknown"), "unknown")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and up to four of its causes."""
    for _ in range(5):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _kind_of_one(error: BaseException) -> Kind:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # errors of botocore
        code = str((response.get("Error") or {}).get("Code", ""))
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        if code in _REFUSED_CODES:
            return "refused"
        if isinstance(status, int):
            return _kind_of_status(status)
    for name in ("status", "code", "status_code"):  # errors of aiohttp, gcsfs, requests
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return _kind_of_status(status)
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        return "short"
    classes = {base.__name__ for base in type(error).__mro__}
    if classes & _REFUSED_CLASSES:
        return "refused"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    if isinstance(error, (PermissionError, TypeError, NotImplementedError, ImportError)) or type(error) is ValueError:
        return "refused"
    if isinstance(error, (TimeoutError, ConnectionError)) or classes & _PASSING_CLASSES:
        return "passing"
    if isinstance(error, OSError) and error.errno in _PASSING_NUMBERS:
        return "passing"
    if any(code in str(error) for code in _REFUSED_CODES):  # clients that wrap all errors in a class of their own
        return "refused"
    return "unknown"


def _kind_of_status(status: int) -> Kind:
    if status in (404, 410):
        return "missing"
    return "passing" if status in _PASSING_STATUS else "refused"


_random = random.SystemRandom()  # the global generator belongs to the user


def pauses(first: float = 0.03, longest: float = 10.0) -> Iterator[float]:
    """Yield the seconds to wait before each further try: doubled each time, and randomised between processes.

    Example:
        >>> [round(pause) for pause, _ in zip(pauses(8.0), range(2))]  # doctest: +SKIP
        [7, 10]
    """
    pause = first
    while True:
        yield pause * _random.uniform(0.5, 1.0)
        pause = min(longest, 2 * pause)


#: By server: when the last request was given up, the first one began to wait, and its patience.
GaveUp = dict[str, tuple[float, float, float]]
_gave_up: GaveUp = {}


class Tries:
    """The tries of one read or request. After a wait in vain, others of the same server wait no more for 30 s: a loader
    reads a sample in several ways before it is given up.

    Args:
        server: what fails together.
        patience: seconds to wait for a store that is unreachable; None: the storage is local.
        gave_up: the waits in vain; None: those of this process.

    Attributes:
        kind: kind of the last error.
        seconds: seconds since the first try, or since the first one of an earlier wait in vain.
        is_reported: free for the caller.
    """

    def __init__(self, server: str, patience: float | None, gave_up: GaveUp | None = None):
        self._server = server
        self._patience = math.inf if patience is None else patience
        self._gave_up = _gave_up if gave_up is None else gave_up
        self._began = time.monotonic()
        passing = (wait * _random.uniform(0.5, 1.5) for wait in _LOCAL) if patience is None else pauses()
        unknown = () if patience is None else _UNKNOWN
        self._waits = {"passing": iter(passing), "short": iter(_SHORT), "unknown": iter(unknown)}
        self.kind: Kind = "unknown"
        self.seconds = 0.0
        self.is_reported = False

    def wait_after(self, error: BaseException) -> float | None:
        """Return the seconds to wait before the next try; None: there is none."""
        self.kind, now = kind_of(error), time.monotonic()
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

    @staticmethod
    def succeeded(server: str, gave_up: GaveUp | None = None) -> None:
        """Forget a wait in vain for a server, because it has answered."""
        gave_up = _gave_up if gave_up is None else gave_up
        if gave_up:
            gave_up.pop(server, None)


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
    tries = Tries("", None)
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
