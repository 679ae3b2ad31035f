"""Descriptions of workers elsewhere, for ``WorkerConfig(workers=...)``."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from energon_lite.entry_points import RemoteWorkers
from energon_lite.errors import UsageError
from energon_lite.imports import optional_imports

#: Bytes of a secret, at least.
_LEAST_SECRET = 16


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files of TLS. Both sides show a certificate, and check the other's.

    Args:
        certificate, key: PEM files of this side.
        authority: PEM file of the authority that has signed the other side's certificate.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str]

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the settings of a side for connections."""
        purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose, cafile=os.fspath(self.authority))
        context.load_cert_chain(self.certificate, self.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True)
class TcpWorkers(RemoteWorkers):
    """Workers of ``energon-lite serve``.

    Args:
        addresses: ``host:port`` of each server. A host with several addresses in the DNS is several servers. Names are
            looked up again during the run, so servers may come and go.
        file: file with an address in each line, which is read again when it changes.
        secret_file: file with the secret that trainers and servers share, 16 bytes or more.
        tls: certificates, in place of the secret, or with it.
        per_server: workers of each server that this rank uses, at most; None: all.
        max_bytes: size of a message, at most.
        host_load: share of this machine's processors, 0 to 1, above which local workers begin no further jobs while
            there are workers elsewhere; None: any.

    Raises:
        UsageError: an address has not the form ``host:port``; or there is none.

    Example:
        >>> WorkerConfig(0, 1, 2, workers=TcpWorkers(["cpu1:7070", "cpu2:7070"], secret_file="secret"))
    """

    kind: ClassVar[str] = "tcp"

    addresses: Sequence[str] = ()
    file: str | os.PathLike[str] | None = None
    secret_file: str | os.PathLike[str] | None = None
    tls: TlsFiles | None = None
    per_server: int | None = None
    max_bytes: int = 1 << 30
    host_load: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.addresses, str):
            object.__setattr__(self, "addresses", (self.addresses,))
        for address in self.addresses:
            host_and_port(address)
        if not self.addresses and self.file is None:
            raise UsageError("TcpWorkers without addresses", fix='give TcpWorkers(["host:port"]), or a file of them')

    @classmethod
    def from_text(cls, text: str) -> TcpWorkers:
        """Return the workers of a text, such as ``tcp://cpu1:7070,cpu2:7070?secret_file=secret``.

        Raises:
            UsageError: the text cannot be read.
        """
        parts = urlsplit(text)
        options: dict[str, Any] = dict(parse_qsl(parts.query))
        unknown = options.keys() - {"secret_file", "file"}
        if unknown:
            raise UsageError(f"workers={text!r}: {sorted(unknown)[0]} is unknown", fix="write secret_file= or file=")
        return cls(tuple(filter(None, parts.netloc.split(","))), **options)


@dataclass(frozen=True)
class RayWorkers(RemoteWorkers):
    """Workers that are actors of Ray. The trainer must be part of a cluster, or starts one on its machine. It connects
    to its actors by TCP, at ports that the system chooses.

    Args:
        maximum: actors, at most; as many are asked for while local workers cannot keep up.
        minimum: actors that are kept when they are not needed.
        resources: resources of each actor, as Ray names them: ``{"CPU": 1, "cpu_node": 1}``.
        address: address of the cluster; None: the one that this process is connected to, or that Ray finds.
        host_load: see :class:`TcpWorkers`.

    Raises:
        UsageError: the bounds are wrong.

    Example:
        >>> WorkerConfig(0, 1, 2, workers=RayWorkers(16, resources={"CPU": 1, "cpu_node": 1}))
    """

    kind: ClassVar[str] = "ray"

    maximum: int = 4
    minimum: int = 1
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    address: str | None = None
    host_load: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum or not self.maximum:
            raise UsageError(f"RayWorkers from {self.minimum} to {self.maximum}", fix="give 0 <= minimum <= maximum")


def connect_to_ray(address: str | None) -> Any:
    """Connect this process to a cluster of Ray, unless it is connected; return the module.

    Args:
        address: see :class:`RayWorkers`.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at the address.
    """
    with optional_imports("ray", "work on Ray needs the package ray"):
        import ray
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise UsageError(f"no cluster of Ray: {error}", where=address, fix="see `ray status`") from None
    return ray


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of ``host:port``; an IPv6 address is in brackets.

    Raises:
        UsageError: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"the address {address!r}", fix="write host:port, such as 10.0.0.7:7070 or [::1]:7070")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def secret_in(path: str | os.PathLike[str] | None) -> bytes | None:
    """Return the secret in a file; None: no file.

    Raises:
        UsageError: there is no file, or the secret is too short.
    """
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"the file of the secret cannot be read: {error}", where=path) from None
    if len(secret) < _LEAST_SECRET:
        raise UsageError(
            f"a secret of {len(secret)} bytes; at least {_LEAST_SECRET} are needed",
            where=path,
            fix="write one: openssl rand -hex 32 > secret",
        )
    return secret
