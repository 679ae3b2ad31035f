"""A server of pages for the time of a test, and a client that sends exactly what it is told."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import NamedTuple

from energon_lite.extras.inspect.preview.server import PreviewServer
from energon_lite.extras.inspect.preview.site import Site

__all__ = ["Response", "ask", "serving"]


class Response(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The page."""
        return self.body.decode()


@contextmanager
def serving(site: Site) -> Iterator[PreviewServer]:
    """A server that answers."""
    with PreviewServer(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def ask(server: PreviewServer, path: str, method: str = "GET", host: str | None = None, **headers: str) -> Response:
    """One request; ``path`` is put behind the token, unless it begins with a slash."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        where = path if path.startswith("/") else server.site.base + path
        connection.putrequest(method, where, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, found, answer.read())
    finally:
        connection.close()


class Page(HTMLParser):
    """What a browser would make of a page: elements, addresses, and what stands in scripts and styles."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in not in ("script", "style"):
            self.text += data

    def addresses(self) -> set[str]:
        """All that a page refers to."""
        return {value for _, attrs in self.tags for name in ("href", "src", "action") if (value := attrs.get(name))}
