"""Ranges of S3 objects and HTTP files, requested without the layers of their file systems.

Addresses, credentials and TLS settings come from the file system that fsspec made, so nothing is configured twice. Only
the request differs: it is signed once in some minutes for each object, since the range is no part of the signed text.
Whenever settings or an answer are unusual, the file system reads instead.

AWS Signature Version 4, as in botocore.
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

from energon_lite.extras.remote.file_versions import Answer
from energon_lite.extras.remote.range_client import RangeClient, UnusualAnswer
from energon_lite.storage.files.shard_store import drop_oldest

_log = logging.getLogger(__name__)

#: Seconds for which a signature is used; stores accept it for 900.
_SIGNED = 300.0
#: Most objects whose signed requests are kept.
_SIGNATURES = 1 << 14
#: Consecutive failures after which the file system reads everything for a while.
_ODD = 3
#: Seconds of that while.
_PAUSE = 60.0


class _Elsewhere(Exception):
    """Raised for settings that only the file system supports."""


class DirectRanges:
    """Reader of ranges of the files of a file system. It belongs to the file system's event loop.

    Args:
        fs: an ``s3fs.S3FileSystem``, or fsspec's ``HTTPFileSystem``.
    """

    def __init__(self, fs: Any):
        self._fs = fs
        self._clients: dict[tuple[str, int, bool], RangeClient] = {}
        #: By path: its client, the head of its requests, and the time at which that expires.
        self._heads: dict[str, tuple[RangeClient, bytes, float]] = {}
        #: By bucket: the client of s3fs, and the prefix of the keys in the URLs of its objects.
        self._buckets: dict[str, tuple[Any, str]] = {}
        #: By server or bucket: consecutive failures, and the time until which the file system reads everything.
        self._odd: dict[str, int] = {}
        self._until: dict[str, float] = {}
        #: Number of ranges that were read here.
        self.read_here = 0

    async def read(self, path: str, offset: int, size: int) -> Answer | None:
        """Read the ``size`` bytes at ``offset``; None: the file system has to read them.

        Raises:
            StatusError, ConnectionError, TimeoutError, OSError: the store, or the way to it, fails.
        """
        if size < 1:
            return None
        answer = await self._read(path, offset, size)
        return await self._by_s3fs(path, offset, size) if answer is None and _name_of(self._fs) == _S3 else answer

    async def _by_s3fs(self, path: str, offset: int, size: int) -> Answer:
        """The range by the client of s3fs, and the ETag, which ``cat_file`` of s3fs leaves out."""
        bucket, key, version = self._fs.split_path(path)
        given = {"Bucket": bucket, "Key": key, "Range": f"bytes={offset}-{offset + size - 1}"}
        answer = await self._fs._call_s3("get_object", **given, **({"VersionId": version} if version else {}))
        async with answer["Body"] as body:
            return Answer(await body.read(), answer.get("ETag", ""))

    async def _read(self, path: str, offset: int, size: int) -> Answer | None:
        server = "/".join(path.split("/")[:3]) if "://" in path else path.partition("/")[0]
        if self._until.get(server, 0.0) > time.monotonic():
            return None
        for _ in range(2):  # the credentials may have changed since the request was signed
            known = self._heads.get(path)
            if known is None or known[2] < time.monotonic():
                try:
                    known = self._heads[path] = await self._head(path)
                except Exception as error:  # such as wrong credentials: the file system's error is the better message
                    _log.debug("%s is read by its file system: %r", path, error)
                    break
                drop_oldest(self._heads, _SIGNATURES)
            try:
                answer = await known[0].get(known[1], offset, size)
            except UnusualAnswer as error:
                _log.debug("%s is read by its file system, unless a new signature helps: %s", path, error)
                self._heads.pop(path, None)
                continue
            self._odd.pop(server, None)
            self.read_here += 1
            return answer
        self._odd[server] = self._odd.get(server, 0) + 1
        if self._odd[server] >= _ODD:
            del self._odd[server]
            self._until[server] = time.monotonic() + _PAUSE
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
        # Headers, user and certificates of a session are left to the file system.
        is_plain = fs.get_client.__module__ == _HTTP.rpartition(".")[0]
        if not is_plain or fs.kwargs or fs.client_kwargs or url.user or url.password:
            raise _Elsewhere
        return str(url.with_fragment(None))

    async def _object_url(self, path: str) -> tuple[Any, str]:
        """The s3fs client that reads an object, and the object's URL."""
        from botocore.utils import percent_encode

        fs = self._fs
        bucket, key, version = fs.split_path(path)
        if not key or version or fs.s3_additional_kwargs or ":" in bucket or bucket.endswith("--x-s3"):
            raise _Elsewhere  # versions, encryption keys, access points, S3 Express
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
        """The signed headers of a request for an object."""
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


#: Class name of the file system of S3.
_S3 = "s3fs.core.S3FileSystem"
#: Class name of the file system of HTTP.
_HTTP = "fsspec.implementations.http.HTTPFileSystem"
#: Arguments of the function that makes a TLS context, by the class name of the file system.
_NOTHING: dict[str, tuple[Any, ...]] = {_S3: (None,), _HTTP: ()}


def _name_of(fs: Any) -> str:
    return f"{type(fs).__module__}.{type(fs).__qualname__}"


#: By process and file system, which is kept alive here. Equal ones are kept apart: their sessions may differ.
_known: dict[tuple[int, int], tuple[Any, DirectRanges | None]] = {}


def direct_ranges(fs: Any) -> DirectRanges | None:
    """Return the direct reader of the files of ``fs``, one for each process; None: there is none for its class."""
    entry = _known.get((os.getpid(), id(fs)))
    if entry is None:
        ranges = DirectRanges(fs) if _name_of(fs) in _NOTHING else None
        entry = _known.setdefault((os.getpid(), id(fs)), (fs, ranges))
    return entry[1]
