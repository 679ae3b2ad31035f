"""The blend: exact shares at every block end, streams in order, random access."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.order import block_counts
from energon_lite.order.blend import BLOCK, Blend, EpochBlend, integer_shares
from energon_lite.order.block_counts import BlockCounts, fill

weights_lists = st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=12)


def check_counts(blend: Blend, weights: list[float], block: int) -> None:
    """At the end of a block each leaf has its share, within one sample; in whole numbers, as floats are too coarse."""
    counts, shares = blend.counts_before(block * BLOCK).tolist(), integer_shares(weights).tolist()
    assert sum(counts) == block * BLOCK
    assert all(abs((n << 62) - share * block * BLOCK) <= 1 << 62 for n, share in zip(counts, shares, strict=True))


@given(weights=weights_lists, blocks=st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_within_one_sample_at_block_ends(weights: list[float], blocks: list[int]) -> None:
    blend = Blend(weights, key=1)
    for block in blocks:
        check_counts(blend, weights, block)


@pytest.mark.parametrize("count", [2, 100, 1000, 5000])
def test_many_leaves_over_nine_orders_of_magnitude_and_one_among_light_ones(count: int) -> None:
    """Rounding each leaf by itself (a divisor method) would put one heavy leaf off by thousands."""
    rng = np.random.default_rng(count)
    near = [1, 2, 3, 5, 17, 1000, *rng.integers(1, 2**20, 10).tolist()]
    far = [10**15 // BLOCK, 2**50 - 1, *rng.integers(2**20, 2**50, 4).tolist()]
    for weights in ((10 ** rng.uniform(-9, 0, count)).tolist(), [0.5] + [0.5 / (count - 1)] * (count - 1)):
        blend = Blend(weights, key=2)
        for block in near + far:
            check_counts(blend, weights, block)


@given(weights=weights_lists, key=st.integers(0, 2**64 - 1), blocks=st.integers(1, 4))
def test_each_stream_is_walked_in_order_without_gap(weights: list[float], key: int, blocks: int) -> None:
    leaf, position = Blend(weights, key).lookup(np.arange(blocks * BLOCK))
    for number in range(len(weights)):
        assert np.array_equal(position[leaf == number], np.arange(np.count_nonzero(leaf == number)))


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
    with pytest.raises(UsageError, match="the order ends before this position"):
        Blend([1, 2], key=0).lookup(np.array([2**62]))


def test_shares_sum_to_the_whole_and_only_ratios_count() -> None:
    assert int(integer_shares([0.1, 0.2, 0.7]).sum()) == 1 << 62
    assert int(integer_shares([1e-300, 1.0]).sum()) == 1 << 62
    assert integer_shares([1, 1]).tolist() == integer_shares(np.float32([2, 2])).tolist() == [1 << 61, 1 << 61]
    assert integer_shares([0.75, 0.25]).tolist() == integer_shares([3, 1]).tolist()
    assert integer_shares([6, 3, 1], 4).tolist() == [3, 1, 0], "the first of the largest remainders"


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


# -- epochs with repetitions ----------------------------------------------------------------------------------------

repeated = st.lists(
    st.tuples(st.integers(1, 3000), st.one_of(st.integers(1, 5), st.floats(0.01, 5).map(lambda r: round(r, 3)))),
    min_size=1,
    max_size=6,
)


@given(leaves=repeated, epochs=st.integers(1, 4))
def test_repetitions_are_exact_over_epochs(leaves: list[tuple[int, float]], epochs: int) -> None:
    lengths, repetitions = zip(*leaves, strict=True)
    if sum(length * repetition for length, repetition in leaves) < 1:
        return
    blend = EpochBlend(lengths, repetitions, key=7)
    bounds = [blend.bounds(epoch) for epoch in range(epochs)]
    assert bounds[0][0] == 0
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert blend.ends(0, bounds[-1][1]) == [stop for _, stop in bounds[:-1]]
    leaf, position = blend.lookup(np.arange(bounds[-1][1]))
    for number, (length, repetition) in enumerate(leaves):
        mine = position[leaf == number]
        assert np.array_equal(mine, np.arange(len(mine)))  # in order, without gap
        assert len(mine) == int(epochs * length * Fraction(str(repetition)))


def test_an_epoch_is_mixed_evenly() -> None:
    leaf, _ = EpochBlend([30_000, 10_000, 7], [1, 2, 3], key=1).lookup(np.arange(50_021))
    drift = np.cumsum(leaf == 0) - np.arange(1, 50_022) * 30_000 / 50_021
    assert np.abs(drift).max() < 4
    few = np.flatnonzero(leaf == 2)
    assert len(few) == 21 and few.min() < 8_000 and few.max() > 42_000 and np.diff(few).max() < 6_000


@given(lengths=st.lists(st.integers(1, 2**40), min_size=2, max_size=5), data=st.data())
def test_shares_of_long_epochs(lengths: list[int], data: st.DataObject) -> None:
    whole = sum(lengths)
    block = data.draw(st.integers(0, whole // BLOCK))
    counts = EpochBlend(lengths, [1] * len(lengths), key=9).counts_before(block * BLOCK).tolist()
    assert all(abs(n - Fraction(of * block * BLOCK, whole)) <= 2 for n, of in zip(counts, lengths, strict=True))


@pytest.mark.parametrize(("lengths", "repetitions"), [([10], [0]), ([10], [-1]), ([10], [float("nan")]), ([1], [0.5])])
def test_bad_repetitions_are_named(lengths: list[int], repetitions: list[float]) -> None:
    with pytest.raises(UsageError, match=r"repetitions|samples") as caught:
        EpochBlend(lengths, repetitions, key=0)
    assert caught.value.fix


def test_golden_epochs() -> None:
    """Values for ever. If this changes, so must ORDER_VERSION."""
    blend = EpochBlend([5_000, 3_000, 17], [1.25, 0.3, 2], key=42)
    positions = np.r_[np.arange(9000), blend.bounds(10**9)[0] + np.arange(9000)]
    digest = hashlib.sha256(np.stack(blend.lookup(positions)).astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == "b04b7d51595d2d78"
    halves_differ = EpochBlend([7655, 5733, 4600, 2428, 2771, 369], [1] * 6, key=0)  # 6 blocks
    assert halves_differ.counts_before(4 * BLOCK).tolist() == [5324, 3988, 3199, 1689, 1927, 257]


@pytest.mark.parametrize("kept", [1, 2000, 4000])
def test_a_way_of_which_little_is_kept_leads_to_the_same_blocks(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = integer_shares([1.0 + leaf % 7 for leaf in range(100)])
    blocks = [*range(40), 1 << 45, 3, 1023, 1024, 4096, (1 << 45) + 1, *range(2040, 2060), 0]
    whole = BlockCounts(shares)
    expected = [(one.before.tolist(), one.inside.tolist()) for one in map(whole.block, blocks)]
    monkeypatch.setattr(block_counts, "_KEPT", kept)
    thin = BlockCounts(shares)
    for number, counts in zip(blocks, expected, strict=True):
        found = thin.block(number)
        assert (found.before.tolist(), found.inside.tolist()) == counts
        assert len(thin._path) == len(thin._halves) + 1 <= max(4, kept // 400) + 2


@given(st.data(), st.lists(st.tuples(st.integers(0, 9), st.floats(-3, 3)), min_size=1, max_size=6))
def test_counts_are_filled_within_their_bounds(data: st.DataObject, leaves: list[tuple[int, float]]) -> None:
    most = np.array([bound for bound, _ in leaves])
    counts = np.array([data.draw(st.integers(0, bound)) for bound, _ in leaves])
    length = data.draw(st.integers(0, int(most.sum())))
    lag = np.array([lag for _, lag in leaves])
    due = counts + lag
    fill(counts, lag, most, length)
    assert counts.sum() == length and (counts >= 0).all() and (counts <= most).all() and np.allclose(counts + lag, due)
