"""Result of a selection for packing, with samples that are pushed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["PackedSamplesOutput"]

T = TypeVar("T")


@dataclass(frozen=True)
class PackedSamplesOutput(Generic[T]):
    """Packs of a buffer, and samples that are pushed back into it.

    The next buffer starts with the samples that were pushed back, in their order, and is filled up with the samples
    that follow. So a pack need not be closed half full at the end of a buffer. At the end of a chunk, samples that are
    the last ones of their buffer move to a later chunk. Others are selected again separately, as long as that makes
    packs; samples that are pushed back then are dropped, and counted.

    Args:
        packs: lists of samples.
        pushback: samples of the buffer, or remainders of them.

    Example:
        >>> def select_samples_to_pack(self, samples):
        ...     packs = greedy(samples, 4096)
        ...     return PackedSamplesOutput(packs[:-1], pushback=packs[-1])
    """

    packs: Sequence[Sequence[T]]
    pushback: Sequence[T] = ()
