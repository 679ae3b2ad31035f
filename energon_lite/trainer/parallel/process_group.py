"""The end of a process group, after which the interpreter may end too."""

from __future__ import annotations

import contextlib
import os
import time

import torch.distributed as dist

__all__ = ["end_process_group"]

_GLOO_THREAD = "pt_gloo_runloop"
_LOOK_EVERY = 2e-3
_LIMIT = 10.0


def end_process_group() -> None:
    """Call ``destroy_process_group``, then wait until gloo's threads have let go of what was sent.

    A thread of gloo keeps the tensor of a collective for a moment after the collective is done, and needs the
    interpreter to let go of it. ``destroy_process_group`` ends these threads only where nothing else holds the groups,
    and a mesh, a model or torch itself does. If such a thread is late, on a busy machine, and the interpreter is ending
    meanwhile, the process dies with "terminate called without an active exception" after all its work is done, and
    torchrun takes the run for a failure (pytorch/pytorch#179291).

    Without a process group, this does nothing.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    threads = _gloo_threads()
    until = time.monotonic() + _LIMIT
    quiet = 0
    # A thread that waits for the interpreter sleeps too, but not while this one does: so two looks, a pause between.
    while threads and quiet < 2 and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        quiet = quiet + 1 if all(map(_sleeps, threads)) else 0


def _gloo_threads() -> list[str]:
    """The folders under ``/proc`` of this process' gloo threads; none on systems without ``/proc``."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.scandir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"{thread.path}/comm") as comm:
                if comm.read().strip() == _GLOO_THREAD:
                    found.append(thread.path)
    return found


def _sleeps(thread: str) -> bool:
    """True unless the thread is running, or would if there were a free core."""
    try:
        with open(f"{thread}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return True
