"""End of a worker process after the end of its trainer, in whatever way the trainer ended.

A worker between two jobs sees its pipe close. A worker in a hook that takes minutes, or never returns, does not look.
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

#: ``PR_SET_PDEATHSIG`` of Linux: sets the signal that a process gets when the thread that started it has ended.
_SET_PARENT_DEATH_SIGNAL = 1
#: Seconds between two checks for the trainer, on systems that cannot wait for a process.
_LOOK = 1.0


def end_with_trainer(trainer: int, *, by_kernel: bool) -> None:
    """End this process when the trainer process has ended.

    Args:
        trainer: process id of the trainer.
        by_kernel: the kernel may kill this process (see :func:`can_kernel_watch`), also while a hook holds Python's
            lock. Otherwise, or if this is not a child of the trainer, a thread waits for the trainer's end.
    """
    if by_kernel:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if not by_kernel or os.getppid() != trainer:
        threading.Thread(target=_wait_and_end, args=(trainer,), name="energon-lite-parent-watch", daemon=True).start()


def can_kernel_watch(start_method: str) -> bool:
    """Return whether the kernel can end a process that the calling thread is about to start.

    The signal is sent when the *thread* that started the process ends, so that has to be the main thread. With a fork
    server it is the server's thread; the server ends shortly after its trainer, unless other processes use it, too.
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
