"""A worker's end when its trainer has ended, however it did, and whatever the worker is doing at that moment.

A worker between two jobs sees its pipe close. One in a hook that takes minutes, or never returns, does not look.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

__all__ = ["can_kernel_watch", "end_with_trainer"]

#: ``PR_SET_PDEATHSIG`` of Linux: the signal that a process gets when the thread that started it has ended.
_SET_PARENT_DEATH_SIGNAL = 1
#: Seconds between two looks at whether the trainer is there, on systems that cannot wait for it.
_LOOK = 1.0


def end_with_trainer(trainer: int, *, by_kernel: bool) -> None:
    """Have this process end when the trainer has.

    Args:
        trainer: its process.
        by_kernel: the kernel may kill this process (see :func:`can_kernel_watch`), which it does even where a hook
            never gives Python's lock back. Where it may not, or this is no child of the trainer, a thread waits for
            the trainer's end.
    """
    if by_kernel:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if not by_kernel or os.getppid() != trainer:
        threading.Thread(target=_wait_and_end, args=(trainer,), name="energon-lite-parent-watch", daemon=True).start()


def can_kernel_watch(start_method: str) -> bool:
    """Return whether the kernel can watch over a process that the calling thread is about to start.

    The signal comes when the *thread* ends that started it, so that has to be the main one. With a fork server it is
    that of the server, which ends right behind its trainer, unless other processes use it, too.
    """
    in_main_thread = start_method == "forkserver" or threading.get_native_id() == os.getpid()
    return sys.platform == "linux" and in_main_thread


def _wait_and_end(trainer: int) -> None:
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(trainer), select.POLLIN)
        ended.poll()
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, or forbidden
        while _is_there(trainer):
            time.sleep(_LOOK)
    os._exit(1)


def _is_there(trainer: int) -> bool:
    try:
        os.kill(trainer, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
