"""Process beside a trainer that connects to servers, and receives their answers into memory that the trainer shares.

So the trainer does not copy what comes from the network. It gets a pair of sockets for each worker that has joined. On
it, jobs and answers are the same frames as on the connection, but a large answer is in a segment, as one of a local
worker is, and only its place is in the frame. The process does not look into jobs and answers, and does not import
torch.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.extras.remote_workers.described import TlsFiles, host_and_port
from energon_lite.extras.remote_workers.protocol import (
    BEAT,
    IN_SEGMENT,
    MESSAGE,
    RELEASED,
    SILENT,
    FrameConnection,
    FrameError,
    RefusedError,
    frame,
    join,
    keep_alive,
)
from energon_lite.loading.executors.segments import SegmentReader, Segments, SegmentWriter

#: Seconds of an attempt to connect.
_CONNECT = 3.0
#: Seconds until the next attempt after a failed one, at first and at most.
_AGAIN, _LONGEST = 0.25, 4.0
#: Seconds between two looks for addresses, and between two look-ups of names.
_LOOK, _LOOK_UP = 0.1, 2.0
#: Place of an answer: number of its segment, size.
PLACE = struct.Struct("<2Q")
#: Seconds without a sign of a worker after which its jobs are given to others, and after which it is dropped.
_SILENT, _GONE = 0.6, 10.0


class Orders(NamedTuple):
    """Orders of a trainer to its receiver. Later ones change the addresses: connections to others stay open.

    Args:
        card: what the trainer runs.
        segments: number of segments for each worker.
        secret: secret that trainer and workers share.
        addresses, file, tls, per_server: see :class:`TcpWorkers`.
    """

    card: dict[str, Any]
    segments: int
    secret: bytes | None
    addresses: Sequence[str] = ()
    file: str | os.PathLike[str] | None = None
    tls: TlsFiles | None = None
    per_server: int | None = None


class Report(NamedTuple):
    """Report of a receiver to its trainer.

    Args:
        text: a warning, or the address of a worker that has joined.
        refusal: reason why a worker cannot be used.
        descriptors: number of descriptors that follow: the socket of a worker that has joined, and the file of its
            segments, if the system has such files; 0: none has joined.
    """

    text: str
    refusal: RefusedError | None = None
    descriptors: int = 0


def main() -> None:
    """Run the process, with the descriptor of its pipe as the only argument."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # the trainer decides when to stop
    control = Connection(int(sys.argv[1]))
    Receiver(control, control.recv()).run()


class _Worker(FrameConnection):
    """Connection to a worker, with the segments for its answers.

    Args:
        connection: the connection, after the handshake.
        max_bytes: size of an answer, at most.
        segments: the segments.
        trainer: connection to the trainer.

    Attributes:
        number: segment of the frame that was received last; None: it is in memory of its own.
    """

    def __init__(self, connection: socket.socket, max_bytes: int, segments: Segments, trainer: FrameConnection):
        super().__init__(connection, max_bytes, self._room)
        self._trainer = trainer
        self._writer = SegmentWriter(segments)
        self._reader = SegmentReader(segments)
        self.release = self._writer.release
        self.number: int | None = None

    def wait(self, event: int, seconds: float = _SILENT) -> bool:
        """Wait for an event; tell the trainer when nothing is heard of the worker, and when it is heard again.

        Raises:
            FrameError: it is silent for too long.
        """
        if super().wait(event, seconds) or event == select.POLLOUT:
            return True
        self._trainer.send(frame(SILENT))
        if not super().wait(event, _GONE - seconds):
            raise FrameError(f"nothing was heard for {_GONE:g} s")
        self._trainer.send(frame(BEAT))
        return True

    def _room(self, size: int) -> memoryview | None:
        self.number = self._writer.take(size)
        if self.number is None:
            return None
        return memoryview(self._reader.mapped(self.number, size).memory)[:size]


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


class Receiver:
    """Connections to the servers of a trainer.

    Args:
        control: pipe to the trainer.
        orders: its orders.
    """

    def __init__(self, control: Connection, orders: Orders):
        self._control = control
        self._orders = orders
        self._trainer = os.getppid()
        self._tls = None if orders.tls is None else orders.tls.context(server=False)
        self._servers: dict[str, _Server] = {}
        self._open = Counter[str]()  # connections by address
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def run(self) -> None:
        """Connect to servers that have workers to give, until the trainer closes its pipe, or ends."""
        looked_up = 0.0
        while os.getppid() == self._trainer:
            if self._control.poll(_LOOK):
                try:
                    self._orders, looked_up = self._control.recv(), 0.0
                except (EOFError, OSError):
                    break
            now = time.monotonic()
            if now - looked_up >= _LOOK_UP or not self._servers or self._orders.file is not None:
                looked_up = now
                found = dict(self._addresses())
                self._servers = {address: self._servers.get(address) or one for address, one in found.items()}
            for server in self._servers.values():
                most = min(server.told or 1, self._orders.per_server or (1 << 30))
                if now >= server.again and not server.is_tried and self._open[server.address] < most:
                    server.is_tried = True
                    threading.Thread(target=self._try, args=(server,), daemon=True).start()
        os._exit(0)

    def _addresses(self) -> Iterator[tuple[str, _Server]]:
        """Yield the addresses of all servers; names are looked up."""
        texts = list(self._orders.addresses)
        if self._orders.file is not None:
            with suppress(OSError):
                lines = (line.partition("#")[0].strip() for line in Path(self._orders.file).read_text().splitlines())
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

    def _warn(self, text: str, refusal: RefusedError | None = None) -> None:
        if text not in self._warned or refusal is not None:
            self._report("" if text in self._warned else text, refusal)
            self._warned.add(text)

    def _report(self, text: str, refusal: RefusedError | None = None, descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            self._control.send(Report(text, refusal, len(descriptors)))
            for descriptor in descriptors:
                send_handle(self._control, descriptor, self._trainer)

    # -- in a thread for each connection --------------------------------------------------------------------------

    def _try(self, server: _Server) -> None:
        """Connect to a worker of a server; if it can be used, carry jobs and answers until one side ends."""
        connection = None
        try:
            connection = self._connected(server)
        except RefusedError as error:
            self._warn(f"the server at {server.address} is not used: {error}", error)
        except OSError:
            pass
        except Exception as error:
            self._warn(f"the server at {server.address} is not used: {type(error).__name__}: {error}")
        if connection is None:
            server.again = time.monotonic() + server.pause
            server.pause = min(_LONGEST, 2 * server.pause)
            server.is_tried = False
            return
        server.pause = _AGAIN
        self._open[server.address] += 1
        server.is_tried = False
        try:
            self._carry(connection, server.address)
        except FrameError as error:
            self._warn(f"the connection to {server.address} is closed: {error}")
        except (EOFError, OSError):
            pass  # the worker is gone, or the trainer does not need it any more
        finally:
            self._open[server.address] -= 1

    def _connected(self, server: _Server) -> socket.socket:
        """Return the connection to a worker, after the handshake."""
        connection = socket.create_connection(host_and_port(server.address), timeout=_CONNECT)
        try:
            keep_alive(connection)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=server.host)
            server.told = int(join(connection, self._orders.secret, self._orders.card, _CONNECT)["workers"])
        except BaseException:
            connection.close()
            raise
        return connection

    def _carry(self, connection: socket.socket, address: str) -> None:
        """Carry answers to the trainer; a further thread carries jobs to the worker.

        Raises:
            FrameError, EOFError, OSError: one side has ended, or sends what is no frame.
        """
        segments, max_bytes = Segments(self._orders.segments), self._orders.card["max_bytes"]
        ours, theirs = socket.socketpair()
        with connection, ours, theirs:
            trainer = FrameConnection(ours, max_bytes)
            worker = _Worker(connection, max_bytes, segments, trainer)
            self._report(address, None, [one for one in (theirs.fileno(), segments.descriptor) if one >= 0])
            theirs.close()
            jobs = threading.Thread(target=_carry_jobs, args=(trainer, worker), daemon=True)
            jobs.start()
            try:
                while True:
                    _carry_answer(worker, trainer)
            finally:
                worker.end()
                trainer.end()
                jobs.join()


def _carry_answer(worker: _Worker, trainer: FrameConnection) -> None:
    got = worker.receive()
    if got.kind == BEAT:
        return
    if got.kind != MESSAGE:
        raise FrameError("a frame out of turn")
    if worker.number is None:
        trainer.send(frame(MESSAGE, [got.body]))
    else:
        trainer.send(frame(IN_SEGMENT, [memoryview(PLACE.pack(worker.number, got.body.nbytes))]))


def _carry_jobs(trainer: FrameConnection, worker: _Worker) -> None:
    with suppress(EOFError, OSError):
        while True:
            got = trainer.receive()
            if got.kind == RELEASED:
                worker.release(got.body.tolist())
            else:
                worker.send(frame(MESSAGE, [got.body]))
    worker.end()
