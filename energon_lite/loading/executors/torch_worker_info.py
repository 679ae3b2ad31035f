"""What ``torch.utils.data.get_worker_info`` says in a worker: nothing, or what it says in one of torch's own.

It says nothing as a rule: torch's ``default_collate`` makes batches in ``/dev/shm`` where it takes itself to be in a
worker of torch's, and that is small in many a container.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["is_told", "tell"]

#: Whether it is told; set by ``energon_lite.extras.energon``, since programs for Energon are used to it.
is_told = False

_thread = threading.local()
_patched = threading.Lock()


def tell(number: int, peers: int, *, thread: bool = False) -> None:
    """Have torch say it, if it is to be told.

    Args:
        number: of this worker. It is the seed, too: hooks have generators of their own for each sample.
        peers: workers of this rank.
        thread: the worker is this thread; torch's own answer is one for the whole process, so its function is replaced
            by one that asks the thread first.
    """
    if not is_told:
        return
    from torch.utils.data._utils import worker

    info = worker.WorkerInfo(id=number, num_workers=peers, seed=number, dataset=None)  # type: ignore[arg-type]
    if not thread:
        worker._worker_info = info
        return
    _thread.info = info
    with _patched:
        if not hasattr(worker.get_worker_info, "asks_threads"):
            _ask_threads_first(worker)


def _ask_threads_first(worker: Any) -> None:
    import torch.utils.data

    asked = worker.get_worker_info

    def get_worker_info() -> Any:
        return getattr(_thread, "info", None) or asked()

    get_worker_info.__doc__ = asked.__doc__
    get_worker_info.asks_threads = True  # type: ignore[attr-defined]
    worker.get_worker_info = torch.utils.data.get_worker_info = get_worker_info
