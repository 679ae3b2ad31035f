"""Ranges over kept connections: answers as they should be, and every other kind."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import FatalStorageError
from energon_lite.extras.remote import remote_files
from energon_lite.extras.remote.direct_ranges import DirectRanges
from energon_lite.extras.remote.file_versions import Answer
from energon_lite.extras.remote.range_client import RangeClient, StatusError, UnusualAnswer
from energon_lite.extras.remote.store_tries import kind_of

BODY = bytes(range(256)) * 400
HEAD = b"GET /a HTTP/1.1\r\nHost: here\r\n"


def answer(
    first: int, last: int, *, status: bytes = b"206 Partial Content", more: bytes = b"", body: Any = None
) -> bytes:
    body = BODY[first : last + 1] if body is None else body
    lines = [b"HTTP/1.1 " + status, b"Content-Range: bytes %d-%d/%d" % (first, last, len(BODY))]
    return b"\r\n".join([*lines, b"content-length: %d" % (last + 1 - first), more + b"X: y", b"", body])


class Server:
    """Answers each request with what the next of ``script`` makes of its range; at its end always as it should.

    Bytes are sent; after None the connection is closed; a number is so many seconds to wait.
    """

    def __init__(self, context: ssl.SSLContext | None = None):
        self.script: list[Callable[[int, int], list[Any]]] = []
        self.connections = self.requests = self.closed_by_client = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = self.run(asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=context))
        self.port = self.server.sockets[0].getsockname()[1]

    def run(self, what: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await what

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(30)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                self.requests += 1
                first, last = head.partition(b"range: bytes=")[2].split(b"\r\n")[0].split(b"-")
                steps = self.script.pop(0) if self.script else lambda first, last: [answer(first, last)]
                for step in steps(int(first), int(last)):
                    if step is None:
                        writer.close()
                        return
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    else:
                        writer.write(step)
                        await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed_by_client += 1
            writer.close()

    def stop(self) -> None:
        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def get(server: Server, *places: tuple[int, int], client: RangeClient | None = None) -> list[bytes]:
    client = client or RangeClient("127.0.0.1", server.port, patience=5.0)

    async def all_of_them() -> list[bytes]:
        return [(await client.get(HEAD, offset, size)).data for offset, size in places]

    found: list[bytes] = server.run(all_of_them())
    return found


def test_ranges_come_over_one_connection_also_in_pieces(server: Server) -> None:
    def pieces(first: int, last: int) -> list[Any]:
        whole = answer(first, last)
        return [part for at in range(0, len(whole), 7) for part in (whole[at : at + 7], 0.001)]

    named = b'ETag: "Five"\r\nLast-Modified: Wed, 21 Oct\r\n'
    server.script = [lambda first, last: [answer(first, last, more=named)]]
    client = RangeClient("127.0.0.1", server.port)
    assert server.run(client.get(HEAD, 3, 4)) == Answer(BODY[3:7], '"Five"', "Wed, 21 Oct")
    assert server.run(client.get(HEAD, 3, 4)) == Answer(BODY[3:7])
    server.script, places = [pieces], [(3, 60), (5, 7000), (100, 100_000)]
    assert get(server, *places, client=client) == [BODY[offset : offset + size] for offset, size in places]
    assert (server.connections, server.requests) == (1, 5)


def test_at_the_same_time_each_has_a_connection(server: Server) -> None:
    client = RangeClient("127.0.0.1", server.port)

    async def many() -> list[bytes]:
        answers = await asyncio.gather(*[client.get(HEAD, number, 10) for number in range(50)])
        return [one.data for one in answers]

    for _ in range(2):
        assert server.run(many()) == [BODY[number : number + 10] for number in range(50)]
    assert server.connections <= 50 and server.requests == 100


ODD = {
    "the whole": lambda first, last: [b"HTTP/1.1 200 OK\r\ncontent-length: 102400\r\n\r\n" + BODY],
    "moved": lambda first, last: [b"HTTP/1.1 302 Found\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n"],
    "refused": lambda first, last: [b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"],
    "missing": lambda first, last: [b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"],
    "old": lambda first, last: [answer(first, last).replace(b"HTTP/1.1", b"HTTP/1.0")],
    "other range": lambda first, last: [answer(first + 1, last + 1)],
    "shorter range": lambda first, last: [answer(first, last - 1)],
    "compressed": lambda first, last: [answer(first, last, more=b"Content-Encoding: gzip\r\n")],
    "in chunks": lambda first, last: [answer(first, last, more=b"Transfer-Encoding: chunked\r\n")],
    "two lengths": lambda first, last: [answer(first, last, more=b"Content-Length: 3\r\n")],
    "more bytes": lambda first, last: [answer(first, last) + b"and more"],
    "long head": lambda first, last: [b"HTTP/1.1 206 Partial Content\r\nX: " + b"y" * (1 << 17)],
    "no HTTP": lambda first, last: [b"hello\r\n\r\n"],
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_is_no_answer(server: Server, kind: str) -> None:
    server.script = [ODD[kind]]
    client = RangeClient("127.0.0.1", server.port)
    with pytest.raises(UnusualAnswer):
        get(server, (10, 20), client=client)
    assert get(server, (10, 20), client=client) == [BODY[10:30]]  # nothing is left over of the other one
    assert server.connections == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_later(server: Server, status: int) -> None:
    server.script = [lambda first, last: [b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status]]
    with pytest.raises(StatusError, match=str(status)) as caught:
        get(server, (10, 20))
    assert kind_of(caught.value) == "passing"


@pytest.mark.parametrize("length", [0, 12, -5], ids=["nothing", "half a head", "half a body"])
def test_connections_that_end_early(server: Server, length: int) -> None:
    server.script = [lambda first, last: [answer(first, last)[:length], None]]
    with pytest.raises(ConnectionResetError) as caught:
        get(server, (10, 20))
    assert kind_of(caught.value) == "passing"


def test_a_kept_connection_that_was_closed_is_replaced(server: Server) -> None:
    server.script = [lambda first, last: [answer(first, last)], lambda first, last: [None]]
    assert get(server, (0, 5), (5, 5)) == [BODY[:5], BODY[5:10]]
    server.script = [lambda first, last: [answer(first, last, more=b"Connection: close\r\n"), None]]
    assert get(server, (0, 5), (5, 5)) == [BODY[:5], BODY[5:10]]
    assert server.connections == 4


def test_a_server_that_hangs(server: Server) -> None:
    server.script = [lambda first, last: [answer(first, last)[:-5], 0.5]]
    client = RangeClient("127.0.0.1", server.port, patience=0.2)
    with pytest.raises(TimeoutError) as caught:
        get(server, (10, 20), client=client)
    assert kind_of(caught.value) == "passing"
    client._patience = 30.0
    assert get(server, (10, 20), client=client) == [BODY[10:30]]
    until = time.monotonic() + 10
    while not server.closed_by_client and time.monotonic() < until:
        time.sleep(0.01)
    assert server.closed_by_client == 1


def test_cancelled_requests_leave_nothing_behind(server: Server) -> None:
    server.script = [lambda first, last: [0.1, answer(first, last)]]
    client = RangeClient("127.0.0.1", server.port)

    async def cancel() -> bytes:
        task = asyncio.ensure_future(client.get(HEAD, 0, 50))
        await asyncio.sleep(0.05)
        task.cancel()
        return (await client.get(HEAD, 50, 50)).data

    assert server.run(cancel()) == BODY[50:100]
    assert server.connections == 2


def test_nobody_listens(server: Server) -> None:
    with pytest.raises(ConnectionRefusedError):
        server.run(RangeClient("127.0.0.1", 1).get(HEAD, 0, 5))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_over_tls_with_its_certificate_alone(tmp_path: Path) -> None:
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *files, *name]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    server = Server(context)
    try:
        known, unknown = ssl.create_default_context(cafile=tmp_path / "cert"), ssl.create_default_context()
        client = RangeClient("localhost", server.port, known)
        assert get(server, (5, 90_000), (7, 9), client=client) == [BODY[5:90_005], BODY[7:16]]
        with pytest.raises(ssl.SSLCertVerificationError) as caught:
            get(server, (0, 5), client=RangeClient("localhost", server.port, unknown))
        assert kind_of(caught.value) == "refused"
    finally:
        server.stop()


# -- beside the file system -------------------------------------------------------------------------------------------


@pytest.fixture
def direct(server: Server) -> DirectRanges:
    pytest.importorskip("aiohttp")
    from fsspec.implementations.http import HTTPFileSystem

    return DirectRanges(HTTPFileSystem(skip_instance_cache=True))


def test_a_signature_that_ran_out_is_made_again(server: Server, direct: DirectRanges) -> None:
    server.script = [ODD["refused"]]
    assert server.run(direct.read(f"http://127.0.0.1:{server.port}/a", 5, 10)).data == BODY[5:15]
    assert (server.requests, direct.read_here) == (2, 1)


def test_a_server_that_is_always_odd_is_left_to_the_file_system(server: Server, direct: DirectRanges) -> None:
    """And no other server."""
    server.script = [ODD["old"]] * 6
    for _ in range(10):
        assert server.run(direct.read(f"http://127.0.0.1:{server.port}/a", 5, 10)) is None
    assert server.requests == 6
    assert server.run(direct.read(f"http://localhost:{server.port}/a", 5, 10)).data == BODY[5:15]


def test_what_only_the_file_system_knows(server: Server, direct: DirectRanges) -> None:
    assert server.run(direct.read(f"http://me:secret@127.0.0.1:{server.port}/a", 5, 10)) is None
    assert server.requests == 0


def read_in_its_loop(url: str, offset: int, size: int) -> bytes:
    reading = remote_files.read_range_in_loop(url, offset, size)
    return asyncio.run_coroutine_threadsafe(reading, remote_files.reads_in_loop(url)).result(30)


@pytest.mark.usefixtures("clients")
def test_failures_pass(server: Server) -> None:
    pytest.importorskip("aiohttp")
    url = f"http://127.0.0.1:{server.port}/b"
    busy = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n"
    server.script = [lambda first, last: [busy], lambda first, last: [None], ODD["other range"], ODD["refused"]]
    assert read_in_its_loop(url, 5, 10) == BODY[5:15]
    server.script = [ODD["the whole"]] * 3
    with pytest.raises(FatalStorageError, match="status 200"):
        read_in_its_loop(url, 5, 10)
    server.script = [ODD["missing"]] * 3
    with pytest.raises(FileNotFoundError):
        read_in_its_loop(url, 5, 10)
