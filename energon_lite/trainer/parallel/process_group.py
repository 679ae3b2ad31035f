"""Shutdown of a process group, after which the interpreter can exit safely."""

from __future__ import annotations

import contextlib
import glob
import time
from pathlib import Path

import torch.distributed as dist

__all__ = ["end_process_group"]

#: Name of gloo's threads.
_GLOO_THREAD = "pt_gloo_runloop"
#: Seconds between two looks at the threads.
_LOOK_EVERY = 2e-3
#: The most seconds to wait for them.
_LIMIT = 10.0


def end_process_group() -> None:
    """Call ``destroy_process_group``, then wait until gloo's threads have released their tensors.

    A thread of gloo keeps the tensor of a collective for a moment after the collective is done, and needs the
    interpreter to release it. ``destroy_process_group`` ends these threads only if no other object holds the groups,
    but a mesh, a model or torch itself does. If such a thread is late on a busy machine, and the interpreter exits in
    the meantime, the process dies with "terminate called without an active exception" after all its work is done, and
    torchrun counts the run as a failure (pytorch/pytorch#179291).
    Without a process group, this does nothing.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    until, quiet = time.monotonic() + _LIMIT, 0
    # A thread that waits for the interpreter sleeps too, but not while this thread sleeps: so look twice.
    while quiet < 2 and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        quiet = quiet + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    """Return False if a gloo thread of this process is running or runnable; only Linux reports it."""
    for stat in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = Path(stat).read_text().partition(" (")[2].rpartition(") ")
            if name == _GLOO_THREAD and rest[0] != "S":
                return False
    return True
