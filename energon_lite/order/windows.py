"""Sequences of neighbours that stay together, and the windows in which they are mixed.

An epoch of ``n`` samples is cut into sequences of ``run`` neighbours, which are permuted; the result is cut into
windows of ``window`` places, and the places inside each window are permuted. All keys are derived from that of the
epoch.

Most requests are for many neighbouring places of few epochs. Then values of an epoch or of a window are computed once,
and each sequence is looked up once, not once for each of its samples. Other requests are computed place by place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from energon_lite.order.hashing import hash_ints, mix64, mix64_array
from energon_lite.order.permutation import permute_array, unpermute, unpermute_array

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: Tag of the keys for the permutation of sequences.
_RUNS = np.uint64(hash_ints(1))
#: Tag of the keys for the permutations inside windows.
_WINDOWS = np.uint64(hash_ints(2))
#: Least number of places in an epoch, on average, from which numpy calls for each epoch pay.
_EPOCH = 700
#: Least number of places in a window, likewise.
_WINDOW = 128
#: Number of first places that are checked for distinct epochs before all are.
_FIRST = 64


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
    groups = _groups(keys)
    # Leaves of different lengths may have the same key.
    if groups is None or any((n[here] != n[here][0]).any() for _, here in groups):
        return _shuffle_runs(_mix_windows(place, n, keys, window), n, keys, run)
    out = np.empty_like(place)
    for key, here in groups:
        length = int(n[here][0])
        mixed = _mix_windows_of_one(place[here], length, key, window)
        out[here] = _shuffle_runs_of_one(mixed, length, key, run)
    return out


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


def _groups(keys: Keys) -> list[tuple[int, Ints | slice]] | None:
    """Group positions by key: each distinct key with its indices; None if there are too many keys."""
    if not len(keys):
        return None
    if (keys == keys[0]).all():
        return [(int(keys[0]), slice(None))]
    most = len(keys) // _EPOCH
    if len(set(keys[:_FIRST].tolist())) > most or len(different := set(keys.tolist())) > most:
        return None
    return [(key, np.flatnonzero(keys == np.uint64(key))) for key in different]


# -- place by place ---------------------------------------------------------------------------------------------------


def _mix_windows(place: Ints, n: Ints, keys: Keys, window: int) -> Ints:
    """Permute the places inside each window; the last window may be shorter."""
    if window <= 1:
        return place
    start, length, window_keys = _window_of(place, n, keys, window)
    return start + permute_array(place - start, length, window_keys)


def _window_of(place: Ints, n: Ints, keys: Keys, window: int) -> tuple[Ints, Ints, Keys]:
    """First place, length and key of the window of each place, ``[k]`` each."""
    number = place // window
    start = number * window
    return start, np.minimum(window, n - start), mix64_array(keys ^ _WINDOWS ^ mix64_array(number.astype(np.uint64)))


def _shuffle_runs(place: Ints, n: Ints, keys: Keys, run: int) -> Ints:
    """Permute the sequences. The last one may be shorter, at any slot of the permutation."""
    count = -(-n // run)
    run_keys = mix64_array(keys ^ _RUNS)
    slot, offset = _slots(place, n, unpermute_array(count - 1, count, run_keys), run)
    return permute_array(slot, count, run_keys) * run + offset


def _slots(place: Ints, n: Ints | int, last: Ints | int, run: int) -> tuple[Ints, Ints]:
    """Slot of each place, and the offset in it, if the last sequence of ``n`` samples is in slot ``last``."""
    short, start = (n - 1) % run + 1, last * run
    # Places after the short sequence are shifted as if it had the full length.
    shifted = np.where(place >= start + short, place + (run - short), place)
    slot = shifted // run
    return slot, shifted - slot * run


# -- one epoch --------------------------------------------------------------------------------------------------------


def _mix_windows_of_one(place: Ints, n: int, key: int, window: int) -> Ints:
    """Permute the places inside each window of one epoch; see :func:`_mix_windows`."""
    if window <= 1:
        return place
    number = place // window
    windows = range(int(number.min()), int(number.max()) + 1)
    if len(windows) * _WINDOW > len(place):
        return _mix_windows(place, np.full(len(place), n), np.full(len(place), key, dtype=np.uint64), window)
    out = np.empty_like(place)
    for window_number in windows:
        start = window_number * window
        here = np.flatnonzero(number == window_number) if len(windows) > 1 else slice(None)
        window_key = mix64(key ^ int(_WINDOWS) ^ mix64(window_number))
        out[here] = permute_array(place[here] - start, min(window, n - start), window_key) + start
    return out


def _shuffle_runs_of_one(place: Ints, n: int, key: int, run: int) -> Ints:
    """Permute the sequences of one epoch; see :func:`_shuffle_runs`."""
    count = -(-n // run)
    run_key = mix64(key ^ int(_RUNS))
    slot, offset = _slots(place, n, unpermute(count - 1, count, run_key), run)
    first, last = int(slot.min()), int(slot.max())
    if last - first >= len(slot):
        return permute_array(slot, count, run_key) * run + offset
    runs = permute_array(np.arange(first, last + 1), count, run_key)
    return (runs * run).take(slot - first) + offset
