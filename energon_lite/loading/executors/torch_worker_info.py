"""What ``torch.utils.data.get_worker_info`` says in a worker process: nothing, or what it says in one of torch's own.

It says nothing as a rule: torch's ``default_collate`` makes batches in ``/dev/shm`` where it takes itself to be in a
worker of torch's, and that is small in many a container.
"""

from __future__ import annotations

__all__ = ["is_told", "tell"]

#: Whether it is told; set by ``energon_lite.compat``, since programs for Energon are used to it.
is_told = False


def tell(number: int, peers: int) -> None:
    """Have torch say it, if it is to be told.

    Args:
        number: of this worker. It is the seed, too: hooks have generators of their own for each sample.
        peers: workers of this rank.
    """
    if is_told:
        from torch.utils.data._utils import worker

        worker._worker_info = worker.WorkerInfo(id=number, num_workers=peers, seed=number, dataset=None)  # type: ignore[arg-type]
