"""Local, read-only web server of the pages, for this machine and with a token only.

Host names are checked, because a foreign page may resolve its own name to this machine. Files cannot be requested by
path: addresses consist of numbers of samples, and names inside them.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar
from urllib.parse import unquote

from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.extras.inspect.preview.media import Media
from energon_lite.extras.inspect.preview.page_frame import policy
from energon_lite.extras.inspect.preview.site import Answer, Site
from energon_lite.extras.inspect.prometheus import BoundedServer

#: Host names that requests may use.
_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: Seconds that a client may take to read a piece of an answer.
_PATIENCE = 30
#: Most bytes of media per write.
_PIECE = 1 << 18
_COMMON = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PreviewServer(BoundedServer):
    """Server of a run's pages on the loopback interface.

    Args:
        site: maker of the pages; its path prefix is set here.
        port: TCP port; 0 for any free one.

    Attributes:
        url: the address of the first page, with the token.

    Example:
        >>> with PreviewServer(Site(run)) as server:
        ...     print(server.url)
        ...     server.serve_forever()
    """

    def __init__(self, site: Site, port: int = 0):
        self.site = site
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            what = f"port {port} cannot be opened: {error.strerror}"
            raise UsageError(what, fix="give another --port, or none") from None
        site.base = f"/{self.token}/"
        self.url = f"http://127.0.0.1:{self.server_address[1]}{site.base}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect during an answer."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, socket.timeout, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[int] = _PATIENCE
    server: PreviewServer

    def do_GET(self) -> None:
        """Answer with a page, or with media; for HEAD, with the headers only."""
        self.server.answering(self.connection, True)  # some pages take long
        try:
            self._answer()
        finally:
            self.server.answering(self.connection, False)

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.close_connection = True  # its body is not read
        refusal = Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD are allowed\n")
        self._send(refusal, extra={"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def _answer(self) -> None:
        began = time.monotonic()
        host = (self.headers.get("Host") or "").strip().lower()
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        name = name if port.isdecimal() else host
        if name not in _HOSTS or len(self.headers.get_all("Host") or ()) != 1:
            self._send(Answer(HTTPStatus.FORBIDDEN, b"this host name is not allowed\n"))
            return
        path, _, query = self.path.partition("#")[0].partition("?")
        _, _, rest = path.partition("/")
        token, slash, below = rest.partition("/")
        if not slash or not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            self._send(Answer(HTTPStatus.FORBIDDEN, b"the address has no valid token\n"))
            return
        segments = [unquote(segment, errors="surrogateescape") for segment in below.split("/")] if below else []
        nonce = secrets.token_urlsafe(16)
        try:
            answer = self.server.site.answer(segments, query, nonce)
        except EnergonLiteError as error:
            answer = self.server.site.error(error, nonce)
        except Exception as error:  # a failed page shows the error; the server continues
            self.log_error("%s: %s", type(error).__name__, error)
            wrapped = EnergonLiteError(f"the page cannot be made: {type(error).__name__}: {error}")
            answer = self.server.site.error(wrapped, nonce, HTTPStatus.INTERNAL_SERVER_ERROR)
        took = 1e3 * (time.monotonic() - began)
        self._send(answer, nonce, {"Server-Timing": f"page;dur={took:.1f}"})

    def _send(self, answer: Answer, nonce: str | None = None, extra: Mapping[str, str] | None = None) -> None:
        body = answer.media or Media.of(answer.content_type, answer.data)
        first, stop, status = 0, body.size, answer.status
        headers = {"Content-Type": body.content_type, **_COMMON, **(extra or {}), **answer.headers}
        is_page = nonce is not None and body.content_type.startswith("text/html")
        headers["Content-Security-Policy"] = policy(nonce) if is_page and nonce else "default-src 'none'; sandbox"
        if answer.media is not None:
            headers["Accept-Ranges"] = "bytes"
            wanted = _range(self.headers.get("Range"), body.size)
            if wanted is not None:
                first, stop = wanted
                there = first < stop
                status = HTTPStatus.PARTIAL_CONTENT if there else HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                headers["Content-Range"] = f"bytes {f'{first}-{stop - 1}' if there else '*'}/{body.size}"
        self.send_response(status)
        headers["Content-Length"] = str(max(0, stop - first))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        while first < stop and self.command != "HEAD":
            piece = body.read(first, min(_PIECE, stop - first))
            if not piece:
                self.close_connection = True  # the client notices the missing bytes
                return
            self.wfile.write(piece)
            first += len(piece)

    def version_string(self) -> str:
        """Return a name without versions of the server."""
        return "energon-lite"

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, because addresses contain the token."""

    def log_error(self, format: str, *args: Any) -> None:
        """Log errors, without addresses."""
        if "timed out" not in format and not format.startswith("code"):
            sys.stderr.write("preview: " + (format % args).replace("\n", " ") + "\n")


def _range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return the first requested byte and the one after the last; None for all."""
    if text is None or not text.startswith("bytes=") or "," in text:
        return None
    first, dash, last = text.removeprefix("bytes=").strip().partition("-")
    if not dash or not (first + last).isdecimal():
        return None
    if not first:
        return size - _at_most(last, size), size
    return _at_most(first, size), min(_at_most(last, size) + 1 if last else size, size)


def _at_most(digits: str, size: int) -> int:
    """Return the smaller of a number and ``size``, without parsing more digits than needed."""
    digits = digits.lstrip("0") or "0"
    return size if len(digits) > len(str(size)) else min(int(digits), size)
