"""Retries of requests to stores: how long it pays to wait after an error of a store's client.

Clients raise exceptions of all kinds, so an error is classified by its HTTP status, by its number, by its class, or by
the code of the store in its text, in this order; then in the same way by its causes.
"""

from __future__ import annotations

from collections.abc import Iterator

from energon_lite.storage.files import retries
from energon_lite.storage.files.retries import RANDOM, GaveUp, Kind, Tries

#: Seconds to wait before each retry after an unknown error.
_UNKNOWN = (0.2, 1.0, 3.0)

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
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
    link: BaseException | None = error
    for _ in range(5):  # the error and up to four of its causes
        if link is None:
            break
        if (kind := _kind_of_one(link)) != "unknown":
            return kind
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "unknown"


def _kind_of_one(error: BaseException) -> Kind:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # errors of botocore
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return _kind_of_status(status)
    for name in ("status", "code", "status_code"):  # errors of aiohttp, gcsfs, requests
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return _kind_of_status(status)
    if (kind := retries.kind_of(error)) == "short":
        return kind
    classes = {base.__name__ for base in type(error).__mro__}
    if classes & _REFUSED_CLASSES:
        return "refused"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    if isinstance(error, (PermissionError, TypeError, NotImplementedError, ImportError)) or type(error) is ValueError:
        return "refused"
    if kind == "passing" or classes & _PASSING_CLASSES:
        return "passing"
    if any(code in str(error) for code in _REFUSED_CODES):  # clients that wrap all errors in a class of their own
        return "refused"
    return "unknown"


def _kind_of_status(status: int) -> Kind:
    if status in (404, 410):
        return "missing"
    return "passing" if status in _PASSING_STATUS else "refused"


def pauses(first: float = 0.03, longest: float = 10.0) -> Iterator[float]:
    """Yield the seconds to wait before each further try: doubled each time, and randomised between processes.

    Example:
        >>> [round(pause) for pause, _ in zip(pauses(8.0), range(2))]  # doctest: +SKIP
        [7, 10]
    """
    pause = first
    while True:
        yield pause * RANDOM.uniform(0.5, 1.0)
        pause = min(longest, 2 * pause)


_gave_up: GaveUp = {}


class StoreTries(Tries):
    """The tries of one request.

    Args:
        url: the file.
        patience: seconds to wait for a store that is unreachable.
    """

    def __init__(self, url: str, patience: float):
        super().__init__(_gave_up, server_of(url), patience, {"passing": pauses(), "unknown": _UNKNOWN}, kind_of)


def answered(url: str) -> None:
    """Forget a wait in vain for a server, because it has answered."""
    if _gave_up:
        _gave_up.pop(server_of(url), None)


def server_of(url: str) -> str:
    """Return the scheme of a URL, and its server or bucket."""
    return "/".join(url.split("/")[:3])
