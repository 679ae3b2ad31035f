"""The doctor: examine this machine, and under torchrun all ranks and their links, before a training.

    python examples/doctor.py --path output
    torchrun --standalone --nproc-per-node 8 examples/doctor.py --path output

It names problems, each with a remedy; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from energon_lite import __version__
from energon_lite.trainer import end_process_group, start_process_group

GIB = 2**30
#: The largest tolerable difference of clocks in seconds: elastic rendezvous compares times of machines.
MOST_SECONDS = 2.0
#: The lowest acceptable speed of a link in GB/s; a network of 1 Gbit/s has 0.125.
LEAST_GIGABYTES = 0.15
#: Environment variables that torchrun sets.
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Variables of other launchers with the number of processes.
_OTHERS = {
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "mpiexec": "PMI_SIZE",
    "mpirun_rsh": "MV2_COMM_WORLD_SIZE",
}

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        topic: subject in a word or two.
        text: the observation.
        level: ``wrong`` if training will fail or be far too slow; ``warning`` if it may be.
        fix: advice.
    """

    topic: str
    text: str
    level: Level = "ok"
    fix: str = ""


# -- one process ----------------------------------------------------------------------------------------------------


def launch(environment: Mapping[str, str]) -> list[Finding]:
    """Check the launcher's variables. If one is wrong, ranks cannot connect."""
    given = [name for name in NEEDED if environment.get(name)]
    if not given:
        for name, size in _OTHERS.items():
            if environment.get(size, "1") != "1":
                what = f"{name} has started {environment[size]} processes, and each believes that it is alone"
                return [Finding("ranks", what, "wrong", f"let {name} start one torchrun on each machine")]
        return [Finding("ranks", "one process, without a launcher; links and clocks are not looked at")]
    if missing := [name for name in NEEDED if name not in given]:
        what = f"{', '.join(given)} are set, but not {', '.join(missing)}"
        return [Finding("ranks", what, "wrong", "start with torchrun, or set all of " + ", ".join(NEEDED))]
    numbers = {name: environment[name] for name in NEEDED if name != "MASTER_ADDR"}
    if wrong := [f"{name}={number!r}" for name, number in numbers.items() if not number.isdigit()]:
        return [Finding("ranks", f"{wrong[0]} is no number", "wrong", "start with torchrun")]
    rank = int(numbers["RANK"])
    world = int(numbers["WORLD_SIZE"])
    address = environment["MASTER_ADDR"]
    if rank >= world:
        fix = "ranks count from 0 to WORLD_SIZE - 1"
        return [Finding("ranks", f"RANK={rank} of WORLD_SIZE={world}", "wrong", fix)]
    findings = [Finding("ranks", f"{world}, meeting at {address}:{numbers['MASTER_PORT']}")]
    local = environment.get("LOCAL_WORLD_SIZE", str(world))
    if address in ("localhost", "127.0.0.1", "::1") and local != str(world):
        # This is right if several launchers were started on one machine; otherwise ranks will not connect.
        what = f"MASTER_ADDR={address}, but only {local} of {world} ranks are started here"
        fix = "give the address of the first machine (--master-addr, --rdzv-endpoint)"
        findings.append(Finding("ranks", what, "warning", fix))
    return findings


def accelerators(
    environment: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/version")
) -> Iterator[Finding]:
    """Report the GPUs, and check that each local rank has one."""
    if not torch.cuda.is_available():
        hidden, cuda = environment.get("CUDA_VISIBLE_DEVICES"), torch.version.cuda
        if not driver.exists():
            yield Finding("GPU", "none; ranks compute on the CPU and talk over gloo")
        elif cuda is None:
            what = f"there is an NVIDIA driver, but torch {torch.__version__} was built without CUDA"
            yield Finding("GPU", what, "wrong", "install a CUDA build of torch: https://pytorch.org/get-started")
        else:
            why = f"the driver may be too old for CUDA {cuda}" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r}"
            yield Finding("GPU", f"there is an NVIDIA driver, but torch sees no GPU: {why}", "wrong", "see nvidia-smi")
        return
    number = torch.cuda.device_count()
    yield Finding("GPU", f"{number} x {torch.cuda.get_device_name(0)}")
    if not torch.distributed.is_nccl_available():
        yield Finding("GPU", "torch was built without NCCL", "wrong", "install a build of torch with NCCL")
    local = environment.get("LOCAL_RANK", "0")
    if local.isdigit() and int(local) >= number:
        what = f"local rank {local} has no GPU: there are {number}"
        yield Finding("GPU", what, "wrong", f"start at most {number} ranks here: --nproc-per-node {number}")
        return
    free, total = torch.cuda.mem_get_info(int(local) if local.isdigit() else 0)
    if free < 0.9 * total:
        used = f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB of the GPU's memory are taken"
        yield Finding("GPU", used, "warning", "see nvidia-smi for another process")


def shared_memory(environment: Mapping[str, str], path: str = "/dev/shm") -> Iterator[Finding]:
    """Check the space for NCCL's buffers between GPUs of a machine. Worker processes do not use it."""
    try:
        total, _, free = shutil.disk_usage(path)
        text = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free in {path}"
    except OSError as error:
        free, text = 0, f"{path}: {error.strerror}"
    if free < GIB and torch.cuda.is_available() and environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        fix = "docker run --shm-size=1g; in Kubernetes, an emptyDir with medium: Memory at /dev/shm"
        yield Finding("shared memory", f"{text}: NCCL may need more between GPUs", "warning", fix)
    else:
        yield Finding("shared memory", text)


def limits() -> Iterator[Finding]:
    """Check the limits of open files and of pinned memory."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, hard = ("unlimited" if number == resource.RLIM_INFINITY else str(number) for number in (soft, most))
    text, fix = f"{limit} (at most {hard})", f"ulimit -n {hard}; or LimitNOFILE= of the service"
    if limit == "unlimited" or soft >= 4096:
        yield Finding("open files", text)
    elif soft >= 1024:
        yield Finding("open files", f"{text}: many workers and shards need more", "warning", fix)
    else:
        yield Finding("open files", f"{text}: workers and shards need more", "wrong", fix)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        what = f"only {locked / 2**20:.0f} MiB may be pinned; InfiniBand pins its buffers"
        yield Finding("locked memory", what, "warning", "ulimit -l unlimited; docker run --ulimit memlock=-1")


def disk(path: str) -> Iterator[Finding]:
    """Check the space for checkpoints below a folder that need not exist yet."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield Finding("disk", f"{folder} cannot be written to", "wrong", "give another output, or its rights")
        return
    total, _, free = shutil.disk_usage(folder)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free at {folder}"
    if free < GIB:
        yield Finding("disk", f"{text}: no room for a checkpoint", "wrong", "remove something, or give another output")
    elif free < 10 * GIB:
        yield Finding("disk", text, "warning", "a checkpoint has 12 to 16 bytes for each parameter")
    else:
        yield Finding("disk", text)


# -- all ranks ------------------------------------------------------------------------------------------------------


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


def clocks(facts: Sequence[RankFacts], group: dist.ProcessGroup | None, *, now: float | None = None) -> list[Finding]:
    """Compare the clocks of other machines with rank 0's. Every rank must call it; rank 0 has the result.

    Rank 0 asks one rank of each machine for its time, as in NTP: of several requests, the one with the fastest reply
    counts, and its time is compared with the middle of that request.

    Args:
        facts: facts of all ranks.
        group: group of all ranks, on the CPU.
        now: time to report as this rank's clock, for tests; None for the actual time.
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
                dist.send(message.fill_(time.time() if now is None else now), 0, group=group)
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


# -- the examination ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Findings of an examination.

    Args:
        by_rank: the findings of each rank known to this one.
        speaks: True on the process that shows them.
    """

    by_rank: tuple[tuple[Finding, ...], ...]
    speaks: bool = True

    @property
    def wrong(self) -> int:
        """Number of distinct findings of level ``wrong``."""
        return len({finding for findings in self.by_rank for finding in findings if finding.level == "wrong"})


def examine(
    path: str = ".",
    *,
    megabytes: int = 64,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Examine this machine, and under torchrun all ranks together. Every rank must call it.

    Args:
        path: folder of future checkpoints.
        megabytes: size of the all-reduce that measures links, in MB.
        timeout: seconds to wait for other ranks.
        environment: environment variables; None for those of the process.

    Returns:
        The findings of all ranks on rank 0, of the own rank on others.

    Example:
        >>> examine("output").wrong
        0
    """
    variables = os.environ if environment is None else environment
    checks = (
        accelerators(variables),
        shared_memory(variables),
        limits(),
        disk(path),
    )
    mine = [*launch(variables), *chain.from_iterable(checks)]
    # With some faults, ranks could not connect or communicate.
    faults = {finding.topic for finding in mine if finding.level == "wrong"}
    if faults & {"ranks", "GPU"} or int(variables.get("WORLD_SIZE") or "1") == 1:
        return Report((tuple(mine),))
    return _together(mine, megabytes, timeout)


def _together(mine: list[Finding], megabytes: int, timeout: float) -> Report:
    """Run the checks for which ranks must communicate."""
    made, limit = False, timedelta(seconds=timeout)
    try:
        device, made = start_process_group(timeout=limit)
        quiet = dist.new_group(backend="gloo", timeout=limit)  # of all ranks on the CPU, in addition to the default one
        world, rank = dist.get_world_size(), dist.get_rank()
        facts = [own_facts()] * world
        dist.all_gather_object(facts, facts[0], group=quiet)
        shared = [*alike(facts), *clocks(facts, quiet), *link_speed(device, megabytes)]
        gathered = [tuple(mine)] * world
        dist.all_gather_object(gathered, tuple(mine), group=quiet)
        # Findings common to all ranks are added to each, and shown once.
        by_rank = tuple((*findings, *shared) for findings in gathered)
        return Report(by_rank, speaks=rank == 0)
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        fix = (
            "are all ranks started, with the same port, and is it open? with several interfaces, name one by "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )
        talk = Finding("links", f"ranks cannot talk within {timeout:g} s: {first}", "wrong", fix)
        return Report(((*mine, talk),))
    finally:
        if made:
            end_process_group()


def report_lines(by_rank: Sequence[Sequence[Finding]]) -> Iterator[str]:
    """Yield the findings of all ranks as lines: each once, with the ranks that have it unless all do.

    Findings of level ``ok`` are shown for the first rank only, because each rank has, for example, another number of
    free bytes.
    """
    owners: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            if finding.level != "ok" or finding in by_rank[0]:
                owners.setdefault(finding, []).append(rank)
    width = max((len(finding.topic) for finding in owners), default=0)
    for finding, ranks in owners.items():
        who = "" if finding.level == "ok" or len(ranks) == len(by_rank) else f"  [{_ranks(ranks)}]"
        yield f"{finding.level:8s} {finding.topic.ljust(width)}  {finding.text}{who}"
        if finding.fix:
            yield f"{'':8s} {'':{width}}  -> {finding.fix}"


def _ranks(ranks: Sequence[int]) -> str:
    """Abbreviate a list of ranks, such as ``ranks 0-3, 7``."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Examine this machine, and under torchrun all ranks and their links.")
    parser.add_argument("--path", default=".", help="folder for checkpoints, which is checked")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the all-reduce by which links are timed")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for other ranks")
    told = parser.parse_args()
    report = examine(told.path, megabytes=told.megabytes, timeout=told.timeout)
    if not report.speaks:
        return
    for line in report_lines(report.by_rank):
        print(line)
    if report.wrong:
        print(f"{report.wrong} thing{'s are' if report.wrong > 1 else ' is'} wrong")
        sys.exit(1)
    print("nothing is wrong")


if __name__ == "__main__":
    main()
