"""Concatenation of all samples, cut where a micro-batch is full."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.capacity import Capacity, Ints, checked_lengths
from energon_lite.batching.micro_batches import MicroBatches, arrange
from energon_lite.batching.oversize import Counts, Pieces

__all__ = ["ConcatSplit"]


@dataclass(frozen=True)
class ConcatSplit:
    """Strategy with micro-batches of exactly ``tokens`` tokens (the last one is shorter), as usual in pretraining.

    It fills micro-batches completely, but loses the most context: a sample is cut at the end of each micro-batch, and
    its second part is read without the first. Not for samples that must stay whole, such as those with images. For the
    effect of such cuts on a model see Ding et al. 2024, "Fewer truncations improve language modeling".

    Samples without tokens are in no micro-batch; they are counted as dropped.

    Args:
        tokens: tokens in a micro-batch.

    Example:
        >>> batches = ConcatSplit(4).plan(np.array([3, 6]), seed=0)
        >>> [part.tolist() for part in batches], batches.start.tolist(), batches.length.tolist()
        ([[0, 1], [1], [1]], [0, 0, 1, 5], [3, 1, 4, 1])
    """

    tokens: int

    def __post_init__(self) -> None:
        Capacity(self.tokens)

    @property
    def capacity(self) -> Capacity:
        """Capacity of a micro-batch, in packed tokens."""
        return Capacity(self.tokens)

    def plan(self, lengths: Ints, *, seed: int = 0, key_lengths: Ints | None = None) -> MicroBatches:
        """See :class:`energon_lite.batching.strategy.Strategy`."""
        lengths = checked_lengths(lengths)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(lengths) else 0
        cuts = np.arange(0, total, self.tokens, dtype=np.int64)
        begins = np.union1d((ends - lengths)[lengths > 0], cuts)
        sample = np.searchsorted(ends, begins, side="right").astype(np.int64)
        pieces = Pieces(
            sample,
            begins - (ends - lengths)[sample],
            np.diff(np.append(begins, total)),
            Counts(
                dropped_samples=int((lengths == 0).sum()),
                split_samples=int((np.bincount(sample, minlength=1) > 1).sum()),
            ),
        )
        offsets = np.append(np.searchsorted(begins, cuts), len(begins))
        return arrange(pieces, np.arange(len(begins)), offsets, self.capacity, 0)
