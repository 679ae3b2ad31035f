"""A digest of the samples of a micro-batch, of a step, of a run: 64 bits that do not depend on who had which sample.

Each sample's address is hashed, and the hashes are added modulo 2**64. So the digest of a set is the same in any order,
and digests of parts add up to that of the whole: over micro-batches, and over ranks, however many there are. A sample
that is lost, comes twice, or is another one changes the sum (of two sets that differ, one in 2**64 is not told apart).
What happened in which step is told by the list of the steps' digests, or by their chain, in which the order counts.

Sums of hashes as digests of sets: Bellare and Micciancio 1997, "A new paradigm for collision-free hashing". Against
faults, not against somebody who looks for a collision: for that 64 bits are too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import MASK64, hash_next, mix64, mix64_array

__all__ = [
    "NO_SAMPLES",
    "address_hash",
    "address_hashes",
    "chain_digest",
    "digest_text",
    "part_hash",
    "set_digest",
    "sums_of_groups",
]

Ints = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

#: The digest of a set without samples, and the beginning of a chain.
NO_SAMPLES = 0
#: Odd numbers by which leaf, index and epoch are multiplied, so that their sum differs where any of them does.
_LEAF, _INDEX, _EPOCH = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB
_LEAF_ARRAY, _INDEX_ARRAY, _EPOCH_ARRAY = (np.array(factor, np.uint64) for factor in (_LEAF, _INDEX, _EPOCH))


def address_hash(leaf: int, index: int, epoch: int) -> int:
    """The hash of a sample's address.

    Example:
        >>> address_hash(0, 7, 3) == int(address_hashes(*np.array([[0], [7], [3]]))[0])
        True
    """
    return mix64((leaf * _LEAF + index * _INDEX + epoch * _EPOCH) & MASK64)


def address_hashes(leaf: Ints, index: Ints, epoch: Ints) -> UInt64:
    """:func:`address_hash` of many samples, ``[k]`` int64 each."""
    mixed = leaf.view(np.uint64) * _LEAF_ARRAY
    mixed += index.view(np.uint64) * _INDEX_ARRAY
    mixed += epoch.view(np.uint64) * _EPOCH_ARRAY
    return mix64_array(mixed)


def part_hash(whole: int, *part: int) -> int:
    """The hash of a part of a sample, as a plan that cuts it or a hook that yields several makes one.

    Args:
        whole: the hash of the sample.
        part: what tells the part from the others: its first token and their number, or its number.
    """
    for value in part:
        whole = hash_next(whole, value)
    return whole


def set_digest(addresses: Sequence[Sequence[int]]) -> int:
    """The digest of some samples: the sum of their hashes, modulo 2**64.

    Args:
        addresses: ``(leaf, index, epoch)`` of each; with ``(first token, tokens, 1)`` behind it where it is a part of
            one. A list that a plan made knows its digest.

    Example:
        >>> set_digest([(0, 1, 0), (0, 2, 0)]) == set_digest([(0, 2, 0), (0, 1, 0)])
        True
    """
    known = getattr(addresses, "digest", None)
    return _sum(addresses) if known is None else known


def _sum(addresses: Iterable[Sequence[int]]) -> int:
    total = 0
    for leaf, index, epoch, *piece in addresses:
        hashed = address_hash(leaf, index, epoch)
        total += part_hash(hashed, piece[0], piece[1]) if piece and piece[2] else hashed
    return total & MASK64


def sums_of_groups(hashes: UInt64, edges: Ints) -> list[int]:
    """Digests of groups of samples, one behind the other: group ``g`` is ``edges[g]:edges[g + 1]``."""
    sums = np.zeros(len(hashes) + 1, dtype=np.uint64)
    np.cumsum(hashes, out=sums[1:])
    found: list[int] = np.diff(sums[edges]).tolist()
    return found


def chain_digest(chain: int, digest: int) -> int:
    """The digest of a run with one more step, in which the order of the steps counts.

    Args:
        chain: of the steps before; of none, 0.
        digest: of the step.

    Example:
        >>> chain_digest(chain_digest(0, 5), 7) == chain_digest(chain_digest(0, 7), 5)
        False
    """
    return hash_next(chain, digest)


def digest_text(digest: int) -> str:
    """A digest as 16 hexadecimal characters: what files have, since JSON's numbers are not sure to have 64 bits."""
    return f"{digest & MASK64:016x}"
