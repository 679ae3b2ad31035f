"""The end of a process group, after which the interpreter may end too."""

from __future__ import annotations

import contextlib
import glob
import time
from pathlib import Path

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
    until, quiet = time.monotonic() + _LIMIT, 0
    # A thread that waits for the interpreter sleeps too, but not while this one does: so two looks, a pause between.
    while quiet < 2 and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        quiet = quiet + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    """False if a gloo thread of this process is running, or would if there were a free core; only Linux tells."""
    for stat in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = Path(stat).read_text().partition(" (")[2].rpartition(") ")
            if name == _GLOO_THREAD and rest[0] != "S":
                return False
    return True
