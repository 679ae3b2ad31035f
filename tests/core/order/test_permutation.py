"""The keyed permutation: a bijection at every size, the same in both forms, and as random as numpy's."""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.order import permutation
from energon_lite.order.hashing import hash_ints, hash_text, mix64, mix64_array
from energon_lite.order.permutation import permute_array, quotient, rounds_of_each, unpermute_array

keys = st.integers(0, 2**64 - 1)
sizes = st.one_of(st.integers(1, 200), st.integers(1, 200_000), st.integers(1, 2**62))


@pytest.mark.parametrize("start", range(1, 3001, 500))
def test_bijection_at_every_small_size(start: int) -> None:
    for n in range(start, start + 500):
        assert np.array_equal(np.sort(permute_array(np.arange(n), n, n * 31)), np.arange(n)), n


@given(n=st.integers(3_000, 300_000), key=keys)
def test_bijection_at_any_size(n: int, key: int) -> None:
    there = permute_array(np.arange(n), n, key)
    assert np.bincount(there, minlength=n).tolist() == [1] * n


@given(n=st.integers(1, 62).flatmap(lambda bits: st.integers(1 << (bits - 1), 1 << bits)), key=keys, data=st.data())
def test_bijection_as_far_as_it_can_be_seen_at_sizes_up_to_2_to_the_62(n: int, key: int, data: st.DataObject) -> None:
    """Both ways round lead back: so no two go to the same place, and each place is reached. Neighbours, and any."""
    start = data.draw(st.integers(0, max(0, n - 500)))
    anywhere = np.random.default_rng(key).integers(0, n, 500)
    for index in (np.arange(start, min(n, start + 500)), anywhere):
        there, back = permute_array(index, n, key), unpermute_array(index, n, key)
        assert there.min() >= 0 and there.max() < n and back.min() >= 0 and back.max() < n
        assert np.array_equal(unpermute_array(there, n, key), index)
        assert np.array_equal(permute_array(back, n, key), index)
        assert len(np.unique(there)) == len(np.unique(index))


@given(cases=st.lists(st.tuples(sizes, keys, st.integers(0, 2**62)), min_size=1, max_size=40))
def test_twins_and_inverse(cases: list[tuple[int, int, int]]) -> None:
    """Arrays, with sizes and keys of their own or with one for all, and single numbers; there and back."""
    n = np.array([case[0] for case in cases])
    key = np.array([case[1] for case in cases], dtype=np.uint64)
    index = np.array([i % size for size, _, i in cases])
    there = permute_array(index, n, key)
    assert there.tolist() == [_permuted(int(i), size, k) for i, (size, k, _) in zip(index, cases, strict=True)]
    assert unpermute_array(there, n, key).tolist() == index.tolist()
    size, one, _ = cases[0]
    for all_of_one in (permute_array, unpermute_array):
        found = all_of_one(index % size, size, one).tolist()
        assert found == all_of_one(index % size, np.full_like(n, size), np.full_like(key, one)).tolist()
    assert (there >= 0).all() and (there < n).all()


def test_very_many_are_each_by_itself() -> None:
    """More than are processed at once, of two kinds, each with its own key."""
    count = 2 * permutation.CHUNK + 100
    n, key = np.resize([2_026, 70_000], count), np.arange(count, dtype=np.uint64)
    index = np.arange(count) % n
    some = range(0, count, 7)
    there = permute_array(index, n, key)[some].tolist()
    assert there == [_permuted(int(index[place]), int(n[place]), place) for place in some]


@pytest.mark.parametrize("divisor", [1, 3, 2**20 + 7, 2**31])
def test_quotients_are_exact(divisor: int) -> None:
    for bits in range(31, 63):
        x = np.array([(2**bits // divisor - step) * divisor - 1 for step in range(100) if 2**bits // divisor > step])
        assert quotient(x, np.array([divisor])).tolist() == (x // divisor).tolist()


def _permuted(index: int, n: int, key: int) -> int:
    """The image of one index, by the definition."""
    if n <= permutation.TABLE_LENGTH:
        return int(np.argsort([mix64((mix64(key) + i) % 2**64) for i in range(n)], kind="stable")[index])
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(index, b)
        for round_ in range(6 if n > 0xFFFF else 12):
            round_key = mix64((key + round_ * 0x9E3779B97F4A7C15) % 2**64) >> 32
            if round_ % 2 == 0:
                left = (left + (_hash32(right ^ round_key) * a >> 32)) % a
            else:
                right = (right + (_hash32(left ^ round_key) * b >> 32)) % b
        index = left * b + right
        if index < n:
            return index


def _hash32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_every_key_its_own_order() -> None:
    for n in (10, 5_000, 100_000):
        orders = {permute_array(np.arange(n), n, key).tobytes() for key in range(200)}
        assert len(orders) == 200


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_small_permutations_are_uniform(n: int) -> None:
    """Where each element goes, and the parity, over many keys."""
    trials = 4000
    rows = np.array([permute_array(np.arange(n), n, hash_ints(key)) for key in range(trials)])
    for place in range(n):
        assert abs(_z(np.bincount(rows[:, place], minlength=n))) < 4.5
    odd = sum(_is_odd(row.tolist()) for row in rows)
    assert abs(odd - trials / 2) < 4.5 * np.sqrt(trials) / 2


def _is_odd(order: list[int]) -> bool:
    return sum(a > b for i, a in enumerate(order) for b in order[i + 1 :]) % 2 == 1


# -- statistics of long permutations: the same for ours, for numpy's, and for variants that must fail ----------------


def _z(counts: np.ndarray) -> float:
    """How many standard deviations a chi-square is off, for counts that should be equal."""
    expected = counts.sum() / len(counts)
    chi2 = float(((counts - expected) ** 2).sum() / expected)
    freedom = len(counts) - 1
    return (chi2 - freedom) / float(np.sqrt(2 * freedom))


def _z_of_gaps(gaps: np.ndarray) -> float:
    """The same, for gaps that should be geometric with probability 1/8; the long ones count as one."""
    expected = len(gaps) / 8 * (7 / 8) ** np.arange(24)
    expected[-1] *= 8
    counts = np.bincount(np.minimum(gaps, 24), minlength=25)[1:]
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return (chi2 - 23) / float(np.sqrt(2 * 23))


def _worst(orders: list[np.ndarray], n: int) -> float:
    """The largest z over places, low digits and bits, differences at several lags, pairs of neighbours, and the gaps
    between those that go to the first eighth."""
    found = []
    for order in orders:
        half = order[: min(len(order), n // 2)]
        if len(half) < n // 4:
            found.append(_z(np.bincount(half * 64 // n, minlength=64)))
        found.append(_z(np.bincount(half % 61, minlength=61)))
        found.append(_z(np.bincount(half[1:] % 8 * 8 + half[:-1] % 8, minlength=64)))
        found.append(_z_of_gaps(np.diff(np.flatnonzero(half < n // 8))))
        found += [_z(np.bincount((order[lag:] - order[:-lag]) % n * 64 // n, minlength=64)) for lag in (1, 2, 64, 1024)]
        found.append(_z(np.bincount(order[:-1] * 16 // n * 16 + order[1:] * 16 // n, minlength=256)))
    return max(found)


@pytest.mark.parametrize("n", [2_000, 30_000, 65_536, 1 << 20, 10**6 + 3, 10**9, 2**62 // 64])
def test_indistinguishable_from_numpy(n: int) -> None:
    index = np.arange(min(n, 1 << 17))
    assert _worst([permute_array(index, n, hash_ints(key)) for key in range(5)], n) < 5
    if n <= 1 << 20:
        rng = np.random.default_rng(0)
        assert _worst([rng.permutation(n)[: 1 << 17] for _ in range(5)], n) < 5


@pytest.mark.parametrize("rounds", [2, 3])
def test_fewer_rounds_would_be_seen(rounds: int) -> None:
    """The statistics have teeth: 2 and 3 rounds fail them (3 rounds at a lag equal to the radix)."""
    n = 1 << 20
    keys, size = np.array([[hash_ints(key)] for key in range(5)], dtype=np.uint64), np.array([n])
    orders = [permutation._permuted(np.arange(1 << 18), size, key, rounds, 1) for key in keys]
    assert _worst(orders, n) > 6


def test_the_gaps_by_themselves_would_tell() -> None:
    """A shuffle in which those of the first eighth avoid each other."""
    order = np.random.default_rng(0).permutation(1 << 16)
    assert abs(_z_of_gaps(np.diff(np.flatnonzero(order < 1 << 13)))) < 4
    first, rest = order[order < 1 << 13], order[order >= 1 << 13].reshape(1 << 13, 7)
    assert _z_of_gaps(np.diff(np.flatnonzero(np.c_[first, rest].ravel() < 1 << 13))) > 100


# -- hashes ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_mixer_twins(values: list[int]) -> None:
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]


def test_hashes_tell_apart() -> None:
    assert len({hash_ints(a, b) for a in range(100) for b in range(100)}) == 10_000
    assert hash_ints(-1) == hash_ints(2**64 - 1)
    assert hash_ints(0) != hash_ints(0, 0)


def test_golden() -> None:
    """Values for ever. If one changes, so must ORDER_VERSION."""
    assert mix64(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from state 0, as published
    assert hash_ints(1, 2, 3) == 0x882D1ACC8D6C3B48
    assert hash_text("energon") == int.from_bytes(hashlib.sha256(b"energon").digest()[:8], "little")
    digests = {n: _digest(permute_array(np.arange(min(n, 5000)), n, 42)) for n in (10, 1024, 1025, 65_536, 10**12)}
    assert digests == {
        10: "b899a7f8b21ab866",
        1024: "3a8380afec8990f3",
        1025: "e35e61bf64470bbe",
        65536: "2bfb47cd5cf46a93",
        1000000000000: "014915a863f4b0ff",
    }
    sizes = [1, 1024, 1025, 65_535, 65_536, 10**12]
    assert rounds_of_each(np.array(sizes)).tolist() == [0, 0, 12, 12, 6, 6]


def _digest(order: np.ndarray) -> str:
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16]
