"""Checks of one process and its machine: launcher, GPUs, shared memory, limits, disk."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

GIB = 2**30
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
        return [Finding("ranks", f"{wrong[0]} is not a number", "wrong", "start with torchrun")]
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
