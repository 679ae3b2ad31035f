"""Epoch permutations of many leaves, with cached values for each leaf and for its current epoch.

A batch of a blend of 1,000 leaves has about one sample of each, so grouping by leaf does not pay. But from batch to
batch only the place in the epoch changes. The radices of each leaf are computed once, its round keys once for each
epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.feistel import cycle_walk, radices, round_keys
from energon_lite.order.hashing import mix64_array
from energon_lite.order.permutation import CHUNK, permute_array, rounds_of_each

__all__ = ["EpochPermutations", "epoch_keys"]

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: With more leaves, the cache would cost more memory and copying than it saves.
_MOST_LEAVES = 1 << 14


def epoch_keys(leaf_keys: Keys, epoch: Ints) -> Keys:
    """Permutation keys of ``k`` pairs of leaf and epoch, ``[k]`` uint64."""
    return mix64_array(leaf_keys ^ mix64_array(epoch.astype(np.uint64)))


class EpochPermutations:
    """Permutations of each epoch of each leaf, equal to ``permute_array`` with :func:`epoch_keys`.

    Args:
        lengths: samples in an epoch of each leaf, ``[leaves]``.
        keys: keys of the leaves, ``[leaves]``.
    """

    def __init__(self, lengths: Ints, keys: Keys):
        self._lengths = lengths
        self._leaf_keys = keys
        self._rounds = rounds_of_each(lengths)
        self._kinds = sorted(set(self._rounds.tolist()))
        kept = len(lengths) if len(lengths) <= _MOST_LEAVES else 0
        self._radices = radices(lengths[:kept])
        # Replaced as a whole, never changed in place, so that a concurrent look-up sees a consistent state.
        self._known = (
            np.full(kept, -1, dtype=np.int64),
            np.zeros((max(self._kinds, default=0), kept), dtype=np.uint32),
        )

    def lookup(self, leaf: Ints, epoch: Ints, place: Ints) -> Ints:
        """Index of the sample at ``place`` of ``epoch`` of ``leaf``, for each of ``k`` triples."""
        if len(place) <= CHUNK:
            return self._any_kind(leaf, epoch, place)
        out = np.empty_like(place)
        for start in range(0, len(place), CHUNK):
            part = slice(start, start + CHUNK)
            out[part] = self._any_kind(leaf[part], epoch[part], place[part])
        return out

    def _any_kind(self, leaf: Ints, epoch: Ints, place: Ints) -> Ints:
        if len(self._kinds) == 1:
            return self._one_kind(self._kinds[0], leaf, epoch, place)
        out = np.empty_like(place)
        rounds = self._rounds.take(leaf)
        for kind in self._kinds:
            here = np.flatnonzero(rounds == kind)
            out[here] = self._one_kind(kind, leaf[here], epoch[here], place[here])
        return out

    def _one_kind(self, rounds: int, leaf: Ints, epoch: Ints, place: Ints) -> Ints:
        n = self._lengths.take(leaf)
        if not rounds or len(self._lengths) > _MOST_LEAVES:
            return permute_array(place, n, epoch_keys(self._leaf_keys[leaf], epoch))
        return cycle_walk(place, n, self._radices.take(leaf), self._round_keys(rounds, leaf, epoch), 1)

    def _round_keys(self, rounds: int, leaf: Ints, epoch: Ints) -> list[NDArray[np.uint32]]:
        """Round keys, ``[rounds]`` arrays ``[k]``; those of the requested epochs are cached for the next call."""
        known_epoch, known = self._known
        keys = [row.take(leaf) for row in known[:rounds]]
        new = np.flatnonzero(known_epoch.take(leaf) != epoch)
        if new.size:
            leaf, epoch = leaf[new], epoch[new]
            mixed = epoch_keys(self._leaf_keys[leaf], epoch)
            known_epoch, known = known_epoch.copy(), known.copy()
            known_epoch[leaf] = epoch
            # If a leaf occurs with several epochs, one of them was written above; cache the keys of the same one.
            kept = known_epoch[leaf] == epoch
            for round_ in range(rounds):
                keys[round_][new] = fresh = round_keys(mixed, round_)
                known[round_, leaf[kept]] = fresh[kept]
            self._known = known_epoch, known
        return keys
