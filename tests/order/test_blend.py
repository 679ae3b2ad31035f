"""The blend: exact shares at every block end, streams in order, random access."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.order.blend import BLOCK, Blend, integer_shares

weights_lists = st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=12)


def _exact_counts(weights: list[float], positions: int) -> np.ndarray:
    shares = integer_shares(weights).tolist()
    return np.array([share * positions / (1 << 62) for share in shares])


@given(weights=weights_lists, blocks=st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_within_one_sample_at_block_ends(weights: list[float], blocks: list[int]) -> None:
    blend = Blend(weights, key=1)
    for block in blocks:
        counts = blend.counts_before(block)
        assert counts.sum() == block * BLOCK
        if block < 2**20:  # beyond, the float product on the right is too coarse to tell
            assert np.abs(counts - _exact_counts(weights, block * BLOCK)).max() <= 1


@pytest.mark.parametrize("count", [100, 1000, 5000])
def test_many_leaves_over_nine_orders_of_magnitude(count: int) -> None:
    rng = np.random.default_rng(count)
    weights = (10 ** rng.uniform(-9, 0, count)).tolist()
    blend = Blend(weights, key=2)
    for block in [1, 2, 3, *rng.integers(1, 2**20, 10).tolist()]:
        assert np.abs(blend.counts_before(block) - _exact_counts(weights, block * BLOCK)).max() <= 1


def test_one_heavy_leaf_among_many_equal_light_ones() -> None:
    """The case in which rounding each leaf by itself (a divisor method) puts the heavy one off by thousands."""
    weights = [0.5] + [0.5 / 4999] * 4999
    blend = Blend(weights, key=3)
    for block in (1, 5, 17, 1000):
        assert np.abs(blend.counts_before(block) - _exact_counts(weights, block * BLOCK)).max() <= 1


@given(weights=weights_lists, key=st.integers(0, 2**64 - 1), blocks=st.integers(1, 4))
def test_each_stream_is_walked_in_order_without_gap(weights: list[float], key: int, blocks: int) -> None:
    leaf, position = Blend(weights, key).lookup(np.arange(blocks * BLOCK))
    for number in range(len(weights)):
        assert np.array_equal(position[leaf == number], np.arange(np.count_nonzero(leaf == number)))


@given(weights=weights_lists, data=st.data())
def test_random_access(weights: list[float], data: st.DataObject) -> None:
    """Any positions, in any order, by a fresh blend or by a used one: the same."""
    start = data.draw(st.integers(0, 2**50 - 4)) * BLOCK
    wanted = np.array(data.draw(st.lists(st.integers(start, start + 3 * BLOCK), min_size=1, max_size=30)))
    used = Blend(weights, key=4)
    leaf, position = used.lookup(np.arange(start, start + 3 * BLOCK + 1))
    for blend in (used, Blend(weights, key=4)):
        again = blend.lookup(wanted)
        assert again[0].tolist() == leaf[wanted - start].tolist()
        assert again[1].tolist() == position[wanted - start].tolist()


def test_spread_evenly_inside_a_block() -> None:
    """Any stretch of a block has about its share of each leaf: no clumps."""
    leaf, _ = Blend([3, 1], key=5).lookup(np.arange(BLOCK))
    counts = np.cumsum(leaf == 1)
    assert np.abs(counts - np.arange(1, BLOCK + 1) / 4).max() <= 3
    runs = np.diff(np.flatnonzero(np.r_[True, leaf[1:] != leaf[:-1], True]))
    assert len(set(runs.tolist())) > 3  # random, not a fixed pattern


def test_the_key_moves_places_not_counts() -> None:
    one, other = (Blend([2, 1, 1], key).lookup(np.arange(BLOCK))[0] for key in (1, 2))
    assert np.bincount(one).tolist() == np.bincount(other).tolist()
    assert not np.array_equal(one, other)


def test_positions_end_somewhere() -> None:
    with pytest.raises(UsageError, match="end at 2"):
        Blend([1, 2], key=0).lookup(np.array([2**62]))


def test_only_ratios_count() -> None:
    positions = np.arange(2 * BLOCK)
    one, other = Blend([0.75, 0.25], key=6).lookup(positions), Blend([3, 1], key=6).lookup(positions)
    assert np.array_equal(one[0], other[0])


def test_shares_sum_to_the_whole() -> None:
    assert int(integer_shares([0.1, 0.2, 0.7]).sum()) == 1 << 62
    assert int(integer_shares([1e-300, 1.0]).sum()) == 1 << 62
    assert integer_shares([1, 1]).tolist() == [1 << 61, 1 << 61]


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -2], [float("nan")], [1, float("inf")]])
def test_bad_weights_are_named(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="blend") as caught:
        Blend(weights, key=0)
    assert caught.value.fix


def test_golden() -> None:
    """Values for ever. If this changes, so must ORDER_VERSION."""
    leaf, position = Blend([5, 3, 1e-3], key=42).lookup(np.r_[np.arange(9000), 10**15 + np.arange(9000)])
    digest = hashlib.sha256(np.stack([leaf, position]).astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == "9f3fe6b40554402f"
