"""Sequences of neighbours that stay together, and the windows in which they are mixed.

An epoch of ``n`` samples is cut into sequences of ``run`` neighbours, which are permuted; the result is cut into
windows of ``window`` places, and the places inside each window are permuted. All keys are derived from that of the
epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import hash_ints, mix64_array
from energon_lite.order.permutation import permute_array, unpermute_array

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: Tag of the keys for the permutation of sequences.
_RUNS = np.uint64(hash_ints(1))
#: Tag of the keys for the permutations inside windows.
_WINDOWS = np.uint64(hash_ints(2))


def runs_in_windows(place: Ints, n: Ints, keys: Keys, run: int, window: int) -> Ints:
    """Samples at places of epochs, ``[k]`` int64.

    Args:
        place: ``[k]``, from 0 to ``n - 1``.
        n: ``[k]`` samples in the epoch.
        keys: ``[k]`` keys of the epochs.
        run: samples in a sequence that stays together.
        window: places in a window that is mixed.

    Returns:
        ``[k]`` int64 indices of samples.
    """
    if window > 1:
        start, length, window_keys = _window_of(place, n, keys, window)
        place = start + permute_array(place - start, length, window_keys)
    count, run_keys = -(-n // run), mix64_array(keys ^ _RUNS)
    # The last sequence may be shorter, at any slot of the permutation. Places after it are shifted as if it had the
    # full length.
    short, start = (n - 1) % run + 1, unpermute_array(count - 1, count, run_keys) * run
    shifted = np.where(place >= start + short, place + (run - short), place)
    slot = shifted // run
    return permute_array(slot, count, run_keys) * run + shifted - slot * run


def places_in_windows(sample: Ints, n: Ints, keys: Keys, run: int, window: int) -> Ints:
    """Invert :func:`runs_in_windows`: places in the epochs at which samples are.

    Args:
        sample: ``[k]``, from 0 to ``n - 1``.
        n, keys, run, window: see :func:`runs_in_windows`.

    Returns:
        ``[k]`` int64 places.
    """
    count, run_keys = -(-n // run), mix64_array(keys ^ _RUNS)
    number = sample // run
    slot = unpermute_array(number, count, run_keys)
    # After the short sequence, places come earlier by the samples that it lacks.
    is_behind = slot > unpermute_array(count - 1, count, run_keys)
    place = slot * run + (sample - number * run) - np.where(is_behind, run - ((n - 1) % run + 1), 0)
    if window <= 1:
        return place
    start, length, window_keys = _window_of(place, n, keys, window)
    return start + unpermute_array(place - start, length, window_keys)


def _window_of(place: Ints, n: Ints, keys: Keys, window: int) -> tuple[Ints, Ints, Keys]:
    """First place, length and key of the window of each place, ``[k]`` each."""
    number = place // window
    start = number * window
    return start, np.minimum(window, n - start), mix64_array(keys ^ _WINDOWS ^ mix64_array(number.astype(np.uint64)))
