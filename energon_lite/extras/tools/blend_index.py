"""Building of a blend index by all ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from energon_lite.extras.tools import order_arrays as arrays
from energon_lite.order import WeightStage

__all__ = ["build_blend_index"]


def build_blend_index(
    weights: Sequence[float] | Sequence[WeightStage],
    n: int,
    path: str | os.PathLike[str],
    *,
    key: int = 0,
    workers: int | None = None,
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Build a blend index; each rank of the default process group writes a slice.

    See :func:`energon_lite.extras.tools.order_arrays.build_blend_index`.

    Args:
        weights, n, key: as for that function, equal on all ranks.
        path: the new folder, on storage visible to all ranks.
        workers: number of processes of each rank; None: the cores of the node divided by its ranks.

    Example:
        >>> build_blend_index([3, 1], 8, "index")  # under torchrun, or in a single process
    """
    ranks: dict[str, Any] = {}
    if dist.is_available() and dist.is_initialized():
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "barrier": dist.barrier}
        workers = workers or max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return arrays.build_blend_index(weights, n, path, key=key, workers=workers, **ranks)
