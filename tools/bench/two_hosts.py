"""Two hosts on one machine: network namespaces joined by a cable. Needs root and Debian's iproute2.

The cable is a veth pair. A token bucket at each end limits it, so each direction has the bandwidth to itself.

Example:
    with TwoHosts("200mbit") as hosts:
        process = hosts.start(0, [sys.executable, "train.py"], {"MASTER_ADDR": hosts.address(0)})
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["TwoHosts", "why_not"]


def why_not() -> str | None:
    """What is missing for :class:`TwoHosts`; None if nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no {program}: install iproute2"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


class TwoHosts:
    """Hosts 0 and 1.

    Args:
        rate: bandwidth of the cable in each direction, as ``tc`` writes it; None for as much as there is.
    """

    def __init__(self, rate: str | None = None):
        self.rate, self.names = rate, [f"host{number}-{os.getpid()}" for number in (0, 1)]

    def address(self, host: int) -> str:
        """Of a host, as the other sees it."""
        return f"10.99.87.{host + 1}"

    @property
    def interface(self) -> str:
        """Name of the cable's end, on both hosts."""
        return "cable"

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str], **how: Any) -> Any:
        """A process on a host, in a process group of its own."""
        within = ["ip", "netns", "exec", self.names[host], *command]
        given = os.environ | {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface} | environment
        return subprocess.Popen(within, env=given, start_new_session=True, **how)

    def pull(self, host: int) -> None:
        """Pull the cable out of a host."""
        self._ip("-n", self.names[host], "link", "set", self.interface, "down")

    def plug(self, host: int) -> None:
        """Put it in again."""
        self._ip("-n", self.names[host], "link", "set", self.interface, "up")

    def __enter__(self) -> TwoHosts:
        try:
            ends = [f"c{number}-{os.getpid()}" for number in (0, 1)]
            for name in self.names:
                self._ip("netns", "add", name)
            self._ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for host, (name, end) in enumerate(zip(self.names, ends, strict=True)):
                self._ip("link", "set", end, "netns", name)
                self._ip("-n", name, "link", "set", end, "name", self.interface)
                self._ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", self.interface)
                for link in ("lo", self.interface):
                    self._ip("-n", name, "link", "set", link, "up")
                if self.rate is not None:
                    bucket = ["tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]
                    self._run("tc", "-n", name, "qdisc", "add", "dev", self.interface, "root", *bucket)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
