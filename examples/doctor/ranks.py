"""Checks for which ranks communicate: equal software, own GPUs, clocks, links."""

from __future__ import annotations

import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from energon_lite import __version__
from examples.doctor.machine import Finding

#: The largest tolerable difference of clocks in seconds: elastic rendezvous compares times of machines.
MOST_SECONDS = 2.0
#: The lowest acceptable speed of a link in GB/s; a network of 1 Gbit/s has 0.125.
LEAST_GIGABYTES = 0.15


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank, for comparison with others.

    Args:
        host: name of its machine.
        device: the GPU it uses, or "cpu".
        versions: versions of software that should be equal everywhere, by name.
    """

    host: str
    device: str
    versions: tuple[tuple[str, str], ...]


def own_facts() -> RankFacts:
    """Return the facts of this process."""
    versions = (
        ("torch", torch.__version__),
        ("energon-lite", __version__),
        ("Python", ".".join(map(str, sys.version_info[:2]))),
        ("CUDA", str(torch.version.cuda)),
    )
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    return RankFacts(socket.gethostname(), device, versions)


def alike(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """Check that ranks have the same software, and each its own GPU."""
    hosts = {fact.host for fact in facts}
    yield Finding("machines", f"{len(hosts)} for {len(facts)} ranks")
    for name in dict(facts[0].versions):
        distinct = sorted({dict(fact.versions)[name] for fact in facts})
        if len(distinct) > 1:
            fix = "use one image, or one environment, on all machines"
            yield Finding("software", f"ranks have different versions of {name}: {', '.join(distinct)}", "wrong", fix)
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, fact in enumerate(facts):
        if fact.device != "cpu":
            users[fact.host, fact.device].append(rank)
    for (host, device), ranks in users.items():
        if len(ranks) > 1:
            what = f"ranks {', '.join(map(str, ranks))} all use {device} of {host}"
            yield Finding("GPU", what, "wrong", "start with torchrun, one rank for each GPU")


def clocks(facts: Sequence[RankFacts], group: dist.ProcessGroup | None) -> list[Finding]:
    """Compare the clocks of other machines with rank 0's. Every rank must call it; rank 0 has the result.

    Rank 0 asks one rank of each machine for its time, as in NTP: of several requests, the one with the fastest reply
    counts, and its time is compared with the middle of that request.

    Args:
        facts: facts of all ranks.
        group: group of all ranks, on the CPU.
    """
    rank = dist.get_rank()
    others = {fact.host: number for number, fact in reversed(list(enumerate(facts)))}
    others.pop(facts[0].host)
    asked = sorted(others.values())
    offsets = {}
    for other in asked if rank == 0 else [rank] * (rank in asked):
        best = (float("inf"), 0.0)
        for _ in range(8):
            message = torch.zeros(1, dtype=torch.float64)
            if rank == 0:
                began = time.time()
                dist.send(message, other, group=group)
                dist.recv(message, other, group=group)
                ended = time.time()
                best = min(best, (ended - began, message.item() - (began + ended) / 2))
            else:
                dist.recv(message, 0, group=group)
                dist.send(message.fill_(time.time()), 0, group=group)
        offsets[other] = best
    if rank != 0 or not asked:
        return []
    worst = max(offsets, key=lambda other: abs(offsets[other][1]))
    trip, offset = offsets[worst]
    text = (
        f"that of {facts[worst].host} is {abs(offset):.3f} s {'ahead' if offset > 0 else 'behind'}, +- {trip / 2:.3f} s"
    )
    if abs(offset) - trip / 2 > MOST_SECONDS:
        fix = "run chrony or ntpd on all machines; elastic rendezvous compares their times"
        return [Finding("clocks", text, "wrong", fix)]
    return [Finding("clocks", text)]


def link_speed(device: torch.device, megabytes: int, least: float = LEAST_GIGABYTES) -> list[Finding]:
    """Time some all-reduces. Every rank must call it; all have the same result.

    The speed is that of the slowest link: each of n ranks sends and receives 2 (n - 1) / n of the bytes (the "bus
    bandwidth" of nccl-tests).

    Args:
        device: device of the numbers.
        megabytes: size of the sum in MB.
        least: speed in GB/s below which the link is reported as slow.
    """
    world = dist.get_world_size()
    backend = dist.get_backend()
    values = torch.ones(megabytes * 250_000, dtype=torch.float32, device=device)
    dist.all_reduce(values)
    if not bool((values == world).all()):
        what = f"a sum over {world} ranks of ones is {values.min().item():g} to {values.max().item():g}"
        fix = "a link or a GPU is broken: leave machines out until it is right"
        return [Finding("links", what, "wrong", fix)]
    seconds = min(_timed(values, device) for _ in range(3))
    delay = min(_timed(values[:1], device) for _ in range(10))
    speed = 2 * (world - 1) / world * values.nbytes / seconds / 1e9
    # Ranks measure different times; rank 0's count.
    measured = torch.tensor([speed, delay], dtype=torch.float64, device=device)
    dist.broadcast(measured, 0)
    speed, delay = measured.tolist()
    text = (
        f"{speed:.2f} GB/s by {backend}, {megabytes} MB summed over {world} ranks; {delay * 1e6:.0f} us for one number"
    )
    if speed < least:
        fix = "is it the right interface? NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO shows what is used"
        return [Finding("links", text, "warning", fix)]
    return [Finding("links", text)]


def _timed(values: torch.Tensor, device: torch.device) -> float:
    values = torch.zeros_like(values)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
