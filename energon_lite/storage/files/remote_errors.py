"""Classification of failed requests to a store: retry later, or report to the user at once.

Clients of stores raise exceptions of all kinds, so an error is classified by its HTTP status, by the code of the store,
by its number, or by its class, in this order; then in the same way by its causes.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from typing import Literal

__all__ = ["Kind", "kind_of", "pauses"]

#: ``missing``: there is no such file; ``refused``: credentials or request are wrong, waiting does not help;
#: ``passing``: the store, or the way to it, is overloaded or down; ``unknown``: anything else.
Kind = Literal["missing", "refused", "passing", "unknown"]

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_PASSING_NAMES = """EAGAIN EBUSY EINTR EIO EREMOTEIO ETIMEDOUT ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTDOWN
EHOSTUNREACH ENETUNREACH ENETDOWN ENETRESET ESHUTDOWN"""
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
