"""What a selection for packing may return beside lists of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["PackedSamplesOutput"]

T = TypeVar("T")


@dataclass(frozen=True)
class PackedSamplesOutput(Generic[T]):
    """The packs of a buffer, and samples that go back into it.

    The next buffer begins with those that were pushed back, in their order, and is filled up with the samples that
    follow. So a pack need not be closed half full because a buffer ends. At the end of a chunk, samples that are the
    last ones of their buffer go on to a later chunk. Others are selected by themselves there, as long as that makes
    packs; what is pushed back then is dropped, and counted.

    Args:
        packs: lists of samples.
        pushback: samples of the buffer, or rests of them.

    Example:
        >>> def select_samples_to_pack(self, samples):
        ...     packs = greedy(samples, 4096)
        ...     return PackedSamplesOutput(packs[:-1], pushback=packs[-1])
    """

    packs: Sequence[Sequence[T]]
    pushback: Sequence[T] = ()
