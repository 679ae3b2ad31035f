"""Loss tokens of a whole step: the sum over all its micro-batches, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from energon_lite.batching.sequence_batches import PackedBatch, PaddedBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["count_loss_tokens"]


def count_loss_tokens(
    micro_batches: Sequence[PackedBatch | PaddedBatch], group: ProcessGroup | None = None, *, device: str = "cpu"
) -> float:
    """Count the loss tokens of a step, and write the number into each of its micro-batches as ``global_loss_tokens``.

    A mean over each micro-batch, or over each rank, would give tokens in fuller batches less weight. With this number,
    the loss of a micro-batch is a sum divided by the same number everywhere; gradients are then summed over ranks, not
    averaged.

    Args:
        micro_batches: this rank's micro-batches of one step; may be empty.
        group: the data-parallel ranks, all of which must call this function; None: all ranks. Without
            ``torch.distributed``, this process alone.
        device: device of the sum: ``cuda`` for NCCL.

    Example:
        >>> count_loss_tokens(micro_batches)
        >>> for batch in micro_batches:
        ...     losses = F.cross_entropy(model(batch), batch.labels.flatten(), reduction="none")
        ...     ((losses * batch.loss_mask.flatten()).sum() / batch.global_loss_tokens).backward()
    """
    count = torch.tensor(sum(batch.num_loss_tokens for batch in micro_batches), dtype=torch.float64, device=device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count, group=group)
    total = float(count.item())
    for batch in micro_batches:
        batch.global_loss_tokens = total
    return total
