"""A proxy before a store's HTTP server, such as moto's S3, that delays, hangs, fails, or refuses, as it is told.

    python tools/bench/store_proxy.py PORT UPSTREAM_PORT [--delay 0.02] [--hanging 0.01] [--failing 0.05] [--keep]

Half of the failing requests are answered with 503 Slow Down, the other half by closing the connection. With ``--keep``
it keeps objects that were read once and answers further requests for ranges of them itself, since moto takes some
milliseconds of a processor for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please wait.</Message></Error>"
RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)", re.IGNORECASE)


class Proxy:
    """Answers requests."""

    def __init__(self, arguments: argparse.Namespace):
        self.how, self.kept = arguments, dict[bytes, tuple[bytes, bytes]]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
                if re.search(rb"\r\nexpect: *100-continue", head, re.IGNORECASE):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(length[1])) if length else b""
                if not await self.answer(head, body, writer):
                    break
        writer.close()

    async def answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False: by closing the connection."""
        chance = random.random()
        await asyncio.sleep(self.how.delay + (self.how.hang if chance < self.how.hanging else 0.0))
        if self.how.hanging <= chance < self.how.hanging + self.how.failing:
            if random.random() < 0.5:
                return False
            writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n%s" % (len(SLOW_DOWN), SLOW_DOWN))
            return True
        method, target, _ = head.split(b" ", 2)
        asked = RANGE.search(head)
        if self.how.keep and method == b"GET" and asked and b"?" not in target:
            if target not in self.kept:
                status, data = await self.forward(RANGE.sub(b"", head), b"")
                if b" 200 " not in status.partition(b"\r\n")[0]:
                    writer.write(status + data)
                    return True
                self.kept[target] = status, data
            data = self.kept[target][1]
            start, stop = int(asked[1]), int(asked[2]) + 1
            part = data[start:stop]
            writer.write(
                b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n"
                b"Content-Type: binary/octet-stream\r\n\r\n" % (len(part), start, start + len(part) - 1, len(data))
            )
            writer.write(part)
        else:
            status, data = await self.forward(head, body)
            writer.write(status + data)
            if method != b"HEAD" and b"\r\ncontent-length:" not in status.lower():
                return False
        await writer.drain()
        return True

    async def forward(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """The head and the body of what the store answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.how.upstream)
        head = re.sub(rb"\r\n(connection|expect):[^\r]*", b"", head, flags=re.IGNORECASE)
        writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        status, _, data = answer.partition(b"\r\n\r\n")
        status = re.sub(rb"\r\nconnection:[^\r]*", b"", status, flags=re.IGNORECASE)
        return status.replace(b"HTTP/1.0", b"HTTP/1.1", 1) + b"\r\n\r\n", data


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("upstream", type=int)
    for name in ("delay", "hanging", "failing"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--hang", type=float, default=1.0, help="seconds that a hanging request takes")
    parser.add_argument("--keep", action="store_true")
    proxy = Proxy(parser.parse_args())
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", proxy.how.port, limit=1 << 26)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
