"""Which failures of a store pass, and which do not."""

from __future__ import annotations

import errno
from itertools import islice
from typing import Any

import pytest

from energon_lite.errors import DatasetError, FatalStorageError
from energon_lite.extras.remote import remote_files, store_tries
from energon_lite.extras.remote.remote_files import tried
from energon_lite.extras.remote.store_tries import kind_of, pauses
from tests.extras.remote.conftest import Clock


class Client(Exception):
    """What a client raises: with a status, an answer, or nothing of use."""

    def __init__(self, words: str = "", **told: Any):
        super().__init__(words)
        for name, value in told.items():
            setattr(self, name, value)


class NoCredentialsError(Exception): ...


def answer(code: str, status: int) -> Client:
    return Client(response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}})


def made_from(cause: BaseException) -> BaseException:
    try:
        raise RuntimeError("the client failed") from cause
    except RuntimeError as error:
        return error


FAILURES: list[tuple[BaseException, str]] = [
    *[(Client(status=status), "passing") for status in (408, 425, 504, 509)],
    *[(Client(status=status), "refused") for status in (400, 505)],
    *[(Client(code=code), "unknown") for code in (399, 600)],
    (Client(status=410), "missing"),
    (Client(response={}), "unknown"),
    (type("ReadTimeoutError", (Exception,), {})(), "passing"),
    (OSError(errno.EMFILE, "Too many open files"), "short"),
    (Client(__context__=ConnectionResetError()), "passing"),
    (Client(__context__=ConnectionResetError(), __suppress_context__=True), "unknown"),
    (answer("SlowDown", 503), "passing"),
    (answer("InternalError", 500), "passing"),
    (answer("SignatureDoesNotMatch", 403), "refused"),
    (answer("ExpiredToken", 400), "refused"),
    (answer("NoSuchKey", 404), "missing"),
    (Client(status=429), "passing"),
    (Client(status=401), "refused"),
    (Client(code=502), "passing"),
    (Client("AccessDenied: no"), "refused"),
    (Client("what is this"), "unknown"),
    (NoCredentialsError(), "refused"),
    (ConnectionResetError(), "passing"),
    (TimeoutError(), "passing"),
    (OSError(errno.EBUSY, "Please reduce your request rate"), "passing"),
    (OSError("503 slow down"), "unknown"),
    (PermissionError(), "refused"),
    (ValueError("no such profile"), "refused"),
    (FileNotFoundError(), "missing"),
    (made_from(ConnectionRefusedError()), "passing"),
    (made_from(made_from(PermissionError())), "refused"),
]


@pytest.mark.parametrize(("error", "kind"), FAILURES, ids=lambda one: repr(one)[:30])
def test_kinds(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_pauses_grow_to_a_bound_and_differ() -> None:
    some, others = list(islice(pauses(0.1, 10.0), 12)), list(islice(pauses(0.1, 10.0), 12))
    assert some != others and all(0.05 * 2**n <= pause <= 10 for n, pause in enumerate(some[:6]))
    assert all(5.0 <= pause <= 10.0 for pause in some[8:])


class Store:
    """Raises these one after the other, then answers."""

    def __init__(self, *failures: BaseException):
        self.failures, self.asked = [*failures], 0

    def __call__(self) -> str:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        return "here"


def test_what_passes_is_waited_for(clock: Clock) -> None:
    store = Store(*[ConnectionResetError()] * 4, answer("SlowDown", 503))
    assert tried(store, "s3://bucket/a.tar", None, 60.0) == "here" and store.asked == 6
    assert clock.now > 1000.0


def test_what_is_refused_is_not(clock: Clock) -> None:
    store = Store(*[PermissionError("403")] * 9)
    with pytest.raises(FatalStorageError, match=r"refuses the request: PermissionError: 403[\s\S]*credentials"):
        tried(store, "s3://bucket/a.tar", None, 60.0)
    assert store.asked == 1 and clock.now == 1000.0


def test_patience_ends(clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "_TOLD", 0.05)
    with pytest.raises(FatalStorageError, match=r"cannot be read, for \d+ s[\s\S]*goes on where it was"):
        tried(Store(*[ConnectionRefusedError()] * 99), "s3://bucket/a.tar", None, 0.3)
    assert caplog.text.count("does not answer, waiting for at most") == 1


def test_what_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tries, "_UNKNOWN", (0.0, 0.0))
    with pytest.raises(FileNotFoundError, match=r"a\.tar"):
        tried(Store(answer("NoSuchKey", 404)), "s3://bucket/a.tar", None, 60.0)
    store = Store(*[Client("odd")] * 9)
    with pytest.raises(DatasetError, match="Client: odd") as caught:
        tried(store, "s3://bucket/a.tar", None, 60.0)
    assert store.asked == 3 and not isinstance(caught.value, FatalStorageError)
