"""Addresses of the samples of a micro-batch, and their digests: 64 bits, independent of the distribution over ranks.

Each sample's address is hashed, and the hashes are added modulo 2**64. So the digest of a set is the same in any order,
and digests of parts add up to that of the whole: over micro-batches, and over any number of ranks. A lost, repeated or
exchanged sample changes the sum (two different sets have equal digests with probability 2**-64). The list of the steps'
digests, or their chain, in which the order counts, says what each step contained.

Sums of hashes as digests of sets: Bellare and Micciancio 1997, "A new paradigm for collision-free hashing". They detect
faults, not attacks: 64 bits are too few against a deliberate search for collisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import MASK64, hash_next, mix64, mix64_array

Ints = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

#: Digest of the empty set, and start of a chain.
NO_SAMPLES = 0
#: Odd factors of leaf, index and epoch, so that the sum differs if any of them does.
_LEAF = 0xD6E8FEB86659FD93
_INDEX = 0xA0761D6478BD642F
_EPOCH = 0xE7037ED1A0B428DB
_LEAF_ARRAY = np.array(_LEAF, np.uint64)
_INDEX_ARRAY = np.array(_INDEX, np.uint64)
_EPOCH_ARRAY = np.array(_EPOCH, np.uint64)


def address_hash(leaf: int, index: int, epoch: int) -> int:
    """Hash of a sample's address, 64 bits.

    Example:
        >>> address_hash(0, 7, 3) == int(address_hashes(*np.array([[0], [7], [3]]))[0])
        True
    """
    return mix64((leaf * _LEAF + index * _INDEX + epoch * _EPOCH) & MASK64)


def address_hashes(leaf: Ints, index: Ints, epoch: Ints) -> UInt64:
    """Hashes of the addresses of ``k`` samples, ``[k]`` uint64, from ``[k]`` int64 each; see :func:`address_hash`."""
    mixed = leaf.view(np.uint64) * _LEAF_ARRAY
    mixed += index.view(np.uint64) * _INDEX_ARRAY
    mixed += epoch.view(np.uint64) * _EPOCH_ARRAY
    return mix64_array(mixed)


def part_hash(whole: int, *part: int) -> int:
    """Hash of a part of a sample, for a plan that cuts samples or a hook that yields several.

    Args:
        whole: the hash of the sample.
        part: numbers that identify the part: its first token and number of tokens, or its number.
    """
    for value in part:
        whole = hash_next(whole, value)
    return whole


def set_digest(addresses: Sequence[Sequence[int]]) -> int:
    """Digest of some samples: the sum of their hashes, modulo 2**64.

    Args:
        addresses: ``(leaf, index, epoch)`` of each, followed by ``(first token, tokens, 1)`` for a part of a sample.
            Lists made by a plan have their digest already.

    Example:
        >>> set_digest([(0, 1, 0), (0, 2, 0)]) == set_digest([(0, 2, 0), (0, 1, 0)])
        True
    """
    known: int | None = getattr(addresses, "digest", None)
    if known is not None:
        return known
    total = 0
    for leaf, index, epoch, *piece in addresses:
        hashed = address_hash(leaf, index, epoch)
        total += part_hash(hashed, piece[0], piece[1]) if piece and piece[2] else hashed
    return total & MASK64


def sums_of_groups(hashes: UInt64, edges: Ints) -> list[int]:
    """Digests of consecutive groups of samples: group ``g`` is ``edges[g]:edges[g + 1]``."""
    sums = np.zeros(len(hashes) + 1, dtype=np.uint64)
    np.cumsum(hashes, out=sums[1:])
    return np.diff(sums[edges]).tolist()


def chain_digest(chain: int, digest: int) -> int:
    """Digest of a run extended by one step; the order of the steps counts.

    Args:
        chain: digest of the previous steps; 0 if there are none.
        digest: digest of the new step.

    Example:
        >>> chain_digest(chain_digest(0, 5), 7) == chain_digest(chain_digest(0, 7), 5)
        False
    """
    return hash_next(chain, digest)


def digest_text(digest: int) -> str:
    """A digest as 16 hexadecimal characters, for files: numbers in JSON may have less than 64 bits."""
    return f"{digest & MASK64:016x}"


class AddressList(list[tuple[int, ...]]):
    """Addresses of the samples, or of parts of samples, of a planned micro-batch: a list with a digest.

    Args:
        addresses: ``(leaf, index, epoch)`` of each; of a plan by tokens, followed by ``(first token, tokens, 1 for a
            part or 0 for a whole sample)``.
        digest: see :func:`~energon_lite.batching.digests.set_digest`; None: it is not known.
    """

    __slots__ = ("digest",)

    def __init__(self, addresses: Iterable[tuple[int, ...]], digest: int | None = None):
        super().__init__(addresses)
        self.digest = digest

    def __reduce__(self) -> tuple[Any, ...]:
        return AddressList, (list(self), self.digest)
