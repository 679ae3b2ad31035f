"""What a failed request to a store means: wait and send it again, or tell the user at once.

Clients of stores raise what they like, so an error is understood by its HTTP status, by the code of the store, by its
number, or by its class, in this order, and so are the errors that it was made from.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from typing import Literal

__all__ = ["Kind", "kind_of", "pauses"]

#: ``missing``: there is no such file; ``refused``: the credentials, or the request, will not become right by waiting;
#: ``passing``: the store, or the way to it, is overloaded or down; ``unknown``: anything else.
Kind = Literal["missing", "refused", "passing", "unknown"]

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_PASSING_NAMES = """EAGAIN EBUSY EINTR EIO EREMOTEIO ETIMEDOUT ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTDOWN
EHOSTUNREACH ENETUNREACH ENETDOWN ENETRESET ESHUTDOWN"""
_PASSING_NUMBERS = {number for number, name in errno.errorcode.items() if name in _PASSING_NAMES.split()}
#: Names of classes, as far as they do not come with a status or a number.
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
    """What kind of failure an error of a store's client is.

    Example:
        >>> kind_of(ConnectionRefusedError()), kind_of(PermissionError()), kind_of(FileNotFoundError())
        ('passing', 'refused', 'missing')
    """
    kinds = [_kind_of_one(one) for one in _chain(error)]
    return next((kind for kind in kinds if kind != "unknown"), "unknown")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was made from."""
    for _ in range(5):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _kind_of_one(error: BaseException) -> Kind:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        code = str((response.get("Error") or {}).get("Code", ""))
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        if code in _REFUSED_CODES:
            return "refused"
        if isinstance(status, int):
            return _kind_of_status(status)
    for name in ("status", "code", "status_code"):  # of aiohttp, gcsfs, requests
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return _kind_of_status(status)
    classes = {one.__name__ for one in type(error).__mro__}
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
    if any(code in str(error) for code in _REFUSED_CODES):  # of clients that wrap all in a class of their own
        return "refused"
    return "unknown"


def _kind_of_status(status: int) -> Kind:
    if status in (404, 410):
        return "missing"
    return "passing" if status in _PASSING_STATUS else "refused"


_random = random.SystemRandom()  # not the global generator: that one is the user's


def pauses(first: float = 0.03, longest: float = 10.0) -> Iterator[float]:
    """Seconds to wait before each further try: doubled each time, and none of them what another process waits.

    Example:
        >>> [round(pause) for pause, _ in zip(pauses(8.0), range(2))]  # doctest: +SKIP
        [7, 10]
    """
    pause = first
    while True:
        yield pause * _random.uniform(0.5, 1.0)
        pause = min(longest, 2 * pause)
