"""A server of ranges for benchmarks: bare HTTP/1.1 as S3 speaks it, with a delay, in several processes.

    python tools/bench/range_server.py PORT FOLDER UPSTREAM_PORT [--delay 0.005] [--processes 2]

``GET /bucket/path`` with a range is answered from ``FOLDER/bucket/path``, whatever the signature; everything else goes
to the server at the other port, moto's S3 with the same objects. It shows what a client costs, so it does as little as
possible itself; at its end (SIGTERM) each process prints its seconds of a processor and its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)
HEAD = b'HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\nETag: "%b"\r\n\r\n'
REQUESTS = [0]


class Answers(asyncio.Protocol):
    """One connection: a request, an answer, and so on; requests must not be sent before the answer is there."""

    def __init__(self, how: argparse.Namespace, files: dict[bytes, tuple[bytes, bytes]]):
        self.how, self.files, self.data, self.relay = how, files, b"", None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.relay is not None:
            self.relay.put_nowait(data)
            return
        self.data += data
        if b"\r\n\r\n" not in self.data:
            return
        found = RANGE.search(self.data)
        if not self.data.startswith(b"GET ") or found is None:
            self.relay = asyncio.Queue()
            self.relay.put_nowait(self.data)
            self.task = asyncio.ensure_future(self.pass_on(self.relay))
            return
        path = self.data[4 : self.data.index(b" ", 4)].partition(b"?")[0]
        self.data = b""
        if path not in self.files:
            data = Path(os.fsdecode(os.fsencode(self.how.folder) + path)).read_bytes()
            self.files[path] = data, hashlib.md5(data).hexdigest().encode()  # as moto names it
        first, last, (whole, etag) = int(found[1]), int(found[2]), self.files[path]
        body = whole[first : last + 1]
        answer = HEAD % (len(body), first, first + len(body) - 1, len(whole), etag) + body
        asyncio.get_running_loop().call_later(self.how.delay, self.transport.write, answer)
        REQUESTS[0] += 1

    async def pass_on(self, queue: asyncio.Queue[bytes]) -> None:
        """This connection is moto's from now on."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.how.upstream)

        async def back() -> None:
            while data := await reader.read(1 << 16):
                self.transport.write(data)
            self.transport.close()

        task = asyncio.ensure_future(back())
        while not task.done():
            # One request for a connection: the next one may be for a range.
            writer.write(
                re.sub(rb"\r\n[Cc]onnection:[^\r]*", b"", await queue.get()).replace(
                    b" HTTP/1.1\r\n", b" HTTP/1.1\r\nConnection: close\r\n", 1
                )
            )

    def connection_lost(self, error: Exception | None) -> None:
        if self.relay is not None:
            self.task.cancel()


async def serve(how: argparse.Namespace) -> None:
    files: dict[bytes, tuple[bytes, bytes]] = {}
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", how.port))
    await asyncio.get_running_loop().create_server(lambda: Answers(how, files), sock=listening, backlog=1000)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    print(f"{time.process_time():.2f} s, {REQUESTS[0]} requests", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("folder")
    parser.add_argument("upstream", type=int)
    parser.add_argument("--delay", type=float, default=0.005)
    parser.add_argument("--processes", type=int, default=2)
    how = parser.parse_args()
    children = []
    for _ in range(how.processes):
        child = os.fork()
        if not child:
            asyncio.run(serve(how))
            sys.exit()
        children.append(child)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(child, signal.SIGTERM) for child in children])
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
