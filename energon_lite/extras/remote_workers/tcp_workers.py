"""The trainer's side of workers behind TCP: their addresses, connections, channels and handles."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_lite.extras import wire
from energon_lite.extras.remote_workers.described import TcpWorkers, host_and_port, secret_in
from energon_lite.extras.remote_workers.frames import BEAT, MESSAGE, FrameError, frame, frames, send_some
from energon_lite.extras.remote_workers.handshake import RefusedError, join
from energon_lite.extras.remote_workers.mixed_pool import MixedPool, RemoteHandle, WorkerSource
from energon_lite.extras.remote_workers.run_card import run_card
from energon_lite.loading.executors.channels import Channel
from energon_lite.loading.executors.executor_handle import PoolRequest
from energon_lite.loading.executors.worker_handle import trainer_ends

logger = logging.getLogger(__name__)

#: Seconds of an attempt to connect.
_CONNECT = 3.0
#: Seconds until the next attempt after a failed one, at first and at most.
_AGAIN, _LONGEST = 0.25, 4.0
#: Seconds between two looks for addresses, and between two look-ups of names.
_LOOK, _LOOK_UP = 0.1, 2.0


def open_pool(request: PoolRequest) -> MixedPool:
    """Return the pool of a loader, with workers behind TCP."""
    described = request.described
    workers = TcpWorkers.from_text(described) if isinstance(described, str) else described
    assert isinstance(workers, TcpWorkers)
    card = run_card(request.identity, request.runner) | {
        "max_bytes": workers.max_bytes,
        "trace": request.options.trace,
    }
    return MixedPool(request, TcpSource(workers, card), workers.host_load)


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a connection whose other side does not answer for some seconds, and send at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TcpChannel(Channel):
    """Channel to a worker behind TCP.

    Args:
        connection: the connection.
        max_bytes: size of a message of the worker, at most.

    Attributes:
        heard: time at which anything came from the worker.
    """

    def __init__(self, connection: socket.socket, max_bytes: int):
        self._connection = connection
        self._unsent: list[memoryview] = []
        self._frames = frames(self, [max_bytes])  # type: ignore[arg-type]
        self.heard = time.monotonic()

    def fileno(self) -> int:
        return self._connection.fileno()

    def recv_into(self, memory: memoryview) -> int:
        """Receive bytes, and note the time."""
        got = self._connection.recv_into(memory)
        self.heard = time.monotonic()
        return got

    @property
    def is_full(self) -> bool:
        return bool(self._unsent)

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        self._unsent += frame(MESSAGE, wire.pack((jobs, noted)))
        self.flush()

    def flush(self) -> None:
        send_some(self._connection, self._unsent)

    def receive(self) -> tuple[Any, int] | None:
        while (got := next(self._frames)) is not None:
            if got.kind == BEAT:
                continue
            if got.kind != MESSAGE:
                raise FrameError("a frame out of turn")
            try:
                return wire.unpack(got.body), got.body.nbytes
            except wire.UnknownClassError:
                raise
            except Exception as error:
                raise FrameError(f"a message that cannot be read: {error}") from None
        return None

    def close(self) -> None:
        self._connection.close()


class TcpHandle(RemoteHandle):
    """Handle of a worker behind TCP."""

    channel: TcpChannel

    def __init__(self, number: int, channel: TcpChannel, server: _Server):
        super().__init__(number, channel, server.address)
        trainer_ends.add(channel)
        self.server = server

    def silence(self, now: float) -> float:
        return now - self.channel.heard


@dataclass(eq=False)
class _Server:
    """State of an address.

    Attributes:
        address: the address, with a number in place of a name.
        host: the name that its certificate has.
        told: workers that it has; 0: not known.
        again: time of the next attempt to connect.
        pause: seconds until the attempt after that.
        is_tried: an attempt is running.
    """

    address: str
    host: str
    told: int = 0
    again: float = 0.0
    pause: float = _AGAIN
    is_tried: bool = False


class TcpSource(WorkerSource):
    """Source of workers behind TCP.

    Args:
        workers: their description.
        card: what this trainer runs.
    """

    def __init__(self, workers: TcpWorkers, card: dict[str, Any]):
        self._workers = workers
        self._card = card
        self._secret = secret_in(workers.secret_file)
        self._tls = None if workers.tls is None else workers.tls.context(server=False)
        self._servers: dict[str, _Server] = {}
        self._open = Counter[str]()  # connections by address
        self._joined: deque[TcpHandle] = deque()
        self._numbers = itertools.count(1000)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._refusal: RefusedError | None = None
        self._warned: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self._look, name="energon-lite-servers", daemon=True).start()

    def take(self, alone: bool) -> Sequence[TcpHandle]:
        if alone and not self._joined and self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        joined = []
        while self._joined:
            joined.append(self._joined.popleft())
        return joined

    def left(self, worker: RemoteHandle) -> None:
        assert isinstance(worker, TcpHandle)
        with self._lock:
            self._open[worker.server.address] -= 1

    def close(self) -> None:
        self._closed.set()
        while self._joined:
            self._joined.popleft().close()

    # -- in threads -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Connect to servers that have workers to give, until the source is closed."""
        looked_up = 0.0
        while not self._closed.wait(_LOOK):
            now = time.monotonic()
            if now - looked_up >= _LOOK_UP or not self._servers or self._workers.file is not None:
                looked_up = now
                found = dict(self._addresses())
                self._servers = {address: self._servers.get(address) or one for address, one in found.items()}
            for server in self._servers.values():
                most = min(server.told or 1, self._workers.per_server or (1 << 30))
                if now >= server.again and not server.is_tried and self._open[server.address] < most:
                    server.is_tried = True
                    name = "energon-lite-connection"
                    threading.Thread(target=self._try, args=(server,), name=name, daemon=True).start()

    def _addresses(self) -> Iterator[tuple[str, _Server]]:
        """Yield the addresses of all servers; names are looked up."""
        texts = list(self._workers.addresses)
        if self._workers.file is not None:
            with suppress(OSError):
                lines = (line.partition("#")[0].strip() for line in Path(self._workers.file).read_text().splitlines())
                texts += filter(None, lines)
        for text in dict.fromkeys(texts):
            try:
                host, port = host_and_port(text)
                for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    number = f"{place[0]!s}"
                    number = f"[{number}]" if family == socket.AF_INET6 else number
                    address = f"{number}:{place[1]!s}"
                    yield address, _Server(address, host)
            except (OSError, ValueError) as error:
                self._warn(f"{text}: {error}")

    def _try(self, server: _Server) -> None:
        """Connect to a worker of a server, and shake hands."""
        try:
            with suppress(OSError):
                self._connect(server)
                server.pause = _AGAIN
                return
            self._pause(server)
        except RefusedError as error:
            self._refusal = error
            self._warn(f"the server at {server.address} is not used: {error}")
            self._pause(server)
        except Exception as error:
            self._warn(f"the server at {server.address} is not used: {type(error).__name__}: {error}")
            self._pause(server)
        finally:
            server.is_tried = False

    def _pause(self, server: _Server) -> None:
        server.again = time.monotonic() + server.pause
        server.pause = min(_LONGEST, 2 * server.pause)

    def _connect(self, server: _Server) -> None:
        connection = socket.create_connection(host_and_port(server.address), timeout=_CONNECT)
        channel = TcpChannel(connection, self._workers.max_bytes)
        handle = TcpHandle(next(self._numbers), channel, server)  # a process that is forked meanwhile closes it
        try:
            keep_alive(connection)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=server.host)
                channel._connection = connection
            told = join(connection, self._secret, self._card, _CONNECT)
            server.told = int(told["workers"])
            connection.setblocking(False)
            channel.heard = time.monotonic()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._open[server.address] += 1
        self._joined.append(handle)
        if self._closed.is_set():
            self.close()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)
