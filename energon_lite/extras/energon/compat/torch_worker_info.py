"""Result of ``torch.utils.data.get_worker_info`` in a worker: None, or the information that a torch worker has.

Programs for Energon rely on the information. Without this extra it is None: in a torch worker, ``default_collate``
makes batches in ``/dev/shm``, which is small in many containers.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["tell"]

_thread = threading.local()
_patched = threading.Lock()


def tell(number: int, peers: int, thread: bool) -> None:
    """Provide torch's worker information; called in each worker when it begins.

    Args:
        number: number of this worker. It is also the seed, because hooks have generators of their own for each sample.
        peers: number of workers of this rank.
        thread: the worker is this thread. Torch stores one answer for the whole process, so its function is replaced
            by a function that looks up the thread first.
    """
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
