"""Keyed integer hashes: the only source of randomness in the order.

Every random decision of the order is a hash of integers (seed, leaf, epoch, position), never the next number of a
generator: so any position can be computed alone, in any process, and always gives the same value. All functions are
plain 64-bit integer arithmetic and do not depend on the release of numpy, on the machine or on the byte order.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import hashlib
from enum import IntEnum, unique

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
# Zero-dimensional arrays: numpy would convert a scalar in each call.
_GOLDEN_ARRAY = np.array(_GOLDEN, np.uint64)
_M1_ARRAY = np.array(_M1, np.uint64)
_M2_ARRAY = np.array(_M2, np.uint64)
_27 = np.array(27, np.uint64)
_30 = np.array(30, np.uint64)
_31 = np.array(31, np.uint64)


@unique
class HashDomain(IntEnum):
    """Purpose of a hash: the second integer of its sequence keeps hashes for different purposes apart.

    The values are part of the order; a new purpose gets a new value. Masks of windows and draws, which are hashes of
    one integer, are no sequences and have their own numbers.
    """

    #: Blends after a rebase.
    REBASE = 2
    #: Randomness of the hooks of single samples.
    SAMPLE_HOOKS = 11
    #: Randomness of the hooks of batches.
    BATCH_HOOKS = 12
    #: Choice of replacements.
    REPLACEMENT = 13
    #: Randomness of ``select_samples_to_pack``.
    SELECT_HOOK = 16
    #: Randomness of ``postencode_sample``.
    POSTENCODE_HOOK = 17
    #: Randomness of ``pack_selected_samples``.
    PACK_HOOK = 18
    #: Randomness of ``sample_length``.
    LENGTH_HOOK = 19
    #: Keys of leaves.
    LEAF = 21
    #: Keys of blends.
    BLEND = 22
    #: Root of all randomness of hooks.
    HOOKS = 23
    #: Root of all plans by tokens.
    PLANS = 24
    #: Plan of a chunk.
    PLAN = 31
    #: Plan of a chunk by the lengths of encoded samples.
    ENCODED_PLAN = 32
    #: Root of the randomness of a wrapper.
    WRAPPED = 33
    #: Keys of blends of data sets as objects.
    WRAPPED_BLEND = 34
    #: Keys of shuffled data sets as objects.
    WRAPPED_SHUFFLE = 35
    #: Randomness of a wrapper's function.
    WRAPPED_FUNCTION = 36
    #: Choice of replacements of items.
    WRAPPED_REPLACEMENT = 37
    #: Randomness of ``sample_length`` while a data set is measured.
    MEASURED_LENGTH = 38
    #: Randomness of ``encode_on_device``.
    DEVICE_HOOK = 39
    #: Order in which packs are dealt to rows.
    DEAL = 0x6465616C
    #: Order of the micro-batches of a chunk.
    SHUFFLED_BATCHES = 0x6F72646572


def mix64(x: int) -> int:
    """Scramble 64 bits; a bijection of [0, 2**64).

    Example:
        >>> mix64(1) == int(mix64_array(np.array([1], dtype=np.uint64))[0])
        True
    """
    x = (x + _GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * _M1) & MASK64
    x = ((x ^ (x >> 27)) * _M2) & MASK64
    return x ^ (x >> 31)


def mix64_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble every element of a uint64 array; see :func:`mix64`."""
    x = x + _GOLDEN_ARRAY
    shifted = x >> _30
    x ^= shifted
    x *= _M1_ARRAY
    np.right_shift(x, _27, out=shifted)
    x ^= shifted
    x *= _M2_ARRAY
    np.right_shift(x, _31, out=shifted)
    x ^= shifted
    return x


def hash_ints(*values: int) -> int:
    """64-bit hash of a sequence of integers; negative and larger ones are reduced modulo 2**64.

    Example:
        >>> hash_ints(1, 2) != hash_ints(2, 1)
        True
    """
    state = 0
    for value in values:
        state = hash_next(state, value)
    return state


def hash_next(state: int, value: int) -> int:
    """Extend a hash by one integer: :func:`hash_ints` of a sequence, from the hash of all but the last.

    Example:
        >>> hash_next(hash_ints(1, 2), 3) == hash_ints(1, 2, 3)
        True
    """
    return mix64(state ^ mix64(value))


def hash_next_array(state: int, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Extend a hash by each of ``k`` integers separately, ``[k]`` uint64; see :func:`hash_next`.

    Example:
        >>> int(hash_next_array(hash_ints(1, 2), np.array([3], dtype=np.uint64))[0]) == hash_ints(1, 2, 3)
        True
    """
    return mix64_array(mix64_array(values) ^ np.uint64(state))


def hash_text(text: str) -> int:
    """64-bit hash of a text, equal on every machine and in every run (unlike ``hash(text)``)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "little")
