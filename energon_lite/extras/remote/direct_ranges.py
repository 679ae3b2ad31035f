"""Ranges of S3's objects and of HTTP's files without the layers of their file systems.

The file system that fsspec made says where the objects are, with whose credentials, and over which TLS; so nothing is
set up twice. Only the request is another one: for each object it is signed once in some minutes, since the range is
no part of what is signed. Whatever is not as usual, the settings or an answer, is left to the file system.

AWS Signature Version 4, as botocore makes it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from energon_lite.extras.remote.range_client import RangeClient, UnusualAnswer

__all__ = ["DirectRanges", "direct_ranges"]

_log = logging.getLogger(__name__)

#: Seconds for which a signature is used; stores take it for 900.
_SIGNED = 300.0
#: Objects whose signed requests are kept.
_SIGNATURES = 1 << 14
#: Requests in a row that were left to the file system, after which all are for so many seconds.
_ODD, _PAUSE = 3, 60.0


class _Elsewhere(Exception):
    """Settings that only the file system understands."""


class DirectRanges:
    """Reads ranges of the files of a file system. It belongs to the event loop of that.

    Args:
        fs: an ``s3fs.S3FileSystem``, or fsspec's ``HTTPFileSystem``.
    """

    def __init__(self, fs: Any):
        self._fs = fs
        self._clients: dict[tuple[str, int, bool], RangeClient] = {}
        #: Of each path: its client, the head of its requests, and when that has to be made again.
        self._heads: dict[str, tuple[RangeClient, bytes, float]] = {}
        #: Of each bucket: the client of s3fs, and what stands before the keys in the URLs of its objects.
        self._buckets: dict[str, tuple[Any, str]] = {}
        self._odd, self._until = 0, 0.0
        #: Ranges that were read here.
        self.read_here = 0

    async def read(self, path: str, offset: int, size: int) -> bytes | None:
        """The ``size`` bytes at ``offset``; None: the file system has to be asked.

        Raises:
            StatusError, ConnectionError, TimeoutError, OSError: the store, or the way to it, fails.
        """
        if size < 1 or (self._until and time.monotonic() < self._until):
            return None
        for _ in range(2):  # the credentials may have changed since it was signed
            known = self._heads.get(path)
            if known is None or known[2] < time.monotonic():
                try:
                    known = self._heads[path] = await self._head(path)
                except Exception as error:  # wrong credentials, say: the file system's error is the one to show
                    _log.debug("%s is read by its file system: %r", path, error)
                    break
                if len(self._heads) > _SIGNATURES:
                    del self._heads[next(iter(self._heads))]
            try:
                data = await known[0].get(known[1], offset, size)
            except UnusualAnswer as error:
                _log.debug("%s is read by its file system, unless a new signature helps: %s", path, error)
                self._heads.pop(path, None)
                continue
            self._odd, self.read_here = 0, self.read_here + 1
            return data
        self._odd += 1
        if self._odd >= _ODD:
            self._odd, self._until = 0, time.monotonic() + _PAUSE
            self._buckets.clear()  # s3fs may have a new session by then
        return None

    async def _head(self, path: str) -> tuple[RangeClient, bytes, float]:
        if _name_of(self._fs) == _HTTP:
            url, headers = self._web_url(path), dict[str, str]()
            context = ssl.create_default_context if url.startswith("https:") else None
        else:
            client, url = await self._object_url(path)
            headers = await self._signature(client, url)
            context = client._endpoint.http_session._build_ssl_contexts if url.startswith("https:") else None
        parts = urlsplit(url)
        port, is_safe = parts.port or (443 if context else 80), context is not None
        host = parts.hostname or ""
        if (host, port, is_safe) not in self._clients:
            made: Any = None if context is None else await asyncio.to_thread(context, *_NOTHING[_name_of(self._fs)])
            made = made[0] if isinstance(made, tuple) else made
            self._clients.setdefault((host, port, is_safe), RangeClient(host, port, made))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        shown = f"[{host}]" if ":" in host else host
        shown = shown if parts.port in (None, 443 if is_safe else 80) else f"{shown}:{port}"
        lines = [f"GET {target} HTTP/1.1", f"Host: {shown}", "Accept-Encoding: identity", "User-Agent: energon-lite"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any(mark in line for line in lines for mark in "\r\n"):
            raise _Elsewhere
        head = "".join([f"{line}\r\n" for line in lines]).encode("latin-1")
        return self._clients[host, port, is_safe], head, time.monotonic() + _SIGNED

    def _web_url(self, path: str) -> str:
        fs = self._fs
        url = fs.encode_url(path)
        # The session's headers, user, certificates are its own affair.
        is_plain = fs.get_client.__module__ == _HTTP.rpartition(".")[0]
        if not is_plain or fs.kwargs or fs.client_kwargs or url.user or url.password:
            raise _Elsewhere
        return str(url.with_fragment(None))

    async def _object_url(self, path: str) -> tuple[Any, str]:
        """The client of s3fs that reads an object, and the object's URL."""
        from botocore.utils import percent_encode

        fs = self._fs
        bucket, key, version = fs.split_path(path)
        if not key or version or fs.s3_additional_kwargs or ":" in bucket or bucket.endswith("--x-s3"):
            raise _Elsewhere  # versions, keys of encryption, access points, S3 Express
        if bucket not in self._buckets:
            await fs.set_session()
            client = await fs.get_s3(bucket)
            url = await client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"})
            base = url.partition("?")[0]
            if not base.endswith("/x") or client._endpoint.http_session._proxy_config.proxy_url_for(url):
                raise _Elsewhere
            self._buckets[bucket] = client, base[:-1]
        client, base = self._buckets[bucket]
        return client, base + percent_encode(key, safe="/~")

    async def _signature(self, client: Any, url: str) -> dict[str, str]:
        """The headers of a request for an object, signed."""
        from botocore import UNSIGNED
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        version = client.meta.config.signature_version
        if version is UNSIGNED:
            return {}
        region = client._request_signer.region_name
        if version not in (None, "s3v4") or not region:
            raise _Elsewhere
        known = client._request_signer._credentials.get_frozen_credentials()
        request = AWSRequest(method="GET", url=url)
        if self._fs.req_kw.get("RequestPayer"):
            request.headers["x-amz-request-payer"] = self._fs.req_kw["RequestPayer"]
        region = "us-east-1" if region == "aws-global" else region
        S3SigV4Auth(await known if inspect.isawaitable(known) else known, "s3", region).add_auth(request)
        return {name: value for name, value in request.headers.items() if name.lower() != "host"}


_S3, _HTTP = "s3fs.core.S3FileSystem", "fsspec.implementations.http.HTTPFileSystem"
#: What makes a context for TLS is called with.
_NOTHING: dict[str, tuple[Any, ...]] = {_S3: (None,), _HTTP: ()}


def _name_of(fs: Any) -> str:
    return f"{type(fs).__module__}.{type(fs).__qualname__}"


#: By process and file system, which stays alive with it. Equal ones are kept apart: they may have other sessions.
_known: dict[tuple[int, int], tuple[Any, DirectRanges | None]] = {}


def direct_ranges(fs: Any) -> DirectRanges | None:
    """What reads the files of ``fs`` directly, one for each process; None: nothing does."""
    found = _known.get((os.getpid(), id(fs)))
    if found is None:
        ranges = DirectRanges(fs) if _name_of(fs) in _NOTHING else None
        found = _known.setdefault((os.getpid(), id(fs)), (fs, ranges))
    return found[1]
